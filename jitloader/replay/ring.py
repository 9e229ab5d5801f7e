"""A ring of rows that is written while others read it, and what is kept beside it for reading returns over steps."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
ON, CUT, TERMINATED, LOST = 0, 1, 2, 3  # what is after a row, as `transitions` has it


class Snapshot(NamedTuple):
    """What a ring held at one moment: `length` rows from storage row `start` on, of `version` ever written."""

    start: int
    length: int
    version: int


def row_spec(name: str, spec: Any) -> tuple[np.dtype, tuple[int | None, ...]]:
    """Give a spec, a dtype or a pair (dtype, shape of one row), as that pair."""
    try:
        dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        found = np.dtype(dtype), tuple(None if n is None else operator.index(n) for n in sizes)
    except (TypeError, ValueError):
        raise TypeError(f"field {name}: a dtype, or a pair (dtype, shape of one row) expected, got {spec!r}") from None
    if found[0].hasobject:
        raise TypeError(f"field {name}: {found[0]} is not of fixed size")
    if any(n is not None and n < 0 for n in found[1]):
        raise ValueError(f"field {name}: sizes of at least 0 expected, got {found[1]}")
    return found


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"field {name}: rows of one shape expected, some differ in length") from None


def fitted(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Give values that a dtype holds, cast where that may fail. Numbers out of range and text too long are refused by
    ValueError, other kinds by TypeError; a float may be rounded, and inf and NaN pass."""
    if value.dtype == dtype or value.size == 0:
        return value
    source, target = value.dtype.kind, dtype.kind
    if source in "iu" and target in "iu":
        limits = np.iinfo(dtype)
        low, high = int(value.min()), int(value.max())
        if low < limits.min or high > limits.max:
            raise ValueError(f"field {name}: {low if low < limits.min else high} does not fit {dtype}")
    elif source in "SU" and target in "SU":
        return _text(name, value, dtype)
    elif target in "SU" or not np.can_cast(value.dtype, dtype, "same_kind"):
        raise TypeError(f"field {name}: {_first(value)} ({value.dtype}) does not go into {dtype}")
    elif target in "fc":
        if value.size == 1 and abs(value.item()) <= 65504:  # the largest float16; 2 us less than asking the cast
            return value
        try:
            with np.errstate(over="raise"):  # asked of the cast itself: another pass over the values would cost more
                return value.astype(dtype)
        except FloatingPointError:
            with np.errstate(over="ignore"):
                wrong = np.isfinite(value) & ~np.isfinite(value.astype(dtype))
            raise ValueError(f"field {name}: {_first(value[wrong])} does not fit {dtype}") from None
    return value


def _text(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    try:
        cast = value.astype(dtype)
    except UnicodeError:
        raise ValueError(f"field {name}: {_first(value)} is not ASCII, which {dtype} asks for") from None
    wrong = cast.astype(value.dtype) != value
    if wrong.any():
        raise ValueError(f"field {name}: {_first(value[wrong])} does not fit {dtype}")
    return cast


def _first(value: np.ndarray) -> str:
    """Give the first of some values in a few words."""
    told = repr(value.flat[0].item() if hasattr(value.flat[0], "item") else value.flat[0])
    return told if len(told) <= 40 else f"{told[:37]}..."


class Ring:
    """Keep the last `capacity` rows written: one array a field, overwritten in a circle.

    A spec is a dtype, or a pair (dtype, shape of one row). One thread writes while any number read. A reader takes a
    `snapshot`, reads what it wants of `fields` at `rows(logical, snapshot)`, and then asks `overwritten(snapshot)`: so
    many of the snapshot's oldest rows may have changed under its eyes; all younger ones were read whole.

    >>> ring = Ring(4, obs=("float32", (2,)), action="int64")
    >>> ring.append(obs=[0.5, 1.5], action=7)
    0
    >>> ring.extend(obs=np.zeros((5, 2)), action=[1, 2, 3, 4, 5]).tolist()
    [2, 3, 0, 1]
    >>> len(ring), ring.seam, ring.fields["action"].tolist()
    (4, 2, [4, 5, 2, 3])
    >>> ring.fields["action"][ring.rows([0, 1, 2, 3])].tolist()
    [2, 3, 4, 5]
    """

    __slots__ = ("_arrays", "_capacity", "_ends", "_lock", "_longer", "_written")

    def __init__(self, capacity: int, /, **specs: Any) -> None:
        self._capacity = operator.index(capacity)
        if self._capacity < 1:
            raise ValueError(f"a ring of {capacity} rows: capacity must be at least 1")
        if not specs:
            raise ValueError("a ring without fields: name at least one, as in Ring(1000, reward='float32')")
        arrays = {}
        for name, spec in specs.items():
            dtype, shape = row_spec(name, spec)
            if None in shape:
                raise ValueError(f"field {name}: rows of a ring have one shape, got {shape}")
            arrays[name] = np.zeros((self._capacity, *(int(n or 0) for n in shape)), dtype)
        self._arrays = arrays
        self._ends: dict[tuple[str, str | None], np.ndarray] = {}
        self._longer: dict[str, np.ndarray] = {}
        # (rows whose writing has begun, rows whose writing has ended), replaced as a whole: no reader sees half of it.
        self._written = (0, 0)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={a.dtype} {a.shape[1:]}" for name, a in self._arrays.items())
        return f"Ring({len(self)} of {self._capacity} rows, {fields})"

    def __len__(self) -> int:
        return min(self._written[1], self._capacity)

    @property
    def capacity(self) -> int:
        """How many rows there can be."""
        return self._capacity

    @property
    def fields(self) -> Mapping[str, np.ndarray]:
        """The arrays themselves (capacity, ...), in storage order; rows not yet written are 0."""
        return MappingProxyType(self._arrays)

    @property
    def seam(self) -> int:
        """The storage row that is written next: the newest row lies just before it and, once full, the oldest in it.

        A run of storage rows a .. b of written rows is a run in time where not a < seam <= b.
        """
        return self._written[1] % self._capacity

    def append(self, **row: Any) -> int:
        """Write one row, a value for each field, and give its storage row.

        Raises ValueError on a field that is missing, unknown or of another shape, on a number out of its dtype's range
        and on text longer than its width, TypeError on values of another kind; nothing is written then.
        """
        values = self._check({name: _array(name, value)[None] for name, value in row.items()})
        return int(self._write(values, 1)[0])

    def extend(self, **rows: Any) -> np.ndarray:
        """Write many rows, (n, ...) values for each field, and give their storage rows, (n,) int64.

        Of more rows than the ring can hold only the last are kept, and given. Raises what `append` raises, and
        ValueError where fields have different numbers of rows; nothing is written then.
        """
        values = self._check({name: _array(name, value) for name, value in rows.items()})
        counts = {name: len(value) for name, value in values.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"fields of different lengths: {', '.join(f'{k} {n}' for k, n in counts.items())}")
        return self._write(values, next(iter(counts.values())))

    def _check(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if values.keys() != self._arrays.keys():
            raise ValueError(f"a row has the fields {', '.join(self._arrays)}, not {', '.join(values) or 'none'}")
        for name, array in self._arrays.items():
            value = values[name]
            if value.ndim < 1:
                raise ValueError(f"field {name}: an array of rows of {array.shape[1:]} expected, one value found")
            if value.shape[1:] != array.shape[1:]:
                raise ValueError(f"field {name}: rows are {array.shape[1:]}, not {value.shape[1:]}")
            values[name] = fitted(name, value, array.dtype)
        return values

    def _write(self, values: dict[str, np.ndarray], n: int) -> np.ndarray:
        with self._lock:
            done = self._written[1]
            kept = min(n, self._capacity)
            first = (done + n - kept) % self._capacity
            head = min(kept, self._capacity - first)
            self._written = (done + n, done)
            for name, array in self._arrays.items():
                value = values[name]
                array[first : first + head] = value[n - kept : n - kept + head]
                array[: kept - head] = value[n - kept + head :]
            rows = (first + np.arange(kept, dtype=np.int64)) % self._capacity
            if kept:
                for (over, cut), end in self._ends.items():
                    self._set_ends(end, over, cut, rows, (done - 1) % self._capacity if done else None)
                for name, longer in self._longer.items():
                    self._lengthen(longer, name, rows)
            self._written = (done + n, done + n)
        return rows

    def _set_ends(self, end: np.ndarray, over: str, cut: str | None, rows: np.ndarray, before: int | None) -> None:
        """Say what is after rows that were written, the last of which is the newest; `before` was it until now."""
        if before is not None and end[before] == LOST:
            end[before] = ON
        found = np.where(self._arrays[over][rows] != 0, TERMINATED, ON)
        if cut is not None:
            found[(self._arrays[cut][rows] != 0) & (found == ON)] = CUT
        end[rows] = found
        if end[rows[-1]] == ON:
            end[rows[-1]] = LOST

    def _lengthen(self, longer: np.ndarray, name: str, rows: np.ndarray) -> None:
        longer[rows] = self._arrays[name][rows]
        extra = len(longer) - self._capacity
        longer[self._capacity :] = longer[np.arange(extra) % self._capacity]

    def ends(self, terminated: str, truncated: str | None = None) -> np.ndarray:
        """Give what is after each storage row, (capacity,) uint8, kept in step from now on: 0 where the episode goes on,
        1 where it was cut, 2 where it terminated, 3 after the newest row and rows not yet written.

        So a walk from row to row, the last followed by row 0, never crosses the seam.
        """
        key = terminated, truncated
        with self._lock:
            if key not in self._ends:
                end = np.full(self._capacity, LOST, np.uint8)
                if len(self):
                    done = self._written[1]
                    rows = np.arange(max(0, done - self._capacity), done, dtype=np.int64) % self._capacity
                    self._set_ends(end, terminated, truncated, rows, None)
                self._ends[key] = end
            return self._ends[key]

    def longer(self, name: str, extra: int) -> np.ndarray:
        """Give a field with its first `extra` rows again after the last, kept in step from now on: runs of as many rows
        and one lie in one piece."""
        with self._lock:
            known = self._longer.get(name)
            if known is None or len(known) < self._capacity + extra:
                array = self._arrays[name]
                self._longer[name] = np.zeros((self._capacity + extra, *array.shape[1:]), array.dtype)
                self._lengthen(self._longer[name], name, np.arange(self._capacity))
            return self._longer[name][: self._capacity + extra]

    def consistent(self, read: Callable[[], T]) -> T:
        """Give what a function reads, of whole rows: it runs once more, with writers waiting, if any wrote meanwhile."""
        before = self._written
        found = read()
        if self._written == before and before[0] == before[1]:
            return found
        with self._lock:
            return read()

    def copy(self) -> dict[str, np.ndarray]:
        """Give a copy of each field, the oldest row first."""

        def read() -> dict[str, np.ndarray]:
            start, length, _ = self.snapshot()
            rows = (start + np.arange(length)) % self._capacity
            return {name: array[rows] for name, array in self._arrays.items()}

        return self.consistent(read)

    def snapshot(self) -> Snapshot:
        """Give what is there now, without rows that are being overwritten."""
        begun, done = self._written
        oldest = min(done, max(0, begun - self._capacity))
        return Snapshot(oldest % self._capacity, done - oldest, done)

    def rows(self, logical: Any, snapshot: Snapshot | None = None) -> np.ndarray:
        """Give the storage rows of logical rows, counted from the oldest (0) of a snapshot (of now by default).

        Raises IndexError outside 0 .. length - 1.
        """
        start, length, _ = snapshot if snapshot is not None else self.snapshot()
        logical = np.asarray(logical)
        if logical.size == 0:
            return np.zeros(logical.shape, np.int64)
        if logical.dtype.kind not in "iu":
            raise TypeError(f"rows must be integers, not {logical.dtype}")
        if logical.min() < 0 or logical.max() >= length:
            bad = logical.min() if logical.min() < 0 else logical.max()
            raise IndexError(f"row {bad} is outside 0 .. {length - 1}" if length else f"row {bad} of an empty ring")
        rows: np.ndarray = (start + logical.astype(np.int64)) % self._capacity
        return rows

    def overwritten(self, snapshot: Snapshot) -> int:
        """Give how many of the snapshot's oldest rows have been, or are being, written over since it was taken."""
        oldest = snapshot.version - snapshot.length
        return min(snapshot.length, max(0, self._written[0] - self._capacity - oldest))

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:  # a copy is of whole rows
            return {name: getattr(self, name) for name in self.__slots__ if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        for name, value in state.items():
            setattr(self, name, value)
