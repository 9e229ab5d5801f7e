"""A composed pipeline: its function, and what it takes to run it over rows, compiled or in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import jit
from ..spec import Spec
from ..stages import Step

BLOCK = 256  # positions turned into rows at a time
FIXED = ("first", "step", "count", "place", "key", "rows", "error")


class Ragged(NamedTuple):
    """Rows of different lengths in one batch: row i is values[offsets[i] : offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Output(NamedTuple):
    """One field of the batch as a kernel writes it: flat, `size` items of dtype `carrier` a row.

    Where rows vary, `form` is "longest" (padded to the longest of the batch, up to a multiple) or "ragged", `size` is
    the number of items of one element of the first axis, and `lengths` the field whose lengths it follows.
    """

    name: str
    spec: Spec
    carrier: np.dtype
    size: int
    form: str = "fixed"
    multiple: int = 1
    lengths: str = ""


class Program(NamedTuple):
    """A pipeline as one function: `function(first, step, count, place, key, rows, error, *order, *outputs, *arguments)`.

    It writes the samples at positions first, first + step, ... into rows place, place + 1, ... of the flat outputs, and
    returns 0, or 1 with `error` = (number of the failed step + 1 or 0 for a row out of range, row, position). Where
    rows vary in length, two int64 arrays follow each such output: the item at which each row starts, and how many
    elements of the first axis it has; `measure`, a program of the same form, gives the lengths they are made from.
    """

    source: str
    function: Callable[..., int]
    outputs: tuple[Output, ...]
    order: tuple[Any, ...]  # parameters of the order, as they were when composed; other epochs give others
    arguments: tuple[Any, ...]
    scratch: tuple[tuple[str, int], ...]  # dtype and size of per-thread buffers, the last arguments
    owners: tuple[int, ...]  # for each line of the source, the step it belongs to (-1: none)
    steps: tuple[Step, ...]
    notes: tuple[str, ...]  # how the steps were fused, a line each
    measure: Any = None  # Program | None

    def signature(self) -> tuple[jit.Type, ...]:
        """Give the kernel types of all arguments."""
        kinds: list[jit.Type] = [jit.INT] * 5 + [jit.Array("int64", 1)] * 2
        kinds += [jit.typeof(p) for p in self.order]
        for output in self.outputs:
            kinds.append(jit.Array(output.carrier.name, 1))
            if output.form != "fixed":
                kinds += [jit.Array("int64", 1)] * 2
        kinds += [jit.typeof(a) for a in self.arguments]
        return tuple(kinds + [jit.Array(name, 1) for name, _ in self.scratch])

    def worker(self, key: int, order: Sequence[Any]) -> Worker:
        """Give one thread's hold on the program."""
        return Worker(self, key, order)

    def load(self) -> jit.Kernel:
        """Give the program compiled."""
        return jit.load(self.function, self.signature(), name="fill")

    def places(self) -> list[int]:
        """Give the place of each output among the arguments."""
        at, found = len(FIXED) + len(self.order), []
        for output in self.outputs:
            found.append(at)
            at += 1 if output.form == "fixed" else 3
        return found

    def values(self) -> list[Any]:
        """Give one thread's arguments, with outputs of no rows."""
        outputs: list[Any] = []
        for output in self.outputs:
            outputs.append(np.zeros(0, output.carrier))
            if output.form != "fixed":
                outputs += [np.zeros(0, np.int64), np.zeros(0, np.int64)]
        own = [np.zeros(size, name) for name, size in self.scratch]
        fixed = [0, 1, 0, 0, 0, np.zeros(BLOCK, np.int64), np.zeros(4, np.int64)]
        return [*fixed, *self.order, *outputs, *self.arguments, *own]

    @property
    def nbytes(self) -> int:
        """Bytes of one row in all outputs that do not vary."""
        return sum(o.size * o.carrier.itemsize for o in self.outputs if o.form == "fixed")


class Worker:
    """One thread's hold on a program: its calls, its scratch, and the error that a failed call left."""

    def __init__(self, program: Program, key: int, order: Sequence[Any] | None = None, plain: bool = False) -> None:
        self.program = program
        self.key = key
        self.order = program.order if order is None else order
        self.call = self._bind(program, plain)
        self.measure = None if program.measure is None else self._bind(program.measure, plain)

    def _bind(self, program: Program, plain: bool) -> jit.Call:
        kernel = jit.plain(program.function, program.signature()) if plain else program.load()
        values = program.values()
        values[len(FIXED) : len(FIXED) + len(program.order)] = self.order
        values[4] = self.key
        return kernel.bind(*values)

    def lengths(self, first: int, step: int, count: int, place: int, into: Sequence[np.ndarray]) -> Failure | None:
        """Write the lengths of the rows at positions first, first + step, ... into arrays, from row `place` on."""
        assert self.measure is not None
        for at, array in zip(self.program.measure.places(), into, strict=True):
            self.measure.point(at, array, array.ctypes.data)
        return run(self.measure, first, step, count, place)

    def fill(self, first: int, step: int, count: int, place: int) -> Failure | None:
        """Write the rows at positions first, first + step, ... into the outputs, from row `place` on."""
        return run(self.call, first, step, count, place)


class WideWorker:
    """All threads of Numba's pool on one call: the same program with its rows parted by a `prange` loop.

    Launched under the process-wide lock. Not for user code that may raise, which a parallel loop would lose.
    """

    def __init__(self, program: Program, key: int, order: Sequence[Any], chunks: int) -> None:
        self.program, self.chunks, self.measure = program, chunks, None
        many = [f"p{k}" for k in range(len(program.values()) - len(FIXED) - len(program.scratch))]
        own = [f"w{k}" for k in range(len(program.scratch))]
        parts = [
            f"{w}[c * {max(size, 1)} : (c + 1) * {max(size, 1)}]"
            for w, (_, size) in zip(own, program.scratch, strict=True)
        ]
        heads = ["first", "step", "count", "place", "key", "rows", "error", "status", "chunks", *many, *own]
        block = f"rows[c * {BLOCK} : (c + 1) * {BLOCK}], error[c * 4 : c * 4 + 4]"
        given = ", ".join([block, *many, *parts])
        text = (
            f"def fill_wide({', '.join(heads)}):\n"
            "    for c in prange(chunks):\n"
            "        low = c * count // chunks\n"
            "        high = (c + 1) * count // chunks\n"
            f"        status[c] = fill(first + low * step, step, high - low, place + low, key, {given})\n"
            "    return 0\n"
        )
        scope: dict[str, Any] = {"prange": jit.loop_in_parallel(), "fill": program.function}
        exec(compile(text, jit.GENERATED, "exec"), scope)
        values = program.values()
        inner = values[len(FIXED) : len(values) - len(program.scratch)]
        inner[: len(order)] = order
        self.status = np.zeros(chunks, np.int64)
        self.error = np.zeros(4 * chunks, np.int64)
        wide = [np.zeros(max(size, 1) * chunks, name) for name, size in program.scratch]
        rows = np.zeros(BLOCK * chunks, np.int64)
        every = [0, 1, 0, 0, key, rows, self.error, self.status, chunks, *inner, *wide]
        kinds = list(program.signature())
        types = [*kinds[:7], jit.Array("int64", 1), jit.INT, *kinds[7:]]
        self.call: Any = _Shifted(jit.load(scope["fill_wide"], types, parallel=True, name="fill_wide").bind(*every))

    def fill(self, first: int, step: int, count: int, place: int) -> Failure | None:
        """Write the rows at positions first, first + step, ... into the outputs, from row `place` on."""
        self.call.inner.head(first, step, count, place)
        with jit.launch():
            self.call.inner()
        for c in np.flatnonzero(self.status):
            error = self.error[4 * c : 4 * c + 4]
            return Failure(int(error[0]) - 1, int(error[1]), int(c) * count // self.chunks + int(error[2]))
        return None


class _Shifted:
    """A call whose arguments after the fixed ones lie two further on."""

    def __init__(self, inner: jit.Call) -> None:
        self.inner = inner

    def point(self, i: int, array: np.ndarray, address: int) -> None:
        self.inner.point(i + 2, array, address)

    def set(self, i: int, value: Any) -> None:
        self.inner.set(i + 2, value)


class Failure(NamedTuple):
    """Where a call stopped: number of the step (-1: the row is out of range, -2: a kernel raised), row, rows done."""

    number: int
    row: int
    done: int


def run(call: jit.Call, first: int, step: int, count: int, place: int) -> Failure | None:
    """Run one call over positions; gives where it stopped, or None."""
    call.head(first, step, count, place)
    try:
        status = call()
    except jit.KernelError:
        error = call.value(6)
        return Failure(-2, int(error[1]), int(error[3]))
    if not status:
        return None
    error = call.value(6)
    return Failure(int(error[0]) - 1, int(error[1]), int(error[2]))


class Layout(NamedTuple):
    """Where the rows of an output that varies lie: the first item and the extent of each row, and the total of items."""

    starts: np.ndarray
    extents: np.ndarray
    total: int


def lay_out(output: Output, lengths: np.ndarray, batch: int) -> Layout:
    """Place rows of these lengths one after the other, those of each run of `batch` rows at the length of the longest."""
    extents = lengths
    if output.form == "longest" and len(lengths):
        heads = np.arange(0, len(lengths), batch)
        most = np.maximum.reduceat(lengths, heads)
        most = -(-most // output.multiple) * output.multiple
        extents = np.repeat(most, np.diff([*heads, len(lengths)]))
    ends = np.cumsum(extents) * output.size
    total = int(ends[-1]) if len(ends) else 0
    return Layout(ends - extents * output.size, np.ascontiguousarray(extents), total)


def shape_output(output: Output, buffer: np.ndarray, rows: int) -> np.ndarray:
    """Give a flat buffer as (rows, *shape) of the field's own dtype."""
    shape = (rows, *(int(n or 0) for n in output.spec.shape))
    if output.spec.dtype.itemsize == 0:
        return np.zeros(shape, output.spec.dtype)
    return _own_dtype(output, buffer[: rows * output.size]).reshape(shape)


def shape_varied(output: Output, buffer: np.ndarray, layout: Layout, low: int, high: int) -> Any:
    """Give rows low .. high of an output that varies: (rows, longest, *rest), or a Ragged."""
    rest = tuple(int(n or 0) for n in output.spec.shape[1:])
    if high == low:
        empty = _own_dtype(output, buffer[:0])
        return (
            Ragged(empty.reshape(0, *rest), np.zeros(1, np.int64))
            if output.form == "ragged"
            else empty.reshape(0, 0, *rest)
        )
    begin = int(layout.starts[low])
    end = int(layout.starts[high - 1] + layout.extents[high - 1] * output.size)
    values = _own_dtype(output, buffer[begin:end])
    if output.form == "longest":
        return values.reshape(high - low, int(layout.extents[low]), *rest)
    offsets = np.zeros(high - low + 1, np.int64)
    np.cumsum(layout.extents[low:high], out=offsets[1:])
    return Ragged(values.reshape(int(offsets[-1]), *rest), offsets)


def _own_dtype(output: Output, buffer: np.ndarray) -> np.ndarray:
    return buffer if output.carrier == output.spec.dtype else buffer.view(output.spec.dtype)


def collect(program: Any, worker: Any, first: int, step: int, count: int) -> tuple[list[Any], Failure | None]:
    """Give the samples at positions first, first + step, ... as one batch of fresh arrays, and where that stopped.

    `program` and its `worker` are a Program and a Worker, or what behaves as they do.
    """
    lengths: dict[str, np.ndarray] = {}
    if program.measure is not None:
        lengths = {o.name: np.zeros(count, np.int64) for o in program.measure.outputs}
        failed = worker.lengths(first, step, count, 0, list(lengths.values()))
        if failed is not None:
            return [], failed
    made: list[tuple[np.ndarray, Layout | None]] = []
    for at, output in zip(program.places(), program.outputs, strict=True):
        if output.form == "fixed":
            made.append((np.zeros(count * output.size, output.carrier), None))
        else:
            layout = lay_out(output, lengths[output.lengths], max(count, 1))
            made.append((np.zeros(layout.total, output.carrier), layout))
            worker.call.set(at + 1, layout.starts)
            worker.call.set(at + 2, layout.extents)
        worker.call.set(at, made[-1][0])
    failed = worker.fill(first, step, count, 0)
    arrays = [
        shape_output(o, b, count) if layout is None else shape_varied(o, b, layout, 0, count)
        for o, (b, layout) in zip(program.outputs, made, strict=True)
    ]
    return arrays, failed
