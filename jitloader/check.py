"""A dry run of some rows: in plain Python, with its checks of bounds and divisions, and compared with the compiled kernel."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import blame, compose
from .dataset import Dataset
from .errors import PipelineError
from .orders.base import Order, table_rows
from .python import ROWS
from .rng import epoch_key

OTHER = 0x7F  # in every byte that a kernel is to write over: a large number of every dtype
MOST, LEAST = 64, 8  # rows that are checked where their number is left open
ELEMENTS = 1 << 20  # of them in all: plain Python takes 0.3 to 3 us for each


class Difference(NamedTuple):
    """Where the compiled kernel gave other bits than plain Python: how many rows, which first, by how much at most."""

    field: str
    rows: int
    first: int
    most: float

    def __repr__(self) -> str:
        rows = f"{self.rows} row" + "s" * (self.rows > 1)
        return f"{self.field!r} differs on {rows}, first on row {self.first}, by at most {self.most:.3g}"


class Check(NamedTuple):
    """What `Loader.check()` gives: the row numbers checked, the stages run, and where the compiled kernel differs."""

    rows: np.ndarray
    stages: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether compiled kernel and plain Python gave the same bits."""
        return not self.differences

    def __repr__(self) -> str:
        count = f"{len(self.rows):,} row" + "s" * (len(self.rows) != 1)
        lines = [f"{count} checked: {', '.join(self.stages) or 'no stages'}"]
        if self.same:
            return f"{lines[0]}; compiled and plain Python agree bit by bit"
        return "\n".join(lines + [f"  compiled, {difference}" for difference in self.differences])


def number_of_rows(data: Dataset) -> int:
    """Give how many rows are checked where that is left open: fewer where they are large."""
    elements = sum(spec.size for spec in data.spec.values())
    return max(LEAST, min(MOST, ELEMENTS // max(elements, 1)))


def rows_of(order: Order, count: int, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """Give the rows at these positions of an epoch, by the order's kernel in plain Python."""
    planned, rows = order.plan(count, seed, epoch), np.zeros(len(positions), np.int64)
    for k, position in enumerate(positions):
        try:
            with np.errstate(all="ignore"):
                planned.kernel(int(position), 1, rows[k : k + 1], *planned.params)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise PipelineError(f"order {order.name} at position {position}, epoch {epoch}: {told}") from None
    return rows


def check(data: Dataset, rows: np.ndarray, seed: int, epoch: int, batch: int) -> Check:
    """Run rows through all stages, in plain Python and compiled, and through applied functions in batches.

    Raises what a batch of the first row that fails would raise.
    """
    data.verify()
    program = data.program(table_rows, (np.ascontiguousarray(rows, np.int64),))
    key, compiled = epoch_key(seed, epoch), None
    plain = compose.Worker(program, key, plain=True)
    found: dict[str, list[tuple[int, float]]] = {o.name: [] for o in program.outputs if o.name != ROWS}
    for i, row in enumerate(rows.tolist()):
        if not 0 <= row < len(data):
            raise data.failed(compose.Failure(-1, row, i), seed, epoch)
        try:
            wanted, failed = _strictly(data, program, plain, i, row, epoch)
        except PipelineError:
            raise
        except Exception:
            data.sample(row, seed=seed, epoch=epoch)  # which raises it with stage, field and row
            raise
        if failed is None:
            # Only now: a row that reads beyond its bounds in plain Python must not be run compiled.
            compiled = compiled or data._compiled(lambda: compose.Worker(program, key))
            compiled.blank(OTHER)
            given, failed = compose.collect(program, compiled, i, 1, 1, OTHER)
        if failed is not None:
            raise data.failed(failed, seed, epoch)
        for output, one, other in zip(program.outputs, wanted, given, strict=True):
            if output.name in found and (most := apart(one, other)) is not None:
                found[output.name].append((row, most))
                _refuse_unwritten(data, program, compiled, i, output.name, row)
    if data.applies:
        for low in range(0, len(rows), batch):
            data.gather(rows[low : low + batch], seed=seed, epoch=epoch)
    stages = (*(step.stage.name for step in data.steps), *(made.name for made in data._python))
    unlike = [(name, some) for name, some in found.items() if some]
    differences = [Difference(name, len(some), some[0][0], max(most for _, most in some)) for name, some in unlike]
    return Check(rows, stages, tuple(differences))


def _refuse_unwritten(data: Dataset, program: compose.Program, compiled: Any, i: int, field: str, row: int) -> None:
    """Refuse a row whose values are what lay in memory before."""
    made = []
    for byte in (0, OTHER):
        compiled.blank(byte)
        made.append(compose.collect(program, compiled, i, 1, 1, byte)[0])
    at = [o.name for o in program.outputs].index(field)
    if apart(made[0][at], made[1][at]) is not None:
        steps = [step.stage for step in data.steps if field in step.outputs and step.stage.user]
        told = ", ".join(f"{stage.name!r} [{stage.where}]" for stage in steps) or "a stage"
        raise PipelineError(f"field {field!r}, row {row}: {told} leaves elements of its target unwritten")


def _strictly(
    data: Dataset, program: compose.Program, plain: compose.Worker, i: int, row: int, epoch: int
) -> tuple[list[Any], compose.Failure | None]:
    """Run one row in plain Python, and refuse a division by zero in the user's own code, of floats too."""
    plain.call.divide = "raise"
    plain.blank(0)
    try:
        return compose.collect(program, plain, i, 1, 1)
    except FloatingPointError as error:
        number, where = blame.culprit(compose.RowError(program, compose.Failure(-2, row, 0), error))
    finally:
        plain.call.divide = "ignore"
    if where:
        step = data.steps[number]
        raise PipelineError(
            f"stage {number} {step.stage.name!r} on field {', '.join(map(repr, step.fields))}, row {row}, epoch {epoch}: "
            f"divides by zero, which compiled is inf or nan\n  in {where}"
        )
    return compose.collect(program, plain, i, 1, 1)


def apart(one: Any, other: Any) -> float | None:
    """Give the greatest difference of two arrays of one dtype, None where they have the same bits; every NaN is alike.

    >>> apart(np.array([1.0, np.nan]), np.array([1.0, -np.nan])), apart(np.array([0.0]), np.array([-0.0]))
    (None, 0.0)
    """
    if isinstance(one, compose.Ragged):
        if not np.array_equal(one.offsets, other.offsets):
            return math.inf
        one, other = one.values, other.values
    if one.shape != other.shape:
        return math.inf
    one, other = one.reshape(-1), other.reshape(-1)
    if one.tobytes() == other.tobytes():
        return None
    if one.dtype.kind not in "biuf":
        return math.inf
    unlike = one.view(f"u{one.itemsize}") != other.view(f"u{one.itemsize}")
    if one.dtype.kind == "f":
        unlike &= ~(np.isnan(one) & np.isnan(other))
    if not unlike.any():
        return None
    with np.errstate(all="ignore"):
        gaps = np.abs(one[unlike].astype(np.float64) - other[unlike].astype(np.float64))
    return math.inf if np.isnan(gaps).any() else float(gaps.max())
