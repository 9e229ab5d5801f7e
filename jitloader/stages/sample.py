"""Sample stages: anything that needs the whole sample at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import jit
from ..spec import Spec
from .checks import number, place, settled, whole
from .stage import Bound, Misfit, Stage, floating, numeric, writable


def _one_hot(src, dst, key):  # type: ignore[no-untyped-def]
    for i in range(dst.size):
        dst[i] = 0
    dst[int(src[0])] = 1


def one_hot(classes: int, dtype: Any = "float32") -> Stage:
    """Map a class number to a vector with a 1 in its place: integer () to (classes,) of `dtype`.

    A label outside 0 .. classes - 1 is a PipelineError naming the row. Raises TypeError for a dtype that kernels cannot
    write, as float16.

    >>> import jitloader as jl
    >>> jl.one_hot(3)(1)
    array([0., 1., 0.], dtype=float32)
    """
    n = whole(classes, "one_hot", "classes", 1)
    target = writable(np.dtype(dtype), "one_hot")

    def inside(x):  # type: ignore[no-untyped-def]
        return 0 <= x < n

    def bind(spec: Spec) -> Bound:
        if spec.dtype.kind not in "iu" or spec.shape != ():
            raise Misfit(f"one_hot({n}) takes one integer a row, 0 to {n - 1}")
        return Bound("sample", Spec(target, (n,)), _one_hot, valid=inside)

    return Stage(f"one_hot({n})", bind)


def total(values, start, step, count, shift):  # type: ignore[no-untyped-def]
    """Add every step-th element less `shift`, on four sums: a single one waits for each addition to finish."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(count // 4):
        at = start + 4 * i * step
        a += np.float64(values[at]) - shift
        b += np.float64(values[at + step]) - shift
        c += np.float64(values[at + 2 * step]) - shift
        d += np.float64(values[at + 3 * step]) - shift
    for i in range(count - count % 4, count):
        a += np.float64(values[start + i * step]) - shift
    return (a + b) + (c + d)


def _squares(values, start, step, count, shift):  # type: ignore[no-untyped-def]
    """Add the squares of what `total` adds."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(count // 4):
        at = start + 4 * i * step
        w, x = np.float64(values[at]) - shift, np.float64(values[at + step]) - shift
        y, z = np.float64(values[at + 2 * step]) - shift, np.float64(values[at + 3 * step]) - shift
        a, b, c, d = a + w * w, b + x * x, c + y * y, d + z * z
    for i in range(count - count % 4, count):
        w = np.float64(values[start + i * step]) - shift
        a += w * w
    return (a + b) + (c + d)


def _standardize(src, dst, key, outer, n, inner, eps):  # type: ignore[no-untyped-def]
    s, d = jit.flat(src), jit.flat(dst)
    for group in range(outer * inner):
        start = (group // inner) * n * inner + group % inner
        # Distances to the first element: a constant sample has exactly that mean, and a std of exactly 0.
        first = np.float64(s[start])
        mean = first + total(s, start, inner, n, first) / n
        std = math.sqrt(_squares(s, start, inner, n, mean) / n)
        spread = eps if std < eps else std
        inverse = 1.0 if spread == 0.0 else 1.0 / spread
        for k in range(n):
            at = start + k * inner
            d[at] = (np.float64(s[at]) - mean) * inverse


def standardize_sample(axis: int | tuple[int, ...] | None = None, eps: float = 0.0) -> Stage:
    """Map a sample to (x - mean) / std of its own: (...) of any number to (...) float32 (float64 stays float64).

    Mean and std (of the population, as numpy.std) are taken over `axis`: all axes, one, or several neighbouring ones;
    in float64. A std below `eps` counts as `eps`, and one of 0 as 1, so that a constant sample gives exactly zeros. A
    NaN makes all that it is averaged with NaN. Raises PipelineError where the sample has no such axis.

    >>> from jitloader import stages as st
    >>> st.standardize_sample()([1.0, 3.0]).tolist(), st.standardize_sample()([0.1, 0.1, 0.1]).tolist()
    ([-1.0, 1.0], [0.0, 0.0, 0.0])
    """
    least = number(eps, "standardize_sample", "eps")
    if least < 0:
        raise ValueError(f"standardize_sample: eps must not be negative, got {eps}")
    named = None if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    if named == ():
        raise ValueError("standardize_sample: axis must name an axis, got ()")

    def bind(spec: Spec) -> Bound:
        name = "standardize_sample"
        numeric(spec, name)
        settled(spec, name)
        shape = [int(n or 0) for n in spec.shape]
        over = sorted(place(spec, a, name) for a in (range(len(shape)) if named is None else named))
        if over != list(range(over[0], over[0] + len(over))) if over else False:
            raise Misfit(f"{name} has axis={axis}: several axes must be neighbours, each named once")
        begin, end = (over[0], over[-1] + 1) if over else (0, 0)
        outer, n, inner = math.prod(shape[:begin]), math.prod(shape[begin:end]), math.prod(shape[end:])
        if not outer * n * inner:
            raise Misfit(f"{name} takes samples of at least one element")
        made = Spec(floating(spec.dtype), spec.shape)
        return Bound("sample", made, _standardize, (outer, n, inner, least))

    return Stage("standardize_sample", bind)
