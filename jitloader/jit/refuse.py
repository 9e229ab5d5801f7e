"""What no kernel may do, and what Numba refuses, each told in a short sentence with the user's own line."""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import PipelineError
from .depends import GENERATED, PACKAGE, codes, helpers, ours, plain_function


class CompileError(PipelineError):
    """A function could not be compiled: `what` is Numba's reason in a line, `where` the user's file and line."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what + (f" [{where}]" if where else ""))
        self.what, self.where = what, where


class Refused(CompileError):
    """A function holds what no kernel may, whatever the types: it would hang, lie, or not end."""


PYTHON = "a kernel runs without Python: print and other Python calls cannot run in it"


RANDOM = "{} in a kernel would make batches irreproducible: draws must come from jl.uniform(key, k) and its like"


BLAS = "np.dot, np.linalg and @ run through Python, which no kernel can: write the loops"


# What would hang or lie inside a kernel that runs without the GIL, by the symbol that its object code asks for.
REFUSED = {
    "numba_gil_ensure": PYTHON,
    "numba_get_np_random_state": RANDOM.format("np.random"),
    "numba_get_py_random_state": RANDOM.format("random"),
}


def refuse(function: Callable[..., Any]) -> None:
    """Raise Refused, with the user's own file and line, for a function that prints, draws by a hidden state or recurses."""
    for user in _reached(plain_function(function)):
        code = user.__code__
        for name, value, line in _loads(user):
            reason = _hidden(value)
            if isinstance(value, (list, dict, set)):
                reason = f"{name!r} is a {type(value).__name__}: give a tuple or an array"
            if reason:
                raise Refused(f"{user.__name__}: {reason}", f"{code.co_filename} line {line}")
        if any(user in _reached(plain_function(value)) for _, value, _ in _loads(user)):
            raise Refused(
                f"{user.__name__}: a kernel cannot call itself", f"{code.co_filename} line {code.co_firstlineno}"
            )


def _reached(function: Any) -> list[types.FunctionType]:
    """List a function of the user's and those of the user's that it calls, and so on."""
    found: list[types.FunctionType] = []
    todo = [function]
    while todo:
        user = todo.pop()
        if isinstance(user, types.FunctionType) and user not in found and not ours(user):
            found.append(user)
            todo += [plain_function(value) for _, value, _ in _loads(user)]
    return found


def _loads(function: types.FunctionType) -> Iterator[tuple[str, Any, int]]:
    """Give what a function loads by global name, closure or module attribute (np.matmul for @), its name, and the line.

    Exact, where `helpers` takes any attribute for a global of its name: that may only cost a compilation.
    """
    names = {**vars(builtins), **function.__globals__}
    for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            names[cell_name] = cell.cell_contents
    for code in codes(function.__code__):
        line, value = code.co_firstlineno, None
        lines = {offset: number for offset, number in dis.findlinestarts(code) if number}
        for instruction in dis.get_instructions(code):
            line, name = lines.get(instruction.offset, line), instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                value = names.get(name)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
                value = getattr(value, name, None)
            elif instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr in ("@", "@="):
                value = np.matmul
            else:
                value = None
            if value is not None:
                yield str(name), value, line


def _hidden(value: Any) -> str:
    """Say why a kernel may not use a value, "" where it may."""
    if value is print or value is input:
        return PYTHON
    if any(value is function for function in (np.dot, np.vdot, np.matmul, np.linalg)):
        return BLAS
    name = value.__name__ if isinstance(value, types.ModuleType) else type(getattr(value, "__self__", value)).__module__
    if name == "numpy.random" or name.startswith("numpy.random."):
        return RANDOM.format("np.random")
    return RANDOM.format("random") if name == "random" else ""


def suspends(function: Any) -> str:
    """Name a kind of function that gives no value when it is called, "" for a plain one."""
    code = getattr(plain_function(function), "__code__", None)
    flags = code.co_flags if code is not None else 0
    if flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE):
        return "an async def"
    return "a generator function (it has a yield)" if flags & inspect.CO_GENERATOR else ""


def users(function: Callable[..., Any]) -> tuple[str, str]:
    """Give name, and file and line, of the first function below that is not of this package."""
    every: list[Any] = [*helpers(function), function]
    for helper in every:
        if not ours(helper):
            return helper.__name__, f"{helper.__code__.co_filename} line {helper.__code__.co_firstlineno}"
    return function.__name__, ""


def outside() -> tuple[types.FrameType, int]:
    """Give the first frame outside this package, and how far up it is, as the `stacklevel` of a warning counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jitloader"):
        frame, level = frame.f_back, level + 1
    return frame, level


_OPCODES = {
    "IMPORT_NAME": "import: do it at the top of the file",
    "STORE_GLOBAL": "assignment to a global",
    "DELETE_GLOBAL": "assignment to a global",
}


READ_ONLY = "a source is the data itself: write to dst alone"


NEGATIVE = "an integer to a negative power is 0 in a kernel: write 1 / x, or float(x) to that power"


# What Numba says, and what we say; the first that is found in its report.
_PLAINLY = [
    (r"Cannot modify readonly array|>>> setitem\(readonly", READ_ONLY),
    (r"^<", "no kernel can run this"),
    (r"unsupported opcode \(([A-Z_]+)\)", "a kernel has no {opcode}"),
    (r"Cannot bind .* due to \"TypeError: (.*?)\"", "{call}: {0}"),
    (r"Cannot unify (.*) and (.*) for '\$", "cannot unify {0} and {1}"),
    (r"Cannot unify (.*) and (.*) for '(\w+)", "cannot unify {0} and {1} for {2!r}"),
    (r"Can't unify return type from the following types: (.*)", "it returns more than one type: {0}"),
    (r"Untyped global name '(\w+)'.*<class '(?:\w+\.)*(\w+)'>", "{0!r} is a {1}, which no kernel can use"),
    (r"^Unsupported constraint encountered: raise", "raise takes an exception with constant arguments"),
    (r"^(?:No implementation|Invalid use|- Resolution failure)", "no kernel can run {call}"),
]


def reason_of(error: Any) -> tuple[str, str]:
    """Give the most exact part of Numba's report as a short sentence, and the file and line of the user's own code."""
    text = str(error)
    loc = getattr(error, "loc", None)
    where = f"{loc.filename} line {loc.line}" if loc is not None and not _internal(loc.filename) else ""
    raised = re.search(r"\.+ ?Raised from (.*?)(?: \((\d+)\))?$", text.rstrip())
    if raised:
        text = text[: raised.start()]
        where = f"{raised[1]} line {raised[2]}" if raised[2] else where
    # Each function within which it failed has its part, the innermost last: the last one in the user's own file tells.
    parts = re.split(r"(?:\w+Error: )?Failed in .* pipeline \(step: .*\)", text)
    part = parts[-1]
    for inner in reversed(parts):
        place = re.search(r"During: typing of .* at (.*) \((\d+)\)|^ *File \"(.*)\", line (\d+):", inner, re.MULTILINE)
        if place and not _internal(place[1] or place[3]):
            part = inner
            where = f"{place[1]} line {place[2]}" if place[1] else where
            break
    lines = [line.strip() for line in part.splitlines() if line.strip()] or [text.strip()]
    call = next((line[3:].strip() for line in lines if line.startswith(">>>")), "")
    for pattern, plainly in _PLAINLY:
        found = re.search(pattern, part.strip())
        if found:
            groups = found.groups()
            opcode = _OPCODES.get(groups[0], groups[0]) if groups else ""
            if plainly.startswith("it returns"):  # listed in the order of a set
                groups = (", ".join(sorted(groups[0].strip().rstrip(".").split(", "))),)
            return _short(plainly.format(*groups, call=call, opcode=opcode)), where
    return _short(lines[0]), where


def _internal(file: str) -> bool:
    """Whether a file name is of no use to the user: generated, of this package, or of Numba."""
    inside = [PACKAGE, os.sep + "numba" + os.sep]
    return file in (GENERATED, "<string>") or file.startswith(inside[0]) or inside[1] in file


def _short(line: str) -> str:
    """Give a line of Numba's without its inner names and addresses."""
    function = r"<(?:built-in )?(?:function|method|ufunc) '?([\w.<>]+?)'?(?: at 0x\w+)?>"
    line = re.sub(rf"(?:Function|Dispatcher|type\(CPUDispatcher)?\(?{function}\)*", r"\1", line)
    line = re.sub(r"(?:Unicode|Literal)\[(\w+)\]\([^()]*\)", r"\1", line).replace("unicode_type", "str")
    line = re.sub(r"\bint\(-?\d+\)", "int64", line)
    line = re.sub(r"\w+\(<module '([\w.]+)'[^>]*>\)", r"\1", line).replace("readonly array", "array")
    line = re.sub(r" at 0x[0-9a-f]+|\s*\$[\w.]+|\[\d+m|\x1b", "", line)
    line = line if len(line) <= 200 else line[:200].rstrip() + " ..."
    return line.rstrip(".:")
