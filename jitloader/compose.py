"""Join order, read, stages and write into one kernel: the source of a loop nest that writes each output byte once.

For every sample the generated function finds its row, prefetches the rows to come, and walks the steps of the
pipeline. Runs of value and index stages become one loop nest (a *segment*): index stages compose to one affine map an
axis (offset, direction, valid range), drawn per sample; value stages run in registers inside it. On 8-bit sources a
run of value stages is a table of 256 entries, built once by running them in plain Python. A sample stage, or a pair of
stages that do not compose, goes through a scratch row that stays in cache. The same source, run by plain Python,
gives the same bits: that is how `data[i]`, `trace` and error reports work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from . import jit, rng
from .errors import PipelineError
from .samples import Samples, contiguous, records
from .spec import Spec
from .stages import Bound, Misfit, Stage, Step
from .stages.stage import wide

BLOCK = 256  # positions turned into rows at a time
TILE = 4096  # elements a per-channel constant may be spread out to, so that one flat loop serves a row of pixels
UNROLL = 4  # axes of at most this many elements (channels) are unrolled

FIXED = ("first", "step", "count", "place", "key", "rows", "error")


class Output(NamedTuple):
    """One field of the batch: its spec, and the dtype and shape in which the kernel writes a row of it."""

    name: str
    spec: Spec
    carrier: np.dtype
    size: int


class Program(NamedTuple):
    """A pipeline as one function: `function(first, step, count, place, key, rows, error, *order, *outputs, *arguments)`.

    It writes the samples at positions first, first + step, ... into rows place, place + 1, ... of the flat outputs,
    and returns 0, or 1 with `error` = (number of the failed step + 1 or 0 for a row out of range, row, position).
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

    def signature(self) -> tuple[jit.Type, ...]:
        """Give the kernel types of all arguments."""
        kinds: list[jit.Type] = [jit.INT] * 5 + [jit.Array("int64", 1)] * 2
        kinds += [jit.typeof(p) for p in self.order]
        kinds += [jit.Array(o.carrier.name, 1) for o in self.outputs]
        kinds += [jit.typeof(a) for a in self.arguments]
        return tuple(kinds + [jit.Array(name, 1) for name, _ in self.scratch])

    def load(self, parallel: bool = False) -> jit.Kernel:
        """Give the program compiled."""
        return jit.load(self.function, self.signature(), name="fill")

    @property
    def at_order(self) -> int:
        """The place of the order's first parameter among the arguments."""
        return len(FIXED)

    @property
    def at_outputs(self) -> int:
        """The place of the first output among the arguments."""
        return len(FIXED) + len(self.order)

    def values(self, buffers: Sequence[np.ndarray]) -> list[Any]:
        """Give one thread's arguments, writing into these flat buffers."""
        own = [np.zeros(size, name) for name, size in self.scratch]
        fixed = [0, 1, 0, 0, 0, np.zeros(BLOCK, np.int64), np.zeros(4, np.int64)]
        return [*fixed, *self.order, *buffers, *self.arguments, *own]

    def buffers(self, rows: int) -> list[np.ndarray]:
        """Give fresh flat buffers for this many rows."""
        return [np.zeros(rows * o.size, o.carrier) for o in self.outputs]

    def shaped(self, buffers: Sequence[np.ndarray], rows: int) -> list[np.ndarray]:
        """Give flat buffers as the arrays they are to the user: (rows, *shape) of the field's own dtype."""
        return [shape_output(o, b, rows) for o, b in zip(self.outputs, buffers, strict=True)]


def shape_output(output: Output, buffer: np.ndarray, rows: int) -> np.ndarray:
    """Give a flat buffer as (rows, *shape) of the field's own dtype."""
    shape = (rows, *(int(n or 0) for n in output.spec.shape))
    if output.carrier == output.spec.dtype:
        return buffer.reshape(shape)
    if output.spec.dtype.itemsize == 0:
        return np.zeros(shape, output.spec.dtype)
    return buffer.view(output.spec.dtype).reshape(shape)


class _Code:
    """Lines of source, and which step each belongs to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.owners: list[int] = []
        self.depth = 0
        self.step = -1

    def add(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)
        self.owners.append(self.step)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.add(head)
        self.depth += 1
        yield
        self.depth -= 1


class _Axis:
    """One output axis of a segment: its length, the step in the source, and its map (None: the identity)."""

    def __init__(self, n: int, stride: int) -> None:
        self.n, self.stride, self.source = n, stride, n
        self.map: str | None = None


class _Value(NamedTuple):
    """One value stage in a segment: its place in the chain, and its per-element arrays, shaped to broadcast."""

    number: int
    bound: Bound
    arrays: tuple[np.ndarray, ...]
    user: bool
    key: str


class _Flow:
    """A field on its way through one sample: where its bytes lie, and what is pending on them."""

    def __init__(self, var: str, base: str, dtype: np.dtype, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.var, self.base, self.dtype = var, base, dtype
        self.logical = dtype  # what the bits mean to the user, where that is not the dtype that carries them
        self.axes = [_Axis(n, s) for n, s in zip(shape, strides, strict=True)]
        self.values: list[_Value] = []
        self.fill: tuple[Any, int] | None = None  # the value outside, and how many value stages come before it
        self.shape: tuple[int, ...] | None = None  # after a reshape
        self.names: list[str] = []

    @property
    def size(self) -> int:
        size = 1
        for axis in self.axes:
            size *= axis.n
        return size

    @property
    def plain(self) -> bool:
        """Whether the sample lies in memory as it is."""
        strides = contiguous([a.n for a in self.axes])
        same = all(a.stride == s or a.n == 1 for a, s in zip(self.axes, strides, strict=True))
        return same and not self.values and all(a.map is None for a in self.axes)


class _Composer:
    """Writes the source of one program and collects its arguments."""

    def __init__(self) -> None:
        self.code = _Code()
        self.scope: dict[str, Any] = {
            "np": np, "i64": rng.i64, "u64": rng.u64, "subkey": rng.subkey, "mix": rng.mix, "prefetch": jit.prefetch,
            "array_at": jit.array_at,
        }  # fmt: skip
        self.names: list[str] = []
        self.arguments: list[Any] = []
        self.scratch: list[tuple[str, int]] = []
        self.notes: list[str] = []
        self.functions: dict[int, str] = {}
        self.counter = itertools.count()

    def argument(self, value: Any, prefix: str = "a") -> str:
        """Give the name of an argument that carries a value; the same array comes once."""
        for name, known in zip(self.names, self.arguments, strict=True):
            if known is value and isinstance(value, np.ndarray):
                return name
        self.names.append(f"{prefix}{next(self.counter)}")
        self.arguments.append(value)
        return self.names[-1]

    def own(self, dtype: str, size: int) -> str:
        """Give the name of a buffer that each thread has for itself."""
        self.scratch.append((dtype, max(size, 1)))
        return f"w{len(self.scratch)}"

    def function(self, kernel: Callable[..., Any]) -> str:
        """Give the name under which the source calls a function."""
        plain = jit._plain(kernel)
        if id(plain) not in self.functions:
            self.functions[id(plain)] = f"f{len(self.functions)}"
            self.scope[self.functions[id(plain)]] = plain
        return self.functions[id(plain)]

    # -- segments ----------------------------------------------------------------------------------------------------

    def cut(self, flow: _Flow, spec: Spec) -> _Flow:
        """Write what is pending into a scratch row and go on from there."""
        if flow.var.startswith("w") and flow.plain and flow.shape is None:
            return flow
        shape = flow.shape or tuple(a.n for a in flow.axes)
        work = self.own(_carrier(spec.dtype).name, flow.size)
        self.flush(flow, work, "0", spec)
        return _Flow(work, "0", _carrier(spec.dtype), shape, contiguous(shape))

    def link(self, flow: _Flow, step: Step, number: int, which: int, key: str) -> _Flow:
        """Add a value, index or shape stage to what is pending."""
        bound, before = step.bound[which], step.before[which]
        if bound.kind == "shape":
            if flow.plain and flow.shape is None:
                shape = _fixed(bound.out)
                new = _Flow(flow.var, flow.base, flow.dtype, shape, contiguous(shape))
                return new
            if flow.shape is not None:
                flow = self.cut(flow, before)
            flow.shape = _fixed(bound.out)
            return flow
        if bound.kind == "value":
            varies = [k for e in bound.elements for k, n in enumerate(e.shape) if n > 1]
            clash = flow.shape is not None and (varies or bound.random)
            clash = clash or any(flow.axes[k].map for k in varies if k < len(flow.axes))
            clash = clash or (flow.fill is not None and (bound.random or _combinations(bound.elements) > 16))
            if clash:
                flow = self.cut(flow, before)
            flow.values.append(_Value(number, bound, bound.elements, step.stage.user, key))
            return flow
        touched = set(bound.touches)
        varies = [k for v in flow.values for e in v.arrays for k, n in enumerate(e.shape) if n > 1]
        order = bound.order or tuple(range(len(flow.axes)))
        clash = flow.shape is not None or any(v.bound.random for v in flow.values)
        clash = clash or any(order.index(k) in touched for k in varies)
        clash = clash or (flow.fill is not None and bound.fill is not None)
        clash = clash or (bound.fill is not None and any(_combinations(v.arrays) > 16 for v in flow.values))
        if clash:
            flow = self.cut(flow, before)
        if bound.order is not None:
            flow.axes = [flow.axes[k] for k in order]
            flow.values = [v._replace(arrays=tuple(e.transpose(order) for e in v.arrays)) for v in flow.values]
        if bound.fill is not None:
            flow.fill = _outside(flow, bound.fill), len(flow.values)
        if touched:
            self.place(flow, bound, key)
        for axis, n in zip(flow.axes, bound.out.shape, strict=True):
            axis.n = int(n or 0)
        return flow

    def place(self, flow: _Flow, bound: Bound, key: str) -> None:
        """Run an index kernel for this sample and compose its maps with those pending."""
        add, rank = self.code.add, len(flow.axes)
        if not hasattr(self, "maps"):
            self.maps = [self.own("int64", 8) for _ in range(4)]
        size, limit, offset, sign = self.maps
        for k in range(rank):
            add(f"{size}[{k}] = {flow.axes[k].n}; {limit}[{k}] = {bound.out.shape[k]}; {offset}[{k}] = 0; {sign}[{k}] = 1")
        params = "".join(f", {self.param(p)}" for p in bound.params)
        add(f"{self.function(bound.kernel)}({key}, {size}, {limit}, {offset}, {sign}{params})")
        for k in bound.touches:
            axis, n = flow.axes[k], bound.out.shape[k]
            if axis.map is None:
                axis.map = f"_{next(self.counter)}"
                m = axis.map
                add(f"o{m} = 0; t{m} = 1; lo{m} = 0; hi{m} = {axis.n}")
            m = axis.map
            add(f"p = {offset}[{k}]; q = {sign}[{k}]")
            add(f"a = lo{m} - p if q > 0 else p - hi{m} + 1")
            add(f"b = hi{m} - p if q > 0 else p - lo{m} + 1")
            add(f"o{m} = o{m} + t{m} * p; t{m} = t{m} * q; lo{m} = min(max(a, 0), {n}); hi{m} = max(min(b, {n}), lo{m})")

    def param(self, value: Any) -> str:
        return self.argument(value)

    def chain(self, values: Sequence[_Value], start: str, dtype: np.dtype, elements: dict[tuple[int, int], str], place: str) -> str:
        """Write the value stages over one element and give the expression of the result."""
        add, expr = self.code.add, start
        outer = self.code.step
        for i, value in enumerate(values):
            self.code.step = value.number
            add(f"v = {_widened(expr, dtype)}")
            given = "".join(f", {elements[i, k]}" for k in range(len(value.arrays)))
            given += "".join(f", {self.param(p)}" for p in value.bound.params)
            if value.bound.valid is not None:
                add(f"bad += not {self.function(value.bound.valid)}(v{given})")
            if value.bound.random:
                given = f", {value.key}, {place}" + given
            dtype = value.bound.out.dtype
            add(f"v = {self.function(value.bound.kernel)}(v{given})")
            if value.user and dtype.kind in "iu" and dtype.itemsize < 8:
                info = np.iinfo(dtype)
                add(f"bad += v < {info.min} or v > {info.max}")
            add(f"v = {_stored('v', dtype)}")
            expr = "v"
        self.code.step = outer
        return expr

    def flush(self, flow: _Flow, target: str, base: str, spec: Spec) -> None:
        """Write the loop nest of a segment: read the source, run the value stages, write the target."""
        add, block = self.code.add, self.code.block
        axes = [a for a in flow.axes]
        arrays = [[np.asarray(e) for e in v.arrays] for v in flow.values]
        if not axes:
            axes, arrays = [_Axis(1, 1)], [[e.reshape(1) for e in es] for es in arrays]
        values, dtype = list(flow.values), flow.dtype
        fills = self.fills(flow, axes, arrays)
        checked = any(v.bound.valid is not None or v.user for v in values)
        table = self.table(values, dtype, arrays, flow.size)
        if table is not None:
            checked = False
            arrays = [[table[1]]]
        extra = [fills] if fills is not None else []
        axes, packed = _merge(axes, [e for es in arrays for e in es] + extra)
        shapes = iter(packed)
        arrays = [[next(shapes) for _ in es] for es in arrays]
        fills = next(shapes) if fills is not None else None
        lead = _unrolled(axes)
        inner = max(k for k in range(len(axes)) if k != lead)
        pixel = 1
        if lead is None and len(axes) > 1 and axes[-1].map is None and axes[-1].stride == 1:
            before = axes[-2]
            if before.map is not None and before.stride == axes[-1].n and before.n * axes[-1].n <= TILE:
                pixel, inner = axes[-1].n, len(axes) - 2
        outs = contiguous([a.n for a in axes])
        names: dict[int, str] = {}
        for e in [*(e for es in arrays for e in es), *([fills] if fills is not None else [])]:
            spread = _spread(e, inner, pixel, axes)
            names[id(e)] = self.argument(np.ascontiguousarray(spread).reshape(-1))
        steps = {id(e): _element_steps(e, inner, pixel, axes) for es in [*arrays, [fills] if fills is not None else []] for e in es}
        count = [0]

        def element(e: np.ndarray, at: dict[int, str], c: int, x: str) -> str:
            """The index of an element array: sums over the loops it varies with."""
            terms = [f"{v} * {s}" for k, v in at.items() if (s := steps[id(e)][k])]
            if lead is not None and steps[id(e)][lead] and c:
                terms.append(str(c * steps[id(e)][lead]))
            if x and steps[id(e)][inner]:
                terms.append(x)
            return f"{names[id(e)]}[{' + '.join(terms) or '0'}]"

        channels = range(axes[lead].n) if lead is not None else range(1)

        def write_fill(at: dict[int, str], dest: str, x: str, lanes: str) -> None:
            """One element outside the source, for every channel."""
            assert fills is not None
            for c in channels:
                add(f"{target}[{dest} + {c * (outs[lead] if lead is not None else 0)} + {lanes}] = {_stored(element(fills, at, c, x), spec.dtype)}")

        def run(at: dict[int, str], src: str, dest: str) -> None:
            """The innermost loop: one run of elements, each channel unrolled."""
            axis, n = axes[inner], axes[inner].n * pixel
            m = axis.map
            lane = outs[inner] if pixel == 1 else 1
            k = count[0] = count[0] + 1
            if m is None:
                add(f"m{k} = {n}; s{k} = {src}; d{k} = {dest}")
            else:
                add(f"m{k} = (hi{m} - lo{m}) * {pixel}")
                add(f"s{k} = {src} + (o{m} + lo{m} if t{m} > 0 else o{m} - hi{m} + 1) * {axis.stride}")
                add(f"d{k} = {dest} + lo{m} * {lane * pixel}")
                if fills is not None:
                    for head in (f"range(lo{m} * {pixel})", f"range(hi{m} * {pixel}, {n})"):
                        with block(f"for x in {head}:"):
                            write_fill(at, dest, "x", f"x * {lane}")
            step = 1 if pixel > 1 else axis.stride
            wide_out = lead is not None and lane > 1  # channels last: the channels of a pixel are neighbours in the target
            held: dict[tuple[int, int, int], str] = {}
            with block(f"if m{k} > 0:"):
                for c in channels:
                    ahead = c * (axes[lead].stride if lead is not None else 0)
                    add(f"src{c} = {flow.var}[s{k} + {ahead} : s{k} + {ahead} + (m{k} - 1) * {step} + 1]")
                    behind = c * (outs[lead] if lead is not None else 0)
                    if wide_out:
                        add(f"dst{c} = {target}[d{k} + {behind} : d{k} + {behind} + (m{k} - 1) * {lane} + 1]")
                    else:
                        add(f"dst{c} = {target}[d{k} + {behind} : d{k} + {behind} + m{k}]")
                    for i, es in enumerate(arrays):
                        for j, e in enumerate(es):
                            if steps[id(e)][inner]:
                                held[c, i, j] = element(e, at, c, "x")
                            else:
                                held[c, i, j] = f"q{c}_{i}_{j}"
                                add(f"q{c}_{i}_{j} = {element(e, at, c, '')}")
                with block(f"for x in range(m{k}):"):
                    for c in channels:
                        got = f"src{c}[x * {step}]" if step != 1 else f"src{c}[x]"
                        put = f"dst{c}[x * {lane}]" if wide_out else f"dst{c}[x]"
                        if table is not None:
                            add(f"{put} = {table[0]}[{held[c, 0, 0]} + {_widened(got, dtype) if dtype.kind != 'b' else f'i64({got})'}]")
                            continue
                        given = {(i, j): text for (cc, i, j), text in held.items() if cc == c}
                        expr = self.chain(values, got, dtype, given, f"d{k} - {base} + x")
                        add(f"{put} = {expr}")
                if m is not None:
                    self.reverse(k, m, channels, wide_out, lane, pixel)

        def nest(rest: list[int], at: dict[int, str], src: str, dest: str) -> None:
            if not rest:
                run(at, src, dest)
                return
            k, axis = rest[0], axes[rest[0]]
            i = f"i{next(self.counter)}"
            with block(f"for {i} in range({axis.n}):"):
                place, inside = f"e{i}", {**at, k: i}
                add(f"{place} = {dest} + {i} * {outs[k]}")
                if axis.map is None:
                    add(f"b{i} = {src} + {i} * {axis.stride}")
                    nest(rest[1:], inside, f"b{i}", place)
                    return
                m = axis.map
                if fills is None:
                    add(f"b{i} = {src} + (o{m} + t{m} * {i}) * {axis.stride}")
                    nest(rest[1:], inside, f"b{i}", place)
                    return
                with block(f"if lo{m} <= {i} < hi{m}:"):
                    add(f"b{i} = {src} + (o{m} + t{m} * {i}) * {axis.stride}")
                    nest(rest[1:], inside, f"b{i}", place)
                with block("else:"):
                    blank(rest[1:], inside, place)

        def blank(rest: list[int], at: dict[int, str], dest: str) -> None:
            """All that lies below an axis that is outside the source."""
            if not rest:
                lane = outs[inner] if pixel == 1 else 1
                with block(f"for x in range({axes[inner].n * pixel}):"):
                    write_fill(at, dest, "x", f"x * {lane}")
                return
            i = f"i{next(self.counter)}"
            with block(f"for {i} in range({axes[rest[0]].n}):"):
                add(f"e{i} = {dest} + {i} * {outs[rest[0]]}")
                blank(rest[1:], {**at, rest[0]: i}, f"e{i}")

        if flow.size == 0:
            return
        if checked:
            add("bad = 0")
        nest([k for k in range(len(axes)) if k not in (lead, inner) and not (pixel > 1 and k == len(axes) - 1)], {}, flow.base, base)
        if checked:
            number = max(v.number for v in values)
            with block("if bad > 0:"):
                add(f"error[0] = {number + 1}; error[1] = r; error[2] = done + j")
                add("return 1")
        form = "table of 256" if table is not None else f"{len(values)} value stage(s)" if values else "copy"
        self.notes.append(f"{flow.var} -> {target}: {form}, axes {[a.n for a in axes]}")

    def reverse(self, k: int, m: str, channels: range, strided: bool, lane: int, pixel: int) -> None:
        """Turn the runs of a mirrored axis round, in place: backward stores would keep the loop from vectorising."""
        add, block = self.code.add, self.code.block
        with block(f"if t{m} < 0:"), block(f"for x in range(m{k} // {2 * pixel}):"):
            for c in channels:
                if pixel > 1:
                    with block(f"for z in range({pixel}):"):
                        add(f"y = dst{c}[x * {pixel} + z]; w = m{k} - (x + 1) * {pixel} + z")
                        add(f"dst{c}[x * {pixel} + z] = dst{c}[w]; dst{c}[w] = y")
                    continue
                step = f" * {lane}" if strided else ""
                add(f"y = dst{c}[x{step}]; dst{c}[x{step}] = dst{c}[(m{k} - 1 - x){step}]; dst{c}[(m{k} - 1 - x){step}] = y")

    def fills(self, flow: _Flow, axes: list[_Axis], arrays: list[list[np.ndarray]]) -> np.ndarray | None:
        """Give the values outside the source, after the value stages that follow: an array that broadcasts."""
        if flow.fill is None:
            return None
        start, skip = flow.fill
        dtype = start.dtype
        rest = flow.values[skip:]
        if not rest:
            return np.full((1,) * len(axes), start)
        result = _evaluate(rest, arrays[skip:], np.full(1, start, dtype), dtype)
        if result is None:
            raise PipelineError(f"the fill value {start} of a padded stage cannot pass {self.name_of(rest)}")
        return result[..., 0]

    def name_of(self, values: Sequence[_Value]) -> str:
        return ", ".join(self.steps[v.number].stage.name for v in values)

    def table(self, values: list[_Value], dtype: np.dtype, arrays: list[list[np.ndarray]], size: int) -> Any:
        """Give (name of a table, offsets array) where value stages over an 8-bit source can be looked up."""
        if not values or dtype.itemsize != 1 or size < 256 or any(v.bound.random for v in values):
            return None
        if _combinations([e for es in arrays for e in es]) > 16:
            return None
        inputs = np.arange(256).astype(np.uint8).view(dtype) if dtype.kind != "b" else np.array([False, True] * 128)
        if dtype.kind == "i":
            inputs = np.arange(-128, 128).astype(dtype)
        result = _evaluate(values, arrays, inputs, dtype)
        if result is None:
            return None
        flat = result.reshape(-1, 256)
        offsets = np.arange(len(flat)).reshape(result.shape[:-1]) * 256 + (128 if dtype.kind == "i" else 0)
        return self.argument(np.ascontiguousarray(flat).reshape(-1)), offsets.astype(np.int64)

    steps: tuple[Step, ...] = ()
    maps: list[str]
    count: str  # the name of the argument that holds the number of samples


def _outside(flow: _Flow, value: float) -> Any:
    """Give the value outside the source as the dtype that is pending there, or as the bits that carry it."""
    if flow.values:
        return np.array(value).astype(flow.values[-1].bound.out.dtype)[()]
    if flow.logical == flow.dtype:
        return np.array(value).astype(flow.dtype)[()]
    bits = np.frombuffer(np.array(value).astype(flow.logical).tobytes(), flow.dtype)
    if (bits != bits[0]).any():
        raise PipelineError(f"padding {flow.logical} with {value} is not possible: cast it first")
    return bits[0]


def _fixed(spec: Spec) -> tuple[int, ...]:
    return tuple(int(n or 0) for n in spec.shape)


def _carrier(dtype: np.dtype) -> np.dtype:
    return records(np.empty(1, dtype)).carrier


def _widened(expr: str, dtype: np.dtype) -> str:
    return {"int64": f"i64({expr})", "uint64": f"u64({expr})", "bool": expr, "float64": f"np.float64({expr})"}[wide(dtype)]


def _stored(expr: str, dtype: np.dtype) -> str:
    return f"bool({expr})" if dtype.kind == "b" else f"np.{dtype.name}({expr})"


def _combinations(elements: Sequence[np.ndarray]) -> int:
    """How many different sets of per-element constants there are."""
    size = 1
    for e in elements:
        size = max(size, e.size)
    return size


def _evaluate(values: Sequence[_Value], arrays: Sequence[Sequence[np.ndarray]], inputs: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Run value stages in plain Python over inputs x all constants: shape (*broadcast, inputs), None if one refuses."""
    every = [e for es in arrays for e in es]
    shape = np.broadcast_shapes(*(e.shape for e in every)) if every else (1,) * 1
    if not every:
        shape = ()
    out = values[-1].bound.out.dtype
    result = np.empty((*shape, len(inputs)), out)
    with np.errstate(all="ignore"):
        for place in np.ndindex(*shape):
            given = [[np.broadcast_to(e, shape)[place] for e in es] for es in arrays]
            for x, raw in enumerate(inputs):
                current, v = dtype, raw
                for value, es in zip(values, given, strict=True):
                    v = widen(v, current)
                    try:
                        if value.bound.valid is not None and not value.bound.valid(v, *es, *value.bound.params):
                            return None
                        v = value.bound.kernel(v, *es, *value.bound.params)
                        current = value.bound.out.dtype
                        if value.user and current.kind in "iu" and not np.iinfo(current).min <= v <= np.iinfo(current).max:
                            return None
                        v = current.type(v)
                    except (ArithmeticError, ValueError, TypeError, IndexError):
                        return None
                result[(*place, x)] = v
    rank = max((e.ndim for e in every), default=0)
    return result.reshape((1,) * (rank - len(shape)) + result.shape) if rank > len(shape) else result


def widen(value: Any, dtype: np.dtype) -> Any:
    """Give a stored element as the number that reaches a value kernel, in plain Python."""
    kind = wide(dtype)
    return int(value) if kind in ("int64", "uint64") else bool(value) if kind == "bool" else np.float64(value)


def _merge(axes: list[_Axis], arrays: list[np.ndarray]) -> tuple[list[_Axis], list[np.ndarray]]:
    """Join neighbouring axes that lie in a row in source and target, and drop those of length one."""
    rank = len(axes)
    arrays = [np.broadcast_to(e, e.shape) if e.ndim == rank else e.reshape((1,) * (rank - e.ndim) + e.shape) for e in arrays]
    axes = list(axes)
    k = len(axes) - 1
    while k > 0:
        outer, inner = axes[k - 1], axes[k]
        alike = outer.map is None and inner.map is None and (outer.stride == inner.stride * inner.n or outer.n == 1)
        size = outer.n * inner.n
        varied = [e.shape[k - 1] > 1 or e.shape[k] > 1 for e in arrays]
        if alike and (not any(varied) or size <= TILE):
            joined = _Axis(size, inner.stride)
            merged = []
            for e, v in zip(arrays, varied, strict=True):
                if v:
                    e = np.broadcast_to(e, (*e.shape[: k - 1], outer.n, inner.n, *e.shape[k + 1 :]))
                merged.append(e.reshape(*e.shape[: k - 1], e.shape[k - 1] * e.shape[k], *e.shape[k + 1 :]))
            arrays, axes[k - 1 : k + 1] = merged, [joined]
        k -= 1
    return axes, [np.ascontiguousarray(e) for e in arrays]


def _unrolled(axes: list[_Axis]) -> int | None:
    """Give the axis of channels to unroll: interleaved in the source and not in the target, or the other way round."""
    for k, axis in enumerate(axes):
        rest = [a for i, a in enumerate(axes) if i != k]
        if axis.map is None and 2 <= axis.n <= UNROLL and rest and rest[-1].n > axis.n:
            last = k == len(axes) - 1
            if (not last and axis.stride == 1 and rest[-1].stride >= axis.n) or (last and axis.stride > 1 and rest[-1].stride == 1):
                return k
    return None


def _spread(e: np.ndarray, inner: int, pixel: int, axes: list[_Axis]) -> np.ndarray:
    """Spread an element array over the innermost run of pixels where it varies within a pixel."""
    if pixel > 1 and e.shape[-1] > 1:
        return np.broadcast_to(e, (*e.shape[:inner], axes[inner].n, pixel))
    return e


def _element_steps(e: np.ndarray, inner: int, pixel: int, axes: list[_Axis]) -> list[int]:
    """Give the step of an element array for each axis, 0 where it does not vary; the inner run steps by one."""
    shape = _spread(e, inner, pixel, axes).shape
    strides = contiguous(shape)
    steps = [s if n > 1 else 0 for s, n in zip(strides, shape, strict=True)]
    if pixel > 1:
        steps[inner] = 1 if shape[-1] > 1 or shape[inner] > 1 else 0
    return steps


# ---------------------------------------------------------------------------------------------------------------------
# Bits that kernels carry but cannot compute with


def half_of(bits):  # type: ignore[no-untyped-def]
    """Give the float64 whose value is that of a float16 with these bits (IEEE 754 binary16)."""
    exponent, fraction = (bits >> 10) & 31, float(bits & 1023)
    if exponent == 31:
        value = np.inf if fraction == 0.0 else np.nan
    elif exponent == 0:
        value = fraction * 5.9604644775390625e-08  # 2 ** -24
    else:
        value = (fraction + 1024.0) * math.ldexp(1.0, exponent - 25)
    return -value if bits & 32768 else value


def brain_of(bits):  # type: ignore[no-untyped-def]
    """Give the float whose value is that of a bfloat16 with these bits: the upper half of a float32."""
    return np.float64(jit.float32_of(bits << 16))


def swapped(bits, size):  # type: ignore[no-untyped-def]
    """Give an unsigned number of `size` bytes with its bytes in the other order."""
    rest, result = rng.u64(bits), rng.u64(0)
    for _ in range(size):
        result = rng.u64(result << rng.u64(8)) | (rest & rng.u64(255))
        rest = rest >> rng.u64(8)
    return result


def swapped_signed(bits, size):  # type: ignore[no-untyped-def]
    """Give a signed number of `size` bytes with its bytes in the other order."""
    shift = rng.u64(64 - 8 * size)
    return rng.i64(rng.u64(swapped(bits, size) << shift)) >> rng.i64(shift)


def swapped_unsigned(bits, size):  # type: ignore[no-untyped-def]
    """Give an unsigned number below 2**32 with its bytes in the other order, as a signed one."""
    return rng.i64(swapped(bits, size))


def swapped_single(bits, size):  # type: ignore[no-untyped-def]
    """Give the float32 with these bits in the other byte order."""
    return np.float64(jit.float32_of(rng.i64(swapped(bits, size))))


def swapped_double(bits, size):  # type: ignore[no-untyped-def]
    """Give the float64 with these bits in the other byte order."""
    return jit.float64_of(rng.i64(swapped(bits, size)))


def swapped_half(bits, size):  # type: ignore[no-untyped-def]
    """Give the float16 with these bits in the other byte order, as float64."""
    return half_of(rng.i64(swapped(bits, size)))


def decoded(spec: Spec) -> Spec:
    """Give the spec that computing stages see: float16 and bfloat16 as float32, the other byte order as the native one."""
    if spec.dtype.name in ("float16", "bfloat16"):
        return Spec(np.dtype(np.float32), spec.shape)
    if spec.dtype.kind in "iuf" and not spec.dtype.isnative:
        return Spec(spec.dtype.newbyteorder("="), spec.shape)
    return spec


def _decoder(dtype: np.dtype) -> tuple[Callable[..., Any], tuple[int, ...]]:
    size = dtype.itemsize
    if dtype.name == "bfloat16":
        return brain_of, ()
    if dtype.name == "float16":
        return (half_of, ()) if dtype.isnative else (swapped_half, (2,))
    if dtype.kind == "f":
        return (swapped_single if size == 4 else swapped_double), (size,)
    if dtype.kind == "i":
        return swapped_signed, (size,)
    return (swapped if size == 8 else swapped_unsigned), (size,)


def _decode(flow: _Flow) -> None:
    """Put the decoding of a flow's bits before what is to come."""
    shape = flow.shape or tuple(a.n for a in flow.axes)
    seen = decoded(Spec(flow.logical, shape))
    if seen.dtype == flow.logical:
        return
    kernel, params = _decoder(flow.logical)
    flow.values.append(_Value(-1, Bound("value", seen, kernel, params), (), False, "0"))
    flow.logical = seen.dtype


def compose(
    sources: dict[str, Samples],
    steps: Sequence[Step],
    fields: Sequence[str],
    order: Any,
    order_params: Sequence[Any],
    count: int,
) -> Program:
    """Write the program that fills batches of these fields.

    `order(first, step, rows, *order_params)` gives rows for positions; `count` is the number of samples, against which
    each row is checked.
    """
    made = _Composer()
    made.steps = tuple(steps)
    made.count = made.argument(count)
    code, add, block = made.code, made.code.add, made.code.block
    final = {name: samples.spec for name, samples in sources.items()}
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name, bound in zip(step.fields, step.bound, strict=True):
            final[name] = bound.out
            last[name] = number
    outputs = []
    for name in fields:
        spec = final[name]
        whole = sources[name] if name not in last else None
        carrier = whole.carrier if whole is not None else _carrier(spec.dtype)
        size = spec.size * (spec.dtype.itemsize // carrier.itemsize if carrier.itemsize else 1)
        outputs.append(Output(name, spec, carrier, size))
    outs = [f"out{k}" for k in range(len(outputs))]
    maps: dict[Any, str] = {}
    code.depth = 1
    add("done = 0")
    with block("while done < count:"):
        add(f"m = min({BLOCK}, count - done)")
        given = "".join(f", order{k}" for k in range(len(order_params)))
        add(f"{made.function(order)}(first + done * step, step, rows[:m]{given})")
        with block("for j in range(m):"):
            add("r = rows[j]")
            with block(f"if r < 0 or r >= {made.count}:"):
                add("error[0] = 0; error[1] = r; error[2] = done + j")
                add("return 1")
            add("error[1] = r")
            _prefetch(made, sources, fields, maps)
            if any(b.random for s in steps for b in s.bound):
                add("sample = subkey(key, r)")
            flows = {name: _read(made, name, sources[name], maps) for name in fields}
            for number, step in enumerate(steps):
                if step.fields[0] not in flows:
                    continue
                code.step = number
                _apply(made, flows, step, number, last, outputs, outs)
                code.step = -1
            for k, output in enumerate(outputs):
                flow = flows[output.name]
                if flow is not None:
                    code.step = last.get(output.name, -1)
                    made.flush(flow, outs[k], f"(place + done + j) * {output.size}", final[output.name])
                    code.step = -1
        add("done += m")
    add("return 0")
    names = [*FIXED, *(f"order{k}" for k in range(len(order_params))), *outs, *made.names, *(f"w{k + 1}" for k in range(len(made.scratch)))]
    head = f"def fill({', '.join(names)}):"
    source = "\n".join([head, *code.lines]) + "\n"
    exec(compile(source, "<jitloader kernel>", "exec"), made.scope)
    return Program(
        source=source,
        function=made.scope["fill"],
        outputs=tuple(outputs),
        order=tuple(order_params),
        arguments=tuple(made.arguments),
        scratch=tuple(made.scratch),
        owners=(-1, *code.owners),
        steps=tuple(steps),
        notes=tuple(made.notes),
    )


def _row(made: _Composer, samples: Samples, row: str, maps: dict[Any, str], suffix: str) -> tuple[str, str]:
    """Write where a sample lies, and give the names of its flat memory and of the place of its first item."""
    add, block = made.code.add, made.code.block
    rows = samples.rows
    at = f"r{suffix}"
    if rows.table is not None:
        add(f"{at} = {made.argument(rows.table)}[{row}]")
    elif rows.start or rows.step != 1:
        add(f"{at} = {made.argument(rows.start)} + {made.argument(rows.step)} * {row}")
    else:
        add(f"{at} = {row}")
    if samples.locate is not None:
        given = "".join(f", {made.param(p)}" for p in samples.params)
        add(f"{at} = {made.function(samples.locate)}({at}{given})")
    if len(samples.parts) == 1:
        part = samples.parts[0]
        flat = made.argument(part.flat)
        add(f"b{suffix} = {made.argument(part.offset)} + {at} * {part.stride}" if part.offset else f"b{suffix} = {at} * {part.stride}")
        return flat, f"b{suffix}"
    parts = samples.parts
    bounds = np.concatenate([[0], np.cumsum([p.count for p in parts])]).astype(np.int64)
    columns = [
        bounds,
        np.array([p.flat.ctypes.data for p in parts], np.int64),
        np.array([p.flat.size for p in parts], np.int64),
        np.array([p.offset for p in parts], np.int64),
        np.array([p.stride for p in parts], np.int64),
    ]
    key = ("parts", id(parts))
    if key not in maps:
        maps[key] = ",".join(made.argument(c) for c in columns)
    bound, address, size, offset, stride = maps[key].split(",")
    add(f"k{suffix} = 0")
    with block(f"while {at} >= {bound}[k{suffix} + 1]:"):
        add(f"k{suffix} += 1")
    like = made.argument(parts[0].flat)
    add(f"flat{suffix} = array_at({address}[k{suffix}], {size}[k{suffix}], {like})")
    add(f"b{suffix} = {offset}[k{suffix}] + ({at} - {bound}[k{suffix}]) * {stride}[k{suffix}]")
    return f"flat{suffix}", f"b{suffix}"


def _prefetch(made: _Composer, sources: dict[str, Samples], fields: Sequence[str], maps: dict[Any, str]) -> None:
    """Ask for the rows to come: worth up to 1.6x on rows of a few cache lines."""
    add, block = made.code.add, made.code.block
    wanted = []
    for name in fields:
        samples = sources[name]
        size = 1
        for n, s in zip(samples.spec.shape, samples.strides, strict=False):
            size += ((n or 1) - 1) * abs(s)
        nbytes = size * samples.carrier.itemsize
        if nbytes and len(samples.parts) == 1:
            wanted.append((name, samples, nbytes))
    if not wanted:
        return
    total = sum(nbytes for *_, nbytes in wanted)
    ahead = 16 if total <= 512 else 8 if total <= 2048 else 2
    with block(f"if j + {ahead} < m:"):
        add(f"ahead = rows[j + {ahead}]")
        with block(f"if 0 <= ahead < {made.count}:"):
            for k, (_, samples, nbytes) in enumerate(wanted):
                flat, base = _row(made, samples, "ahead", maps, f"_a{k}")
                item = samples.carrier.itemsize
                for line in range(0, min(nbytes, 512), 64):
                    add(f"prefetch({flat}, {base} + {line // item})" if line else f"prefetch({flat}, {base})")


def _read(made: _Composer, name: str, samples: Samples, maps: dict[Any, str]) -> _Flow:
    flat, base = _row(made, samples, "r", maps, f"_{name}")
    shape = tuple(int(n or 0) for n in samples.shape)
    if len(samples.strides) > len(shape):
        shape = (*shape, samples.dtype.itemsize)
    flow = _Flow(flat, base, samples.carrier, shape, samples.strides)
    flow.logical = samples.dtype
    return flow


def _apply(
    made: _Composer, flows: dict[str, Any], step: Step, number: int, last: dict[str, int], outputs: list[Output], outs: list[str]
) -> None:
    """Write one step for its fields."""
    add, block = made.code.add, made.code.block
    key = "0"
    if any(b.random for b in step.bound):
        key = f"key_{number}"
        add(f"{key} = subkey(sample, {step.salt})")
    for which, name in enumerate(step.fields):
        flow, bound, before = flows[name], step.bound[which], step.before[which]
        if before.dtype != flow.logical:
            _decode(flow)
        if bound.kind != "sample":
            flows[name] = made.link(flow, step, number, which, key)
            continue
        if not flow.plain or flow.shape is not None:
            flow = made.cut(flow, before)
        shape, result = _fixed(before) or (1,), _fixed(bound.out) or (1,)
        size = int(np.prod(shape))
        add(f"src = {flow.var}[{flow.base} : {flow.base} + {size}].reshape({shape})")
        if bound.valid is not None:
            add("bad = 0")
            params = "".join(f", {made.param(p)}" for p in bound.params)
            with block(f"for x in range({size}):"):
                add(f"bad += not {made.function(bound.valid)}({_widened(f'{flow.var}[{flow.base} + x]', before.dtype)}{params})")
            with block("if bad > 0:"):
                add(f"error[0] = {number + 1}; error[1] = r; error[2] = done + j")
                add("return 1")
        carrier = _carrier(bound.out.dtype)
        direct = last[name] == number
        if direct:
            k = next(i for i, o in enumerate(outputs) if o.name == name)
            target, place = outs[k], f"(place + done + j) * {outputs[k].size}"
        else:
            target, place = made.own(carrier.name, bound.out.size), "0"
        add(f"at = {place}")
        add(f"dst = {target}[at : at + {int(np.prod(result))}].reshape({result})")
        params = "".join(f", {made.param(p)}" for p in bound.params)
        add(f"{made.function(bound.kernel)}(src, dst, {key}{params})")
        shape = _fixed(bound.out)
        flows[name] = None if direct else _Flow(target, "0", carrier, shape, contiguous(shape))


def eager(stage: Stage, array: np.ndarray, key: int = 0) -> np.ndarray:
    """Apply one stage to one plain sample, in plain Python; random stages draw by `key`."""
    spec = Spec(array.dtype, array.shape)
    try:
        bound = stage.bind(spec)
    except Misfit as misfit:
        raise PipelineError(f"{stage.name}: {misfit}; got {spec}") from None
    step = Step(stage, ("x",), 0, (spec,), (bound,))
    return sample_of({"x": records(array[None])}, (step,), ("x",), 0, key)["x"]


def only_row(first: int, step: int, rows: np.ndarray) -> None:
    """The order of one position: position i is row i."""
    for j in range(rows.size):
        rows[j] = first + j * step


def sample_of(sources: dict[str, Samples], steps: Sequence[Step], fields: Sequence[str], row: int, key: int) -> dict[str, np.ndarray]:
    """Give one sample through its steps in plain Python: the same bits as the kernel, exceptions as they are raised."""
    count = next(iter(sources.values())).rows.count
    program = compose(sources, steps, fields, only_row, (), count)
    buffers = program.buffers(1)
    values = program.values(buffers)
    values[0], values[2], values[4] = row, 1, key
    with np.errstate(all="ignore"):
        status = program.function(*values)
    if status:
        raise RowError(program, int(values[6][0]) - 1, int(values[6][1]))
    return {o.name: a[0] for o, a in zip(program.outputs, program.shaped(buffers, 1), strict=True)}


class RowError(Exception):
    """A value did not fit a step: which one, on which row (step -1: the row itself is out of range)."""

    def __init__(self, program: Program, number: int, row: int) -> None:
        super().__init__(number, row)
        self.number, self.row = number, row
        self.step = program.steps[number] if number >= 0 else None
