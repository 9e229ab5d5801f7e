"""Stages of stages: one of several, or one or none, drawn for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import jit, rng
from ..spec import Spec
from .checks import chance, number, settled
from .stage import Bound, Misfit, Stage


def _pick(key, ends):  # type: ignore[no-untyped-def]
    u = rng.uniform(key, 0)
    k = 0
    while k < ends.size - 1 and u >= ends[k]:
        k += 1
    return k


def _still(key, size, limit, offset, sign):  # type: ignore[no-untyped-def]
    return


def _as_it_is() -> Stage:
    return Stage("as it is", lambda spec: Bound("index", spec, _still))


def _checked(stage: Any, name: str) -> Stage:
    if not isinstance(stage, Stage):
        raise TypeError(f"{name} takes stages, got {stage!r}; make one of a function by elementwise or stage")
    return stage


def _inner(stage: Stage, spec: Spec, name: str) -> Bound:
    """Bind a stage within another; what refuses it is told with the inner stage's name."""
    try:
        bound = stage.bind(spec)
    except jit.Refused:
        raise
    except jit.CompileError as error:
        raise jit.Refused(f"{stage.name} cannot take {spec.dtype}: {error.what}", error.where) from None
    if bound.kind == "pair":
        raise Misfit(f"{stage.name} mixes two rows, which {name.partition('(')[0]} cannot draw: link it by map itself")
    return bound


def _bind(spec: Spec, name: str, stages: Sequence[Stage], weights: Sequence[float]) -> Bound:
    settled(spec, name)
    bound = [_inner(stage, spec, name) for stage in stages]
    for stage, made in zip(stages, bound, strict=True):
        if made.out != bound[0].out:
            given = f"{stages[0].name} gives {bound[0].out} and {stage.name} {made.out}"
            raise Misfit(f"{name}: {given}: all must give the same")
    ends = np.cumsum(np.asarray(weights, np.float64))
    choices = tuple(zip(stages, bound, strict=True))
    fills = {str(b.fill) for b in bound if b.fill is not None}
    fused = all(b.kind == "index" and b.order is None and not b.choices for b in bound) and len(fills) < 2
    if not fused:
        return Bound("choice", bound[0].out, _pick, (ends,), random=True, choices=choices)
    fill = next((b.fill for b in bound if b.fill is not None), None)
    touches = tuple(sorted({axis for b in bound for axis in b.touches}))
    return Bound("index", bound[0].out, _pick, (ends,), random=True, fill=fill, touches=touches, choices=choices)


def random_choice(*stages: Stage, p: Sequence[float] | None = None) -> Stage:
    """Map a sample through one of several stages, drawn for each row: (...) to what they all give.

    `p` gives their weights, else all are equally likely. Stages that only move elements are drawn within the fused
    loop; others cost a pass over the sample. Each has draws of its own, shared by fields that are mapped together.
    Raises PipelineError where the stages do not give one dtype and shape.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> one = st.random_choice(st.clip(0, 1), st.clip(2, 3))
    >>> sorted({int(one(np.array(9), key=k)) for k in range(20)})
    [1, 3]
    """
    if not stages:
        raise TypeError("random_choice takes at least one stage")
    made = [_checked(stage, "random_choice") for stage in stages]
    weights = [1.0] * len(made) if p is None else [number(w, "random_choice", "p") for w in p]
    if len(weights) != len(made) or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"random_choice: p must be {len(made)} weights, none below 0 and one above, got {p!r}")
    shares = [w / sum(weights) for w in weights]
    name = f"random_choice({', '.join(stage.name for stage in made)})"
    return Stage(name, lambda spec: _bind(spec, name, made, shares))


def random_apply(stage: Stage, p: float = 0.5) -> Stage:
    """Map a sample through a stage with probability p, else to itself: (...) to the same.

    Raises PipelineError where the stage changes dtype or shape, for a batch holds only one of either.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> sometimes = st.random_apply(st.log1p(), p=0.5)
    >>> sorted({float(sometimes(np.float64(0.0) + 1, key=k).round(2)) for k in range(20)})
    [0.69, 1.0]
    """
    inner, likely = _checked(stage, "random_apply"), chance(p, "random_apply")
    name = f"random_apply({inner.name}, {likely:g})"

    def bind(spec: Spec) -> Bound:
        out = _inner(inner, spec, name).out
        if out != spec:
            raise Misfit(f"{name}: {inner.name} gives {out}, and a stage that may be skipped must keep dtype and shape")
        return _bind(spec, name, (inner, _as_it_is()), (likely, 1.0 - likely))

    return Stage(name, bind)
