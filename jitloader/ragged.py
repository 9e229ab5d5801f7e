"""Rows of different lengths: one flat array of values, and the offsets at which rows begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from .samples import Rows, Samples, records


def _start(row, offsets):  # type: ignore[no-untyped-def]
    return offsets[row]


def _length(row, offsets):  # type: ignore[no-untyped-def]
    return offsets[row + 1] - offsets[row]


def _tell(row: int, offsets: np.ndarray) -> str:
    return f"values {offsets[row]} to {offsets[row + 1]}"


@overload
def ragged(values: Mapping[str, Any], offsets: Any = None) -> dict[str, Samples]: ...


@overload
def ragged(values: Any, offsets: Any = None, *, field: str = "values") -> Samples: ...


def ragged(values: Any, offsets: Any = None, *, field: str = "values") -> Samples | dict[str, Samples]:
    """Map flat values and offsets to rows of different lengths: sample i is values[offsets[i] : offsets[i + 1]].

    `values` has shape (total, *shape) and is referred to, never copied; `offsets` are n + 1 rising integers from 0 to
    total at most. Several value arrays by name are as many fields over the same offsets: `jl.Dataset(jl.ragged({...},
    offsets))`. A list of arrays (or of lists of numbers), without offsets, is packed once. Rows stay ragged until a
    stage closes them (`pad_rows(length)`, `pad_to_longest()`); a field that none closes comes as a
    `Ragged(values, offsets)` batch. Raises ValueError for offsets that fall, start below 0 or end past the values.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(6), [0, 2, 2, 6]))
    >>> [data[i].t.tolist() for i in range(3)]
    [[0, 1], [], [2, 3, 4, 5]]
    >>> jl.Dataset(jl.ragged({"id": [[1, 2], [3]], "weight": [[0.5, 1.0], [2.0]]}))[1]
    Batch(id=array([3]), weight=array([2.]))
    """
    if isinstance(values, Mapping):
        return _several(values, offsets)
    if offsets is None:
        values, offsets = _packed(values, field)
    return _over(values, _offsets(offsets), field)


def _several(values: Mapping[str, Any], offsets: Any) -> dict[str, Samples]:
    if not values:
        raise ValueError("ragged takes at least one array of values")
    if offsets is not None:
        table = _offsets(offsets)
        counts = {name: len(array) for name, array in values.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{k!r} has {n} rows" for k, n in counts.items())
            raise ValueError(f"ragged: values differ in length: {told}")
        return {name: _over(array, table, name) for name, array in values.items()}
    packed = {name: _packed(rows, name) for name, rows in values.items()}
    first, (_, table) = next(iter(packed.items()))
    for name, (_, other) in packed.items():
        if len(other) != len(table):
            raise ValueError(f"ragged: {first!r} has {len(table) - 1} rows, {name!r} {len(other) - 1}")
        wrong = np.flatnonzero(np.diff(other) != np.diff(table))
        if wrong.size:
            at = int(wrong[0])
            told = f"{table[at + 1] - table[at]} elements in {first!r}, {other[at + 1] - other[at]} in {name!r}"
            raise ValueError(f"ragged: row {at} has {told}")
    return {name: _over(array, table, name) for name, (array, _) in packed.items()}


def _packed(values: Any, field: str) -> tuple[np.ndarray, np.ndarray]:
    """Give a list of rows as one array and its offsets."""
    if isinstance(values, np.ndarray) and values.ndim < 2 and values.dtype != object:
        raise ValueError(f"ragged: {field!r} is one array of values: give its offsets")
    rows = [np.asarray(row) for row in values]
    if not rows:
        raise ValueError("ragged: an empty list has no dtype: give values and offsets")
    # An empty list of numbers is of any dtype.
    typed = [row for row, given in zip(rows, values, strict=True) if row.size or isinstance(given, np.ndarray)] or rows
    kinds = {(row.dtype, row.shape[1:]) if row.ndim else (row.dtype, None) for row in typed}
    if len(kinds) > 1 or typed[0].ndim == 0:
        found = ", ".join(sorted(f"{dtype} {shape}" for dtype, shape in kinds))
        raise ValueError(f"ragged: rows must be arrays of one dtype, alike but for their length; got {found}")
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.concatenate(typed), offsets


def _offsets(offsets: Any) -> np.ndarray:
    """Give checked offsets: int64, from 0 or later, never falling."""
    table = np.asarray(offsets)
    if table.ndim != 1 or table.size < 1 or table.dtype.kind not in "iu":
        raise ValueError(f"ragged: offsets must be a 1-D array of n + 1 integers, got {table.dtype} {table.shape}")
    table = np.ascontiguousarray(table, np.int64)
    falls = np.flatnonzero(table[1:] < table[:-1])
    if falls.size:
        at = int(falls[0])
        told = f"offsets[{at}] = {table[at]}, offsets[{at + 1}] = {table[at + 1]}"
        raise ValueError(f"ragged: offsets must not fall: {told}")
    return table


def _over(values: Any, table: np.ndarray, field: str) -> Samples:
    """Give values as rows between checked offsets."""
    flat = values if isinstance(values, Samples) else records(values, field=field)
    if flat.locate is not None or flat.rows != Rows(sum(part.count for part in flat.parts)):
        raise ValueError(f"ragged: {field!r} must be one plain array of values")
    if table[0] < 0 or table[-1] > flat.rows.count:
        raise ValueError(f"ragged: offsets run from {table[0]} to {table[-1]}, {field!r} has {flat.rows.count} rows")
    return flat._replace(
        name="ragged",
        shape=(None, *flat.shape),
        strides=(flat.parts[0].stride, *flat.strides),
        rows=Rows(len(table) - 1),
        locate=_start,
        length=_length,
        params=(table,),
        tell=_tell,
    )


def lengths(samples: Samples) -> np.ndarray:
    """Give the length of each row of a ragged field, int64."""
    table = samples.params[0]
    every = np.diff(table)
    rows = samples.rows
    return every[rows.start + rows.step * np.arange(rows.count) if rows.table is None else rows.table]


def as_rows(values: np.ndarray, offsets: np.ndarray) -> Sequence[np.ndarray]:
    """Give ragged rows as a list of arrays."""
    return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
