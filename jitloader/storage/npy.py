""".npy, versions 1 to 3: one array, mapped after its header."""

from __future__ import annotations

import ast
import functools
import os
import re
import reprlib
import struct
from collections.abc import Callable
from typing import Any

from numpy.lib.format import descr_to_dtype

from jitloader.errors import DataError

from .mapped import Array, DType, Fields, Map, check_dtype, check_shape, view

MAGIC = b"\x93NUMPY"
SUFFIXES = (".npy",)
MAX_HEADER = 65_535  # all of version 1; the literal parser is not to be trusted with more


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like a .npy."""
    return head.startswith(MAGIC)


def fields(mapped: Map) -> Fields:
    """The one array of a .npy, called like the file."""
    name = os.path.splitext(os.path.basename(mapped.path))[0]
    return {name: functools.partial(read, mapped, 0, len(mapped), mapped.path)}


def read(mapped: Map, start: int, stop: int, where: str) -> Array:
    """See the .npy in bytes `start` to `stop` of a map as an array: C or Fortran order, any byte order, structured.

    Raises DataError for a cut or foreign header, an object dtype, an absurd shape, and too few bytes.
    """
    begin, shape, fortran, dtype = layout(lambda n: mapped[start : min(stop, start + n)], stop - start, where)
    if fortran:
        flipped: Array = view(mapped, dtype, shape[::-1], start + begin, where, stop).transpose()
        return flipped
    return view(mapped, dtype, shape, start + begin, where, stop)


def layout(take: Callable[[int], bytes], size: int, where: str) -> tuple[int, tuple[int, ...], bool, DType]:
    """Where the data of a .npy of `size` bytes begin, their shape, whether they are in Fortran order, and their dtype;
    `take(n)` gives the first n bytes, or fewer."""
    head = take(12)
    if not head.startswith(MAGIC):
        raise DataError(f"{where}: not a .npy: {MAGIC!r} expected at its start, {head[:8]!r} found ({size} bytes)")
    if len(head) < 12:
        raise DataError(f"{where}: a cut header: at least 12 bytes expected, {size} found")
    version = head[6], head[7]
    if version == (1, 0):
        begin, (length,) = 10, struct.unpack("<H", head[8:10])
    elif version in ((2, 0), (3, 0)):
        begin, (length,) = 12, struct.unpack("<I", head[8:12])
    else:
        raise DataError(f"{where}: .npy version {version[0]}.{version[1]} found, 1.0, 2.0 or 3.0 expected")
    if length > MAX_HEADER:
        raise DataError(f"{where}: a header of {length} bytes, at most {MAX_HEADER} expected")
    raw = take(begin + length)
    if begin + length > size or len(raw) != begin + length:
        raise DataError(f"{where}: a cut header: {begin + length} bytes expected, {size} found")
    return begin + length, *_parse(raw[begin:], "utf8" if version[0] == 3 else "latin1", where)


def header(dtype: DType, shape: tuple[int, ...], room: int = 0) -> bytes:
    """The bytes before the data of a C-ordered .npy, a multiple of 64 and at least `room`; ValueError for a dtype it
    cannot name."""
    descr = dtype.str if dtype.names is None else dtype.descr
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    version, code = ((1, 0), "latin1") if text.isascii() else ((3, 0), "utf8")
    encoded = text.encode(code)
    begin = 10 if version == (1, 0) else 12
    encoded = encoded.ljust(room - begin - 1)
    encoded += b" " * (-(begin + len(encoded) + 1) % 64) + b"\n"
    if len(encoded) > MAX_HEADER:
        raise ValueError(f"dtype of {len(dtype.names or ())} fields: its header would take {len(encoded)} bytes")
    return MAGIC + bytes(version) + struct.pack("<H" if begin == 10 else "<I", len(encoded)) + encoded


def _parse(raw: bytes, encoding: str, where: str) -> tuple[tuple[int, ...], bool, DType]:
    """Read shape, order and dtype from a header: literals only, nothing is run."""
    try:
        text = raw.decode(encoding)
        try:
            found: Any = ast.literal_eval(text)
        except SyntaxError:
            found = ast.literal_eval(re.sub(r"(?<=\d)L(?=[,)])", "", text))  # Python 2 wrote 10L
        if not isinstance(found, dict) or found.keys() != {"descr", "fortran_order", "shape"}:
            raise ValueError("keys descr, fortran_order and shape expected")
        dtype: DType = descr_to_dtype(found["descr"])
        fortran, shape = found["fortran_order"], found["shape"]
    except Exception as error:  # the parsers of Python and NumPy raise a dozen kinds on bad bytes
        raise DataError(f"{where}: a broken .npy header: {type(error).__name__}: {error!s:.120}") from None
    if type(fortran) is not bool:
        raise DataError(f"{where}: a broken .npy header: fortran_order {reprlib.repr(fortran)}, True or False expected")
    return check_shape(shape, where), fortran, check_dtype(dtype, where)
