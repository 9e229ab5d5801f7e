"""Fill runs of batches: units of work in pool slots, and the plan of an epoch that tells how each is filled."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from . import compose, jit, residency
from .buffers import Pool
from .dataset import Dataset
from .live import Live
from .mixing import Mix
from .rng import epoch_key

AGAIN = 0.1  # seconds between looks at mapped files in an epoch: one that is cut under its map would end the process
SHAPED = 64  # batches whose arrays are made at a time: fewer calls, and no more objects than a cache holds
WIDE = 1 << 20  # bytes of a batch from which a parallel loop pays for its launch, on each of Numba's layers


class Fill(NamedTuple):
    """What one thread did of a unit: when it began, how long it took (seconds), which thread it was, and its rows."""

    begun: float
    seconds: float
    thread: int
    rows: int


class Unit:
    """A run of batches in a slot, filled together: by one thread, who has its `take` and opens `ready`, or by a crew.

    Batch b ends before row `ends[b]`; the last end may lie past the rows there are.
    """

    __slots__ = (
        "batches", "cancelled", "done", "ends", "failed", "fills", "layouts", "number", "problem", "ready", "rows", "slot",
        "start", "take", "__weakref__",
    )  # fmt: skip
    ready: threading.Lock  # these two where a Team fills it
    take: threading.Lock

    def __init__(self, pool: Pool, start: int, rows: int, ends: Sequence[int]) -> None:
        self.start, self.rows, self.ends = start, rows, ends
        self.done = self.cancelled = False
        self.failed: compose.Failure | None = None
        self.problem: BaseException | None = None  # what went wrong outside of kernels
        self.layouts: list[compose.Layout | None] = []
        self.batches: list[Any] | None = None  # finished batches, where Python functions were applied
        self.fills: list[Fill] = []
        self.number = -1  # at the desk of a crew
        self.slot = pool.take(self)

    @property
    def fill_seconds(self) -> float:
        """How long it was filled, over all threads."""
        return sum([fill.seconds for fill in self.fills])


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
        begun = time.perf_counter()
        try:
            self.verify(begun)
            self._fill(worker, unit)
            if self.data.applies:
                self._apply(unit)
        except Exception as problem:
            unit.problem = problem
        finally:
            if self.ahead is not None:
                self.ahead.done(unit.start)
        unit.fills = [Fill(begun, time.perf_counter() - begun, threading.get_ident(), unit.rows)]

    def verify(self, now: float) -> None:
        """Look at mapped files again if that was not done of late; each thread that comes meanwhile looks, too."""
        if now - self.verified > AGAIN:
            self.data.verify()
            self.verified = now

    def _apply(self, unit: Unit) -> None:
        """Run the applied functions over each batch; those before one that fails are kept."""
        unit.batches = []
        good = unit.rows if unit.failed is None else unit.failed.done
        for batch in parts(self.program, unit, good):
            unit.batches.append(self.data.finish(batch, self.seed, self.epoch))

    def lay_out(self, worker: compose.Worker | compose.WideWorker, unit: Unit) -> int:
        """Measure the rows of a unit that vary in length, and place them in its slot; gives how many rows can be filled."""
        program, slot, rows = self.program, unit.slot, unit.rows
        assert rows <= slot.rows
        if program.measure is None:
            return rows
        assert not isinstance(worker, compose.WideWorker)
        spans = slot.spans = slot.spans or compose.Spans(program, slot.rows)
        spans.part(unit.ends)
        for first, count, place in self.pieces(unit):
            failed = worker.lengths(first, self.step, count, place, spans)
            if failed is not None:  # those before it come
                unit.failed = failed._replace(done=place + failed.done)
                rows = unit.failed.done
                break
        unit.layouts = [None] * len(program.outputs)
        for k in spans.starts:
            layout = unit.layouts[k] = worker.lay_out(k, rows, spans)
            slot.reserve(k, layout.total)
        return rows

    def _fill(self, worker: compose.Worker | compose.WideWorker, unit: Unit) -> None:
        slot, rows = unit.slot, self.lay_out(worker, unit)
        for k, (at, _) in enumerate(self.places):
            worker.call.point(at, slot.flat[k], slot.addresses[k])
        for first, count, place in self._in_steps(unit):
            if place >= rows:
                return
            failed = worker.fill(first, self.step, min(count, rows - place), place)
            if failed is not None:
                unit.failed = failed._replace(done=place + failed.done)
                return


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
