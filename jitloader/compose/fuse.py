"""Walk the steps of a pipeline over one sample and write the function that fills batches with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import residency
from ..dtypes import carrier_of
from ..errors import PipelineError
from ..samples import Samples, contiguous
from ..spec import Spec
from ..stages import Bound, Step
from .lookups import measure, reach
from .nest import Axis, Flow, Value, combinations, fixed, flush, outside, widened
from .prefetch import prefetch, wanted_of
from .program import Later, Output, Program
from .rows import Recipe, Writer


def compose(
    sources: dict[str, Samples],
    steps: Sequence[Step],
    fields: Sequence[str],
    order: Callable[..., Any],
    order_params: Sequence[Any],
    count: int,
    rows: str = "",
    base: int | None = None,
) -> Program:
    """Write the program that fills batches of these fields, and of the row numbers under the name `rows` where given.

    The rest is what a `Recipe` holds.
    """
    recipe = Recipe(sources, tuple(steps), order, tuple(order_params), count, base)
    made = _Fuser(recipe, fields, rows)
    program, grounds = made.program(), residency.grounds(made.sources)
    if not grounds:
        return program
    # Written when it is asked for: files that are in memory already need none.
    return program._replace(grounds=grounds, reach=Later(lambda: reach(recipe, fields)))


class _Fuser(Writer):
    """The program that fills batches, and how far each field has come."""

    def __init__(self, recipe: Recipe, fields: Sequence[str], rows: str) -> None:
        super().__init__(recipe, fields)
        self.fields = fields
        self.flows: dict[str, Flow] = {}
        self.done: set[str] = set()  # outputs that a stage wrote by itself
        self.maps: list[str] = []
        self.spec = {name: samples.spec for name, samples in self.sources.items()}
        self.last: dict[str, int] = {}
        closing: dict[str, tuple[str, int]] = {}
        follows: dict[str, str] = {}
        for number in self.active:
            step = self.steps[number]
            for name, bound in zip(step.outputs, step.bound, strict=True):
                self.spec[name], self.last[name] = bound.out, number
                if bound.closes:
                    closing[name] = (bound.closes, bound.multiple)
                    follows[name] = name if name in step.fields else step.fields[0]
        self.outputs = [self._output(name, closing.get(name), follows.get(name, name)) for name in fields]
        if rows:
            self.outputs.append(Output(rows, Spec(np.dtype(np.int64), ()), np.dtype(np.int64), 1))
            self.done.add(rows)
        self.row_numbers = rows
        self.at = {o.name: k for k, o in enumerate(self.outputs)}

    def _output(self, name: str, closing: tuple[str, int] | None, follows: str) -> Output:
        spec = self.spec[name]
        whole = self.sources[name] if name not in self.last else None
        carrier = whole.carrier if whole is not None else carrier_of(spec.dtype)
        items = spec.dtype.itemsize // carrier.itemsize
        if not spec.ragged:
            return Output(name, spec, carrier, spec.size * items)
        inner = Spec(spec.dtype, spec.shape[1:]).size * items
        form, multiple = closing or ("ragged", 1)
        return Output(name, spec, carrier, inner, form, multiple, follows)

    def program(self) -> Program:
        """Write the function, and the one that measures where rows vary."""
        code, add = self.code, self.code.add
        wanted, lead = wanted_of(self.sources.values())
        with self.rows(lead, functools.partial(prefetch, self, wanted, lead) if wanted else None):
            if self.row_numbers:
                start = f" + {code.argument(self.recipe.base)}" if self.recipe.base else ""
                add(f"out{self.at[self.row_numbers]}[place + done + j] = r{start}")
            if any(b.random for k in self.active for b in self.steps[k].bound):
                add("sample = subkey(key, r)")
            for name, samples in self.sources.items():
                self.flows[name] = self._read(name, samples)
            for number in self.active:
                with code.of_step(number):
                    self._step(self.steps[number], number)
            for output in self.outputs:
                if output.name not in self.done:
                    with code.of_step(self.last.get(output.name, -1)):
                        flow = self.flows[output.name]
                        self._close(output, flow)
                        flush(code, flow, f"out{self.at[output.name]}", self._base(output), output.spec)
        names = []
        for k, output in enumerate(self.outputs):
            names += [f"out{k}"] if output.form == "fixed" else [f"out{k}", f"starts{k}", f"extents{k}"]
        varied = sorted({o.lengths for o in self.outputs if o.form != "fixed"})
        made = self.finish(names, self.outputs)
        return made._replace(measure=measure(self.recipe, self.fields, varied)) if varied else made

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, name: str, samples: Samples) -> Flow:
        suffix = self.suffix[name] + self.partner
        var, base = self.row(samples, "r", suffix)
        shape: tuple[Any, ...] = samples.shape
        if len(samples.strides) > len(shape):
            shape = (*shape, samples.dtype.itemsize)
        flow = Flow(var, base, samples.carrier, [f"n{suffix}" if n is None else n for n in shape], samples.strides)
        flow.logical = samples.dtype
        flow.loose = any(not part.flat.flags.aligned for part in samples.parts)
        if samples.low is not None or samples.high is not None:
            self._bound(flow, samples, suffix)
        return flow

    def _bound(self, flow: Flow, samples: Samples, suffix: str) -> None:
        """Write which elements of the first axis are there, and what stands for the others."""
        add, axis, m = self.code.add, flow.axes[0], self.code.fresh()
        axis.map, axis.edge = m, samples.fill is None
        if samples.ring:
            axis.ring = samples.parts[0].offset, samples.parts[0].count * samples.parts[0].stride
        # The nearest element inside may lie beyond the other end of the sample.
        low = f"l{suffix}" if samples.low is not None else f"min(0, h{suffix} - 1)"
        high = f"h{suffix}" if samples.high is not None else f"max({axis.n}, l{suffix} + 1)"
        add(f"o{m} = 0; t{m} = 1; lo{m} = {low}; hi{m} = {high}")
        if samples.fill is not None:
            add(f"lo{m} = min(max(lo{m}, 0), {axis.n}); hi{m} = max(min(hi{m}, {axis.n}), lo{m})")
            flow.fill = outside(flow, samples.fill), 0, samples.fill

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, step: Step, number: int) -> None:
        """Write one step for its fields."""
        key = "0"
        if any(b.random for b in step.bound):
            key = f"key_{number}{self.partner}"
            self.code.add(f"{key} = subkey(sample, {step.salt})")
        if step.bound[0].kind == "pair":
            self._pair(step, number, key)
            return
        if step.joint:
            self._joint(step, number, key)
            return
        for which, name in enumerate(step.fields):
            bound, before = step.bound[which], step.before[which]
            if bound.kind not in ("index", "shape"):
                self._ready(name)
            if before.dtype != self.flows[name].logical:
                self.flows[name].decode()
            if bound.kind == "sample":
                self._sample(step, number, key, [name], [before], [name], [bound])
            elif bound.kind == "choice":
                self._choose(step, number, key, name, before, bound)
            else:
                flow = self.flows[name] = self._link(self.flows[name], step, number, which, key)
                flow.names = [*flow.names, step.stage.name]
        for name, bound in list(zip(step.outputs, step.bound, strict=True))[len(step.fields) :]:
            self._beside(step.fields[0], name, bound)

    def _ready(self, name: str) -> Flow:
        """Let a stage compute with a field: numbers that travel as bytes, as they lie at odd places, are laid in a row first."""
        flow = self.flows[name]
        carrier = carrier_of(flow.logical)
        if flow.values or flow.dtype == carrier:
            return flow
        lengths = [n for n in flow.lengths[:-1] if isinstance(n, int)]
        if len(lengths) < len(flow.lengths) - 1:
            raise PipelineError(
                f"field {name!r}: numbers of rows that vary lie at odd places in memory: give np.ascontiguousarray of them"
            )
        work = self.code.own(carrier.name, math.prod(lengths))
        raw = self.code.fresh("raw")
        self.code.add(f"{raw} = as_bytes({work})")
        flush(self.code, flow, raw, "0", Spec(flow.dtype, (*lengths, carrier.itemsize)))
        new = self.flows[name] = Flow(work, "0", carrier, lengths, contiguous(lengths))
        new.logical = flow.logical
        return new

    def _joint(self, step: Step, number: int, key: str) -> None:
        for name, before in zip(step.fields, step.before, strict=True):
            self._ready(name)
            if before.dtype != self.flows[name].logical:
                self.flows[name].decode()
        self._sample(step, number, key, list(step.fields), list(step.before), list(step.outputs), list(step.bound))

    def _pair(self, step: Step, number: int, key: str) -> None:
        """Write a stage over a row and its partner, another row drawn by the row's key: the partner comes through all
        steps before this one with the draws of its own row."""
        code, add = self.code, self.code.add
        own, outer, known = self.flows, self.partner, code.fresh("own")
        add(f"{known} = r; r = randint({key}, 0, {self.count}); error[1] = r")
        self.partner = code.fresh("_p")
        add(f"sample{self.partner} = sample; sample = subkey(key, r)")
        needed, ahead = self.recipe.needed(step.fields, number)
        self.flows = {name: self._read(name, s) for name, s in self.sources.items() if name in needed}
        for k in ahead:
            with code.of_step(k):
                self._step(self.steps[k], k)
        others = {}
        for name, before in zip(step.fields, step.before, strict=True):
            flow = self._ready(name)
            if before.dtype != flow.logical:
                flow.decode()
            with code.of_step(max((k for k in ahead if name in self.steps[k].outputs), default=-1)):
                others[name] = flow if flow.plain and flow.shape is None else self._cut(flow, before)
        add(f"r = {known}; error[1] = r; sample = sample{self.partner}")
        self.flows, self.partner = own, outer
        for name, out, before, bound in zip(step.fields, step.outputs, step.before, step.bound, strict=True):
            self._ready(name)
            if before.dtype != self.flows[name].logical:
                self.flows[name].decode()
            other = f"partner of {name}"
            self.flows[other] = others[name]
            self._sample(step, number, key, [name, other], [before, before], [out], [bound])
            del self.flows[other]

    def _sample(
        self,
        step: Step,
        number: int,
        key: str,
        ins: list[str],
        befores: list[Spec],
        outs: list[str],
        bounds: list[Bound],
        into: tuple[str, str] | None = None,
    ) -> None:
        """Write a stage over whole samples: sources as they lie or through scratch, targets in scratch or the batch."""
        code, add, bound = self.code, self.code.add, bounds[0]
        names = []
        for k, (name, before) in enumerate(zip(ins, befores, strict=True)):
            flow = self.flows[name]
            if not flow.plain or flow.shape is not None:
                flow = self.flows[name] = self._cut(flow, before)
            shape = flow.lengths or (1,)
            size = " * ".join(str(n) for n in shape)
            add(f"from{k} = shaped({flow.var}, {flow.base}, ({', '.join(map(str, shape))},))")
            names.append(f"from{k}")
            if bound.valid is not None:
                add("bad = 0")
                element = widened(f"{flow.var}[{flow.base} + x]", before.dtype)
                with code.block(f"for x in range({size}):"):
                    add(f"bad += not {code.function(bound.valid)}({element}{code.given(bound.params)})")
                with code.block("if bad > 0:"):
                    code.refuse(number)
        made: dict[str, Flow] = {}
        for k, (name, out) in enumerate(zip(outs, bounds, strict=True)):
            shape = fixed(out.out)
            target, base = into or self._target(name, number, out.out, made)
            add(f"at{k} = {base}")
            extents = ", ".join(map(str, shape or (1,)))
            add(f"into{k} = shaped({target}, at{k}, ({extents},))")
            names.append(f"into{k}")
        scratch = "".join(f", {code.own(dtype, size)}" for dtype, size in bound.scratch)
        add(f"{code.function(bound.kernel)}({', '.join(names)}, {key}{scratch}{code.given(bound.params)})")
        self.flows.update(made)
        code.notes.append(f"{step.stage.name}: one pass over the sample")

    def _target(self, name: str, number: int, out: Spec, made: dict[str, Flow]) -> tuple[str, str]:
        """Give where a step writes a whole sample: the batch where it is the last, else scratch, to flow on from."""
        shape, carrier = fixed(out), carrier_of(out.dtype)
        if self.last[name] == number and name in self.at and not self.partner:
            self.done.add(name)
            target, base = f"out{self.at[name]}", self._base(self.outputs[self.at[name]])
            made[name] = Flow(target, base, carrier, shape, contiguous(shape))  # a later step may read it
            return target, base
        target = self.code.own(carrier.name, out.size)
        made[name] = Flow(target, "0", carrier, shape, contiguous(shape))
        return target, "0"

    def _choose(self, step: Step, number: int, key: str, name: str, before: Spec, bound: Bound) -> None:
        """Write a stage that is one of several, drawn for each sample."""
        made: dict[str, Flow] = {}
        self._branch(step, number, key, name, before, bound, self._target(name, number, bound.out, made))
        self.flows.update(made)

    def _branch(
        self, step: Step, number: int, key: str, name: str, before: Spec, bound: Bound, into: tuple[str, str]
    ) -> None:
        code, flow = self.code, self.flows[name]
        pick = code.fresh("pick")
        code.add(f"{pick} = {code.function(bound.kernel)}({key}{code.given(bound.params)})")
        for k, (stage, inner) in enumerate(bound.choices):
            with code.block(f"if {pick} == {k}:"):
                own = code.fresh("key")
                code.add(f"{own} = subkey({key}, {k})")
                self.flows[name] = flow.copy()
                if inner.kind == "choice":
                    self._branch(step, number, own, name, before, inner, into)
                elif inner.kind == "sample":
                    self._sample(step, number, own, [name], [before], [name], [inner], into)
                else:
                    alone = step._replace(stage=stage, fields=(name,), before=(before,), bound=(inner,))
                    flow_k = self._link(self.flows[name], alone, number, 0, own)
                    flow_k.names = [*flow_k.names, stage.name]
                    flush(code, flow_k, *into, inner.out)
        self.flows[name] = flow

    def _cut(self, flow: Flow, spec: Spec) -> Flow:
        """Write what is pending into a scratch row and go on from there."""
        shape = flow.lengths
        if any(isinstance(n, str) for n in shape):
            raise PipelineError(
                f"a ragged field ({spec}) has two stages in a row that do not fuse: cut and pad first, then the others"
            )
        size = 1
        for n in shape:
            size *= n if isinstance(n, int) else 0
        work = self.code.own(carrier_of(spec.dtype).name, size)
        flush(self.code, flow, work, "0", spec)
        strides = contiguous([n if isinstance(n, int) else 1 for n in shape])
        new = Flow(work, "0", carrier_of(spec.dtype), shape, strides)
        new.logical = spec.dtype
        return new

    def _link(self, flow: Flow, step: Step, number: int, which: int, key: str) -> Flow:
        """Add a value, index or shape stage to what is pending, after a cut where they do not compose."""
        bound, before = step.bound[which], step.before[which]
        if bound.kind == "shape":
            shape = fixed(bound.out)
            if len(flow.lengths) > len(before.shape):
                shape = (*shape, before.dtype.itemsize)  # the bytes of items of odd size
            if flow.plain:
                new = Flow(flow.var, flow.base, flow.dtype, shape, contiguous(shape))
                new.logical, new.names = flow.logical, flow.names
                return new
            if flow.shape is not None:
                flow = self._cut(flow, before)
            flow.shape = shape
            return flow
        if bound.kind == "value":
            varies = [k for e in bound.elements for k, n in enumerate(e.shape) if n > 1]
            clash = flow.shape is not None and (bool(varies) or bound.random)
            clash = clash or any(flow.axes[k].map is not None for k in varies if k < len(flow.axes))
            clash = clash or (flow.fill is not None and (bound.random or combinations(bound.elements) > _most(flow)))
            if clash:
                flow = self._cut(flow, before)
            flow.values.append(Value(number, bound, bound.elements, step.stage.user, key))
            return flow
        order = bound.order or tuple(range(len(flow.axes)))
        varies = [order.index(k) for v in flow.values for e in v.arrays for k, n in enumerate(e.shape) if n > 1]
        clash = (
            flow.shape is not None or any(v.bound.random for v in flow.values) or bool(set(varies) & set(bound.touches))
        )
        clash = clash or (flow.fill is not None and bound.fill is not None)
        clash = clash or any(flow.axes[order[k]].edge for k in bound.touches)
        most = _most(flow)
        clash = clash or (bound.fill is not None and any(combinations(v.arrays) > most for v in flow.values))
        if clash:
            flow = self._cut(flow, before)
        if bound.order is not None:
            behind = flow.axes[len(order) :]  # the bytes of items of odd size
            flow.axes = [flow.axes[k] for k in order] + behind
            flow.values = [v._replace(arrays=tuple(e.transpose(order) for e in v.arrays)) for v in flow.values]
        if bound.fill is not None:
            flow.fill = outside(flow, bound.fill), len(flow.values), bound.fill
        if bound.touches:
            self._place(flow, bound, number, key, step.fields[which])
        return flow

    def _place(self, flow: Flow, bound: Bound, number: int, key: str, name: str) -> None:
        """Run an index kernel for this sample and compose its maps with those pending."""
        code, add = self.code, self.code.add
        if not self.maps:
            most = max(len(spec.shape) for spec in self._every())
            self.maps = [code.own("int64", most + 1) for _ in range(4)]  # bits of a dtype may lie on an axis more
        size, limit, offset, sign = self.maps
        seen = zip(flow.axes, bound.out.shape, strict=False)  # the bytes of items of odd size lie on an axis more
        new = [self._extent(axis, n, bound, number, name) for axis, n in seen]
        new += [axis.n for axis in flow.axes[len(new) :]]
        for k, axis in enumerate(flow.axes):
            add(f"{size}[{k}] = {axis.n}; {limit}[{k}] = {new[k]}; {offset}[{k}] = 0; {sign}[{k}] = 1")
        arrays = f"{size}, {limit}, {offset}, {sign}"
        if bound.choices:
            add(f"pick = {code.function(bound.kernel)}({key}{code.given(bound.params)})")
            for k, (_, inner) in enumerate(bound.choices):
                with code.block(f"if pick == {k}:"):
                    add(f"{code.function(inner.kernel)}(subkey({key}, {k}), {arrays}{code.given(inner.params)})")
        else:
            add(f"{code.function(bound.kernel)}({key}, {arrays}{code.given(bound.params)})")
        for k, axis in enumerate(flow.axes):
            if k not in bound.touches:
                continue
            n = new[k]
            if axis.map is None:
                m = axis.map = code.fresh()
                add(f"o{m} = 0; t{m} = 1; lo{m} = 0; hi{m} = {axis.n}")
            m = axis.map
            add(f"p = {offset}[{k}]; q = {sign}[{k}]")
            add(f"a = lo{m} - p if q > 0 else p - hi{m} + 1")
            add(f"b = hi{m} - p if q > 0 else p - lo{m} + 1")
            add(
                f"o{m} = o{m} + t{m} * p; t{m} = t{m} * q; lo{m} = min(max(a, 0), {n}); hi{m} = max(min(b, {n}), lo{m})"
            )
            axis.n = n

    def _every(self) -> list[Spec]:
        """List the specs that come up on the way."""
        bound = [b.out for step in self.steps for b in step.bound]
        return [*(s.spec for s in self.sources.values()), *bound]

    def _extent(self, axis: Axis, n: int | None, bound: Bound, number: int, name: str) -> int | str:
        """Give the new length of an axis: a number, the length that the batch gives it, or one computed from the old."""
        code = self.code
        if n is not None:
            if isinstance(axis.n, str) and bound.valid is not None:
                with code.block(f"if not {code.function(bound.valid)}({axis.n}{code.given(bound.params)}):"):
                    code.refuse(number)
            return n
        if bound.closes:
            for known in (name, *self.steps[number].outputs):  # a mask may be kept where its field is not
                output = self.outputs[self.at[known]] if known in self.at else None
                if output is not None and output.form == "longest" and output.lengths == name:
                    made = code.fresh("n")
                    code.add(f"{made} = extents{self.at[known]}[place + done + j]")
                    return made
            return axis.n
        if bound.length is not None:
            made = code.fresh("n")
            code.add(f"{made} = {code.function(bound.length)}({axis.n}{code.given(bound.params)})")
            return made
        return axis.n

    def _beside(self, name: str, beside: str, bound: Bound) -> None:
        """Write a field that tells of another: which of its elements are data, or how many."""
        code, flow = self.code, self.flows[name]
        axis = flow.axes[0]
        m = axis.map
        if self.partner:
            return
        self.done.add(beside)
        if beside not in self.at:
            return
        k = self.at[beside]
        base = self._base(self.outputs[k])
        low, high = (f"lo{m}", f"hi{m}") if m is not None else ("0", str(axis.n))
        if bound.kind == "length":
            code.add(f"out{k}[{base}] = {high} - {low}")
            return
        code.add(f"z = {base}")
        code.add(f"mask{k} = out{k}[z : z + {axis.n}]")
        for begin, end, value in (("0", low, False), (low, high, True), (high, axis.n, False)):
            with code.block(f"for x in range({begin}, {end}):"):
                code.add(f"mask{k}[u64(x)] = {value}")

    def _base(self, output: Output) -> str:
        """Give the item at which a row of an output starts, as text."""
        if output.form == "fixed":
            return f"(place + done + j) * {output.size}"
        return f"starts{self.at[output.name]}[place + done + j]"

    def _close(self, output: Output, flow: Flow) -> None:
        """Let a row that stays ragged have the length that was measured for it."""
        if output.form == "ragged" and flow.axes and isinstance(flow.axes[0].n, str):
            flow.axes[0].n = (
                f"extents{self.at[output.name]}[place + done + j]" if flow.axes[0].map is None else flow.axes[0].n
            )


def _most(flow: Flow) -> int:
    """Give how many different constants a value outside may pass; a row that varies cannot be set down in between."""
    return 4096 if any(isinstance(n, str) for n in flow.lengths) else 16
