"""What is done to a sample: the built-in stages, and the decorators that make a stage of a plain function."""

from .index import center_crop as center_crop
from .index import channels_first as channels_first
from .index import channels_last as channels_last
from .index import flatten as flatten
from .index import random_crop as random_crop
from .index import random_flip as random_flip
from .index import transpose as transpose
from .rows import pad_rows as pad_rows
from .rows import pad_to_longest as pad_to_longest
from .rows import random_cut as random_cut
from .rows import standardize_by as standardize_by
from .rows import truncate as truncate
from .sample import one_hot as one_hot
from .stage import Bound as Bound
from .stage import Misfit as Misfit
from .stage import Stage as Stage
from .stage import Step as Step
from .stage import elementwise as elementwise
from .stage import stage as stage
from .value import cast as cast
from .value import clip as clip
from .value import lookup as lookup
from .value import normalize as normalize
from .value import scale as scale
