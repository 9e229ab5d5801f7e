"""Join order, read, stages and write into one kernel: the source of a loop nest that writes each output byte once.

For every sample the generated function finds its row, asks for the rows to come, and walks the steps of the pipeline.
Runs of value and index stages become one loop nest (`nest`): index stages compose to one affine map an axis, value
stages run in registers, and on 8-bit sources a run of value stages is a table of 256 entries. A sample stage, or a pair
of stages that do not compose, goes through a scratch row that stays in cache. The same source, run by plain Python,
gives the same bits: that is how `data[i]`, `trace` and error reports work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import decoded as decoded
from ..errors import DataError, PipelineError
from ..samples import Samples, records
from ..spec import Spec
from ..stages import Misfit, Stage, Step
from .fuse import compose as compose
from .nest import widen as widen
from .program import FIXED as FIXED
from .program import Failure as Failure
from .program import Layout as Layout
from .program import Output as Output
from .program import Program as Program
from .program import Ragged as Ragged
from .program import Reach as Reach
from .program import Spans as Spans
from .program import WideWorker as WideWorker
from .program import Worker as Worker
from .program import collect as collect
from .program import shape_batches as shape_batches
from .program import shape_output as shape_output
from .source import FILENAME as FILENAME


class RowError(Exception):
    """A row does not pass a step: what stopped, and the exception of the user's code where there was one."""

    def __init__(self, program: Program, failure: Failure, cause: Exception | None = None) -> None:
        super().__init__(failure, cause)
        self.program, self.failure, self.cause = program, failure, cause


def only_row(first: int, step: int, rows: np.ndarray) -> None:
    """The order of the file: position i is row i."""
    for j in range(rows.size):
        rows[j] = first + j * step


def sample_of(
    sources: dict[str, Samples], steps: Sequence[Step], fields: Sequence[str], row: int, key: int
) -> dict[str, Any]:
    """Give one sample through its steps in plain Python: the same bits as the kernel, exceptions as they are raised.

    Raises RowError where a step refuses a value or user code raises.
    """
    found = batch_of(sources, steps, fields, row, key)
    return {name: array.values if isinstance(array, Ragged) else array[0] for name, array in found.items()}


def batch_of(
    sources: dict[str, Samples], steps: Sequence[Step], fields: Sequence[str], row: int, key: int
) -> dict[str, Any]:
    """Give the batch of one row that `sample_of` gives the sample of."""
    count = next(iter(sources.values())).rows.count
    program = compose(sources, steps, fields, only_row, (), count)
    worker = Worker(program, key, plain=True)
    worker.call.value(6)[1] = row  # where the rows are measured first
    try:
        arrays, failed = collect(program, worker, row, 1, 1)
    except DataError:  # a chunk that cannot be decoded is nobody's code
        raise
    except Exception as cause:
        raise RowError(program, Failure(-2, int(worker.call.value(6)[1]), 0), cause) from None
    if failed is not None:
        raise RowError(program, failed)
    return {output.name: array for output, array in zip(program.outputs, arrays, strict=True)}


def eager(stage: Stage, array: np.ndarray, key: int = 0) -> np.ndarray:
    """Apply one stage to one plain sample, in plain Python; random stages draw by `key`."""
    spec = Spec(array.dtype, array.shape)
    try:
        bound = stage.bind(decoded(spec))
    except Misfit as misfit:
        raise PipelineError(f"{stage.name}: {misfit}; got {spec}") from None
    step = Step(stage, ("x",), 0, (decoded(spec),), (bound,), ("x",))
    try:
        found = sample_of({"x": records(array[None])}, (step,), ("x",), 0, key)["x"]
    except RowError as error:
        if error.cause is not None:
            raise error.cause from None
        raise PipelineError(f"{stage.name}: a value does not fit") from None
    return np.asarray(found)
