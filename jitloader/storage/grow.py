"""A folder of .npy written row after row, of any number, and replaced as a whole when the last one is there.

Rows are appended to files in `.write/` inside the folder, which its only writer holds the lock of. Every second they are
put on disk, and then a line of `.write/journal` says how far they go. Whatever ends the writer, the next one cuts the files
at the last such line and goes on from there, if the job is the same; the folder itself is what it was until the end, when
the files become its new version by the protocol of `folder`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .folder import check_spec, discard, header, named, staged, sync, target_path, unnamed, writer
from .mapped import Array, DType, Path

SYNC = 1.0  # seconds of work that a kill may cost
OFFSETS = ".offsets"  # what follows the name of a ragged field in that of its offsets
_WORK, _JOURNAL = ".write", "journal"
_MOST = 2**62  # rows, for the room that a header takes

Specs = Mapping[str, "tuple[npt.DTypeLike, tuple[int | None, ...]]"]


def begun(folder: Path, job: str) -> dict[str, tuple[DType, tuple[int | None, ...]]] | None:
    """Give the specs of the same job, where an earlier run of it was stopped."""
    try:
        with open(os.path.join(target_path(folder), _WORK, _JOURNAL), "rb") as file:
            head = json.loads(file.readline())
        if head["job"] == job:
            return {name: (unnamed(dtype), tuple(shape)) for name, (dtype, shape) in head["specs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return None


class Growing:
    """Fields that grow by blocks of rows; `rows` of them are there."""

    def __init__(self, path: str, specs: Specs, job: str, resume: bool) -> None:
        self.path, self.work = path, os.path.join(path, _WORK)
        self.meta: dict[str, Any] = {}
        self.rows = 0
        self.told = {name: [named(np.dtype(dtype)), list(shape)] for name, (dtype, shape) in specs.items()}
        self.columns: dict[
            str, tuple[DType, tuple[int, ...]]
        ] = {}  # a file each: its dtype and the shape of an element
        self.ragged = {name: name + OFFSETS for name, (_, shape) in specs.items() if shape and shape[0] is None}
        for name, (dtype, shape) in specs.items():
            rest = shape[1:] if name in self.ragged else shape
            if None in rest:
                raise ValueError(f"field {name!r}: only the first axis of a row may vary, got {shape}")
            known = check_spec(name, np.dtype(dtype), tuple(int(n or 0) for n in rest))
            self.columns[name] = known
            if name in self.ragged:
                self.columns[self.ragged[name]] = check_spec(self.ragged[name], np.dtype(np.int64), ())
        if len(self.columns) != len(specs) + len(self.ragged):
            raise ValueError(f"two fields are called {next(o for o in self.ragged.values() if o in specs)!r}")
        self.room = {name: len(header((d, (_MOST, *s)))[0]) for name, (d, s) in self.columns.items()}
        self.counts = dict.fromkeys(self.columns, 0)
        self.files: dict[str, Any] = {}
        self._open(job, resume)
        self._synced = time.monotonic()

    def _open(self, job: str, resume: bool) -> None:
        head = json.dumps({"job": job, "specs": self.told}) + "\n"
        if resume:
            self._resume(head)
        if not self.rows:
            discard(self.work)
            os.mkdir(self.work)
            self.counts = dict.fromkeys(self.columns, 0)
        try:
            for name in self.columns:
                at = self._size(name, self.counts[name])
                file = open(self._file(name), "r+b" if self.rows else "x+b", buffering=0)  # noqa: SIM115
                self.files[name] = file
                file.truncate(at)
                file.seek(at)
            self.journal = open(os.path.join(self.work, _JOURNAL), "ab", buffering=0)  # noqa: SIM115
            if not self.rows:
                self.journal.write(head.encode())
                for offsets in self.ragged.values():
                    self._append(offsets, np.zeros(1, np.int64))
                self.save()
        except BaseException:
            self.close()
            raise

    def _file(self, name: str) -> str:
        return os.path.join(self.work, name + ".npy")

    def _size(self, name: str, count: int) -> int:
        dtype, shape = self.columns[name]
        return self.room[name] + count * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def _resume(self, head: str) -> None:
        """Find how far an earlier run of the same job came."""
        try:
            with open(os.path.join(self.work, _JOURNAL), "rb") as file:
                first, *lines = file.read().split(b"\n")
        except OSError:
            return
        best: dict[str, int] = {}
        for line in lines[:-1]:  # what follows the last end of line was cut by a kill
            with contextlib.suppress(ValueError):
                counts = json.loads(line)
                if isinstance(counts, dict) and counts.keys() == {*self.columns, ""} and self._holds(counts):
                    best = counts
        if first != head.rstrip("\n").encode():
            if lines[1:-1]:
                warnings.warn(
                    f"{self.path}: an earlier run was stopped in the middle of another job (its function, its number of rows "
                    "or its fields differ): started over",
                    UserWarning,
                    stacklevel=2,
                )
            return
        if best:
            self.rows = best.pop("")
            self.counts = best

    def _holds(self, counts: Mapping[str, int]) -> bool:
        """Whether the files are as long as a line of the journal says, and are nobody else's: a committed version's, say."""
        try:
            found = {name: os.stat(self._file(name)) for name in self.columns}
        except OSError:
            return False
        return all(f.st_nlink == 1 and f.st_size >= self._size(n, counts[n]) for n, f in found.items())

    def append(self, block: Mapping[str, Any], count: int) -> None:
        """Add `count` rows: an array (count, *shape) of each field, or of a ragged one its values and the lengths of rows.

        Raises the system's OSError (disk full); the rows before stay, for the next run.
        """
        for name in self.columns:
            if name in self.ragged:
                values, lengths = block[name]
                ends = self.counts[name] + np.cumsum(lengths, dtype=np.int64)
                self._append(self.ragged[name], ends)
                self._append(name, values)
            elif name in block:
                self._append(name, block[name])
        for name in self.columns:
            if name in self.ragged:
                self.counts[name] += len(block[name][0])
                self.counts[self.ragged[name]] += count
            elif name in block:
                self.counts[name] += count
        self.rows += count
        if time.monotonic() - self._synced > SYNC:
            self.save()

    def _append(self, name: str, array: Array) -> None:
        dtype = self.columns[name][0]
        flat = np.ascontiguousarray(array, dtype).reshape(-1)
        left = flat.view(np.uint8).data if flat.size else memoryview(b"")
        while left:
            left = left[self.files[name].write(left[: 1 << 30]) :]

    def save(self) -> None:
        """Put on disk what is there, and say so in the journal."""
        if self.rows == 0:
            self.counts.update(dict.fromkeys(self.ragged.values(), 1))
        for file in self.files.values():
            os.fsync(file.fileno())
        self.journal.write(json.dumps({"": self.rows, **self.counts}).encode() + b"\n")
        os.fsync(self.journal.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Let the files go."""
        for file in [*self.files.values(), *([self.journal] if hasattr(self, "journal") else [])]:
            file.close()

    def commit(self, old: Mapping[str, Any] | None) -> None:
        """Make what is there the folder's new version."""
        specs = {name: (dtype, (self.counts[name], *shape)) for name, (dtype, shape) in self.columns.items()}
        self.save()
        for name, spec in specs.items():
            self.files[name].seek(0)
            self.files[name].write(header(spec, self.room[name])[0])
            self.files[name].truncate(self._size(name, self.counts[name]))
            os.fsync(self.files[name].fileno())
        self.close()
        if self.ragged:
            rules = {name: {"kind": "ragged", "arrays": [name, offsets]} for name, offsets in self.ragged.items()}
            self.meta.update(samples=rules, order=[*self.told])
        with staged(self.path, old, specs, self.meta) as stage:
            for name in specs:
                # A second name: were it moved, a kill before the commit would lose it.
                try:
                    os.link(self._file(name), os.path.join(stage, name + ".npy"))
                except (OSError, NotImplementedError):
                    os.replace(self._file(name), os.path.join(stage, name + ".npy"))
        discard(self.work)
        sync(self.path)


@contextlib.contextmanager
def grow_fields(folder: Path, specs: Specs, job: str, resume: bool = True) -> Iterator[Growing]:
    """Give fields that grow and become the folder's on a clean exit; after any other, the next call with `resume` and the
    same `job` and specs goes on from the rows that were on disk.

    A spec is a dtype and the shape of a row, whose first axis may be None: such a field is saved as its values and, under
    its name and ".offsets", n + 1 offsets. Raises as `save_fields`; BlockingIOError while another writer is at work.

    >>> import tempfile
    >>> from jitloader.storage import open_folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with grow_fields(folder, {"x": ("int64", (2,)), "t": ("uint8", (None,))}, "squares") as growing:
    ...         growing.append({"x": [[1, 4], [9, 16]], "t": ([5, 6, 7], [3, 0])}, 2)
    ...     {name: array.tolist() for name, array in open_folder(folder)[0].items()}
    {'x': [[1, 4], [9, 16]], 't': [5, 6, 7], 't.offsets': [0, 3, 3]}
    """
    path = target_path(folder)
    with writer(path) as old:
        growing = Growing(path, specs, job, resume)
        try:
            yield growing
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk: the line before stands
                growing.save()
            growing.close()
            raise
        try:
            growing.commit(old)
        finally:
            growing.close()
