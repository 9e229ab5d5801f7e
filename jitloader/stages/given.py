"""What a user links as a stage: one of ours, or a plain function, told apart by its parameters."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from .stage import Stage, arity, called, elementwise, stage, with_defaults, written_in_python


def as_stage(value: Any) -> Stage:
    """Give what a user links as a stage: a Stage, or a plain function of one number or of (src, dst, key)."""
    if isinstance(value, Stage):
        return value
    if isinstance(value, (list, tuple)):
        raise TypeError("stages come one by one, not as a list: map(field, *stages)")
    if not callable(value):
        raise TypeError(f"{value!r} is not a stage: give one such as jl.normalize(mean, std), or a function")
    if _factory(value):
        raise TypeError(f"{value.__name__} makes a stage: call it, as {_factory(value)}")
    if str(getattr(value, "__module__", "")).startswith("jitloader."):
        raise TypeError(
            f"{called(value)} of jitloader is not a stage: give one such as jl.normalize(mean, std), or a function"
        )
    function = written_in_python(value)
    count = arity(function)
    if count == 1:
        return elementwise(function)  # type: ignore[no-any-return]
    if count == 3:
        return stage(function)  # type: ignore[no-any-return]
    told = f"{called(value)} takes {count} arguments: a stage function takes one number, or (src, dst, key)"
    raise TypeError(told + with_defaults(function))


def _factory(value: Any) -> str:
    """Say how a function of ours that makes a stage is called; "" for any other."""
    if not str(getattr(value, "__module__", "")).startswith("jitloader.") or not hasattr(value, "__code__"):
        return ""
    if value.__annotations__.get("return") not in ("Stage", Stage):
        return ""
    needed = [p.name for p in inspect.signature(value).parameters.values() if p.default is p.empty]
    where = "jl" if hasattr(sys.modules["jitloader"], value.__name__) else "jitloader.stages"
    return f"{where}.{value.__name__}({', '.join(needed)})"
