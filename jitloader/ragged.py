"""Rows of different lengths: one flat array of values, and the offsets at which rows begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .samples import Rows, Samples, records


def _start(row, offsets):  # type: ignore[no-untyped-def]
    return offsets[row]


def _length(row, offsets):  # type: ignore[no-untyped-def]
    return offsets[row + 1] - offsets[row]


def ragged(values: Any, offsets: Any = None, *, field: str = "values") -> Samples:
    """Map flat values and offsets to rows of different lengths: sample i is values[offsets[i] : offsets[i + 1]].

    `values` has shape (total, *shape) and is referred to, never copied; `offsets` are n + 1 rising integers from 0 to
    total at most. A list of arrays, without offsets, is packed once. Rows stay ragged until a stage closes them
    (`pad(length)`, `pad_to_longest()`); a field that none closes comes as a `Ragged(values, offsets)` batch. Raises
    ValueError for offsets that fall, start below 0 or end past the values.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(t=jl.ragged(np.arange(6), [0, 2, 2, 6]))
    >>> [data[i].t.tolist() for i in range(3)]
    [[0, 1], [], [2, 3, 4, 5]]
    """
    if offsets is None:
        rows = [np.asarray(row) for row in values]
        if not rows:
            raise ValueError("ragged: an empty list has no dtype: give values and offsets")
        kinds = {(row.dtype, row.shape[1:]) for row in rows}
        if len(kinds) > 1 or rows[0].ndim == 0:
            raise ValueError(f"ragged: rows must be arrays of one dtype, alike but for their length; got {len(kinds)} kinds")
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate(rows)
    flat = records(values, field=field)
    table = np.asarray(offsets)
    if table.ndim != 1 or table.size < 1 or table.dtype.kind not in "iu":
        raise ValueError(f"ragged: offsets must be a 1-D array of n + 1 integers, got {table.dtype} {table.shape}")
    table = np.ascontiguousarray(table, np.int64)
    if len(table) > 1:
        steps = np.diff(table)
        if (steps < 0).any():
            at = int(np.flatnonzero(steps < 0)[0])
            raise ValueError(f"ragged: offsets must not fall: offsets[{at}] = {table[at]}, offsets[{at + 1}] = {table[at + 1]}")
    if table[0] < 0 or table[-1] > flat.rows.count:
        raise ValueError(f"ragged: offsets run from {table[0]} to {table[-1]}, the values have {flat.rows.count} rows")
    return flat._replace(
        name="ragged",
        shape=(None, *flat.shape),
        strides=(flat.parts[0].stride, *flat.strides),
        rows=Rows(len(table) - 1),
        locate=_start,
        length=_length,
        params=(table,),
    )


def lengths(samples: Samples) -> np.ndarray:
    """Give the length of each row of a ragged field, int64."""
    table = samples.params[0]
    every = np.diff(table)
    rows = samples.rows
    return every[rows.table] if rows.table is not None else every[rows.start : rows.start + rows.count * rows.step : rows.step]


def as_rows(values: np.ndarray, offsets: np.ndarray) -> Sequence[np.ndarray]:
    """Give ragged rows as a list of arrays."""
    return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
