"""Sample stages: anything that needs the whole sample at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..spec import Spec
from .stage import Bound, Misfit, Stage


def _one_hot(src, dst, key):  # type: ignore[no-untyped-def]
    for i in range(dst.size):
        dst[i] = 0
    dst[int(src[0])] = 1


def one_hot(classes: int, dtype: Any = "float32") -> Stage:
    """Map a class number to a vector with a 1 in its place: integer () to (classes,) of `dtype`.

    A label outside 0 .. classes - 1 is a PipelineError naming the row.

    >>> import jitloader as jl
    >>> jl.one_hot(3)(1)
    array([0., 1., 0.], dtype=float32)
    """
    if isinstance(classes, bool) or not isinstance(classes, (int, np.integer)) or classes < 1:
        raise ValueError(f"one_hot: classes must be a whole number of at least 1, got {classes!r}")
    n = int(classes)
    target = np.dtype(dtype)

    def inside(x):  # type: ignore[no-untyped-def]
        return 0 <= x < n

    def bind(spec: Spec) -> Bound:
        if spec.dtype.kind not in "iu" or spec.shape != ():
            raise Misfit(f"one_hot({n}) takes one integer a row, 0 to {n - 1}")
        return Bound("sample", Spec(target, (n,)), _one_hot, valid=inside)

    return Stage(f"one_hot({n})", bind)
