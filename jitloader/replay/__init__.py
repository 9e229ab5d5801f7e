"""Replay: a ring of rows that is written while others read it, and draws by priority."""

from .ring import Ring as Ring
from .ring import Snapshot as Snapshot
from .ring import fitted as fitted
from .ring import row_spec as row_spec
from .tree import Prioritized as Prioritized
