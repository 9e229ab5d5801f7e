"""The loop over rows that every program of a pipeline has: which row a position holds, and where in memory it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .. import jit
from ..samples import Samples
from ..spec import Spec
from ..stages import Step
from .program import BLOCK, FIXED, Output, Program
from .source import Source


class Recipe(NamedTuple):
    """What programs are written from: sources, steps, and the order that gives rows for positions.

    `total` is the number of samples, against which each row is checked. With `base`, the data are one source of several:
    rows below 0 are another's and left alone, and row numbers come out counted from `base`.
    """

    sources: dict[str, Samples]
    steps: tuple[Step, ...]
    find: Callable[..., Any]  # find(first, step, rows, *order)
    order: tuple[Any, ...]
    total: int
    base: int | None

    def needed(self, fields: Sequence[str], before: int | None = None) -> tuple[set[str], list[int]]:
        """Give the fields that must be read or made for some fields to come out, and the steps that they come through."""
        found, active = set(fields), []
        for number in reversed(range(len(self.steps) if before is None else before)):
            if found & set(self.steps[number].outputs):
                found |= set(self.steps[number].fields)
                active.append(number)
        return found, active[::-1]


class Writer:
    """A program while it is written."""

    def __init__(self, recipe: Recipe, fields: Sequence[str]) -> None:
        self.recipe, self.steps = recipe, recipe.steps
        needed, self.active = recipe.needed(fields)
        self.sources = {n: s for n, s in recipe.sources.items() if n in needed}
        self.suffix = {name: f"_{k}" for k, name in enumerate(self.sources)}  # of a field's variables
        self.partner = ""  # what the names of a partner's row end in, while it is written
        self.code = Source()
        self.count = self.code.argument(recipe.total)
        self.tables: dict[int, list[str]] = {}

    @contextmanager
    def rows(self, lead: int = 0, ask: Callable[[], None] | None = None) -> Iterator[None]:
        """Write the loop over the rows of a call, found a block at a time; what is written inside is for each row r, and
        what `ask` writes for each row `ahead`, `lead` rows before that one's turn."""
        add, block = self.code.add, self.code.block
        add("done = 0")
        with block("while done < count:"):
            add(f"m = min({BLOCK}, count - done)")
            with block("if find_rows(find, order, first + done * step, step, rows[:m]) != 0:"):
                add("return 2")
            with block(f"for i in range(m + {lead}):" if ask else "for j in range(m):"):
                if ask:
                    with block(f"if i < m and 0 <= rows[i] < {self.count}:"):
                        add("ahead = rows[i]")
                        ask()
                    add(f"j = i - {lead}")
                    with block("if j < 0:"):
                        add("continue")
                add("r = rows[j]")
                if self.recipe.base is not None:
                    with block("if r < 0:"):
                        add("continue")
                add("error[1] = r; error[3] = done + j")
                with block(f"if r < 0 or r >= {self.count}:"):
                    self.code.refuse(-1)
                yield
            add("done += m")
        add("return 0")

    def finish(self, names: Sequence[str], outputs: Sequence[Output]) -> Program:
        """Give what was written as a program; `names` are those of what it writes to."""
        code = self.code
        text, function = code.finish(jit.APART, [*FIXED, *names])
        return Program(
            source=text,
            function=function,
            outputs=tuple(outputs),
            find=self.recipe.find,
            order=self.recipe.order,
            arguments=tuple(code.arguments),
            scratch=tuple(code.scratch),
            owners=tuple(code.owners),
            steps=self.steps,
            notes=tuple(code.notes),
        )

    def numbers(self, names: Sequence[str]) -> Program:
        """Give what was written as a program that writes an integer a row under each name."""
        spec = Spec(np.dtype(np.int64), ())
        return self.finish([f"out{k}" for k in range(len(names))], [Output(n, spec, spec.dtype, 1) for n in names])

    def row(self, samples: Samples, row: str, suffix: str, search: bool = True) -> tuple[str, str]:
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
        table, guess, shift = self.parts(samples)
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

    def parts(self, samples: Samples) -> list[str]:
        """Give the names of the table of a field's arrays, a cache line each (rows before it, address, size, offset, stride),
        and of the one that says of every 2**shift-th row in which array it lies: the search is between two of these, and
        mostly over before it begins."""
        parts = samples.parts
        if id(parts) not in self.tables:
            before = np.concatenate([[0], np.cumsum([p.count for p in parts])])
            lines = np.zeros((len(parts), 8), np.int64)
            lines[:, 0] = before[:-1]
            for line, p in zip(lines, parts, strict=True):
                line[1:5] = p.flat.ctypes.data, p.flat.size, p.offset, p.stride
            shift = max(int(before[-1]) // (8 * len(parts)), 1).bit_length() - 1
            marks = np.arange((int(before[-1]) >> shift) + 2) << shift
            guess = np.clip(np.searchsorted(before, marks, "right") - 1, 0, len(parts) - 1).astype(np.int32)
            arguments = lines.reshape(-1), guess, shift
            self.tables[id(parts)] = [self.code.argument(value) for value in arguments]
        return self.tables[id(parts)]
