"""A composed pipeline: its function, and what it takes to run it over rows, compiled or in plain Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import jit, residency
from ..spec import Spec
from ..stages import Step

COUNTS = jit.Array("int64", 1)
BLOCK = 256  # positions turned into rows at a time
FIXED = ("first", "step", "count", "place", "key", "rows", "error", "find", "order")


class Ragged(NamedTuple):
    """Rows of different lengths in one batch: row i is values[offsets[i] : offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


# NamedTuple's own takes the number of rows for the number of its fields; `_replace` goes through it.
Ragged._make = classmethod(lambda cls, pair: cls(*pair))  # type: ignore


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


class Later:
    """A program that is written when it is first asked for."""

    def __init__(self, make: Callable[[], Program]) -> None:
        self._make = make
        self._made: Program | None = None

    def __call__(self) -> Program:
        self._made = self._made or self._make()  # two threads at once write the same
        return self._made


class Program(NamedTuple):
    """A pipeline as one function: `function(first, step, count, place, key, rows, error, find, order, *outputs, *arguments)`.

    It writes the samples at positions first, first + step, ... into rows place, place + 1, ... of the flat outputs, and
    returns 0, or 1 with `error` = (number of the failed step + 1 or 0 for a row out of range, row, position), or 2 where
    the order raised. Rows come from an order's own kernel, by its address and its arguments: one function serves all
    orders. Where rows vary in length, two int64 arrays follow each such output: the item at which each row starts, and how many
    elements of the first axis it has; `measure`, a program of the same form, gives the lengths they are made from.
    """

    source: str
    function: Callable[..., int]
    outputs: tuple[Output, ...]
    find: Callable[..., Any]  # the order's kernel
    order: tuple[Any, ...]  # and its parameters, as they were when composed; other epochs give others
    arguments: tuple[Any, ...]
    scratch: tuple[tuple[str, int], ...]  # dtype and size of per-thread buffers, the last arguments
    owners: tuple[int, ...]  # for each line of the source, the step it belongs to (-1: none)
    steps: tuple[Step, ...]
    notes: tuple[str, ...]  # how the steps were fused, a line each
    measure: Any = None  # Program | None
    grounds: tuple[residency.Ground, ...] = ()  # the files below the sources
    reach: Later | None = None  # tells which bytes of these a row reads
    bound: residency.Bound | None = None

    def bounded(self, bound: residency.Bound) -> Program:
        """Give the program with a bound on the bytes of files that it keeps in memory."""
        return self._replace(bound=bound)

    def reaches(self, key: int, order: Sequence[Any]) -> list[Reach]:
        """Give what tells which bytes of files rows read."""
        return [Reach(self, key, order)] if self.grounds else []

    def signature(self) -> tuple[jit.Type, ...]:
        """Give the kernel types of all arguments."""
        kinds: list[jit.Type] = [jit.INT] * 5 + [COUNTS] * 2 + [jit.INT, COUNTS]
        for output in self.outputs:
            kinds.append(jit.Array(output.carrier.name, 1))
            if output.form != "fixed":
                kinds += [jit.Array("int64", 1)] * 2
        kinds += [jit.typeof(a) for a in self.arguments]
        return tuple(kinds + [jit.Array(name, 1) for name, _ in self.scratch])

    def ordered(self, find: Callable[..., Any], order: Sequence[Any]) -> Program:
        """Give the program with rows from another order."""
        measure = None if self.measure is None else self.measure.ordered(find, order)
        return self._replace(find=find, order=tuple(order), measure=measure)

    def worker(self, key: int, order: Sequence[Any]) -> Worker:
        """Give one thread's hold on the program."""
        return Worker(self, key, order)

    def load(self) -> jit.Kernel:
        """Give the program compiled, and its order; and, where it must be known what rows read, what tells that."""
        jit.load(self.find, self.finding())
        if self.reach is not None and residency.has_chunks(self.grounds):
            self.reach().ordered(self.find, self.order).load()
        return jit.load(self.function, self.signature(), name="fill")

    def finding(self) -> tuple[jit.Type, ...]:
        """Give the types that the order's kernel takes."""
        return (jit.INT, jit.INT, COUNTS, *(jit.typeof(p) for p in self.order))

    def places(self) -> list[int]:
        """Give the place of each output among the arguments."""
        at, found = len(FIXED), []
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
        fixed = [0, 1, 0, 0, 0, np.zeros(BLOCK, np.int64), np.zeros(4, np.int64), 0, np.zeros(0, np.int64)]
        return [*fixed, *outputs, *self.arguments, *own]

    @property
    def nbytes(self) -> int:
        """Bytes of one row in all outputs that do not vary."""
        return sum(o.size * o.carrier.itemsize for o in self.outputs if o.form == "fixed")


class Worker:
    """One thread's hold on a program: its calls, its scratch, and the error that a failed call left."""

    def __init__(self, program: Program, key: int, order: Sequence[Any] | None = None, plain: bool = False) -> None:
        self.program = program
        self.key = key
        self.order = bind_order(program, order, plain)
        self.call = self._bind(program, plain)
        self.measure: jit.Call | None = None
        self.places = program.places()
        if program.measure is not None:
            self.measure = self._bind(program.measure, plain)
            kernel = jit.plain(lay_rows, LAY) if plain else jit.load(lay_rows, LAY)
            none = np.zeros(0, np.int64)
            self.layers = {
                k: kernel.bind(none, none, int(o.form == "longest"), o.multiple, o.size, none, none, none)
                for k, o in enumerate(program.outputs)
                if o.form != "fixed"
            }
        self.kept = residency.kept(program.grounds, program.bound)
        given = program.order if order is None else order
        self.reach = Reach(program, key, given, plain) if residency.has_chunks(program.grounds) else None

    def _bind(self, program: Program, plain: bool) -> jit.Call:
        return bind(program, self.key, self.order, plain)

    def blank(self, byte: int) -> None:
        """Forget what lies in the scratch: every byte of it becomes this one."""
        last = len(self.call.kernel.signature)
        for k in range(last - len(self.program.scratch), last):
            self.call.value(k).view(np.uint8).fill(byte)

    def reorder(self, *params: Any) -> None:
        """Go on with other parameters of the order."""
        for k, param in enumerate(params):
            self.order.set(3 + k, param)

    def lengths(self, first: int, step: int, count: int, place: int, spans: Spans) -> Failure | None:
        """Write the lengths of the rows at positions first, first + step, ... from row `place` on."""
        assert self.measure is not None and self.program.measure is not None
        for at, output in zip(self.program.measure.places(), self.program.measure.outputs, strict=True):
            self.measure.point(at, *spans.lengths[output.name])
        return run(self.measure, first, step, count, place)

    def lay_out(self, k: int, rows: int, spans: Spans) -> Layout:
        """Place `rows` rows of output k, whose lengths are known, and let the next fill write there."""
        at, (starts, a), (extents, b) = self.places[k], spans.starts[k], spans.extents[k]
        like = spans.like[k]
        if like == k:
            layer = self.layers[k]
            lengths, c = spans.lengths[self.program.outputs[k].lengths]
            layer.point(0, lengths[:rows], c)
            layer.point(1, *spans.ends)
            layer.point(5, starts, a)
            layer.point(6, extents, b)
            told, c = spans.told[k]
            layer.point(7, told, c)
            spans.laid[k] = Layout(starts, extents, layer(), told)
        self.call.point(at + 1, starts, a)
        self.call.point(at + 2, extents, b)
        return spans.laid[like]

    def fill(self, first: int, step: int, count: int, place: int) -> Failure | None:
        """Write the rows at positions first, first + step, ... into the outputs, from row `place` on."""
        if not self.kept:
            return run(self.call, first, step, count, place)
        program = self.program
        spans = None if self.reach is None else self.reach(first, step, count)
        with contextlib.closing(residency.pieces(program.grounds, spans, count, program.bound)) as pieces:
            for low, high in pieces:
                failed = run(self.call, first + low * step, step, high - low, place + low)
                if failed is not None:
                    return failed._replace(done=low + failed.done)
        return None


def bind(program: Program, key: int, order: jit.Call, plain: bool = False) -> jit.Call:
    """Give a program's call, compiled or in plain Python, with outputs of no rows and rows from an order's call."""
    kernel = jit.plain(program.function, program.signature()) if plain else program.load()
    values = program.values()
    values[4] = key
    if order.plain:

        def find(first: int, step: int, rows: np.ndarray) -> None:
            program.find(first, step, rows, *(order.value(3 + k) for k in range(len(program.order))))

        values[7] = find
    else:
        values[7:9] = order.address, order.words
    return kernel.bind(*values)


def bind_order(program: Program, params: Sequence[Any] | None, plain: bool = False) -> jit.Call:
    """Give the call of a program's order."""
    kinds = program.finding()
    kernel = jit.plain(program.find, kinds) if plain else jit.load(program.find, kinds)
    return kernel.bind(0, 1, np.zeros(0, np.int64), *(program.order if params is None else params))


class Reach:
    """One thread's hold on what tells which bytes a program reads."""

    def __init__(self, program: Program, key: int, order: Sequence[Any], plain: bool = False) -> None:
        assert program.reach is not None
        self.inner = program.reach().ordered(program.find, order)
        self.order = bind_order(self.inner, None, plain)
        self.call = bind(self.inner, key, self.order, plain)

    def __call__(self, first: int, step: int, count: int) -> residency.Spans:
        """Give, for each field over a file, the first address of each row and the one after its last; where a row is out of
        range, of the rows before it."""
        found = [np.zeros(count, np.int64) for _ in self.inner.outputs]
        for at, array in zip(self.inner.places(), found, strict=True):
            self.call.set(at, array)
        failed = run(self.call, first, step, count, 0)
        if failed is not None:
            found = [array * (np.arange(count) < failed.done) for array in found]
        return list(zip(found[::2], found[1::2], strict=True))


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
        kinds = program.finding()
        self.order = jit.load(program.find, kinds).bind(0, 1, np.zeros(0, np.int64), *order)
        size = self.order.words.size
        heads = ["first", "step", "count", "place", "key", "rows", "error", "find", "order", "status", "chunks", *many, *own]
        block = f"rows[c * {BLOCK} : (c + 1) * {BLOCK}], error[c * 4 : c * 4 + 4]"
        block += f", find, order[c * {size} : (c + 1) * {size}]"
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
        self.status = np.zeros(chunks, np.int64)
        self.error = np.zeros(4 * chunks, np.int64)
        wide = [np.zeros(max(size, 1) * chunks, name) for name, size in program.scratch]
        rows = np.zeros(BLOCK * chunks, np.int64)
        words = np.tile(self.order.words, chunks)
        every = [0, 1, 0, 0, key, rows, self.error, self.order.address, words, self.status, chunks, *inner, *wide]
        own_types = list(program.signature())
        types = [*own_types[:9], COUNTS, jit.INT, *own_types[9:]]
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
    if status == 2:
        return Failure(-2, int(error[1]), int(error[3]))
    return Failure(int(error[0]) - 1, int(error[1]), int(error[2]))


class Layout(NamedTuple):
    """Where the rows of an output that varies lie: the first item and the extent of each row, the total of items, and what
    `lay_rows` told of the batches."""

    starts: np.ndarray
    extents: np.ndarray
    total: int
    told: np.ndarray


def lay_rows(
    lengths: np.ndarray,
    ends: np.ndarray,
    longest: int,
    multiple: int,
    size: int,
    starts: np.ndarray,
    extents: np.ndarray,
    told: np.ndarray,
) -> int:
    """Place rows of these lengths one after the other, those of each batch at the length of its longest (up to a
    `multiple`) where `longest` is 1: where each starts, and how many elements of `size` items it has. Batch b ends before
    row ends[b], the last before the end. Gives all items; `told` becomes the elements that are data, and of each batch the
    first item and the extent of its last row."""
    total, low, n, b, data = 0, 0, lengths.size, 0, 0
    while low < n:
        high = n
        if b < ends.size:
            high = min(max(ends[b], low + 1), n)
        most = 0
        told[1 + 2 * b] = total
        if longest:
            for i in range(low, high):
                most = max(most, lengths[i])
            most = (most + multiple - 1) // multiple * multiple
        extent = most
        for i in range(low, high):
            data += lengths[i]
            if not longest:
                extent = lengths[i]
            starts[i] = total
            extents[i] = extent
            total += extent * size
        told[2 + 2 * b] = extent
        b += 1
        low = high
    told[0] = data
    return total


LAY: tuple[jit.Type, ...] = (COUNTS, COUNTS, jit.INT, jit.INT, jit.INT, COUNTS, COUNTS, COUNTS)  # what lay_rows takes


def shape_output(output: Output, buffer: np.ndarray, rows: int) -> np.ndarray:
    """Give a flat buffer as (rows, *shape) of the field's own dtype."""
    shape = (rows, *(int(n or 0) for n in output.spec.shape))
    if output.spec.dtype.itemsize == 0:
        return np.zeros(shape, output.spec.dtype)
    return _own_dtype(output, buffer[: rows * output.size]).reshape(shape)


def shape_varied(output: Output, buffer: np.ndarray, layout: Layout, low: int, high: int) -> Any:
    """Give rows low .. high of an output that varies: (rows, longest, *rest), or a Ragged."""
    rest: tuple[Any, ...] = output.spec.shape[1:]
    if high == low:
        empty = _own_dtype(output, buffer[:0])
        return (
            Ragged(empty.reshape(0, *rest), np.zeros(1, np.int64))
            if output.form == "ragged"
            else empty.reshape(0, 0, *rest)
        )
    begin, extent = layout.starts.item(low), layout.extents.item(low)
    if output.form == "longest":
        values = _own_dtype(output, buffer[begin : begin + (high - low) * extent * output.size])
        return values.reshape(high - low, extent, *rest)
    end = layout.starts.item(high - 1) + layout.extents.item(high - 1) * output.size
    values = _own_dtype(output, buffer[begin:end])
    offsets = np.zeros(high - low + 1, np.int64)
    np.cumsum(layout.extents[low:high], out=offsets[1:])
    return Ragged(values.reshape(int(offsets[-1]), *rest), offsets)


def shape_batches(
    output: Output, buffer: np.ndarray, layout: Layout, at: int, lows: Sequence[int], highs: Sequence[int]
) -> list[Any]:
    """Give some batches of an output that varies as `shape_varied` does, from the one with number `at` on."""
    if output.form != "longest" or output.carrier != output.spec.dtype:
        return [shape_varied(output, buffer, layout, low, high) for low, high in zip(lows, highs, strict=True)]
    rest: tuple[Any, ...] = output.spec.shape[1:]
    firsts, extents = layout.told[1 + 2 * at : 1 + 2 * (at + len(lows))].reshape(-1, 2).T.tolist()
    size = output.size
    return [
        buffer[first : first + (high - low) * extent * size].reshape(high - low, extent, *rest)
        for low, high, first, extent in zip(lows, highs, firsts, extents, strict=True)
    ]


def _own_dtype(output: Output, buffer: np.ndarray) -> np.ndarray:
    return buffer if output.carrier == output.spec.dtype else buffer.view(output.spec.dtype)


class Spans:
    """Room for the lengths of some rows, by field, and for where the rows of each output that varies lie: arrays and
    addresses, shared with the first output `like` it; and where batches of these rows end."""

    __slots__ = ("ends", "extents", "given", "laid", "lengths", "like", "starts", "told")

    def __init__(self, program: Program, rows: int) -> None:
        def room(items: int = rows) -> tuple[np.ndarray, int]:
            array = np.zeros(items, np.int64)
            return array, array.ctypes.data

        measured = program.measure.outputs if program.measure is not None else ()
        self.lengths = {output.name: room() for output in measured}
        kinds = {k: (o.lengths, o.form, o.multiple, o.size) for k, o in enumerate(program.outputs) if o.form != "fixed"}
        self.like = {k: next(first for first, other in kinds.items() if other == kind) for k, kind in kinds.items()}
        rooms = {k: (room(), room()) for k in set(self.like.values())}
        self.told = {k: room(2 * rows + 1) for k in rooms}
        self.starts, self.extents = ({k: rooms[like][side] for k, like in self.like.items()} for side in (0, 1))
        self.laid: dict[int, Layout] = {}
        self.given: Any = None
        self.part(())

    def part(self, ends: Sequence[int]) -> None:
        """Part the rows into batches: batch b ends before row ends[b]; all rows are one where nothing is said."""
        if ends != self.given:
            array = np.array(ends, np.int64)
            self.ends, self.given = (array, array.ctypes.data), ends


def collect(
    program: Any, worker: Any, first: int, step: int, count: int, byte: int = 0
) -> tuple[list[Any], Failure | None]:
    """Give the samples at positions first, first + step, ... as one batch of fresh arrays, each `byte` of them such before,
    and where that stopped.

    `program` and its `worker` are a Program and a Worker, or what behaves as they do.
    """
    spans = Spans(program, count)
    if program.measure is not None:
        failed = worker.lengths(first, step, count, 0, spans)
        if failed is not None:
            return [], failed
    made: list[tuple[np.ndarray, Layout | None]] = []
    for k, (at, output) in enumerate(zip(program.places(), program.outputs, strict=True)):
        layout = None if output.form == "fixed" else worker.lay_out(k, count, spans)
        items = count * output.size if layout is None else layout.total
        made.append((np.zeros(items, output.carrier), layout))
        if byte:
            made[-1][0].view(np.uint8).fill(byte)
        worker.call.set(at, made[-1][0])
    failed = worker.fill(first, step, count, 0)
    arrays = [
        shape_output(o, b, count) if layout is None else shape_varied(o, b, layout, 0, count)
        for o, (b, layout) in zip(program.outputs, made, strict=True)
    ]
    return arrays, failed
