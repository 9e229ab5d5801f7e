"""Walk the steps of a pipeline over one sample and write the function that fills batches with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import jit, residency
from ..dtypes import carrier_of
from ..errors import PipelineError
from ..samples import Samples, contiguous
from ..spec import Spec
from ..stages import Bound, Step
from .nest import Axis, Flow, Value, combinations, fixed, flush, outside, widened
from .program import BLOCK, FIXED, Later, Output, Program
from .source import Source


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

    `order(first, step, rows, *order_params)` gives rows for positions; `count` is the number of samples, against which
    each row is checked. With `base`, the data are one source of several: rows below 0 are another's and left alone, and
    row numbers come out counted from `base`.
    """
    given = (sources, steps, fields, _needed(steps, fields), count, rows, base)
    made = _Fuser(*given)
    grounds = residency.grounds(made.sources)
    program = made.program(order, order_params)
    if not grounds:
        return program
    # Written when it is asked for: files that are in memory already need none.
    return program._replace(grounds=grounds, reach=Later(lambda: _Fuser(*given).reach(order, order_params)))


def _needed(steps: Sequence[Step], fields: Sequence[str]) -> set[str]:
    """Give the fields that must be read or made for some fields to come out."""
    needed = set(fields)
    for step in reversed(steps):
        if needed & set(step.outputs):
            needed |= set(step.fields)
    return needed


class _Fuser:
    """What one program is written from, and how far each field has come."""

    def __init__(
        self,
        sources: dict[str, Samples],
        steps: Sequence[Step],
        fields: Sequence[str],
        needed: set[str],
        count: int,
        rows: str,
        base: int | None,
    ) -> None:
        self.sources = {n: s for n, s in sources.items() if n in needed}
        self.steps = tuple(steps)
        self.active = [k for k, step in enumerate(steps) if needed & set(step.outputs)]
        self.suffix = {name: f"_{k}" for k, name in enumerate(self.sources)}  # of a field's variables
        self.code = Source()
        self.count, self.base = self.code.argument(count), base
        self.flows: dict[str, Flow] = {}
        self.done: set[str] = set()  # outputs that a stage wrote by itself
        self.partner = ""  # what the names of a partner's row end in, while it is written
        self.maps: list[str] = []
        self.parts: dict[int, list[str]] = {}
        self.spec = {name: samples.spec for name, samples in self.sources.items()}
        self.last: dict[str, int] = {}
        closing: dict[str, tuple[str, int]] = {}
        follows: dict[str, str] = {}
        for number in self.active:
            step = steps[number]
            for name, bound in zip(step.outputs, step.bound, strict=True):
                self.spec[name], self.last[name] = bound.out, number
                if bound.closes:
                    closing[name] = (bound.closes, bound.multiple)
                    follows[name] = name if name in step.fields else step.fields[0]
        self.outputs = [self._output(name, closing.get(name), follows.get(name, name)) for name in fields]
        if rows:
            self.outputs.append(Output(rows, Spec(np.dtype(np.int64), ()), np.dtype(np.int64), 1))
            self.done.add(rows)
        self.rows = rows
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

    def program(self, order: Callable[..., Any], order_params: Sequence[Any]) -> Program:
        """Write the function, and the one that measures where rows vary."""
        code, add, block = self.code, self.code.add, self.code.block
        varied = [o for o in self.outputs if o.form != "fixed"]
        add("done = 0")
        with block("while done < count:"):
            add(f"m = min({BLOCK}, count - done)")
            self._find()
            with block("for j in range(m):"):
                add("r = rows[j]")
                if self.base is not None:
                    with block("if r < 0:"):
                        add("continue")
                add("error[1] = r; error[3] = done + j")
                with block(f"if r < 0 or r >= {self.count}:"):
                    code.refuse(-1)
                self._prefetch()
                if self.rows:
                    start = f" + {code.argument(self.base)}" if self.base else ""
                    add(f"out{self.at[self.rows]}[place + done + j] = r{start}")
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
            add("done += m")
        add("return 0")
        names = [*FIXED]
        for k, output in enumerate(self.outputs):
            names.append(f"out{k}")
            if output.form != "fixed":
                names += [f"starts{k}", f"extents{k}"]
        made = self._finish(names, tuple(self.outputs), order, order_params)._replace(notes=tuple(code.notes))
        return made._replace(measure=self._measure(order, order_params) if varied else None)

    def _finish(
        self, names: list[str], outputs: tuple[Output, ...], order: Callable[..., Any], order_params: Sequence[Any]
    ) -> Program:
        """Give what was written as a program."""
        code = self.code
        text, function = code.finish(jit.APART, names)
        return Program(
            source=text,
            function=function,
            outputs=outputs,
            find=order,
            order=tuple(order_params),
            arguments=tuple(code.arguments),
            scratch=tuple(code.scratch),
            owners=tuple(code.owners),
            steps=self.steps,
            notes=(),
        )

    def _find(self) -> None:
        """Write how the rows of a block of positions are found."""
        with self.code.block("if find_rows(find, order, first + done * step, step, rows[:m]) != 0:"):
            self.code.add("return 2")

    # -- reading ------------------------------------------------------------------------------------------------------

    def _row(self, samples: Samples, row: str, suffix: str, search: bool = True) -> tuple[str, str]:
        """Write where a sample lies; give the names of its flat memory and of the place of its first item. Without `search`
        that may be a place beyond the end of an array: good enough to be fetched in vain."""
        code, add = self.code, self.code.add
        rows, at = samples.rows, f"r{suffix}"
        if rows.table is not None:
            add(f"{at} = {code.argument(rows.table)}[{row}]")
        elif rows.start or rows.step != 1:
            add(f"{at} = {code.argument(rows.start)} + {code.argument(rows.step)} * {row}")
        else:
            add(f"{at} = {row}")
        if samples.length is not None:
            add(f"n{suffix} = {code.function(samples.length)}({at}{code.given(samples.params)})")
        if suffix.removesuffix(self.partner) in self.suffix.values():
            for side, function in (("l", samples.low), ("h", samples.high)):
                if function is not None:
                    add(f"{side}{suffix} = {code.function(function)}({at}{code.given(samples.params)})")
        if samples.locate is not None:
            add(f"{at} = {code.function(samples.locate)}({at}{code.given(samples.params)})")
        if len(samples.parts) == 1:
            part = samples.parts[0]
            start = f"{code.argument(part.offset)} + " if part.offset else ""
            add(f"b{suffix} = {start}{at} * {part.stride}")
            return code.argument(part.flat), f"b{suffix}"
        table, guess, shift = self._parts(samples)
        add(f"k{suffix} = i64({guess}[{at} >> {shift}])")
        if search:
            add(f"top{suffix} = i64({guess}[({at} >> {shift}) + 1])")
            with code.block(f"while k{suffix} < top{suffix}:"):  # halved until one part is left
                add(f"middle = (k{suffix} + top{suffix} + 1) >> 1")
                with code.block(f"if {table}[middle * 8] <= {at}:"):
                    add(f"k{suffix} = middle")
                with code.block("else:"):
                    add(f"top{suffix} = middle - 1")
        add(f"k{suffix} *= 8")
        like = code.argument(next((p.flat for p in samples.parts if not p.flat.flags.aligned), samples.parts[0].flat))
        add(f"flat{suffix} = array_at({table}[k{suffix} + 1], {table}[k{suffix} + 2], {like})")
        add(f"b{suffix} = {table}[k{suffix} + 3] + ({at} - {table}[k{suffix}]) * {table}[k{suffix} + 4]")
        return f"flat{suffix}", f"b{suffix}"

    def _parts(self, samples: Samples) -> list[str]:
        """Give the names of the table of a field's arrays, a cache line each (rows before it, address, size, offset, stride),
        and of the one that says of every 2**shift-th row in which array it lies: the search is between two of these, and
        mostly over before it begins."""
        parts = samples.parts
        if id(parts) not in self.parts:
            before = np.concatenate([[0], np.cumsum([p.count for p in parts])])
            lines = np.zeros((len(parts), 8), np.int64)
            lines[:, 0] = before[:-1]
            for line, p in zip(lines, parts, strict=True):
                line[1:5] = p.flat.ctypes.data, p.flat.size, p.offset, p.stride
            shift = max(int(before[-1]) // (8 * len(parts)), 1).bit_length() - 1
            marks = np.arange((int(before[-1]) >> shift) + 2) << shift
            guess = np.clip(np.searchsorted(before, marks, "right") - 1, 0, len(parts) - 1).astype(np.int32)
            arguments = lines.reshape(-1), guess, shift
            self.parts[id(parts)] = [self.code.argument(value) for value in arguments]
        return self.parts[id(parts)]

    def _prefetch(self) -> None:
        """Ask for the rows to come: worth up to 1.6x on rows of a few cache lines."""
        code, wanted = self.code, []
        for name, samples in self.sources.items():
            size = 1
            for n, s in zip(samples.shape, samples.strides, strict=False):
                size += ((n or 1) - 1) * abs(s)
            if samples.nbytes:
                wanted.append((name, samples, size * samples.carrier.itemsize))
        if not wanted:
            return
        total = sum(nbytes for *_, nbytes in wanted)
        ahead = 16 if total <= 512 else 8 if total <= 2048 else 2
        with code.block(f"if j + {ahead} < m and 0 <= rows[j + {ahead}] < {self.count}:"):
            code.add(f"ahead = rows[j + {ahead}]")
            for k, (_, samples, nbytes) in enumerate(wanted):
                flat, base = self._row(samples, "ahead", f"_a{k}", search=False)
                for line in range(0, min(nbytes, 512), 64):
                    code.add(f"prefetch({flat}, {base} + {line // samples.carrier.itemsize})")

    def _read(self, name: str, samples: Samples) -> Flow:
        suffix = self.suffix[name] + self.partner
        var, base = self._row(samples, "r", suffix)
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
        ahead, needed = self._behind(number)
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

    def _behind(self, number: int) -> tuple[list[int], set[str]]:
        """Give the steps that a step's fields come through before it, and all fields in these."""
        ahead = [k for k in self.active if k < number]
        needed = set(self.steps[number].fields)
        for k in reversed(ahead):
            if needed & set(self.steps[k].outputs):
                needed |= set(self.steps[k].fields)
            else:
                ahead.remove(k)
        return ahead, needed

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

    # -- lengths ------------------------------------------------------------------------------------------------------

    def _measure(self, order: Callable[..., Any], order_params: Sequence[Any]) -> Program:
        """Write the function that gives the length of each row of the fields that vary."""
        code = Source()
        self.code, self.parts = code, {}
        self.count = code.argument(len_of(self.sources))
        names = sorted({o.lengths for o in self.outputs if o.form != "fixed"})
        code.add("done = 0")
        with code.block("while done < count:"):
            code.add(f"m = min({BLOCK}, count - done)")
            self._find()
            with code.block("for j in range(m):"):
                code.add("r = rows[j]")
                if self.base is not None:
                    with code.block("if r < 0:"):
                        code.add("continue")
                code.add("error[1] = r; error[3] = done + j")
                with code.block(f"if r < 0 or r >= {self.count}:"):
                    code.refuse(-1)
                for k, name in enumerate(names):
                    self._row(self.sources[name], "r", self.suffix[name])
                    length = f"n{self.suffix[name]}"
                    for number in self.active:
                        step = self.steps[number]
                        if name not in step.fields:
                            continue
                        bound = step.bound[step.fields.index(name)]
                        if bound.length is not None:
                            code.add(f"{length} = {code.function(bound.length)}({length}{code.given(bound.params)})")
                    code.add(f"out{k}[place + done + j] = {length}")
            code.add("done += m")
        code.add("return 0")
        heads = [*FIXED, *(f"out{k}" for k in range(len(names)))]
        outputs = tuple(Output(name, Spec(np.dtype(np.int64), ()), np.dtype(np.int64), 1) for name in names)
        return self._finish(heads, outputs, order, order_params)

    # -- places -------------------------------------------------------------------------------------------------------

    def reach(self, order: Callable[..., Any], order_params: Sequence[Any]) -> Program:
        """Write the function that tells where each row, and any partner of it, lies: for each field over a file the address
        of the first byte and of the one after the last, both 0 where nothing is read."""
        code, spans = self.code, [0]
        names = {name for name, samples in self.sources.items() if residency.grounds({name: samples})}
        code.add("done = 0")
        with code.block("while done < count:"):
            code.add(f"m = min({BLOCK}, count - done)")
            self._find()
            with code.block("for j in range(m):"):
                code.add("r = rows[j]")
                code.add("error[1] = r; error[3] = done + j")
                cleared = len(code.lines)
                if self.base is not None:
                    with code.block("if r < 0:"):
                        code.add("continue")
                with code.block(f"if r < 0 or r >= {self.count}:"):
                    code.refuse(-1)
                self._touch(self.active, names, names, spans)
            code.add("done += m")
        code.add("return 0")
        outs = [f"out{k}" for k in range(spans[0])]
        text = "; ".join(f"{out}[place + done + j] = 0" for out in outs)
        code.lines.insert(cleared, "    " * 3 + text)
        code.owners.insert(cleared, -1)
        heads = [*FIXED, *outs]
        number = Spec(np.dtype(np.int64), ())
        outputs = tuple(Output(out, number, number.dtype, 1) for out in outs)
        return self._finish(heads, outputs, order, order_params)

    def _touch(self, steps: list[int], needed: set[str], wanted: set[str], spans: list[int]) -> None:
        """Write where row r lies, and where the partners lie that these steps draw for it."""
        code, add = self.code, self.code.add
        for name, samples in self.sources.items():
            if name in needed and name in wanted:
                self._span(name, samples, spans)
        for number in steps:
            if self.steps[number].bound[0].kind != "pair":
                continue
            own, outer = code.fresh("own"), self.partner
            key = f"subkey(subkey(key, r), {self.steps[number].salt})"
            add(f"{own} = r; r = randint({key}, 0, {self.count})")
            self.partner = code.fresh("_p")
            self._touch(*self._behind(number), wanted, spans)
            self.partner = outer
            add(f"r = {own}")

    def _span(self, name: str, samples: Samples, spans: list[int]) -> None:
        """Write the addresses of one field of row r."""
        code, add, suffix = self.code, self.code.add, self.suffix[name] + self.partner
        low, high = f"out{spans[0]}", f"out{spans[0] + 1}"
        spans[0] += 2
        _, base = self._row(samples, "r", suffix)
        one = len(samples.parts) == 1
        address = code.argument(int(samples.parts[0].flat.ctypes.data)) if one else f"{self._parts(samples)[0]}[k{suffix} + 1]"
        item, at = samples.carrier.itemsize, "place + done + j"
        inner = [*samples.shape[1:], *([samples.dtype.itemsize] if len(samples.strides) > len(samples.shape) else [])]
        tail = samples.strides[len(samples.strides) - len(inner) :] if inner else ()
        reach = [((n or 0) - 1) * s for n, s in zip(inner, tail, strict=True)]
        before, after = sum(min(0, d) for d in reach), sum(max(0, d) for d in reach) + 1
        if 0 in inner:
            return
        if not samples.shape:
            add(f"{low}[{at}] = {address} + ({base} + {before}) * {item}")
            add(f"{high}[{at}] = {address} + ({base} + {after}) * {item}")
            return
        n, stride = f"n{suffix}" if samples.shape[0] is None else samples.shape[0], samples.strides[0]
        add(f"f{suffix} = 0; t{suffix} = {n} - 1")
        if samples.low is not None or samples.high is not None:
            least = f"l{suffix}" if samples.low is not None else f"min(0, h{suffix} - 1)"
            most = f"h{suffix}" if samples.high is not None else f"max({n}, l{suffix} + 1)"
            if samples.fill is None:  # the nearest element inside stands for those outside
                add(f"f{suffix} = min(max(0, {least}), {most} - 1); t{suffix} = min(max({n} - 1, {least}), {most} - 1)")
            else:
                add(f"f{suffix} = max(0, {least}); t{suffix} = min({n}, {most}) - 1")
        ends = (f"f{suffix}", f"t{suffix}") if stride >= 0 else (f"t{suffix}", f"f{suffix}")
        with code.block(f"if f{suffix} <= t{suffix}:"):
            add(f"{low}[{at}] = {address} + ({base} + {ends[0]} * {stride} + {before}) * {item}")
            add(f"{high}[{at}] = {address} + ({base} + {ends[1]} * {stride} + {after}) * {item}")


def _most(flow: Flow) -> int:
    """Give how many different constants a value outside may pass; a row that varies cannot be set down in between."""
    return 4096 if any(isinstance(n, str) for n in flow.lengths) else 16


def len_of(sources: dict[str, Samples]) -> int:
    """Give the number of samples."""
    return next(iter(sources.values())).rows.count
