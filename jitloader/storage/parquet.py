"""Parquet through pyarrow: always encoded, so its columns are decoded once, a row group a thread, into a folder of .npy."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Collection
from typing import Any

from jitloader import jit
from jitloader.errors import DataError

from . import arrow
from .mapped import Array, Column, Fields, Map, need
from .unpacked import Plan, Tell, Unpack, unpack

SUFFIXES = (".parquet", ".pq")
_MAGIC = b"PAR1"
_BATCH = 16 << 20  # bytes decoded at a time by each thread, about


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like Parquet."""
    return head.startswith(_MAGIC)


def fields(mapped: Map, where: Unpack = None, wanted: Collection[str] | None = None, progress: bool = True) -> Fields:
    """The columns of a file, decoded when the first of those `wanted` is asked for: (rows,), (rows, size, ...) for lists of
    fixed size, and a `Column` for lists of free length.

    Raises ImportError without pyarrow, DataError for a broken file; asking for a column with nulls, of strings or of
    structs raises DataError.
    """
    path = mapped.path
    pq = need("pyarrow", "arrow", f"{path}: reading Parquet") and need("pyarrow.parquet", "arrow", path)
    size = len(mapped)
    if size < 12 or mapped[-4:] != _MAGIC:
        raise DataError(
            f"{path}: a cut Parquet file: {_MAGIC!r} expected at its end, {mapped[-4:]!r} found ({size} bytes)"
        )
    length = struct.unpack("<I", mapped[-8:-4])[0]
    if length + 12 > size:
        raise DataError(f"{path}: a cut Parquet file: a footer of {length} bytes expected, {size} bytes found")
    mark = mapped[size - 8 - length :]
    try:
        with pq.ParquetFile(path) as file:
            table = _Table(pq, path, file.metadata, file.schema_arrow)
    except DataError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{path}: a broken Parquet file of {size} bytes: {error!s:.160}") from None
    except Exception as error:  # pyarrow has its own family
        raise DataError(f"{path}: a broken Parquet file of {size} bytes: {error!s:.160}") from None
    names = [name for name in table.names if wanted is None or name in wanted]
    decoded = functools.cache(lambda: unpack(path, mark, names, table.plan, table.fill, where, progress))
    return {name: functools.partial(lambda name: decoded()[name], name) for name in table.names}


class _Table:
    """What the footer of a file says of its columns and row groups."""

    def __init__(self, pq: Any, path: str, metadata: Any, schema: Any) -> None:
        self.pq, self.path, self.metadata = pq, path, metadata
        self.names: list[str] = schema.names
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        self.rows = [int(group.num_rows) for group in groups]
        if not self.names or len(set(self.names)) != len(self.names):
            raise DataError(f"{path}: columns of different names expected, {', '.join(self.names) or 'none'} found")
        if min(self.rows, default=0) < 0 or sum(self.rows) != metadata.num_rows:
            raise DataError(f"{path}: {metadata.num_rows} rows expected, {sum(self.rows)} found in its row groups")
        self.leaves: dict[str, list[int]] = {name: [] for name in self.names}
        for k in range(metadata.num_columns):
            whole = metadata.schema.column(k).path
            parts = whole.split(".")
            for end in range(len(parts), 0, -1):  # a column's own name may hold dots
                if (name := ".".join(parts[:end])) in self.leaves:
                    self.leaves[name].append(k)
                    break
        room = sum(group.total_byte_size for group in groups) // max(sum(self.rows), 1)
        self.batch = int(min(max(_BATCH // max(room, 1), 1), 65_536))
        self.groups = groups
        self.bounds: dict[str, list[int]] = {}

    def plan(self, names: list[str]) -> dict[str, Plan]:
        """Say what the columns will be, from the footer and the first rows."""
        first = next(self._batches(range(len(self.rows)), names, 64), None) if self.rows else None
        plans = {}
        for name in names:
            array = self._empty(name) if first is None else first.column(first.schema.get_field_index(name))
            array = array.drop_null() if array.null_count else array  # all of them are counted by `fill`
            found = arrow.read([(array, arrow.in_memory)], self._where(name), copies=True)
            values = found.arrays[0] if isinstance(found, Column) else found
            inner, total = values.shape[1:], sum(self.rows)
            if isinstance(found, Column):
                self.bounds[name] = [0, *itertools.accumulate(self._elements(name, math.prod(inner)))]
                plans[name] = Plan(values.dtype, (self.bounds[name][-1], *inner), total)
            else:
                plans[name] = Plan(values.dtype, (total, *inner))
        return plans

    def fill(self, arrays: dict[str, Array], offsets: dict[str, Array], tell: Tell) -> None:
        """Decode all row groups into the arrays, each thread one at a time and a batch of it in memory."""
        groups = range(len(self.rows))
        starts = [0, *itertools.accumulate(self.rows)]
        threads = max(1, min(jit.available_cpus(), len(groups)))
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(lambda g: self._group(g, starts[g], arrays, offsets, tell), groups))
        for name in arrays:
            nulls = sum(found[name][1] for found in done)
            if nulls:
                raise DataError(_nulls(self._where(name), nulls))
        for name, ends in offsets.items():  # close the gaps between the groups
            values, at = arrays[name], 0
            for g in groups:
                low, count = self.bounds[name][g], done[g][name][0]
                if at != low:
                    for k in range(0, count, 1 << 16):
                        values[at + k : at + min(k + (1 << 16), count)] = values[
                            low + k : low + min(k + (1 << 16), count)
                        ]
                ends[starts[g] + 1 : starts[g + 1] + 1] += at
                at += count

    def _group(
        self, group: int, start: int, arrays: dict[str, Array], offsets: dict[str, Array], tell: Tell
    ) -> dict[str, tuple[int, int]]:
        """Decode one row group; gives how many list elements, and how many nulls, each column has."""
        at, rows = 0, self.rows[group]
        done = dict.fromkeys(arrays, (0, 0))
        for batch in self._batches([group], list(arrays), self.batch):
            if at + len(batch) > rows:
                raise DataError(f"{self.path}, row group {group}: {rows} rows expected, more found")
            for name in arrays:
                column = batch.column(batch.schema.get_field_index(name))
                count, nulls = done[name]
                if column.null_count or nulls:
                    done[name] = count, nulls + column.null_count
                    continue
                found = arrow.read([(column, arrow.in_memory)], self._where(name), copies=True)
                target, low = arrays[name], start + at
                if name in offsets:
                    low, high = self.bounds[name][group] + count, self.bounds[name][group + 1]
                    assert isinstance(found, Column) and found.offsets is not None
                    ends, found = found.offsets, found.arrays[0]
                    if low + len(found) > high:
                        raise DataError(f"{self._where(name)}: more list elements found than its footer counts")
                    offsets[name][start + at + 1 : start + at + len(ends)] = ends[1:] + count
                    done[name] = count + len(found), nulls
                if found.shape[1:] != target.shape[1:] or found.dtype != target.dtype:  # type: ignore[union-attr]
                    raise DataError(
                        f"{self._where(name)}: rows of {target.dtype} {target.shape[1:]} expected, as the first ones, "
                        f"{found.dtype} {found.shape[1:]} found"  # type: ignore[union-attr]
                    )
                target[low : low + len(found)] = found
                tell(found.nbytes)  # type: ignore[union-attr]
            at += len(batch)
        if at != rows:
            raise DataError(f"{self.path}, row group {group}: {rows} rows expected, {at} found")
        return done

    def _batches(self, groups: Any, names: list[str], rows: int) -> Any:
        """Decode batches of some row groups; what goes wrong is a DataError."""
        leaves = [self.metadata.schema.column(k).path for name in names for k in self.leaves[name]]
        try:
            with self.pq.ParquetFile(self.path, metadata=self.metadata, buffer_size=1 << 20, pre_buffer=False) as file:
                yield from file.iter_batches(
                    rows, row_groups=list(groups), columns=leaves, use_threads=len(self.rows) == 1
                )
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{self.path}: a broken Parquet file: {error!s:.160}") from None

    def _empty(self, name: str) -> Any:
        with self.pq.ParquetFile(self.path) as file:
            return file.schema_arrow.empty_table().column(name).combine_chunks()

    def _elements(self, name: str, each: int) -> list[int]:
        """How many elements of `each` numbers the lists of each row group have at most: a leaf counts its numbers, and one
        for each empty list."""
        counts = []
        for g, group in enumerate(self.groups):
            # pyarrow ends the process where it is asked about a chunk whose entry in the footer is broken, and raises
            # where it reads one: so read first.
            next(self._batches([g], [name], 1), None)
            most = max((int(group.column(k).num_values) for k in self.leaves[name]), default=0)
            counts.append(max(most, 0) // max(each, 1) + (self.rows[g] if each != 1 else 0))
        return counts

    def _where(self, name: str) -> str:
        return f"{self.path}, column {name}"


def _nulls(where: str, count: int) -> str:
    return (
        f"{where}: {count} nulls found, none expected; fill them first (fill_null), or leave the column out by fields="
    )
