"""A Numba-JIT in-memory dataloader: mapped arrays in, fused batches out, no worker processes."""

import importlib
import types
import typing

from .compose import Ragged as Ragged
from .dataset import Dataset as Dataset
from .dataset import open as open
from .errors import DataError as DataError
from .errors import PipelineError as PipelineError
from .errors import StateError as StateError
from .jit import clear_cache as clear_cache
from .jit import compile_events as compile_events
from .live import Live as Live
from .live import Replay as Replay
from .live import live as live
from .loader import Loader as Loader
from .mixing import Mix as Mix
from .mixing import mix as mix
from .orders import Order as Order
from .orders import Positions as Positions
from .orders import balanced as balanced
from .orders import blocks as blocks
from .orders import bucketed as bucketed
from .orders import custom as custom
from .orders import grouped as grouped
from .orders import indices as indices
from .orders import mixed as mixed
from .orders import repeat as repeat
from .orders import sampled as sampled
from .orders import sequential as sequential
from .orders import shuffled as shuffled
from .orders import stratified as stratified
from .orders import weighted as weighted
from .ragged import ragged as ragged
from .replay import Prioritized as Prioritized
from .replay import Ring as Ring
from .rng import bernoulli as bernoulli
from .rng import normal as normal
from .rng import permutation as permutation
from .rng import randint as randint
from .rng import uniform as uniform
from .samples import records as records
from .spec import Spec as Spec
from .stages import Stage as Stage
from .stages import batch_stage as batch_stage
from .stages import brightness as brightness
from .stages import cast as cast
from .stages import center_crop as center_crop
from .stages import channels_first as channels_first
from .stages import channels_last as channels_last
from .stages import clip as clip
from .stages import contrast as contrast
from .stages import cutmix as cutmix
from .stages import elementwise as elementwise
from .stages import fill_nan as fill_nan
from .stages import flatten as flatten
from .stages import gaussian_noise as gaussian_noise
from .stages import jitter as jitter
from .stages import log1p as log1p
from .stages import lookup as lookup
from .stages import mixup as mixup
from .stages import normalize as normalize
from .stages import one_hot as one_hot
from .stages import pad as pad
from .stages import pad_rows as pad_rows
from .stages import pad_to_longest as pad_to_longest
from .stages import random_apply as random_apply
from .stages import random_choice as random_choice
from .stages import random_crop as random_crop
from .stages import random_cut as random_cut
from .stages import random_erasing as random_erasing
from .stages import random_flip as random_flip
from .stages import random_resized_crop as random_resized_crop
from .stages import random_shift as random_shift
from .stages import random_vertical_flip as random_vertical_flip
from .stages import resize as resize
from .stages import rotate90 as rotate90
from .stages import scale as scale
from .stages import stage as stage
from .stages import standardize_by as standardize_by
from .stages import standardize_sample as standardize_sample
from .stages import time_mask as time_mask
from .stages import transpose as transpose
from .stages import truncate as truncate
from .transitions import episodes as episodes
from .transitions import transitions as transitions
from .windows import sequences as sequences
from .windows import windows as windows

if typing.TYPE_CHECKING:
    from .packing import Packs as Packs
    from .packing import pack as pack
    from .packs import packed as packed
    from .pictures import show as show
    from .quality import Quality as Quality
    from .writing import convert as convert
    from .writing import write as write

# What not every program needs is imported when it is first asked for.
_LATER = {
    "Packs": "packing",
    "Quality": "quality",
    "convert": "writing",
    "pack": "packing",
    "packed": "packs",
    "show": "pictures",
    "write": "writing",
}
prioritized = Prioritized
ring = Ring
__version__ = "0.1.0"


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module 'jitloader' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    """Give the public names, without the rooms they come from; doors show once they are imported."""
    doors = "torch", "jax", "ray"
    found = (name for name, value in globals().items() if not isinstance(value, types.ModuleType) or name in doors)
    return sorted({*found, *_LATER})


__all__ = [name for name in __dir__() if not name.startswith("_")]
