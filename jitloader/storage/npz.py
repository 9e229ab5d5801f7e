""".npz: the members stored without compression are mapped where they lie inside the zip."""

from __future__ import annotations

import functools
import struct
from typing import IO, TYPE_CHECKING, cast

from jitloader.errors import DataError

from . import npy
from .mapped import Array, Fields, Map

if TYPE_CHECKING:
    import zipfile

SUFFIXES = (".npz",)
_STORED = 0  # zipfile.ZIP_STORED
_LOCAL = struct.Struct("<4s22xHH")  # a member's own header: signature, length of its name, length of its extra field


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like a zip."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def fields(mapped: Map) -> Fields:
    """The .npy members of a zip, each called like its member without ".npy".

    Raises DataError for a broken zip and for absolute or parent paths, and when a compressed member is asked for.
    """
    import zipfile  # a third of the import time of this package, and few need it

    try:
        with zipfile.ZipFile(cast(IO[bytes], mapped)) as archive:  # a map reads and seeks like a file
            members = archive.infolist()
    except Exception as error:  # zipfile raises half a dozen kinds on bad bytes
        raise DataError(f"{mapped.path}: a broken zip of {len(mapped)} bytes: {error}") from None
    found: Fields = {}
    for member in members:
        name = member.orig_filename
        if name.startswith(("/", "\\")) or ":" in name or ".." in name.replace("\\", "/").split("/") or "\0" in name:
            raise DataError(f"{mapped.path}: member {name!r}: a plain relative name expected")
        if name.endswith(".npy"):
            if name[:-4] in found:
                raise DataError(f"{mapped.path}: member {name!r} found twice, once expected")
            found[name[:-4]] = functools.partial(_member, mapped, member)
    if not found:
        raise DataError(f"{mapped.path}: a zip of {len(members)} members: at least one .npy expected, none found")
    return found


def _member(mapped: Map, member: zipfile.ZipInfo) -> Array:
    """See one stored member as an array."""
    where = f"{mapped.path}, member {member.orig_filename}"
    if member.flag_bits & 1:
        raise DataError(f"{where}: encrypted, so it cannot be mapped; save it plain")
    if member.compress_type != _STORED or member.compress_size != member.file_size:
        raise DataError(
            f"{where}: compressed, so it cannot be mapped ({member.compress_size} bytes found, {member.file_size} "
            "expected); save with np.savez, not np.savez_compressed"
        )
    begin = member.header_offset
    head = mapped[begin : begin + _LOCAL.size] if begin >= 0 else b""
    if len(head) < _LOCAL.size or not head.startswith(b"PK\x03\x04"):
        raise DataError(f"{where}: no member header at byte {begin} as expected, {head[:4]!r} found")
    _, name, extra = _LOCAL.unpack(head)
    begin += _LOCAL.size + name + extra
    stop = begin + member.file_size
    if stop > len(mapped):
        raise DataError(f"{where}: cut: {stop} bytes expected, {len(mapped)} found")
    return npy.read(mapped, begin, stop, where)
