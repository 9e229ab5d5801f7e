"""HDF5 through h5py: contiguous, uncompressed datasets, mapped at their offset in the file."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np

from jitloader.errors import DataError

from .mapped import Array, DType, Fields, Map, Stamp, check_dtype, check_shape, need, view

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_MAGIC = b"\x89HDF\r\n\x1a\n"


def sniff(head: bytes, path: str) -> bool:
    """Whether a file has the mark of HDF5, at its start or after a user block."""
    return any(head[at : at + 8] == _MAGIC for at in (0, 512, 1024, 2048, 4096))


def fields(mapped: Map) -> Fields:
    """The datasets of a file, those in groups as "group/name". Links into other files are not followed.

    Raises ImportError without h5py and DataError for a broken file; asking for a dataset that cannot be mapped
    (chunked, compressed, compact, external, virtual, never written, strings of free length) raises DataError.
    """
    path = mapped.path
    h5py = need("h5py", "hdf5", f"{path}: reading HDF5")
    found: Fields = {}

    def take(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            try:
                found[name] = _place(mapped, node, f"{path}, dataset {name}", h5py)
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


def _place(mapped: Map, node: Any, where: str, h5py: Any) -> functools.partial[Array]:
    """Find where a dataset's bytes lie, or say why they lie nowhere as an array."""
    if node.shape is None:
        raise DataError(f"{where}: empty (a null dataspace): an array expected")
    dtype: DType = check_dtype(node.dtype, where)
    shape = check_shape(node.shape, where)
    remedy = "write it with create_dataset(name, data=array), without chunks or compression"
    if node.external is not None or node.is_virtual:
        raise DataError(f"{where}: its bytes lie in other files, so it cannot be mapped; {remedy}")
    if node.chunks is not None or node.id.get_create_plist().get_nfilters():
        how = f"compressed ({node.compression})" if node.compression else "chunked"
        raise DataError(f"{where}: {how}, so it cannot be mapped; {remedy}")
    wanted, stored = math.prod(shape) * dtype.itemsize, node.id.get_storage_size()
    if wanted == 0:
        return functools.partial(np.empty, shape, dtype)
    offset = node.id.get_offset()
    if offset is None:
        raise DataError(f"{where}: no bytes of its own ({wanted} expected): compact or never written; {remedy}")
    # A type with odd bits would be converted on reading; a map shows the stored bytes.
    same = dtype.kind == "S" or node.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True))
    if not same or stored != wanted:
        raise DataError(f"{where}: not stored as {dtype}: {wanted} bytes expected, {stored} found; {remedy}")
    return functools.partial(view, mapped, dtype, shape, offset, where)


def _refuse(message: str) -> Array:
    raise DataError(message)
