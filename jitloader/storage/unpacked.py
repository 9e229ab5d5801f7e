"""Files that cannot be mapped, decoded once into a folder of .npy that can: found again while the file is the same."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jitloader import jit
from jitloader.bars import bar
from jitloader.errors import DataError

from .folder import MANIFEST, create_fields, discard, is_file_name, open_folder, tidy
from .mapped import Array, Column, DType, Path, Stamp, full_path

VERSION = 1  # of how files are decoded
Unpack: TypeAlias = (
    "bool | Path | None"  # where to: a folder, True for one in the cache folder, None where nobody asked
)
Tell: TypeAlias = Callable[[int], None]
_PAUSE = 0.05  # seconds between looks at a folder to which another process writes
_TRIES = 3  # times a file is decoded that another process replaces at once
_OFFSETS = ".offsets"


class Plan(NamedTuple):
    """One field to be decoded, in C order. `rows` is given where these are the values of so many lists, whose offsets come
    beside; `shape` may then be larger than they need. `flipped` says that the field is the transposed one."""

    dtype: DType
    shape: tuple[int, ...]
    rows: int | None = None
    flipped: bool = False


def unpack(
    path: str,
    mark: bytes,
    names: list[str],
    plan: Callable[[list[str]], Mapping[str, Plan]],
    fill: Callable[[dict[str, Array], dict[str, Array], Tell], None],
    where: Unpack,
    progress: bool,
) -> dict[str, Array | Column]:
    """Give fields of a file as maps of a folder's .npy; those that the folder lacks are decoded first.

    `mark` tells the file from another of its size and mtime. `fill(arrays, offsets, tell)` writes into maps of what
    `plan(lacking)` says, and tells of so many bytes more, for tqdm's bar where `progress` wants one. The folder is
    replaced as a whole or not at all, and of several processes one decodes.

    Raises DataError where no folder can be had and for a folder of anything else, OSError where the disk has no room.
    """
    import hashlib

    stamp = Stamp.of(os.stat(path))
    told = [VERSION, os.path.realpath(path), stamp.size, stamp.mtime, hashlib.sha256(mark).hexdigest()]
    ours = where is None or isinstance(where, bool)
    home = _home(path) if ours else full_path(where)  # type: ignore[arg-type]
    tries = 0
    while True:
        arrays, files = _known(home, told, ours)
        lacking = [name for name in names if name not in files]
        if not lacking:
            return {name: _field(arrays, *files[name]) for name in names}
        if tries == _TRIES:
            raise DataError(f"{home}: another process unpacks another file there; give each file a folder of its own")
        plans = plan(lacking)
        made = _stems(lacking, files)
        specs: dict[str, tuple[DType, tuple[int, ...]]] = {}
        for name, one in plans.items():
            specs[made[name]] = one.dtype, one.shape
            if one.rows is not None:
                specs[made[name] + _OFFSETS] = np.dtype(np.int64), (one.rows + 1,)
        wanted = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())
        _check_room(home, wanted)
        meta = {"unpacked": told, "files": {**files, **{n: [made[n], plans[n].flipped] for n in lacking}}}
        try:
            with create_fields(home, specs, meta, arrays) as maps:
                ends = {n: maps[made[n] + _OFFSETS] for n in lacking if plans[n].rows is not None}
                with bar(f"unpack {os.path.basename(path)}", wanted, progress, "B") as tell:
                    fill({n: maps[made[n]] for n in lacking}, ends, tell)
                now = Stamp.of(os.stat(path))
                if now != stamp:
                    raise DataError(f"{path}: changed while it was read: {stamp.size} bytes expected, {now.size} found")
            tries += 1
        except BlockingIOError:
            time.sleep(_PAUSE)


def _home(path: str) -> str:
    """The folder of a file's fields in the cache folder: one for each path."""
    cache = jit.cache_folder()
    if cache is None:
        raise DataError(f"{path}: no folder to unpack to can be written; give one by unpack=folder")
    import hashlib

    name = os.path.basename(path)[:60]
    key = hashlib.sha256(os.path.realpath(path).encode("utf8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(cache, "unpacked", f"{name if is_file_name(name) else 'file'}-{key}")


def _known(home: str, told: list[Any], ours: bool) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a folder and which field each is, none where it was unpacked of another file."""
    try:
        there = sorted(name for name in os.listdir(home) if not name.startswith("."))
        if there and MANIFEST not in there and not ours:
            raise DataError(f"{home}: holds {there[0]!r}, which was not unpacked there; give a folder of its own")
        if MANIFEST not in there:
            return {}, {}
        tidy(home)
        arrays, meta = open_folder(home)
    except FileNotFoundError:
        return {}, {}
    except DataError:
        if not ours:
            raise
        discard(home)  # broken: made again
        return {}, {}
    if not ours and "unpacked" not in meta:
        raise DataError(f"{home}: holds {there[0]!r}, which was not unpacked there; give a folder of its own")
    files = meta.get("files")
    if meta.get("unpacked") != told or not isinstance(files, dict):
        return {}, {}
    good = all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and entry[0] in arrays
        for entry in files.values()
    )
    return (arrays, files) if good else ({}, {})


def _field(arrays: Mapping[str, Array], stem: str, flipped: bool) -> Array | Column:
    found = arrays[stem].transpose() if flipped else arrays[stem]
    return Column((found,), arrays[stem + _OFFSETS]) if stem + _OFFSETS in arrays else found


def _stems(names: list[str], files: Mapping[str, Any]) -> dict[str, str]:
    """Give each field a file: called like the field where that is a file's name that no other has."""
    taken = {part.lower() for stem, _ in files.values() for part in (stem, stem + _OFFSETS)} | {MANIFEST}
    made: dict[str, str] = {}
    for name in names:
        stem = name if is_file_name(name) and len(name) < 180 else f"field{len(files) + len(made)}"
        while stem.lower() in taken or (stem + _OFFSETS).lower() in taken:
            stem += "_"
        taken |= {stem.lower(), (stem + _OFFSETS).lower()}
        made[name] = stem
    return made


def _check_room(home: str, wanted: int) -> None:
    """Refuse before a byte is written what the disk has no room for, be it that a header names an absurd size."""
    there = home
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    import shutil

    free = shutil.disk_usage(there).free
    if wanted > free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {wanted} bytes to unpack, {free} free", home)
