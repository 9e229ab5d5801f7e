"""Named fields over one row axis, and the stages linked to them: every link is checked on the line that makes it."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import batches, blame, compose, frames, jit, kept, linking, passes, pickling, python, rng, storage
from .bars import bar
from .compose import decoded
from .errors import DataError, PipelineError
from .orders import Order, Positions, shuffled
from .orders.base import table_rows
from .passes import Statistics
from .ragged import ragged
from .ranks import whole_number
from .rng import epoch_key
from .samples import Rows, Samples, as_indices, join, records
from .spec import Spec
from .stages import Stage, Step, as_stage, cast
from .stages.stage import caller
from .windows import refuse_nan

if TYPE_CHECKING:
    from .describe import Description

SELECT = 1  # the salt under which split draws


class Dataset:
    """Named fields over one row axis: arrays, paths of files of one array, or access patterns, by reference.

    Arrays are NumPy's or any with `__array_interface__` or DLPack: torch, JAX. A frame given alone (pandas, polars, an
    Arrow table, a `datasets.Dataset`, a structured array) is a field a column.
    Immutable: every method gives a new data set that shares the arrays. Nothing is read or copied when it is made.
    Raises ValueError where fields differ in length or are 0-d, TypeError for Python objects, OSError or DataError
    for a file that is missing or not what it says.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(image=np.zeros((100, 8, 8, 3), "uint8"), label=np.arange(100))
    >>> data.map("image", jl.scale(), jl.channels_first()).spec["image"]
    float32 (3, 8, 8)
    """

    __slots__ = ("_batch", "_fields", "_python", "_sources", "_steps", "_watches", "_programs", "_drawn")

    def __init__(self, fields: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        if fields is not None:
            found = frames.columns(fields)
            if found is None and not hasattr(fields, "keys"):
                raise TypeError(_unnamed(fields))
            fields = fields if found is None else found
        given = {**(fields or {}), **named}
        if not given:
            raise ValueError("a data set needs at least one field, as Dataset(image=array)")
        sources = {}
        for name, value in given.items():
            linking.check_name(name)
            if isinstance(value, Dataset):
                raise TypeError(f"field {name!r} is a Dataset: join the fields of two by zip")
            if isinstance(value, (str, os.PathLike)):
                value = _open(value, name)
            sources[name] = frames.samples_of(value, name)
        counts = {name: samples.rows.count for name, samples in sources.items()}
        if len(set(counts.values())) > 1:
            raise ValueError("fields differ in length: " + ", ".join(f"{k!r} has {n} rows" for k, n in counts.items()))
        self._set(sources, (), tuple(sources))
        self._watches = _watches(sources)

    def _set(self, sources: dict[str, Samples], steps: tuple[Step, ...], fields: tuple[str, ...]) -> None:
        self._sources, self._steps, self._fields = sources, steps, fields
        self._batch = python.batch_type(fields)
        self._python: tuple[python.Applied | batches.Mixed, ...] = ()
        self._watches = ()
        self._drawn = 0  # the salts of stages that ran before a cache
        self._programs: dict[Any, compose.Program] = {}

    def _with(
        self,
        sources: dict[str, Samples] | None = None,
        steps: tuple[Step, ...] | None = None,
        fields: tuple[str, ...] | None = None,
    ) -> Dataset:
        new = object.__new__(Dataset)
        new._set(sources or self._sources, self._steps if steps is None else steps, fields or self._fields)
        new._python, new._watches, new._drawn = self._python, self._watches, self._drawn
        return new

    def verify(self) -> None:
        """Check that the mapped files are still what was opened: a file cut or written over under its map is a DataError
        naming path and bytes (reading it would end the process), one that was replaced a warning."""
        for watch in self._watches:
            watch.verify()

    # -- looking ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return next(iter(self._sources.values())).rows.count

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in the order of a batch."""
        return self._fields

    @property
    def spec(self) -> dict[str, Spec]:
        """The type of one sample of each field, after all stages."""
        found = {name: samples.spec for name, samples in self._sources.items()}
        for step in self._steps:
            found.update({name: bound.out for name, bound in zip(step.outputs, step.bound, strict=True)})
        return {name: found[name] for name in self._fields}

    def __repr__(self) -> str:
        lines = [f"Dataset of {len(self):,} rows"]
        for name in self._fields:
            samples = self._sources.get(name)
            text = f"  {name}:" + (f" {samples.name} {samples.spec}" if samples else "")
            for step in self._steps:
                if name in step.outputs:
                    others = [f for f in step.fields if f != name] if step.joint or name not in step.fields else []
                    text += (f" with {', '.join(others)}" if others else "") + (
                        " ->" if text[-1] != ":" or others else ""
                    )
                    text += f" {step.stage.name} -> {step.bound[step.outputs.index(name)].out}"
            lines.append(text)
        lines += [f"  -> {made.name} ({made.how} at a time)" for made in self._python]
        return "\n".join(lines)

    def explain(self) -> str:
        """Tell how the chain runs: bytes a row in and out, which stages fused into which loop and in what form, the scratch
        each thread holds, and where the kernel of a shuffled Loader is: ready, on disk, or to be compiled.

        >>> import numpy as np, jitloader as jl
        >>> print(jl.Dataset(x=np.zeros((10, 4), "uint8")).map("x", jl.scale(), jl.clip(0, 0.5)).explain())
        ... # doctest: +ELLIPSIS
        Dataset of 10 rows
          x: records uint8 (4,) -> scale -> float32 (4,) -> clip(0, 0.5) -> float32 (4,)
          in: x 4 bytes a row
          out: x 16 bytes a row
          loop: scale + clip(0, 0.5): one loop nest over 4
          scratch: 0 bytes a thread
          kernel: ...
        """
        positions = shuffled.plan(len(self), 0, 0)
        program = self.program(positions.kernel, positions.params)
        used = {*self._fields, *(name for step in self._steps for name in step.fields)}

        def told(specs: Mapping[str, Spec]) -> str:
            each = (f"{n} {'varies' if s.ragged else f'{s.nbytes:,} bytes'}" for n, s in specs.items())
            return ", ".join(each) + " a row"

        scratch = sum(np.dtype(name).itemsize * size for name, size in program.scratch)
        return "\n".join(
            [
                repr(self),
                "  in: " + told({n: s.spec for n, s in self._sources.items() if n in used}),
                "  out: " + told(self.spec),
                *(f"  loop: {note}" for note in program.notes),
                f"  scratch: {scratch:,} bytes a thread",
                f"  kernel: {jit.whereabouts(program.function, program.signature())}",
            ]
        )

    # -- linking ------------------------------------------------------------------------------------------------------

    def map(
        self, fields: str | Sequence[str] | Mapping[Any, Any], *stages: Any, to: str | Sequence[str] | None = None
    ) -> Dataset:
        """Link stages to a field: each takes what the one before gives. Several fields get the same random draws.

        A dict {field: stage} links different stages that get the same draws: an image bilinear, its mask nearest. Where
        its values are lists of stages, the k-th of each share draws.

        A stage is a built-in one, one made by `@jl.elementwise` or `@jl.stage`, or a plain function: of one number, or
        of (src, dst, key). One that takes several fields at once writes into the first of them, or into the fields
        named by `to`. Raises PipelineError on this line where a stage does not fit, naming stage, field and specs.
        """
        applied = [made.name for made in self._python if not isinstance(made, batches.Mixed)]
        if applied:
            raise PipelineError(f"map after apply({applied[0]}): what apply gives is Python's, so link it last")
        if isinstance(fields, Mapping):
            if stages or to is not None:
                raise TypeError("map takes a dict {field: stage} alone, as map({'image': a, 'mask': b})")
            return self._together(fields)
        names = linking.names_of(fields, "map takes the name of a field, or several")
        if not stages:
            raise ValueError("map takes at least one stage, as map('x', jl.clip(0, 1))")
        for name in names:
            self._check_field(name)
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"map takes one field or several different ones, got {fields!r}")
        given = () if to is None else linking.names_of(to, "to= takes the name of a field, or several")
        for name in given:
            linking.check_name(name)
        data = self
        for value in stages:
            made = as_stage(value)
            made = made if made.where else made._replace(where=caller())
            link = linking.joined if made.join is not None else linking.linked
            step = link(made, names, given, data.spec, len(data._steps), data._salt)
            if step.bound[0].kind == "batch":
                data = data._mixed(step)
                continue
            if data._python:
                raise PipelineError(
                    f"stage {len(data._steps) + len(data._python)} {made.name!r}: after the batch stage "
                    f"{data._python[0].name!r} only batch stages and apply may follow; link it before [{made.where}]"
                )
            fresh = tuple(name for name in step.outputs if name not in data._fields)
            data = data._with(steps=(*data._steps, step), fields=data._fields + fresh)
            data._watches += _watches({}, (step,))
        return data

    def _together(self, table: Mapping[Any, Any]) -> Dataset:
        """Link a stage to each of some fields under one salt, then the next ones."""
        if not table:
            raise ValueError("map takes at least one field, as map({'image': a, 'mask': b})")
        chains = {
            key: value if isinstance(value, (list, tuple)) and not isinstance(value, Stage) else (value,)
            for key, value in table.items()
        }
        names = [name for key in chains for name in linking.names_of(key, "a dict given to map has names of fields as keys")]
        if len(set(names)) != len(names) or not all(chains.values()):
            raise ValueError(f"map takes a dict {{field: stage}} with each field once, got {list(table)}")
        data = self
        for k in range(max(map(len, chains.values()))):
            salt = data._salt
            for key, chain in chains.items():
                if k >= len(chain):
                    continue
                linked = data.map(key, chain[k])
                if len(linked._steps) == len(data._steps):
                    raise PipelineError(f"batch stage {linked._python[-1].name!r} takes fields as map((a, b), stage)")
                *before, last = linked._steps
                data = linked._with(steps=(*before, last._replace(salt=salt)))
        return data

    def _mixed(self, step: Step) -> Dataset:
        """Link a batch stage, whose draws are its own."""
        number = len(self._steps) + len(self._python)
        for name, spec in zip(step.fields, step.before, strict=True):
            if self.spec[name] != spec:
                raise PipelineError(
                    f"stage {number} {step.stage.name!r} on field {name!r}: a kernel cannot compute with "
                    f"{self.spec[name].dtype}; cast before it [{step.stage.where}]"
                )
        if step.outputs != step.fields:
            raise ValueError(
                f"to= is for stages of single rows; the batch stage {step.stage.name!r} gives its own fields"
            )
        new = self._with()
        new._python = (*self._python, batches.mixed(step._replace(salt=self._salt + len(self._python)), number))
        return new

    @property
    def _salt(self) -> int:
        return max(self._drawn, *(step.salt + 1 for step in self._steps), 0)

    def _check_field(self, name: str) -> None:
        if name not in self._fields:
            raise KeyError(f"no field {name!r}: there are {', '.join(self._fields)}")

    def apply(self, function: Callable[..., Any]) -> Dataset:
        """Link any Python function of a whole batch, run in the background thread: `function(batch)` gives the batch.

        It may return a dict (fields changed or added), a NamedTuple, or anything else, which is then what the loader
        yields. No JIT, and the GIL is held while it runs. Its output must keep the dtypes and shapes it has on the first
        batch; an exception reaches the consumer as a PipelineError with the user's own line.

        >>> import numpy as np, jitloader as jl
        >>> jl.Dataset(x=np.arange(3)).apply(lambda batch: {"x": batch.x + 1})[0:2].x
        array([1, 2])
        """
        return self._applied(python.applied(function, False, self._salt + len(self._python), caller()))

    def apply_rows(self, function: Callable[..., Any]) -> Dataset:
        """Link any Python function of one row: `function(row, rng)` gets a dict of the row's fields, and gives a dict of
        those it changes or adds.

        `rng` is a numpy Generator of the row's own, keyed by (seed, epoch, row, stage). Slow: Python a row; what numbers
        can do belongs in `map`.

        >>> import numpy as np, jitloader as jl
        >>> jl.Dataset(x=np.arange(3)).apply_rows(lambda row, rng: {"y": row["x"] * 2.0})[0:2].y
        array([0., 2.])
        """
        return self._applied(python.applied(function, True, self._salt + len(self._python), caller()))

    def _applied(self, made: python.Applied) -> Dataset:
        new = self._with()
        new._python = (*self._python, made)
        return new

    def finish(self, arrays: Sequence[Any], seed: int, epoch: int, plain: bool = False) -> Any:
        """Give filled arrays, the row numbers last where functions were applied, as the batch that users see."""
        if not self._python:
            return self._batch(*arrays)
        batch, rows = self._batch(*arrays[:-1]), arrays[-1]
        for made in self._python:
            if isinstance(made, batches.Mixed):
                batch = batches.run(made, batch, rows, self._fields, seed, epoch, plain)
            else:
                batch = python.run(made, batch, self._fields, rows, epoch_key(seed, epoch), epoch)
        return batch

    @property
    def applies(self) -> bool:
        """Whether Python functions are linked."""
        return bool(self._python)

    def keep(self, *fields: str) -> Dataset:
        """Give the data set with these fields alone, in this order; what they are made from is still read."""
        for name in fields:
            self._check_field(name)
        if not fields or len(set(fields)) != len(fields):
            raise ValueError(f"keep takes one field or several different ones, got {fields}")
        return self._with(fields=fields)

    def drop(self, *fields: str) -> Dataset:
        """Give the data set without these fields; fields made from them stay."""
        for name in fields:
            self._check_field(name)
        left = tuple(name for name in self._fields if name not in fields)
        return self.keep(*left)

    def select(self, indices: Any) -> Dataset:
        """Give the rows at these row numbers (repeats kept, negative ones from the end) or where a bool mask is True."""
        index = as_indices(indices, len(self))
        return self._pick(lambda rows: rows.pick(index))

    def take(self, n: int) -> Dataset:
        """Give the first n rows (the last n where n is negative)."""
        n = whole_number("take: n", n, None)
        return self._slice(slice(n) if n >= 0 else slice(n, None))

    def _slice(self, where: slice) -> Dataset:
        start, stop, step = where.indices(len(self))
        count = len(range(start, stop, step))
        return self._pick(lambda rows: rows.cut(start, step, count))

    def _pick(self, change: Callable[[Rows], Rows]) -> Dataset:
        made: dict[Any, Rows] = {}
        sources = {}
        for name, samples in self._sources.items():
            rows = samples.rows
            key = (id(rows.table), rows.start, rows.step)  # fields that shared a table still share one
            if key not in made:
                made[key] = change(rows)
            sources[name] = samples._replace(rows=made[key])
        return self._with(sources)

    def split(self, *fractions: float, seed: int = 0, groups: Any = None) -> tuple[Dataset, ...]:
        """Part the rows at random into data sets of these shares, each row in one of them; shares sum to at most 1.

        The parting depends on the seed and the number of rows alone. Rows keep the order of the file inside a part.
        With `groups`, a mark a row or the name of a field of such marks, rows of one mark stay together: groups are
        laid end to end in random order, and each goes where its middle falls. The parting then depends on marks too,
        and a mark that is NaN is a ValueError.

        >>> import numpy as np, jitloader as jl
        >>> [len(part) for part in jl.Dataset(x=np.arange(10)).split(0.8, 0.2)]
        [8, 2]
        >>> train, valid = jl.Dataset(x=np.array([7, 4, 4, 7, 1, 1])).split(0.7, 0.3, groups="x")
        >>> len(train), len(valid), set(train[:].x) & set(valid[:].x)
        (4, 2, set())
        """
        for f in fractions:
            if isinstance(f, (bool, np.bool_)) or not isinstance(f, numbers.Real):
                raise TypeError(f"split takes fractions above 0 that sum to at most 1, got {f!r}")
        seed = whole_number("split: seed", seed, None)
        if not fractions or any(not 0 < f <= 1 for f in fractions) or sum(fractions) > 1 + 1e-9:
            raise ValueError(f"split takes fractions above 0 that sum to at most 1, got {fractions}")
        n = len(self)
        generator = np.random.default_rng([rng.mix(seed) & 0xFFFFFFFF, SELECT, n])
        if groups is not None:
            return self._split_groups(fractions, generator, groups)
        order = generator.permutation(n)
        ends = [min(n, math.floor(sum(fractions[: k + 1]) * n + 0.5)) for k in range(len(fractions))]
        starts = [0, *ends[:-1]]
        return tuple(self.select(np.sort(order[a:b])) for a, b in zip(starts, ends, strict=True))

    def _split_groups(
        self, fractions: tuple[float, ...], source: np.random.Generator, groups: Any
    ) -> tuple[Dataset, ...]:
        marks = self.keep(groups)[:][0] if isinstance(groups, str) else np.asarray(groups)
        if not isinstance(marks, np.ndarray) or marks.shape != (len(self),):
            shape = marks.shape if isinstance(marks, np.ndarray) else "rows that vary"
            raise ValueError(f"split: groups must be a mark for each of {len(self)} rows, got {shape}")
        refuse_nan(marks)
        _, group, sizes = np.unique(marks, return_inverse=True, return_counts=True)
        order = source.permutation(len(sizes))
        middle = np.empty(len(sizes))
        middle[order] = np.cumsum(sizes[order]) - sizes[order] / 2  # a group is where its middle row falls
        ends = np.cumsum(fractions) * len(self)
        ends[-1] += 1e-9 * len(self)
        part = np.searchsorted(ends, middle, "right")[group.reshape(-1)]
        return tuple(self.select(np.flatnonzero(part == k)) for k in range(len(fractions)))

    def zip(self, other: Dataset) -> Dataset:
        """Give the fields of both, row by row; raises ValueError where lengths differ or a name is in both."""
        _check_other(other, "zip")
        self._refuse_python("zip")
        other._refuse_python("zip")
        if len(self) != len(other):
            raise ValueError(f"zip takes data sets of one length, got {len(self)} and {len(other)} rows")
        both = sorted(set(self._fields) & set(other._fields))
        if both:
            raise ValueError(f"zip: both data sets have a field {both[0]!r}")
        shift = self._salt
        moved = tuple(step._replace(salt=step.salt + shift) for step in other._steps)
        new = object.__new__(Dataset)
        new._set({**self._sources, **other._sources}, self._steps + moved, self._fields + other._fields)
        new._watches, new._drawn = self._watches + other._watches, shift + other._drawn
        return new

    def concat(self, *others: Dataset) -> Dataset:
        """Give the rows of all, one data set after the other, by reference; fields, their types and their stages must agree.

        Many at once are cheaper than one by one: `first.concat(*rest)` joins hundreds of shards in one pass.
        """
        self._refuse_python("concat")
        for other in others:
            _check_other(other, "concat")
            other._refuse_python("concat")
            if self._fields != other._fields:
                raise ValueError(f"concat: fields differ: {', '.join(self._fields)} and {', '.join(other._fields)}")
            if [linking.told(step) for step in self._steps] != [linking.told(step) for step in other._steps]:
                raise ValueError("concat: the stages of the two differ: concat first, then map")
        every = (self, *others)
        new = self._with({name: join([data._sources[name] for data in every], name) for name in self._sources})
        new._watches = tuple(watch for data in every for watch in data._watches)
        return new

    # -- reading ------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Give one sample through its stages (an integer), or a batch of samples (a slice, row numbers or a mask)."""
        if isinstance(index, slice):
            try:
                return self.gather(np.arange(len(self), dtype=np.int64)[index])
            except TypeError:
                ends = ", ".join(repr(end) for end in (index.start, index.stop, index.step))
                raise TypeError(f"a slice of rows takes whole numbers, got slice({ends})") from None
        row = None
        if not isinstance(index, bool):
            with contextlib.suppress(TypeError):
                row = operator.index(index)
        if row is not None:
            return self.sample(int(as_indices([row], len(self))[0]))
        plain = hasattr(index, "__len__") and getattr(index, "ndim", 1) != 0
        if not plain or isinstance(index, (str, bytes, tuple, set, Mapping)):
            what = "a data set is indexed by a row number, a slice, an array of row numbers or a mask"
            hint = "; for a field, keep(name)" if isinstance(index, str) else ""
            hint = "; for several rows, give a list" if isinstance(index, tuple) else hint
            raise TypeError(f"{what}, got {index!r}{hint}")
        return self.gather(as_indices(index, len(self)))

    def sample(self, row: int, *, seed: int = 0, epoch: int = 0) -> Any:
        """Give one sample through its stages, in plain Python, with the draws it has in that epoch of a loader."""
        self.verify()
        row = int(as_indices([whole_number("row", row, None)], len(self))[0])
        seed, epoch = whole_number("seed", seed, None), whole_number("epoch", epoch, None)
        try:
            found = compose.batch_of(self._sources, self._steps, self._fields, row, epoch_key(seed, epoch))
        except compose.RowError as error:
            raise blame.of_row(self._chain, error, error.failure.row, seed, epoch) from None
        arrays = [found[name] for name in self._fields] + ([np.array([row])] if self._python else [])
        return python.first_row(self.finish(arrays, seed, epoch, True))

    def trace(self, row: int, *, seed: int = 0, epoch: int = 0) -> list[tuple[str, Any]]:
        """Give one sample after each stage, in plain Python: ("source", sample), then (stage name, sample) a step.

        >>> import numpy as np, jitloader as jl
        >>> data = jl.Dataset(x=np.array([5, 7])).map("x", jl.cast("float32"), jl.normalize(1, 2))
        >>> [(name, sample.x) for name, sample in data.trace(1)]
        [('source', np.int64(7)), ('cast(float32)', np.float32(7.0)), ('normalize', np.float32(3.0))]
        """
        row = int(as_indices([row], len(self))[0])
        names = tuple(self._sources)
        found: list[tuple[str, Any]] = []
        for k in range(len(self._steps) + 1):
            names += tuple(n for step in self._steps[k - 1 : k] for n in step.outputs if n not in names)
            data = self._with(steps=self._steps[:k], fields=names)
            data._python = ()
            found.append((self._steps[k - 1].stage.name if k else "source", data.sample(row, seed=seed, epoch=epoch)))
        for k, made in enumerate(self._python):
            data = self._with()
            data._python = self._python[: k + 1]
            found.append((made.name, data.sample(row, seed=seed, epoch=epoch)))
        return found

    def gather(self, rows: np.ndarray, *, seed: int = 0, epoch: int = 0) -> Any:
        """Give the samples at these row numbers as a batch: fresh arrays of shape (len(rows), *shape)."""
        self.verify()
        program = self.program(table_rows, (np.ascontiguousarray(rows, np.int64),))
        worker = self._compiled(lambda: compose.Worker(program, epoch_key(seed, epoch)))
        arrays, failed = compose.collect(program, worker, 0, 1, len(rows))
        if failed is not None:
            raise self.failed(failed, seed, epoch)
        return self.finish(arrays, seed, epoch)

    def failed(self, failure: compose.Failure, seed: int, epoch: int) -> Exception:
        """Give the error of a row on which a kernel stopped, found by running that row in plain Python."""
        return blame.of_failure(self._chain, failure, seed, epoch)

    @property
    def _chain(self) -> blame.Chain:
        return blame.Chain(self._sources, self._steps, self._fields)

    @property
    def batch_type(self) -> Any:
        """The NamedTuple type of a batch."""
        return self._batch

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The data sets that rows come from: itself."""
        return (self,)

    def positions(self, order: Order, seed: int, epoch: int) -> Positions:
        """Give an order made ready for one epoch over the rows."""
        return order.plan(len(self), seed, epoch)

    def program(
        self, order: Any, order_params: Sequence[Any], base: int | None = None, number: bool = False
    ) -> compose.Program:
        """Give the whole chain as one function, its rows given by an order kernel.

        With `base` the data are one source of several, and that many rows come before: see `compose`. With `number`,
        row numbers come out last.
        """
        rows = python.ROWS if self._python or number else ""
        kinds = (base, rows)
        if kinds in self._programs:
            return self._programs[kinds].ordered(order, order_params)
        made = compose.compose(self._sources, self._steps, self._fields, order, order_params, len(self), rows, base)
        if not any(step.stage.user for step in self._steps):  # what a user's function refers to may change
            self._programs[kinds] = made
        return made

    def statistics(self, field: str, *, progress: bool = True) -> Statistics:
        """Give mean, std, min and max of a field over all rows (and all axes of a sample but the last): float64.

        One pass over the rows after their stages. Sums are kept in float64 and shifted, so that a column of one value
        has exactly that mean and a std of exactly 0. Where it holds an infinity, or sums pass 1.8e308, mean and std are
        NaN, and where it holds NaN all four are. Images (H, W, C) give one number for each channel, as `normalize`
        takes them; scalars give a 0-d array. Of a folder that was saved they are noted in its manifest, and read there
        the next time, while its file is unchanged. `progress` shows tqdm's bar, where it is installed.

        >>> import numpy as np, jitloader as jl
        >>> jl.Dataset(x=np.array([[5.0, 1.0], [5.0, 3.0]])).statistics("x").std
        array([0., 1.])
        """
        self._check_field(field)
        self._refuse_python("statistics")
        spec = decoded(self.spec[field])
        if spec.dtype.kind not in "biuf" or spec.ragged:
            raise PipelineError(f"statistics takes a field of numbers of one shape; {field!r} is {spec}")
        if not len(self):
            raise ValueError("statistics takes at least one row: the data has none")
        self.verify()
        whole = self._whole_file(field)
        if whole is not None and (known := passes.statistics_from(storage.recall(whole, "statistics"))) is not None:
            return known
        data = self.keep(field)
        if spec != self.spec[field] or spec.dtype.kind == "b":
            data = data.map(field, cast("uint8" if spec.dtype.kind == "b" else spec.dtype))
        program = data.program(compose.only_row, ())
        shown = functools.partial(bar, f"statistics {field}", len(data), progress)
        found: Statistics = data._swept(lambda: passes.statistics(program, len(data), epoch_key(0, 0), shown))
        if whole is not None:
            arrays = {name: value.tolist() for name, value in found._asdict().items() if name != "count"}
            storage.remember(whole, "statistics", {**arrays, "count": found.count})
        return found

    def _whole_file(self, field: str) -> np.ndarray | None:
        """Give the array of a field that is as it lies in one file, with all rows and no stage."""
        samples = self._sources.get(field)
        if samples is None or any(field in step.outputs for step in self._steps) or samples.locate is not None:
            return None
        part, rows = samples.parts[0], samples.rows
        if len(samples.parts) > 1 or rows.table is not None or rows != Rows(part.count):
            return None
        return part.array if samples.shape == part.array.shape[1:] else None

    def describe(self, *, progress: bool = True) -> Description:
        """Give the numbers of every field over all rows, as a table of text or, in notebooks, HTML; `described[name]` is a
        Summary: count, nan, inf, and mean, std, min, max and histogram of the finite numbers, in float64; mean and std
        are NaN where sums pass 1.8e308.

        Two passes over the rows after their stages (random ones with the draws of seed 0, epoch 0), in chunks, on all
        CPUs, nothing kept. Rows that vary count at their own lengths, without padding. None for what is not of numbers.
        `progress` shows tqdm's bar, where it is installed.

        >>> import numpy as np, jitloader as jl
        >>> jl.Dataset(x=np.array([1.0, 2.0, np.nan, 4.0]), label=np.array([0, 1, 1, 2])).describe()
        4 rows
          field  type        count  nan  inf  mean   std     min  max  histogram
          x      float64 ()  4      1    0    2.333  1.247   1    4    █     █            █
          label  int64 ()    4      0    0    1      0.7071  0    2    ▄█▄
        """
        from .describe import Description, describe

        self._refuse_python("describe")
        self.verify()
        program = self.program(compose.only_row, ())
        shown = functools.partial(bar, "describe", len(self), progress)  # for each of the two
        found = self._swept(lambda: describe(program, len(self), epoch_key(0, 0), shown))
        return Description(dict(zip(self._fields, found, strict=True)), self.spec, len(self))

    def save(self, path: str | os.PathLike[str], *, progress: bool = True) -> None:
        """Write the rows, through their stages (random ones with the draws of seed 0, epoch 0), to a folder: a `.npy` a
        field and a manifest, whole or not at all. `jl.open(path)` reads it. A folder of fields that is there already is
        replaced.

        Ragged rows are kept as `name.npy`, all values, and `name.offsets.npy`; windows without a stage as the series they
        are cut from (`name.series.npy`) and a rule in the manifest, where that is smaller. `progress` shows tqdm's bar,
        where it is installed.
        """
        self._refuse_python("save")
        self.verify()
        made = {name for step in self._steps for name in step.outputs}
        by_rule = kept.by_rules({name: self._sources[name] for name in self._fields if name not in made})
        left = [name for name in self._fields if name not in by_rule.rules]
        count, key, specs, rules = len(self), epoch_key(0, 0), {}, dict(by_rule.rules)
        program = self.keep(*left).program(compose.only_row, ()) if left else None
        outputs = program.outputs if program is not None else ()
        for output in outputs:
            if output.form != "fixed" and (output.form != "ragged" or None in output.spec.shape[1:]):
                raise PipelineError(
                    f"save takes fields of one shape, or ragged; {output.name!r} is {output.spec}, padded in each batch: "
                    "pad it first by pad_rows(length)"
                )
        varied: dict[int, np.ndarray] = {}
        if program is not None and program.measure is not None:
            varied = self._swept(lambda: passes.lengths(program, count, key))
        for k, output in enumerate(outputs):
            rows = int(varied[k].sum()) if k in varied else count
            rest = output.spec.shape[1:] if k in varied else output.spec.shape
            specs[output.name] = output.spec.dtype, (rows, *(int(n or 0) for n in rest))
            if k in varied:
                rules[output.name] = kept.ragged_rule(output.name)
                specs[output.name + kept.OFFSETS] = np.dtype(np.int64), (count + 1,)
        series = {name: Dataset({name: base}) for name, base in by_rule.series.items()}
        for name, base in by_rule.series.items():
            specs[name] = base.spec.dtype, (len(series[name]), *(int(n or 0) for n in base.shape))
        specs.update({name: (table.dtype, table.shape) for name, table in by_rule.tables.items()})
        kept.check_names(self._fields, rules)
        meta = {kept.RULES: rules, kept.ORDER: [*self._fields]} if rules else None
        steps = (count if left else 0) + sum(map(len, series.values()))
        with (
            storage.create_fields(path, specs, meta) as arrays,
            bar(f"save {os.path.basename(storage.target_path(path))}", steps, progress) as tell,
        ):
            targets: list[Any] = [arrays[output.name] for output in outputs]
            for k, found in varied.items():
                offsets = arrays[outputs[k].name + kept.OFFSETS]
                np.cumsum(found, out=offsets[1:])
                targets[k] = compose.Ragged(targets[k], offsets)
            if program is not None:
                self._store(program, targets, tell)
            for name, table in by_rule.tables.items():
                arrays[name][...] = table
            for name, data in series.items():
                data._store(data.program(compose.only_row, ()), [arrays[name]], tell)

    def _store(self, program: compose.Program, targets: list[Any], tell: Callable[[int], None]) -> None:
        self._swept(lambda: passes.store(program, len(self), epoch_key(0, 0), targets, tell))

    def cache(self, path: str | os.PathLike[str], *, seed: int | None = None, progress: bool = True) -> Dataset:
        """Keep what the stages so far give in a folder, made once, in parallel: a data set of its `.npy` files, to which
        later stages are linked. Values and later draws are those of the data set without the cache.

        Fields that no stage changed stay as they are, by reference. A field is made again when its sources (arrays in
        memory by content, files by path, size and mtime), its rows, or its stages (user functions with all they refer
        to) are others; what the folder has of other fields goes. It is replaced as a whole or not at all, so a killed
        run leaves the old one; of several processes one makes it and the others wait. A random stage is refused, or
        with `seed` given keeps for all epochs the draws of that seed's epoch 0. `progress` shows tqdm's bar, where it
        is installed, from the first second on.

        Ragged rows are kept as their values and offsets. Raises PipelineError for random stages, applied functions, fields
        padded in each batch and arrays in memory of more than 4 GiB; DataError for a folder that holds anything else; OSError where the disk is full.

        >>> import tempfile, numpy as np, jitloader as jl
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = jl.Dataset(x=np.arange(4), y=np.arange(4)).map("x", jl.normalize(0, 2)).cache(folder)
        ...     data.map("x", jl.clip(0, 1))[:].x.tolist(), data.spec
        ([0.0, 0.5, 1.0, 1.0], {'x': float32 (), 'y': int64 ()})
        """
        from .cache import cached

        self._refuse_python("cache")
        seed = None if seed is None else whole_number("cache: seed", seed, None)
        self.verify()
        found = self._swept(lambda: cached(self._chain, path, seed, progress), seed or 0)
        linked = [part.array for name in self._fields if name not in found for part in self._sources[name].parts]
        places = {place.path for array in linked if (place := storage.mapping(array)) is not None}
        arrays = [a for f in found.values() for a in (f if isinstance(f, compose.Ragged) else (f,))]
        watches = [storage.watch(array) for array in arrays]
        ready: dict[str, Samples] = {}
        for name, array in found.items():
            varies = isinstance(array, compose.Ragged)
            ready[name] = ragged(*array, field=name) if varies else records(array, field=name)
        new = self._with({name: ready.get(name) or self._sources[name] for name in self._fields}, ())
        new._drawn = self._salt
        new._watches = tuple(w for w in self._watches if w.path in places) + tuple(w for w in watches if w is not None)
        return new

    def _refuse_python(self, what: str) -> None:
        if self._python:
            raise PipelineError(f"{what} runs a row at a time: take it before {self._python[0].told}")

    def _compiled(self, run: Callable[[], Any]) -> Any:
        """Run what may compile; where Numba refuses code that it could type, say whose."""
        try:
            return run()
        except jit.CompileError as error:
            named = ", ".join(repr(step.stage.name) for step in self._steps if step.stage.user) or "the kernel"
            where = f" [{error.where}]" if error.where else ""
            raise PipelineError(f"{named} cannot be compiled: {error.what}{where}") from None

    def _swept(self, run: Callable[[], Any], seed: int = 0) -> Any:
        try:
            return self._compiled(run)
        except passes.Stopped as stopped:
            raise self.failed(stopped.failure, seed, 0) from None

    def _emptied(self) -> Dataset:
        """Give the data set without its arrays, for a loader that was closed."""
        gone = {n: s._replace(parts=(), rows=s.rows._replace(table=None), rule=None) for n, s in self._sources.items()}
        new = self._with(gone)
        new._watches = ()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        new = object.__new__(Dataset)
        for samples in self._sources.values():
            for array in (array for part in samples.parts for array in (part.array, part.flat)):
                if storage.is_chunked(array):  # of which a part is in memory
                    memo[id(array)] = array
        for name in ("_fields", "_sources", "_steps", "_python", "_drawn"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new._batch, new._watches, new._programs = self._batch, _watches(new._sources), {}
        return new

    def __reduce__(self) -> Any:
        return pickling.reduced(self, "a data set")

    def _reduced(self) -> Any:
        return _restored, (self._sources, self._steps, self._fields, self._python, self._drawn)

    def by_value(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        """Give a function and arguments that make this data set again, stages and all, for a pickler that takes functions
        by value (cloudpickle): mapped files by their paths, other arrays along with it."""
        fields = {}
        for name, samples in self._sources.items():
            # An array without a file goes as the flat memory that offsets count in: pickling it would change its strides.
            places = [(storage.locate(part.array), part) for part in samples.parts]
            sent = [(at, part._replace(array=None, flat=part.flat if at is None else None)) for at, part in places]  # type: ignore
            fields[name] = sent, samples._replace(parts=(), rule=None)
        steps = tuple(step._replace(stage=tuple(step.stage)) for step in self._steps)  # type: ignore[arg-type]
        return _valued, (fields, steps, self._python, self._fields, self._drawn)

    @property
    def sources(self) -> dict[str, Samples]:
        """The fields before any stage."""
        return dict(self._sources)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The stages linked so far, in order."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a data set is not iterable: use jl.Loader(data, batch_size) for batches, or data[i] for a sample"
        )


def open(
    path: str | os.PathLike[str],
    *more: str | os.PathLike[str],
    fields: Sequence[str] | None = None,
    unpack: bool | str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Dataset:
    """Map what lies at a path or a URL to a data set: a folder of `.npy` or of Hugging Face `datasets`, or one file whose
    format names its fields.

    Formats are found by content: `.npy`, stored `.npz`, IDX, CIFAR binary, safetensors, HDF5, Arrow, Parquet, folders of
    Zarr. Files are mapped, not read, whatever their size; lists of free length come as `jl.ragged`, a structured array as
    its columns. Chunked datasets of HDF5 and Zarr are decoded when their rows are read. `fields` picks some. Parquet, and
    with `unpack=True` a compressed `.npz`, are decoded once into `.npy` files in the cache folder (or in the folder
    `unpack`), and found there as long as the file stays the same.

    What a URL holds (http, https; s3, gs and what else fsspec knows, with `storage_options` for it) is downloaded in
    parallel ranges to a local cache, which all processes share, and then mapped: once for each version of the file. An
    interrupted download goes on where it was. The cache lies in `JITLOADER_DATA_DIR`, else in the user's cache folder;
    the least recently used go where it would exceed `JITLOADER_DATA_LIMIT` bytes (50 GiB, or half of the free disk).
    `progress` shows tqdm's bar, where it is installed.

    Raises OSError or DataError naming path or URL (also where fields differ in length, and for a server that does not tell
    a file's length), ImportError naming the extra to install.

    >>> import tempfile, numpy as np, jitloader as jl
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jl.Dataset(x=np.arange(3)).save(folder)
    ...     len(jl.open(folder))
    3
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"open takes a path, got a {type(path).__name__}: give what is in memory to jl.Dataset")
    if isinstance(fields, (str, bytes)):
        raise TypeError(f"open: fields= takes a list of names, got {fields!r}: give [{fields!r}]")
    wanted = None if fields is None else [*fields]
    if wanted == []:
        raise ValueError("open: fields= names at least one field, got none")
    found, meta = storage.open_with_meta(
        path, *more, fields=wanted, unpack=unpack, options=storage_options, progress=progress
    )
    alone = next(iter(found.values()), None)
    records_alone = frames.columns(alone) if len(found) == 1 and isinstance(alone, np.ndarray) else None
    restored = records_alone or kept.restored(found, meta, wanted)
    try:
        return Dataset(restored)
    except ValueError as error:  # arrays that are no fields of one data set
        raise DataError(f"{storage.remote.shown(os.fsdecode(path))}: {error}") from None


def _open(path: Any, name: str) -> np.ndarray | storage.Column:
    try:
        return storage.open_array(path)
    except OSError as error:
        raise type(error)(error.errno, f"field {name!r}: {error.strerror}", error.filename) from None
    except ValueError as error:
        raise type(error)(f"field {name!r}: {error}") from None


def _restored(
    sources: dict[str, Samples], steps: tuple[Step, ...], fields: tuple[str, ...], made: tuple[Any, ...], drawn: int
) -> Dataset:
    """Give the data set that was pickled: files are mapped where they lie, other arrays came along."""
    data = object.__new__(Dataset)
    data._set(sources, steps, fields)
    data._python, data._watches, data._drawn = made, _watches(sources, steps), drawn
    return data


def _valued(
    fields: dict[str, Any], steps: tuple[Step, ...], applied: tuple[Any, ...], names: tuple[str, ...], drawn: int
) -> Dataset:
    """Give the data set that `by_value` took apart."""
    sources = {}
    for name, (places, samples) in fields.items():
        parts = []
        for place, part in places:
            if place is None:
                parts.append(part._replace(array=part.flat))
                continue
            array = storage.reopen(*place)
            parts.append(part._replace(array=array, flat=records(array, field=name).parts[0].flat))
        sources[name] = samples._replace(parts=tuple(parts))
    return _restored(sources, tuple(step._replace(stage=Stage(*step.stage)) for step in steps), names, applied, drawn)


def _watches(sources: Mapping[str, Samples], steps: Sequence[Step] = ()) -> tuple[storage.Watch, ...]:
    """Watch the files below some fields, and below what stages read."""
    arrays: dict[int, np.ndarray] = {}
    read = [part.array for samples in sources.values() for part in samples.parts]
    read += [param for step in steps for bound in step.bound for param in bound.params if isinstance(param, np.ndarray)]
    for array in read:
        below = storage.map_below(array)
        if below is not None:
            arrays.setdefault(id(below), array)  # of one map there may be thousands of arrays
    return tuple(watch for watch in map(storage.watch, arrays.values()) if watch is not None)


def _unnamed(value: Any) -> str:
    """Say how to name the fields of what came without a name."""
    if isinstance(value, Dataset):
        return "that is a Dataset already"
    if isinstance(value, (str, os.PathLike)):
        return "name the field: Dataset(x=path), or open a folder or file by jl.open(path)"
    return "name the field: Dataset(x=array)"


def _check_other(other: Any, what: str) -> None:
    if not isinstance(other, Dataset):
        kind = type(other).__name__
        raise TypeError(f"{what} takes a jl.Dataset, got {kind}: wrap arrays as jl.Dataset(x=array)")
