"""Stages over rows of different lengths: cut them, and close them to one length so that they make a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import rng
from ..spec import Spec
from .stage import Bound, Misfit, Stage


def _ragged(spec: Spec, name: str) -> None:
    if not spec.shape or spec.shape[0] is not None:
        raise Misfit(f"{name} takes ragged rows, whose first axis varies")


def _count(value: Any, name: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}: {what} must be a whole number of at least 1, got {value!r}")
    return int(value)


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
    most = _count(length, "truncate", "length")

    def bind(spec: Spec) -> Bound:
        _ragged(spec, "truncate")
        return Bound("index", spec, _cut_start, (most,), touches=(0,), length=_at_most)

    return Stage(f"truncate({most})", bind)


def _cut_start(key, size, limit, offset, sign, length):  # type: ignore[no-untyped-def]
    return


def _cut_random(key, size, limit, offset, sign, length):  # type: ignore[no-untyped-def]
    offset[0] = rng.randint(key, 0, size[0] - limit[0] + 1)


def random_cut(length: int) -> Stage:
    """Map a ragged row to `length` neighbouring elements at a random place: (n, ...) to (min(n, length), ...), still ragged.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(9), [0, 9])).map("t", jl.random_cut(3))
    >>> len(data[0].t)
    3
    """
    most = _count(length, "random_cut", "length")

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


def pad_rows(length: int, value: float = 0, *, mask: str | None = None, lengths: str | None = None) -> Stage:
    """Map a ragged row to one of `length` elements, `value` behind its own: (n, ...) to (length, ...).

    `mask` names a bool field (length,) made beside it, True where an element is data; `lengths` an int64 field. A row
    longer than `length` is a PipelineError naming it: put `truncate` or `random_cut` before.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(1, 4), [0, 2, 3])).map("t", jl.pad_rows(3, mask="mask"))
    >>> data[[0, 1]].t.tolist(), data[[0, 1]].mask.sum(axis=1).tolist()
    ([[1, 2, 0], [3, 0, 0]], [2, 1])
    """
    n = _count(length, "pad", "length")

    def bind(spec: Spec) -> Bound:
        _ragged(spec, f"pad({n})")
        made = Spec(spec.dtype, (n, *spec.shape[1:]))
        beside = tuple((k, b) for k, b in _beside(mask, lengths, n))
        return Bound("index", made, _cut_start, (n,), touches=(0,), fill=value, valid=_fits, beside=beside)

    return Stage(f"pad({n})", bind)


def pad_to_longest(multiple: int = 1, value: float = 0, *, mask: str | None = None, lengths: str | None = None) -> Stage:
    """Map ragged rows to the length of the longest in their batch: (n, ...) to (longest, ...), `value` behind their own.

    The length is rounded up to a `multiple`. `mask` names a bool field (longest,) made beside it, True where an element
    is data; `lengths` an int64 field. In `data[i]` a row is the longest of its batch.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(1, 4), [0, 2, 3])).map("t", jl.pad_to_longest(mask="mask"))
    >>> data[[0, 1]].t.tolist()
    [[1, 2], [3, 0]]
    """
    times = _count(multiple, "pad_to_longest", "multiple")

    def bind(spec: Spec) -> Bound:
        _ragged(spec, "pad_to_longest")
        beside = _beside(mask, lengths, None)
        told = tuple((k, b._replace(closes="longest", multiple=times) if b.kind == "mask" else b) for k, b in beside)
        return Bound(
            "index", spec, _from_start, touches=(0,), fill=value, closes="longest", multiple=times, beside=told
        )

    return Stage("pad_to_longest" if times == 1 else f"pad_to_longest({times})", bind)
