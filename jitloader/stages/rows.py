"""Stages over rows of different lengths: cut them, and close them to one length so that they make a batch."""

# mypy: allow-untyped-calls
# (kernels are typed by their callers: Python numbers here, 64-bit words when compiled)

from __future__ import annotations

import sys

import numpy as np

from .. import jit, rng
from ..spec import Spec
from .checks import held, whole
from .stage import Bound, Misfit, Stage, floating, numeric


def _ragged(spec: Spec, name: str) -> None:
    if not spec.shape or spec.shape[0] is not None:
        raise Misfit(f"{name} takes ragged rows, whose first axis varies")


def _from_start(key, size, limit, offset, sign):  # type: ignore[no-untyped-def]
    return


def _at_most(n, length):  # type: ignore[no-untyped-def]
    return n if n < length else length


def _fits(n, length):  # type: ignore[no-untyped-def]
    return n <= length


def truncate(length: int) -> Stage:
    """Map a ragged row to its first `length` elements at most: (n, ...) to (min(n, length), ...), still ragged.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(5), [0, 4, 5])).map("t", jl.truncate(2))
    >>> data[0].t.tolist()
    [0, 1]
    """
    most = whole(length, "truncate", "length", 1)

    def bind(spec: Spec) -> Bound:
        _ragged(spec, "truncate")
        return Bound("index", spec, _cut_start, (most,), touches=(0,), length=_at_most)

    return Stage(f"truncate({most})", bind)


def _cut_start(key, size, limit, offset, sign, length):  # type: ignore[no-untyped-def]
    return


def _behind(key, size, limit, offset, sign):  # type: ignore[no-untyped-def]
    offset[0] = size[0] - limit[0]


def _behind_to(key, size, limit, offset, sign, length):  # type: ignore[no-untyped-def]
    offset[0] = size[0] - limit[0]


def _cut_random(key, size, limit, offset, sign, length):  # type: ignore[no-untyped-def]
    offset[0] = rng.randint(key, 0, size[0] - limit[0] + 1)


def random_cut(length: int) -> Stage:
    """Map a ragged row to `length` neighbours at a random place: (n, ...) to (min(n, length), ...), still ragged.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(9), [0, 9])).map("t", jl.random_cut(3))
    >>> len(data[0].t)
    3
    """
    most = whole(length, "random_cut", "length", 1)

    def bind(spec: Spec) -> Bound:
        _ragged(spec, "random_cut")
        return Bound("index", spec, _cut_random, (most,), random=True, touches=(0,), length=_at_most)

    return Stage(f"random_cut({most})", bind)


def _beside(mask: str | None, lengths: str | None, n: int | None) -> tuple[tuple[str, Bound], ...]:
    """Give the fields made beside a padded one."""
    found = []
    if mask is not None:
        found.append((mask, Bound("mask", Spec(np.dtype(bool), (n,)), _from_start)))
    if lengths is not None:
        found.append((lengths, Bound("length", Spec(np.dtype(np.int64), ()), _from_start)))
    return tuple(found)


def pad_rows(
    length: int, value: float = 0, *, mask: str | None = None, lengths: str | None = None, front: bool = False
) -> Stage:
    """Map a ragged row to one of `length` elements, `value` behind its own: (n, ...) to (length, ...).

    With `front` the row stands at the end, `value` before it. `mask` names a bool field (length,) made beside it, True
    where an element is data; `lengths` an int64 field. A row longer than `length` is a PipelineError naming it: put
    `truncate` or `random_cut` before.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(1, 4), [0, 2, 3])).map("t", jl.pad_rows(3, mask="mask"))
    >>> data[[0, 1]].t.tolist(), data[[0, 1]].mask.sum(axis=1).tolist()
    ([[1, 2, 0], [3, 0, 0]], [2, 1])
    """
    n = whole(length, "pad_rows", "length", 1)

    def bind(spec: Spec) -> Bound:
        _ragged(spec, f"pad_rows({n})")
        made = Spec(spec.dtype, (n, *spec.shape[1:]))
        beside = tuple((k, b) for k, b in _beside(mask, lengths, n))
        kernel = _behind_to if front else _cut_start
        return Bound("index", made, kernel, (n,), touches=(0,), fill=held(value, spec, f"pad_rows({n})"), valid=_fits, beside=beside)

    return Stage(f"pad_rows({n})", bind)


def pad_to_longest(
    multiple: int = 1, value: float = 0, *, mask: str | None = None, lengths: str | None = None, front: bool = False
) -> Stage:
    """Map ragged rows to the length of the longest in their batch: (n, ...) to (longest, ...), `value` behind them.

    The length is rounded up to a `multiple`. With `front` rows stand at the end, `value` before them. `mask` names a
    bool field (longest,) made beside it, True where an element is data; `lengths` an int64 field. Of several fields
    each has its own width, and mask and lengths are the first one's. In `data[i]` a row is the longest of its batch.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(1, 4), [0, 2, 3])).map("t", jl.pad_to_longest(mask="mask"))
    >>> data[[0, 1]].t.tolist()
    [[1, 2], [3, 0]]
    """
    times = whole(multiple, "pad_to_longest", "multiple", 1)

    def bind(spec: Spec) -> Bound:
        _ragged(spec, "pad_to_longest")
        beside = _beside(mask, lengths, None)
        told = tuple((k, b._replace(closes="longest", multiple=times) if b.kind == "mask" else b) for k, b in beside)
        return Bound(
            "index",
            spec,
            _behind if front else _from_start,
            touches=(0,),
            fill=held(value, spec, "pad_to_longest"),
            closes="longest",
            multiple=times,
            beside=told,
        )

    return Stage("pad_to_longest" if times == 1 else f"pad_to_longest({times})", bind)


def _moments(src, mask, use, mean, scale, eps):  # type: ignore[no-untyped-def]
    """Write mean and 1 / (std + eps) of each channel over the rows of src, or over those of the mask (`use` not 0)."""
    rows, width, s, m = src.shape[0], mean.size, jit.flat(src), jit.flat(mask)
    known, start = 0, 0
    for t in range(rows - 1, -1, -1):
        if use == 0 or m[t]:
            known, start = known + 1, t
    many, first = 1.0 / max(known, 1), start * width
    # Sums begin at the first row, so that a constant channel has exactly its value as mean. Four channels at a time,
    # which LLVM makes one vector.
    for c in range(0, width - 3, 4):
        b0, b1 = np.float64(s[first + c]), np.float64(s[first + c + 1])
        b2, b3 = np.float64(s[first + c + 2]), np.float64(s[first + c + 3])
        x0, x1, x2, x3 = 0.0, 0.0, 0.0, 0.0
        for t in range(rows):
            if use == 0 or m[t]:
                at = rng.u64(t * width + c)
                x0 += np.float64(s[at]) - b0
                x1 += np.float64(s[at + rng.u64(1)]) - b1
                x2 += np.float64(s[at + rng.u64(2)]) - b2
                x3 += np.float64(s[at + rng.u64(3)]) - b3
        b0, b1, b2, b3 = b0 + x0 * many, b1 + x1 * many, b2 + x2 * many, b3 + x3 * many
        x0, x1, x2, x3 = 0.0, 0.0, 0.0, 0.0
        for t in range(rows):
            if use == 0 or m[t]:
                at = rng.u64(t * width + c)
                y0, y1 = np.float64(s[at]) - b0, np.float64(s[at + rng.u64(1)]) - b1
                y2, y3 = np.float64(s[at + rng.u64(2)]) - b2, np.float64(s[at + rng.u64(3)]) - b3
                x0 += y0 * y0
                x1 += y1 * y1
                x2 += y2 * y2
                x3 += y3 * y3
        mean[c], mean[c + 1], mean[c + 2], mean[c + 3] = b0, b1, b2, b3
        scale[c], scale[c + 1], scale[c + 2], scale[c + 3] = x0, x1, x2, x3
    for c in range(width // 4 * 4, width):
        b0, x0 = np.float64(s[first + c]), 0.0
        for t in range(rows):
            if use == 0 or m[t]:
                x0 += np.float64(s[rng.u64(t * width + c)]) - b0
        b0, x0 = b0 + x0 * many, 0.0
        for t in range(rows):
            if use == 0 or m[t]:
                y0 = np.float64(s[rng.u64(t * width + c)]) - b0
                x0 += y0 * y0
        mean[c], scale[c] = b0, x0
    for c in range(width):
        mean[c] = mean[c] if known > 0 else 0.0
    for c in range(width):
        spread = np.sqrt(scale[c] * many) + eps
        scale[c] = 1.0 / spread if spread > 0.0 else (1.0 if spread == 0.0 else spread)


def _standardize(src, dst, mean, scale):  # type: ignore[no-untyped-def]
    width, s, d = mean.size, jit.flat(src), jit.flat(dst)
    rows = d.size // width
    for c in range(0, width - 3, 4):
        b0, b1, b2, b3 = mean[c], mean[c + 1], mean[c + 2], mean[c + 3]
        x0, x1, x2, x3 = scale[c], scale[c + 1], scale[c + 2], scale[c + 3]
        for t in range(rows):
            at = rng.u64(t * width + c)
            y0, y1 = (np.float64(s[at]) - b0) * x0, (np.float64(s[at + rng.u64(1)]) - b1) * x1
            y2, y3 = (np.float64(s[at + rng.u64(2)]) - b2) * x2, (np.float64(s[at + rng.u64(3)]) - b3) * x3
            d[at], d[at + rng.u64(1)], d[at + rng.u64(2)], d[at + rng.u64(3)] = y0, y1, y2, y3
    for c in range(width // 4 * 4, width):
        b0, x0 = mean[c], scale[c]
        for t in range(rows):
            i = rng.u64(t * width + c)
            d[i] = (np.float64(s[i]) - b0) * x0


def _one(a, x, key, mean, scale, eps):  # type: ignore[no-untyped-def]
    _moments(a, a, 0, mean, scale, eps)
    _standardize(a, x, mean, scale)


def _two(a, b, x, y, key, mean, scale, eps):  # type: ignore[no-untyped-def]
    _moments(a, a, 0, mean, scale, eps)
    _standardize(a, x, mean, scale)
    _standardize(b, y, mean, scale)


def _three(a, b, c, x, y, z, key, mean, scale, eps):  # type: ignore[no-untyped-def]
    _moments(a, a, 0, mean, scale, eps)
    _standardize(a, x, mean, scale)
    _standardize(b, y, mean, scale)
    _standardize(c, z, mean, scale)


def _one_known(a, m, x, key, mean, scale, eps):  # type: ignore[no-untyped-def]
    _moments(a, m, 1, mean, scale, eps)
    _standardize(a, x, mean, scale)


def _two_known(a, b, m, x, y, key, mean, scale, eps):  # type: ignore[no-untyped-def]
    _moments(a, m, 1, mean, scale, eps)
    _standardize(a, x, mean, scale)
    _standardize(b, y, mean, scale)


def _three_known(a, b, c, m, x, y, z, key, mean, scale, eps):  # type: ignore[no-untyped-def]
    _moments(a, m, 1, mean, scale, eps)
    _standardize(a, x, mean, scale)
    _standardize(b, y, mean, scale)
    _standardize(c, z, mean, scale)


def standardize_by(*, masked: bool = False, eps: float = 0.0) -> Stage:
    """Map fields to (x - mean) / (std + eps), mean and std being those of the *first* of them, over its first axis:
    (T, ...), (S, ...), ... of any numbers to the same shapes of float32 (float64 stays float64).

    One to three fields of which all axes but the first agree: `data.map(("past", "next"), jl.standardize_by())` is what
    a forecast may know. Each channel has its own statistics, kept in float64 (std is that of the population); a
    constant one is divided by 1, and a NaN makes its channel NaN. With `masked` the last field is a bool mask (T,) of
    the first: rows where it is False do not count. Raises PipelineError where shapes do not agree.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(jl.windows(np.array([1.0, 3.0, 4.0]), past=slice(0, 2), next=slice(2, 3)))
    >>> data.map(("past", "next"), jl.standardize_by())[0]
    Batch(past=array([-1.,  1.]), next=array([2.]))
    """
    if isinstance(eps, bool) or not 0 <= eps <= sys.float_info.max:
        raise ValueError(f"standardize_by: eps must be a number of at least 0, got {eps!r}")
    kernels = (_one_known, _two_known, _three_known) if masked else (_one, _two, _three)

    def join(specs: tuple[Spec, ...]) -> tuple[Bound, ...]:
        fields = specs[:-1] if masked else specs
        if not 1 <= len(fields) <= 3:
            raise Misfit(f"standardize_by takes one to three fields{' and a mask' if masked else ''}")
        first = fields[0]
        for spec in fields:
            numeric(spec, "standardize_by")
            if not spec.shape or spec.ragged or spec.shape[1:] != first.shape[1:]:
                raise Misfit("standardize_by takes fields (T, ...) of one shape each, alike but for the first axis")
        if not first.shape[0]:
            raise Misfit("standardize_by takes a first field of at least one row")
        if masked and specs[-1] != Spec(np.dtype(bool), first.shape[:1]):
            raise Misfit(f"standardize_by takes a bool mask {first.shape[:1]} as its last field")
        width = Spec(first.dtype, first.shape[1:]).size
        scratch = (("float64", width), ("float64", width))
        return tuple(
            Bound("sample", Spec(floating(s.dtype), s.shape), kernels[len(fields) - 1], (float(eps),), scratch=scratch)
            for s in fields
        )

    def bind(spec: Spec) -> Bound:
        return join((spec,))[0]

    return Stage("standardize_by", bind, join=join)
