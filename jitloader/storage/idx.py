"""IDX, the files of MNIST: four bytes of type and axes, the sizes, then big-endian values."""

from __future__ import annotations

import functools
import math
import os
import re
import struct

import numpy as np

from jitloader.errors import DataError

from .mapped import Array, DType, Fields, Map, check_shape, view

SUFFIXES = ("-ubyte", ".idx")
_DTYPES: dict[int, DType] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like an IDX: two zeros, a known type, and 1 to 8 axes."""
    return len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _DTYPES and 1 <= head[3] <= 8


def fields(mapped: Map) -> Fields:
    """The one array of an IDX file: `image` for "...images...", `label` for "...labels...", else the file's name."""
    name = re.sub(r"[-.]idx\d?(-ubyte)?$", "", os.path.basename(mapped.path))
    name = "image" if "images" in name else "label" if "labels" in name else name
    return {name: functools.partial(_read, mapped)}


def _read(mapped: Map) -> Array:
    where = mapped.path
    head = mapped[:4]
    if not sniff(head, where):
        raise DataError(f"{where}: not an IDX file: two zeros, a type and 1 to 8 axes expected, {head!r} found")
    begin = 4 + 4 * head[3]
    if begin > len(mapped):
        raise DataError(f"{where}: a cut header: {begin} bytes expected, {len(mapped)} found")
    dtype = _DTYPES[head[2]]
    shape = check_shape(struct.unpack(f">{head[3]}I", mapped[4:begin]), where)
    wanted = begin + math.prod(shape) * dtype.itemsize
    if wanted != len(mapped):
        raise DataError(f"{where}: IDX of {dtype} {shape}: {wanted} bytes expected, {len(mapped)} found")
    return view(mapped, dtype, shape, begin, where)
