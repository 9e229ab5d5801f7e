"""Rows from anywhere into a folder: made, taken or gathered in blocks by several threads, in order, and resumed.

Blocks are made ahead by a pool of threads and appended in order by the calling one (`storage.grow`): so all kinds of rows,
of known number or not, of one shape or not, go the same way, and "how far" is one number.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import frames, jit, storage
from .bars import bar
from .cache import fingerprints
from .compose import Ragged
from .dataset import Dataset
from .dataset import open as _open
from .errors import PipelineError
from .python import raised_at
from .ranks import whole_number
from .replay import fitted, row_spec

if TYPE_CHECKING:
    from concurrent.futures import Future

BLOCK = 4 << 20  # bytes of rows that are handed on together
SLOW, QUICK = 0.5, 0.05  # seconds between which a block should take: what is slow is made in small ones
MOST = 4096  # rows in a block

Specs = dict[str, "tuple[np.dtype, tuple[int | None, ...]]"]
# What a block of rows is when it is written: an array a field, or values and lengths; and the number of rows.
Block = tuple[dict[str, Any], int]
Samples = tuple[list[Any], "Exception | None"]


class Source(NamedTuple):
    """Where rows come from: their number (None where it is not known), the rows low .. high - 1 as samples and the error
    that ended them, or as a batch of arrays; else all of them one after the other. `job` is what tells it from other
    sources, `threads` may ask at once."""

    count: int | None  # type: ignore[assignment]
    job: str
    threads: int
    samples: Callable[[int, int], Samples] | None = None
    batch: Callable[[int, int], dict[str, Any]] | None = None
    each: Iterable[Any] | None = None


def write(
    folder: str | os.PathLike[str],
    rows: Any,
    make: Callable[[int], Any] | None = None,
    /,
    *,
    threads: int | None = None,
    progress: bool = True,
    resume: bool = True,
    **specs: Any,
) -> Dataset:
    """Write rows to a folder, a `.npy` a field and a manifest, whole or not at all, and open it.

    Parameters
    ----------
    rows : a number of rows, with `make(i)` that gives row i; a sequence or a data set of torch's or Hugging Face's; a
        jl.Dataset, stages and all; or anything to iterate over, of any length, also one larger than memory.
    make : the function of the row. It gives a dict of fields, a NamedTuple, a tuple (fields x, y, or x0, x1, ..., or
        the names of `specs`) or one value; values are numbers, arrays, CPU tensors, or what np.asarray takes.
    threads : how many make rows at once; left out, all CPUs for `make` and a jl.Dataset, else 1, for not every data set
        bears to be asked from several threads. Something to iterate over is iterated by one.
    resume : what was stopped, by an error, Ctrl-C or kill -9, goes on from its last row on disk (a second of work may be
        lost) when it is called again: with `make` or a sequence the rows that are missing are made, of something to
        iterate over as many are skipped by itertools.islice. A job that differs (the code of `make`, number of rows,
        specs) starts over, with a warning. False always starts over.
    specs : name=dtype or name=(dtype, shape of a row), as `jl.ring` takes them; where the first axis is None, as in
        tokens=("int32", (None,)), rows vary in length: `jl.open` gives them as `jl.ragged`. Fields left out are as in
        the first row.

    A version that the folder holds stays until all rows are there. Raises PipelineError naming the row where `make` fails
    and where a value does not fit its spec; OSError where the disk is full; BlockingIOError while another one writes there.

    >>> import tempfile, jitloader as jl
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = jl.write(folder, 4, lambda i: {"x": [i, i * i], "t": range(i)}, x=("int32", (2,)), t=("int64", (None,)))
    ...     data.spec, data[3].x.tolist(), data[3].t.tolist()
    ({'x': int32 (2,), 't': int64 (?,)}, [3, 9], [0, 1, 2])
    """
    given = {name: row_spec(name, spec) for name, spec in specs.items()}
    source = _source(rows, make)
    job = _hash(repr((source.job, source.count, sorted(given.items()))))
    wanted = source.threads if threads is None else whole_number("write: threads", threads, 1)
    known = storage.begun(folder, job) if resume else None
    if known is None:
        source, known = _looked(source, given)
    name = os.path.basename(storage.target_path(folder))
    with storage.grow_fields(folder, known, job, resume) as growing:
        if source.each is not None:
            source = source._replace(each=_skipped(source.each, growing.rows))
        with (
            bar(f"write {name}", source.count, progress, done=growing.rows) as tell,
            contextlib.closing(_blocks(source, known, growing.rows, wanted)) as blocks,
        ):
            for fields, count in blocks:
                growing.append(fields, count)
                tell(count)
    return _open(folder)


def convert(
    source: Any,
    folder: str | os.PathLike[str],
    /,
    *,
    threads: int | None = None,
    progress: bool = True,
    resume: bool = True,
    **specs: Any,
) -> Dataset:
    """Write what `jl.open` reads (a path, a URL), a frame or table, or any rows that `jl.write` takes, to a folder of
    `.npy`, and open it.

    Everything else is as in `jl.write`: threads, progress, resume, errors.

    >>> import tempfile, numpy as np, jitloader as jl
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(folder + "/pair.npz", x=np.eye(2), y=np.arange(2))
    ...     jl.convert(folder + "/pair.npz", folder + "/pair")
    Dataset of 2 rows
      x: records float64 (2,)
      y: records int64 ()
    """
    if isinstance(source, (str, os.PathLike)):
        source = _open(source, progress=progress)
    elif hasattr(source, "keys") or (not _of_hugging_face(source) and frames.columns(source) is not None):
        source = Dataset(source)
    return write(folder, source, threads=threads, progress=progress, resume=resume, **specs)


# -- where rows come from ---------------------------------------------------------------------------------------------


def _source(rows: Any, make: Callable[[int], Any] | None) -> Source:
    kind = f"{type(rows).__module__}.{type(rows).__qualname__}"
    if make is not None:
        if not callable(make):
            raise TypeError(f"write takes a function of the row, got {make!r}")
        count = whole_number("write: the number of rows", rows, 0)
        return Source(count, _told(make), jit.available_cpus(), samples=_called(make))
    if isinstance(rows, (int, np.integer)) or callable(rows) and not hasattr(rows, "__iter__"):
        raise TypeError("write takes a number of rows and a function: jl.write(folder, 1000, make)")
    if isinstance(rows, Dataset):
        return Source(len(rows), _told_of(rows), jit.available_cpus(), batch=_gathered(rows))
    if isinstance(rows, (str, bytes, os.PathLike)):
        raise TypeError("write takes rows; jl.convert(path, folder) takes what lies at a path")
    if isinstance(rows, Mapping):
        raise TypeError("write takes rows; arrays by name are jl.Dataset(arrays), which saves itself")
    iterated = any(base.__name__ == "IterableDataset" for base in type(rows).__mro__)
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not iterated:
        mark = getattr(rows, "_fingerprint", "")  # of Hugging Face's
        if _of_hugging_face(rows):
            return Source(len(rows), f"{kind} {mark}", 1, samples=_sliced(rows.with_format("numpy")))
        return Source(len(rows), f"{kind} {mark}", 1, samples=_called(rows.__getitem__))
    try:
        each = iter(rows)
    except TypeError:
        raise TypeError(f"write takes rows: something to iterate over, got a {type(rows).__name__}") from None
    return Source(len(rows) if hasattr(rows, "__len__") and not iterated else None, kind, 1, each=each)


def _of_hugging_face(rows: Any) -> bool:
    return type(rows).__module__.startswith("datasets.") and hasattr(rows, "with_format")


def _called(make: Callable[[int], Any]) -> Callable[[int, int], Samples]:
    def samples(low: int, high: int) -> Samples:
        found: list[Any] = []
        try:
            for row in range(low, high):
                found.append(make(row))  # what was made before an error stays
        except Exception as error:
            return found, error
        return found, None

    return samples


def _sliced(columns: Any) -> Callable[[int, int], Samples]:
    """Of Hugging Face's data sets rows are read by slices: its own `data[i]` decodes a table for each."""

    def samples(low: int, high: int) -> Samples:
        found = columns[low:high]
        return [{name: column[k] for name, column in found.items()} for k in range(high - low)], None

    return samples


def _gathered(data: Dataset) -> Callable[[int, int], dict[str, Any]]:
    def batch(low: int, high: int) -> dict[str, Any]:
        found = data.gather(np.arange(low, high))
        if not isinstance(found, tuple) or not hasattr(found, "_fields"):
            raise PipelineError(f"write takes batches of fields, and what was applied gives a {type(found).__name__}")
        names = data.fields if len(data.fields) == len(found) else found._fields
        return dict(zip(names, found, strict=True))

    return batch


def _failed(row: int, error: BaseException) -> PipelineError:
    where = raised_at(error)
    return PipelineError(f"write: row {row}: {type(error).__name__}: {error}" + (f" [{where}]" if where else ""))


def _told(make: Callable[..., Any]) -> str:
    """Tell a function from others by its code, that of the functions of its module and closure which it names, and the
    plain values it names: what is large, data above all, is not looked into."""
    told, todo, seen = [], [make], set()
    while todo:
        function = todo.pop()
        function = getattr(function, "__func__", getattr(function, "func", function))
        if not isinstance(function, types.FunctionType):
            told.append(f"{type(function).__module__}.{type(function).__qualname__}")
            continue
        if function in seen:
            continue
        seen.add(function)
        values = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        codes = [function.__code__]
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            told.append(repr((code.co_code, code.co_names, [c for c in code.co_consts if c not in codes])))
            values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        for value in [*values, *(function.__defaults__ or ())]:
            if isinstance(value, types.FunctionType):
                if value.__module__ == function.__module__:
                    todo.append(value)
            elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
                told.append(repr(value))
    return _hash("\n".join(told))


def _hash(text: str) -> str:
    import hashlib  # 4 ms that the import of this package need not wait for

    return hashlib.sha256(text.encode()).hexdigest()


def _told_of(data: Dataset) -> str:
    """Tell a data set from others, as `cache` does; what is too large to be known again begins anew each time."""
    applied = [_told(made.function) if hasattr(made, "function") else made.told for made in data._python]
    try:
        return repr((fingerprints(data._chain, data.fields, 0), applied))
    except PipelineError:
        return os.urandom(16).hex()


def default_names(count: int) -> tuple[str, ...]:
    """Name the parts of a tuple."""
    return ("x",) if count == 1 else ("x", "y") if count == 2 else tuple(f"x{k}" for k in range(count))


def _looked(source: Source, given: Specs) -> tuple[Source, Specs]:
    """Give specs of all fields, those left out as in the first row; and the source, of which that row was taken."""
    if source.batch is not None and source.count:
        found = {}
        for name, value in source.batch(0, 1).items():
            array = value.values if isinstance(value, Ragged) else np.asarray(value)
            found[name] = array.dtype, (None, *array.shape[1:]) if isinstance(value, Ragged) else array.shape[1:]
        return source, _over(found, given)
    first: list[Any] = []
    if source.each is not None:
        each = iter(source.each)
        first = list(itertools.islice(each, 1))
        source = source._replace(each=itertools.chain(first, each))
    elif source.samples is not None and source.count:
        (first, error), rest = source.samples(0, 1), source.samples
        if error is not None:
            raise _failed(0, error) from None

        def samples(low: int, high: int) -> Samples:
            if low:
                return rest(low, high)
            more, error = rest(1, high)
            return first + more, error

        source = source._replace(samples=samples)
    if not first:
        if given:
            return source, given
        raise ValueError("write: no rows to take the fields from: give specs, as x='float32'")
    found = {}
    parts = len(first[0]) if isinstance(first[0], tuple) else 1
    for name, value in fields_of(first[0], tuple(given) if len(given) == parts else (), 0).items():
        if name not in given:
            array = _array(value, name, 0)
            if array.dtype.kind in "SU":
                raise PipelineError(f"write: field {name!r} is text, of any length: give its spec, as {name}='U20'")
            found[name] = array.dtype, array.shape
        else:
            found[name] = given[name]
    return source, _over(found, given)


def _over(found: Specs, given: Specs) -> Specs:
    for name in given:
        if name not in found:
            raise ValueError(f"write: spec of a field {name!r}; rows have {', '.join(found)}")
    return {**found, **given}


def _skipped(each: Iterable[Any], count: int) -> Iterator[Any]:
    """Skip the rows that an earlier run wrote."""
    rest = iter(each)
    skipped = sum(1 for _ in itertools.islice(rest, count))
    if skipped < count:
        raise ValueError(
            f"write: {count} rows were written before, and now there are {skipped}: is it the same source?"
        )
    return rest


# -- blocks -----------------------------------------------------------------------------------------------------------


def _blocks(source: Source, specs: Specs, start: int, threads: int) -> Generator[Block, None, None]:
    """Give the rows from `start` on in blocks, in order; several are made at once."""
    row_bytes = sum(d.itemsize * int(np.prod([n or 1 for n in shape], dtype=np.int64)) for d, shape in specs.values())
    most = max(1, min(MOST, BLOCK // max(row_bytes, 1)))
    if source.each is not None:
        each, at = iter(source.each), start
        while True:
            samples, ended = _some(each, most)
            if samples:
                yield pack(samples, specs, at), len(samples)
            at += len(samples)
            if isinstance(ended, StopIteration):
                return
            if ended is not None:
                raise _failed(at, ended)
    assert source.count is not None

    def made(low: int, high: int) -> tuple[Block, float, Exception | None]:
        begin = time.perf_counter()
        if source.batch is not None:
            return (_checked(source.batch(low, high), specs, low), high - low), 0.0, None
        assert source.samples is not None
        samples, error = source.samples(low, high)
        failed = None if error is None else _failed(low + len(samples), error)
        return (pack(samples, specs, low), len(samples)), time.perf_counter() - begin, failed

    at, size = start, 1 if source.samples is not None else most
    from concurrent.futures import ThreadPoolExecutor  # with the logging that it brings, 5 ms of an import

    pool = ThreadPoolExecutor(threads, "jitloader-write")
    ahead: collections.deque[Future[tuple[Block, float, Exception | None]]] = collections.deque()
    try:
        while ahead or at < source.count:
            while at < source.count and len(ahead) < 2 * threads:
                stop = min(at + size, source.count)
                ahead.append(pool.submit(made, at, stop))
                at = stop
            block, seconds, error = ahead.popleft().result()
            if block[1]:
                yield block
            if error is not None:
                raise error
            size = min(size * 2, most) if seconds < QUICK else max(1, size // 2) if seconds > SLOW else size
    finally:
        pool.shutdown(cancel_futures=True)


def _some(each: Iterator[Any], most: int) -> Samples:
    """Take some samples, and what ended that: after an exception an iterator may well say that there is no more."""
    samples: list[Any] = []
    begin = time.perf_counter()
    while len(samples) < most and (not samples or time.perf_counter() - begin < QUICK):
        try:
            samples.append(next(each))
        except Exception as error:
            return samples, error
    return samples, None


def fields_of(sample: Any, names: tuple[str, ...], row: int) -> dict[str, Any]:
    """Give a sample as its fields by name."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return dict(zip(sample._fields, sample, strict=True))
    values = sample if isinstance(sample, tuple) else (sample,)
    if names and len(names) != len(values):
        raise PipelineError(f"write: row {row} has {len(values)} parts, the fields are {', '.join(names)}")
    return dict(zip(names or default_names(len(values)), values, strict=True))


def pack(samples: list[Any], specs: Specs, row: int) -> dict[str, Any]:
    """Give samples as an array a field, or as values and lengths, each value checked against its spec."""
    names = tuple(specs)
    rows = [fields_of(sample, names, row + k) for k, sample in enumerate(samples)]
    for k, one in enumerate(rows):
        if one.keys() != specs.keys():
            raise PipelineError(
                f"write: row {row + k} has the fields {', '.join(one) or 'none'}, not {', '.join(names)}"
            )
    packed: dict[str, Any] = {}
    for name, (dtype, shape) in specs.items():
        arrays = [_fitted(one[name], name, dtype, shape, row + k) for k, one in enumerate(rows)]
        if shape and shape[0] is None:
            lengths = np.array([len(array) for array in arrays], np.int64)
            packed[name] = np.concatenate(arrays).astype(dtype, copy=False), lengths
        else:
            out = np.empty((len(rows), *(int(n or 0) for n in shape)), dtype)
            for k, array in enumerate(arrays):
                out[k] = array
            packed[name] = out
    return packed


def _array(value: Any, name: str, row: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise PipelineError(f"write: row {row}, field {name}: {type(error).__name__}: {error}") from None
    if array.dtype.hasobject:
        what = "an integer past 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
        raise PipelineError(f"write: row {row}, field {name}: numbers or text expected, got {what}")
    return array


def _fitted(value: Any, name: str, dtype: np.dtype, shape: tuple[int | None, ...], row: int) -> np.ndarray:
    """Give a value as an array that its spec holds."""
    array = _array(value, name, row)
    varied = bool(shape) and shape[0] is None
    if varied and array.ndim == 1 and array.size == 0:
        array = np.empty((0, *(int(n or 0) for n in shape[1:])), dtype)  # an empty list is of any kind
    if array.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
        free = (
            f": give {name}=('{dtype}', (None, ...)) where rows vary"
            if array.ndim and array.shape[1:] == shape[1:] and not varied
            else ""
        )
        raise PipelineError(f"write: row {row}, field {name}: shape {shape} expected, got {array.shape}{free}")
    try:
        return fitted(name, array, dtype)
    except (ValueError, TypeError) as error:
        raise PipelineError(f"write: row {row}, {error}") from None


def _checked(batch: Mapping[str, Any], specs: Specs, row: int) -> dict[str, Any]:
    """Give a batch as blocks, where it is of the specs."""
    packed: dict[str, Any] = {}
    for name, (dtype, shape) in specs.items():
        value = batch[name]
        array = value.values if isinstance(value, Ragged) else np.asarray(value)
        found = (None, *array.shape[1:]) if isinstance(value, Ragged) else array.shape[1:]
        if found != shape:
            raise PipelineError(f"write: rows from {row} on, field {name}: shape {shape} expected, got {found}")
        try:
            array = fitted(name, array, dtype)
        except (ValueError, TypeError) as error:
            raise PipelineError(f"write: rows from {row} on, {error}") from None
        packed[name] = (array, np.diff(value.offsets)) if isinstance(value, Ragged) else array
    return packed
