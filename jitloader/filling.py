"""Fill runs of batches ahead: units of work in pool slots, and the background threads of one iterator that fill them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

from . import compose, jit, residency
from .buffers import Pool
from .dataset import Dataset
from .live import Live
from .mixing import Mix
from .rng import epoch_key

AGAIN = 0.1  # seconds between looks at mapped files in an epoch: one that is cut under its map would end the process
SHAPED = 64  # batches whose arrays are made at a time: fewer calls, and no more objects than a cache holds
LOOK = 0.005  # seconds of filling between looks at whether a thread waits for a core
ALONE = 0.05  # seconds that the consumer fills for itself where it does, then it is tried again; twice as long each time
LONGEST = 1.0  # up to this
WIDE = 1 << 20  # bytes of a batch from which a parallel loop pays for its launch, on each of Numba's layers


class Unit:
    """One kernel call: a run of batches in a slot; `take` tells who fills it, `ready` opens when they are there.

    Batch b ends before row `ends[b]`; the last end may lie past the rows there are.
    """

    __slots__ = (
        "batches", "begun", "cancelled", "done", "ends", "failed", "fill_seconds", "layouts", "problem", "ready", "rows", "slot",
        "start", "take", "thread", "__weakref__",
    )  # fmt: skip

    def __init__(self, pool: Pool, start: int, rows: int, ends: Sequence[int]) -> None:
        self.start, self.rows, self.ends = start, rows, ends
        self.ready, self.take = threading.Lock(), threading.Lock()
        self.ready.acquire()
        self.done = self.cancelled = False
        self.failed: compose.Failure | None = None
        self.problem: BaseException | None = None  # what went wrong outside of kernels
        self.layouts: list[compose.Layout | None] = []
        self.batches: list[Any] | None = None  # finished batches, where Python functions were applied
        self.begun = self.fill_seconds = 0.0
        self.thread = 0
        self.slot = pool.take(self)


class Plan:
    """What an epoch's kernel calls share: the program, its order of this epoch, and where this rank's rows are."""

    __slots__ = (
        "ahead",
        "batch_size",
        "data",
        "epoch",
        "first",
        "key",
        "length",
        "order",
        "places",
        "program",
        "seed",
        "step",
        "varied",
        "verified",
        "width",
    )

    def __init__(
        self, data: Dataset | Mix | Live, program: Any, order: tuple[Any, ...], seed: int, epoch: int, first: int, step: int,
        length: int, batch_size: int,
    ) -> None:  # fmt: skip
        self.data, self.program, self.order, self.seed, self.epoch = data, program, order, seed, epoch
        self.key = epoch_key(seed, epoch)
        self.places = list(zip(program.places(), program.outputs, strict=True))
        self.first, self.step, self.length, self.batch_size = first, step, length, batch_size
        self.width = program.nbytes  # of a row, where rows do not vary
        self.varied = [(k, o) for k, o in enumerate(program.outputs) if o.form != "fixed"]
        self.verified = time.perf_counter()  # when the files were looked at last
        self.ahead: residency.Ahead | None = None
        if program.grounds:
            reaches = functools.partial(program.reaches, self.key, order)
            total = max(0, -(-(length - first) // step))
            self.ahead = residency.Ahead(program.grounds, program.bound, reaches, self._runs, step, total)

    def _runs(self, start: int, rows: int) -> Iterator[tuple[int, int]]:
        """Give (first position, count) of runs of this rank's rows, from the start again past the end."""
        return ((first, count) for first, count, _ in self._pieces(start, rows))

    def worker(self) -> compose.Worker:
        """Give one thread's calls, with scratch of their own."""
        return self.program.worker(self.key, self.order)

    def wide_worker(self, threads: int) -> compose.Worker | compose.WideWorker:
        """Give calls that use several cores where a batch is large enough to pay for a launch and no user code may raise."""
        large = self.program.nbytes * self.batch_size >= WIDE and self.program.measure is None
        kept = residency.kept(self.program.grounds, self.program.bound)
        if (
            threads > 1
            and large
            and not kept
            and isinstance(self.program, compose.Program)
            and jit.parallel_safe()
            and not any(s.stage.user for s in self.program.steps)
        ):
            return compose.WideWorker(self.program, self.key, self.order, threads)
        return self.worker()

    def pieces(self, unit: Unit) -> Iterator[tuple[int, int, int]]:
        """Give (first position, count, place) of a unit's runs."""
        return self._pieces(unit.start, unit.rows)

    def _pieces(self, start: int, rows: int) -> Iterator[tuple[int, int, int]]:
        """Give (first position, count, place) of runs: local row i is at first + step * i, from the start again past the end."""
        done = 0
        while done < rows:
            first = (self.first + (start + done) * self.step) % self.length
            count = min(rows - done, -(-(self.length - first) // self.step))
            yield first, count, done
            done += count

    def _in_steps(self, unit: Unit) -> Iterator[tuple[int, int, int]]:
        """Give a unit's runs; before each is filled, the bytes of those behind it are asked for."""
        for first, count, place in self.pieces(unit):
            done = 0
            while done < count and self.ahead is not None:
                rows = min(count - done, self.ahead.rows)
                at, end = unit.start + place + done, unit.start + unit.rows
                rows, faults = self.ahead.before(unit.start, at, rows, end)
                yield first + done * self.step, rows, place + done
                self.ahead.after(faults)
                done += rows
            if self.ahead is None:
                yield first, count, place

    def nbytes(self, unit: Unit) -> int:
        """Bytes that a filled unit came to: fixed rows, and those that vary at the lengths they have."""
        total = unit.rows * self.width
        for k, output in self.varied if unit.layouts else ():
            layout = unit.layouts[k]
            total += layout.total * output.carrier.itemsize if layout is not None else 0
        return total

    def padding(self, unit: Unit) -> tuple[int, int]:
        """Elements of a filled unit that are padding to the longest row of a batch, and all elements of such fields."""
        empty = total = 0
        for k, output in self.varied if unit.layouts else ():
            layout = unit.layouts[k]
            if layout is not None and output.form == "longest":
                here = layout.total // max(output.size, 1)
                empty += here - layout.told.item(0)
                total += here
        return empty, total

    def fill(self, worker: compose.Worker | compose.WideWorker, unit: Unit) -> None:
        """Fill a unit's rows."""
        unit.thread, unit.begun = threading.get_ident(), time.perf_counter()
        try:
            if unit.begun - self.verified > AGAIN:
                self.data.verify()  # by each thread that comes meanwhile, too
                self.verified = unit.begun
            self._fill(worker, unit)
            if self.data.applies:
                self._apply(unit)
        except Exception as problem:
            unit.problem = problem
        finally:
            if self.ahead is not None:
                self.ahead.done(unit.start)
        unit.fill_seconds = time.perf_counter() - unit.begun

    def _apply(self, unit: Unit) -> None:
        """Run the applied functions over each batch; those before one that fails are kept."""
        unit.batches = []
        good = unit.rows if unit.failed is None else unit.failed.done
        for batch in parts(self.program, unit, good):
            unit.batches.append(self.data.finish(batch, self.seed, self.epoch))

    def _fill(self, worker: compose.Worker | compose.WideWorker, unit: Unit) -> None:
        program, slot, rows = self.program, unit.slot, unit.rows
        assert rows <= slot.rows
        layouts: list[compose.Layout | None] = []
        if program.measure is not None:
            assert not isinstance(worker, compose.WideWorker)
            spans = slot.spans = slot.spans or compose.Spans(program, slot.rows)
            spans.part(unit.ends)
            for first, count, place in self.pieces(unit):
                failed = worker.lengths(first, self.step, count, place, spans)
                if failed is not None:  # those before it come
                    unit.failed = failed._replace(done=place + failed.done)
                    rows = unit.failed.done
                    break
            layouts = [None] * len(program.outputs)
            for k in spans.starts:
                layout = layouts[k] = worker.lay_out(k, rows, spans)
                slot.reserve(k, layout.total)
        for k, (at, _) in enumerate(self.places):
            worker.call.point(at, slot.flat[k], slot.addresses[k])
        unit.layouts = layouts
        for first, count, place in self._in_steps(unit):
            if place >= rows:
                return
            failed = worker.fill(first, self.step, min(count, rows - place), place)
            if failed is not None:
                unit.failed = failed._replace(done=place + failed.done)
                return


class Cores:
    """Until when a loader takes the cores to be held by other work: meanwhile its consumer fills for itself.

    Beside other work threads do not speed a consumer up, and each hand-over costs it (measured: up to 1.2x the time).
    """

    def __init__(self) -> None:
        self.taken, self.pause, self.times = 0.0, ALONE, 0

    def looked(self, waited: bool) -> None:
        """Note whether a thread waited for a core; once says nothing, as 2 % of looks at an idle machine tell so."""
        if not waited:
            self.pause, self.times = ALONE, 0
            return
        self.times += 1
        if self.times > 1:
            self.taken = time.perf_counter() + self.pause
            self.pause = min(2 * self.pause, LONGEST)


class Waits:
    """How long the calling thread ran, and how long it was ready to run while other work held the cores, as Linux counts
    them; elsewhere it never waits."""

    def __init__(self) -> None:
        self.file = -1
        with contextlib.suppress(OSError):
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self.before = self._read()

    def _read(self) -> tuple[int, int]:
        try:
            ran, waited, _ = os.pread(self.file, 80, 0).split()  # nanoseconds
            return int(ran), int(waited)
        except (OSError, ValueError):
            return 0, 0

    def long(self) -> bool:
        """Whether since the last call it waited more than a quarter of the time that it ran."""
        before, self.before = self.before, self._read()
        ran, waited = self.before[0] - before[0], self.before[1] - before[1]
        return waited * 4 > ran > 0

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _work(jobs: queue.SimpleQueue[Unit | None], plan: Plan, cores: Cores | None) -> None:
    """The life of a background thread: fill units until told to stop. Holds no loader, iterator or idle slot."""
    worker: compose.Worker | None = None
    waits: Waits | None = None
    filled = 0.0
    try:
        while True:
            unit = jobs.get()
            if unit is None:
                return
            if not unit.take.acquire(blocking=False):
                continue  # the consumer fills it
            if not unit.cancelled:
                try:
                    worker = worker or plan.worker()
                    plan.fill(worker, unit)
                except BaseException as problem:  # no memory for the scratch, say: the consumer is told, never left waiting
                    unit.problem = problem
            unit.done = True
            if unit.cancelled:
                unit.slot.give_back()
            unit.ready.release()
            filled += unit.fill_seconds
            if cores is not None and waits is None:
                waits = Waits()
            if cores is not None and waits is not None and filled > LOOK:
                filled = 0.0
                cores.looked(waits.long())
            del unit
    finally:
        if waits is not None:
            waits.close()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


class Team:
    """The background threads of one iterator."""

    def __init__(self, plan: Plan, size: int, wide: int = 1, cores: Cores | None = None) -> None:
        self.plan, self.pid, self.wide = plan, os.getpid(), wide
        self.jobs: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.worker: compose.Worker | compose.WideWorker | None = None
        self.closed = False  # by the loader, while its iterator may still be in somebody's hands
        for _ in range(size):
            thread = threading.Thread(target=_work, args=(self.jobs, plan, cores), name="jitloader", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had: the consumer fills for itself
                break
            self.threads.append(thread)
        _teams.add(self)

    def submit(self, unit: Unit, alone: bool) -> None:
        """Fill a unit in the background, or at once where there is no thread; `alone`, it is left to who waits for it."""
        if self.plan.ahead is not None:
            self.plan.ahead.opens(unit.start)
        if not self.threads:
            self.fill_here(unit)
        elif not alone:
            self.jobs.put(unit)

    def fill_here(self, unit: Unit) -> None:
        """Fill a unit in the calling thread."""
        if self.worker is None:
            self.worker = self.plan.wide_worker(self.wide) if self.pid == os.getpid() else self.plan.worker()
        try:
            self.plan.fill(self.worker, unit)
        finally:
            unit.done = True

    def wait(self, units: deque[Unit]) -> Unit:
        """Give the first of some units, filled. Who would have to wait fills what no thread has begun, this one or a
        later one; after a fork, whose child has no threads, fills it here."""
        unit = units[0]
        if self.closed:
            raise ValueError("this loader is closed")
        if unit.done:
            return unit
        if self.pid != os.getpid():
            self.threads, self.pid, self.worker = [], os.getpid(), None
        if not self.threads:
            self.fill_here(unit)
            return unit
        if not self.plan.data.applies:  # Python functions run in the background alone
            for other in units:
                if unit.done:
                    return unit
                if other.take.acquire(blocking=False):
                    self.fill_here(other)
        while not unit.done and not unit.ready.acquire(timeout=1):
            if not any(thread.is_alive() for thread in self.threads):  # somebody ended them from outside
                self.threads = []
                if unit.take.acquire(blocking=False):
                    self.fill_here(unit)
                elif not unit.done:
                    unit.done, unit.problem = True, RuntimeError("the thread that was filling this batch was ended")
        return unit

    def stop(self, units: deque[Unit], join: bool = False, own: Any = os.getpid) -> None:
        """End the threads; what they were to fill goes back to the pool. It may be called when modules are gone already."""
        for unit in units:
            unit.cancelled = True
            if unit.done or self.pid != own():
                unit.slot.give_back()
        units.clear()
        if self.plan.ahead is not None:
            self.plan.ahead.close()
        if self.pid != own():
            return
        for _ in self.threads:
            self.jobs.put(None)
        if join:
            for thread in self.threads:
                if thread is not threading.current_thread():
                    thread.join()


@atexit.register
def _stop_all() -> None:
    """At the end of the process no thread may still write into memory that is going away."""
    for team in list(_teams):
        team.stop(deque(), join=True)


def parts(program: Any, unit: Unit, good: int) -> Iterator[Sequence[Any]]:
    """Give the arrays of each batch of a filled unit, as far as `good` rows reach."""
    slot, rows, layouts = unit.slot, unit.rows, unit.layouts
    ends = unit.ends if good == rows else [end for end in unit.ends if min(end, rows) <= good]
    if not ends:
        return
    whole: Sequence[Any]
    if layouts:
        every = zip(program.outputs, slot.flat, layouts, strict=True)
        whole = [compose.shape_output(o, flat, rows) if layout is None else None for o, flat, layout in every]
    else:
        whole = slot.shaped(program.outputs, compose.shape_output)
    low = 0
    for at in range(0, len(ends), SHAPED):
        highs = ends[at : at + SHAPED]
        if highs[-1] > rows:
            highs = [*highs[:-1], rows]
        lows = [low, *highs[:-1]]
        columns = [
            compose.shape_batches(program.outputs[k], slot.flat[k], cast(compose.Layout, layouts[k]), at, lows, highs)
            if a is None
            else [a[i:j] for i, j in zip(lows, highs, strict=True)]
            for k, a in enumerate(whole)
        ]
        yield from zip(*columns, strict=True)
        low = highs[-1]
