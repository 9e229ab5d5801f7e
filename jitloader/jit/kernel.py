"""Kernels ready to call: from this process, from disk, or freshly compiled, and the calls that run them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import rng
from .build import compile_function
from .cpus import available_cpus
from .depends import fingerprint, ours
from .kinds import FLOAT, Array, Type
from .store import cache_folder, platform, read, write


class Event(NamedTuple):
    """One kernel made ready: its name, whether it came from "disk" or was "compiled", and the seconds it took."""

    name: str
    origin: str
    seconds: float


compile_events: list[Event] = []


class Call:
    """One thread's arguments of a kernel, ready to run: `set` replaces one, calling runs with the GIL released."""

    __slots__ = ("_args", "_function", "_values", "divide", "kernel", "words")

    def __init__(self, kernel: Kernel, values: Sequence[Any]) -> None:
        self.kernel = kernel
        self.divide: Literal["ignore", "raise"] = "ignore"  # in plain Python: what a float divided by zero does
        self._values: list[Any] = list(values)  # keeps the arrays alive while raw pointers to them are in use
        self._function = kernel._function
        if kernel._function is None:
            return
        self.words = np.zeros(kernel.words, np.int64)
        for i, value in enumerate(values):
            self.set(i, value)
        n = self.words.size
        result, reason = ctypes.c_int64(), ctypes.c_void_p()
        self._values += [result, reason]
        # Numba's own calling convention: where the result goes, where an exception goes, then the array's fields.
        self._args = (
            ctypes.addressof(result),
            ctypes.addressof(reason),
            None,
            None,
            n,
            8,
            self.words.ctypes.data,
            n,
            8,
        )

    def set(self, i: int, value: Any) -> None:
        """Replace argument i by a value of the same type."""
        self._values[i] = value
        if self._function is None:
            return
        at, kind = self.kernel.offsets[i], self.kernel.signature[i]
        if isinstance(kind, Array):
            if value.dtype != self.kernel.dtypes[i] or value.ndim != kind.ndim or not value.flags.c_contiguous:
                raise TypeError(
                    f"argument {i} of {self.kernel.name}: {value.dtype} {value.shape} is not a contiguous {kind}"
                )
            self.words[at] = value.__array_interface__["data"][0]
            self.words[at + 1 : at + 1 + value.ndim] = value.shape
        elif kind == FLOAT:
            self.words[at : at + 1].view(np.float64)[0] = value
        else:
            value = int(value)
            self.words[at] = value if -(1 << 63) <= value < 1 << 63 else rng.i64(value)

    def head(self, *numbers: int) -> None:
        """Replace the first arguments, all integers: quicker than one by one."""
        if self._function is None:
            self._values[: len(numbers)] = numbers
        else:
            self.words[: len(numbers)] = numbers

    @property
    def address(self) -> int:
        """Where the machine code begins, for a kernel that calls this one over `words`."""
        return int(ctypes.cast(self._function, ctypes.c_void_p).value or 0)

    @property
    def plain(self) -> bool:
        """Whether it runs in plain Python."""
        return self._function is None

    def value(self, i: int) -> Any:
        """Give argument i as it was set."""
        return self._values[i]

    def point(self, i: int, array: np.ndarray, address: int) -> None:
        """Let argument i be the 1-D `array`, which lies at `address`; the caller keeps it alive (nothing here refers to it)."""
        if self._function is None:
            self._values[i] = array
        else:
            at = self.kernel.offsets[i]
            self.words[at], self.words[at + 1] = address, array.size

    def __call__(self) -> int:
        """Run, and give the kernel's result; an exception raised inside it comes as a `KernelError`."""
        if self._function is None:
            try:
                with np.errstate(all="ignore", divide=self.divide):
                    return int(self.kernel.function(*self._values[: len(self.kernel.signature)]) or 0)
            except Exception:
                if self.kernel.origin == "plain":
                    raise
                raise KernelError(self.kernel.name, 1) from None
        status = self._function(*self._args)
        if status not in (0, -2):
            raise KernelError(self.kernel.name, status)
        return int(self._values[-2].value)


class KernelError(Exception):
    """A kernel raised: the exception itself stays in machine code, so run that row again in plain Python to see it."""


class Kernel:
    """A compiled function; call it with arrays and numbers of its signature, or `bind` them to call it often."""

    __slots__ = ("_engine", "_function", "dtypes", "function", "name", "offsets", "origin", "signature", "words")

    def __init__(self, function: Callable[..., Any], signature: tuple[Type, ...], name: str) -> None:
        self.function, self.signature, self.name = function, signature, name
        self.dtypes = [np.dtype(kind.dtype) if isinstance(kind, Array) else None for kind in signature]
        self.offsets: list[int] = []
        self.words = 0
        for kind in signature:
            self.offsets.append(self.words)
            self.words += 1 + kind.ndim if isinstance(kind, Array) else 1
        self._function: Any = None
        self._engine: Any = None
        self.origin = "python"

    def bind(self, *values: Any) -> Call:
        """Give a call with these arguments."""
        return Call(self, values)

    def __call__(self, *values: Any) -> int:
        return Call(self, values)()


def plain(function: Callable[..., Any], signature: Sequence[Type]) -> Kernel:
    """Give a function behind the interface of a kernel, run by plain Python; what it raises comes as it is."""
    kernel = Kernel(function, tuple(signature), function.__name__)
    kernel.origin = "plain"
    return kernel


_loaded: dict[str, Kernel] = {}


# Kernels by function, for functions of this package and generated ones: what they refer to does not change under them.
_ready: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, Kernel]] = weakref.WeakKeyDictionary()


_loading = threading.RLock()


_launching = threading.Lock()


def _after_fork() -> None:
    global _loading, _launching, _forked
    _loading, _launching, _forked = threading.RLock(), threading.Lock(), True


_forked = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def disabled() -> bool:
    """Whether NUMBA_DISABLE_JIT asks for plain Python everywhere."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


def load(function: Callable[..., Any], signature: Sequence[Type], *, parallel: bool = False, name: str = "") -> Kernel:
    """Give `function` compiled for `signature`: from this process, else from disk, else freshly compiled.

    The function returns an integer, or nothing, on every path. With `parallel`, `prange` loops in it run in Numba's thread pool: launch
    such a kernel under `launch()`. Raises CompileError where Numba refuses the function.
    """
    signature = tuple(signature)
    kernel = Kernel(function, signature, name or function.__name__)
    if disabled():
        return kernel
    known = _ready.setdefault(function, {}) if ours(function) else {}
    if (signature, parallel) in known:
        return known[signature, parallel]
    key = fingerprint(function, signature, parallel, platform())
    with _loading:
        if key in _loaded:
            known[signature, parallel] = _loaded[key]
            return _loaded[key]
        start = time.perf_counter()
        folder = cache_folder()
        file = os.path.join(folder, f"{key[:40]}.kernel") if folder else None
        found = read(file) if file else None
        entry = _link(*found) if found else None
        kernel.origin = "disk"
        if entry is None:
            meta, code = compile_function(function, signature, parallel)
            if file:
                write(file, meta, code)
            entry = _link(meta, code)
            kernel.origin = "compiled"
        assert entry is not None
        kernel._engine, kernel._function = entry
        _loaded[key] = known[signature, parallel] = kernel
        compile_events.append(Event(kernel.name, kernel.origin, time.perf_counter() - start))
    return kernel


def whereabouts(function: Callable[..., Any], signature: Sequence[Type]) -> str:
    """Say where a function's kernel is: in this process (and how it came there), on disk, or nowhere yet."""
    if disabled():
        return "none: plain Python, by NUMBA_DISABLE_JIT"
    key = fingerprint(function, tuple(signature), False, platform())
    if key in _loaded:
        return f"ready ({'compiled by this process' if _loaded[key].origin == 'compiled' else 'from disk'})"
    folder = cache_folder()
    return "on disk" if folder and os.path.exists(os.path.join(folder, f"{key[:40]}.kernel")) else "not compiled yet"


def _link(meta: dict[str, Any], code: bytes) -> tuple[Any, Any] | None:
    """Link object code into this process; None where it needs a symbol that cannot be found (LLVM would abort)."""
    import llvmlite.binding as llvm

    _prepare_llvm()
    _find_in_c(meta["externals"])
    if meta["parallel"] or any(llvm.address_of_symbol(s) is None for s in meta["externals"]):
        _prepare_numba(meta["parallel"])
        if any(llvm.address_of_symbol(s) is None for s in meta["externals"]):
            return None
    module = llvm.parse_assembly("")
    module.triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, pointer, pointer, word, word, pointer, word, word)
    return engine, prototype(engine.get_function_address(meta["symbol"]))


def _find_in_c(symbols: list[str]) -> None:
    """Make functions of the C library (memcpy, exp) known to LLVM, which without Numba sees none of them."""
    import llvmlite.binding as llvm

    try:
        process = ctypes.CDLL(None)
    except (OSError, TypeError):  # a platform without a table of the whole process: Numba knows the way
        return
    for symbol in symbols:
        if llvm.address_of_symbol(symbol) is None and hasattr(process, symbol):
            llvm.add_symbol(symbol, ctypes.cast(getattr(process, symbol), ctypes.c_void_p).value)


def _prepare_llvm() -> None:
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):  # newer versions do this by themselves and say so by raising
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if llvm.address_of_symbol("NRT_MemInfo_call_dtor") is None:
        # Named by the code that releases an array's owner; our arrays have none, so it is never reached.
        llvm.add_symbol("NRT_MemInfo_call_dtor", ctypes.cast(_no_owner, ctypes.c_void_p).value)


def _release_nothing(_: int) -> None:
    return None


_no_owner = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release_nothing)


def _prepare_numba(parallel: bool) -> None:
    """Make the symbols of Numba's runtime, and of its thread pool, known to LLVM."""
    from numba.core import registry
    from numba.core.runtime import rtsys

    rtsys.initialize(registry.cpu_target.target_context)
    if parallel:
        from numba.np.ufunc import parallel as pool

        pool._launch_threads()


@contextlib.contextmanager
def launch():  # type: ignore[no-untyped-def]
    """Hold the process-wide lock under which parallel kernels run: Numba's workqueue aborts on two launches at once."""
    with _launching:
        yield


def parallel_safe() -> bool:
    """Whether a `prange` kernel may be launched now: not in a forked child, whose OpenMP runtime would kill it, nor in
    plain Python, where it would only hide what is raised."""
    return not _forked and not disabled() and available_cpus() > 1


def loop_in_parallel() -> Any:
    """Give the `prange` of Numba."""
    from numba import prange

    return prange
