"""A Numba-JIT in-memory dataloader: mapped arrays in, fused batches out, no worker processes."""

from .dataset import Dataset as Dataset
from .errors import DataError as DataError
from .errors import PipelineError as PipelineError
from .errors import StateError as StateError
from .jit import clear_cache as clear_cache
from .jit import compile_events as compile_events
from .compose import Ragged as Ragged
from .loader import Loader as Loader
from .orders import sampled as sampled
from .orders import sequential as sequential
from .orders import shuffled as shuffled
from .ragged import ragged as ragged
from .rng import bernoulli as bernoulli
from .rng import normal as normal
from .rng import permutation as permutation
from .rng import randint as randint
from .rng import uniform as uniform
from .samples import records as records
from .spec import Spec as Spec
from .stages import Stage as Stage
from .stages import cast as cast
from .stages import center_crop as center_crop
from .stages import channels_first as channels_first
from .stages import channels_last as channels_last
from .stages import clip as clip
from .stages import elementwise as elementwise
from .stages import flatten as flatten
from .stages import lookup as lookup
from .stages import normalize as normalize
from .stages import one_hot as one_hot
from .stages import pad_rows as pad_rows
from .stages import pad_to_longest as pad_to_longest
from .stages import random_crop as random_crop
from .stages import random_cut as random_cut
from .stages import random_flip as random_flip
from .stages import scale as scale
from .stages import stage as stage
from .stages import transpose as transpose
from .stages import truncate as truncate
from .windows import windows as windows

__version__ = "0.1.0"
