"""Pickle what holds functions and arrays: functions that no module holds by their code, mapped arrays by their path."""

from __future__ import annotations

import builtins
import copyreg
import dis
import functools
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import jit, storage
from .dtypes import lend
from .orders import Order
from .samples import Part, flatten
from .stages import Stage

VERSION = str(sys.implementation.cache_tag)  # of Python's bytecode


def dumps(value: Any, what: str) -> bytes:
    """Give a value as bytes. Raises TypeError, naming `what`, where something in it cannot be pickled."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{what} does not pickle: {error}") from None
    return stream.getvalue()


def reduced(value: Any, what: str) -> Any:
    """Give what `__reduce__` gives of a value that has a `_reduced` of its own, `_reduced() -> (function, arguments)`: a
    stream in which functions and arrays are pickled as here, and which it shares with all such values inside it."""
    return loads, (dumps(value, what),)


def loads(given: bytes) -> Any:
    """Give the value that was dumped; files are mapped where they lie."""
    return pickle.loads(given)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return NotImplemented if _importable(value) else _by_code(value)
        if isinstance(value, functools._lru_cache_wrapper):
            return _cached, (value.__wrapped__, value.cache_parameters()["maxsize"])
        if isinstance(value, types.CellType):
            return _cell, (), _contents(value), None, None, _fill
        if type(value).__name__ == "CPUDispatcher" and _apart(value.py_func):
            return type(value), (value.py_func, value.locals, value.targetoptions)
        if isinstance(value, types.ModuleType) and type(value).__reduce__ is object.__reduce__:
            return importlib.import_module, (value.__name__,)
        if type(value) in (Order, Stage):  # whose own way of pickling begins a new stream
            return type(value), tuple(value)
        if hasattr(type(value), "_reduced"):
            return value._reduced()
        if type(value) is Part:
            return _part(value)
        if isinstance(value, np.ndarray):
            return _array(value)
        return NotImplemented


def _importable(function: types.FunctionType) -> bool:
    """Whether another process finds the function by the name of its module and its own."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


# -- functions --------------------------------------------------------------------------------------------------------


def _apart(function: types.FunctionType) -> bool:
    """Whether a function has globals of its own, which are no module's: one that was captured, or generated."""
    return function.__globals__ is not getattr(sys.modules.get(function.__module__), "__dict__", None)


def _by_code(function: types.FunctionType) -> Any:
    """With the globals it reads, where they are its own: what a stage was linked with is what it computes with."""
    cells, scope = function.__closure__ or (), None
    if _apart(function):
        loads = (i for code in jit.codes(function.__code__) for i in dis.get_instructions(code))
        names = {i.argval for i in loads if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        scope = {name: value for name, value in function.__globals__.items() if name in names}
    named = function.__module__, function.__name__, function.__qualname__
    made = VERSION, marshal.dumps(function.__code__), *named, cells, scope is not None
    return _function, made, (function.__defaults__, function.__kwdefaults__, scope), None, None, _finish


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not yet set
        return ()


def _cell() -> types.CellType:
    return types.CellType()


def _fill(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        cell.cell_contents = contents[0]


def _function(
    version: str,
    code: bytes,
    module: str | None,
    name: str,
    qualname: str,
    cells: tuple[types.CellType, ...],
    apart: bool,
) -> types.FunctionType:
    """Give a function with the globals of the module it was written in, or with its own; these, and its cells, are filled
    later: it may name itself."""
    if version != VERSION:
        raise pickle.UnpicklingError(f"{qualname} was pickled as code of {version}, this is {VERSION}")
    own = {"__builtins__": builtins, "__name__": module}
    scope = own if apart else importlib.import_module(str(module)).__dict__
    made = types.FunctionType(marshal.loads(code), scope, name, None, cells)
    made.__qualname__, made.__module__ = qualname, module  # type: ignore[assignment]
    return made


def _finish(function: types.FunctionType, state: tuple[Any, Any, dict[str, Any] | None]) -> None:
    function.__defaults__, function.__kwdefaults__, scope = state
    function.__globals__.update(scope or {})


def _cached(function: Callable[..., Any], size: int | None) -> Any:
    return functools.lru_cache(maxsize=size)(function)


# -- arrays -----------------------------------------------------------------------------------------------------------


def _array(array: np.ndarray) -> Any:
    """By path where it is mapped; views of one array share it, where they show the better part of it.

    Strides are kept, for kernels were given them: NumPy's own pickles lay an array out anew.
    """
    place = storage.locate(array)
    if place is not None:
        return storage.reopen, tuple(place)
    if array.size == 0 or array.dtype.hasobject or array.flags.owndata and array.flags.c_contiguous:
        return NotImplemented
    root: Any = array
    while isinstance(getattr(root, "base", None), np.ndarray):
        root = root.base
    low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
    whole = type(root) is np.ndarray and root.flags.c_contiguous and root.flags.owndata
    if whole and root.nbytes <= 2 * (high - low):
        start = root.ctypes.data
    elif array.flags.c_contiguous:
        return NotImplemented
    else:
        start = array.ctypes.data + low
        root = lend(array, start, high - low).copy()
    offset = array.ctypes.data - start
    return _view, (root, array.dtype, array.shape, array.strides, offset, array.flags.writeable)


def _view(
    root: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, writeable: bool
) -> np.ndarray:
    array: np.ndarray = np.ndarray(shape, dtype, root, offset, strides)
    array.flags.writeable = writeable and array.flags.writeable
    return array


def _part(part: Part) -> Any:
    """One array and where rows lie in it: `flat` is the same memory again."""
    again = flatten(part.array)[0]
    if again.flat.size == part.flat.size and again.flat.ctypes.data == part.flat.ctypes.data:
        return _flattened, (part.array, part.offset, part.stride, part.count)
    return Part, tuple(part)


def _flattened(array: np.ndarray, offset: int, stride: int, count: int) -> Part:
    return flatten(array)[0]._replace(offset=offset, stride=stride, count=count)


# -- orders and stages alone ------------------------------------------------------------------------------------------


for _kind in (Order, Stage):
    copyreg.pickle(_kind, lambda value: reduced(value, value.name))  # type: ignore
