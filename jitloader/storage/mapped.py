"""Where bytes lie: whole files mapped read-only, found again from any view, and watched for change under the map."""

from __future__ import annotations

import errno
import importlib
import math
import mmap
import os
import reprlib
import stat
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jitloader.errors import DataError

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]
Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
# What a format finds in a file: a name and how to get its array. One bad field must not spoil the others.
Fields: TypeAlias = "dict[str, Callable[[], Array | Column]]"

_OPEN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a named pipe would block for ever
_MAX_AXES = 64


class Stamp(NamedTuple):
    """What a file was at one moment; two equal stamps mean the same bytes."""

    device: int
    inode: int
    size: int
    mtime: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Column(NamedTuple):
    """A field whose rows lie in several arrays, one after the other.

    With `offsets` row i is the elements offsets[i] to offsets[i + 1] - 1 of them all, and lies in one of them. With
    `rows` the samples are these rows.
    """

    arrays: tuple[Array, ...]
    offsets: Array | None = None
    rows: Array | None = None


class Map(mmap.mmap):
    """A read-only map of one whole file that knows its path and the file's stamp when it was mapped."""

    path: str
    stamp: Stamp
    dataset: str | None = None  # of memory that stands for one: its name in the file ("" for a file of its own)


class Location(NamedTuple):
    """Where an array lies in a file: enough to pickle it by reference and `reopen(*location)` it elsewhere.

    With `dataset`, the offset is that in the dataset, which is chunked.
    """

    path: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    size: int
    dataset: str | None = None


class Mapping(NamedTuple):
    """The map below an array: `array` starts `offset` bytes into the map, and the map `start` bytes into the file."""

    map: mmap.mmap
    offset: int
    start: int
    path: str | None
    mode: str


def full_path(path: Path) -> str:
    """Turn str, bytes or os.PathLike into an absolute str, so that errors and pickles hold in any working folder."""
    return os.path.abspath(os.fsdecode(path))


def need(module: str, extra: str, what: str) -> Any:
    """Import an optional package, or raise ImportError that names the extra to install, or why the package fails."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"{what} needs {module}: pip install 'jitloader[{extra}]'") from None
    except ImportError as error:
        raise ImportError(f"{what} needs {module}, which is installed but fails: {error}") from None


def pick(found: Fields, names: Collection[str] | None, where: str) -> dict[str, Any]:
    """Get the named fields, all without names; DataError says which are there where one is missing."""
    names = list(found) if names is None else names
    for name in names:
        if name not in found:
            raise DataError(f"{where}: field {name!r} expected, {listing(found)} found")
    return {name: found[name]() for name in names}


def listing(found: Fields) -> str:
    """The names of fields for a message."""
    return ", ".join(list(found)[:8]) + (", ..." if len(found) > 8 else "") if found else "none"


def map_file(path: Path) -> Map:
    """Map one whole file read-only; nothing is read.

    Raises the system's OSError with the full path (missing, a folder, no permission, too many open files), and
    DataError for an empty file or something that is no regular file.
    """
    path = full_path(path)
    descriptor = os.open(path, _OPEN)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path}: not a regular file, so it cannot be mapped")
        if found.st_size == 0:
            raise DataError(f"{path}: an empty file: data expected, 0 bytes found")
        try:
            mapped = Map(descriptor, found.st_size, access=mmap.ACCESS_READ)
        except OSError as error:
            error.filename = path
            raise
        except ValueError:
            raise DataError(f"{path}: cut while it was opened: {found.st_size} bytes expected") from None
    finally:
        os.close(descriptor)
    mapped.path, mapped.stamp = path, Stamp.of(found)
    return mapped


def check_dtype(dtype: DType, where: str) -> DType:
    """Give back a dtype whose values are plain bytes, or raise DataError: objects are pickles, never loaded."""
    if dtype.hasobject or dtype.kind in "OT":
        raise DataError(
            f"{where}: dtype {dtype} holds Python objects (a pickle, never loaded); save numbers or 'S'/'U'"
        )
    if dtype.itemsize == 0 or dtype.subdtype is not None:
        raise DataError(f"{where}: {dtype!r} is no dtype of a file: elements of at least one byte expected")
    return dtype


def check_shape(shape: Any, where: str) -> tuple[int, ...]:
    """Give back a shape as a tuple of sizes, or raise DataError; nothing is allocated and nothing can overflow."""
    good = isinstance(shape, tuple | list) and len(shape) <= _MAX_AXES
    for n in shape if good else ():  # a loop: a file may have thousands of arrays
        good = good and type(n) is int and 0 <= n < 2**63
    if not good:
        raise DataError(f"{where}: an absurd shape: {reprlib.repr(shape)}")
    return tuple(shape)


def view(mapped: Map, dtype: DType, shape: tuple[int, ...], offset: int, where: str, stop: int | None = None) -> Array:
    """See `shape` elements of `dtype` from byte `offset` of a map on; DataError where they do not end before `stop`."""
    room = len(mapped) if stop is None else min(stop, len(mapped))
    wanted = offset + math.prod(shape) * dtype.itemsize
    if not 0 <= offset <= room or wanted > room:
        raise DataError(f"{where}: {dtype} {shape} ends at byte {wanted} (expected), but only {room} bytes are found")
    try:
        array: Array = np.ndarray(shape, dtype, buffer=mapped, offset=offset)
        return array
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: an absurd shape: {shape}: {error}") from None


def map_below(array: Array) -> mmap.mmap | None:
    """Find the map in which an array's bytes lie, None where that is plain memory."""
    node: Any = array
    while node is not None and not isinstance(node, mmap.mmap):
        node = node.obj if isinstance(node, memoryview) else getattr(node, "base", None)
    return node


def mapping(array: Array) -> Mapping | None:
    """Find the file map below an array, its views and slices included; None where its bytes lie in plain memory.

    Takes arrays of this room and any np.memmap, np.frombuffer(mmap) or view of these. `mode` is "r" for a read-only
    map, "c" for a private copy-on-write one, else "r+". This is the way to `madvise`: the bytes of row i are in
    `map` from `offset + i * array.strides[0]` on.
    """
    path: str | None = None
    start, mode = 0, ""
    node: Any = array
    while node is not None and not isinstance(node, mmap.mmap):
        if isinstance(node, np.memmap) and node.offset is not None:
            # Views of a memmap keep the offset of the first one, which is where the map was asked to start.
            path = None if node.filename is None else full_path(node.filename)
            start, mode = node.offset - node.offset % mmap.ALLOCATIONGRANULARITY, node.mode
        node = node.obj if isinstance(node, memoryview) else getattr(node, "base", None)
    if node is None or len(node) == 0:
        return None
    whole = np.frombuffer(node, np.uint8)
    if isinstance(node, Map):
        path = node.path
    if mode not in ("r", "c"):
        mode = "r+" if whole.flags.writeable else "r"
    offset = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return Mapping(node, offset, start, path, mode)


class Watch:
    """Remembers what the file below a map was; `verify()` says when it is no longer that. Keeps the map open."""

    __slots__ = ("_found", "_stamp", "_warned")

    def __init__(self, found: Mapping, stamp: Stamp | None) -> None:
        self._found, self._stamp, self._warned = found, stamp, False

    @property
    def path(self) -> str | None:
        """The full path of the file, None for a map that has no name."""
        return self._found.path

    def verify(self) -> None:
        """Compare the file with what was mapped: one fstat on the map's own descriptor, one stat on the path.

        Raises DataError, again at each call, where the mapped file is now shorter than its map (reading would be
        SIGBUS), or where it was written in place since (its size or mtime differ: old and new bytes would mix; not
        asked of writable "r+" maps, which the user writes through). Warns once (UserWarning) where the path now holds
        another file (os.replace): the map keeps the old bytes, whole; of a chunked dataset any change is a DataError. A path that is gone is no fault: the bytes stay.
        Unseen: a rewrite of the same size within the clock tick (milliseconds) of the write before it, and a cut or
        write after this call; whoever changes data in use had better write a new file.
        """
        path, wanted = self._found.path, self._found.start + len(self._found.map)
        size = _file_size(self._found.map)
        if size is not None and size < wanted:
            raise DataError(
                f"{path or 'a mapped file'}: truncated under its map: {wanted} bytes expected, {size} found; "
                "open it again"
            )
        if path is None or self._stamp is None:
            return
        try:
            now = Stamp.of(os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        if getattr(self._found.map, "dataset", None) is not None and now != self._stamp:
            raise DataError(f"{path}: changed since it was opened, and its chunks are read when needed; open it again")
        if now[:2] != self._stamp[:2]:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{path}: now another file ({self._stamp.size} bytes expected, {now.size} found); "
                    "the old one stays in use until it is opened again",
                    UserWarning,
                    stacklevel=2,
                )
        elif now != self._stamp and self._found.mode != "r+":
            raise DataError(
                f"{path}: written in place since it was opened: {self._stamp.size} bytes expected, {now.size} found, "
                f"mtime {self._stamp.mtime} expected, {now.mtime} found; "
                "open it again, and write new data to a new file"
            )


def watch(array: Array) -> Watch | None:
    """Watch the file below an array; None where it lies in plain memory or shared memory without a file.

    Arrays of this room are compared with the file as it was when opened, a user's np.memmap with the file as it is now.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "x.npy")
    ...     np.save(path, np.arange(1000))
    ...     guard = watch(np.load(path, mmap_mode="r")[::2])
    ...     guard.verify()
    ...     os.truncate(path, 4000)
    ...     try:
    ...         guard.verify()
    ...     except DataError as error:
    ...         print(str(error).partition(": ")[2])
    truncated under its map: 8128 bytes expected, 4000 found; open it again
    """
    found = mapping(array)
    if found is None or (found.path is None and _file_size(found.map) is None):
        return None
    stamp: Stamp | None = None
    if isinstance(found.map, Map):
        stamp = found.map.stamp
    elif found.path is not None and os.path.exists(found.path):
        stamp = Stamp.of(os.stat(found.path))
    return Watch(found, stamp)


def locate(array: Array) -> Location | None:
    """Say where in which file an array lies: (path, dtype, shape, strides, offset, size of the file).

    None where a reader of the path would not get the same bytes: plain memory, a map without a name, a
    copy-on-write map, a file that was replaced, changed or removed since.

    >>> import tempfile
    >>> from jitloader import storage
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(folder + "/x.npy", np.arange(12).reshape(3, 4))
    ...     x = np.load(folder + "/x.npy", mmap_mode="r")[::-1, 1:3]
    ...     storage.reopen(*locate(x)).tolist()
    [[9, 10], [5, 6], [1, 2]]
    """
    found = mapping(array)
    if found is None or found.path is None or found.mode == "c":
        return None
    try:
        now = Stamp.of(os.stat(found.path))
    except OSError:
        return None
    stamp = found.map.stamp if isinstance(found.map, Map) else None
    if (stamp is not None and stamp != now) or _file_size(found.map) not in (None, now.size):
        return None
    dataset = found.map.dataset if isinstance(found.map, Map) else None
    return Location(found.path, array.dtype, array.shape, array.strides, found.start + found.offset, now.size, dataset)


def remap(path: str) -> Map:
    """Map a whole file as `map_file` does; what is mapped so already, and unchanged, is not mapped again."""
    mapped = _reopened.get(path)
    if mapped is None or Stamp.of(os.stat(path)) != mapped.stamp:
        mapped = _reopened[path] = map_file(path)
    return mapped


def see(mapped: Map, dtype: npt.DTypeLike, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Array:
    """See a read-only array of this dtype, shape and strides in a map; DataError where that is too short for it."""
    where = mapped.path
    dtype = check_dtype(np.dtype(dtype), where)
    try:
        sizes = check_shape(shape, where)
        array: Array = np.ndarray(sizes, dtype, buffer=mapped, offset=offset, strides=strides)
        array.flags.writeable = False
        return array
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: {len(mapped)} bytes found, too few for {dtype} {shape}: {error}") from None


# Of one file there may be thousands of arrays, and a process may have some 65,000 maps.
_reopened: weakref.WeakValueDictionary[str, Map] = weakref.WeakValueDictionary()


def _file_size(mapped: mmap.mmap) -> int | None:
    """Bytes of the mapped file now, by the map's own descriptor; None for a map without one."""
    try:
        return mapped.size()
    except (OSError, ValueError):
        return None
