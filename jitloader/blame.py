"""Say what went wrong on a row: run it again in plain Python, and name stage, field, row, cause and the user's own line."""

from __future__ import annotations

import os
import traceback
from typing import NamedTuple

import numpy as np

from . import compose
from .errors import PipelineError
from .rng import epoch_key, subkey
from .samples import Samples
from .stages import Step


class Chain(NamedTuple):
    """What a data set runs: its sources, its steps, and the fields that come out."""

    sources: dict[str, Samples]
    steps: tuple[Step, ...]
    fields: tuple[str, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return next(iter(self.sources.values())).rows.count


def of_failure(chain: Chain, failure: compose.Failure, seed: int, epoch: int) -> Exception:
    """Give the error of a row on which a kernel stopped, found by running that row in plain Python."""
    row = failure.row
    if not 0 <= row < chain.rows:
        return IndexError(f"row {row} is out of range: the data has {chain.rows} rows")
    try:
        compose.sample_of(chain.sources, chain.steps, chain.fields, row, epoch_key(seed, epoch))
    except compose.RowError as error:
        return of_row(chain, error, row, seed, epoch)
    name = chain.steps[failure.number].stage.name if failure.number >= 0 else "kernel"
    return PipelineError(f"stage {name!r} stopped on row {row}, epoch {epoch}; data[{row}] runs it in plain Python")


def of_row(chain: Chain, error: compose.RowError, row: int, seed: int, epoch: int) -> Exception:
    """Give the short error for what went wrong on a row: stage, field, row, cause, and the user's own line."""
    number, where, cause = error.failure.number, "", ""
    if error.cause is not None:
        number, where = culprit(error)
        ours = not where and isinstance(error.cause, (OverflowError, ValueError))  # a value did not fit its target
        cause = "" if ours and 0 <= number < len(chain.steps) else f"{type(error.cause).__name__}: {error.cause}"
    else:
        number = _first(chain, number, row, seed, epoch)
    if not 0 <= number < len(chain.steps):
        told = f"row {row}{_told(chain, row)}, epoch {epoch}"
        return PipelineError(f"{told}: {cause or 'cannot be read'}; data[{row}] shows it")
    step = chain.steps[number]
    fields = ", ".join(map(repr, step.fields))
    shown = f"data[{row}]" if (seed, epoch) == (0, 0) else f"data.sample({row}, seed={seed}, epoch={epoch})"
    return PipelineError(
        f"stage {number} {step.stage.name!r} on field {fields}, row {row}{_told(chain, row)}, epoch {epoch}: "
        f"{cause or _refused(chain, number, row, seed, epoch)}\n"
        f"  in {where or step.stage.where}; {shown} reproduces it"
    )


def _first(chain: Chain, number: int, row: int, seed: int, epoch: int) -> int:
    """Give the first step up to `number` that refuses a row: a fused loop knows the last of its steps alone."""
    for k in range(number):
        try:
            compose.sample_of(
                chain.sources, chain.steps[: k + 1], chain.steps[k].outputs[:1], row, epoch_key(seed, epoch)
            )
        except compose.RowError:
            return k
    return number


def _told(chain: Chain, row: int) -> str:
    """Say where in its arrays a row lies, where that is not the row itself."""
    for samples in chain.sources.values():
        if samples.tell is not None:
            return f" ({samples.tell(samples.rows[row], *samples.params)})"
    return ""


def _refused(chain: Chain, number: int, row: int, seed: int, epoch: int) -> str:
    """Say which value a step could not take."""
    step, key = chain.steps[number], epoch_key(seed, epoch)
    for name, bound in zip(step.fields, step.bound, strict=False):
        before = np.asarray(compose.sample_of(chain.sources, chain.steps[:number], (name,), row, key)[name])
        kept, own = step.stage.name, subkey(subkey(key, row), step.salt)
        while bound.kind == "choice":  # of which this row's draw picked one
            k = bound.kernel(own, *bound.params)
            stage, bound = bound.choices[k]
            kept, own = stage.name, subkey(own, k)
        if bound.kind == "index":
            return f"a row of {len(before)} does not fit {bound.out}"
        if bound.valid is None:
            continue
        spread = [np.broadcast_to(e, before.shape).reshape(-1) for e in bound.elements]
        for k, x in enumerate(before.reshape(-1)):
            value = compose.widen(x, before.dtype)
            if not bound.valid(value, *(e[k] for e in spread), *bound.params):
                return f"value {x} does not fit" + (f" {bound.out.dtype}" if kept == f"cast({bound.out.dtype})" else "")
    return f"a result does not fit {step.bound[0].out.dtype}"


def culprit(error: compose.RowError) -> tuple[int, str]:
    """Find the step whose code raised, and the user's own line, from the frames of a plain run."""
    number, where = -1, ""
    assert error.cause is not None
    for frame in traceback.extract_tb(error.cause.__traceback__):
        if frame.filename == compose.FILENAME and frame.lineno:
            number = error.program.owners[frame.lineno - 1]
        elif number >= 0 and not frame.filename.startswith(os.path.dirname(__file__) + os.sep):
            where = f"{frame.filename} line {frame.lineno}"
    return number, where
