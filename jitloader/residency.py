"""Which bytes of the sources are in memory: asked for ahead of a run of batches, held while read, dropped behind it.

Files mapped as they lie are read by the system when they are touched, a page at a time. Where they are not in its cache
yet, the exact rows of the batches to come are asked for ahead (MADV_WILLNEED): reads of many rows are under way at once.
Chunked arrays are decoded by bands (`storage.chunked`) by threads, ahead of the batches too, once for as long as they
stay; those last wanted longest ago go first. With a bound on what may be resident, pages are given back behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jit, storage
from .jit.cpus import text_of
from .samples import Samples
from .storage.chunked import ABSENT, COMING, PAGE, THERE, Chunked, alive

AHEAD = (
    64 << 20
)  # bytes of mapped rows asked for ahead: some hundred reads of a disk's queue, some seconds of a slow one
LEAST = 1 << 20  # bytes of a file that is not worth a look
LOOKS = 16  # pages looked at to tell whether a file is in the system's cache: 1 us each
WHILE = 0.1  # seconds for which a file in the cache is taken to stay there
TASK = 1 << 18  # decoded bytes below which bands go to a thread together
IDLE = 0.5  # seconds after which a decoding thread that has nothing to do ends

Spans = list[tuple[np.ndarray, np.ndarray]]  # a field over a file each: where a row begins and ends, as addresses


class Ground(NamedTuple):
    """A file below a source: its map, or the memory that stands for it, and where that lies."""

    map: Any
    address: int
    length: int
    span: int = 0  # bytes from the first to the last of each array that is read, added up


def grounds(sources: Mapping[str, Samples]) -> tuple[Ground, ...]:
    """Give the files below some fields, each once. A private copy of a file is none: it may have been written to."""
    found: dict[int, Ground] = {}
    for samples in sources.values():
        for part in samples.parts if not samples.ring else ():
            known = found.get(id(storage.map_below(part.array)))
            if known is not None:
                found[id(known.map)] = known._replace(span=known.span + _span(part.array))
                continue
            below = storage.mapping(part.array)
            if below is None or below.path is None or below.mode not in ("r", "r+"):
                continue
            address = part.array.__array_interface__["data"][0] - below.offset
            found[id(below.map)] = Ground(below.map, address, len(below.map), _span(part.array))
    return tuple(found.values())


def _span(array: np.ndarray) -> int:
    """Bytes from the first to the last of an array."""
    if not array.size:
        return 0
    return sum((n - 1) * abs(s) for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize


def kept(places: Sequence[Ground], bound: Bound | None) -> bool:
    """Whether rows must be brought in before they are read, or pages dropped after it."""
    return bool(places) and (bound is not None or has_chunks(places))


def has_chunks(places: Sequence[Ground]) -> bool:
    """Whether some of the files are chunked."""
    return any(isinstance(ground.map, Chunked) for ground in places)


class Bound:
    """How many bytes of some files may be in memory, of mapped pages and of decoded chunks, and how near that is."""

    def __init__(self, limit: int, places: Sequence[Ground]) -> None:
        self.sources = [g.map for g in places if isinstance(g.map, Chunked)]
        self.maps = [g for g in places if not isinstance(g.map, Chunked)]
        small = sum(g.span for g in self.maps)
        if small <= limit // 16:  # as labels beside images: they may stay, and nobody looks at them
            self.maps, limit = [], limit - small
        share = 2 if self.sources and self.maps else 1
        self.limit = self.mapped = max(1, limit // share)
        # After so many rows the process is looked at again. A fault may map 64 KB around a row, or 2 MB where the cache has
        # pages of that size: how much is measured, beginning with the worst.
        self.rows = max(1, self.mapped // 16 // (2 << 20))
        self._base = self._last = -1
        self._row = 0.0
        self._lock = threading.Lock()

    def behind(self, rows: int) -> None:
        """After so many rows: where mapped pages have come near the bound, give all back. What is read again after that
        is still in the system's cache: a fault, no read."""
        if not self.maps:
            return
        with self._lock:
            now = mapped_bytes()
            if self._last >= 0:
                self._row = max(self._row * 0.95, (now - self._last) / rows)
                self.rows = max(1, min(2 * self.rows, 4096, int(self.mapped / 16 / max(self._row, 1))))
            if self._last < 0 or now - self._base > self.mapped * 3 // 8:
                for ground in self.maps:
                    _advise(ground.address, ground.length, mmap.MADV_DONTNEED)
                self._base = now = mapped_bytes()
            self._last = now


def mapped_bytes() -> int:
    """Bytes of file pages in this process's memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


def pieces(
    places: Sequence[Ground], spans: Spans | None, count: int, bound: Bound | None
) -> Generator[tuple[int, int]]:
    """Part `count` rows into runs (low, high) whose bytes may be in memory at once; they are, until the next is asked for.

    Close it when done. Raises DataError where a chunk cannot be decoded.
    """
    sources = [g for g in places if isinstance(g.map, Chunked)]
    todo, limit = [(0, count)], default_limit() if bound is None else bound.limit
    every = bound is not None and bool(bound.maps)
    lines = [] if spans is None else [_bands(ground, spans) for ground in sources]
    while todo:
        low, high = todo.pop()
        if bound is not None and every and high - low > bound.rows:
            todo.append((low + bound.rows, high))
            high = low + bound.rows
        wanted = [(g.map, _distinct(line, low, high)) for g, line in zip(sources, lines, strict=True)]
        if high - low > 1 and sum(source.size_of(bands) for source, bands in wanted) > limit // 2:
            middle = (low + high) // 2
            todo += [(middle, high), (low, middle)]
            continue
        hold = _take(wanted, bound, limit) if wanted else None
        try:
            yield low, high
        finally:
            if hold is not None:
                _release(hold)
            if bound is not None:
                bound.behind(high - low)


def _bands(ground: Ground, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Give the first and the last band of each row of each field over a chunked file: (fields, rows), -1 for none."""
    firsts, lasts = [], []
    for lows, highs in spans:
        inside = (lows >= ground.address) & (lows < ground.address + ground.length) & (highs > lows)
        firsts.append(np.where(inside, (lows - ground.address) // ground.map.band, 0))
        lasts.append(np.where(inside, (highs - 1 - ground.address) // ground.map.band, -1))
    return np.stack(firsts), np.stack(lasts)


def _distinct(line: tuple[np.ndarray, np.ndarray], low: int, high: int) -> np.ndarray:
    """Give the bands of some rows, each once, in rising order."""
    first, last = line[0][:, low:high].reshape(-1), line[1][:, low:high].reshape(-1)
    there = last >= first
    if not there.any():
        return np.zeros(0, np.int64)
    first, last = first[there], last[there]
    wide = int((last - first).max())
    if wide <= 1:
        return np.unique(np.concatenate([first, last]))
    steps = np.zeros(int(last.max() - first.min()) + 2, np.int64)  # how many rows begin and end at each
    np.add.at(steps, first - first.min(), 1)
    np.add.at(steps, last + 1 - first.min(), -1)
    return np.flatnonzero(np.cumsum(steps) > 0) + first.min()


def _last_row(first: np.ndarray, last: np.ndarray, bands: np.ndarray) -> np.ndarray:
    """Give the last row that reads each of some bands, which are all that the rows read."""
    found = np.zeros(len(bands), np.int64)
    there = last >= first
    rows = np.broadcast_to(np.arange(first.shape[1]), first.shape)[there]
    low, high = np.searchsorted(bands, first[there]), np.searchsorted(bands, last[there])
    for at in range(int((high - low).max(initial=-1)) + 1):
        np.maximum.at(found, np.minimum(low + at, high), rows)
    return found


# -- decoded chunks ---------------------------------------------------------------------------------------------------

Wanted = list[tuple[Chunked, np.ndarray]]

_change = threading.Condition()  # guards states, users and counts of all chunked arrays, and what follows
_clock = 0  # rises with the rows that were read; what was wanted before it is past
_horizon = 0  # the latest time for which anything was asked
_epochs: weakref.WeakSet[Ahead] = weakref.WeakSet()  # those under way over chunked arrays
_inside: set[int] = set()  # threads that fill rows of these


def _after_fork() -> None:
    """In a child there are no threads that decode: what was coming is absent, and nobody reads."""
    global _change, _crew
    _change, _crew = threading.Condition(), _Crew()
    _inside.clear()
    for epoch in list(_epochs):
        epoch.lock = threading.Lock()
    for source in list(alive):
        source.state[source.state == COMING] = ABSENT
        source.users[:] = 0
        source.holds = source.coming = 0
        source.resident = source.size_of(np.flatnonzero(source.state == THERE))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _take(wanted: Wanted, bound: Bound | None, limit: int) -> Wanted:
    """Bring bands in and hold them; waits while others hold so much that there is no room."""
    global _clock
    with _change:
        sources = bound.sources if bound is not None else list(alive)
        if threading.get_ident() not in _inside:
            _clock += 1
        while True:
            for source, bands in wanted:
                source.users[bands] += 1  # so that they are not dropped for each other
            absent = [(source, bands[source.state[bands] == ABSENT]) for source, bands in wanted]
            short = sum(s.resident for s in sources) + sum(s.size_of(b) for s, b in absent) - limit
            short -= _evict(sources, short)
            # Nobody waits while holding: where others hold, room will come; else this piece is larger than the bound.
            if short <= 0 or not any(s.holds or s.coming for s in sources):
                break
            for source, bands in wanted:
                source.users[bands] -= 1
            _change.wait()
        for source, bands in wanted:
            source.holds += 1
            source.when[bands] = np.maximum(source.when[bands], _clock)
        _come(absent)
    try:
        _decoded(wanted, absent)
    except BaseException:
        _release(wanted)
        raise
    return wanted


def _decoded(wanted: Wanted, absent: Wanted) -> None:
    """Decode what is absent, with the help of other threads, and wait for what others decode."""
    while True:
        tasks, errors = deque(_tasks(absent)), deque[BaseException]()

        def drain(tasks: Any = tasks, errors: Any = errors) -> None:
            while True:
                try:
                    source, first, last = tasks.popleft()
                except IndexError:
                    return
                problem = _decode(source, first, last)
                if problem is not None:
                    errors.append(problem)

        for _ in range(min(len(tasks) - 1, jit.available_cpus() - 1)):
            _crew.submit(0, drain)
        drain()
        with _change:
            while any((source.state[bands] == COMING).any() for source, bands in wanted):
                _change.wait()
            if errors:
                raise errors[0]
            absent = [(source, bands[source.state[bands] == ABSENT]) for source, bands in wanted]
            if not any(len(bands) for _, bands in absent):
                return
            _come(absent)  # another thread failed on it: fail here too, with the same error


def _release(wanted: Wanted) -> None:
    with _change:
        for source, bands in wanted:
            source.users[bands] -= 1
            source.holds -= 1
        _change.notify_all()


def _come(absent: Wanted) -> None:
    """Note that bands will be decoded."""
    for source, bands in absent:
        source.state[bands] = COMING
        source.coming += len(bands)
        source.resident += source.size_of(bands)


def _decode(source: Chunked, first: int, last: int) -> BaseException | None:
    """Decode a run of bands that are coming; gives what went wrong."""
    problem: BaseException | None = None
    try:
        source.decode(first, last)
    except BaseException as error:
        problem = error
    if problem is not None and last - first > 1:  # one of them alone is broken, and is to be named
        return max((_decode(source, band, band + 1) for band in range(first, last)), key=lambda p: p is not None)
    with _change:
        bands = np.arange(first, last)
        source.coming -= len(bands)
        source.decoded += len(bands)
        source.state[bands] = THERE
        if problem is not None:
            source.drop(bands)
        _change.notify_all()
    return problem


def _tasks(absent: Wanted) -> Iterator[tuple[Chunked, int, int]]:
    """Part bands into runs for one thread each: neighbours together while they are small."""
    for source, bands in absent:
        most = max(1, TASK // source.band)
        at = 0
        while at < len(bands):
            end = at + 1
            while end < len(bands) and end - at < most and bands[end] == bands[end - 1] + 1:
                end += 1
            yield source, int(bands[at]), int(bands[end - 1]) + 1
            at = end


def _evict(sources: Sequence[Chunked], nbytes: int, past: bool = False) -> int:
    """Drop bands that nobody holds until so many bytes are free, those wanted longest ago first; then, but not with `past`,
    those wanted in the farthest future. Gives the bytes."""
    if nbytes <= 0:
        return 0
    found = []
    for number, source in enumerate(sources):
        bands = np.flatnonzero((source.state == THERE) & (source.users == 0))
        stamps = source.when[bands]
        if past:
            bands, stamps = bands[stamps < _clock], stamps[stamps < _clock]
        rank = np.where(stamps < _clock, stamps, np.iinfo(np.int64).max - stamps)
        found.append(np.stack([rank, np.full(len(bands), number), bands]))
    table = np.concatenate(found, axis=1)
    table = table[:, np.argsort(table[0], kind="stable")]
    sizes = np.array([source.band for source in sources])[table[1]] if table.size else np.zeros(0, np.int64)
    table = table[:, : int(np.searchsorted(np.cumsum(sizes), nbytes)) + 1]
    freed = 0
    for number, source in enumerate(sources):
        bands = np.sort(table[2][table[1] == number])
        if len(bands):
            freed += source.size_of(bands)
            source.drop(bands)
    return freed


def _request(wanted: Wanted, last: list[np.ndarray], bound: Bound | None, epoch: Ahead) -> bool:
    """Let bands be decoded in the background, where there is room for all of them beside what is still wanted; `last` are
    the rows of the epoch that read each last."""
    global _horizon
    with _change:
        sources = bound.sources if bound is not None else list(alive)
        limit = bound.limit if bound is not None else default_limit()
        for source, bands in wanted:
            source.users[bands] += 1
        absent = [(source, bands[source.state[bands] == ABSENT]) for source, bands in wanted]
        need = sum(s.size_of(b) for s, b in absent)
        short = sum(s.resident for s in sources) + need - limit if need else 0
        fits = short - _evict(sources, short, past=True) <= 0
        for (source, bands), rows in zip(wanted, last, strict=True):
            source.users[bands] -= 1
            if fits and len(bands):
                times = epoch.time + rows
                source.when[bands] = np.maximum(source.when[bands], times)
                _horizon = max(_horizon, int(times.max()) + 1)
        if not fits:
            return False
        _come(absent)
    for task in _tasks(absent):
        _crew.submit(1, lambda task=task: _decode_ahead(epoch, *task))  # type: ignore[misc]
    return True


def _decode_ahead(epoch: Ahead, source: Chunked, first: int, last: int) -> None:
    """Decode what an epoch asked for, unless it was left meanwhile: who waits for it all the same decodes it then."""
    if not epoch.closed:
        _decode(source, first, last)
        return
    with _change:
        source.coming -= last - first
        source.drop(np.arange(first, last))
        _change.notify_all()


class _Crew:
    """Threads that decode, as many as there are CPUs; they end when there is nothing to do."""

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], Any]]] = queue.PriorityQueue()
        self._lock, self._threads, self._number = threading.Lock(), 0, 0

    def submit(self, rank: int, job: Callable[[], Any]) -> None:
        """Run a job, those of lower rank first."""
        with self._lock:
            self._number += 1
            self._jobs.put((rank, self._number, job))
            if self._threads >= min(jit.available_cpus(), self._jobs.qsize()):
                return
            thread = threading.Thread(target=self._work, name="jitloader-decode", daemon=True)
            try:
                thread.start()
                self._threads += 1
            except RuntimeError:  # no more threads to be had, at the end of the process
                pass
            if self._threads:
                return
        self._run_all()

    def _run_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()[2]()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)[2]
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._threads -= 1
                        return
                continue
            job()
            del job


_crew = _Crew()
_limit: list[int] = []


def default_limit() -> int:
    """Bytes of decoded chunks that this process keeps where no bound was given: a quarter of the memory that was available
    at first, a limit of its cgroup counted.

    >>> default_limit() > 0
    True
    """
    if not _limit:
        _limit.append(max(16 << 20, available_memory() // 4))
    return _limit[0]


def available_memory() -> int:
    """Bytes of memory this process may take: what the system has available, cut by the limit of its cgroup."""
    found = 1 << 32
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = text_of("/proc/meminfo").splitlines()
        found = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(text_of("/sys/fs/cgroup", name)))
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in text_of("/proc/self/cgroup").splitlines():
            _, kinds, path = line.split(":", 2)
            for name in ("memory.max",) if not kinds else ("memory.limit_in_bytes",) if kinds == "memory" else ():
                with contextlib.suppress(OSError, ValueError):
                    found = min(found, int(text_of("/sys/fs/cgroup", kinds, path.lstrip("/"), name)))
    return found


def chunked_below(sources: Sequence[Mapping[str, Samples]]) -> list[Chunked]:
    """Give the chunked arrays below some data."""
    return list({id(g.map): g.map for one in sources for g in grounds(one) if isinstance(g.map, Chunked)}.values())


# -- read ahead -------------------------------------------------------------------------------------------------------


class Ahead:
    """What the units of one epoch will read, asked for ahead of them.

    `reaches()` gives what tells the bytes of rows; `runs(start, rows)` gives the positions, (first, count), of rows of
    this rank, of which there are `total`, `step` positions apart.

    Where files are chunked, a unit is announced, in the order of rows, before it is given to a thread (`opens`), so that
    what the slowest thread needs is never past; and a thread that runs ahead of what could be asked for waits for the
    slower ones, whose chunks it would have to drop. So a chunk is decoded once for as long as its rows lie within what may
    be in memory, whatever the threads do.
    """

    def __init__(
        self,
        places: Sequence[Ground],
        bound: Bound | None,
        reaches: Callable[[], list[Any]],
        runs: Callable[[int, int], Iterator[tuple[int, int]]],
        step: int,
        total: int,
    ) -> None:
        self.bound, self.runs, self.step, self.total = bound, runs, step, total
        self.sources = [g for g in places if isinstance(g.map, Chunked)]
        self.maps = [g for g in places if not isinstance(g.map, Chunked)]
        self.on: bool | None = True if self.sources else None  # None: not looked yet
        self.time = _clock  # of row 0
        self.lock = threading.Lock()  # of who asks
        self.closed = False
        self._make = reaches
        self._reaches: list[Any] | None = None
        self._open: dict[int, int] = {}  # the row at which each unit is that is not filled yet, by its first one
        self._at, self._block, self._nbytes = 0, 64, 0.0

    @property
    def rows(self) -> int:
        """How many rows to fill before what comes after them is looked at: those of an eighth of what may be in memory."""
        if not self.sources:
            return 1 << 62
        most = default_limit() if self.bound is None else self.bound.limit
        return max(1, int(most / 8 / (self._nbytes or most / 8 / 64)))

    def opens(self, unit: int) -> None:
        """Note that the unit of rows from `unit` on will be filled."""
        if self.sources:
            with _change:
                self._goes(unit, unit)

    def before(self, unit: int, start: int, rows: int, end: int) -> tuple[int, int]:
        """Ask for what comes from row `start` of this rank on, of the unit of rows unit .. end - 1. Gives how many of the
        next `rows` to fill before it is called again, and faults so far."""
        if self.on is None:
            self.on = any(cold(ground) for ground in self.maps)
        if not self.on:
            return rows, faults()
        if self.sources:
            return self._in_turn(unit, start, rows, end), 0
        if self.lock.acquire(blocking=False):  # else another thread is at it
            try:
                self._at = max(self._at, start)
                self._advance(end)
            finally:
                self.lock.release()
        return rows, 0

    def done(self, unit: int) -> None:
        """This thread has filled a unit."""
        if self.sources:
            with _change:
                _inside.discard(threading.get_ident())
                if self._open.pop(unit, None) is not None and self._open:
                    self._move()

    def close(self) -> None:
        """Nothing more will be read: what was asked for is past, unless others may have asked for it too."""
        global _clock
        if self.sources and not self.closed and _change is not None:  # modules may be gone, at the end of the process
            with _change:
                self.closed = True
                self._open.clear()
                _epochs.discard(self)
                if not _epochs:
                    _clock = max(_clock, _horizon)
                _change.notify_all()

    def _goes(self, unit: int, row: int) -> None:
        """Note at which row a unit is."""
        if not self.closed:
            _epochs.add(self)
            self._open[unit] = row
            self._move()

    def _move(self) -> None:
        """Let time go on to the row at which the slowest unit is; where others read more, this epoch's rows come later."""
        global _clock
        first = min(self._open.values())
        self.time = max(self.time, _clock - first)
        _clock = self.time + first
        _change.notify_all()

    def _in_turn(self, unit: int, start: int, rows: int, end: int) -> int:
        """Ask for as much as there is room for. Who gets less than `rows` waits for slower ones; the slowest goes on as far as
        that reaches, and drops what is wanted latest only where it reaches nothing."""
        with _change:
            _inside.add(threading.get_ident())
            self._goes(unit, start)
        while True:
            with self.lock:
                self._at = max(self._at, min(self._open.values(), default=start))
                self._advance(end)
                got = min(rows, self._at - start)
            with _change:
                first = min(self._open.values(), default=start)
                if got == rows or start <= first or self._at == self.total or self.closed:
                    return got if got > 0 else rows
                while first == min(self._open.values(), default=start):
                    _change.wait()

    def after(self, before: int) -> None:
        """See whether filling had to wait for a disk."""
        if not self.on and faults() - before > 4:
            self.on = True

    def _advance(self, end: int) -> None:
        most = default_limit() if self.bound is None else self.bound.limit
        if not self.sources:
            most = AHEAD if self.bound is None else min(AHEAD, self.bound.mapped // 2)
        while True:
            rows = int(most / self._nbytes) if self._nbytes else self._block
            goal = min(self.total, end + rows)
            if self._at >= goal:
                return
            count = min(self._block, goal - self._at)
            wide = max(1, min(4096, int((4 << 20) / self._nbytes))) if self._nbytes else self._block
            if self._ask(count):
                self._at += count
                self._block = min(self._block * 2, wide)
            elif count == 1:
                return
            else:
                self._block = count // 2

    def _ask(self, count: int) -> bool:
        """Ask for `count` rows more; False where there is no room."""
        spans: Spans = []
        if self._reaches is None:
            self._reaches = self._make()
        for reach in self._reaches:
            found = [reach(first, self.step, n) for first, n in self.runs(self._at, count)]
            spans += [tuple(map(np.concatenate, zip(*one, strict=True))) for one in zip(*found, strict=True)]  # type: ignore
        self._nbytes = max(1.0, sum(float((highs - lows).sum()) for lows, highs in spans) / count)
        if self.sources:
            lines = [_bands(ground, spans) for ground in self.sources]
            wanted = [(g.map, _distinct(line, 0, count)) for g, line in zip(self.sources, lines, strict=True)]
            last = [_last_row(*line, bands) for line, (_, bands) in zip(lines, wanted, strict=True)]
            if not _request(wanted, [rows + self._at for rows in last], self.bound, self):
                return False
        for ground in self.maps:
            will_need(ground, spans)
        return True


def faults() -> int:
    """Faults of this thread, so far, that had to wait for a disk; 0 where the system does not tell."""
    return 0 if _usage is None else _usage()


def _find_usage() -> Callable[[], int] | None:
    try:
        import resource

        get, thread = resource.getrusage, resource.RUSAGE_THREAD
    except (ImportError, AttributeError):
        return None
    return lambda: get(thread).ru_majflt


_usage = _find_usage()


def will_need(ground: Ground, spans: Spans) -> None:
    """Ask the system for the pages of some rows of a mapped file: it reads them all at once, and nobody waits."""
    for lows, highs in spans:
        inside = (lows >= ground.address) & (lows < ground.address + ground.length) & (highs > lows)
        if not inside.any():
            continue
        begin, end = lows[inside] // PAGE * PAGE, -(-highs[inside] // PAGE) * PAGE
        order = np.argsort(begin)
        begin, end = begin[order], np.maximum.accumulate(end[order])
        cuts = np.flatnonzero(begin[1:] > end[:-1])
        starts, ends = begin[np.r_[0, cuts + 1]].tolist(), end[np.r_[cuts, -1]].tolist()
        top = ground.address + ground.length
        for a, b in zip(starts, ends, strict=True):
            _advise(a, min(b, top) - a, mmap.MADV_WILLNEED)


def cold(ground: Ground) -> bool:
    """Whether some of a few pages, spread over a mapped file, are not in the system's cache. What was there is not looked
    at again for a while: short epochs come by the thousand."""
    if ground.length < LEAST or _libc is None or not hasattr(_libc, "mincore"):
        return False
    now = time.monotonic()
    if now < _warm.get(ground.map, 0.0):
        return False
    seen = (ctypes.c_ubyte * 1)()
    for k in range(LOOKS):
        at = int((k * 0.6180339887 % 1) * ground.length) // PAGE * PAGE
        if _libc.mincore(ctypes.c_void_p(ground.address + at), ctypes.c_size_t(PAGE), seen) == 0 and not seen[0] & 1:
            return True
    _warm[ground.map] = now + WHILE
    return False


_warm: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def _advise(address: int, length: int, advice: int) -> None:
    """madvise without the GIL, which `mmap.madvise` holds while reads are queued."""
    if _libc is not None and hasattr(_libc, "madvise"):
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


def _find_libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


_libc = _find_libc() if hasattr(mmap, "MADV_WILLNEED") else None
