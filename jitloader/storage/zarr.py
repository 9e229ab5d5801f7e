"""Zarr through its own package: the arrays of a folder, version 2 or 3, sharded or not, decoded when they are read."""

from __future__ import annotations

import functools
import json
import os
import threading
from typing import Any

from jitloader.errors import DataError

from .chunked import reserve
from .mapped import Array, Fields, Stamp, check_dtype, check_shape, full_path, need

V3, V2, V2_GROUP = "zarr.json", ".zarray", ".zgroup"


def is_store(folder: str) -> bool:
    """Whether a folder is a Zarr array or group."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (V3, V2, V2_GROUP))


def fields(folder: str) -> Fields:
    """The arrays of a folder, those in groups as "group/name"; an array alone has the name of its folder.

    Raises ImportError without zarr and DataError for a group without arrays; asking for an array that zarr cannot open, or
    of objects or strings of free length, raises DataError.
    """
    path = full_path(folder)
    found: Fields = {}
    for place, folders, _ in os.walk(path):
        meta = _meta(place)
        if meta is not None:
            name = os.path.relpath(place, path).replace(os.sep, "/")
            name = os.path.splitext(os.path.basename(path))[0] if name == "." else name
            found[name] = functools.partial(read, meta)
            folders.clear()  # of its chunks
        folders.sort()
    if not found:
        raise DataError(f"{path}: a Zarr group without arrays: at least one expected, none found")
    need("zarr", "zarr", f"{path}: reading Zarr")
    return found


def _meta(folder: str) -> str | None:
    """The file that describes the array in a folder, None where there is none."""
    for name in (V2, V3):
        path = os.path.join(folder, name)
        if name == V2 and os.path.isfile(path):
            return path
        if name == V3 and os.path.isfile(path):
            try:
                with open(path, "rb") as file:
                    return path if json.load(file).get("node_type") == "array" else None
            except (ValueError, AttributeError) as error:
                raise DataError(f"{path}: broken metadata of Zarr: {error!s:.120}") from None
    return None


def read(meta: str) -> Array:
    """The array that a metadata file describes; its path and stamp stand for the array's."""
    folder = os.path.dirname(meta)
    stamp = Stamp.of(os.stat(meta))
    node = _open(folder)
    dtype, shape = check_dtype(node.dtype, folder), check_shape(node.shape, folder)
    if not shape:
        raise DataError(f"{folder}: a scalar: an array of at least one axis expected")
    return reserve(meta, stamp, "", shape, dtype, max(1, node.chunks[0]), _Chunks(meta, stamp), folder)


def placed(node: Any) -> Array | None:
    """The array that a handle of zarr's stands for, where it lies in a local folder; None elsewhere."""
    if type(node.store).__name__ not in ("LocalStore", "DirectoryStore") or not node.shape:
        return None
    root = getattr(node.store, "root", None) or node.store.path
    try:
        meta = _meta(os.path.join(full_path(root), node.path))
        return None if meta is None else read(meta)
    except (DataError, OSError):
        return None


def _open(folder: str) -> Any:
    zarr = need("zarr", "zarr", f"{folder}: reading Zarr")
    try:
        return zarr.open_array(folder, mode="r")
    except Exception as error:  # zarr raises many kinds, of codecs that are missing too
        raise DataError(f"{folder}: {type(error).__name__}: {error!s:.160}") from None


class _Chunks:
    """The chunks of one array: decodes rows into an array, from any thread."""

    def __init__(self, meta: str, stamp: Stamp) -> None:
        self.meta, self.stamp = meta, stamp
        self.lock = threading.Lock()
        self.node: Any = None
        self.pid = 0

    def __call__(self, first: int, target: Array) -> None:
        with self.lock:
            if self.pid != os.getpid():
                self.node, self.pid = _open(os.path.dirname(self.meta)), os.getpid()
        target[...] = self.node[first : first + len(target)]
        # Zarr reads a chunk that is not there as its fill value: after the array was removed, all of them.
        try:
            now: Stamp | None = Stamp.of(os.stat(self.meta))
        except OSError:
            now = None
        if now != self.stamp:
            raise DataError("the array was removed or written anew since it was opened; open it again")
