"""Windows over a series: sample i is a run of rows, and relative slices of it are fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .samples import Part, Rows, Samples, records


def _in_group(window, before, starts, stride):  # type: ignore[no-untyped-def]
    """The row where a window starts: the group it falls into by binary search, then its place in that group."""
    low, high = 0, before.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if before[middle] <= window:
            low = middle
        else:
            high = middle
    return starts[low] + (window - before[low]) * stride


def windows(
    arrays: Any, *, stride: int = 1, step: int = 1, groups: Any = None, **slices: Any
) -> dict[str, Samples]:
    """Map a series to its windows: field `name=slice(a, b)` of window i is rows start(i) + a .. start(i) + b - 1.

    `arrays` is one array of shape (n, *shape), or several by name; each slice is then a field `array_slice` of each, or
    of one where given as (array name, slice). Windows start every `stride` rows; `step` rows lie between the elements
    of a window (slices count elements). `groups` keeps windows inside series, documents or episodes: offsets of g + 1
    rising integers, or a mark a row (a new group where it changes). Nothing is copied or listed: 1e9 windows open in
    milliseconds. Give the result to Dataset: `jl.Dataset(jl.windows(x, past=slice(0, 60), next=slice(60, 70)))`.

    Raises ValueError where no group is long enough, naming both lengths.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(jl.windows(np.arange(6), x=slice(0, 3), y=slice(1, 4)))
    >>> len(data), data[2].x.tolist(), data[2].y.tolist()
    (3, [2, 3, 4], [3, 4, 5])
    """
    if not slices:
        raise ValueError("windows needs a field, as x=slice(0, 60)")
    for what, value in (("stride", stride), ("step", step)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"windows: {what} must be a whole number of at least 1, got {value!r}")
    named = dict(arrays) if isinstance(arrays, Mapping) else {"": arrays}
    sources = {k: v if isinstance(v, Samples) else records(v, field=k or "windows") for k, v in named.items()}
    counts = {k: s.rows.count for k, s in sources.items()}
    if len(set(counts.values())) > 1:
        raise ValueError("windows: arrays differ in length: " + ", ".join(f"{k!r} has {n} rows" for k, n in counts.items()))
    n = next(iter(counts.values()))
    chosen: dict[str, tuple[str, range]] = {}
    for name, value in slices.items():
        which, cut = value if isinstance(value, tuple) else (None, value)
        if which is not None and which not in sources:
            raise ValueError(f"windows: {name} names array {which!r}; there are {', '.join(map(repr, sources))}")
        for array in [which] if which is not None else list(sources):
            field = name if which is not None or not array else f"{array}_{name}"
            chosen[field] = array, _elements(name, cut)
    span = (max(r[-1] for _, r in chosen.values())) * step + 1
    rows, locate, params = _starts(n, span, int(stride), groups)
    found = {}
    for field, (array, elements) in chosen.items():
        base = sources[array]
        if len(base.parts) != 1 or base.rows != Rows(n) or base.locate is not None:
            raise ValueError("windows takes plain arrays: cut windows before select or concat")
        part = base.parts[0]
        moved = Part(part.array, part.flat, part.offset + elements.start * step * part.stride, part.stride, part.count)
        found[field] = base._replace(
            name="windows",
            parts=(moved,),
            shape=(len(elements), *base.shape),
            strides=(part.stride * step * elements.step, *base.strides),
            rows=rows,
            locate=locate,
            params=params,
        )
    return found


def _elements(name: str, cut: Any) -> range:
    if not isinstance(cut, slice) or cut.stop is None:
        raise ValueError(f"windows: {name} must be a slice with an end, as slice(0, 60), got {cut!r}")
    start, step = 0 if cut.start is None else cut.start, 1 if cut.step is None else cut.step
    whole = all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in (start, cut.stop, step))
    if not whole or start < 0 or step < 1 or cut.stop <= start:
        raise ValueError(f"windows: {name} must run forward from 0 or later, got {cut!r}")
    return range(int(start), int(cut.stop), int(step))


def bounds_of(groups: Any, n: int) -> np.ndarray:
    """Give groups as g + 1 offsets: they are offsets where integers rise from 0 to n, else a mark a row."""
    marks = np.asarray(groups)
    if marks.ndim != 1:
        raise ValueError(f"windows: groups must be 1-D, offsets or a mark a row, got shape {marks.shape}")
    offsets = marks.size >= 2 and marks.dtype.kind in "iu" and marks[0] == 0 and marks[-1] == n
    if offsets and (marks.size != n or (np.diff(marks) >= 0).all()):
        if (np.diff(marks.astype(np.int64)) < 0).any():
            raise ValueError("windows: group offsets must not fall")
        return marks.astype(np.int64)
    if marks.size != n:
        raise ValueError(f"windows: groups has {marks.size} entries: give a mark for each of {n} rows, or offsets from 0 to {n}")
    changes = np.flatnonzero(marks[1:] != marks[:-1]) + 1 if n else np.zeros(0, np.int64)
    return np.concatenate([[0], changes, [n]]).astype(np.int64)


def _starts(n: int, span: int, stride: int, groups: Any) -> tuple[Rows, Any, tuple[Any, ...]]:
    """Give the windows of a span as rows, and the function from window to row where groups part them."""
    if groups is None:
        if n < span:
            raise ValueError(f"windows: a window spans {span} rows, the series has {n}")
        return Rows((n - span) // stride + 1, 0, stride), None, ()
    bounds = bounds_of(groups, n)
    long = np.diff(bounds)
    counts = np.where(long >= span, (long - span) // stride + 1, 0)
    if not counts.any():
        raise ValueError(f"windows: a window spans {span} rows, the longest group has {long.max(initial=0)}")
    kept = counts > 0
    before = np.concatenate([[0], np.cumsum(counts[kept])]).astype(np.int64)
    return Rows(int(before[-1])), _in_group, (before, bounds[:-1][kept], stride)
