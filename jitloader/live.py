"""A data set over a ring that is still written: epochs of what is there, whole rows always, and draws by priority."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import compose, pickling, python
from .dataset import Dataset
from .orders import Order, Positions
from .orders.base import table_rows
from .replay import Prioritized, Ring
from .rng import epoch_key
from .samples import as_indices
from .spec import Spec


@functools.lru_cache(maxsize=64)
def _in_ring(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Make the kernel that turns rows counted from the oldest into storage rows."""

    def ring_rows(first: int, step: int, rows: np.ndarray, start: int, capacity: int, *params: Any) -> None:
        inner(first, step, rows, *params)
        for j in range(rows.size):
            row = rows[j] + start
            rows[j] = row - capacity if row >= capacity else row

    return ring_rows


class _Guarded:
    """One thread's hold on a program over a ring: what was overwritten while it was read is read again."""

    def __init__(self, inner: compose.Worker, ring: Ring) -> None:
        self.inner, self.ring = inner, ring
        self.call, self.measure, self.program = inner.call, inner.measure, inner.program

    def lengths(self, first: int, step: int, count: int, place: int, spans: compose.Spans) -> Any:
        return self.ring.consistent(lambda: self.inner.lengths(first, step, count, place, spans))

    def reorder(self, *params: Any) -> None:
        self.inner.reorder(*params)

    def lay_out(self, k: int, rows: int, spans: compose.Spans) -> compose.Layout:
        return self.inner.lay_out(k, rows, spans)

    def fill(self, first: int, step: int, count: int, place: int) -> Any:
        return self.ring.consistent(lambda: self.inner.fill(first, step, count, place))


class _Program:
    """A program over the storage rows of a ring."""

    def __init__(self, inner: compose.Program, ring: Ring) -> None:
        self.inner, self.ring = inner, ring

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def worker(self, key: int, order: Sequence[Any]) -> _Guarded:
        """Give one thread's hold on the program."""
        return _Guarded(compose.Worker(self.inner, key, order), self.ring)

    def bounded(self, bound: Any) -> _Program:
        """A ring is memory, not a file."""
        return self


class Live:
    """Fields over a ring that others go on writing: what `jl.live` and `jl.transitions` make of one.

    Row i is the i-th oldest there is. A Loader gives epochs of the rows that are there when each begins. Rows come whole:
    one that is overwritten meanwhile comes as the new one. Immutable as a Dataset, with the same `map`, `apply`,
    `apply_rows`, `keep` and `drop`; what would hold rows still (`select`, `split`, `save`) is for `jl.Dataset(ring.copy())`.
    """

    __slots__ = ("_over", "_ring")

    def __init__(self, over: Dataset, ring: Ring) -> None:
        self._over, self._ring = over, ring

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def ring(self) -> Ring:
        """The ring."""
        return self._ring

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in the order of a batch."""
        return self._over.fields

    @property
    def spec(self) -> dict[str, Spec]:
        """The type of one sample of each field, after all stages."""
        return self._over.spec

    def __repr__(self) -> str:
        lines = repr(self._over).splitlines()[1:]
        return "\n".join([f"Live data of {len(self):,} rows, at most {self._ring.capacity:,}", *lines])

    def map(self, fields: str | Sequence[str], *stages: Any, to: str | Sequence[str] | None = None) -> Live:
        """Link stages to a field, as `Dataset.map`."""
        return Live(self._over.map(fields, *stages, to=to), self._ring)

    def apply(self, function: Callable[..., Any]) -> Live:
        """Link any Python function of a whole batch, as `Dataset.apply`."""
        return Live(self._over.apply(function), self._ring)

    def apply_rows(self, function: Callable[..., Any]) -> Live:
        """Link any Python function of one row, as `Dataset.apply_rows`; its draws are keyed by the storage row."""
        return Live(self._over.apply_rows(function), self._ring)

    def keep(self, *fields: str) -> Live:
        """Give these fields alone, in this order."""
        return Live(self._over.keep(*fields), self._ring)

    def drop(self, *fields: str) -> Live:
        """Give all but these fields."""
        return Live(self._over.drop(*fields), self._ring)

    def __getitem__(self, index: Any) -> Any:
        """Give one sample, counted from the oldest, or a batch of samples."""
        snapshot = self._ring.snapshot()
        if isinstance(index, slice):
            index = np.arange(snapshot.length, dtype=np.int64)[index]
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            row = int(self._ring.rows(as_indices([index], snapshot.length), snapshot)[0])
            return self._ring.consistent(lambda: self._over.sample(row))
        return self.at(self._ring.rows(as_indices(index, snapshot.length), snapshot))

    def at(self, rows: np.ndarray) -> Any:
        """Give the samples at these storage rows as a batch."""
        return self._ring.consistent(lambda: self._over.gather(rows))

    # -- what a loader needs ------------------------------------------------------------------------------------------

    @property
    def batch_type(self) -> Any:
        """The NamedTuple type of a batch."""
        return self._over.batch_type

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The data set over all storage rows."""
        return (self._over,)

    @property
    def applies(self) -> bool:
        """Whether Python functions are linked."""
        return self._over.applies

    def verify(self) -> None:
        """A ring is no file that could be cut."""

    def positions(self, order: Order, seed: int, epoch: int) -> Positions:
        """Give an order made ready for one epoch over the rows that are there."""
        snapshot = self._ring.snapshot()
        plan = order.plan(snapshot.length, seed, epoch)
        return Positions(_in_ring(plan.kernel), plan.length, (snapshot.start, self._ring.capacity, *plan.params))

    def program(self, order: Any, order_params: Sequence[Any], number: bool = False) -> Any:
        """Give the whole chain as one function, its rows given by an order kernel."""
        return _Program(self._over.program(order, order_params, number=number), self._ring)

    def finish(self, arrays: Sequence[Any], seed: int, epoch: int) -> Any:
        """Give filled arrays as the batch that users see."""
        return self._over.finish(arrays, seed, epoch)

    def failed(self, failure: compose.Failure, seed: int, epoch: int) -> Exception:
        """Give the error of a storage row on which a kernel stopped."""
        return self._over.failed(failure, seed, epoch)

    def __reduce__(self) -> Any:
        return pickling.reduced(self, "live data")

    def _reduced(self) -> Any:
        return Live, (self._over, self._ring)  # one stream, for they share the arrays

    def __deepcopy__(self, memo: dict[int, Any]) -> Live:
        back: Live = pickling.loads(pickling.dumps(self, "live data"))
        return back

    def _emptied(self) -> Live:
        return Live(self._over._emptied(), Ring(1, gone="bool"))


def live(ring: Ring) -> Live:
    """Give the rows of a ring, a field for each of its own, while it is still written.

    >>> import jitloader as jl
    >>> ring = jl.ring(4, x="float32")
    >>> loader = jl.Loader(jl.live(ring), 8)
    >>> _ = ring.extend(x=[1, 2, 3, 4, 5])
    >>> [batch.x.tolist() for batch in loader]
    [[2.0, 3.0, 4.0, 5.0]]
    """
    if not isinstance(ring, Ring):
        raise TypeError(f"live takes a ring (jl.ring), got {type(ring).__name__}")
    return Live(Dataset(ring.fields), ring)


class Replay:
    """Batches drawn by priority from a ring that is still written: what DQN and its kin learn from.

    data : a ring, or what `jl.live` or `jl.transitions` make of one, with any stages.
    memory : a `jl.prioritized` of the ring's capacity.

    Rows added by `extend` or `append` have the highest priority so far. All methods may be called from several threads,
    but one alone may write.

    Source: Schaul, Quan, Antonoglou, Silver: "Prioritized experience replay", ICLR 2016.

    >>> import numpy as np, jitloader as jl
    >>> replay = jl.Replay(jl.ring(100, x="float32"), jl.prioritized(100, alpha=1.0))
    >>> _ = replay.extend(x=[1.0, 2.0, 3.0])
    >>> replay.update([0, 2], [0.0, 0.0])
    >>> batch = replay.sample(2)
    >>> batch.x.tolist(), batch.row.tolist(), batch.weight.tolist()
    ([2.0, 2.0], [1, 1], [1.0, 1.0])
    """

    __slots__ = ("_bound", "_data", "_memory", "_names")

    def __init__(self, data: Ring | Live, memory: Prioritized) -> None:
        data = live(data) if isinstance(data, Ring) else data
        if not isinstance(data, Live) or not isinstance(memory, Prioritized):
            kinds = f"{type(data).__name__} and {type(memory).__name__}"
            raise TypeError(
                f"Replay takes a ring (or jl.live, jl.transitions of one) and a jl.prioritized, got {kinds}"
            )
        if data.ring.capacity != memory.capacity:
            raise ValueError(
                f"the ring has {data.ring.capacity} rows and the memory {memory.capacity}: give them one capacity"
            )
        taken = [name for name in ("row", "weight") if name in data.fields]
        if taken:
            raise ValueError(
                f"Replay adds fields 'row' and 'weight' to a batch, and there is a field {taken[0]!r} already"
            )
        self._data, self._memory = data, memory
        self._names = (*data.fields, "row", "weight")
        self._bound: dict[int, list[_Guarded]] = {}

    @property
    def memory(self) -> Prioritized:
        """The priorities."""
        return self._memory

    @property
    def ring(self) -> Ring:
        """The ring."""
        return self._data.ring

    def __len__(self) -> int:
        return len(self._data)

    def append(self, **row: Any) -> int:
        """Write one row, a value for each field of the ring, and give its number."""
        number = self.ring.append(**row)
        self._memory.add(number)
        return number

    def extend(self, **rows: Any) -> np.ndarray:
        """Write many rows, (n, ...) values for each field of the ring, and give their numbers, (n,) int64."""
        numbers = self.ring.extend(**rows)
        self._memory.add(numbers)
        return numbers

    def sample(self, batch_size: int) -> Any:
        """Draw a batch: the fields of the data, `row` (batch_size,) int64 to update priorities by, and the importance
        weights `weight` (batch_size,) float32. Raises ValueError where no row has a priority above 0."""
        rows, weights = self._memory.sample(batch_size)
        size, data = operator.index(batch_size), self._data
        step = self._memory.step
        workers = self._bound.setdefault(size, [])
        try:
            worker = workers.pop()
        except IndexError:
            worker = data.program(table_rows, (rows,)).worker(0, (rows,))
        worker.call.set(4, epoch_key(0, step))
        worker.reorder(rows)
        arrays, failed = compose.collect(worker.program, worker, 0, 1, size)
        workers.append(worker)
        if failed is not None:
            raise data.failed(failed, 0, step)
        batch = data.finish(arrays, 0, step)
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            names = self._names if len(batch) + 2 == len(self._names) else (*batch._fields, "row", "weight")
            return python.batch_type(names)(*batch, rows, weights)
        return batch, rows, weights

    def update(self, rows: Any, priorities: Any) -> None:
        """Set the priorities of these rows, (n,) integers and (n,) numbers: the size of their errors, as a rule."""
        self._memory.update(rows, priorities)

    def __reduce__(self) -> Any:
        return Replay, (self._data, self._memory)

    def state_dict(self) -> Mapping[str, Any]:
        """Give the state of the priorities, as plain values for JSON (11 bytes a row); the ring pickles by itself."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved priorities. Raises StateError as `jl.prioritized` does, and where one is for a row that the ring
        has not: load the ring first."""
        self._memory.load_state_dict(state, len(self.ring))
