"""A folder of .npy files, replaced as a whole: readers see the old fields or the new ones, whatever hits a writer.

The protocol. A folder holds `x.npy`, `y.npy`, ... and `manifest.json`, which lists them with a random token. A writer

1. takes the folder's lock (flock on the folder itself: it dies with the process; a second writer: BlockingIOError),
2. writes and fsyncs every file in `.new-<token>/` inside the folder, reserving the disk space first,
3. replaces `manifest.json` by one that names the token, and fsyncs the folder. This one rename is the commit,
4. moves the files up over the old ones, deletes fields that are no more, fsyncs, and removes `.new-<token>/`.

A reader takes each file of the manifest from `.new-<token>/` if it is there, else from the folder, and reads the
manifest again afterwards: another token means that a writer came by, so it starts over. Killed before 3, the old
version stands and the next writer sweeps the rest away; killed after 3, the new version stands and the next writer
finishes 4. Maps of the old files keep their bytes, because files are replaced and never written in place. Files that no
manifest lists are left alone. At rest the folder is a plain one of .npy files; only while 4 runs, or after it was
killed, may a reader that does not know the manifest see a mix.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import mmap
import os
import reprlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import descr_to_dtype

from jitloader.errors import DataError

from . import npy
from .dtypes import BITS, extra_dtype, extra_name
from .mapped import Array, DType, Fields, Map, Path, Stamp, check_dtype, check_shape, full_path, map_file, mapping, pick
from .remote import scheme, shown

MANIFEST = "manifest.json"
VERSION = 1
_STAGE = ".new-"
_BLOCK = 1 << 23
_TRIES = 100
_NOTING = 0.3  # seconds that a writer waits for one that only notes something
_MAX_MANIFEST = 1 << 26
_BAD_IN_NAMES = set('/\\:*?"<>|')


def open_folder(path: Path, fields: Collection[str] | None = None) -> tuple[dict[str, Array], dict[str, Any]]:
    """Map the fields of a folder, and give the meta that was saved with them ({} for a plain folder of .npy).

    With `fields`, only these are opened. Raises FileNotFoundError or NotADirectoryError for the folder, DataError where
    a file is not what the manifest says and where a field is missing.
    """
    path = full_path(path)
    for _ in range(_TRIES):
        manifest = read_manifest(path)
        try:
            found = pick(
                _plain(path) if manifest is None else _listed(path, manifest), with_parts(fields, manifest), path
            )
        except (OSError, DataError):
            if _token(read_manifest(path)) == _token(manifest):
                raise
            continue
        if _token(read_manifest(path)) == _token(manifest):
            return found, {} if manifest is None else manifest["meta"]
    raise DataError(f"{path}: saved anew {_TRIES} times while it was opened; a folder at rest expected")


def with_parts(fields: Collection[str] | None, manifest: Mapping[str, Any] | None) -> Collection[str] | None:
    """Give the names of the arrays that some fields are made of: their own, but for those of which a rule names others."""
    if fields is None or manifest is None:
        return fields
    rules = manifest["meta"].get("samples", {})
    found = [part for name in fields for part in (rules[name]["arrays"] if name in rules else [name])]
    return list(dict.fromkeys(found))


def save_fields(folder: Path, fields: Mapping[str, Array], meta: Mapping[str, Any] | None = None) -> None:
    """Write arrays as a folder of .npy with a manifest, as a whole or not at all.

    Keeps dtype (byte order, structured, bfloat16 too), shape and values; the layout becomes C order. An existing
    version is replaced by one rename once everything is on disk (the protocol is at the head of this file), so a
    crash, a full disk or kill -9 leaves the old version or the new one, whole. Arrays are written in blocks, never
    copied; they may be maps of the very folder. `meta` is anything JSON holds.

    Raises DataError for objects and names that are no file names, BlockingIOError while another writer is at work, and
    the system's OSError (disk full) with nothing changed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_fields(folder, {"x": np.eye(2), "y": np.arange(2)}, {"classes": ["cat", "dog"]})
    ...     fields, meta = open_folder(folder)
    ...     {name: (a.dtype.name, a.shape) for name, a in fields.items()}, meta
    ({'x': ('float64', (2, 2)), 'y': ('int64', (2,))}, {'classes': ['cat', 'dog']})
    """
    path = target_path(folder)
    fields = {name: np.asanyarray(array) for name, array in fields.items()}
    specs = {name: check_spec(name, array.dtype, array.shape) for name, array in fields.items()}
    json.dumps(dict(meta or {}))  # a meta that JSON cannot hold is known before anything is written
    with _writing(path, specs, meta or {}) as stage:
        for name, array in fields.items():
            _write(os.path.join(stage, name + ".npy"), specs[name], array)


def target_path(folder: Path) -> str:
    """Give the full path of a folder to write to, which is no URL."""
    if scheme(folder):
        raise ValueError(f"{shown(os.fsdecode(folder))}: a local folder expected; write there, and copy it")
    return full_path(folder)


@contextlib.contextmanager
def create_fields(
    folder: Path,
    specs: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]],
    meta: Mapping[str, Any] | None = None,
    kept: Mapping[str, Array] | None = None,
) -> Iterator[dict[str, Array]]:
    """Give writable maps of `specs` (dtype, shape), zeros at first, that become the folder's fields on a clean exit.

    The same protocol and errors as `save_fields`: an exception inside the block, a crash or a kill leaves the old
    version. Disk space is reserved at the start, so that a full disk is an OSError there and no SIGBUS later. `meta` is
    read at the exit and may be filled inside the block. Do not write to the arrays after it. `kept` are fields of this
    folder, as opened, that stay as they are: the new version links their files, and copies one that was replaced since.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with create_fields(folder, {"x": ("float32", (3,))}) as arrays:
    ...         arrays["x"][...] = [1, 2, 3]
    ...     open_folder(folder)[0]["x"].tolist()
    [1.0, 2.0, 3.0]
    """
    path, kept = target_path(folder), kept or {}
    checked = {name: check_spec(name, np.dtype(dtype), shape) for name, (dtype, shape) in specs.items()}
    staying = {name: check_spec(name, array.dtype, array.shape) for name, array in kept.items()}
    meta = {} if meta is None else meta
    with _writing(path, {**staying, **checked}, meta) as stage:
        for name, array in kept.items():
            if not _link(os.path.join(path, name + ".npy"), os.path.join(stage, name + ".npy"), array):
                _write(os.path.join(stage, name + ".npy"), staying[name], array)
        maps: list[mmap.mmap] = []
        arrays: dict[str, Array] = {}
        for name, (dtype, shape) in checked.items():
            head, stored = header(checked[name])
            with _create(os.path.join(stage, name + ".npy"), len(head) + math.prod(shape) * stored.itemsize) as file:
                file.write(head)
                file.flush()
                os.fsync(file.fileno())
                mapped = mmap.mmap(file.fileno(), 0)
            maps.append(mapped)
            arrays[name] = np.ndarray(shape, dtype, buffer=mapped, offset=len(head))
        yield arrays
        for mapped in maps:
            mapped.flush()


def _write(path: str, spec: tuple[DType, tuple[int, ...]], array: Array) -> None:
    """Write an array to a new file, and put it on disk."""
    head, dtype = header(spec)
    with _create(path, len(head) + array.size * dtype.itemsize) as file:
        file.write(head)
        for block in blocks(array):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _link(old: str, new: str, array: Array) -> bool:
    """Give a file a second name, if it still is the one that an array maps and the file system can."""
    found = mapping(array)
    try:
        if found is None or not isinstance(found.map, Map) or Stamp.of(os.stat(old)) != found.map.stamp:
            return False
        os.link(old, new)
    except (OSError, NotImplementedError, AttributeError):
        return False
    return True


def check_spec(name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Check one field before anything is written."""
    where = f"field {name!r}"
    if not is_file_name(name):
        raise DataError(f"{where}: not a file name: letters, digits and _ expected")
    if dtype.type.__module__.partition(".")[0] not in ("numpy", "builtins") and extra_name(dtype) is None:
        raise DataError(f"{where}: dtype {dtype} has no form in a .npy; a NumPy dtype or {', '.join(BITS)} expected")
    spec = check_dtype(dtype, where), check_shape(tuple(int(n) for n in shape), where)
    try:
        header(spec)
    except ValueError as error:
        raise DataError(f"{where}: dtype has no form in a .npy: {error}") from None
    return spec


def header(spec: tuple[DType, tuple[int, ...]], room: int = 0) -> tuple[bytes, DType]:
    """The .npy header of a field, of at least `room` bytes, and the dtype its file shows: the bits of an ml_dtypes one."""
    dtype, shape = spec
    extra = extra_name(dtype)
    stored = dtype if extra is None else BITS[extra]
    return npy.header(stored, shape, room), stored


def named(dtype: DType) -> Any:
    """A dtype as JSON."""
    return extra_name(dtype) or json.loads(json.dumps(dtype.str if dtype.names is None else dtype.descr))


def unnamed(found: Any) -> DType:
    """The dtype that JSON names; ValueError or TypeError where it names none."""
    if isinstance(found, str):
        return extra_dtype(found, "") if found in BITS else np.dtype(found)
    descr: Any = [tuple(tuple(p) if isinstance(p, list) else p for p in part) for part in found]
    return descr_to_dtype(descr)


def blocks(array: Array) -> Iterator[memoryview]:
    """The bytes of an array in C order, a block at a time; contiguous parts are not copied at all."""
    if array.size == 0:
        return
    if array.flags.c_contiguous:
        flat = np.asarray(array).reshape(-1).view(np.uint8)
        yield from (flat[at : at + _BLOCK].data for at in range(0, flat.size, _BLOCK))
        return
    step = _BLOCK * len(array) // array.nbytes
    if step == 0:
        for row in array:
            yield from blocks(row)
        return
    for at in range(0, len(array), step):
        yield np.ascontiguousarray(array[at : at + step]).reshape(-1).view(np.uint8).data


def _create(path: str, size: int) -> Any:
    """A new file of `size` bytes whose disk space is reserved, so that a full disk is known now."""
    file = open(path, "x+b")  # noqa: SIM115  # handed out
    try:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        file.close()
        error.filename = path
        raise
    return file


@contextlib.contextmanager
def _writing(path: str, specs: Mapping[str, tuple[DType, tuple[int, ...]]], meta: Mapping[str, Any]) -> Iterator[str]:
    """The protocol round the writing of files into the stage, which is handed out."""
    with writer(path) as old, staged(path, old, specs, meta) as stage:
        yield stage


@contextlib.contextmanager
def writer(path: str) -> Iterator[dict[str, Any] | None]:
    """Be the only writer of a folder, made where it is not there and tidied up; gives the manifest that stands."""
    _make_folder(path)
    with locked(path, _NOTING):
        old = read_manifest(path, foreign=False)
        _sweep(path, old)
        yield old


def _replace_manifest(path: str, stage: str, manifest: Mapping[str, Any]) -> None:
    """Put a manifest on disk, in a stage, and then in the place of the old one."""
    draft = os.path.join(stage, _STAGE + MANIFEST)
    try:
        with open(draft, "w", encoding="utf8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(stage)
        sync(path)
        os.replace(draft, os.path.join(path, MANIFEST))
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(draft)
        raise


@contextlib.contextmanager
def staged(
    path: str,
    old: Mapping[str, Any] | None,
    specs: Mapping[str, tuple[DType, tuple[int, ...]]],
    meta: Mapping[str, Any],
) -> Iterator[str]:
    """Hand out a stage for the files of a new version, which stands once they are there; for the folder's only writer."""
    token = os.urandom(8).hex()
    stage = os.path.join(path, _STAGE + token)
    os.mkdir(stage)
    try:
        yield stage
        gone = sorted(set(old["fields"]) - set(specs)) if old is not None else []
        manifest = {
            "jitloader": VERSION,
            "token": token,
            "fields": {name: {"dtype": named(dtype), "shape": shape} for name, (dtype, shape) in specs.items()},
            "gone": gone,
            "meta": dict(meta),
        }
        _replace_manifest(path, stage, manifest)
    except BaseException:
        # Ctrl-C may come right after the rename: then the stage is the new version.
        if _token(read_manifest(path)) != token:
            discard(stage)
        raise
    sync(path)
    # The new version stands. What hinders the moves (files open on Windows, say) is left to the next writer.
    with contextlib.suppress(OSError):
        _finish(path, manifest)


def recall(array: Array, what: str) -> Any:
    """Give what was remembered of an array, the whole field of a folder that was saved: None where nothing was, and where
    the file has changed since."""
    found = _place(array)
    if found is None:
        return None
    path, name, mark = found
    with contextlib.suppress(OSError, DataError):
        manifest = read_manifest(path)
        notes = {} if manifest is None else manifest.get("notes", {})
        note = notes.get(name) if isinstance(notes, dict) else None
        if isinstance(note, dict) and note.get("file") == mark:
            return note.get(what)
    return None


def remember(array: Array, what: str, value: Any) -> None:
    """Note something, that JSON holds, of such an array in the folder's manifest; where that cannot be written, or another
    writer is at work, nothing is noted."""
    found = _place(array)
    if found is None:
        return
    path, name, mark = found
    with contextlib.suppress(OSError, DataError), locked(path):
        manifest = read_manifest(path)
        file = os.stat(os.path.join(path, name + ".npy"))
        if manifest is None or name not in manifest["fields"] or [file.st_size, file.st_mtime_ns] != mark:
            return
        notes = manifest.setdefault("notes", {})
        note = notes.get(name, {})
        notes[name] = {**(note if note.get("file") == mark else {"file": mark}), what: value}
        _replace_manifest(path, path, manifest)


def _place(array: Array) -> tuple[str, str, list[int]] | None:
    """The folder and the field whose file is all of what an array shows, and the file's size and mtime."""
    found = mapping(array)
    if found is None or not isinstance(found.map, Map) or not found.map.path.endswith(".npy"):
        return None
    if not array.flags.c_contiguous or found.offset + array.nbytes != len(found.map) or found.offset % 64:
        return (
            None  # a .npy begins its data at a multiple of 64: a slice from there on has another length than its header
        )
    with contextlib.suppress(DataError):
        if npy.read(found.map, 0, len(found.map), found.map.path).shape == array.shape:
            path, file = os.path.split(found.map.path)
            return path, file[:-4], [found.map.stamp.size, found.map.stamp.mtime]
    return None


def tidy(folder: Path) -> None:
    """Finish or remove what a killed writer left in a folder, if there is anything; not where another one is at work, or
    where nothing can be written."""
    path = full_path(folder)
    with contextlib.suppress(OSError):
        if any(name.startswith(_STAGE) for name in os.listdir(path)):
            with locked(path):
                _sweep(path, read_manifest(path, foreign=False))


def _sweep(path: str, manifest: Mapping[str, Any] | None) -> None:
    """Move up what a killed writer had committed, and remove what it had not."""
    if manifest is not None:
        _finish(path, manifest)
    for name in os.listdir(path):
        if name == _STAGE + MANIFEST:
            os.remove(os.path.join(path, name))
        elif name.startswith(_STAGE):
            discard(os.path.join(path, name))


def _finish(path: str, manifest: Mapping[str, Any]) -> None:
    """Move the files of a committed version up; nothing is left to do where its stage is gone."""
    stage = os.path.join(path, _STAGE + manifest["token"])
    if not os.path.isdir(stage):
        return
    for name in manifest["fields"]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(os.path.join(stage, name + ".npy"), os.path.join(path, name + ".npy"))
    for name in manifest["gone"]:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(path, name + ".npy"))
    sync(path)
    sync(stage)
    discard(stage)
    sync(path)


def discard(folder: str) -> None:
    """Remove a folder with all that is in it, as far as that can be."""
    import shutil  # 3 ms that the import of this package need not wait for

    shutil.rmtree(folder, ignore_errors=True)


def read_manifest(path: str, foreign: bool = True) -> dict[str, Any] | None:
    """The manifest of a folder, checked; None without one, and where it is another program's (`foreign`)."""
    file = os.path.join(path, MANIFEST)
    try:
        with open(file, "rb") as stream:
            # No more is asked for than there is: `read` lays out what it is asked for.
            raw = stream.read(min(os.fstat(stream.fileno()).st_size, _MAX_MANIFEST) + 1)
    except FileNotFoundError:
        if not os.path.isdir(path):
            os.listdir(path)  # raises what is the matter with the folder
        return None
    try:
        if len(raw) > _MAX_MANIFEST:
            raise ValueError(f"more than {_MAX_MANIFEST} bytes")
        found: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: a broken manifest ({len(raw)} bytes): {error!s:.80}; JSON expected") from None
    if not isinstance(found, dict) or "jitloader" not in found:
        if foreign:
            return None
        raise DataError(f"{file}: written by another program; not overwritten, choose another folder")
    if found["jitloader"] != VERSION:
        raise DataError(f"{file}: format version {reprlib.repr(found['jitloader'])} found, {VERSION} expected")
    token, fields, gone, meta = (found.get(key) for key in ("token", "fields", "gone", "meta"))
    if not (
        isinstance(token, str)
        and token.isalnum()
        and isinstance(fields, dict)
        and isinstance(gone, list)
        and isinstance(meta, dict)
        and all(is_file_name(name) for name in [*fields, *gone])
        and all(isinstance(entry, dict) and entry.keys() >= {"dtype", "shape"} for entry in fields.values())
        and _are_rules(meta.get("samples", {}), fields)
    ):
        raise DataError(f"{file}: a broken manifest: token, fields, gone and meta expected, {raw!r:.60} found")
    return found


def _are_rules(rules: Any, fields: Mapping[str, Any]) -> bool:
    """Whether each rule names arrays that are there."""
    return isinstance(rules, dict) and all(
        isinstance(rule, dict) and isinstance(rule.get("arrays"), list) and set(map(str, rule["arrays"])) <= set(fields)
        for rule in rules.values()
    )


def is_file_name(name: Any) -> bool:
    """Whether a field can be a file in any file system, and stays inside its folder."""
    return (
        isinstance(name, str)
        and name != ""
        and name.isprintable()
        and name[0] not in ". "
        and name[-1] not in ". "
        and not _BAD_IN_NAMES & set(name)
        and len(name.encode()) <= 200
    )


def _token(manifest: Mapping[str, Any] | None) -> str | None:
    return None if manifest is None else manifest["token"]


def _plain(path: str) -> Fields:
    """Every .npy of a folder without a manifest, by name."""
    names = sorted(name[:-4] for name in os.listdir(path) if name.endswith(".npy") and not name.startswith("."))
    if not names:
        raise DataError(f"{path}: a folder without .npy files: at least one expected, none found; pass a file in it")
    return {name: functools.partial(_open_npy, os.path.join(path, name + ".npy")) for name in names}


def _listed(path: str, manifest: Mapping[str, Any]) -> Fields:
    """The fields that a manifest names, to be compared with what it says of them."""
    token = manifest["token"]
    return {name: functools.partial(_field, path, token, name, entry) for name, entry in manifest["fields"].items()}


def _field(path: str, token: str, name: str, entry: Mapping[str, Any]) -> Array:
    where = os.path.join(path, name + ".npy")
    try:
        array = _open_npy(os.path.join(path, _STAGE + token, name + ".npy"))
    except (FileNotFoundError, NotADirectoryError):
        array = _open_npy(where)
    return as_listed(array, entry, where)


def as_listed(array: Array, entry: Mapping[str, Any], where: str) -> Array:
    """Give a field as its manifest's entry says that it is, or raise DataError."""
    dtype = entry["dtype"]
    extra = isinstance(dtype, str) and dtype in BITS
    if list(array.shape) != entry["shape"] or named(array.dtype) != (named(BITS[dtype]) if extra else dtype):
        raise DataError(
            f"{where}: {array.dtype} {array.shape} found, "
            f"{reprlib.repr(dtype)} {reprlib.repr(entry['shape'])} expected by {MANIFEST}; "
            f"save the folder again, or remove {MANIFEST}"
        )
    return array.view(extra_dtype(dtype, where)) if extra else array


def _open_npy(path: str) -> Array:
    mapped = map_file(path)
    return npy.read(mapped, 0, len(mapped), mapped.path)


def _make_folder(path: str) -> None:
    """Make a folder and those above it, and put their names on disk."""
    above = []
    while not os.path.isdir(path):
        above.append(path)
        path = os.path.dirname(path)
    for folder in reversed(above):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        sync(os.path.dirname(folder))


def sync(path: str) -> None:
    """Put a folder's names on disk, where the system can."""
    if sys.platform != "win32":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(path: str, patience: float = 0.0) -> Iterator[int]:
    """Be the folder's only writer; the system frees the lock of a process that dies. Gives the descriptor that holds it;
    another one that holds it longer than `patience` seconds is a BlockingIOError."""
    if sys.platform == "win32":
        import msvcrt

        descriptor = os.open(os.path.join(path, ".lock"), os.O_RDWR | os.O_CREAT)
    else:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY)
    try:
        end = time.monotonic() + patience
        while True:
            try:
                if sys.platform == "win32":
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                else:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                    raise
                if time.monotonic() > end:
                    raise BlockingIOError(errno.EAGAIN, "another writer is saving to this folder", path) from None
                time.sleep(0.01)
        try:
            yield descriptor
        finally:
            # A child forked meanwhile holds the descriptor too: closing alone would leave the folder locked.
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
