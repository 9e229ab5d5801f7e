"""Access patterns: what sample i of a field is, as places in the memory of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .dtypes import carry, lend
from .foreign import as_array
from .spec import Spec


class Part(NamedTuple):
    """One array behind a field, seen as flat memory: row r starts at item `offset + r * stride` of `flat`."""

    array: np.ndarray
    flat: np.ndarray
    offset: int
    stride: int
    count: int  # type: ignore[assignment]


class Rows(NamedTuple):
    """Which row of the arrays sample i reads: `table[i]`, or `start + step * i` where there is no table."""

    count: int  # type: ignore[assignment]
    start: int = 0
    step: int = 1
    table: np.ndarray | None = None

    def pick(self, indices: np.ndarray) -> Rows:
        """Give the rows at these checked, non-negative sample indices."""
        table = self.start + self.step * indices if self.table is None else self.table[indices]
        return Rows(len(indices), 0, 1, np.ascontiguousarray(table, np.int64))

    def cut(self, start: int, step: int, count: int) -> Rows:
        """Give the rows of samples start, start + step, ..."""
        if self.table is None:
            return Rows(count, self.start + self.step * start, self.step * step)
        stop = start + step * count
        return Rows(count, 0, 1, np.ascontiguousarray(self.table[start : stop if stop >= 0 else None : step]))

    def __getitem__(self, i: int) -> int:  # type: ignore[override]
        return int(self.table[i]) if self.table is not None else self.start + self.step * i


class Samples(NamedTuple):
    """One field before any stage: where its samples lie and what they are.

    `carrier` is the dtype that moves the bits (the dtype itself where kernels can compute with it, else an unsigned
    integer of the same size), `shape` and `strides` (in carrier items; one axis more than `shape`
    where items of odd size travel as bytes) describe one sample, `locate(row, *params)` maps the
    row index to the row where the sample starts (None: the row itself), `length(row, *params)` to how many rows it has
    where the first axis varies. Elements of the first axis before `low(row, *params)` or from `high(row, *params)` on lie
    outside: they are `fill`, or where that is None the nearest element inside; in a `ring` those before row 0 of the array
    lie at its end. `tell(row, *params)` says in words where
    a sample lies, for errors.
    """

    name: str
    parts: tuple[Part, ...]
    dtype: np.dtype
    carrier: np.dtype
    shape: tuple[int | None, ...]
    strides: tuple[int, ...]
    rows: Rows
    locate: Callable[..., Any] | None = None
    length: Callable[..., Any] | None = None
    params: tuple[Any, ...] = ()
    low: Callable[..., Any] | None = None
    high: Callable[..., Any] | None = None
    fill: float | None = None
    ring: bool = False
    tell: Callable[..., str] | None = None
    rule: Any = None  # how the access pattern was asked for, where `save` writes that down instead of the samples

    @property
    def spec(self) -> Spec:
        """The type of one sample."""
        return Spec(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays behind the field."""
        return sum(part.array.nbytes for part in self.parts)


def records(array: Any, *, field: str = "array") -> Samples:
    """Map an array to samples: sample i is row i, `array[i]`.

    Shape (n, *shape), any strides, any dtype but Python objects; the array is referred to, never copied. Raises
    ValueError for a 0-d array and TypeError for an object array, naming the field.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"field {field!r} is a masked array, and kernels see no mask: give array.filled(value)")
    if not isinstance(array, np.ndarray):
        array = as_array(array, field)
    array = array.view(np.ndarray)
    if array.ndim == 0:
        raise ValueError(f"field {field!r} is 0-d: it has no rows")
    if array.dtype.hasobject:
        raise TypeError(f"field {field!r} holds Python objects (dtype {array.dtype}): give an array of numbers")
    if array.dtype.names is not None:
        names = ", ".join(array.dtype.names)
        raise TypeError(
            f"field {field!r} holds records: give its columns ({names}) as fields of their own, "
            "Dataset({name: array[name] for name in array.dtype.names})"
        )
    carrier, view = carry(array)
    part, strides = flatten(view)
    return Samples("records", (part,), array.dtype, carrier, tuple(array.shape[1:]), strides, Rows(len(array)))


def flatten(array: np.ndarray) -> tuple[Part, tuple[int, ...]]:
    """Give an array as flat memory, with the strides (in items) of one sample: the array's own bytes, not a copy."""
    item = max(array.itemsize, 1)
    if array.flags.c_contiguous or array.size == 0:
        strides, size = [], 1
        for n in reversed(array.shape[1:]):
            strides.append(size)
            size *= n
        flat = array.reshape(-1)
        return Part(array, flat, 0, size, len(array)), tuple(reversed(strides))
    low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    memory = lend(array, array.ctypes.data + low, high - low + item)
    flat = memory.view(array.dtype)
    return Part(array, flat, -low // item, array.strides[0] // item, len(array)), tuple(
        s // item for s in array.strides[1:]
    )


def join(many: Sequence[Samples], field: str) -> Samples:
    """Give the samples of one field of several data sets, one after the other, by reference."""
    first, shift, tables = many[0], 0, []
    parts: list[Part] = []
    for other in many:
        if first.spec != other.spec or first.carrier != other.carrier:
            raise ValueError(f"field {field!r}: cannot join {first.spec} and {other.spec}")
        if first.strides != other.strides or (len(many) > 1 and other.locate):
            raise ValueError(
                f"field {field!r}: the two lie in memory in different ways: give np.ascontiguousarray of both"
            )
        start, table = other.rows.start + shift, other.rows.table
        tables.append(other.rows._replace(start=start, table=None if table is None else table + shift))
        parts += other.parts
        shift += sum(p.count for p in other.parts)
    count, end = 0, tables[0].start
    for rows in tables:
        if rows.table is not None or rows.step != 1 or rows.start != end:
            every = [
                r.start + r.step * np.arange(r.count, dtype=np.int64) if r.table is None else r.table for r in tables
            ]
            whole = np.concatenate(every)
            return first._replace(parts=tuple(parts), rows=Rows(len(whole), 0, 1, whole), rule=None)
        count, end = count + rows.count, end + rows.count
    rule = first.rule if len(many) == 1 else None
    return first._replace(parts=tuple(parts), rows=Rows(count, tables[0].start), rule=rule)


def as_indices(indices: Any, count: int, what: str = "indices") -> np.ndarray:
    """Give row numbers or a mask as int64 row numbers in range(count): a bool array is a mask, integers may be negative.

    Raises ValueError for a mask of another length, TypeError for floats, IndexError for a row that is not there.
    """
    try:
        array = np.asarray(indices)
    except ValueError:
        raise TypeError(f"{what} must be integers or a bool mask, got rows of different lengths") from None
    if array.dtype == bool:
        if array.shape != (count,):
            raise ValueError(f"mask has {array.size} entries, the data has {count} rows")
        return np.flatnonzero(array)
    if array.ndim != 1:
        raise ValueError(f"{what} must be 1-D, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers or a bool mask, got {array.dtype}")
    wrong = (array >= count) | (array < -count) if array.dtype.kind == "i" else array >= count
    if wrong.any():
        raise IndexError(f"row {array[wrong][0]} is out of range: the data has {count} rows")
    result = array.astype(np.int64)
    result[result < 0] += count
    return result


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Give the strides (in items) of a C-contiguous array."""
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))
