"""Epochs: batches filled ahead by background threads into buffers nobody holds, and the state to go on from anywhere."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import compose, jit, orders
from .buffers import Pool, Slot
from .dataset import Dataset, epoch_key
from .errors import StateError

VERSION = 1
UNIT = 4 << 20  # bytes one kernel call writes at most where batches are small: spreads the 30 us of a hand-over
WIDE = 1 << 20  # bytes of a batch from which a parallel loop pays for its launch, on each of Numba's layers
QUICK = 0.0005  # seconds: after a call shorter than this, the next takes more batches


class _Unit:
    """One kernel call: a run of batches in a slot, and the lock that opens when they are there."""

    __slots__ = (
        "batches", "cancelled", "done", "failed", "fill_seconds", "layouts", "problem", "ready", "rows", "slot", "start"
    )  # fmt: skip

    def __init__(self, slot: Slot, start: int, rows: int) -> None:
        self.slot, self.start, self.rows = slot, start, rows
        self.ready = threading.Lock()
        self.ready.acquire()
        self.done = self.cancelled = False
        self.failed: compose.Failure | None = None
        self.problem: BaseException | None = None  # what went wrong outside of kernels
        self.layouts: list[compose.Layout | None] = []
        self.batches: list[Any] | None = None  # finished batches, where Python functions were applied
        self.fill_seconds = 0.0


class _Plan:
    """What an epoch's kernel calls share: the program, its order of this epoch, and where this rank's rows are."""

    __slots__ = ("batch_size", "data", "epoch", "first", "key", "length", "order", "places", "program", "seed", "step")

    def __init__(
        self, data: Dataset, program: compose.Program, order: tuple[Any, ...], seed: int, epoch: int, first: int, step: int,
        length: int, batch_size: int,
    ) -> None:  # fmt: skip
        self.data, self.program, self.order, self.seed, self.epoch = data, program, order, seed, epoch
        self.key = epoch_key(seed, epoch)
        self.places = list(zip(program.places(), program.outputs, strict=True))
        self.first, self.step, self.length, self.batch_size = first, step, length, batch_size

    def worker(self) -> compose.Worker:
        """Give one thread's calls, with scratch of their own."""
        return compose.Worker(self.program, self.key, self.order)

    def wide_worker(self, threads: int) -> compose.Worker | compose.WideWorker:
        """Give calls that use several cores where a batch is large enough to pay for a launch and no user code may raise."""
        large = self.program.nbytes * self.batch_size >= WIDE and self.program.measure is None
        if threads > 1 and large and jit.parallel_safe() and not any(s.stage.user for s in self.program.steps):
            return compose.WideWorker(self.program, self.key, self.order, threads)
        return self.worker()

    def pieces(self, unit: _Unit) -> Iterator[tuple[int, int, int]]:
        """Give (first position, count, place) of runs: local row i is at first + step * i, from the start again past the end."""
        done = 0
        while done < unit.rows:
            first = (self.first + (unit.start + done) * self.step) % self.length
            count = min(unit.rows - done, -(-(self.length - first) // self.step))
            yield first, count, done
            done += count

    def fill(self, worker: compose.Worker | compose.WideWorker, unit: _Unit) -> None:
        """Fill a unit's rows."""
        started = time.perf_counter()
        try:
            self._fill(worker, unit)
            if self.data.applies and unit.failed is None:
                self._apply(unit)
        except BaseException as problem:
            unit.problem = problem
        unit.fill_seconds = time.perf_counter() - started

    def _apply(self, unit: _Unit) -> None:
        """Run the applied functions over each batch; those before one that fails are kept."""
        whole = shaped(self.program, unit)
        unit.batches = []
        for low in range(0, unit.rows, self.batch_size):
            high = min(low + self.batch_size, unit.rows)
            unit.batches.append(self.data.finish([a[low:high] for a in whole], self.seed, self.epoch))

    def _fill(self, worker: compose.Worker | compose.WideWorker, unit: _Unit) -> None:
        program, slot = self.program, unit.slot
        rows, lengths = unit.rows, {}
        assert rows <= slot.rows
        if program.measure is not None:
            lengths = {o.name: np.zeros(rows, np.int64) for o in program.measure.outputs}
            assert isinstance(worker, compose.Worker)
            for first, count, place in self.pieces(unit):
                failed = worker.lengths(first, self.step, count, place, list(lengths.values()))
                if failed is not None:
                    unit.failed = failed._replace(done=place + failed.done)
                    return
        layouts: list[compose.Layout | None] = []
        for k, (at, output) in enumerate(self.places):
            layout = None
            if output.form != "fixed":
                layout = compose.lay_out(output, lengths[output.lengths], self.batch_size)
                slot.reserve(k, layout.total)
                worker.call.set(at + 1, layout.starts)
                worker.call.set(at + 2, layout.extents)
            layouts.append(layout)
            worker.call.point(at, slot.flat[k], slot.addresses[k])
        unit.layouts = layouts
        for first, count, place in self.pieces(unit):
            failed = worker.fill(first, self.step, count, place)
            if failed is not None:
                unit.failed = failed._replace(done=place + failed.done)
                return


def _work(jobs: queue.SimpleQueue[_Unit | None], plan: _Plan) -> None:
    """The life of a background thread: fill units until told to stop. Holds no loader, iterator or idle slot."""
    worker = plan.worker()
    while True:
        unit = jobs.get()
        if unit is None:
            return
        if not unit.cancelled:
            plan.fill(worker, unit)
        unit.done = True
        if unit.cancelled:
            unit.slot.busy = False
        unit.ready.release()
        del unit


_teams: weakref.WeakSet[_Team] = weakref.WeakSet()


class _Team:
    """The background threads of one iterator."""

    def __init__(self, plan: _Plan, size: int, wide: int = 1) -> None:
        self.plan, self.pid, self.wide = plan, os.getpid(), wide
        self.jobs: queue.SimpleQueue[_Unit | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.worker: compose.Worker | compose.WideWorker | None = None
        self.closed = False  # by the loader, while its iterator may still be in somebody's hands
        for _ in range(size):
            thread = threading.Thread(target=_work, args=(self.jobs, plan), name="jitloader", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had: the consumer fills for itself
                break
            self.threads.append(thread)
        _teams.add(self)

    def submit(self, unit: _Unit) -> None:
        """Fill a unit in the background, or at once where there is no thread."""
        if self.threads:
            self.jobs.put(unit)
        else:
            self.fill_here(unit)

    def fill_here(self, unit: _Unit) -> None:
        """Fill a unit in the calling thread."""
        if self.worker is None:
            self.worker = self.plan.wide_worker(self.wide) if self.pid == os.getpid() else self.plan.worker()
        self.plan.fill(self.worker, unit)
        unit.done = True

    def wait(self, unit: _Unit) -> None:
        """Come back when a unit is filled; after a fork, whose child has no threads, fill it here."""
        if self.closed:
            raise ValueError("this loader is closed")
        if unit.done:
            return
        if self.pid != os.getpid():
            self.threads, self.pid, self.worker = [], os.getpid(), None
        if not self.threads:
            self.fill_here(unit)
            return
        unit.ready.acquire()

    def stop(self, units: deque[_Unit], join: bool = False) -> None:
        """End the threads; what they were to fill goes back to the pool."""
        for unit in units:
            unit.cancelled = True
            if unit.done or self.pid != os.getpid():
                unit.slot.busy = False
        units.clear()
        if self.pid != os.getpid():
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


class Loader:
    """Batches of a data set, epoch after epoch: a NamedTuple of arrays each, filled ahead in the background.

    Parameters
    ----------
    data : the data set.
    batch_size : rows a batch.
    shuffle : True for another full permutation each epoch (`order=jl.shuffled`).
    order : an Order, an integer array of rows, or a function (position, count, seed, epoch) -> row.
    seed : from which order and draws come; two loaders with one seed give the same batches.
    drop_last : leave out a last batch that is short.
    rank, world_size : this process takes positions rank, rank + world_size, ... of the one global order. Left out, they
        come from torch.distributed, Ray Train, JAX (where initialised) or RANK and WORLD_SIZE, else 0 and 1.
    tail : rows that do not part evenly between ranks are kept ("keep": sizes differ by one), dropped ("drop"), or the
        shorter ranks take rows from the start again ("wrap").
    threads : background threads; the CPUs this process may use where left out. With prefetch=0, a number above one lets a
        `prange` loop fill large batches: quick on idle cores, and slow where the consumer keeps them busy.
    prefetch : batches (or runs of small ones) filled ahead; 0 fills each when it is asked for.

    A batch is yours: its arrays are writable, and no buffer is used again while anything refers to it. Each `iter()`
    gives one whole epoch; several may be live at once.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(x=np.arange(10.0), y=np.arange(10))
    >>> with jl.Loader(data, 4) as loader:
    ...     [batch.y.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        order: Any = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "keep",
        threads: int | None = None,
        prefetch: int = 2,
    ) -> None:
        if not isinstance(data, Dataset):
            raise TypeError(f"Loader takes a jl.Dataset, got {type(data).__name__}: wrap arrays as jl.Dataset(x=array)")
        self._data = data
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.seed = _whole("seed", seed, None)
        self.prefetch = _whole("prefetch", prefetch, 0)
        self.threads = jit.available_cpus() if threads is None else _whole("threads", threads, 1)
        self._wide = 1 if threads is None else self.threads  # a prange loop stalls beside a busy consumer: only if asked
        if order is not None and shuffle:
            raise ValueError("give shuffle=True or order=, not both")
        self._order = orders.as_order(order) if order is not None else orders.shuffled if shuffle else orders.sequential
        self.drop_last = bool(drop_last)
        self.rank, self.world_size = find_rank(rank, world_size)
        if tail not in ("keep", "drop", "wrap"):
            raise ValueError(f"tail must be 'keep', 'drop' or 'wrap', got {tail!r}")
        self.tail = tail
        self._next = 0  # the epoch that the next iter() gives
        self._start = 0  # and the position it starts from
        self._at = (0, 0)  # epoch and position of what the user received last
        self._closed = False
        self._program: compose.Program | None = None
        self._pool: Pool | None = None
        self._pool_rows = 0
        self._live: weakref.WeakSet[_Team] = weakref.WeakSet()
        self._stats = {"batches": 0, "rows": 0, "wait_seconds": 0.0, "fill_seconds": 0.0}
        positions = self._order.plan(len(data), self.seed, 0)
        self._positions = positions.length
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.drop_last and self._positions and not len(self):
            warnings.warn(
                f"drop_last leaves no batch: {self._local(0)} rows are fewer than batch_size {self.batch_size}",
                stacklevel=3,
            )
        if self.tail == "keep" and self.world_size > 1:
            counts = {self._batches(self._local(0, rank)) for rank in range(min(self.world_size, 2))}
            counts.add(self._batches(self._local(0, self.world_size - 1)))
            if len(counts) > 1:
                warnings.warn(
                    f"ranks will get different numbers of batches ({min(counts)} and {max(counts)}): "
                    "training in step would hang; use tail='drop' or tail='wrap'",
                    stacklevel=3,
                )

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _local(self, start: int, rank: int | None = None) -> int:
        """How many rows a rank has from a global position on."""
        left, world = self._positions - start, self.world_size
        if self.tail == "drop":
            return left // world
        if self.tail == "wrap":
            return -(-left // world)
        return max(0, -(-(left - (self.rank if rank is None else rank)) // world))

    def _batches(self, rows: int) -> int:
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __len__(self) -> int:
        return self._batches(self._local(0))

    @property
    def data(self) -> Dataset:
        """The data set."""
        return self._data

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iter()` gives; set it to choose one."""
        return self._next

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._next, self._start = _whole("epoch", number, 0), 0
        self._at = (self._next, 0)

    # -- batches ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        epoch, start = self._next, self._start
        self._next, self._start = epoch + 1, 0
        self._at = (epoch, start)
        return self._run(epoch, start)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this loader is closed")

    def _plan(self, epoch: int, start: int) -> _Plan:
        self._data.verify()
        positions = self._order.plan(len(self._data), self.seed, epoch)
        if self._program is None or positions.length != self._positions:
            self._positions = positions.length
            self._program = self._data.program(positions.kernel, positions.params)
        self._program.load()
        length = max(positions.length, 1)
        first, step = start + self.rank, self.world_size
        return _Plan(
            self._data, self._program, positions.params, self.seed, epoch, first, step, length, self.batch_size
        )

    def warmup(self) -> Loader:
        """Compile the kernel now (from the disk cache where it is there), so that the first batch does not."""
        self._plan(0, 0)
        return self

    def _slots(self, program: compose.Program, rows: int, keep: int) -> Pool:
        if self._pool is None or self._pool_rows != rows:
            self._pool_rows = rows
            kinds = [(o.carrier, o.size if o.form == "fixed" else 0) for o in program.outputs]

            def make() -> Slot:
                return Slot(rows, kinds)

            self._pool = Pool(make, keep)
        return self._pool

    def _run(self, epoch: int, start: int) -> Iterator[Any]:
        plan = self._plan(epoch, start)
        program = plan.program
        total, size = self._local(start), self.batch_size
        if self.drop_last:
            total -= total % size
        if not total:
            self._at = (epoch + 1, 0)
            return
        nbytes = size * max(program.nbytes, 64 if program.measure else 1)
        most = max(1, min(UNIT // max(nbytes, 1), -(-self._local(0) // size)))
        ahead = max(self.prefetch, 1)
        pool = self._slots(program, most * size, ahead + 2)
        # A short epoch is over before a thread has started.
        threads = min(self.threads, ahead) if self.prefetch and total > most * size else 0
        team = _Team(plan, threads, 1 if self.prefetch else self._wide)
        self._live.add(team)
        units: deque[_Unit] = deque()
        many, scheduled = 1, 0
        make, world, last = self._data._batch._make, self.world_size, self._positions
        stats = self._stats
        clock = time.perf_counter
        try:
            while True:
                while scheduled < total and len(units) < (ahead if threads else 1):
                    unit = _Unit(pool.take(), scheduled, min(many * size, total - scheduled))
                    units.append(unit)
                    scheduled += unit.rows
                    if threads:
                        team.submit(unit)
                if not units:
                    return
                unit = units[0]
                asked = clock()
                team.wait(unit)
                stats["wait_seconds"] += clock() - asked
                stats["fill_seconds"] += unit.fill_seconds
                units.popleft()
                if unit.fill_seconds < QUICK and many < most:
                    many = min(most, many * 4)
                slot, begin, rows = unit.slot, unit.start, unit.rows
                whole: Any = shaped(program, unit) if unit.batches is None else unit.batches
                for low in range(0, self._good(unit), size):
                    high = min(low + size, rows)
                    self._at = (epoch, min(start + (begin + high) * world, last))
                    stats["batches"] += 1
                    stats["rows"] += high - low
                    if unit.batches is not None:
                        yield whole.pop(0)
                    else:
                        yield make([a[low:high] for a in whole])
                slot.busy = False
                if unit.failed is not None or unit.problem is not None:
                    raise self._error(unit, plan, epoch)
                del unit, slot, whole
        finally:
            team.stop(units)

    def _good(self, unit: _Unit) -> int:
        """How many rows of a unit came whole, in full batches where it failed."""
        if unit.batches is not None and unit.problem is not None:
            return len(unit.batches) * self.batch_size
        if unit.problem is not None:
            return 0
        return unit.rows if unit.failed is None else unit.failed.done // self.batch_size * self.batch_size

    def _error(self, unit: _Unit, plan: _Plan, epoch: int) -> BaseException:
        if unit.failed is not None:
            return self._data.failed(plan.program, unit.failed, self.seed, epoch)
        assert unit.problem is not None
        return unit.problem

    def __getitem__(self, index: int) -> Any:
        """Give batch `index` of the current epoch (the one that runs, else the next), in fresh arrays."""
        self._check_open()
        count = len(self)
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise TypeError(f"a loader is indexed by a batch number, got {index!r}")
        if not -count <= index < count:
            raise IndexError(f"batch {index} is out of range: an epoch has {count} batches")
        index = int(index) % count
        epoch = self._at[0]
        plan = self._plan(epoch, 0)
        rows = min(self.batch_size, self._local(0) - index * self.batch_size)
        first = (plan.first + index * self.batch_size * plan.step) % plan.length
        arrays, failed = compose.collect(
            plan.program, plan.worker(), first, plan.step, min(rows, -(-(plan.length - first) // plan.step))
        )
        if failed is not None:
            raise self._data.failed(plan.program, failed, self.seed, epoch)
        return self._data.finish(arrays, self.seed, epoch)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give where the user is, as plain values for JSON: the next batch of a loader that loads it is the very next one.

        It counts rows received over all ranks, whatever was prefetched, and fits any number of threads, batch size and
        ranks. Of several live iterators it is the one that was asked last.
        """
        epoch, position = self._at
        rest = self._local(position) if position <= self._positions else 0
        if position >= self._positions or (self.drop_last and rest < self.batch_size):
            epoch, position = (epoch + 1, 0) if self._positions else (epoch, 0)
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "position": position,
            "order": self._order.token,
            "rows": len(self._data),
            "fingerprint": fingerprint(self._data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state: the next `iter()` gives the rest of its epoch. Live iterators are not touched.

        Raises StateError, naming the part, where the state is of another format, data set, order or seed.
        """
        self._check_open()
        if not isinstance(state, dict):
            raise StateError(f"a state is a dict, got {type(state).__name__}")
        own = self.state_dict()
        missing = sorted(set(own) - set(state))
        if missing:
            raise StateError(f"the state lacks {', '.join(map(repr, missing))}: it was cut or is not a loader's")
        for part in ("version", "order", "rows", "fingerprint", "seed"):
            if state[part] != own[part]:
                raise StateError(f"the state has another {part}: {state[part]!r}, this loader has {own[part]!r}")
        for part, top in (("epoch", None), ("position", self._positions)):
            value = state[part]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (top is not None and value > top):
                raise StateError(
                    f"the state has {part} {value!r}: a whole number of at least 0"
                    + (f", at most {top}" if top else "")
                )
        epoch, position = state["epoch"], state["position"]
        if position == self._positions and position:
            epoch, position = epoch + 1, 0
        self._next, self._start, self._at = epoch, position, (epoch, position)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_program", "_pool", "_live"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._program, self._pool, self._live = None, None, weakref.WeakSet()
        self._next, self._start = self._resume_point()

    def _resume_point(self) -> tuple[int, int]:
        state = self.state_dict()
        return state["epoch"], state["position"]

    # -- looking ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Give totals so far: batches and rows received, seconds the consumer waited, seconds kernels ran."""
        return dict(self._stats)

    def __repr__(self) -> str:
        spec = self._data.spec
        row = sum(s.nbytes for s in spec.values())
        lines = [
            f"Loader: {len(self):,} batches of {self.batch_size:,} from {self._positions:,} rows, {self._order.name}, seed {self.seed}"
        ]
        if self.world_size > 1:
            lines.append(f"  rank {self.rank} of {self.world_size}, tail {self.tail!r}: {self._local(0):,} rows")
        lines += repr(self._data).splitlines()[1:]
        lines.append(f"  batch: {row * self.batch_size:,} bytes; {self.threads} threads, prefetch {self.prefetch}")
        if self._program is not None:
            lines += [f"  loop: {note}" for note in self._program.notes]
        return "\n".join(lines)

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the background threads and let go of data and buffers; batches in your hands stay valid."""
        if self._closed:
            return
        self._closed = True
        for team in list(self._live):
            team.closed = True
            team.stop(deque(), join=True)
        self._pool = self._program = None
        self._data = self._data._emptied()

    def __enter__(self) -> Loader:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shaped(program: compose.Program, unit: _Unit) -> list[Any]:
    """Give a unit's outputs so that [low:high] is a batch of each."""
    slot = unit.slot
    if all(layout is None for layout in unit.layouts):
        return slot.shaped(program.outputs, compose.shape_output)
    found: list[Any] = []
    for output, flat, layout in zip(program.outputs, slot.flat, unit.layouts, strict=True):
        if layout is None:
            found.append(compose.shape_output(output, flat, unit.rows))
        else:
            found.append(_Varied(output, flat, layout))
    return found


class _Varied:
    """An output whose rows vary, to be sliced into batches."""

    def __init__(self, output: compose.Output, flat: np.ndarray, layout: compose.Layout) -> None:
        self.output, self.flat, self.layout = output, flat, layout

    def __getitem__(self, rows: slice) -> Any:
        return compose.shape_varied(self.output, self.flat, self.layout, rows.start, rows.stop)


def _whole(name: str, value: Any, low: int | None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return int(value)


def fingerprint(data: Dataset) -> str:
    """Hash what the rows of a data set are: fields, types, counts, stages and (sampled) row selections, not contents."""
    parts: list[Any] = [len(data)]
    for name, samples in data.sources.items():
        table = samples.rows.table
        some = None if table is None else table[:: max(1, len(table) // 4096)]
        parts += [name, samples.name, str(samples.spec), samples.rows.start, samples.rows.step, some]
    parts += [(step.stage.name, step.fields) for step in data.steps]
    return jit.fingerprint(*parts)[:16]


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Give rank and world size: as given, else those of torch.distributed, Ray Train or JAX where one is initialised,
    else RANK and WORLD_SIZE of the environment, else 0 and 1. Imports nothing."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size together, got rank={rank} and world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _detect_rank()
    rank, world_size = _whole("rank", rank, 0), _whole("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(f"rank {rank} is not below world_size {world_size}")
    return rank, world_size


def _detect_rank() -> tuple[int, int]:
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return torch.get_rank(), torch.get_world_size()
    ray = sys.modules.get("ray.train")
    if ray is not None:
        try:
            context = ray.get_context()
            return int(context.get_world_rank()), int(context.get_world_size())
        except Exception:  # outside of a worker; which error depends on the version
            pass
    jax = sys.modules.get("jax")
    if jax is not None and getattr(getattr(jax, "distributed", None), "is_initialized", lambda: False)():
        return int(jax.process_index()), int(jax.process_count())
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if given[0] is not None and given[1] is not None:
        try:
            return int(given[0]), int(given[1])
        except ValueError:
            raise ValueError(
                f"RANK={given[0]!r} and WORLD_SIZE={given[1]!r} in the environment must be whole numbers"
            ) from None
    return 0, 1
