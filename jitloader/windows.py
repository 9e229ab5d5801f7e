"""Windows over a series: sample i is a run of rows, and relative slices of it are fields."""

# mypy: allow-untyped-calls
# (kernels are typed by their callers: Python integers here, 64-bit words when compiled)

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import storage
from .samples import Part, Rows, Samples, as_indices, join, records
from .stages import Misfit
from .stages.checks import held

# Kernels: `before` counts the windows before each group (g + 1 of them), `starts` and `ends` bound the groups' rows,
# windows begin `stride` rows apart, the first of a group `pad` rows before it. A field begins `offset` rows into its
# window, and its elements lie `width` rows apart.


def _group(window, before):  # type: ignore[no-untyped-def]
    """The group a window falls into, by binary search."""
    low, high = 0, before.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if before[middle] <= window:
            low = middle
        else:
            high = middle
    return low


def _in_group(window, before, starts, stride):  # type: ignore[no-untyped-def]
    group = _group(window, before)
    return starts[group] + (window - before[group]) * stride


def _padded(window, before, starts, ends, stride, pad, offset, width):  # type: ignore[no-untyped-def]
    group = _group(window, before)
    return starts[group] - pad + (window - before[group]) * stride


def _first(window, before, starts, ends, stride, pad, offset, width):  # type: ignore[no-untyped-def]
    gap = pad - (window - before[_group(window, before)]) * stride - offset
    return (gap + width - 1) // width


def _last(window, before, starts, ends, stride, pad, offset, width):  # type: ignore[no-untyped-def]
    group = _group(window, before)
    room = ends[group] - starts[group] + pad - (window - before[group]) * stride - offset
    return (room + width - 1) // width


def _tell(row: int) -> str:
    return f"the window from array row {row} on"


def _tell_in_group(window: int, before: np.ndarray, starts: np.ndarray, *rest: Any) -> str:
    group = _group(window, before)
    at = (window - before[group]) * (rest[0] if len(rest) == 1 else rest[1]) - (rest[2] if len(rest) > 1 else 0)
    return f"the window from row {at} of group {group} on, array row {starts[group] + at}"


class _Plan(NamedTuple):
    """Where windows of a span begin: the rows of their samples, the kernel, its parameters, what is left out, and how
    that was asked for."""

    rows: Rows
    locate: Any
    params: tuple[Any, ...]
    groups: int
    name: str
    rule: Rule


class Rule(NamedTuple):
    """How windows were asked for: enough to cut them again. `what` is data, mask or group, `elements` a range's ends."""

    name: str
    n: int
    span: int
    stride: int
    pads: tuple[int, int]
    bounds: np.ndarray | None
    what: str = "data"
    elements: tuple[int, int, int] = (0, 1, 1)
    first: int = 0
    step: int = 1
    value: float | None = 0


def windows(
    arrays: Any,
    *,
    stride: int = 1,
    step: int = 1,
    groups: Any = None,
    pad_start: int = 0,
    pad_end: int = 0,
    pad_value: float | None = 0,
    mask: bool = False,
    group_field: str | None = None,
    **slices: Any,
) -> dict[str, Samples]:
    """Map a series to its windows: field `name=slice(a, b)` of window i is rows t + a .. t + b - 1, (b - a, *shape).

    Parameters
    ----------
    arrays : one array of shape (n, *shape); a list of them, read as one series that no window crosses from one to the
        next; or several of one length by name: a slice is then a field `array_slice` of each, or of one where given as
        (array name, slice).
    stride : rows between the starts of windows.
    step : rows between the elements of a window; slices count elements, and may begin below 0.
    groups : keeps windows inside series, documents or episodes: g + 1 rising offsets from 0 to n, or a mark a row (a
        new group where it changes; NaN is refused).
    pad_start, pad_end : windows may begin this many rows before their group, or end this many after it.
    pad_value : what stands there; None repeats the group's first or last row, as in stacks of frames.
    mask : for each slice also a bool field `slice_mask` (b - a,), True where a row is data.
    group_field : name of an int64 field, the number of the group; `data.split(..., groups=name)` parts by it.

    Nothing is copied or listed: 1e9 windows open in milliseconds. Rows that fall into no window are counted in the
    repr of the data set. Raises ValueError where no group is long enough, naming both lengths.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(jl.windows(np.arange(6), x=slice(0, 3), y=slice(1, 4)))
    >>> len(data), data[2].x.tolist(), data[2].y.tolist()
    (3, [2, 3, 4], [3, 4, 5])
    >>> stacks = jl.Dataset(jl.windows(np.arange(5), groups=[0, 2, 5], stack=slice(-2, 1), pad_start=2, pad_value=None))
    >>> stacks[:].stack.tolist()
    [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 2, 3], [2, 3, 4]]
    """
    if not slices:
        raise ValueError("windows needs a field, as x=slice(0, 60)")
    sources, n, edges = _series(arrays, "windows")
    fields: dict[str, tuple[str, range]] = {}
    masks: dict[str, range] = {}
    for name, value in slices.items():
        which, cut = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
        if which is not None and which not in sources:
            raise ValueError(f"windows: {name} names array {which!r}; there are {', '.join(map(repr, sources))}")
        elements = _elements(name, cut)
        if mask:
            masks[f"{name}_mask"] = elements
        for array in [which] if which is not None else list(sources):
            field = name if which is not None or not array else f"{array}_{name}"
            if field in fields:
                raise ValueError(f"windows: two fields are called {field!r}")
            fields[field] = array, elements
    more = [*masks, *([group_field] if group_field is not None else [])]
    for name in more:
        if name in fields or more.count(name) > 1:
            raise ValueError(f"windows: two fields are called {name!r}")
    stride, step = _whole("windows", "stride", stride, 1), _whole("windows", "step", step, 1)
    pads = _whole("windows", "pad_start", pad_start, 0), _whole("windows", "pad_end", pad_end, 0)
    # Row 0 of the slices is inside the window where they begin above it: x=slice(5, 10) needs ten rows.
    first = min(0, *(r[0] for _, r in fields.values()))
    span = (max(r[-1] for _, r in fields.values()) - first) * step + 1
    if any(pads):
        _check_pads(pads, span, pad_value, fields, step, sources)
    bounds = _bounds(groups, n, edges)
    plan = _plan(n, span, stride, pads, bounds)
    found = {}
    for field, (array, elements) in fields.items():
        found[field] = _cut(sources[array], elements, first, step, plan, pads, pad_value)
    for field, elements in masks.items():
        found[field] = _masked(_cut(_constant(True, n), elements, first, step, plan, pads, 0))
    if group_field is not None:
        found[group_field] = _numbers(plan)
    return found


def sequences(
    arrays: Any,
    length: int,
    *,
    groups: Any = None,
    stride: int | None = None,
    pad: bool = True,
    pad_value: float = 0,
    mask: str = "mask",
) -> dict[str, Samples]:
    """Map episodes to subsequences, as recurrent policies take them: sample i is `length` rows of one group,
    (length, *shape).

    `arrays` are arrays of one length by name, each a field of that name (a single array: `sequence`). Subsequences
    follow each other, or begin `stride` rows apart. With `pad` the last of a group is filled up with `pad_value`, and
    the bool field `mask` (length,) is True where a row is data; without, rows left over at a group's end are in none.
    `groups` as in `windows`; `jl.episodes(done)` makes them of flags. Raises ValueError where no group is long enough.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(jl.sequences({"obs": np.arange(7)}, 3, groups=[0, 4, 7]))
    >>> data[:].obs.tolist()
    [[0, 1, 2], [3, 0, 0], [4, 5, 6]]
    >>> data[1].mask.tolist()
    [True, False, False]
    """
    sources, n, edges = _series(arrays, "sequences", "sequence")
    length = _whole("sequences", "length", length, 1)
    every = length if stride is None else _whole("sequences", "stride", stride, 1)
    pads = 0, length - 1 if pad else 0
    elements = range(length)
    if pads[1]:
        _check_pads(pads, length, pad_value, {}, 1, sources, "sequences")
    plan = _plan(n, length, every, pads, _bounds(groups, n, edges), "sequences")
    found = {name: _cut(base, elements, 0, 1, plan, pads, pad_value) for name, base in sources.items()}
    if pad:
        if mask in found:
            raise ValueError(f"sequences: two fields are called {mask!r}: choose mask=")
        found[mask] = _masked(_cut(_constant(True, n), elements, 0, 1, plan, pads, 0))
    return found


# -- what is given ----------------------------------------------------------------------------------------------------


MOST = 1 << 40  # rows: sums of a few such numbers fit a kernel's integers


def _whole(name: str, what: str, value: Any, low: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{name}: {what} must be a whole number of at least {low}, got {value!r}")
    if value > MOST:
        raise ValueError(f"{name}: {what} must be at most 2**40 rows, got {value}")
    return int(value)


def _series(arrays: Any, name: str, alone: str = "") -> tuple[dict[str, Samples], int, np.ndarray | None]:
    """Give arrays as samples by name, their rows, and where one array of a list ends and the next begins."""
    named = dict(arrays) if isinstance(arrays, Mapping) else {alone: arrays}
    if not named:
        raise ValueError(f"{name} takes at least one array")
    sources = {k: _stream(v, k or name) for k, v in named.items()}
    counts = {k: s.rows.count for k, s in sources.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{k!r} has {n} rows" for k, n in counts.items())
        raise ValueError(f"{name}: arrays differ in length: {told}")
    n = next(iter(counts.values()))
    cuts = []
    for base in sources.values():
        if base.rows != Rows(n) or base.locate is not None or sum(part.count for part in base.parts) != n:
            raise ValueError(f"{name} takes plain arrays: cut windows before select")
        if len(base.parts) > 1:
            cuts.append(np.cumsum([0, *(part.count for part in base.parts)], dtype=np.int64))
    return sources, n, np.unique(np.concatenate(cuts)) if cuts else None


def _stream(value: Any, field: str) -> Samples:
    """Give an array, the path of one, or a list of arrays one after the other, as samples."""
    if isinstance(value, Samples):
        return value
    if isinstance(value, (str, os.PathLike)):
        value = storage.open_array(value)
    value = storage.placed(value, field)
    if not isinstance(value, (list, tuple)) or not any(isinstance(v, (np.ndarray, Samples)) for v in value):
        return records(value, field=field)
    return join([v if isinstance(v, Samples) else records(v, field=field) for v in value], field)


def _elements(name: str, cut: Any) -> range:
    if not isinstance(cut, slice) or cut.stop is None:
        raise ValueError(f"windows: {name} must be a slice with an end, as slice(0, 60), got {cut!r}")
    start, step = 0 if cut.start is None else cut.start, 1 if cut.step is None else cut.step
    whole = all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in (start, cut.stop, step))
    if not whole or step < 1 or cut.stop <= start:
        raise ValueError(f"windows: {name} must run forward and hold an element, got {cut!r}")
    return range(int(start), int(cut.stop), int(step))


def _check_pads(
    pads: tuple[int, int],
    span: int,
    value: float | None,
    fields: Mapping[str, tuple[str, range]],
    step: int,
    sources: Mapping[str, Samples],
    name: str = "windows",
) -> None:
    for what, pad in zip(("pad_start", "pad_end"), pads, strict=True):
        if pad >= span:
            raise ValueError(f"{name}: {what} must be below the {span} rows that a window spans, got {pad}")
    if value is not None:
        for base in sources.values():
            try:
                held(value, base.spec, f"{name}(pad_value=)")
            except Misfit as misfit:
                raise ValueError(str(misfit)) from None
    if value is None and (step > 1 or any(r.step > 1 for _, r in fields.values())):
        raise ValueError(f"{name}: pad_value=None repeats neighbouring rows: it takes steps of 1")
    if any(len(base.parts) > 1 for base in sources.values()):
        raise ValueError(f"{name}: padding takes one array, not a list: join them with np.concatenate")


def bounds_of(groups: Any, n: int) -> np.ndarray:
    """Give groups as g + 1 offsets, int64: they are offsets where integers rise from 0 to n, else a mark a row. Both at
    once is an error, where the groups would be others."""
    marks = np.asarray(groups)
    if marks.ndim != 1:
        raise ValueError(f"groups must be 1-D, offsets or a mark a row, got shape {marks.shape}")
    if marks.dtype.kind == "b":
        raise TypeError("groups are offsets or a mark a row, got flags: give jl.episodes(flags), which end at them")
    whole = marks.size >= 2 and marks.dtype.kind in "iu" and marks[0] == 0 and marks[-1] == n
    offsets = marks.astype(np.int64) if marks.dtype.kind in "iu" else None
    if whole and offsets is not None and (np.diff(offsets) >= 0).all():
        if marks.size == n and (marks[1:] == marks[:-1]).any():
            raise ValueError(
                f"groups: {n} integers from 0 to {n} may be a mark a row or offsets with empty groups: "
                "give marks as text, as groups.astype(str), or offsets without empty groups"
            )
        return offsets
    if marks.size == n:
        refuse_nan(marks)
        changes = np.flatnonzero(marks[1:] != marks[:-1]) + 1
        return np.concatenate([[0], changes, [n]]).astype(np.int64)
    if not whole or offsets is None:
        raise ValueError(
            f"groups has {marks.size} entries: give a mark for each of {n} rows, or integer offsets from 0 to {n}"
        )
    at = int(np.flatnonzero(np.diff(offsets) < 0)[0])
    raise ValueError(f"group offsets must not fall: offsets[{at}] = {offsets[at]}, then {offsets[at + 1]}")


def refuse_nan(marks: np.ndarray) -> None:
    """Refuse marks of groups that are no mark: NaN and NaT, which equal nothing, and so would be any group or none."""
    odd = np.flatnonzero(marks != marks)
    if odd.size:
        raise ValueError(f"groups: row {odd[0]} has {marks[odd[0]]} for a mark: give every row one, as -1")


def _bounds(groups: Any, n: int, edges: np.ndarray | None) -> np.ndarray | None:
    """Give the offsets of groups, which end where an array of a list ends; None where there is one group alone."""
    if groups is None:
        return edges
    bounds = bounds_of(groups, n)
    return bounds if edges is None else np.unique(np.concatenate([bounds, edges]))


# -- where windows lie ------------------------------------------------------------------------------------------------


def _plan(
    n: int, span: int, stride: int, pads: tuple[int, int], bounds: np.ndarray | None, name: str = "windows"
) -> _Plan:
    if bounds is None and not any(pads):
        if n < span:
            raise ValueError(f"{name}: a window spans {span} rows, the series has {n}")
        count = (n - span) // stride + 1
        unused = n - _covered(np.array([n]), np.array([count]), span, stride, pads)
        return _Plan(
            Rows(count, 0, stride), None, (), 1, _told(name, unused, n), Rule(name, n, span, stride, pads, None)
        )
    rule = Rule(name, n, span, stride, pads, bounds)
    bounds = np.array([0, n], np.int64) if bounds is None else bounds
    long = np.diff(bounds)
    counts = np.where((long > 0) & (long + sum(pads) >= span), (long + sum(pads) - span) // stride + 1, 0)
    if not counts.any():
        padded = f" and padding {sum(pads)}" if any(pads) else ""
        raise ValueError(f"{name}: a window spans {span} rows, the longest group has {long.max(initial=0)}{padded}")
    before = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=before[1:])
    told = _told(name, n - _covered(long, counts, span, stride, pads), n)
    rows = Rows(int(before[-1]))
    starts, ends = np.ascontiguousarray(bounds[:-1]), np.ascontiguousarray(bounds[1:])
    if not any(pads):
        return _Plan(rows, _in_group, (before, starts, stride), len(starts), told, rule)
    return _Plan(rows, _padded, (before, starts, ends, stride, pads[0]), len(starts), told, rule)


def _covered(long: np.ndarray, counts: np.ndarray, span: int, stride: int, pads: tuple[int, int]) -> int:
    """Give how many rows are in some window."""
    end = (counts - 1) * stride + span - pads[0]
    apart = counts * span - pads[0] - np.maximum(end - long, 0)
    rows = np.minimum(end, long) if stride <= span else apart
    return int(np.where(counts > 0, rows, 0).sum())


def _told(name: str, unused: int, n: int) -> str:
    return f"{name} ({unused:,} of {n:,} rows in none)" if unused else name


def _cut(
    base: Samples,
    elements: range,
    first: int,
    step: int,
    plan: _Plan,
    pads: tuple[int, int],
    value: float | None,
) -> Samples:
    """Give one field: these elements of each window."""
    offset, width = (elements.start - first) * step, step * elements.step
    stride = base.parts[0].stride
    if any(part.stride != stride for part in base.parts):
        raise ValueError("windows: arrays of a list lie in memory in different ways: give np.ascontiguousarray of each")
    padded = any(pads)
    return base._replace(
        name=plan.name,
        parts=tuple(part._replace(offset=part.offset + offset * stride) for part in base.parts),
        shape=(len(elements), *base.shape),
        strides=(stride * width, *base.strides),
        rows=plan.rows,
        locate=plan.locate,
        params=(*plan.params, offset, width) if padded else plan.params,
        low=_first if pads[0] else None,
        high=_last if pads[1] else None,
        fill=value if padded else None,
        tell=_tell if plan.locate is None else _tell_in_group,
        rule=plan.rule._replace(
            elements=(elements.start, elements.stop, elements.step),
            first=first,
            step=step,
            value=value,
        ),
    )


def _masked(samples: Samples) -> Samples:
    return samples._replace(rule=samples.rule._replace(what="mask"))


def _constant(value: Any, n: int) -> Samples:
    """Give n rows of one number, which is there once."""
    array = np.array([value])
    return Samples("", (Part(array, array, 0, 0, n),), array.dtype, array.dtype, (), (), Rows(n))


def _numbers(plan: _Plan) -> Samples:
    """Give the number of each window's group."""
    if plan.locate is None:
        return _constant(np.int64(0), 1)._replace(name="group", rows=plan.rows, rule=plan.rule._replace(what="group"))
    base = records(np.arange(plan.groups, dtype=np.int64))
    rule = plan.rule._replace(what="group")
    return base._replace(name="group", rows=plan.rows, locate=_group, params=plan.params[:1], rule=rule)


# -- windows kept by their rule ---------------------------------------------------------------------------------------


def series_of(samples: Samples) -> Samples:
    """Give the series, row by row, from which a field of windows was cut."""
    rule: Rule = samples.rule
    shift = (rule.elements[0] - rule.first) * rule.step
    return samples._replace(
        name="records",
        parts=tuple(part._replace(offset=part.offset - shift * part.stride) for part in samples.parts),
        shape=samples.shape[1:],
        strides=samples.strides[1:],
        rows=Rows(rule.n),
        locate=None,
        params=(),
        low=None,
        high=None,
        fill=None,
        tell=None,
        rule=None,
    )


def chosen(samples: Samples) -> Rows:
    """Give which of its windows, counted from 0, a field has."""
    unit = samples.rule.stride if samples.locate is None else 1
    rows = samples.rows
    table = None if rows.table is None else rows.table // unit
    return Rows(rows.count, rows.start // unit, rows.step // unit, table)


def cut_again(rule: Rule, series: Any, rows: Rows | None, field: str) -> Samples:
    """Give the windows that a rule, from a file, asks for; `rows` of them, or all. Raises ValueError where it asks for what
    is not there: kernels trust what they are given."""
    span, stride = _whole(rule.name, "span", rule.span, 1), _whole(rule.name, "stride", rule.stride, 1)
    step = _whole(rule.name, "step", rule.step, 1)
    pads = _whole(rule.name, "pad_start", rule.pads[0], 0), _whole(rule.name, "pad_end", rule.pads[1], 0)
    if rule.what not in ("data", "mask", "group"):
        raise ValueError(f"windows of {rule.what!r}")
    elements = _elements(field, slice(*rule.elements))
    if (elements[0] - rule.first) * step < 0 or (elements[-1] - rule.first) * step >= span or max(pads) >= span:
        raise ValueError(f"elements {rule.elements} from {rule.first} on, padded by {pads}, in a span of {span} rows")
    base = records(series, field=field) if rule.what == "data" else _constant(True, _whole(rule.name, "n", rule.n, 0))
    if sum(part.count for part in base.parts) != rule.n:
        raise ValueError(f"a series of {rule.n} rows expected, {len(series)} found")
    plan = _plan(rule.n, span, stride, pads, None if rule.bounds is None else bounds_of(rule.bounds, rule.n), rule.name)
    found = _numbers(plan) if rule.what == "group" else _cut(base, elements, rule.first, step, plan, pads, rule.value)
    found = _masked(found) if rule.what == "mask" else found
    if rows is None:
        return found
    if rows.table is not None:
        return found._replace(rows=plan.rows.pick(as_indices(rows.table, plan.rows.count)))
    ends = (rows.start, rows.start + rows.step * (rows.count - 1)) if rows.count else (0, 0)
    if min(ends) < 0 or max(ends) >= max(plan.rows.count, 1):
        raise ValueError(f"windows {ends[0]} to {ends[1]} of {plan.rows.count}")
    return found._replace(rows=plan.rows.cut(rows.start, rows.step, rows.count))
