"""safetensors: eight bytes of length, a JSON header, then the tensors, mapped."""

from __future__ import annotations

import functools
import json
import math
import reprlib
import struct
from typing import Any

import numpy as np

from jitloader.errors import DataError

from .dtypes import BITS, extra_dtype
from .mapped import Array, DType, Fields, Map, check_shape, view

SUFFIXES = (".safetensors",)
_MAX_HEADER = 100_000_000  # what the format's own library takes
_DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
_EXTRAS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like a safetensors: a length, then an opening brace and a quote."""
    return len(head) > 9 and head[8:10] in (b'{"', b"{}") and 2 <= struct.unpack("<Q", head[:8])[0] <= _MAX_HEADER


def fields(mapped: Map) -> Fields:
    """The tensors of a file by name.

    Raises DataError for a broken header, and where the tensors do not fill the file exactly, without hole or overlap.
    """
    path, size = mapped.path, len(mapped)
    if size < 8:
        raise DataError(f"{path}: a cut header: at least 8 bytes expected, {size} found")
    (length,) = struct.unpack("<Q", mapped[:8])
    if length > min(_MAX_HEADER, size - 8):
        raise DataError(f"{path}: a header of {length} bytes expected, {size - 8} bytes found")
    try:
        header: Any = json.loads(mapped[8 : 8 + length].decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: a broken safetensors header: {error!s:.120}") from None
    if not isinstance(header, dict):
        raise DataError(f"{path}: a broken safetensors header: an object expected, {reprlib.repr(header)} found")
    header.pop("__metadata__", None)
    spans = []
    for name, entry in header.items():
        where = f"{path}, tensor {name}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise DataError(f"{where}: dtype, shape and data_offsets expected, {reprlib.repr(entry)} found")
        shape, ends, code = check_shape(entry["shape"], where), entry["data_offsets"], entry["dtype"]
        if not isinstance(ends, list) or len(ends) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in ends):
            raise DataError(f"{where}: two offsets expected, {reprlib.repr(ends)} found")
        kind = _bits(code)
        if kind is None:
            raise DataError(
                f"{where}: dtype {reprlib.repr(code)} found, one of {', '.join([*_DTYPES, *_EXTRAS])} expected"
            )
        if ends[1] - ends[0] != math.prod(shape) * kind.itemsize:
            raise DataError(f"{where}: {math.prod(shape) * kind.itemsize} bytes expected, {ends[1] - ends[0]} found")
        spans.append((ends[0], ends[1], name, shape))
    found: Fields = {}
    reached = 0
    for begin, end, name, shape in sorted(spans):
        if begin != reached:
            raise DataError(f"{path}, tensor {name}: starts at byte {reached} (expected), {begin} found")
        reached = end
        found[name] = functools.partial(_tensor, mapped, header[name]["dtype"], shape, 8 + length + begin, name)
    if 8 + length + reached != size:
        raise DataError(f"{path}: {8 + length + reached} bytes expected, {size} found")
    return {name: found[name] for name in header}


def _tensor(mapped: Map, code: str, shape: tuple[int, ...], offset: int, name: str) -> Array:
    where = f"{mapped.path}, tensor {name}"
    dtype = _DTYPES[code] if code in _DTYPES else extra_dtype(_EXTRAS[code], where)
    return view(mapped, dtype, shape, offset, where)


def _bits(code: Any) -> DType | None:
    """The dtype, or the bits of it, behind a code of the format."""
    if not isinstance(code, str):
        return None
    return BITS[_EXTRAS[code]] if code in _EXTRAS else _DTYPES.get(code)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
