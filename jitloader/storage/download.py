"""The local cache of files behind URLs: fetched in ranges by several threads, once for all processes, and bounded.

A folder an entry, which is one version of one URL: `name` once it is whole, until then `.part`, of full length from the
start on, and `.journal`, a line a finished range with its CRC-32. A range counts when its bytes in the file still have
that sum, so a download killed at any moment goes on from there, in any process. Who downloads or removes an entry holds
the lock of its folder (flock: it dies with the process); the others wait. `.entry` holds the URL; its mtime is the time of
the last use, by which entries are removed where the limit is reached. A file that somebody maps may be removed like any
other: the map keeps the bytes, and the disk gets its space back when the last map is gone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
import urllib.parse
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jitloader.bars import bar
from jitloader.errors import DataError

from . import remote as _remote
from .folder import MANIFEST, locked, read_manifest, sync, with_parts
from .remote import Changed, Interrupted, Remote, shown

RANGE = 8 << 20  # bytes of one request: at 100 MB/s a connection is made every 0.1 s, and as much is lost by a kill
THREADS = 8
TRIES = 5  # in a row that bring less than 1/32 of a range
PAUSE = 0.25  # seconds before the second try, twice as long before each one after it
STALLED = 300.0  # seconds without a finished piece, after which a file system that hangs is given up
LIMIT = 50 << 30
RESTARTS = 4
_WAIT = 0.05  # seconds between looks at an entry that another process fetches
_ENTRY, _PART, _JOURNAL = ".entry", ".part", ".journal"


def data_folder() -> str:
    """Give the folder of the cache, made where it is not there: `JITLOADER_DATA_DIR`, else one in the user's cache
    folder, else a temporary one."""
    named = os.environ.get("JITLOADER_DATA_DIR")
    if named:
        try:
            os.makedirs(named, exist_ok=True)
        except OSError as error:
            raise type(error)(error.errno, f"JITLOADER_DATA_DIR: {error.strerror}", named) from None
        return os.path.abspath(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    uid = os.getuid() if hasattr(os, "getuid") else 0
    for folder in (os.path.join(base, "jitloader", "files"), f"{tempfile.gettempdir()}/jitloader-{uid}-files"):
        with contextlib.suppress(OSError):
            if os.path.isabs(folder):  # "~" stays as it is where there is no home
                os.makedirs(folder, mode=0o700, exist_ok=True)
                if os.access(folder, os.W_OK) and (uid == 0 or os.stat(folder).st_uid == uid):
                    return folder
    return tempfile.mkdtemp(prefix="jitloader-files-")


def fetch(url: str, options: Mapping[str, Any] | None = None, progress: bool = True) -> str:
    """Give the path of a local file with what a URL holds now, downloaded where the cache does not have that version.

    Length, version (ETag, time of change) and, where the server gives one, checksum are compared. Where the server
    cannot be reached, the newest copy is given, with a UserWarning. Raises IsADirectoryError for a folder; OSError naming
    the URL and the bytes so far where they stop coming, and where the file is larger than the limit or the disk;
    DataError where they are not what the server said.
    """
    root = data_folder()
    mine = hashlib.sha256(url.encode()).hexdigest()[:24]
    for _ in range(RESTARTS):
        kept = _kept(root, mine)
        try:
            found = _probed(url, options, 1 if kept else TRIES)
        except Interrupted as error:
            if not kept:
                raise _unreached(error, url) from None
            day = time.strftime("%Y-%m-%d", time.localtime(os.path.getmtime(kept)))
            warnings.warn(f"{shown(url)}: not reached ({error}); the copy of {day} is used", UserWarning, stacklevel=2)
            return _used(kept)
        if found.folder:
            raise IsADirectoryError(errno.EISDIR, "a folder, one file expected", shown(url))
        version = hashlib.sha256(f"{found.size} {found.mark}".encode()).hexdigest()[:16]
        with contextlib.suppress(Changed):
            return _shared(root, os.path.join(root, f"{mine}-{version}"), found, progress)
    raise DataError(f"{shown(url)}: changed {RESTARTS} times while it was downloaded")


def fetch_folder(
    url: str, fields: Collection[str] | None, options: Mapping[str, Any] | None = None, progress: bool = True
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Give the path of a local copy of each .npy of a folder, and its manifest: None for a plain folder, whose files are
    listed where the scheme can. With `fields`, these alone. Raises as `fetch`.
    """
    for _ in range(RESTARTS):
        try:
            listed = fetch(_remote.join(url, MANIFEST), options, False)
        except FileNotFoundError as error:
            if _remote.scheme(url) in ("http", "https"):
                told = f"{error.strerror} for its {MANIFEST}: http lists no folders, so give one that jitloader saved, or a file"
                raise FileNotFoundError(errno.ENOENT, told, shown(url)) from None
            try:
                listing = _remote.listing(url, options)
            except Interrupted as error:
                raise _unreached(error, url) from None
            places = {one.rpartition("/")[2][:-4]: one for one in listing}
            return {n: fetch(at, options, progress) for n, at in places.items() if fields is None or n in fields}, None
        manifest = read_manifest(os.path.dirname(listed))
        if manifest is None:
            raise DataError(f"{_remote.join(url, MANIFEST)}: written by another program")
        wanted = with_parts(fields, manifest)
        names = [name for name in manifest["fields"] if wanted is None or name in wanted]
        paths = {name: fetch(_remote.join(url, name + ".npy"), options, progress) for name in names}
        if fetch(_remote.join(url, MANIFEST), options, False) == listed:
            return paths, manifest
    raise DataError(f"{shown(url)}: saved anew {RESTARTS} times while it was downloaded")


def _probed(url: str, options: Mapping[str, Any] | None, tries: int) -> Remote:
    for number in range(tries):
        try:
            return _remote.probe(url, options)
        except Interrupted:
            if number == tries - 1:
                raise
            _pause(number)
    raise AssertionError


def _pause(number: int) -> None:
    time.sleep(PAUSE * 2**number * (0.5 + random.random() / 2))  # not all at once, where many were refused


def _unreached(error: Interrupted, url: str) -> OSError:
    return OSError(_code(error), f"not reached: {error}", shown(url))


def _code(error: Interrupted) -> int:
    return errno.ETIMEDOUT if "no answer" in str(error) else errno.ECONNABORTED


def _name(url: str) -> str:
    """The last part of a URL as a file name: formats and fields are known by it."""
    path = url.partition("::")[0]
    path = path.partition("?")[0].partition("#")[0] if _remote.scheme(url) in ("http", "https") else path
    name = urllib.parse.unquote(path.rstrip("/").rpartition("/")[2])
    name = re.sub(r'[\x00-\x1f/\\:*?"<>|]', "_", name).lstrip(".")
    while len(name.encode()) > 200:
        name = name[1:]
    return name or "data"


# -- entries ----------------------------------------------------------------------------------------------------------


def _whole(entry: str) -> str | None:
    """The file of an entry that is complete."""
    with contextlib.suppress(OSError):
        for name in os.listdir(entry):
            if not name.startswith("."):
                return os.path.join(entry, name)
    return None


def _used(path: str) -> str:
    """Note that a file was used."""
    with contextlib.suppress(OSError):  # a cache folder of somebody else's
        os.utime(os.path.join(os.path.dirname(path), _ENTRY))
    return path


def _kept(root: str, mine: str) -> str | None:
    """The newest complete file of a URL."""
    paths = [_whole(os.path.join(root, name)) for name in os.listdir(root) if name.startswith(mine + "-")]
    return max((path for path in paths if path is not None), key=os.path.getmtime, default=None)


def _shared(root: str, entry: str, found: Remote, progress: bool) -> str:
    """Give the file of an entry; of all processes and threads that want it one downloads, and the others wait."""
    while True:
        path = _whole(entry)
        if path is not None and found.mark and os.path.getsize(path) == found.size:
            return _used(path)
        os.makedirs(entry, exist_ok=True)
        try:
            with locked(entry) as descriptor:
                if not _same(descriptor, entry):
                    continue  # removed just before
                path = _whole(entry)
                if path is not None and found.mark and os.path.getsize(path) == found.size:
                    return _used(path)
                return _Download(root, entry, found, progress).run()
        except BlockingIOError:
            time.sleep(_WAIT)


def _same(descriptor: int, path: str) -> bool:
    """Whether a locked descriptor is still what lies at the path."""
    try:
        return os.name == "nt" or os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sizes(entry: str) -> int:
    """Bytes that an entry takes, or will take."""
    total = 0
    for name in os.listdir(entry):
        with contextlib.suppress(OSError):
            total += os.path.getsize(os.path.join(entry, name))
    return total


def make_room(root: str, size: int, mine: str, what: str) -> None:
    """Remove entries, the least recently used first, until `size` bytes more fit into limit and disk; `mine` stays.

    Raises OSError where they cannot: before anything is removed where the size alone is too large.
    """
    entries = []
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if path != mine and os.path.isdir(path):
            with contextlib.suppress(OSError):
                mark = os.path.join(path, _ENTRY)
                entries.append((os.path.getmtime(mark if os.path.exists(mark) else path), _sizes(path), path))
    total, free = sum(taken for _, taken, _ in entries), shutil.disk_usage(root).free
    given = os.environ.get("JITLOADER_DATA_LIMIT")
    try:
        limit = int(float(given)) if given else min(LIMIT, (free + total) // 2)
        if limit < 0:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"JITLOADER_DATA_LIMIT must be a number of bytes, as 5e10, got {given!r}") from None
    if size > limit:
        told = "JITLOADER_DATA_LIMIT" if given else "set JITLOADER_DATA_LIMIT for another"
        raise OSError(errno.ENOSPC, f"{size} bytes, more than the cache's limit of {limit} ({told})", what)
    if size > free + total:
        raise OSError(errno.ENOSPC, f"{size} bytes, more than the {free} free at {root}", what)
    for _, taken, path in sorted(entries):
        if total + size <= limit and size <= free:
            break
        with contextlib.suppress(OSError), locked(path):  # an entry that is being fetched stays
            shutil.rmtree(path)
            total, free = total - taken, shutil.disk_usage(root).free
    if total + size > limit:
        raise OSError(errno.ENOSPC, f"{size} bytes, and other downloads fill the cache's limit of {limit}", what)


# -- one download -----------------------------------------------------------------------------------------------------


class _Download:
    """One entry on its way from `.part` to its name; made by the process that holds its lock."""

    def __init__(self, root: str, entry: str, found: Remote, progress: bool) -> None:
        self.root, self.entry, self.found, self.progress = root, entry, found, progress
        self.part, self.journal = os.path.join(entry, _PART), os.path.join(entry, _JOURNAL)
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.failed: list[BaseException] = []
        self.tell: Callable[[int], None] = lambda count: None
        self.moved = time.monotonic()
        self.done = 0
        # Without a version there is nothing to hold two answers together: all comes in one.
        self.ranges = found.ranges and bool(found.mark)

    def run(self) -> str:
        """Fetch what is missing, check the whole, and give it its name."""
        size = self.found.size
        done = self._resumed()
        if not done:
            self._begin()
        step = RANGE if self.ranges else size
        todo = [(at, min(at + step, size)) for at in range(0, size, step) if at not in done]
        self.done = sum(min(at + step, size) - at for at in done)
        name = _name(self.found.url)
        try:
            with bar(f"download {name}", size, self.progress, "B", self.done) as self.tell:
                self._fetch(todo)
            if self.found.confirm is not None:
                self.found.confirm()
        except Interrupted as error:
            raise self._broken(error) from None
        except Changed:
            shutil.rmtree(self.entry, ignore_errors=True)  # half of a version that is no more
            raise
        self._check()
        path = os.path.join(self.entry, name)
        os.replace(self.part, path)
        with contextlib.suppress(OSError):
            os.remove(self.journal)
        sync(self.entry)
        sync(self.root)
        return _used(path)

    def _begin(self) -> None:
        """Make room, and an empty file of full length: a full disk is known now."""
        for name in os.listdir(self.entry):
            os.remove(os.path.join(self.entry, name))
        what = shown(self.found.url)
        while True:
            with contextlib.suppress(BlockingIOError), locked(self.root):
                make_room(self.root, self.found.size, self.entry, what)
                with open(os.path.join(self.entry, _ENTRY), "w", encoding="utf8") as file:
                    json.dump({"url": what, "size": self.found.size, "mark": self.found.mark}, file)
                with open(self.part, "xb") as part:
                    try:
                        part.truncate(self.found.size)
                        if hasattr(os, "posix_fallocate"):
                            os.posix_fallocate(part.fileno(), 0, self.found.size)
                    except OSError as error:
                        os.remove(self.part)
                        raise OSError(error.errno, f"{self.found.size} bytes: {error.strerror}", what) from None
                return
            time.sleep(_WAIT)

    def _resumed(self) -> set[int]:
        """The ranges that an earlier run finished: where the bytes have the sum that its journal says."""
        done: set[int] = set()
        if not self.ranges:
            return done
        with contextlib.suppress(OSError), open(self.part, "rb") as part, open(self.journal, "rb") as journal:
            if os.fstat(part.fileno()).st_size != self.found.size:
                return done
            for line in journal:
                found = re.fullmatch(rb"(\d+) (\d+) ([0-9a-f]{8})\n", line)
                if found is None:
                    continue  # cut by a kill
                start, stop, total = int(found[1]), int(found[2]), int(found[3], 16)
                if start % RANGE == 0 and stop == min(start + RANGE, self.found.size):
                    part.seek(start)
                    if zlib.crc32(part.read(stop - start)) == total:
                        done.add(start)
        return done

    def _fetch(self, todo: list[tuple[int, int]]) -> None:
        """Fetch ranges by several threads, which are daemons: none that hangs keeps the process."""
        left = iter(todo)
        handle = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(handle, b"\n")  # after a line that a kill cut

        def work() -> None:
            try:
                while not self.stopped.is_set():
                    with self.lock:
                        span = next(left, None)
                    if span is None:
                        return
                    total = self._range(*span)
                    if total is None:
                        return
                    os.write(handle, b"%d %d %08x\n" % (*span, total))
            except BaseException as problem:
                self.failed.append(problem)
                self.stopped.set()

        count = min(THREADS, len(todo))
        threads = [threading.Thread(target=work, name="jitloader-download", daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    if time.monotonic() - self.moved > STALLED:
                        raise self._broken(Interrupted(f"nothing came in {STALLED:g} s"))
        finally:
            self.stopped.set()
            for thread in threads:
                thread.join(1.0)
            if not any(thread.is_alive() for thread in threads):
                os.close(handle)  # else a thread that hangs may still write to it
        if self.failed:
            raise next((e for e in self.failed if isinstance(e, Changed)), self.failed[0])

    def _range(self, start: int, stop: int) -> int | None:
        """Fetch one range and give its sum; what breaks off goes on where it was, a number of times. None when stopped."""
        at, total, failures = start, 0, 0
        with open(self.part, "r+b", buffering=0) as file:
            while at < stop:
                before = at
                try:
                    for piece in self._pieces(at, stop):
                        if self.stopped.is_set():
                            return None
                        _write(file, at, piece)
                        total, at = zlib.crc32(piece, total), at + len(piece)
                        self._count(len(piece))
                    if at < stop:
                        raise Interrupted(f"{stop - start} bytes expected, the answer ended after {at - start}")
                except Interrupted as error:
                    failures = 0 if self.ranges and (at - before) * 32 >= stop - start else failures + 1
                    if failures >= TRIES:
                        raise self._broken(error) from None
                    if not self.ranges:
                        self._count(start - at)
                        at, total = start, 0
                    if failures and self.stopped.wait(PAUSE * 2 ** (failures - 1) * (0.5 + random.random() / 2)):
                        return None
        return total

    def _pieces(self, at: int, stop: int) -> Iterator[memoryview]:
        """What the server gives from `at` on, never more than was asked for."""
        for piece in self.found.read(at, stop):
            view = memoryview(piece)[: stop - at]
            at += len(view)
            yield view

    def _count(self, count: int) -> None:
        with self.lock:
            self.done += count
            self.moved = time.monotonic()
        self.tell(count)

    def _broken(self, error: Interrupted) -> OSError:
        again = "; open it again to go on from there" if self.ranges else ""
        told = f"stopped at {self.done} of {self.found.size} bytes after {TRIES} tries: {error}{again}"
        return OSError(_code(error), told, shown(self.found.url))

    def _check(self) -> None:
        """Compare the whole with the checksum that the server gave, and put it on disk."""
        with open(self.part, "rb") as file:
            if self.found.digest is not None:
                kind, wanted = self.found.digest
                digest = hashlib.new(kind, usedforsecurity=False)
                while block := file.read(1 << 20):
                    digest.update(block)
                if digest.hexdigest() != wanted and not (self.found.doubt is not None and self.found.doubt()):
                    shutil.rmtree(self.entry, ignore_errors=True)
                    raise DataError(
                        f"{shown(self.found.url)}: {kind} {wanted} expected, {digest.hexdigest()} found in "
                        f"{self.found.size} bytes; removed, open it again"
                    )
            os.fsync(file.fileno())


def _write(file: Any, at: int, piece: memoryview) -> None:
    """Write all of a piece at a place of the file."""
    file.seek(at)
    while piece:
        piece = piece[file.write(piece) :]
