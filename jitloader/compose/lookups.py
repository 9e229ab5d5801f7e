"""The two programs beside the one that fills: how long rows are, and which bytes of files they read."""

from __future__ import annotations

from collections.abc import Sequence

from .. import residency
from ..samples import Samples
from .program import Program
from .rows import Recipe, Writer


def measure(recipe: Recipe, fields: Sequence[str], names: Sequence[str]) -> Program:
    """Write the program that gives, for these fields to come out, the length of each row of those named."""
    return _Lengths(recipe, fields).program(names)


def reach(recipe: Recipe, fields: Sequence[str]) -> Program:
    """Write the program that tells where each row, and any partner of it, lies: for each field over a file the address of
    the first byte and of the one after the last, both left as they are where nothing is read."""
    return _Reach(recipe, fields).program()


class _Lengths(Writer):
    def program(self, names: Sequence[str]) -> Program:
        """Write it."""
        code = self.code
        with self.rows():
            for k, name in enumerate(names):
                self.row(self.sources[name], "r", self.suffix[name])
                length = f"n{self.suffix[name]}"
                for number in self.active:
                    step = self.steps[number]
                    if name not in step.fields:
                        continue
                    bound = step.bound[step.fields.index(name)]
                    if bound.length is not None:
                        code.add(f"{length} = {code.function(bound.length)}({length}{code.given(bound.params)})")
                code.add(f"out{k}[place + done + j] = {length}")
        return self.numbers(names)


class _Reach(Writer):
    def program(self) -> Program:
        """Write it."""
        self.files = {name for name, samples in self.sources.items() if residency.grounds({name: samples})}
        self.outs: list[str] = []
        with self.rows():
            self._touch(self.active, self.files)
        return self.numbers(self.outs)

    def _touch(self, steps: list[int], needed: set[str]) -> None:
        """Write where row r lies, and where the partners lie that these steps draw for it."""
        code, add = self.code, self.code.add
        for name, samples in self.sources.items():
            if name in needed & self.files:
                self._span(name, samples)
        for number in steps:
            if self.steps[number].bound[0].kind != "pair":
                continue
            own, outer = code.fresh("own"), self.partner
            key = f"subkey(subkey(key, r), {self.steps[number].salt})"
            add(f"{own} = r; r = randint({key}, 0, {self.count})")
            self.partner = code.fresh("_p")
            needed, ahead = self.recipe.needed(self.steps[number].fields, number)
            self._touch(ahead, needed)
            self.partner = outer
            add(f"r = {own}")

    def _span(self, name: str, samples: Samples) -> None:
        """Write the addresses of one field of row r."""
        code, add, suffix = self.code, self.code.add, self.suffix[name] + self.partner
        low, high = (f"out{len(self.outs) + k}" for k in range(2))
        self.outs += [low, high]
        _, base = self.row(samples, "r", suffix)
        one = len(samples.parts) == 1
        address = (
            code.argument(int(samples.parts[0].flat.ctypes.data)) if one else f"{self.parts(samples)[0]}[k{suffix} + 1]"
        )
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
