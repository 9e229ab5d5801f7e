"""Arrays that lie in a file in chunks: memory in the shape of the whole array, into which rows are decoded when asked for.

Memory is reserved, not used, until something is decoded into it, and given back to the system when it is dropped, so that
kernels read such an array as any other. It is decoded and dropped by bands: the rows that one line of chunks holds. Who
reads it says so first (`jitloader.residency`); what was never asked for reads as zeros.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable

import numpy as np

from jitloader.errors import DataError

from .mapped import Array, DType, Map, Stamp

ABSENT, COMING, THERE = 0, 1, 2  # what `state` says of a band
PAGE = mmap.PAGESIZE
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13

# fetch(first, target): decode the rows from `first` on into `target`, an array of them
Fetch = Callable[[int, Array], None]

alive: weakref.WeakSet[Chunked] = weakref.WeakSet()


class Chunked(Map):
    """The memory of one array, which stands for the file as a map of it would, and what is in which of its bands.

    `state`, `users` (who may not lose it now) and `when` (it was or will be wanted) have an entry a band; `resident`
    counts the bytes of all that are there or coming, `holds` those who read now, `coming` the bands being decoded.
    """

    where: str  # the array, for a message
    fetch: Fetch
    shape: tuple[int, ...]
    dtype: DType
    rows: int  # of a band
    band: int  # bytes of a band
    nbytes: int

    def prepare(self) -> None:
        """Begin with nothing there; after a fork, with what was there and none that is coming."""
        count = -(-self.shape[0] // self.rows)
        self.state, self.users = np.zeros(count, np.int8), np.zeros(count, np.int32)
        self.when = np.zeros(count, np.int64)
        self.resident = self.holds = self.coming = self.decoded = 0

    def size_of(self, bands: Array) -> int:
        """Bytes of some bands; the last one may be short."""
        if not len(bands):
            return 0
        last = len(self.state) - 1
        return len(bands) * self.band - (last * self.band + self.band - self.nbytes) * int((bands == last).sum())

    def decode(self, first: int, last: int) -> None:
        """Decode bands first .. last - 1 into place. Raises DataError that names path, dataset and rows."""
        low, high = first * self.rows, min(last * self.rows, self.shape[0])
        whole: Array = np.ndarray(self.shape, self.dtype, buffer=self)
        try:
            self.fetch(low, whole[low:high])
        except Exception as error:  # whatever a codec felt like
            what = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error!s:.160}"
            raise DataError(f"{self.where}, rows {low} to {high - 1}: {what}") from None

    def drop(self, bands: Array) -> None:
        """Give the memory of some bands, in rising order, back to the system; a page goes with the last band in it."""
        self.state[bands] = ABSENT
        self.resident -= self.size_of(bands)
        ends = np.flatnonzero(np.diff(bands) > 1)
        for first, last in zip(bands[np.r_[0, ends + 1]], bands[np.r_[ends, -1]], strict=True):
            low, high = int(first) * self.band, min((int(last) + 1) * self.band, self.nbytes)
            begin = low // PAGE * PAGE
            if self.state[begin // self.band : int(first)].any():
                begin += PAGE
            end = -(-high // PAGE) * PAGE
            if self.state[int(last) + 1 : (end - 1) // self.band + 1].any():
                end -= PAGE
            if begin < end:
                self.madvise(mmap.MADV_DONTNEED, begin, min(end, len(self)) - begin)


def reserve(
    path: str, stamp: Stamp, dataset: str, shape: tuple[int, ...], dtype: DType, rows: int, fetch: Fetch, where: str
) -> Array:
    """Give the array of a chunked dataset, read-only, of which nothing is decoded yet; `rows` of it make a band."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    try:
        memory = Chunked(
            -1,
            nbytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {nbytes:,} bytes of address space cannot be reserved: {error}") from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # else a page of 2 MB may come with the first byte, and come back after a drop
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.path, memory.stamp, memory.dataset, memory.where = path, stamp, dataset, where
    memory.shape, memory.dtype, memory.fetch = shape, dtype, fetch
    memory.rows, memory.nbytes = min(rows, shape[0]), nbytes
    memory.band = memory.rows * (nbytes // shape[0])
    memory.prepare()
    alive.add(memory)
    array: Array = np.ndarray(shape, dtype, buffer=memory)
    array.flags.writeable = False
    return array
