"""Several data sets, each with stages of its own, mixed in given shares into one order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import compose, jit, pickling, python, residency
from .dataset import Dataset
from .orders import Order, Positions, mixed
from .orders.base import table_rows
from .rng import epoch_key
from .samples import as_indices
from .spec import Spec
from .stages.stage import caller


@functools.lru_cache(maxsize=64)
def _part(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Make the kernel that gives one source's own rows, and -1 for those of others."""

    def part_rows(first: int, step: int, rows: np.ndarray, low: int, high: int, *params: Any) -> None:
        inner(first, step, rows, *params)
        for j in range(rows.size):
            row = rows[j]
            rows[j] = row - low if low <= row and row < high else -1

    return part_rows


class _Calls:
    """Calls whose outputs are the same arrays."""

    def __init__(self, calls: list[jit.Call]) -> None:
        self.calls = calls

    def set(self, i: int, value: Any) -> None:
        for call in self.calls:
            call.set(i, value)

    def point(self, i: int, array: np.ndarray, address: int) -> None:
        for call in self.calls:
            call.point(i, array, address)


class _Worker:
    """One thread's hold on a mix: each source's program in turn writes the rows that are its own."""

    def __init__(self, program: _Program, key: int, order: Sequence[Any]) -> None:
        self.program = program
        bounds = program.bounds
        self.workers = [p.worker(key, (*bounds[k : k + 2], *order)) for k, p in enumerate(program.parts)]
        self.call = _Calls([w.call for w in self.workers])

    def _each(self, run: Callable[[compose.Worker], compose.Failure | None]) -> compose.Failure | None:
        """Run every source; of several that stop, give the first in order, with its row counted over all sources."""
        failures = []
        for worker, low in zip(self.workers, self.program.bounds, strict=False):
            failed = run(worker)
            if failed is not None:
                failures.append(failed._replace(row=failed.row + low))
        return min(failures, key=lambda f: f.done, default=None)

    def lengths(self, first: int, step: int, count: int, place: int, spans: compose.Spans) -> compose.Failure | None:
        """Write the lengths of the rows at positions first, first + step, ... from row `place` on."""
        return self._each(lambda worker: worker.lengths(first, step, count, place, spans))

    def lay_out(self, k: int, rows: int, spans: compose.Spans) -> compose.Layout:
        """Place the rows of output k, and let every source write there."""
        return [worker.lay_out(k, rows, spans) for worker in self.workers][0]

    def fill(self, first: int, step: int, count: int, place: int) -> compose.Failure | None:
        """Write the rows at positions first, first + step, ... into the outputs, from row `place` on."""
        return self._each(lambda worker: worker.fill(first, step, count, place))


class _Program(NamedTuple):
    """The programs of all sources, whose outputs are alike, and the rows before each."""

    parts: tuple[compose.Program, ...]
    bounds: tuple[int, ...]

    @property
    def outputs(self) -> tuple[compose.Output, ...]:
        return self.parts[0].outputs

    @property
    def measure(self) -> Any:
        return self.parts[0].measure

    @property
    def nbytes(self) -> int:
        return self.parts[0].nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"source {k}: {note}" for k, part in enumerate(self.parts) for note in part.notes)

    def load(self) -> None:
        for part in self.parts:
            part.load()

    def places(self) -> list[int]:
        return self.parts[0].places()

    def worker(self, key: int, order: Sequence[Any]) -> _Worker:
        return _Worker(self, key, order)

    @property
    def grounds(self) -> tuple[residency.Ground, ...]:
        return tuple(ground for part in self.parts for ground in part.grounds)

    @property
    def bound(self) -> residency.Bound | None:
        return self.parts[0].bound

    def bounded(self, bound: residency.Bound) -> _Program:
        return self._replace(parts=tuple(part.bounded(bound) for part in self.parts))

    def reaches(self, key: int, order: Sequence[Any]) -> list[compose.Reach]:
        return [r for k, p in enumerate(self.parts) for r in p.reaches(key, (*self.bounds[k : k + 2], *order))]


class Mix:
    """Data sets in given shares, for a Loader: see `mix`.

    Rows are counted over the sources, one behind the other. `map`, `keep` and `drop` change every source, `apply` and
    `apply_rows` come after the mixing.
    """

    __slots__ = ("_bounds", "_head", "_order", "_parts", "_python")

    def __init__(
        self, parts: tuple[Dataset, ...], order: Order, head: str, made: tuple[python.Applied, ...] = ()
    ) -> None:
        self._parts, self._order, self._head, self._python = parts, order, head, made
        ends = np.cumsum([0, *map(len, parts)])
        self._bounds = tuple(int(n) for n in ends)

    def _with(self, change: Callable[[Dataset], Dataset]) -> Mix:
        if self._python:
            raise ValueError(f"link apply({self._python[0].name}) last: what it gives is Python's")
        return _checked(tuple(map(change, self._parts)), self._order, self._head)

    def __len__(self) -> int:
        return self._bounds[-1]

    @property
    def order(self) -> Order:
        """Which row comes at which position."""
        return self._order

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The sources."""
        return self._parts

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in the order of a batch."""
        return self._parts[0].fields

    @property
    def spec(self) -> dict[str, Spec]:
        """The type of one sample of each field, after all stages."""
        return self._parts[0].spec

    def __repr__(self) -> str:
        lines = [self._head]
        for k, part in enumerate(self._parts):
            lines.append(f"  source {k} of {len(part):,} rows")
            lines += ["  " + line for line in repr(part).splitlines()[1:]]
        lines += [f"  -> {m.name} (Python, {'a row' if m.rowwise else 'a batch'} at a time)" for m in self._python]
        return "\n".join(lines)

    def map(self, fields: str | Sequence[str], *stages: Any, to: str | Sequence[str] | None = None) -> Mix:
        """Link stages to a field of every source, as `Dataset.map`."""
        return self._with(lambda part: part.map(fields, *stages, to=to))

    def keep(self, *fields: str) -> Mix:
        """Give these fields alone, in this order."""
        return self._with(lambda part: part.keep(*fields))

    def drop(self, *fields: str) -> Mix:
        """Give all but these fields."""
        return self._with(lambda part: part.drop(*fields))

    def apply(self, function: Callable[..., Any]) -> Mix:
        """Link any Python function of a whole batch, as `Dataset.apply`."""
        return self._applied(function, False)

    def apply_rows(self, function: Callable[..., Any]) -> Mix:
        """Link any Python function of one row, as `Dataset.apply_rows`; its draws are keyed by the row of the mix."""
        return self._applied(function, True)

    def _applied(self, function: Callable[..., Any], rowwise: bool) -> Mix:
        salt = 1 + max((step.salt for part in self._parts for step in part.steps), default=-1) + len(self._python)
        made = python.applied(function, rowwise, salt, caller())
        return Mix(self._parts, self._order, self._head, (*self._python, made))

    def __getitem__(self, index: Any) -> Any:
        """Give one sample of row `index`, counted over the sources, or a batch of samples."""
        if isinstance(index, slice):
            index = np.arange(len(self), dtype=np.int64)[index]
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            row = int(as_indices([index], len(self))[0])
            k = self._source_of(row)
            sample = self._parts[k].sample(row - self._bounds[k])
            if not self._python:
                return sample
            return python.first_row(self.finish([*(np.asarray(a)[None] for a in sample), np.array([row])], 0, 0))
        rows = as_indices(index, len(self))
        program = self.program(table_rows, (rows,))
        arrays, failed = compose.collect(program, program.worker(epoch_key(0, 0), (rows,)), 0, 1, len(rows))
        if failed is not None:
            raise self.failed(failed, 0, 0)
        return self.finish(arrays, 0, 0)

    # -- what a loader needs ------------------------------------------------------------------------------------------

    @property
    def batch_type(self) -> Any:
        """The NamedTuple type of a batch."""
        return self._parts[0].batch_type

    @property
    def applies(self) -> bool:
        """Whether Python functions are linked."""
        return bool(self._python)

    def verify(self) -> None:
        """Check that the mapped files of all sources are still what was opened."""
        for part in self._parts:
            part.verify()

    def positions(self, order: Order, seed: int, epoch: int) -> Positions:
        """Give the order made ready for one epoch."""
        return order.plan(len(self), seed, epoch)

    def program(self, order: Any, order_params: Sequence[Any]) -> Any:
        """Give the programs of all sources, their rows given by an order kernel."""
        kernel, bounds = _part(order), self._bounds
        parts = []
        for k, part in enumerate(self._parts):
            params = (*bounds[k : k + 2], *order_params)
            parts.append(part.program(kernel, params, base=bounds[k], number=self.applies))
        return _Program(tuple(parts), bounds)

    def finish(self, arrays: Sequence[Any], seed: int, epoch: int) -> Any:
        """Give filled arrays, the row numbers last where functions were applied, as the batch that users see."""
        if not self._python:
            return self.batch_type(*arrays)
        batch, rows = self.batch_type(*arrays[:-1]), arrays[-1]
        for made in self._python:
            batch = python.run(made, batch, self.fields, rows, epoch_key(seed, epoch), epoch)
        return batch

    def failed(self, failure: compose.Failure, seed: int, epoch: int) -> Exception:
        """Give the error of a row on which a kernel stopped: of which source, in its own words."""
        k = self._source_of(failure.row)
        error = self._parts[k].failed(failure._replace(row=failure.row - self._bounds[k]), seed, epoch)
        return type(error)(f"source {k}: {error}")

    def _source_of(self, row: int) -> int:
        return int(np.searchsorted(self._bounds, row, "right")) - 1

    def __reduce__(self) -> Any:
        return pickling.reduced(self, "a mix")

    def _reduced(self) -> Any:
        return Mix, (self._parts, self._order, self._head, self._python)

    def _emptied(self) -> Mix:
        return Mix(tuple(part._emptied() for part in self._parts), self._order, self._head, self._python)


def mix(*pairs: Any, stop: str = "first") -> Mix:
    """Mix data sets in shares: `jl.mix((web, 0.7), (books, 0.3))`, or a dict of the same, as the data of a Loader.

    pairs : data sets and how often each comes, relative to the others, as (dataset, share). Each may have stages of its
        own; the fields that leave them must agree in name, dtype and shape.
    stop : the epoch ends before a row would come twice ("first" source used up); when all rows have come ("last":
        smaller sources start again, shuffled anew); or after as many rows as there are, with every source going on in
        the next epoch where it was left ("never").

    Among the first t rows of an epoch each source has its share of t to within one; each is in a shuffled order of its
    own, and a row has the random draws that it has in its own data set alone. Resumes and parts between ranks as any
    order does. Rows find their stages by source: a batch costs one pass over its positions for each source.

    Raises ValueError for shares that are zero or negative, a source without rows, or fields that do not agree.

    >>> import numpy as np, jitloader as jl
    >>> web = jl.Dataset(x=np.zeros(100))
    >>> books = jl.Dataset(x=np.ones(100, "uint8")).map("x", jl.cast("float64"))
    >>> for batch in jl.Loader(jl.mix((web, 0.7), (books, 0.3)), 50, drop_last=True):
    ...     batch.x.mean().item()
    0.3
    0.3
    """
    given = tuple(pairs[0].items()) if len(pairs) == 1 and isinstance(pairs[0], Mapping) else pairs
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Dataset):
            raise TypeError(f"mix takes pairs (dataset, share), as mix((web, 0.7), (books, 0.3)), got {_kind(pair)}")
    if not given:
        raise ValueError("mix takes at least one pair (dataset, share)")
    first = given[0][0]
    parts = []
    for k, (part, _) in enumerate(given):
        if part.applies:
            raise ValueError(f"mix: source {k} has a function applied: mix first, then apply")
        if set(part.fields) != set(first.fields):
            raise ValueError(
                f"mix: source 0 has the fields {', '.join(first.fields)}, source {k} {', '.join(part.fields)}: "
                "keep those that all have"
            )
        parts.append(part if part.fields == first.fields else part.keep(*first.fields))
    order = mixed([len(part) for part in parts], [share for _, share in given], stop)
    total = sum(len(part) for part in parts)
    return _checked(tuple(parts), order, f"{order.name.replace('mixed', 'Mix', 1)} of {total:,} rows")


def _checked(parts: tuple[Dataset, ...], order: Order, head: str) -> Mix:
    """Check that what leaves the sources agrees."""
    first, outputs = parts[0].spec, [part.program(compose.only_row, ()).outputs for part in parts]
    for k, part in enumerate(parts):
        for name, spec in part.spec.items():
            if spec != first[name]:
                raise ValueError(
                    f"mix: field {name!r} is {first[name]} in source 0 and {spec} in source {k}: map to one type"
                )
        for mine, other in zip(outputs[0], outputs[k], strict=True):
            if mine != other:
                raise ValueError(f"mix: field {mine.name!r} is padded or kept ragged in another way in source {k}")
    return Mix(parts, order, head)


def _kind(pair: Any) -> str:
    if isinstance(pair, Dataset):
        return "a data set without a share"
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return f"a pair whose first is of type {type(pair[0]).__name__}"
    return type(pair).__name__
