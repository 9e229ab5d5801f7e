"""What a function depends on: the functions it calls, and a hash of all that decides what it computes."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np


def helpers(function: Callable[..., Any]) -> list[types.FunctionType]:
    """List the plain functions that `function` calls by global name, closure or module attribute, and those they call."""
    found: dict[int, types.FunctionType] = {}
    todo = [function]
    while todo:
        for value in _names(plain_function(todo.pop())).values():
            inner = plain_function(value)
            if isinstance(inner, types.FunctionType) and id(inner) not in found:
                found[id(inner)] = inner
                todo.append(inner)
    return list(found.values())


def plain_function(value: Any) -> Any:
    return getattr(value, "py_func", value)  # a Numba dispatcher knows its Python function


def _foreign(module: str) -> bool:
    """Whether the functions of a module are known to Numba by themselves."""
    return module.partition(".")[0] in ("numpy", "math", "numba", "builtins", "operator", "cmath", "random")


def codes(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(c for const in code.co_consts if isinstance(const, types.CodeType) for c in codes(const))]


def _names(function: Any) -> dict[str, Any]:
    """Give what the global names, module attributes and closure cells of a function stand for now."""
    if not isinstance(function, types.FunctionType):
        return {}
    found: dict[str, Any] = {}
    for code in codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                found[name] = function.__globals__[name]
    modules = [m for m in found.values() if isinstance(m, types.ModuleType)]
    for module in modules:  # which grows by the modules in them
        for name, value in _attributes(module, function):
            if f"{module.__name__}.{name}" not in found:
                found[f"{module.__name__}.{name}"] = value
                if isinstance(value, types.ModuleType):
                    modules.append(value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    return found


def _attributes(module: types.ModuleType, function: types.FunctionType) -> list[tuple[str, Any]]:
    """Give what a function may read of a module, by name: any attribute that its code names."""
    if _foreign(module.__name__):
        return []
    names = [name for code in codes(function.__code__) for name in code.co_names]
    return [(name, getattr(module, name)) for name in names if hasattr(module, name)]


# -- as it is now -----------------------------------------------------------------------------------------------------


class _Frozen(types.ModuleType):
    """What a function reads of a module, as it was."""

    def __repr__(self) -> str:
        return f"<module {self.__name__!r} at {id(self):#x}>"  # Numba takes modules of one text for one

    def __reduce__(self) -> Any:
        read = {name: value for name, value in vars(self).items() if name[:2] != "__"}
        return _Frozen, (self.__name__,), read


_captured: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_copies: weakref.WeakSet[Any] = weakref.WeakSet()


def captured(function: Callable[..., Any]) -> Any:
    """Give a user's function over what its globals, closure and modules hold now: what is set later changes nothing.

    So plain Python and a kernel, compiled at any time, compute alike. Numba remembers a function by the object, and the
    globals it had: one whose globals changed must be another object. Functions alike, with all they refer to, are one.
    """
    plain = plain_function(function)
    if not isinstance(plain, types.FunctionType) or ours(plain) or plain in _copies:
        return plain
    place = plain.__code__.co_filename, plain.__code__.co_firstlineno, plain.__qualname__, plain.__module__
    key = (*place, fingerprint(plain))
    found = _captured.get(key)
    if found is None:
        found = _captured[key] = _frozen(plain, plain, {})
        _copies.add(found)
    return found


def _frozen(value: Any, reader: types.FunctionType, made: dict[Any, Any]) -> Any:
    """Give a value that a function reads, apart from what may change it; `made` are those given so far."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, types.FunctionType) and not ours(value) and not _foreign(str(value.__module__)):
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        scope: dict[str, Any] = {k: value.__globals__.get(k) for k in ("__builtins__", "__name__", "__file__")}
        new = made[id(value)] = types.FunctionType(value.__code__, scope, value.__name__, None, cells)
        functools.update_wrapper(new, value)
        new.__kwdefaults__ = value.__kwdefaults__
        new.__defaults__ = _frozen(value.__defaults__, value, made)
        for name in {name for code in codes(value.__code__) for name in code.co_names} & value.__globals__.keys():
            scope[name] = _frozen(value.__globals__[name], value, made)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                cell.cell_contents = _frozen(old.cell_contents, value, made)
        return new
    if type(value).__name__ == "CPUDispatcher":  # compiled once, with the globals of that time
        return type(value)(_frozen(value.py_func, reader, made), value.locals, value.targetoptions)
    name = getattr(value, "__name__", "")
    if isinstance(value, types.ModuleType) and not _foreign(name) and name.partition(".")[0] != "jitloader":
        key = id(value), id(reader)
        if key not in made:  # each reader names other parts of it
            made[key] = module = made.setdefault((id(value), 0), _Frozen(name))
            for part, attribute in _attributes(value, reader):
                setattr(module, part, _frozen(attribute, reader, made))
        return made[key]
    if isinstance(value, np.ndarray):
        made[id(value)] = value.copy()
        made[id(value)].flags.writeable = False  # as compiled
        return made[id(value)]
    return tuple(_frozen(item, reader, made) for item in value) if type(value) is tuple else value


# -- hashes -----------------------------------------------------------------------------------------------------------


def fingerprint(*values: Any) -> str:
    """Hash functions (with all they refer to), arrays and plain values: equal only where they compute alike."""
    import hashlib  # 4 ms that the import of this package need not wait for

    digest = hashlib.sha256()
    _feed(digest, values, set())
    return digest.hexdigest()


def _feed(digest: Any, value: Any, seen: set[int]) -> None:
    value = plain_function(value)
    digest.update(type(value).__name__.encode())
    if isinstance(value, types.FunctionType):
        if id(value) in seen:
            digest.update(value.__qualname__.encode())
            return
        seen.add(id(value))
        for code in codes(value.__code__):
            digest.update(code.co_code)
            digest.update(repr(code.co_names + code.co_varnames + code.co_freevars).encode())
            _feed(digest, [c for c in code.co_consts if not isinstance(c, types.CodeType)][_docs(code) :], seen)
        _feed(digest, (value.__defaults__, value.__kwdefaults__), seen)
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
    elif isinstance(value, functools.partial):
        _feed(digest, (value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        _feed(digest, (value.__func__, value.__self__), seen)
    elif isinstance(value, (type, types.BuiltinFunctionType, np.ufunc)) or not hasattr(value, "__dict__"):
        named = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        digest.update((f"{getattr(value, '__module__', '')}.{named}" if named else repr(value)).encode())
    elif callable(value):
        if id(value) not in seen:
            seen.add(id(value))
            _feed(digest, (type(value).__module__, type(value).__qualname__, vars(value)), seen)
    else:
        digest.update(repr(value).encode())


def _docs(code: types.CodeType) -> int:
    """Give 1 where the first constant is a docstring, or the None in its place, which changes nothing that is computed."""
    consts = code.co_consts
    if not consts or not (consts[0] is None or isinstance(consts[0], str)):
        return 0
    used = any(i.opname.startswith("LOAD_CONST") and i.argval is consts[0] for i in dis.get_instructions(code))
    return 0 if used else 1


PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
GENERATED = "<jitloader kernel>"  # the file name of generated functions


def ours(function: Any) -> bool:
    """Whether a function is of this package, or generated by it."""
    name = plain_function(function).__code__.co_filename
    return bool(name == GENERATED or name.startswith(PACKAGE))
