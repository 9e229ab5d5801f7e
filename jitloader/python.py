"""The escape hatch: Python functions of a whole batch or of a row, run where the batch is filled."""

from __future__ import annotations

import collections
import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import jit, rng
from .errors import PipelineError

ROWS = "row numbers"  # the name of the output that carries them: no field can have it


_types: dict[tuple[str, ...], Any] = {}


def batch_type(fields: tuple[str, ...]) -> Any:
    """Give the NamedTuple type of a batch of these fields; one that is no identifier is `_k` there, its place k.

    Its values pickle and copy: by the names of their fields, for no module holds the type.
    """
    if fields not in _types:
        made = collections.namedtuple("Batch", fields, rename=True)  # type: ignore[misc]
        made.__reduce__ = lambda batch: (rebuilt, (fields, tuple(batch)))  # type: ignore
        _types[fields] = made
    return _types[fields]


def rebuilt(fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Give the batch that was pickled."""
    return batch_type(fields)(*values)


class Applied(NamedTuple):
    """A Python function linked to a data set: whether it takes rows, the salt of its draws, where it was linked, and
    the types of what it gave first."""

    function: Callable[..., Any]
    name: str
    rowwise: bool
    salt: int
    where: str
    seen: dict[str, tuple[Any, Any]]

    @property
    def how(self) -> str:
        """How it runs, in words."""
        return f"Python, {'a row' if self.rowwise else 'a batch'}"

    @property
    def told(self) -> str:
        """The stage, in words."""
        return f"apply({self.name})"


def applied(function: Callable[..., Any], rowwise: bool, salt: int, where: str) -> Applied:
    """Give a function ready to be linked."""
    if not callable(function):
        raise TypeError(f"apply takes a function, got {function!r}")
    if kind := jit.suspends(function):
        raise TypeError(f"apply: {function.__name__} is {kind}, and a stage gives its result when it is called")
    return Applied(function, getattr(function, "__name__", repr(function)), rowwise, salt, where, {})


def run(made: Applied, batch: Any, fields: tuple[str, ...], rows: np.ndarray, key: int, epoch: int) -> Any:
    """Give a batch after a function; what it raises comes as a PipelineError naming the rows and the user's line."""
    if made.rowwise:
        if not hasattr(batch, "_fields"):
            came = f"{type(batch).__name__} comes from the function before it"
            raise PipelineError(f"stage {made.name!r} takes rows of a batch with named fields; {came} [{made.where}]")
        names = fields if len(fields) == len(batch) else batch._fields
        result = _rowwise(made, batch, names, rows, key, epoch)
    else:
        try:
            result = made.function(batch)
        except Exception as error:
            raise _blame(made, error, f"rows {_some(rows)}", epoch) from None
    return merge(made, batch, result)


def _rowwise(
    made: Applied, batch: Any, fields: tuple[str, ...], rows: np.ndarray, key: int, epoch: int
) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {}
    for j, row in enumerate(rows):
        generator = np.random.Generator(np.random.PCG64(rng.subkey(rng.subkey(key, int(row)), made.salt)))
        try:
            given = {name: row_of(column, j) for name, column in zip(fields, batch, strict=True)}
            changed = made.function(given, generator)
        except Exception as error:
            raise _blame(made, error, f"row {int(row)}", epoch) from None
        if not isinstance(changed, dict):
            raise PipelineError(
                f"stage {made.name!r}, row {int(row)}: a function of a row gives a dict, got {type(changed).__name__}"
            )
        for name, value in changed.items():
            columns.setdefault(name, []).append(value)
    for name, values in columns.items():
        if len(values) != len(rows):
            raise PipelineError(f"stage {made.name!r}: field {name!r} came for {len(values)} of {len(rows)} rows")
    return {name: _stack(made, name, values) for name, values in columns.items()}


def _stack(made: Applied, name: str, values: list[Any]) -> np.ndarray:
    try:
        arrays = [np.asarray(v) for v in values]
    except ValueError as error:
        told = str(error).partition(".")[0]
        raise PipelineError(f"stage {made.name!r}: field {name!r} is no array: {told} [{made.where}]") from None
    kinds = {(a.dtype, a.shape) for a in arrays}
    if len(kinds) > 1:
        some = " and ".join(sorted(f"{d} {s}" for d, s in kinds)[:2])
        raise PipelineError(f"stage {made.name!r}: field {name!r} differs between rows: {some}")
    return np.stack(arrays)


def merge(made: Applied, batch: Any, result: Any) -> Any:
    """Give what a function returned as the batch: a dict changes or adds fields, anything else stands for itself."""
    if isinstance(result, dict) and hasattr(batch, "_fields"):
        for name, value in result.items():
            if not isinstance(name, str):
                raise PipelineError(f"stage {made.name!r} gives a field named {name!r}: give a text [{made.where}]")
            _check(made, name, value)
        if set(result) <= set(batch._fields):
            return batch._replace(**result)
        names = (*batch._fields, *(n for n in result if n not in batch._fields))
        values = {**batch._asdict(), **result}
        return batch_type(names)(*values.values())
    return result


def _check(made: Applied, name: str, value: Any) -> None:
    """Hold the dtype and the number of axes of a field to those of the first batch: a function may pad to other sizes."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return
    kind = (value.dtype, tuple(value.shape[1:]))
    first = made.seen.setdefault(name, kind)
    if first[0] != kind[0] or len(first[1]) != len(kind[1]):
        raise PipelineError(
            f"stage {made.name!r} gave {name!r} as {kind[0]} {kind[1]}, and {first[0]} {first[1]} on the first batch [{made.where}]"
        )


def row_of(column: Any, j: int) -> Any:
    """Give row j of a field of a batch: an array, flat values with offsets, or what a function made; a number stands for
    every row."""
    if hasattr(column, "offsets"):
        return column.values[column.offsets[j] : column.offsets[j + 1]]
    return column[j] if getattr(column, "shape", isinstance(column, (list, tuple))) else column


def first_row(batch: Any) -> Any:
    """Give the one row of a batch of one."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return row_of(batch, 0) if hasattr(batch, "offsets") else type(batch)(*(row_of(a, 0) for a in batch))
    return batch


def _some(rows: np.ndarray) -> str:
    text = ", ".join(str(int(r)) for r in rows[:3])
    return text + (", ..." if len(rows) > 3 else "")


def _blame(made: Applied, error: Exception, which: str, epoch: int) -> PipelineError:
    where = raised_at(error) or made.where
    return PipelineError(f"stage {made.name!r}, {which}, epoch {epoch}: {type(error).__name__}: {error} [{where}]")


def raised_at(error: BaseException) -> str:
    """Give the innermost line outside this package that an exception came through, "" where there is none."""
    where, here = "", os.path.dirname(__file__) + os.sep
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(here):
            where = f"{frame.filename} line {frame.lineno}"
    return where
