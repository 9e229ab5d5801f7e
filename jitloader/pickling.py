"""Pickle what holds functions and arrays: functions that no module holds by their code, mapped arrays by their path."""

from __future__ import annotations

import copyreg
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
            if jit.original(value) is not None:
                return jit.captured, (jit.original(value),)
            return NotImplemented if _importable(value) else _by_code(value)
        if isinstance(value, functools._lru_cache_wrapper):
            return _cached, (value.__wrapped__, value.cache_parameters()["maxsize"])
        if isinstance(value, types.CellType):
            return _cell, (), _contents(value), None, None, _fill
        if isinstance(value, types.ModuleType):
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


def _by_code(function: types.FunctionType) -> Any:
    code = marshal.dumps(function.__code__)
    cells = function.__closure__ or ()
    made = VERSION, code, function.__module__, function.__name__, function.__qualname__, cells
    return _function, made, (function.__defaults__, function.__kwdefaults__), None, None, _finish


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
    version: str, code: bytes, module: str, name: str, qualname: str, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    """Give a function with the globals of the module it was written in; its cells are filled later: it may name itself."""
    if version != VERSION:
        raise pickle.UnpicklingError(f"{qualname} was pickled as code of {version}, this is {VERSION}")
    scope = importlib.import_module(module).__dict__
    made = types.FunctionType(marshal.loads(code), scope, name, None, cells)
    made.__qualname__, made.__module__ = qualname, module
    return made


def _finish(function: types.FunctionType, state: tuple[Any, Any]) -> None:
    function.__defaults__, function.__kwdefaults__ = state


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
