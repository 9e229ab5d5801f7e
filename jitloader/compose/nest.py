"""One segment: value and index stages over a sample as one loop nest that reads the source and writes the target once.

An index stage is, for each axis it touches, an offset and a direction drawn per sample; any run of them composes to one
affine map an axis, with the range in which it is valid and a value outside. Axes that lie in a row in source and target
are joined; channels are unrolled; the innermost loop runs forward over slices, which is what LLVM vectorises (2.6x over
computed indices), and mirrored runs are turned round, long ones through scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import NATIVE, carrier_of, decoded, decoder
from ..errors import PipelineError
from ..samples import contiguous
from ..spec import Spec
from ..stages import Bound
from ..stages.stage import wide
from .source import Source

TILE = 4096  # elements a per-channel constant may be spread out to, so that one flat loop serves a row of pixels
UNROLL = 4  # axes of at most this many elements (channels) are unrolled


class Axis:
    """One output axis of a segment: its length (a number, or a name for one that varies), its step in the source, and
    its map: the suffix of four variables o, t, lo, hi, or None for the identity. With `edge` what lies outside lo .. hi
    is the nearest element inside."""

    def __init__(self, n: int | str, stride: int) -> None:
        self.n, self.stride = n, stride
        self.map: str | None = None
        self.edge = False
        self.ring: tuple[int, int] | None = None  # of an edge axis: items before the first lie so many items further


class Value(NamedTuple):
    """One value stage in a segment: the step it is, its per-element arrays shaped to broadcast, and its key."""

    number: int
    bound: Bound
    arrays: tuple[np.ndarray, ...]
    user: bool
    key: str


class Flow:
    """A field on its way through one sample: where its bytes lie, and what is pending on them."""

    def __init__(
        self, var: str, base: str, dtype: np.dtype, shape: Sequence[int | str], strides: Sequence[int]
    ) -> None:
        self.var, self.base, self.dtype = var, base, dtype
        self.logical = dtype  # what the bits mean to the user, where that is not the dtype that carries them
        self.axes = [Axis(n, s) for n, s in zip(shape, strides, strict=True)]
        self.values: list[Value] = []
        self.fill: tuple[Any, int, Any] | None = None  # the value outside, how many value stages come before it, and as given
        self.shape: tuple[int, ...] | None = None  # after a reshape
        self.names: list[str] = []  # of the stages that are pending
        self.loose = False  # the numbers lie at any byte: read one by one, never as an array of their dtype

    @property
    def lengths(self) -> tuple[int | str, ...]:
        """The shape, as numbers and names."""
        return self.shape or tuple(a.n for a in self.axes)

    @property
    def size(self) -> int:
        """Elements of a sample (0 where that varies)."""
        size = 1
        for axis in self.axes:
            size *= axis.n if isinstance(axis.n, int) else 0
        return size

    @property
    def plain(self) -> bool:
        """Whether the sample lies in memory as it is."""
        if self.loose or any(isinstance(a.n, str) for a in self.axes[1:]) or self.shape is not None or self.values:
            return False
        strides = contiguous([a.n if isinstance(a.n, int) else 1 for a in self.axes])
        return all(a.map is None and (a.stride == s or a.n == 1) for a, s in zip(self.axes, strides, strict=True))

    def copy(self) -> Flow:
        """Give the same flow, to go on from in one of several ways."""
        new = copy(self)
        new.axes, new.values = [copy(axis) for axis in self.axes], list(self.values)
        return new

    def decode(self) -> None:
        """Put the decoding of bits that kernels cannot compute with before what is to come."""
        seen = decoded(Spec(self.logical, ()))
        if seen.dtype != self.logical:
            kernel, params = decoder(self.logical)
            self.values.append(Value(-1, Bound("value", seen, kernel, params), (), False, "0"))
            self.logical = seen.dtype


def flush(code: Source, flow: Flow, target: str, base: str, spec: Spec) -> None:
    """Write the loop nest of what is pending on a flow, into `target` from item `base` on, as the dtype of `spec`."""
    if all(isinstance(n, int) for n in flow.lengths) and flow.size == 0:
        return
    nest = _Nest(code, flow, target, base, spec.dtype)
    if nest.checked:
        code.add("bad = 0")
    nest.write()
    if nest.checked:
        with code.block("if bad > 0:"):
            code.refuse(max(v.number for v in nest.values))
    form = "a table of 256 values" if nest.table else "one loop nest" if nest.values else "moved as they are"
    where = "" if target.startswith("out") else ", into scratch"
    sizes = " x ".join(str(a.n) if isinstance(a.n, int) else "?" for a in nest.axes) or "1"
    code.notes.append(f"{' + '.join(flow.names) or 'copy'}: {form} over {sizes}{where}")


class _Nest:
    """The loops of one segment while they are written.

    `lead` is the axis of channels that is unrolled (or None), `inner` the one the innermost loop runs over, `pixel` how
    many items of a last axis that loop takes with each of its steps.
    """

    def __init__(self, code: Source, flow: Flow, target: str, base: str, dtype: np.dtype) -> None:
        self.code, self.flow, self.target, self.base, self.dtype = code, flow, target, base, dtype
        self.values = list(flow.values)
        axes = flow.axes or [Axis(1, 1)]
        arrays = [[e.reshape(1) if e.ndim == 0 else e for e in v.arrays] for v in self.values]
        fill = _fills(flow, len(axes), arrays)
        self.checked = any(v.bound.valid is not None or v.user for v in self.values)
        found = _table(self.values, flow.dtype, arrays, flow.size)
        self.table = ""
        if found is not None:
            self.table, arrays, self.checked = code.argument(found[0]), [[found[1]]], False
        flat = [e for es in arrays for e in es]
        if axes[-1].edge:  # never the innermost loop, which runs over slices
            axes = [*axes, Axis(1, 1)]
            flat, fill = [e[..., None] for e in flat], None if fill is None else fill[..., None]
        self.axes, packed = _merge(axes, [*flat, *([] if fill is None else [fill])])
        rest = iter(packed)
        self.arrays = [[next(rest) for _ in es] for es in arrays]
        self.fill = None if fill is None else next(rest)
        self.lead = _unrolled(self.axes)
        self.inner = max(k for k in range(len(self.axes)) if k != self.lead)
        self.pixel = 1
        if self.lead is None and len(self.axes) > 1:
            self._join_pixels(packed)
        self.strides = contiguous([a.n if isinstance(a.n, int) else 1 for a in self.axes])
        lead = self.lead
        self.channels = range(int(self.axes[lead].n)) if lead is not None else range(1)
        self.lane = self.strides[self.inner] if self.pixel == 1 else 1  # step of the innermost loop in the target
        self.names = {id(e): code.argument(np.ascontiguousarray(self._spread(e)).reshape(-1)) for e in packed}

    def _join_pixels(self, packed: list[np.ndarray]) -> None:
        """Let the innermost loop run over whole pixels where the last axis lies in a row in source and target."""
        last, before = self.axes[-1], self.axes[-2]
        varies = any(e.shape[-1] > 1 for e in packed)
        if last.map is None and last.stride == 1 and isinstance(last.n, int) and before.stride == last.n:
            small = isinstance(before.n, int) and before.n * last.n <= TILE
            if not before.edge and ((before.map is not None and not varies) or small):
                self.pixel, self.inner = last.n, len(self.axes) - 2

    def _spread(self, e: np.ndarray) -> np.ndarray:
        """Spread an element array over the innermost run of pixels where it varies within a pixel."""
        if self.pixel > 1 and e.shape[-1] > 1:
            return np.broadcast_to(e, (*e.shape[: self.inner], int(self.axes[self.inner].n), self.pixel))
        return e

    def _steps(self, e: np.ndarray) -> list[int]:
        """Give the step of an element array for each axis, 0 where it does not vary; the innermost run steps by one."""
        shape = self._spread(e).shape
        steps = [s if n > 1 else 0 for s, n in zip(contiguous(shape), shape, strict=True)]
        if self.pixel > 1:
            steps[self.inner] = 1 if shape[-1] > 1 or shape[self.inner] > 1 else 0
        return steps

    def element(self, e: np.ndarray, at: dict[int, str], channel: int, x: str) -> str:
        """Give an item of an element array, as text: its index sums over the loops it varies with."""
        steps = self._steps(e)
        terms = [f"{v} * {steps[k]}" for k, v in at.items() if steps[k]]
        if self.lead is not None and steps[self.lead] and channel:
            terms.append(str(channel * steps[self.lead]))
        if x and steps[self.inner]:
            terms.append(x if steps[self.inner] == 1 else f"{x} * {steps[self.inner]}")
        return f"{self.names[id(e)]}[{' + '.join(terms) or '0'}]"

    def write(self) -> None:
        """Write all loops."""
        last = len(self.axes) - 1
        outer = [k for k in range(last + 1) if k not in (self.lead, self.inner) and not (self.pixel > 1 and k == last)]
        self.loop(outer, {}, self.flow.base, self.base)

    def loop(self, rest: list[int], at: dict[int, str], source: str, target: str) -> None:
        """Write the loop over the first of the outer axes that are left, and what is inside it."""
        if not rest:
            self.run(at, source, target)
            return
        code, k, axis = self.code, rest[0], self.axes[rest[0]]
        i = code.fresh("i")
        with code.block(f"for {i} in range({axis.n}):"):
            inside, place = {**at, k: i}, f"e{i}"
            code.add(f"{place} = {target} + {i} * {self.strides[k]}")
            m = axis.map
            if m is None:
                code.add(f"b{i} = {source} + {i} * {axis.stride}")
                self.loop(rest[1:], inside, f"b{i}", place)
                return
            if axis.edge:
                code.add(f"b{i} = {source} + max(lo{m}, min(hi{m} - 1, {i})) * {axis.stride}")
                if axis.ring is not None:
                    with code.block(f"if b{i} < {axis.ring[0]}:"):
                        code.add(f"b{i} += {axis.ring[1]}")
                self.loop(rest[1:], inside, f"b{i}", place)
                return
            with code.block(f"if lo{m} <= {i} < hi{m}:"):
                code.add(f"b{i} = {source} + (o{m} + t{m} * {i}) * {axis.stride}")
                self.loop(rest[1:], inside, f"b{i}", place)
            if self.fill is not None:
                with code.block("else:"):
                    self.blank(rest[1:], inside, place)

    def blank(self, rest: list[int], at: dict[int, str], target: str) -> None:
        """Write the value outside over all that lies below an axis that is outside the source."""
        code = self.code
        if not rest:
            with code.block(f"for x in range({self.axes[self.inner].n} * {self.pixel}):"):
                self.put_fill(at, target)
            return
        i = code.fresh("i")
        with code.block(f"for {i} in range({self.axes[rest[0]].n}):"):
            code.add(f"e{i} = {target} + {i} * {self.strides[rest[0]]}")
            self.blank(rest[1:], {**at, rest[0]: i}, f"e{i}")

    def put_fill(self, at: dict[int, str], target: str) -> None:
        """Write one element outside the source, at x, for every channel."""
        assert self.fill is not None
        for c in self.channels:
            shift = c * self.strides[self.lead] if self.lead is not None else 0
            # Where nothing computes, the target holds the bits that carry the source.
            value = stored(self.element(self.fill, at, c, "x"), self.dtype if self.values else self.flow.dtype)
            self.code.add(f"{self.target}[u64({target} + {shift} + x * {self.lane})] = {value}")

    def run(self, at: dict[int, str], source: str, target: str) -> None:
        """Write the innermost loop: a run of elements as slices, each channel unrolled.

        Its length is an argument, not a constant: LLVM would unroll a short constant loop before it thinks of vectors.
        """
        code, axis, pixel, lane, lead = self.code, self.axes[self.inner], self.pixel, self.lane, self.lead
        n, m, k = axis.n, axis.map, code.fresh("u")
        length = str(n) if isinstance(n, str) else code.argument(n * pixel) if m is None else code.argument(n)
        step = 1 if pixel > 1 else axis.stride
        if m is None:
            many = f"{n} * {pixel}" if isinstance(n, str) else length
            code.add(f"m{k} = {many}; s{k} = {source}; d{k} = {target}")
        else:
            self._bounds(k, m, length, source, target, step)
        if m is None and not self.values and not self.table and step == 1 and lane == 1 and self.dtype_fits():
            for c in self.channels:
                ahead = c * self.axes[lead].stride if lead is not None else 0
                behind = c * self.strides[lead] if lead is not None else 0
                many = str(n * pixel) if isinstance(n, int) else f"m{k}"
                code.add(f"copy_items({self.target}, d{k} + {behind}, {self.flow.var}, s{k} + {ahead}, {many})")
            return
        held = self._hold(at, k)
        if m is None:
            self._loop(k, step, held, False)
            return
        copied = not self.values and not self.table and step == 1 and lane == 1 and self.dtype_fits() and lead is None
        with code.block(f"if t{m} > 0:"):
            if copied and isinstance(n, str):
                code.add(f"copy_items({self.target}, d{k}, {self.flow.var}, s{k}, m{k})")
            else:
                self._loop(k, step, held, False)
        with code.block("else:"):
            self._loop(k, step, held, True)
        if self.fill is not None:
            with code.block(f"if lo{m} > 0 or hi{m} < {length}:"):
                same = self.lead is None and not self._steps(self.fill)[self.inner]
                if same:  # read once: a store might alias it, for all that LLVM knows
                    value = self.element(self.fill, at, 0, "x")
                    code.add(f"z{k} = {stored(value, self.dtype if self.values else self.flow.dtype)}")
                for part in (f"range(lo{m} * {pixel})", f"range(hi{m} * {pixel}, {length} * {pixel})"):
                    with code.block(f"for x in {part}:"):
                        if same:
                            code.add(f"{self.target}[u64({target} + x * {self.lane})] = z{k}")
                        else:
                            self.put_fill(at, target)

    def dtype_fits(self) -> bool:
        """Whether the target holds the source's own bits."""
        return self.dtype == self.flow.dtype or self.dtype.name not in NATIVE

    def _bounds(self, k: str, m: str, length: str, source: str, target: str, step: int) -> None:
        """Write where a run along a mapped axis starts and how long it is.

        The whole row is taken where that stays inside the source array, what lies beyond the valid range being written
        over (so not where most lies beyond): a loop of always the same length has no odd elements left over at its end.
        """
        code, axis, pixel, lane = self.code, self.axes[self.inner], self.pixel, self.lane
        code.add(f"x0 = lo{m}; x1 = hi{m}")
        if not self.checked and not isinstance(axis.n, str):  # a ragged row may be a small part of the longest
            code.add(f"a = {source} + (o{m} if t{m} > 0 else o{m} - {length} + 1) * {axis.stride}")
            reach = 0 if self.lead is None else (int(self.axes[self.lead].n) - 1) * self.axes[self.lead].stride
            last = f"({length} - 1) * {axis.stride} + {reach + pixel}"
            with code.block(f"if 2 * (x1 - x0) > {length} and a >= 0 and a + {last} <= {self.flow.var}.size:"):
                code.add(f"x0 = 0; x1 = {length}")
        code.add(f"m{k} = (x1 - x0) * {pixel}")
        code.add(f"s{k} = {source} + (o{m} + x0 if t{m} > 0 else o{m} - x1 + 1) * {axis.stride}")
        code.add(f"d{k} = {target} + x0 * {lane * pixel}")

    def _hold(self, at: dict[int, str], k: str) -> dict[tuple[int, int, int], str]:
        """Give the text of each per-element constant in the innermost loop; those that stay the same are read before it,
        since a store inside might alias them for all that LLVM knows."""
        held: dict[tuple[int, int, int], str] = {}
        for c in self.channels:
            for i, es in enumerate(self.arrays):
                for j, e in enumerate(es):
                    if self._steps(e)[self.inner]:
                        held[c, i, j] = self.element(e, at, c, "x")
                    else:
                        held[c, i, j] = f"q{c}{k}_{i}_{j}"
                        self.code.add(f"q{c}{k}_{i}_{j} = {self.element(e, at, c, '')}")
        return held

    def _loop(self, k: str, step: int, held: dict[tuple[int, int, int], str], mirror: bool) -> None:
        """Write the loop over a run, forward in the source; unsigned indices, for which Numba writes no wrap-around that
        would keep LLVM from vectors."""
        code, lane, lead, pixel = self.code, self.lane, self.lead, self.pixel
        for c in self.channels:
            ahead = c * self.axes[lead].stride if lead is not None else 0
            behind = c * self.strides[lead] if lead is not None else 0
            back = f" + (m{k} - {pixel}) * {lane}" if mirror else ""
            code.add(f"s{k}_{c} = s{k} + {ahead}; d{k}_{c} = d{k} + {behind}{back}")
        if mirror and self._turns():
            self._turn(k, step, held)
            return
        if mirror and pixel > 1:
            with code.block(f"for y in range(m{k} // {pixel}):"), code.block(f"for x in range({pixel}):"):
                put = f"{self.target}[u64(d{k}_0 - y * {pixel} + x)]"
                got = f"{self.flow.var}[u64(s{k}_0 + y * {pixel} + x)]"
                code.add(f"{put} = {self.value(got, held, 0, f'd{k}_0 - y * {pixel} + x - ({self.base})')}")
            return
        with code.block(f"for x in range(m{k}):"):
            for c in self.channels:
                got = f"{self.flow.var}[u64(s{k}_{c} + x * {step})]"
                index = f"d{k}_{c} {'-' if mirror else '+'} x * {lane}"
                code.add(f"{self.target}[u64({index})] = {self.value(got, held, c, f'{index} - ({self.base})')}")

    def _turns(self) -> bool:
        """Whether mirrored runs go through scratch, so that the target is written upwards: memory that is written
        downwards is not fetched ahead (images of 224 x 224: 72 us mirrored, 42 us so, 31 us as they lie)."""
        n = self.axes[self.inner].n
        if self.lane != 1 or isinstance(n, str) or any(v.bound.random for v in self.values):
            return False
        return 64 <= n * self.pixel <= TILE

    def _turn(self, k: str, step: int, held: dict[tuple[int, int, int], str]) -> None:
        """Write a run into scratch as it lies, and from there into the target turned round."""
        code, pixel = self.code, self.pixel
        size = int(self.axes[self.inner].n) * pixel
        turned = code.own(carrier_of(self.dtype).name, size * len(self.channels))
        with code.block(f"for x in range(m{k}):"):
            for c in self.channels:
                got = f"{self.flow.var}[u64(s{k}_{c} + x * {step})]"
                code.add(f"{turned}[u64({c * size} + x)] = {self.value(got, held, c, '0')}")
        for c in self.channels:
            place, last = f"d{k}_{c} - m{k} + {pixel}", f"{c * size - pixel} + m{k}"
            if pixel == 1:
                with code.block(f"for x in range(m{k}):"):
                    code.add(f"{self.target}[u64({place} + x)] = {turned}[u64({last} - x)]")
                continue
            with code.block(f"for y in range(0, m{k}, {pixel}):"), code.block(f"for x in range({pixel}):"):
                code.add(f"{self.target}[u64({place} + y + x)] = {turned}[u64({last} - y + x)]")

    def value(self, got: str, held: dict[tuple[int, int, int], str], channel: int, place: str) -> str:
        """Write the value stages over one element and give the expression of the result."""
        code, expr, dtype = self.code, got, self.flow.dtype
        if self.table:
            return f"{self.table}[{held[channel, 0, 0]} + {expr if dtype.kind == 'b' else f'i64({expr})'}]"
        for i, value in enumerate(self.values):
            with code.of_step(value.number):
                code.add(f"v = {widened(expr, dtype)}")
                given = "".join(f", {held[channel, i, j]}" for j in range(len(value.arrays))) + code.given(
                    value.bound.params
                )
                if value.bound.valid is not None:
                    code.add(f"bad += not {code.function(value.bound.valid)}(v{given})")
                if value.bound.random:
                    given = f", {value.key}, {place}{given}"
                dtype = value.bound.out.dtype
                code.add(f"v = {code.function(value.bound.kernel)}(v{given})")
                if value.user and dtype.kind in "iu" and dtype.itemsize < 8:
                    code.add(f"bad += v < {np.iinfo(dtype).min} or v > {np.iinfo(dtype).max}")
                code.add(f"v = {stored('v', dtype)}")
            expr = "v"
        return expr


def _fills(flow: Flow, rank: int, arrays: list[list[np.ndarray]]) -> np.ndarray | None:
    """Give the values outside the source, after the value stages that follow: an array that broadcasts."""
    if flow.fill is None:
        return None
    start, skip, given = flow.fill
    rest = flow.values[skip:]
    if not rest:
        return np.full((1,) * rank, start)
    result = _evaluate(rest, arrays[skip:], np.full(1, start, start.dtype), start.dtype)
    if result is None:
        raise PipelineError(f"the fill value {given} of a padded stage cannot pass the value stages after it")
    found = result[..., 0]
    return found.reshape((1,) * (rank - found.ndim) + found.shape)


def _table(
    values: list[Value], dtype: np.dtype, arrays: list[list[np.ndarray]], size: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Give a table and the offsets into it, where value stages over an 8-bit source are better looked up: a gather costs
    as much as some four operations (CIFAR normalise: 1.65 us an image against 1.2 computed)."""
    every = [e for es in arrays for e in es]
    if len(values) <= 2 and not any(v.user for v in values):
        return None
    if (
        not values
        or dtype.itemsize != 1
        or size < 256
        or any(v.bound.random for v in values)
        or combinations(every) > 16
    ):
        return None
    inputs = (
        np.array([False, True])
        if dtype.kind == "b"
        else np.arange(-128, 128).astype(dtype)
        if dtype.kind == "i"
        else np.arange(256).astype(dtype)
    )
    result = _evaluate(values, arrays, inputs, dtype)
    if result is None:
        return None
    entries = result.reshape(-1)
    offsets = np.arange(entries.size // len(inputs)).reshape(result.shape[:-1] or (1,)) * len(inputs)
    rank = max([e.ndim for e in every], default=1)
    offsets = offsets.reshape((1,) * (rank - offsets.ndim) + offsets.shape)
    return np.ascontiguousarray(entries), (offsets + (128 if dtype.kind == "i" else 0)).astype(np.int64)


def outside(flow: Flow, value: float) -> Any:
    """Give the value outside the source as the dtype that is pending there, or as the bits that carry it."""
    if flow.values:
        return np.array(value).astype(flow.values[-1].bound.out.dtype)[()]
    if flow.logical == flow.dtype:
        return np.array(value).astype(flow.dtype)[()]
    bits = np.frombuffer(np.array(value).astype(flow.logical).tobytes(), flow.dtype)
    if (bits != bits[0]).any():
        raise PipelineError(f"padding {flow.logical} with {value} is not possible: cast it first")
    return bits[0]


def fixed(spec: Spec) -> tuple[int, ...]:
    """Give a shape as numbers, 0 for an axis that varies."""
    return tuple(int(n or 0) for n in spec.shape)


def widened(expr: str, dtype: np.dtype) -> str:
    """Give the text that makes a stored element the number that reaches a value kernel."""
    return {"int64": f"i64({expr})", "uint64": f"u64({expr})", "bool": expr, "float64": f"np.float64({expr})"}[
        wide(dtype)
    ]


def stored(expr: str, dtype: np.dtype) -> str:
    """Give the text that rounds a number to the dtype it is stored in."""
    return f"bool({expr})" if dtype.kind == "b" else f"np.{dtype.name}({expr})"


def combinations(elements: Sequence[np.ndarray]) -> int:
    """Give how many different sets of per-element constants there are."""
    return int(np.prod(np.broadcast_shapes(*(e.shape for e in elements)))) if elements else 1


def _evaluate(
    values: Sequence[Value], arrays: Sequence[Sequence[np.ndarray]], inputs: np.ndarray, dtype: np.dtype
) -> np.ndarray | None:
    """Run value stages in plain Python over inputs x all constants: shape (*broadcast, inputs), None if one refuses."""
    shape = np.broadcast_shapes(*(e.shape for es in arrays for e in es))
    result = np.empty((*shape, len(inputs)), values[-1].bound.out.dtype)
    for place in np.ndindex(*shape):
        given = [[np.broadcast_to(e, shape)[place] for e in es] for es in arrays]
        for x, start in enumerate(inputs):
            at = (*place, x)
            try:
                result[at] = _pass(values, given, start, dtype)
            except (ArithmeticError, ValueError, TypeError, IndexError):
                return None
    return result


def _pass(values: Sequence[Value], given: Sequence[Sequence[Any]], element: Any, dtype: np.dtype) -> Any:
    """Take one element through value stages in plain Python; raises ValueError where one refuses it."""
    with np.errstate(all="ignore"):
        for value, constants in zip(values, given, strict=True):
            bound, v = value.bound, widen(element, dtype)
            if bound.valid is not None and not bound.valid(v, *constants, *bound.params):
                raise ValueError("refused")
            v, dtype = bound.kernel(v, *constants, *bound.params), bound.out.dtype
            if value.user and dtype.kind in "iu" and not np.iinfo(dtype).min <= v <= np.iinfo(dtype).max:
                raise ValueError("out of range")
            element = dtype.type(v)
    return element


def widen(value: Any, dtype: np.dtype) -> Any:
    """Give a stored element as the number that reaches a value kernel, in plain Python."""
    kind = wide(dtype)
    return int(value) if kind in ("int64", "uint64") else bool(value) if kind == "bool" else np.float64(value)


def _merge(axes: list[Axis], arrays: list[np.ndarray]) -> tuple[list[Axis], list[np.ndarray]]:
    """Join neighbouring axes that lie in a row in source and target, and drop those of length one."""
    rank = len(axes)
    arrays = [e.reshape((1,) * (rank - e.ndim) + e.shape) for e in arrays]
    axes = list(axes)
    for k in range(len(axes) - 1, 0, -1):
        outer, inner = axes[k - 1], axes[k]
        if outer.map is not None or inner.map is not None or isinstance(outer.n, str) or isinstance(inner.n, str):
            continue
        size = outer.n * inner.n
        varied = [e.shape[k - 1] > 1 or e.shape[k] > 1 for e in arrays]
        if any(varied) and size > TILE:
            continue
        if inner.n == 1:
            joined = Axis(size, outer.stride)
        elif outer.n == 1 or outer.stride == inner.stride * inner.n:
            joined = Axis(size, inner.stride)
        else:
            continue
        for i, (e, varies) in enumerate(zip(arrays, varied, strict=True)):
            before, after = e.shape[: k - 1], e.shape[k + 1 :]
            if varies:
                e = np.broadcast_to(e, (*before, outer.n, inner.n, *after))
            arrays[i] = e.reshape(*before, size if varies else 1, *after)
        axes[k - 1 : k + 1] = [joined]
    return axes, [np.array(e, order="C") for e in arrays]  # copies, so that each has an identity of its own


def _unrolled(axes: list[Axis]) -> int | None:
    """Give the axis of channels to unroll: interleaved in the source and not in the target, or the other way round."""
    for k, axis in enumerate(axes):
        rest = [a for i, a in enumerate(axes) if i != k]
        if axis.map is not None or isinstance(axis.n, str) or not 2 <= axis.n <= UNROLL or not rest:
            continue
        run = rest[-1]
        if isinstance(run.n, str) or run.n <= axis.n or run.edge:
            continue
        last = k == len(axes) - 1
        if (not last and axis.stride == 1 and run.stride >= axis.n) or (last and axis.stride > 1 and run.stride == 1):
            return k
    return None
