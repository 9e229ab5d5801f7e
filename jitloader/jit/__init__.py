"""Compile plain functions, keep the machine code on disk, and call it without the GIL: the only room that knows Numba.

A kernel is a plain Python function over NumPy arrays and numbers. `load(function, signature)` gives it compiled, as a
`Kernel` behind one C entry point that takes a single array of 64-bit words (pointers, lengths, numbers). The object
code is kept in the cache folder under a hash of everything it depends on: the function's bytecode, constants,
closures and the globals it names, recursively; the signature; the versions of Python, NumPy, Numba and llvmlite; the
processor. A warm process links that file through llvmlite (3 ms) and never imports Numba (0.25 s, and 0.2 to 0.4 s
more for its registries). Entry points are called through ctypes, so no thread that runs one holds the GIL.
"""

from .build import APART as APART
from .cpus import available_cpus as available_cpus
from .cpus import quota as quota
from .depends import GENERATED as GENERATED
from .depends import captured as captured
from .depends import codes as codes
from .depends import fingerprint as fingerprint
from .depends import helpers as helpers
from .depends import plain_function as plain_function
from .infer import infer as infer
from .kernel import Call as Call
from .kernel import Event as Event
from .kernel import Kernel as Kernel
from .kernel import KernelError as KernelError
from .kernel import compile_events as compile_events
from .kernel import disabled as disabled
from .kernel import launch as launch
from .kernel import load as load
from .kernel import loop_in_parallel as loop_in_parallel
from .kernel import parallel_safe as parallel_safe
from .kernel import plain as plain
from .kernel import whereabouts as whereabouts
from .kinds import FLOAT as FLOAT
from .kinds import INT as INT
from .kinds import Array as Array
from .kinds import Type as Type
from .kinds import typeof as typeof
from .refuse import READ_ONLY as READ_ONLY
from .refuse import CompileError as CompileError
from .refuse import Refused as Refused
from .refuse import outside as outside
from .refuse import refuse as refuse
from .refuse import suspends as suspends
from .store import cache_folder as cache_folder
from .store import clear_cache as clear_cache
from .words import ROOM as ROOM
from .words import array_at as array_at
from .words import as_bytes as as_bytes
from .words import atomic_add as atomic_add
from .words import atomic_get as atomic_get
from .words import atomic_set as atomic_set
from .words import atomic_swap as atomic_swap
from .words import bits_of as bits_of
from .words import copy_items as copy_items
from .words import find_rows as find_rows
from .words import flat as flat
from .words import float32_of as float32_of
from .words import float64_of as float64_of
from .words import nanoseconds as nanoseconds
from .words import prefetch as prefetch
from .words import room as room
from .words import run_kernel as run_kernel
from .words import shaped as shaped
