"""Compile plain functions, keep the machine code on disk, and call it without the GIL: the only room that knows Numba.

A kernel is a plain Python function over NumPy arrays and numbers. `load(function, signature)` gives it compiled, as a
`Kernel` behind one C entry point that takes a single array of 64-bit words (pointers, lengths, numbers). The object
code is kept in the cache folder under a hash of everything it depends on: the function's bytecode, constants,
closures and the globals it names, recursively; the signature; the versions of Python, NumPy, Numba and llvmlite; the
processor. A warm process links that file through llvmlite (3 ms) and never imports Numba (0.25 s, and 0.2 to 0.4 s
more for its registries). Entry points are called through ctypes, so no thread that runs one holds the GIL.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dis
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import struct
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import rng
from .errors import PipelineError

FORMAT = 1  # of the cache files
MAGIC = b"jitloader-kernel\n"
INT = "int64"
FLOAT = "float64"


class Array(NamedTuple):
    """The type of an array argument: C-contiguous, of this dtype and number of dimensions."""

    dtype: str
    ndim: int


Type = str | Array  # INT, FLOAT, or an Array


class CompileError(PipelineError):
    """A function could not be compiled: `what` is Numba's reason in a line, `where` the user's file and line."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what + (f" [{where}]" if where else ""))
        self.what, self.where = what, where


class Refused(CompileError):
    """A function holds what no kernel may, whatever the types: it would hang, lie, or not end."""


class Event(NamedTuple):
    """One kernel made ready: its name, whether it came from "disk" or was "compiled", and the seconds it took."""

    name: str
    origin: str
    seconds: float


compile_events: list[Event] = []


def typeof(value: Any) -> Type:
    """Give the kernel type of an argument: int64 for bools and integers, float64 for floats, Array for arrays."""
    if isinstance(value, np.ndarray):
        return Array(value.dtype.name, value.ndim)
    return FLOAT if isinstance(value, (float, np.floating)) else INT


# ---------------------------------------------------------------------------------------------------------------------
# What a function depends on


def helpers(function: Callable[..., Any]) -> list[types.FunctionType]:
    """List the plain functions that `function` calls by global name, closure or module attribute, and those they call."""
    found: dict[int, types.FunctionType] = {}
    todo = [function]
    while todo:
        for value in _names(_plain(todo.pop())).values():
            inner = _plain(value)
            if isinstance(inner, types.FunctionType) and id(inner) not in found:
                found[id(inner)] = inner
                todo.append(inner)
    return list(found.values())


def _plain(value: Any) -> Any:
    return getattr(value, "py_func", value)  # a Numba dispatcher knows its Python function


def _foreign(module: types.ModuleType) -> bool:
    """Whether a module's functions are known to Numba by themselves."""
    return module.__name__.partition(".")[0] in ("numpy", "math", "numba", "builtins", "operator", "cmath", "random")


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(c for const in code.co_consts if isinstance(const, types.CodeType) for c in _codes(const))]


def _names(function: Any) -> dict[str, Any]:
    """Give what the global names, module attributes and closure cells of a function stand for now."""
    if not isinstance(function, types.FunctionType):
        return {}
    found: dict[str, Any] = {}
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                found[name] = function.__globals__[name]
    modules = [m for m in found.values() if isinstance(m, types.ModuleType) and not _foreign(m)]
    for module in modules:
        for code in _codes(function.__code__):
            for name in code.co_names:
                if hasattr(module, name):
                    found[f"{module.__name__}.{name}"] = getattr(module, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    return found


def fingerprint(*values: Any) -> str:
    """Hash functions (with all they refer to), arrays and plain values: equal only where they compute alike."""
    digest = hashlib.sha256()
    _feed(digest, values, set())
    return digest.hexdigest()


def _feed(digest: Any, value: Any, seen: set[int]) -> None:
    value = _plain(value)
    digest.update(type(value).__name__.encode())
    if isinstance(value, types.FunctionType):
        if id(value) in seen:
            digest.update(value.__qualname__.encode())
            return
        seen.add(id(value))
        for code in _codes(value.__code__):
            digest.update(code.co_code)
            digest.update(repr(code.co_names + code.co_varnames + code.co_freevars).encode())
            _feed(digest, [c for c in code.co_consts if not isinstance(c, types.CodeType)][_docs(code) :], seen)
        _feed(digest, value.__defaults__, seen)
        _feed(digest, _names(value), seen)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    elif isinstance(value, types.ModuleType):
        digest.update(value.__name__.encode())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            _feed(digest, key, seen)
            _feed(digest, value[key], seen)
    elif isinstance(value, (tuple, list)):
        digest.update(b"%d" % len(value))
        for item in value:
            _feed(digest, item, seen)
    elif isinstance(value, (set, frozenset)):
        _feed(digest, sorted(value, key=repr), seen)
    elif isinstance(value, type) or callable(value):
        digest.update(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}".encode())
    else:
        digest.update(repr(value).encode())


def _docs(code: types.CodeType) -> int:
    """Give 1 where the first constant is a docstring, which changes nothing that is computed."""
    consts = code.co_consts
    if not consts or not isinstance(consts[0], str):
        return 0
    used = any(i.opname.startswith("LOAD_CONST") and i.argval is consts[0] for i in dis.get_instructions(code))
    return 0 if used else 1


# ---------------------------------------------------------------------------------------------------------------------
# The cache folder


def cache_folder() -> Path | None:
    """Give the folder for compiled kernels, made private to the user, or None where no folder can be had.

    The first that can be written: `JITLOADER_CACHE_DIR`, `NUMBA_CACHE_DIR`, the user's cache folder, a temporary one.
    """
    uid = os.getuid() if hasattr(os, "getuid") else ""
    named = os.environ.get("JITLOADER_CACHE_DIR")
    choices = [named] if named else []
    if os.environ.get("NUMBA_CACHE_DIR"):
        choices.append(os.path.join(os.environ["NUMBA_CACHE_DIR"], "jitloader"))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    choices += [os.path.join(base, "jitloader"), os.path.join(tempfile.gettempdir(), f"jitloader-{uid}")]
    for choice in choices:
        if not os.path.isabs(choice) and choice != named:
            continue  # "~" stayed as it was: no home
        if _private(Path(choice)):
            return Path(choice)
    return None


_probed: dict[Path, bool] = {}


def _private(folder: Path) -> bool:
    """Whether a folder can be written by this user and by nobody else: machine code is loaded from it."""
    if folder not in _probed:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            safe = os.name == "nt" or not status.st_mode & 0o022
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
            _probed[folder] = ours and safe
        except OSError:
            _probed[folder] = False
    return _probed[folder]


def clear_cache() -> int:
    """Remove all compiled kernels and remembered types from the cache folder and give their number."""
    folder = cache_folder()
    files = [*folder.glob("*.kernel"), *folder.glob("*.type")] if folder else []
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
    return len(files)


def _write(file: Path, meta: dict[str, Any], payload: bytes) -> None:
    """Write a cache file whole or not at all; a full disk costs the cache, not the run."""
    head = json.dumps(meta).encode()
    body = struct.pack("<I", len(head)) + head + payload
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
    except OSError:
        pass


def _read(file: Path) -> tuple[dict[str, Any], bytes] | None:
    """Read a cache file, or give None where it is missing, cut or altered."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + 32
    if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(raw[start:]).digest() != raw[len(MAGIC) : start]:
        return None
    (size,) = struct.unpack_from("<I", raw, start)
    return json.loads(raw[start + 4 : start + 4 + size]), raw[start + 4 + size :]


def _platform() -> str:
    """Name all that compiled code depends on besides the function."""
    global _platform_text
    if not _platform_text:
        import llvmlite.binding as llvm

        packages = [f"{p}={importlib.metadata.version(p)}" for p in ("numba", "llvmlite", "numpy")]
        cpu = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), llvm.get_process_triple()]
        _platform_text = "|".join([str(FORMAT), sys.version, *packages, *cpu])
    return _platform_text


_platform_text = ""


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


class Call:
    """One thread's arguments of a kernel, ready to run: `set` replaces one, calling runs with the GIL released."""

    __slots__ = ("_args", "_function", "_values", "kernel", "words")

    def __init__(self, kernel: Kernel, values: Sequence[Any]) -> None:
        self.kernel = kernel
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
                raise TypeError(f"argument {i} of {self.kernel.name}: {value.dtype} {value.shape} is not a contiguous {kind}")
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
            with np.errstate(all="ignore"):
                return int(self.kernel.function(*self._values[: len(self.kernel.signature)]) or 0)
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
    """Give a function behind the interface of a kernel, run by plain Python."""
    return Kernel(function, tuple(signature), function.__name__)


GENERATED = "<jitloader kernel>"  # the file name of generated functions
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
    known = _ready.setdefault(function, {}) if _ours(function) else {}
    if (signature, parallel) in known:
        return known[signature, parallel]
    key = fingerprint(function, signature, parallel, _platform())
    with _loading:
        if key in _loaded:
            known[signature, parallel] = _loaded[key]
            return _loaded[key]
        start = time.perf_counter()
        folder = cache_folder()
        file = folder / f"{key[:40]}.kernel" if folder else None
        found = _read(file) if file else None
        entry = _link(*found) if found else None
        kernel.origin = "disk"
        if entry is None:
            meta, code = _compile(function, signature, parallel)
            if file:
                _write(file, meta, code)
            entry = _link(meta, code)
            kernel.origin = "compiled"
        assert entry is not None
        kernel._engine, kernel._function = entry
        _loaded[key] = known[signature, parallel] = kernel
        compile_events.append(Event(kernel.name, kernel.origin, time.perf_counter() - start))
    return kernel


def _link(meta: dict[str, Any], code: bytes) -> tuple[Any, Any] | None:
    """Link object code into this process; None where it needs a symbol that cannot be found (LLVM would abort)."""
    import llvmlite.binding as llvm

    _prepare_llvm()
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


def _undefined(code: bytes) -> list[str]:
    """List the symbols that an ELF object needs from elsewhere (an empty list for other formats)."""
    if code[:6] != b"\x7fELF\x02\x01":
        return ["NRT_Allocate_External"]  # another platform: let Numba register all it has first
    (offset,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", code, offset + i * size) for i in range(count)]
    names = []
    for kind in (s for s in sections if s[1] == 2):  # SHT_SYMTAB
        strings = sections[kind[6]]
        for at in range(kind[4] + 24, kind[4] + kind[5], 24):
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0 and name:
                start = strings[4] + name
                names.append(code[start : code.index(b"\0", start)].decode())
    return names


def _compile(function: Callable[..., Any], signature: tuple[Type, ...], parallel: bool) -> tuple[dict[str, Any], bytes]:
    """Compile a function behind an entry point over words, and give its description and object code."""
    from numba.core import compiler, registry

    nt = _types()

    _register(function, parallel)
    intrinsics = _intrinsics()
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.nrt = flags.release_gil = True
    flags.enable_looplift = flags.enable_pyobject = flags.force_pyobject = False
    flags.error_model = "numpy"
    target = registry.cpu_target
    lines, names, at = [], [], 0
    scope: dict[str, Any] = {"function": function, **intrinsics}
    for i, kind in enumerate(signature):
        names.append(f"a{i}")
        if isinstance(kind, Array):
            shape = "".join(f"words[{at + 1 + k}]," for k in range(kind.ndim))
            scope[f"t{i}"] = _numba_type(kind.dtype)
            lines.append(f"a{i} = carray(pointer(words[{at}], t{i}), ({shape}))")
            at += 1 + kind.ndim
        else:
            lines.append(f"a{i} = {'real' if kind == FLOAT else ''}(words[{at}])")
            at += 1
    body = [*lines, f"result = function({', '.join(names)})"]
    text = "def entry(words):\n    " + "\n    ".join(body) + "\n    return word(result)"
    exec(compile(text, GENERATED, "exec"), scope)
    try:
        with _apart():
            result = compiler.compile_extra(
                target.typing_context,
                target.target_context,
                scope["entry"],
                (nt.Array(nt.int64, 1, "C"),),
                nt.int64,
                flags,
                {},
            )
    except Exception as error:  # Numba's own have no common base
        what, place = _reason(error)
        raise CompileError(what, place or _users(function)[1]) from None
    code = result.library._get_compiled_object()
    externals = _undefined(code)
    for symbol, reason in REFUSED.items():
        if symbol in externals and not parallel:  # a parallel loop asks for the GIL itself, and holds no user code
            name, place = _users(function)
            raise CompileError(f"{name}: {reason}", place)
    return {"symbol": result.fndesc.llvm_func_name, "externals": externals, "parallel": parallel}, code


PYTHON = "a kernel runs without Python: print and other Python calls cannot run in it"
RANDOM = "{} in a kernel would make batches irreproducible: draws must come from jl.uniform(key, k) and its like"
BLAS = "np.dot, np.linalg and @ run through Python, which no kernel can: write the loops"
# What would hang or lie inside a kernel that runs without the GIL, by the symbol that its object code asks for.
REFUSED = {
    "numba_gil_ensure": PYTHON,
    "numba_get_np_random_state": RANDOM.format("np.random"),
    "numba_get_py_random_state": RANDOM.format("random"),
}


def refuse(function: Callable[..., Any]) -> None:
    """Raise Refused, with the user's own file and line, for a function that prints, draws by a hidden state or recurses."""
    for user in _reached(_plain(function)):
        code = user.__code__
        for name, value, line in _loads(user):
            reason = _hidden(value)
            if isinstance(value, (list, dict, set)):
                reason = f"{name!r} is a {type(value).__name__}: give a tuple or an array"
            if reason:
                raise Refused(f"{user.__name__}: {reason}", f"{code.co_filename} line {line}")
        if any(user in _reached(_plain(value)) for _, value, _ in _loads(user)):
            raise Refused(f"{user.__name__}: a kernel cannot call itself", f"{code.co_filename} line {code.co_firstlineno}")


def _reached(function: Any) -> list[types.FunctionType]:
    """List a function of the user's and those of the user's that it calls, and so on."""
    found: list[types.FunctionType] = []
    todo = [function]
    while todo:
        user = todo.pop()
        if isinstance(user, types.FunctionType) and user not in found and not _ours(user):
            found.append(user)
            todo += [_plain(value) for _, value, _ in _loads(user)]
    return found


def _loads(function: types.FunctionType) -> Iterator[tuple[str, Any, int]]:
    """Give what a function loads by global name, closure or module attribute (np.matmul for @), its name, and the line.

    Exact, where `helpers` takes any attribute for a global of its name: that may only cost a compilation.
    """
    names = {**vars(builtins), **function.__globals__}
    for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            names[cell_name] = cell.cell_contents
    for code in _codes(function.__code__):
        line, value = code.co_firstlineno, None
        lines = {offset: number for offset, number in dis.findlinestarts(code) if number}
        for instruction in dis.get_instructions(code):
            line, name = lines.get(instruction.offset, line), instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                value = names.get(name)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
                value = getattr(value, name, None)
            elif instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr in ("@", "@="):
                value = np.matmul
            else:
                value = None
            if value is not None:
                yield str(name), value, line


def _hidden(value: Any) -> str:
    """Say why a kernel may not use a value, "" where it may."""
    if value is print or value is input:
        return PYTHON
    if any(value is function for function in (np.dot, np.vdot, np.matmul, np.linalg)):
        return BLAS
    name = value.__name__ if isinstance(value, types.ModuleType) else type(getattr(value, "__self__", value)).__module__
    if name == "numpy.random" or name.startswith("numpy.random."):
        return RANDOM.format("np.random")
    return RANDOM.format("random") if name == "random" else ""


def _users(function: Callable[..., Any]) -> tuple[str, str]:
    """Give name, and file and line, of the first function below that is not of this package."""
    every: list[Any] = [*helpers(function), function]
    for helper in every:
        if not _ours(helper):
            return helper.__name__, f"{helper.__code__.co_filename} line {helper.__code__.co_firstlineno}"
    return function.__name__, ""


def _ours(function: Any) -> bool:
    """Whether a function is of this package, or generated by it."""
    name = _plain(function).__code__.co_filename
    return bool(name == GENERATED or name.startswith(os.path.dirname(__file__) + os.sep))


APART = "fill_apart"  # in the name of a function whose array arguments never overlap where one is written


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Tell LLVM that the arrays of a function named so do not overlap: without that it checks each short loop, or does
    not vectorise it. Numba has the flag, but no option for functions called from others."""
    from numba.core.callconv import CPUCallConv

    before = CPUCallConv.decorate_function

    def decorate(self: Any, fn: Any, args: Any, types_: Any, noalias: bool = False) -> Any:
        return before(self, fn, args, types_, noalias=noalias or APART in fn.name)

    CPUCallConv.decorate_function = decorate
    try:
        yield
    finally:
        CPUCallConv.decorate_function = before


def _types() -> Any:
    """Give Numba's types, most of which it makes as it is imported."""
    from numba.core import types as numba_types

    return numba_types


def _numba_type(dtype: str) -> Any:
    from numba import from_dtype

    return from_dtype(np.dtype(dtype))


_registered: dict[int, Any] = {}


def _register(function: Callable[..., Any], parallel: bool = False) -> None:
    """Let Numba call the plain functions that a kernel refers to; `parallel` is said of the function itself."""
    from numba.extending import register_jitable

    _intrinsics()
    for helper in [*helpers(function), _plain(function)]:
        if id(helper) not in _registered and helper not in (rng.u64, rng.i64):
            # A user's loop may leave its array: that must be an error of the row, never other rows' memory.
            options: dict[str, Any] = {"boundscheck": not _ours(helper)}
            if parallel and helper is _plain(function):
                options["parallel"] = True
            register_jitable(error_model="numpy", **options)(helper)
            _registered[id(helper)] = helper


_tools: dict[str, Any] = {}


def _intrinsics() -> dict[str, Any]:
    """Make the few things that Python cannot say to Numba: pointers, bit casts, 64-bit casts, prefetch."""
    if _tools:
        return _tools
    from llvmlite import ir
    from numba import carray
    from numba.extending import intrinsic, overload

    nt = _types()

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def pointer(context, address, dtype):  # type: ignore[no-untyped-def]
        result = nt.CPointer(dtype.dtype if hasattr(dtype, "dtype") else dtype.instance_type)

        def lower(target, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], target.get_value_type(result))

        return result(address, dtype), lower

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def real(context, bits):  # type: ignore[no-untyped-def]
        return nt.float64(nt.int64), lambda target, builder, signature, args: builder.bitcast(args[0], ir.DoubleType())

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def short(context, bits):  # type: ignore[no-untyped-def]
        return nt.float32(nt.uint32), lambda target, builder, signature, args: builder.bitcast(args[0], ir.FloatType())

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def prefetch_item(context, array, index):  # type: ignore[no-untyped-def]
        def lower(target, builder, signature, args):  # type: ignore[no-untyped-def]
            data = target.make_array(signature.args[0])(target, builder, args[0]).data
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            place = builder.bitcast(builder.gep(data, [args[1]]), byte)
            builder.call(function, [place, *(ir.Constant(number, n) for n in (0, 3, 1))])
            return target.get_dummy_value()

        return nt.void(array, nt.int64), lower

    @overload(rng.u64)  # type: ignore[untyped-decorator, unused-ignore]
    def u64(x):  # type: ignore[no-untyped-def]
        return lambda x: np.uint64(x)

    @overload(rng.i64)  # type: ignore[untyped-decorator, unused-ignore]
    def i64(x):  # type: ignore[no-untyped-def]
        return lambda x: np.int64(x)

    @overload(prefetch)  # type: ignore[untyped-decorator, unused-ignore]
    def touch(array, index):  # type: ignore[no-untyped-def]
        return lambda array, index: prefetch_item(array, index)

    @overload(_word)  # type: ignore[untyped-decorator, unused-ignore]
    def word(x):  # type: ignore[no-untyped-def]
        if isinstance(x, nt.NoneType):
            return lambda x: 0
        return lambda x: np.int64(x)

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def move(context, target, at, source, start, count):  # type: ignore[no-untyped-def]
        def lower(backend, builder, signature, args):  # type: ignore[no-untyped-def]
            to, source = (backend.make_array(signature.args[k])(backend, builder, args[k]).data for k in (0, 2))
            size = backend.get_abi_sizeof(backend.get_data_type(signature.args[0].dtype))
            length = builder.mul(args[4], ir.Constant(ir.IntType(64), size))
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, byte, ir.IntType(64), ir.IntType(1)])
            function = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)], kind)
            ends = (builder.bitcast(builder.gep(p, [i]), byte) for p, i in ((to, args[1]), (source, args[3])))
            builder.call(function, [*ends, length, ir.Constant(ir.IntType(1), 0)])
            return backend.get_dummy_value()

        return nt.void(target, nt.int64, source, nt.int64, nt.int64), lower

    @overload(copy_items)  # type: ignore[untyped-decorator, unused-ignore]
    def copying(target, at, source, start, count):  # type: ignore[no-untyped-def]
        return lambda target, at, source, start, count: move(target, at, source, start, count)

    @overload(array_at)  # type: ignore[untyped-decorator, unused-ignore]
    def at(address, size, like):  # type: ignore[no-untyped-def]
        item = like.dtype
        return lambda address, size, like: carray(pointer(address, item), (size,))

    @overload(float64_of)  # type: ignore[untyped-decorator, unused-ignore]
    def double(bits):  # type: ignore[no-untyped-def]
        return lambda bits: real(np.int64(bits))

    @overload(float32_of)  # type: ignore[untyped-decorator, unused-ignore]
    def single(bits):  # type: ignore[no-untyped-def]
        return lambda bits: short(np.uint32(bits))

    _tools.update(pointer=pointer, real=real, carray=carray, word=_word)
    return _tools


def _word(x: Any) -> int:
    return int(x or 0)


def prefetch(array: np.ndarray, index: int) -> None:
    """Ask the processor to bring `array[index]` into its cache; in plain Python, nothing."""


def copy_items(target: np.ndarray, at: int, source: np.ndarray, start: int, count: int) -> None:
    """Copy `count` items of one dtype between flat arrays that do not overlap; a constant count becomes plain moves."""
    target[at : at + count] = source[start : start + count]


def array_at(address: int, size: int, like: np.ndarray) -> np.ndarray:
    """Give the 1-D array of `size` items of like's dtype that starts at a memory address (nothing keeps it alive)."""
    if size == 0:
        return np.empty(0, like.dtype)
    memory = (ctypes.c_char * (int(size) * like.itemsize)).from_address(int(address))
    return np.frombuffer(memory, like.dtype)  # type: ignore[call-overload, no-any-return, unused-ignore]


def float64_of(bits: int) -> float:
    """Give the float64 whose bits are those of a 64-bit integer."""
    return float(struct.unpack("<d", struct.pack("<Q", int(bits) & rng.MASK))[0])


def float32_of(bits: int) -> float:
    """Give the float32 whose bits are those of a 32-bit integer."""
    return float(struct.unpack("<f", struct.pack("<I", int(bits) & rng.LOW))[0])


_OPCODES = {
    "IMPORT_NAME": "import: do it at the top of the file",
    "STORE_GLOBAL": "assignment to a global",
    "DELETE_GLOBAL": "assignment to a global",
}
READ_ONLY = "a source is the data itself: write to dst alone"
# What Numba says, and what we say; the first that is found in its report.
_PLAINLY = [
    (r"Cannot modify readonly array|>>> setitem\(readonly", READ_ONLY),
    (r"^<", "no kernel can run this"),
    (r"unsupported opcode \(([A-Z_]+)\)", "a kernel has no {opcode}"),
    (r"Cannot bind .* due to \"TypeError: (.*?)\"", "{call}: {0}"),
    (r"Cannot unify (.*) and (.*) for '\$", "cannot unify {0} and {1}"),
    (r"Cannot unify (.*) and (.*) for '(\w+)", "cannot unify {0} and {1} for {2!r}"),
    (r"Can't unify return type from the following types: (.*)", "it returns more than one type: {0}"),
    (r"Untyped global name '(\w+)'.*<class '(?:\w+\.)*(\w+)'>", "{0!r} is a {1}, which no kernel can use"),
    (r"^Unsupported constraint encountered: raise", "raise takes an exception with constant arguments"),
    (r"^(?:No implementation|Invalid use|- Resolution failure)", "no kernel can run {call}"),
]


def _reason(error: Any) -> tuple[str, str]:
    """Give the most exact part of Numba's report as a short sentence, and the file and line of the user's own code."""
    text = str(error)
    loc = getattr(error, "loc", None)
    where = f"{loc.filename} line {loc.line}" if loc is not None and not _internal(loc.filename) else ""
    raised = re.search(r"\.+ ?Raised from (.*?)(?: \((\d+)\))?$", text.rstrip())
    if raised:
        text = text[: raised.start()]
        where = f"{raised[1]} line {raised[2]}" if raised[2] else where
    # Each function within which it failed has its part, the innermost last: the last one in the user's own file tells.
    parts = re.split(r"(?:\w+Error: )?Failed in .* pipeline \(step: .*\)", text)
    part = parts[-1]
    for inner in reversed(parts):
        place = re.search(r"During: typing of .* at (.*) \((\d+)\)|^ *File \"(.*)\", line (\d+):", inner, re.MULTILINE)
        if place and not _internal(place[1] or place[3]):
            part = inner
            where = f"{place[1]} line {place[2]}" if place[1] else where
            break
    lines = [line.strip() for line in part.splitlines() if line.strip()] or [text.strip()]
    call = next((line[3:].strip() for line in lines if line.startswith(">>>")), "")
    for pattern, plainly in _PLAINLY:
        found = re.search(pattern, part.strip())
        if found:
            groups = found.groups()
            opcode = _OPCODES.get(groups[0], groups[0]) if groups else ""
            if plainly.startswith("it returns"):  # listed in the order of a set
                groups = (", ".join(sorted(groups[0].strip().rstrip(".").split(", "))),)
            return _short(plainly.format(*groups, call=call, opcode=opcode)), where
    return _short(lines[0]), where


def _internal(file: str) -> bool:
    """Whether a file name is of no use to the user: generated, of this package, or of Numba."""
    inside = [os.path.dirname(__file__) + os.sep, os.sep + "numba" + os.sep]
    return file in (GENERATED, "<string>") or file.startswith(inside[0]) or inside[1] in file


def _short(line: str) -> str:
    """Give a line of Numba's without its inner names and addresses."""
    function = r"<(?:built-in )?(?:function|method|ufunc) '?([\w.<>]+?)'?(?: at 0x\w+)?>"
    line = re.sub(rf"(?:Function|Dispatcher|type\(CPUDispatcher)?\(?{function}\)*", r"\1", line)
    line = re.sub(r"(?:Unicode|Literal)\[(\w+)\]\([^()]*\)", r"\1", line).replace("unicode_type", "str")
    line = re.sub(r"\bint\(-?\d+\)", "int64", line)
    line = re.sub(r"\w+\(<module '([\w.]+)'[^>]*>\)", r"\1", line).replace("readonly array", "array")
    line = re.sub(r" at 0x[0-9a-f]+|\s*\$[\w.]+|\[\d+m|\x1b", "", line)
    line = line if len(line) <= 200 else line[:200].rstrip() + " ..."
    return line.rstrip(".:")


def infer(function: Callable[..., Any], kinds: Sequence[str | Array], sources: int = 0) -> str:
    """Give the dtype name that a function returns ("none" where it is no number), by type inference alone, remembered on disk.

    `kinds` are the dtype names of numbers, or Arrays, the first `sources` of which may only be read: they can be the
    user's own file. Raises CompileError with the user's own file and line; Refused for
    what no kernel may do.
    """
    key = fingerprint(function, tuple(kinds), sources, "typing", _platform())
    folder = cache_folder()
    file = folder / f"{key[:40]}.type" if folder else None
    if key in _inferred:
        return _inferred[key]
    found = _read(file) if file else None
    if found:
        return _inferred.setdefault(key, str(found[0]["dtype"]))
    refuse(function)
    from numba.core import registry
    from numba.np.numpy_support import as_dtype

    nt = _types()
    _register(function)
    target = registry.cpu_target
    target.target_context.refresh()
    target.typing_context.refresh()
    arguments = [
        nt.Array(_numba_type(k.dtype), k.ndim, "C", readonly=i < sources) if isinstance(k, Array) else _numba_type(k)
        for i, k in enumerate(kinds)
    ]
    typing = _typing()
    try:
        result = typing(_plain(function), arguments)
    except Exception as error:  # Numba's own have no common base
        reason, where = _reason(error)
        if not sources or reason == READ_ONLY:
            raise CompileError(reason, where) from None
        try:  # a function of one signature, say, takes no array that is read-only
            result = typing(_plain(function), [a.copy(readonly=False) if hasattr(a, "ndim") else a for a in arguments])
        except Exception:
            raise CompileError(reason, where) from None
    dtype = "none"
    with contextlib.suppress(Exception):  # a string, a tuple: no number
        dtype = as_dtype(nt.unliteral(result)).name
    if file:
        _write(file, {"dtype": dtype}, b"")
    return _inferred.setdefault(key, dtype)


_inferred: dict[str, str] = {}


@functools.cache
def _typing() -> Any:
    """Give Numba's compiler cut off after type inference: what it accepts is what a whole compilation would type."""
    from numba.core import compiler, errors, registry
    from numba.core.compiler_machinery import AnalysisPass, PassManager, register_pass
    from numba.core.typed_passes import NoPythonSupportedFeatureValidation, NopythonTypeInference

    nt = _types()

    @register_pass(mutates_CFG=False, analysis_only=True)  # type: ignore[untyped-decorator, unused-ignore]
    class Typed(AnalysisPass):  # type: ignore[misc, unused-ignore]
        _name = "jitloader_typed"

        def __init__(self) -> None:
            super().__init__()

        def run_pass(self, state: Any) -> bool:
            for kind in state.typemap.values():  # methods that write, which Numba lets pass
                writes = isinstance(kind, nt.BoundFunction) and kind.typing_key in ("array.sort", "array.fill")
                if writes and not getattr(kind.this, "mutable", True):
                    raise errors.TypingError("Cannot modify readonly array", loc=state.func_ir.loc)
            raise compiler._EarlyPipelineCompletion(state.return_type)

    class Typing(compiler.CompilerBase):  # type: ignore[misc, unused-ignore]
        def define_pipelines(self) -> list[Any]:
            passes = PassManager("jitloader typing")
            passes.passes.extend(compiler.DefaultPassBuilder.define_untyped_pipeline(self.state).passes)
            passes.add_pass(NopythonTypeInference, "typing")
            passes.add_pass(NoPythonSupportedFeatureValidation, "features")
            passes.add_pass(Typed, "typed")
            passes.finalize()
            return [passes]

    flags = compiler.Flags()
    flags.nrt, flags.error_model = True, "numpy"
    flags.enable_looplift = flags.enable_pyobject = flags.force_pyobject = False

    def run(function: Any, arguments: Sequence[Any]) -> Any:
        target = registry.cpu_target
        contexts = target.typing_context, target.target_context
        return compiler.compile_extra(*contexts, function, arguments, None, flags, {}, pipeline_class=Typing)

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def quota(text: str, allowed: int) -> int:
    """Give how many CPUs a cgroup v2 `cpu.max` line leaves of those allowed.

    >>> quota("max 100000", 16), quota("150000 100000", 16), quota("50000 100000", 16)
    (16, 2, 1)
    """
    share, _, period = text.strip().partition(" ")
    try:
        return (
            allowed if share in ("max", "-1") else max(1, min(allowed, math.ceil(int(share) / int(period or 100000))))
        )
    except (ValueError, ZeroDivisionError):
        return allowed


def available_cpus() -> int:
    """Give the number of CPUs this process may use: its affinity, cut by the quota of its cgroup."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        allowed = os.cpu_count() or 1
    for text in _quota_texts():
        allowed = quota(text, allowed)
    return max(1, allowed)


def _quota_texts() -> list[str]:
    texts = []
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        own = []
    for _, controllers, path in (line for line in own if len(line) == 3):
        if controllers == "":
            parts = [p for p in path.split("/") if p]
            for depth in range(len(parts), -1, -1):
                with contextlib.suppress(OSError):
                    texts.append(Path("/sys/fs/cgroup", *parts[:depth], "cpu.max").read_text())
        elif "cpu" in controllers.split(","):
            for place in (path.lstrip("/"), ""):
                folder = Path("/sys/fs/cgroup", controllers, place)
                with contextlib.suppress(OSError):
                    share = (folder / "cpu.cfs_quota_us").read_text().strip()
                    texts.append(f"{share} {(folder / 'cpu.cfs_period_us').read_text().strip()}")
    return texts


@contextlib.contextmanager
def launch():  # type: ignore[no-untyped-def]
    """Hold the process-wide lock under which parallel kernels run: Numba's workqueue aborts on two launches at once."""
    with _launching:
        yield


def parallel_safe() -> bool:
    """Whether a `prange` kernel may be launched now: not in a forked child, whose OpenMP runtime would kill it."""
    return not _forked and available_cpus() > 1


def loop_in_parallel() -> Any:
    """Give the `prange` of Numba, or `range` where JIT is off."""
    if disabled():
        return range
    from numba import prange

    return prange
