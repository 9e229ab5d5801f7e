"""The door to Ray: blocks of Ray Data through our kernels, data sets there and back, and state in Train's checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from . import rng
from .dataset import Dataset
from .loader import Loader
from .ranks import whole_number

STATE = "jitloader.json"  # in a checkpoint's folder


def _ray(part: str) -> Any:
    try:
        return __import__(f"ray.{part}", fromlist=["_"])
    except ImportError as problem:
        raise ImportError(f"this needs Ray: pip install 'ray[{part}]'") from problem


def _blocks(source: Any) -> Iterator[dict[str, np.ndarray]]:
    """Give whole blocks of Ray Data as arrays by column; raises TypeError naming a column of Python objects."""
    for block in source.iter_batches(batch_size=None, batch_format="numpy"):
        for name, column in block.items():
            if not isinstance(column, np.ndarray) or column.dtype.hasobject:
                raise TypeError(
                    f"column {name!r} holds Python objects (text, or rows that differ in shape), which no kernel takes: "
                    "encode or pad it in Ray, or leave it out by select_columns"
                )
        yield block


class Batches:
    """Batches of a Ray Data source, epoch after epoch; see `batches`."""

    def __init__(
        self, source: Any, batch_size: int, link: Callable[[Dataset], Dataset] | None, window: int, shuffle: bool,
        seed: int, drop_last: bool, steps: int | None,
    ) -> None:  # fmt: skip
        self.source, self.batch_size, self.link, self.window = source, batch_size, link, window
        self.shuffle, self.seed, self.drop_last, self.steps = shuffle, seed, drop_last, steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` gives: the shuffle within windows and all draws depend on it."""
        self.epoch = whole_number("epoch", epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._run(epoch)

    def _run(self, epoch: int) -> Iterator[Any]:
        given = 0
        for number, (columns, last) in enumerate(self._windows()):
            data = Dataset(columns)
            data = data if self.link is None else self.link(data)
            seed = int(rng.mix(rng.subkey(self.seed, number)))  # rows are numbered within their window
            short = last and not self.drop_last
            with Loader(
                data, self.batch_size, shuffle=self.shuffle, seed=seed, drop_last=not short, rank=0, world_size=1
            ) as loader:
                loader.epoch = epoch
                for batch in loader:
                    yield batch
                    given += 1
                    if given == self.steps:
                        return
        if self.steps is not None:
            raise ValueError(
                f"the source gave {given} batches of {self.batch_size} rows, not the {self.steps} that were agreed: "
                "every worker must be given as many (count the rows, and take the least)"
            )

    def _windows(self) -> Iterator[tuple[dict[str, np.ndarray], bool]]:
        """Give runs of rows of whole batches, about `window` long; what is left over goes into the next run.

        Left over are the last rows to have come, so that none waits for more than one window.
        """
        held: list[dict[str, np.ndarray]] = []
        rows = 0
        for block in _blocks(self.source):
            if held and (block.keys() != held[0].keys()):
                raise ValueError(f"a block has the columns {', '.join(block)}, those before {', '.join(held[0])}")
            count = len(next(iter(block.values()))) if block else 0
            if count:
                held.append(block)
                rows += count
            if rows >= self.window:
                whole = {name: np.concatenate([b[name] for b in held]) for name in held[0]}
                full = rows - rows % self.batch_size
                held = [{name: column[full:] for name, column in whole.items()}]
                rows -= full
                if full:
                    yield {name: column[:full] for name, column in whole.items()}, False
        if rows >= (self.batch_size if self.drop_last else 1):
            yield {name: np.concatenate([b[name] for b in held]) for name in held[0]}, True


def batches(
    source: Any,
    batch_size: int,
    link: Callable[[Dataset], Dataset] | None = None,
    *,
    window: int = 65_536,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    steps: int | None = None,
) -> Batches:
    """Give batches of a Ray Data source, shuffled within windows and through our stages: NamedTuples of arrays.

    source : a `ray.data.Dataset`, what `ray.train.get_dataset_shard` gives, or anything with their `iter_batches`.
    link : a function of a jl.Dataset over the columns of a window that links stages (or any access pattern) to it.
    window : rows held and shuffled at a time; blocks come in the order of the source.
    drop_last : leave out a last batch that is short.
    steps : batches an epoch, where all workers must have the same number: shards of `get_dataset_shard` have equal row
        counts, so that equal batch sizes give equal steps; for others take the least `rows // batch_size` of all
        workers. A source that ends before is a ValueError.

    Each `iter()` is an epoch, with other draws and another shuffle; `set_epoch` chooses one. There is no resuming within
    an epoch: a stream has no positions. Raises TypeError naming a column of Python objects.

    >>> import numpy as np, jitloader as jl, jitloader.ray
    >>> class Source:
    ...     def iter_batches(self, batch_size, batch_format):
    ...         return ({"x": np.arange(k, k + 10)} for k in range(0, 100, 10))
    >>> found = jl.ray.batches(Source(), 16, lambda data: data.map("x", jl.cast("float32")), window=40)
    >>> [batch.x.shape for batch in found]
    [(16,), (16,), (16,), (16,), (16,), (16,)]
    """
    if not hasattr(source, "iter_batches"):
        raise TypeError(f"batches takes a source with iter_batches, got {type(source).__name__}")
    batch_size = whole_number("batch_size", batch_size, 1)
    window = max(batch_size, whole_number("window", window, 1))
    steps = None if steps is None else whole_number("steps", steps, 1)
    seed = whole_number("seed", seed, None)
    return Batches(source, batch_size, link, window, bool(shuffle), seed, bool(drop_last), steps)


def from_ray(source: Any) -> Dataset:
    """Read a Ray Data source into memory: a field for each column, in the order of its blocks.

    Raises TypeError naming a column of Python objects, ValueError where there are no rows.

    >>> import numpy as np, jitloader as jl, jitloader.ray
    >>> class Source:
    ...     def iter_batches(self, batch_size, batch_format):
    ...         return ({"x": np.arange(k, k + 2)} for k in (0, 2))
    >>> jl.ray.from_ray(Source())[:].x
    array([0, 1, 2, 3])
    """
    if not hasattr(source, "iter_batches"):
        raise TypeError(f"from_ray takes a source with iter_batches, got {type(source).__name__}")
    blocks = [block for block in _blocks(source) if block and len(next(iter(block.values())))]
    if not blocks:
        raise ValueError("the source has no rows")
    return Dataset({name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]})


class _Reader:
    """Reads rows of a data set by their numbers, on whichever node it is sent to."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __reduce__(self) -> Any:  # by Ray's pickler, which takes stages by value
        make, parts = self.data.by_value()
        return _reader, (make, parts)

    def __call__(self, block: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(self.data[np.asarray(block["id"])]._asdict())


def _reader(make: Callable[..., Dataset], parts: tuple[Any, ...]) -> _Reader:
    return _Reader(make(*parts))


def to_ray(data: Dataset, *, blocks: int = 64, rows: int = 4096) -> Any:
    """Give a data set as a `ray.data.Dataset`, a column a field, through its stages (with the draws of seed 0, epoch 0).

    Nothing is read until Ray asks: each task maps the files where it runs, so paths must hold on every node; arrays in
    memory travel with it. `blocks` is into how many pieces at most Ray parts it, `rows` how many are read in one go.
    """
    if not isinstance(data, Dataset):
        raise TypeError(f"to_ray takes a jl.Dataset, got {type(data).__name__}")
    varied = [name for name, spec in data.spec.items() if spec.ragged]
    if varied:
        raise TypeError(f"to_ray takes fields of one shape; {varied[0]!r} varies: pad it first")
    numbers = _ray("data").range(len(data), override_num_blocks=max(1, min(blocks, len(data))))
    return numbers.map_batches(_Reader(data), batch_format="numpy", batch_size=rows)


def report(metrics: dict[str, Any], loader: Loader, folder: str | os.PathLike[str] | None = None) -> None:
    """Report metrics to Ray Train with a checkpoint that holds the loader's state, and what lies in `folder` besides.

    Every worker calls it, as `ray.train.report`; the state is the same on all of them. `resume(loader)` goes on from it,
    with any number of workers.
    """
    train = _ray("train")
    with contextlib.ExitStack() as stack:
        path = os.fspath(folder) if folder is not None else stack.enter_context(tempfile.TemporaryDirectory())
        with open(os.path.join(path, STATE), "w") as file:
            json.dump(loader.state_dict(), file)
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(path))


def resume(loader: Loader, checkpoint: Any = None) -> bool:
    """Let a loader go on where a checkpoint of Ray Train left off, with any number of workers; False where there is none.

    checkpoint : the `checkpoint` of another run's result, handed over in `train_loop_config`; left out, the last of this
        run, which is there after a worker failed or the run was started again under its name.

    Raises StateError where the state is of another data set or order.
    """
    checkpoint = _ray("train").get_checkpoint() or checkpoint
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as path:
        file = os.path.join(path, STATE)
        if not os.path.exists(file):
            return False
        with open(file) as text:
            loader.load_state_dict(json.load(text))
    return True
