"""HDF5 through h5py: contiguous datasets mapped at their offset in the file, chunked ones decoded when they are read."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import weakref
import zlib
from typing import Any

import numpy as np

from jitloader.errors import DataError

from .chunked import reserve
from .mapped import Array, DType, Fields, Map, Stamp, check_dtype, check_shape, full_path, map_file, need, view

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_MAGIC = b"\x89HDF\r\n\x1a\n"
_DEFLATE, _SHUFFLE = 1, 2  # registered numbers of filters
_SMALL = 4096  # bytes of a chunk below which the loop of the library is faster than one of Python


def sniff(head: bytes, path: str) -> bool:
    """Whether a file has the mark of HDF5, at its start or after a user block."""
    return any(head[at : at + 8] == _MAGIC for at in (0, 512, 1024, 2048, 4096))


def fields(mapped: Map) -> Fields:
    """The datasets of a file, those in groups as "group/name". Links into other files are not followed.

    Chunked ones, compressed by any filter that h5py has, are decoded when they are read (`storage.chunked`). Raises
    ImportError without h5py and DataError for a broken file; asking for a dataset of another layout (compact, external,
    virtual, never written, strings of free length) raises DataError.
    """
    path = mapped.path
    h5py = need("h5py", "hdf5", f"{path}: reading HDF5")
    found: Fields = {}

    def take(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            try:
                found[name] = _place(mapped, node, name, f"{path}, dataset {name}", h5py)
            except DataError as error:
                found[name] = functools.partial(_refuse, str(error))
            except Exception as error:  # a type that h5py has no dtype for, or a broken part of the file
                found[name] = functools.partial(_refuse, f"{path}, dataset {name}: {error!s:.160}")

    try:
        with h5py.File(path, "r") as file:
            file.visititems(take)
    except Exception as error:  # h5py raises what its C library felt like
        raise DataError(f"{path}: a broken HDF5 file of {len(mapped)} bytes: {error!s:.160}") from None
    if Stamp.of(os.stat(path)) != mapped.stamp:
        raise DataError(f"{path}: changed while it was opened: {len(mapped)} bytes expected; open it again")
    if not found:
        raise DataError(f"{path}: an HDF5 file without datasets: at least one expected, none found")
    return found


def _place(mapped: Map, node: Any, name: str, where: str, h5py: Any) -> functools.partial[Array]:
    """Find where a dataset's bytes lie, or say why they lie nowhere as an array."""
    if node.shape is None:
        raise DataError(f"{where}: empty (a null dataspace): an array expected")
    dtype: DType = check_dtype(node.dtype, where)
    shape = check_shape(node.shape, where)
    remedy = "write it with create_dataset(name, data=array)"
    if node.external is not None or node.is_virtual:
        raise DataError(f"{where}: its bytes lie in other files, so it cannot be mapped; {remedy}")
    # A type with odd bits would be converted on reading; a map shows the stored bytes.
    same = dtype.kind == "S" or node.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True))
    if node.chunks is not None:
        chunks = _Chunks(mapped, node, name, dtype, same)
        return functools.partial(reserve, mapped.path, mapped.stamp, name, shape, dtype, node.chunks[0], chunks, where)
    wanted, stored = math.prod(shape) * dtype.itemsize, node.id.get_storage_size()
    if wanted == 0:
        return functools.partial(np.empty, shape, dtype)
    offset = node.id.get_offset()
    if offset is None:
        raise DataError(f"{where}: no bytes of its own ({wanted} expected): compact or never written; {remedy}")
    if not same or stored != wanted:
        raise DataError(f"{where}: not stored as {dtype}: {wanted} bytes expected, {stored} found; {remedy}")
    return functools.partial(view, mapped, dtype, shape, offset, where)


def placed(node: Any) -> Array | None:
    """The dataset that an h5py handle stands for, where it lies in its file; None where only reading it whole will do.

    That is so while a file is open for writing, of which part may be in memory alone, in a file of another driver than the
    usual one, and for layouts that `fields` refuses.
    """
    if node.file.mode != "r" or node.file.driver != "sec2" or not node.name or not node.shape:
        return None
    h5py = need("h5py", "hdf5", "an h5py dataset")
    path, name = full_path(node.file.filename), node.name.lstrip("/")
    try:
        mapped = map_file(path)
        same = Stamp.of(os.fstat(node.file.id.get_vfd_handle())) == mapped.stamp  # the name may be of another folder
        return _place(mapped, node, name, f"{path}, dataset {name}", h5py)() if same else None
    except (DataError, OSError):
        return None


def _refuse(message: str) -> Array:
    raise DataError(message)


class _Chunks:
    """A chunked dataset: decodes rows into an array, from any thread.

    Chunks that are plain, shuffled or deflated are read where they lie and decoded here, for h5py holds one lock for all
    that its C library does; others go through h5py.
    """

    def __init__(self, mapped: Map, node: Any, name: str, dtype: DType, same: bool) -> None:
        self.path, self.stamp, self.name, self.dtype = mapped.path, mapped.stamp, name, dtype
        self.shape, self.chunks = node.shape, node.chunks
        self.fill: Any = None  # of chunks that were never written
        create = node.id.get_create_plist()
        self.filters = [create.get_filter(k)[0] for k in range(create.get_nfilters())]
        known = same and set(self.filters) <= {_DEFLATE, _SHUFFLE} and not node.file.userblock_size
        self.direct = known and math.prod(self.chunks) * dtype.itemsize >= _SMALL
        self.grid = tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))
        self.lock = threading.Lock()
        self.table: Array | None = None  # of each chunk: offset in the file, bytes, filters left out
        self.descriptor = -1

    def __call__(self, first: int, target: Array) -> None:
        if not self.direct:
            with (
                self._open() as file
            ):  # each time: an open handle would keep the user from writing, and hold in no child
                file[self.name].read_direct(target, np.s_[first : first + len(target)])
            return
        with self.lock:
            if self.table is None:
                self._find()
        table, columns = self.table, list(itertools.product(*map(range, self.grid[1:])))
        assert table is not None
        for low in range(0, len(target), self.chunks[0]):
            number = (first + low) // self.chunks[0] * len(columns)
            for k, at in enumerate(columns):
                sides = zip(at, self.chunks[1:], self.shape[1:], strict=True)
                place = (slice(low, low + self.chunks[0]), *(slice(i * c, min((i + 1) * c, n)) for i, c, n in sides))
                offset, size, skipped = table[number + k].tolist()
                self._decode(offset, size, skipped, target[place])

    def _open(self) -> Any:
        h5py = need("h5py", "hdf5", f"{self.path}: reading HDF5")
        file = h5py.File(self.path, "r")
        if Stamp.of(os.stat(self.path)) != self.stamp:
            file.close()
            raise DataError("the file changed since it was opened; open it again")
        return file

    def _find(self) -> None:
        """Look up where the chunks lie, and keep the file open."""
        with self._open() as file:
            self.descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.descriptor)
            if Stamp.of(os.fstat(self.descriptor)) != self.stamp:
                raise DataError("the file changed since it was opened; open it again")
            node = file[self.name].id
            table = np.zeros((math.prod(self.grid), 3), np.int64)

            def note(info: Any) -> None:
                at = [n // c for n, c in zip(info.chunk_offset, self.chunks, strict=True)]
                if all(i < n for i, n in zip(at, self.grid, strict=True)):  # a dataset may have been cut
                    table[np.ravel_multi_index(at, self.grid)] = info.byte_offset, info.size, info.filter_mask

            if hasattr(node, "chunk_iter"):
                node.chunk_iter(note)
            else:
                for k in range(node.get_num_chunks()):
                    note(node.get_chunk_info(k))
            unwritten = np.flatnonzero(table[:, 1] == 0)
            if unwritten.size:  # `node.fillvalue` ends the process where what a broken file says of it is odd
                at = np.unravel_index(unwritten[0], self.grid)
                self.fill = file[self.name][tuple(int(i) * c for i, c in zip(at, self.chunks, strict=True))]
        self.table = table

    def _decode(self, offset: int, size: int, skipped: int, target: Array) -> None:
        """Decode one chunk into its place, which may be smaller than a chunk."""
        if not size:
            target[...] = self.fill
            return
        used = [f for k, f in enumerate(self.filters) if not skipped >> k & 1]
        if not used and target.flags.c_contiguous and target.shape[1:] == self.chunks[1:]:
            into = target.reshape(-1).view(np.uint8)
            if hasattr(os, "preadv") and os.preadv(self.descriptor, [into.data], offset) == into.nbytes:
                return
        data: Any = os.pread(self.descriptor, size, offset)
        wanted = math.prod(self.chunks) * self.dtype.itemsize
        if len(data) != size:
            raise DataError(f"the file is cut: a chunk of {size} bytes at {offset} expected, {len(data)} found")
        for number in reversed(used):
            if number == _DEFLATE:
                stream = zlib.decompressobj()
                data = stream.decompress(data, wanted + 1)  # no more, whatever a broken one would give
                if not stream.eof:
                    raise DataError("a deflated chunk that ends expected, a cut one found")
            else:
                parts = np.frombuffer(data, np.uint8).reshape(self.dtype.itemsize, -1)
                data = np.ascontiguousarray(parts.T)
        if memoryview(data).nbytes != wanted:
            raise DataError(f"a chunk of {wanted} bytes expected, {memoryview(data).nbytes} found")
        whole: Array = np.frombuffer(data, self.dtype).reshape(self.chunks)
        target[...] = whole[tuple(slice(n) for n in target.shape)]
