"""Which row comes at which position: a pure function of (position, count, seed, epoch), computed for any position."""

from .base import Order as Order
from .base import Positions as Positions
from .custom import as_order as as_order
from .custom import custom as custom
from .custom import indices as indices
from .custom import repeat as repeat
from .draw import sampled as sampled
from .draw import weighted as weighted
from .labels import balanced as balanced
from .labels import bucketed as bucketed
from .labels import grouped as grouped
from .labels import stratified as stratified
from .schedule import mixed as mixed
from .shuffle import blocks as blocks
from .shuffle import blocks_rows as blocks_rows
from .shuffle import sequential as sequential
from .shuffle import shuffled as shuffled
