""".npz: the members stored without compression are mapped where they lie inside the zip, others unpacked when asked."""

from __future__ import annotations

import errno
import functools
import math
import struct
import zlib
from collections.abc import Collection
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from jitloader.errors import DataError

from . import npy
from .mapped import Array, Fields, Map
from .unpacked import Plan, Tell, Unpack, unpack

if TYPE_CHECKING:
    import zipfile

SUFFIXES = (".npz",)
_STORED = 0  # zipfile.ZIP_STORED
_DEFLATED = 8  # zipfile.ZIP_DEFLATED, of np.savez_compressed
_MOST = 1032  # bytes that a byte of deflate becomes at most
_BLOCK = 1 << 20
_LOCAL = struct.Struct("<4s22xHH")  # a member's own header: signature, length of its name, length of its extra field


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like a zip."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def fields(mapped: Map, where: Unpack = None, wanted: Collection[str] | None = None, progress: bool = True) -> Fields:
    """The .npy members of a zip, each called like its member without ".npy".

    Of stored members, which are mapped, no byte is read, so that their checksums are not checked; those of what is unpacked
    are. With `where`, compressed members of those `wanted` are unpacked there once, a block at a time. Raises DataError for a
    broken zip and for absolute or parent paths, and, without `where`, when a compressed member is asked for.
    """
    import zipfile  # a third of the import time of this package, and few need it

    try:
        with zipfile.ZipFile(cast(IO[bytes], mapped)) as archive:  # a map reads and seeks like a file
            members = archive.infolist()
    except Exception as error:  # zipfile raises half a dozen kinds on bad bytes
        raise DataError(f"{mapped.path}: a broken zip of {len(mapped)} bytes: {error}") from None
    found: Fields = {}
    packed: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        name = member.orig_filename
        if name.startswith(("/", "\\")) or ":" in name or ".." in name.replace("\\", "/").split("/") or "\0" in name:
            raise DataError(f"{mapped.path}: member {name!r}: a plain relative name expected")
        if name.endswith(".npy"):
            if name[:-4] in found:
                raise DataError(f"{mapped.path}: member {name!r} found twice, once expected")
            found[name[:-4]] = functools.partial(_member, mapped, member)
            if where and member.compress_type == _DEFLATED and not member.flag_bits & 1:
                packed[name[:-4]] = member
    if not found:
        raise DataError(f"{mapped.path}: a zip of {len(members)} members: at least one .npy expected, none found")
    names = [name for name in packed if wanted is None or name in wanted]
    mark = repr([(m.orig_filename, m.CRC, m.header_offset, m.compress_size, m.file_size) for m in members]).encode()
    job = _Packed(mapped.path, packed)
    unpacked = functools.cache(lambda: unpack(mapped.path, mark, names, job.plan, job.fill, where, progress))
    for name in names:
        found[name] = functools.partial(lambda name: unpacked()[name], name)
    return found


class _Packed:
    """The compressed members of a file."""

    def __init__(self, path: str, members: dict[str, zipfile.ZipInfo]) -> None:
        self.path, self.members = path, members
        self.begins: dict[str, int] = {}

    def plan(self, names: list[str]) -> dict[str, Plan]:
        """Say what the members hold, from their headers."""
        plans = {}
        for name in names:
            member, where = self.members[name], self._where(name)
            if member.file_size > member.compress_size * _MOST + 64:
                raise DataError(f"{where}: {member.compress_size} bytes found, too few for {member.file_size} unpacked")
            head = b"".join(self._blocks(name, npy.MAX_HEADER + 12))
            begin, shape, fortran, dtype = npy.layout(lambda n, head=head: head[:n], member.file_size, where)  # type: ignore
            size = begin + math.prod(shape) * dtype.itemsize
            if size != member.file_size:
                raise DataError(f"{where}: {dtype} {shape}: {size} bytes expected, {member.file_size} found")
            self.begins[name] = begin
            plans[name] = Plan(dtype, shape[::-1] if fortran else shape, flipped=fortran)
        return plans

    def fill(self, arrays: dict[str, Array], offsets: dict[str, Array], tell: Tell) -> None:
        """Unpack the members into the arrays; their checksums are checked."""
        for name, array in arrays.items():
            flat, at = array.reshape(-1).view(np.uint8), -self.begins[name]
            for block in self._blocks(name, self.members[name].file_size):
                skipped = min(max(-at, 0), len(block))
                part = np.frombuffer(block, np.uint8)[skipped:]
                flat[max(at, 0) : max(at, 0) + len(part)] = part
                at += len(block)
                tell(len(part))
            if at != flat.size:
                raise DataError(f"{self._where(name)}: {flat.size} bytes expected, {max(at, 0)} found")

    def _blocks(self, name: str, most: int) -> Any:
        """Unpack the first `most` bytes of a member."""
        import zipfile

        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.members[name]) as stream:
                while most > 0:
                    block = stream.read(min(_BLOCK, most))
                    if not block:
                        return
                    most -= len(block)
                    yield block
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise DataError(f"{self._where(name)}: broken: {error!s:.160}") from None
        except OSError as error:
            if error.errno == errno.EINVAL:  # a header that points before the file
                raise DataError(f"{self._where(name)}: broken: {error!s:.160}") from None
            error.filename = self.path
            raise

    def _where(self, name: str) -> str:
        return f"{self.path}, member {name}.npy"


def _member(mapped: Map, member: zipfile.ZipInfo) -> Array:
    """See one stored member as an array."""
    where = f"{mapped.path}, member {member.orig_filename}"
    if member.flag_bits & 1:
        raise DataError(f"{where}: encrypted, so it cannot be mapped; save it plain")
    if member.compress_type != _STORED or member.compress_size != member.file_size:
        raise DataError(
            f"{where}: compressed, so it cannot be mapped ({member.compress_size} bytes found, {member.file_size} "
            "expected); unpack it once by unpack=True, or save with np.savez, not np.savez_compressed"
        )
    begin = member.header_offset
    head = mapped[begin : begin + _LOCAL.size] if begin >= 0 else b""
    if len(head) < _LOCAL.size or not head.startswith(b"PK\x03\x04"):
        raise DataError(f"{where}: no member header at byte {begin} as expected, {head[:4]!r} found")
    _, name, extra = _LOCAL.unpack(head)
    begin += _LOCAL.size
    told = mapped[begin : begin + name]
    if told.decode("utf8" if member.flag_bits & 0x800 else "cp437", "replace") != member.orig_filename:
        raise DataError(f"{where}: called {told!r} in its own header: a broken zip")
    begin += name + extra
    stop = begin + member.file_size
    if stop > len(mapped):
        raise DataError(f"{where}: cut: {stop} bytes expected, {len(mapped)} found")
    return npy.read(mapped, begin, stop, where)
