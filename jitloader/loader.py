"""Epochs: batches filled ahead by background threads into buffers nobody holds, and the state to go on from anywhere."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from . import compose, jit, orders, pickling, residency
from .buffers import Pool, Slot
from .cores import SLOW, Cores, Pace
from .crew import Crew, shares
from .cutting import TooLong, cut
from .dataset import Dataset
from .filling import Plan, Unit, parts
from .live import Live
from .meter import Meter
from .mixing import Mix
from .orders import Order
from .ranks import find_rank, whole_number
from .samples import as_indices
from .state import MOST, VERSION, Layout, check_state, fingerprint, laid_out, layout_of
from .team import Team

if TYPE_CHECKING:
    from .check import Check
    from .quality import Quality
    from .report import Report

T = TypeVar("T")
# Bytes that one kernel call writes at least where batches are smaller: it spreads the 30 us of a hand-over, and four such
# buffers stay in a cache that others share. Measured on a Zen 4, token windows in M rows/s by MB a call: 0.6 MB 0.6,
# 1 MB 1.1, 1.75 MB 2.1, 2 to 3.5 MB 2.3 to 2.4, 4 MB 1.4 to 1.8, 8 MB 1.2; other work varies less.
UNIT = 2 << 20
QUICK = 0.0005  # seconds: after a call shorter than this, the next takes more batches
SHORT = 0.002  # seconds of filling that are over before threads, which take 0.0001 each to start, have helped


class Given(Generic[T]):
    """An argument a loader was made with: can be read, and is set once."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, loader: Any, owner: Any = None) -> T:
        if loader is None:
            return self  # type: ignore[return-value]
        try:
            return loader._given[self.name]  # type: ignore[no-any-return]
        except (AttributeError, KeyError):
            raise AttributeError(f"this loader has no {self.name} yet") from None

    def __set__(self, loader: Any, value: T) -> None:
        if self.name in loader._given:
            raise _keeps(self.name, f"data, ..., {self.name}={value!r}")
        loader._given[self.name] = value


def _keeps(name: str, shown: str) -> AttributeError:
    return AttributeError(
        f"a loader keeps its {name}: make another, as jl.Loader({shown}), and give it this one's place by "
        "load_state_dict(state_dict())"
    )


class Batches(itertools.chain[Any]):
    """What `iter(loader)` gives: its generator, of which no copy can be made, at about 10 ns a batch."""

    __slots__ = ("__weakref__", "close")
    close: Callable[[], None]

    def __new__(cls, run: Generator[Any]) -> Batches:
        made = super().__new__(cls, run)
        made.close = run.close
        return made

    def __init__(self, run: Generator[Any]) -> None:
        pass

    def __reduce__(self) -> Any:
        raise TypeError(
            "an iterator of a loader neither pickles nor copies, for its threads do not: keep loader.state_dict(), "
            "or pickle the loader, which goes on at this place"
        )


class Loader:
    """Batches of a data set, epoch after epoch: a NamedTuple of arrays each, filled ahead in the background.

    Parameters
    ----------
    data : the data set; or a mix of several (`jl.mix`), whose order its shares are; or a ring that is still written
        (`jl.live`), of which each epoch gives what is there when it begins.
    batch_size : rows a batch; with `max_tokens` at most so many, and it may be left out.
    max_tokens : a batch ends before its padded size, its rows times the longest of them, would pass this. A field that is
        not padded counts its elements, an empty row one; of several fields the dearest counts. Batches are cut from the
        epoch's order as it comes, 10 ns a row when an epoch begins; `order=jl.bucketed(lengths)` brings rows of about one
        length together. Each of several ranks has batches of that size, all of them as many.
    shuffle : True for another full permutation each epoch (`order=jl.shuffled`).
    order : an Order, an integer array of rows, or a function (position, count, seed, epoch) -> row.
    seed : from which order and draws come; two loaders with one seed give the same batches.
    drop_last : leave out a last batch that is short.
    rank, world_size : this process takes positions rank, rank + world_size, ... of the one global order. Left out, they
        come from torch.distributed, Ray Train, JAX (where initialised) or RANK and WORLD_SIZE, else 0 and 1.
    tail : rows that do not part evenly between ranks are kept ("keep": sizes differ by one), dropped ("drop"), or the
        shorter ranks take rows from the start again ("wrap").
    threads : background threads; where left out, one fewer than the CPUs this process may use (at least one), for who
        asks for a batch that is not there fills along, and none while other work holds the cores (where Linux tells). With
        prefetch=0, a number above one lets a `prange` loop fill large batches: quick on idle cores, and slow where the
        consumer keeps them busy.
    prefetch : batches (or runs of small ones) filled ahead, fewer for who asks again at once; 0 fills each when it is asked for.

    max_resident : bytes of files that may be in this process's memory: mapped pages are given back behind the batches, and
        of a chunked source (HDF5, Zarr) no more is kept decoded. Left out, mapped pages are the system's to take, and all
        chunked sources together have a quarter of the available memory.

    All of these are attributes to read. To change one make another loader, and give it the state of this one.

    A batch is yours: its arrays are writable, and no buffer is used again while anything refers to it. Each `iter()`
    gives one whole epoch; several may be live at once, each for one thread at a time. One that was closed or read to its
    end gives nothing more.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(x=np.arange(10.0), y=np.arange(10))
    >>> with jl.Loader(data, 4) as loader:
    ...     [batch.y.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    __slots__ = (
        *("_allocate", "_at", "_chosen", "_closed", "_cores", "_cut", "_data", "_given", "_laid", "_layout", "_live"),
        *("_meter", "_next", "_order", "_pace", "_pool", "_pool_rows", "_positions", "_program", "_resumed", "_start"),
        "__weakref__",
    )

    batch_size, max_tokens, max_resident = Given["int | None"](), Given["int | None"](), Given["int | None"]()
    seed, rank, world_size, threads, prefetch = Given[int](), Given[int](), Given[int](), Given[int](), Given[int]()
    shuffle, drop_last, tail = Given[bool](), Given[bool](), Given[str]()

    def __init__(
        self,
        data: Dataset | Mix | Live,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        shuffle: bool = False,
        order: Any = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "keep",
        threads: int | None = None,
        prefetch: int = 2,
        max_resident: int | None = None,
    ) -> None:
        if not isinstance(data, (Dataset, Mix, Live)):
            raise TypeError(f"Loader takes a jl.Dataset, got {type(data).__name__}: wrap arrays as jl.Dataset(x=array)")
        self._given: dict[str, Any] = {}
        self._data = data
        if batch_size is None and max_tokens is None:
            raise TypeError("Loader takes a batch_size, or max_tokens where rows vary in length")
        self.max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1)
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
        if self.max_tokens and not any(spec.ragged for spec in data.spec.values()):
            raise ValueError("max_tokens is for fields whose rows vary in length, and here none does: give batch_size")
        if self.max_tokens and drop_last:
            raise ValueError("give max_tokens or drop_last=True, not both: no batch is short")
        self.seed = whole_number("seed", seed, None)
        self.prefetch = whole_number("prefetch", prefetch, 0)
        self.threads = max(1, jit.available_cpus() - 1) if threads is None else whole_number("threads", threads, 1)
        self.max_resident = None if max_resident is None else whole_number("max_resident", max_resident, 1)
        # Threads that the user asked for are at work whatever else is.
        self._chosen, self._cores, self._pace = threads is not None, Cores(), Pace()
        if order is not None and shuffle:
            raise ValueError("give shuffle=True or order=, not both")
        if order is not None and isinstance(data, Mix):
            raise ValueError("the order of a mix is given by its shares: leave order= out")
        self._order = (
            data.order
            if isinstance(data, Mix)
            else orders.as_order(order)
            if order is not None
            else orders.shuffled
            if shuffle
            else orders.sequential
        )
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.rank, self.world_size = find_rank(rank, world_size)
        if tail not in ("keep", "drop", "wrap"):
            raise ValueError(f"tail must be 'keep', 'drop' or 'wrap', got {tail!r}")
        self.tail = tail
        layout = Layout(self.batch_size or 0, self.world_size, self.max_tokens or 0)
        self._layout = layout if self._order.sized is not None else None
        self._laid: dict[Layout, Order] = {}
        self._resumed: tuple[int, Layout | None] = (0, self._layout)  # an epoch, and how it was laid out
        self._cut: tuple[Any, np.ndarray] = (None, np.empty(0, np.int64))  # where batches of an epoch end, and of which
        self._next = 0  # the epoch that the next iter() gives
        self._start = 0  # and the position it starts from
        self._at = (0, 0)  # epoch and position of what the user received last
        self._closed = False
        self._program: Any = None  # a compose.Program, or what behaves as one
        self._pool: Pool | None = None
        self._pool_rows = 0
        self._allocate: Callable[[int], np.ndarray] | None = None
        self._live: weakref.WeakSet[Team] = weakref.WeakSet()
        self._meter = Meter()
        self._positions = data.positions(self._order, self.seed, 0).length
        self._check_sizes()
        self._check_chunks()

    def _check_chunks(self) -> None:
        """Warn where chunks would be decoded again and again."""
        used = [
            (one.sources, {*one.fields, *(n for step in one.steps for n in step.fields)}) for one in self._data.datasets
        ]
        below = residency.chunked_below([{n: s for n, s in given.items() if n in names} for given, names in used])
        limit = residency.default_limit() if self.max_resident is None else self.max_resident
        if sum(source.nbytes for source in below) <= limit or not self._positions:
            return
        planned = self._data.positions(self._order, self.seed, 0)
        if planned.kernel is orders.blocks_rows:
            size, window = planned.params[:2]
            wanted = window * sum(-(-size // source.rows) * source.band for source in below)
            told = f"a window of {self._order.name} takes"
        else:
            rows = np.zeros(min(64, self._positions), np.int64)
            with np.errstate(all="ignore"), contextlib.suppress(Exception):  # of the user's: it comes with its batch
                planned.kernel(0, 1, rows, *planned.params)
            falls = int((np.diff(rows) < 0).sum()) > len(rows) // 10
            wanted = sum(source.nbytes for source in below) if falls else 0
            told = f"order {self._order.name} reads all over"
        if wanted > limit:
            most = max(source.rows for source in below)
            window = max(1, limit // 2 // sum(-(-most // source.rows) * source.band for source in below))
            warnings.warn(
                f"{told} {wanted / 1e9:.3g} GB of decoded chunks, and {limit / 1e9:.3g} GB of them are kept: each is decoded "
                f"many times; use order=jl.blocks(rows={most}, window={window}), or a larger max_resident=",
                stacklevel=3,
            )

    def _check_sizes(self) -> None:
        if self.drop_last and self._positions and not self._batches(self._local(0)):
            warnings.warn(
                f"drop_last leaves no batch: {self._local(0)} rows are fewer than batch_size {self.batch_size}",
                stacklevel=3,
            )
        if self.tail != "wrap" and 0 < self._positions < self.world_size:
            none = self.world_size if self.tail == "drop" else self.world_size - self._positions
            warnings.warn(
                f"world_size {self.world_size} is more than the {self._positions} rows: {none} ranks get none; "
                "use tail='wrap'",
                stacklevel=3,
            )
        elif self.tail == "keep" and self.world_size > 1 and not self.max_tokens:
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
        size = self.batch_size or 1
        return rows // size if self.drop_last else -(-rows // size)

    def __len__(self) -> int:
        if self.max_tokens:
            self._check_open()
            epoch = self._at[0]
            return len(self._ends(self._plan(epoch, 0), epoch, 0))
        return self._batches(self._local(0))

    def _ends(self, plan: Plan, epoch: int, start: int) -> np.ndarray:
        """Give the rows before which this rank's batches of an epoch end that are cut by their size; the last end may be
        a row further than this rank has."""
        key = epoch, start, self._positions
        if self._cut[0] != key or isinstance(self._data, Live):
            assert self.max_tokens is not None
            local = self._local(start)
            try:
                ends = cut(plan, start, self._local(start, 0), self.tail == "wrap", self.max_tokens, self.batch_size)
            except TooLong as found:
                order = self._data.positions(self._order_of(epoch), self.seed, epoch)
                row = np.zeros(1, np.int64)
                order.kernel(found.position, 1, row, *order.params)
                raise ValueError(
                    f"row {row[0]} has {found.length:,} elements, and max_tokens is {self.max_tokens:,}: "
                    f"select shorter rows, or link jl.truncate or jl.random_cut"
                ) from None
            least = self._local(start, self.world_size - 1)
            if len(ends) > 1 and least == ends[-2] < ends[-1]:
                warnings.warn(
                    f"ranks get different numbers of batches ({len(ends) - 1} and {len(ends)}): "
                    "training in step would hang; use tail='drop' or tail='wrap'",
                    stacklevel=4,
                )
            self._cut = key, ends[: int(np.searchsorted(ends, local)) + 1] if local else ends[:0]
        return self._cut[1]

    @property
    def data(self) -> Dataset | Mix | Live:
        """The data set."""
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        raise _keeps("data", "data, ...")

    @property
    def order(self) -> Order:
        """Which row comes at which position."""
        return self._order

    @order.setter
    def order(self, value: Any) -> None:
        raise _keeps("order", "data, ..., order=order")

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iter()` gives; set it to choose one."""
        return self._next

    @epoch.setter
    def epoch(self, number: int) -> None:
        if whole_number("epoch", number, 0) > MOST:
            raise ValueError(f"epoch must be at most {MOST}, got {number}")
        self._next, self._start = int(number), 0
        self._at = (self._next, 0)

    # -- batches ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        epoch, start = self._next, self._start
        self._next, self._start = epoch + 1, 0
        self._at = (epoch, start)
        return Batches(self._run(epoch, start))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this loader is closed")

    def _layout_of(self, epoch: int) -> Layout | None:
        """For which batches an epoch is laid out: those of this loader, but where it was begun with others."""
        return self._resumed[1] if epoch == self._resumed[0] else self._layout

    def _order_of(self, epoch: int) -> Order:
        layout = self._layout_of(epoch)
        if layout is None or self._order.sized is None:
            return self._order
        if layout not in self._laid:
            self._laid[layout] = self._order.sized(*layout)
        return self._laid[layout]

    def _plan(self, epoch: int, start: int) -> Plan:
        self._data.verify()
        positions = self._data.positions(self._order_of(epoch), self.seed, epoch)
        if self._program is None or positions.length != self._positions:
            self._positions = positions.length
            program: Any = self._data.program(positions.kernel, positions.params)
            if self.max_resident is not None:
                program = program.bounded(residency.Bound(self.max_resident, program.grounds))
            self._program = program
        made = len(jit.compile_events)
        self._program.load()
        if self._program.measure is not None:
            self._program.measure.load()
        self._meter.compile += sum(event.seconds for event in jit.compile_events[made:])
        length = max(positions.length, 1)
        first, step = start + self.rank, self.world_size
        size = self.batch_size or 1
        return Plan(self._data, self._program, positions.params, self.seed, epoch, first, step, length, size)

    def warmup(self) -> Loader:
        """Compile the kernel now (from the disk cache where it is there), so that the first batch does not."""
        self._check_open()
        self._plan(0, 0)
        return self

    def allocate_with(self, allocate: Callable[[int], np.ndarray]) -> None:
        """Take the memory of batches from now on from a function of a number of bytes: page-locked memory, say.

        What it gives is an array of so many uint8, of memory of its own; it is kept and used again.
        """
        self._allocate, self._pool = allocate, None

    def _slots(self, program: Any, rows: int, keep: int) -> Pool:
        fits = self._pool_rows >= rows if self.max_tokens else self._pool_rows == rows
        if self._pool is None or not fits:
            rows = self._pool_rows = rows + rows // 4 if self.max_tokens else rows
            kinds = [(o.carrier, o.size if o.form == "fixed" else 0) for o in program.outputs]

            def make() -> Slot:
                return Slot(rows, kinds, self._allocate)

            self._pool = Pool(make, keep)
        return self._pool

    def _run(self, epoch: int, start: int) -> Generator[Any]:
        plan = self._plan(epoch, start)
        program = plan.program
        total = self._local(start)
        size = min(self.batch_size or 1, self._positions + 1)  # what lies past all rows counts as one more
        if self.drop_last:
            total -= total % size
        if not total:
            self._at = (epoch + 1, 0)
            return
        ends = self._ends(plan, epoch, start) if self.max_tokens else None
        largest = 0
        if ends is not None:
            largest = int(np.diff(ends, prepend=0).max())
            size = -(-total // len(ends))  # in the mean
        nbytes = size * max(program.nbytes, 64 if program.measure else 1)
        most = max(1, min(-(-UNIT // max(nbytes, 1)), -(-self._local(0) // size)))
        ahead = max(self.prefetch, 1)
        most_rows = max(min(most * size, self._local(0)), largest)
        pool = self._slots(program, most_rows, ahead + 3)  # in flight, in the loop, and one that the user kept
        wanted = 0
        if self.prefetch:
            wanted = self.threads if shares(plan) else min(self.threads, ahead)
        threads = wanted if total > most * size else 0  # a small epoch gets them once its rows are seen to take long
        cores = None if self._chosen or self._data.applies else self._cores
        team, crew = self._team(plan, threads, ahead, cores)
        units: deque[Unit] = deque()
        many, scheduled, filled, filled_for, met, pace = 1, 0, 0, 0.0, None, self._pace
        kind, world, last = self._data.batch_type, self.world_size, self._positions
        make = functools.partial(tuple.__new__, kind)  # its `_make` counts the fields, for 0.25 us
        held: list[Any] = []
        meter = self._meter
        tally = meter.begin(size, threads, threading.get_ident(), ends)
        try:
            while True:
                handed = tally.handed
                asked = meter.asks(tally)
                alone = cores is not None and cores.taken > asked
                most_ahead = ahead if threads and not alone else 0
                if crew is not None:
                    if handed is not None:
                        pace.told(asked - handed, filled_for / (threads + 1), filled)
                    if pace.level < SLOW:
                        most_ahead = min(most_ahead, pace.level)
                    if met != (alone, pace.level):
                        met = alone, pace.level
                        crew.meets(*met)
                while scheduled < total and len(units) <= most_ahead:
                    if ends is None:
                        rows = min(many * size, total - scheduled)
                        unit = Unit(pool, scheduled, rows, range(size, rows + size, size))
                    else:
                        unit = _run_of(pool, scheduled, total, ends, many, most_rows)
                    units.append(unit)
                    scheduled += unit.rows
                    if threads:
                        team.submit(unit, alone)
                if not units:
                    self._at = (epoch + 1, 0)
                    return
                unit = team.wait(units)
                padding = plan.padding(unit) if program.measure is not None and unit.failed is None else (0, 0)
                filled = plan.nbytes(unit)
                meter.gets(tally, asked, unit.fills, unit.rows, filled, padding)
                filled_for = unit.fill_seconds
                if threads < wanted and filled_for > QUICK and filled_for * (total - scheduled) > SHORT * unit.rows:
                    self._live.discard(team)  # it has no thread, and of units only the one that is filled
                    threads = meter.threads = wanted
                    team, crew = self._team(plan, threads, ahead, cores)
                # Of units in flight, those still small say nothing new; how large rows are that vary, only units tell.
                if filled_for < QUICK:
                    now = len(unit.ends)
                    many = max(many, min(most, 4 * now, -(-UNIT * now // max(filled, 1))))
                slot, begin, rows = unit.slot, unit.start, unit.rows
                good = self._good(unit)
                given = parts(program, unit, good)
                for end in unit.ends:
                    high = end if end < rows else rows
                    if high > good:
                        break
                    # All ranks go in step: with a short last batch each has received what there was.
                    at = start + (begin + end) * world
                    # Made before it counts as received, for an interrupt may end this; not held here, but by the user alone.
                    held.append(make(next(given)) if unit.batches is None else unit.batches.pop(0))
                    self._at = (epoch, at if at < last else last)
                    tally.rows = begin + high
                    yield held.pop()
                if unit.failed is not None or unit.problem is not None:
                    raise self._error(unit, plan, epoch)
                slot.give_back()
                units.popleft()
                del unit, slot, given
        finally:
            team.stop(units)
            meter.end(tally)

    def _team(self, plan: Plan, threads: int, ahead: int, cores: Cores | None) -> tuple[Team, Crew | None]:
        """Start the threads of an iterator: a crew where they can share units."""
        crew = Crew(plan, threads, ahead, cores) if threads and shares(plan) else None
        # A prange loop stalls beside a busy consumer: only if asked.
        team = crew or Team(plan, threads, self.threads if self._chosen and not self.prefetch else 1, cores)
        self._live.add(team)
        return team, crew

    def _good(self, unit: Unit) -> int:
        """How many rows of a unit came whole."""
        if unit.problem is not None:
            return unit.ends[len(unit.batches) - 1] if unit.batches else 0
        return unit.rows if unit.failed is None else unit.failed.done

    def _error(self, unit: Unit, plan: Plan, epoch: int) -> BaseException:
        if unit.failed is not None:
            return self._data.failed(unit.failed, self.seed, epoch)
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
        plan, local = self._plan(epoch, 0), self._local(0)
        if self.max_tokens:
            ends = self._ends(plan, epoch, 0)
            low, high = (int(ends[index - 1]) if index else 0), int(ends[index])
        else:
            low, high = index * plan.batch_size, (index + 1) * plan.batch_size
        rows = min(high, local) - low
        first = (plan.first + low * plan.step) % plan.length
        arrays, failed = compose.collect(
            plan.program, plan.worker(), first, plan.step, min(rows, -(-(plan.length - first) // plan.step))
        )
        if failed is not None:
            raise self._data.failed(failed, self.seed, epoch)
        return self._data.finish(arrays, self.seed, epoch)

    def check(self, rows: Any = None) -> Check:
        """Run some rows of the next epoch through all stages in plain Python, which checks bounds and divisions, and compare
        the compiled kernel's values with those, bit by bit (all NaN alike).

        `rows`: how many, spread over this rank's epoch (64 where left out, down to 8 where samples are large: plain
        Python takes about 1 us an element and stage), or row numbers, or a mask. Draws are those of the epoch. Raises
        what a batch of the first row that fails raises, a PipelineError with stage, field, row and the user's line;
        beyond that an index out of bounds and a division by zero in user code, which compiled code may pass over. A row
        that fails is never run compiled. Functions linked by `apply` run on batches of these rows. Gives a Check:
        `rows`, `stages`, `differences`, `same`. Differences in the last place come from user code that computes float32
        with plain float numbers: compiled it is float64 until it is stored.

        >>> import numpy as np, jitloader as jl
        >>> jl.Loader(jl.Dataset(x=np.arange(100)).map("x", jl.normalize(50, 2)), 8, shuffle=True).check()
        64 rows checked: normalize; compiled and plain Python agree bit by bit
        """
        from .check import check, number_of_rows, rows_of

        self._check_open()
        data, epoch = self._data, self._next
        if not isinstance(data, Dataset):
            raise TypeError("check takes a loader over a jl.Dataset: check the sources of a mix, or ring.copy(), alone")
        if rows is None or isinstance(rows, (int, np.integer)):
            wanted = number_of_rows(data) if rows is None else whole_number("check: rows", rows, 1)
            order = self._order_of(epoch)
            length = order.plan(len(data), self.seed, epoch).length
            if length != self._positions:
                self._positions, self._program = length, None
            local = self._local(0)
            places = np.unique(np.linspace(0, local - 1, min(wanted, local)).round().astype(np.int64))
            places = (self.rank + places * self.world_size) % max(length, 1)
            chosen = rows_of(order, len(data), self.seed, epoch, places)
        else:
            chosen = as_indices(rows, len(data), "check: rows")
        return check(data, chosen, self.seed, epoch, self.batch_size or len(chosen))

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give where the user is, as plain values for JSON: the next batch of a loader that loads it is the very next one.

        It counts rows received over all ranks, whatever was prefetched, and fits any number of threads, batch size and
        ranks. Of several live iterators it is the one that was asked last.
        """
        epoch, position = self._at
        rest = self._local(position, 0) if position <= self._positions else 0  # of the rank that has the most
        if position and not self._batches(rest):
            epoch, position = epoch + 1, 0
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "position": position,
            "order": laid_out(self._order.token, self._layout_of(epoch)),
            "rows": len(self._data),
            "fingerprint": fingerprint(self._data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state: the next `iter()` gives the rest of its epoch. Live iterators are not touched.

        Raises StateError, naming the part, where the state is of another format, data set, order or seed.
        """
        self._check_open()
        check_state(state, self.state_dict(), self._positions)
        epoch, position = state["epoch"], state["position"]
        self._resumed = epoch, None if self._layout is None else layout_of(state["order"])
        if position == self._positions and position:
            epoch, position = epoch + 1, 0
        self._next, self._start, self._at = epoch, position, (epoch, position)

    def __getstate__(self) -> dict[str, Any]:
        left = ("_program", "_pool", "_live", "_meter", "_cut", "__weakref__")
        own = {name: getattr(self, name) for name in Loader.__slots__ if name not in left}
        return {**own, **getattr(self, "__dict__", {})}  # a subclass may have more

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._program, self._pool, self._live, self._meter = None, None, weakref.WeakSet(), Meter()
        self._cut = None, np.empty(0, np.int64)
        at = self.state_dict()
        self._next, self._start = at["epoch"], at["position"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Loader:
        new = object.__new__(type(self))
        new.__setstate__({k: v if k == "_laid" else copy.deepcopy(v, memo) for k, v in self.__getstate__().items()})
        return new

    def __copy__(self) -> Loader:
        new = object.__new__(type(self))
        new.__setstate__(self.__getstate__())
        return new

    def __reduce__(self) -> Any:
        return pickling.reduced(self, "a loader")

    def _reduced(self) -> Any:
        return _restored, ({**self.__getstate__(), "_laid": {}}, type(self))

    # -- looking ------------------------------------------------------------------------------------------------------

    def shuffle_quality(self, labels: Any = None) -> Quality:
        """Measure how well this rank's batches are mixed, beside what a true shuffle gives: see `Quality`.

        labels : the class of each row, an array or the name of a field; left out, 32 stretches of the data in storage
            order stand for classes, the worst case. At most 65,536 positions are looked at (8 batches, where those are
            larger), and 2**20 rows for the shares of classes, whatever the size of the data.

        >>> import numpy as np, jitloader as jl
        >>> loader = jl.Loader(jl.Dataset(x=np.arange(100_000)), 100)
        >>> round(loader.shuffle_quality().spread, 2)
        0.97
        """
        from . import quality

        self._check_open()
        epoch = self._at[0]
        first, second = (self._order_of(e).plan(len(self._data), self.seed, e) for e in (epoch, epoch + 1))
        batches = len(self)
        size = self.batch_size or max(1, self._local(0) // max(batches, 1))
        part = quality.Part(self.rank, self.world_size, size, batches)
        return quality.measure(self._data, first, second, part, labels)

    def stats(self) -> dict[str, float]:
        """Give totals over all iterators so far, as plain numbers to log: always on, counted once a run of batches.

        "batches", "rows" and "bytes" that were handed out (bytes by whole runs of batches, which small batches come
        in); "padding_share", what part of the elements of fields padded to the longest row is
        padding; "wait_seconds", in which the consumer stood still or filled along, and "consumer_seconds", in which it did
        its own work (and iterators cut batches out of runs, about 1 us each); "wait_share", the first's part of both;
        "fill_seconds" that kernels and Python functions ran, over all threads, and "fill_bytes_per_second" of a thread;
        "compile_seconds" for kernels, compiled or from disk; "threads" of the last iterator; "slots" of the pool, those
        "slots_held" by a fill or by you, and their "pool_bytes".

        >>> import numpy as np, jitloader as jl
        >>> loader = jl.Loader(jl.Dataset(x=np.arange(10.0)), 4)
        >>> batches = list(loader)
        >>> loader.stats()["batches"], loader.stats()["rows"], loader.stats()["bytes"]
        (3, 10, 80)
        """
        slots, held, nbytes = (0, 0, 0) if self._pool is None else self._pool.usage()
        return {**self._meter.totals(), "slots": slots, "slots_held": held, "pool_bytes": nbytes}

    def report(self) -> Report:
        """Give what `stats()` counts as a text, in a notebook as a table, with a verdict in its first line; `.plot()` draws
        when batches were filled and waited for.

        >>> import numpy as np, jitloader as jl
        >>> print(jl.Loader(jl.Dataset(x=np.arange(10.0)), 4).report())
        no batch yet
        """
        from .report import Report

        return Report(self)

    def progress(self, **options: Any) -> Iterable[Any]:
        """Give the batches of the next epoch under a progress bar of tqdm's, in notebooks a widget; `options` are tqdm's own.

        Without tqdm (`pip install 'jitloader[progress]'`), or with `disable=True`, the bare batches. With it, what is
        returned is the bar, for `bar.set_postfix(loss=...)`.

        >>> import numpy as np, jitloader as jl
        >>> loader = jl.Loader(jl.Dataset(x=np.arange(10)), 4)
        >>> [batch.x.sum() for batch in loader.progress(disable=True)]
        [np.int64(6), np.int64(22), np.int64(17)]
        """
        from .report import progress

        left = self._batches(self._local(self._start))
        if self.max_tokens:
            left = len(self._ends(self._plan(self._next, self._start), self._next, self._start))
        return progress(iter(self), {"desc": f"epoch {self._at[0]}", "total": left, "unit": "batch", **options})

    def __repr__(self) -> str:
        spec = self._data.spec
        row = sum(s.nbytes for s in spec.values())
        told = f"{len(self):,} batches of {self.batch_size:,}" if self.batch_size and not self.max_tokens else ""
        if self.max_tokens:
            told = f"batches of at most {self.max_tokens:,} tokens"
            told += f" and {self.batch_size:,} rows" if self.batch_size else ""
        lines = [f"Loader: {told} from {self._positions:,} rows, {self._order.name}, seed {self.seed}"]
        if self.world_size > 1:
            lines.append(f"  rank {self.rank} of {self.world_size}, tail {self.tail!r}: {self._local(0):,} rows")
        lines += repr(self._data).splitlines()[1:]
        size = "varies" if self.max_tokens else f"{row * (self.batch_size or 1):,} bytes"
        lines.append(f"  batch: {size}; {self.threads} threads, prefetch {self.prefetch}")
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


def _run_of(pool: Pool, start: int, total: int, ends: np.ndarray, many: int, room: int) -> Unit:
    """Give the next at most `many` batches of those that end before these rows, as a unit with room for so many rows."""
    first = int(np.searchsorted(ends, start, "right"))
    last = max(first + 1, min(first + many, int(np.searchsorted(ends, start + room, "right"))))
    here = [int(end) - start for end in ends[first:last]]
    return Unit(pool, start, min(here[-1], total - start), here)


def _restored(state: dict[str, Any], kind: type[Loader]) -> Loader:
    """Give the loader that was pickled, where it was."""
    loader = object.__new__(kind)
    loader.__setstate__(state)
    return loader
