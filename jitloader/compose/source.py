"""The text of a kernel while it is written: lines, whose step they are, and what they refer to by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import jit, rng


class Source:
    """Lines of one generated function, its arguments, its per-thread scratch, and the functions it calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.owners: list[int] = []  # for each line, the step it belongs to (-1: none)
        self.notes: list[str] = []
        self.names: list[str] = []
        self.arguments: list[Any] = []
        self.scratch: list[tuple[str, int]] = []
        self.scope: dict[str, Any] = {
            "np": np, "i64": rng.i64, "u64": rng.u64, "subkey": rng.subkey, "randint": rng.randint, "prefetch": jit.prefetch, "find_rows": jit.find_rows, "array_at": jit.array_at,
            "copy_items": jit.copy_items, "shaped": jit.shaped, "as_bytes": jit.as_bytes,
        }  # fmt: skip
        self.depth, self.step = 1, -1
        self._functions: dict[int, str] = {}
        self._counter = itertools.count()

    def add(self, text: str) -> None:
        """Write a line at the present depth."""
        self.lines.append("    " * self.depth + text)
        self.owners.append(self.step)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write a head and, indented below it, what is written inside."""
        self.add(head)
        self.depth += 1
        yield
        self.depth -= 1

    @contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """Write lines that belong to a step."""
        before, self.step = self.step, number
        yield
        self.step = before

    def fresh(self, prefix: str = "_") -> str:
        """Give a name that nothing else has."""
        name = f"{prefix}{next(self._counter)}"
        return self.fresh(prefix) if name in self.scope else name

    def argument(self, value: Any) -> str:
        """Give the name of an argument that carries a value; the same array comes once."""
        if isinstance(value, np.ndarray):
            for name, known in zip(self.names, self.arguments, strict=True):
                if known is value:
                    return name
        self.names.append(self.fresh("a"))
        self.arguments.append(value)
        return self.names[-1]

    def given(self, params: tuple[Any, ...]) -> str:
        """Give parameters as the tail of an argument list."""
        return "".join(f", {self.argument(p)}" for p in params)

    def own(self, dtype: str, size: int) -> str:
        """Give the name of a buffer that each thread has for itself."""
        self.scratch.append((dtype, max(size, 1)))
        return f"w{len(self.scratch)}"

    def function(self, kernel: Callable[..., Any]) -> str:
        """Give the name under which the source calls a function."""
        plain = jit.plain_function(kernel)
        if id(plain) not in self._functions:
            self._functions[id(plain)] = f"f{len(self._functions)}"
            self.scope[self._functions[id(plain)]] = plain
        return self._functions[id(plain)]

    def refuse(self, number: int) -> None:
        """Stop this sample's step: note which step and row, and leave the kernel."""
        self.add(f"error[0] = {number + 1}; error[1] = r; error[2] = done + j")
        self.add("return 1")

    def finish(self, name: str, parameters: list[str]) -> tuple[str, Callable[..., Any]]:
        """Give the whole text and the function it makes."""
        names = [*parameters, *self.names, *(f"w{k + 1}" for k in range(len(self.scratch)))]
        text = "\n".join([f"def {name}({', '.join(names)}):", *self.lines]) + "\n"
        exec(compile(text, FILENAME, "exec"), self.scope)
        self.owners.insert(0, -1)
        return text, self.scope[name]


FILENAME = jit.GENERATED
