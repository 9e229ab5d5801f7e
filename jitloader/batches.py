"""Run batch stages: compiled code over a filled batch, with the row it failed on."""

from __future__ import annotations

import os
import traceback
from typing import Any, NamedTuple

import numpy as np

from . import jit, rng
from .errors import PipelineError
from .stages import Step


class Mixed(NamedTuple):
    """A batch stage linked to a data set, its number in the chain, and the function that runs it over all rows."""

    step: Step
    number: int
    function: Any
    signature: tuple[jit.Type, ...]

    @property
    def name(self) -> str:
        """What the stage is called."""
        return self.step.stage.name

    @property
    def how(self) -> str:
        """How it runs, in words."""
        return "compiled, a batch"

    @property
    def told(self) -> str:
        """The stage, in words."""
        return f"the batch stage {self.name!r}"


def mixed(step: Step, number: int) -> Mixed:
    """Give a batch stage ready to run: a loop over the rows of a batch, each with its key."""
    count = len(step.fields)
    froms, intos = [f"a{k}" for k in range(count)], [f"b{k}" for k in range(count)]
    rows = [f"b{k}[j]" if spec.shape else f"b{k}[j : j + 1]" for k, spec in enumerate(step.before)]
    text = (
        f"def mix_rows(key, salt, rows, done, {', '.join([*froms, *intos])}):\n"
        "    for j in range(rows.size):\n"
        "        done[0] = j\n"
        f"        function(j, {', '.join([*froms, *rows])}, subkey(subkey(key, rows[j]), salt))\n"
        "    return 0\n"
    )
    scope: dict[str, Any] = {"function": jit.plain_function(step.bound[0].kernel), "subkey": rng.subkey}
    exec(compile(text, jit.GENERATED, "exec"), scope)
    arrays = [jit.Array(spec.dtype.name, len(spec.shape) + 1) for spec in step.before]
    signature: tuple[jit.Type, ...] = (jit.INT, jit.INT, *[jit.Array("int64", 1)] * 2, *arrays, *arrays)
    return Mixed(step, number, scope["mix_rows"], signature)


def run(made: Mixed, batch: Any, rows: np.ndarray, fields: tuple[str, ...], seed: int, epoch: int, plain: bool) -> Any:
    """Give a batch after a batch stage, in fresh arrays; raises PipelineError naming the row on which it stopped."""
    names = fields if len(fields) == len(batch) else batch._fields
    places = [names.index(name) for name in made.step.fields]
    given = [np.ascontiguousarray(batch[k]) for k in places]
    fresh = [np.empty_like(array) for array in given]
    done, key = np.zeros(1, np.int64), rng.epoch_key(seed, epoch)
    every = (key, made.step.salt, np.ascontiguousarray(rows, np.int64), done, *given, *fresh)
    try:
        kernel = jit.plain(made.function, made.signature) if plain else _compiled(made)
        kernel(*every)
    except jit.KernelError:
        j = int(done[0])
        try:
            jit.plain(made.function, made.signature)(*every)
        except Exception as cause:
            raise _blame(made, cause, rows, int(done[0]), epoch) from None
        raise PipelineError(f"stage {made.number} {made.name!r} stopped on row {int(rows[j])}, epoch {epoch}") from None
    except PipelineError:
        raise
    except Exception as cause:
        raise _blame(made, cause, rows, int(done[0]), epoch) from None
    values = list(batch)
    for k, array in zip(places, fresh, strict=True):
        values[k] = array
    return type(batch)._make(values)


def _compiled(made: Mixed) -> jit.Kernel:
    try:
        return jit.load(made.function, made.signature, name="mix_rows")
    except jit.CompileError as error:
        where = f" [{error.where}]" if error.where else ""
        raise PipelineError(f"{made.name!r} cannot be compiled: {error.what}{where}") from None


def _blame(made: Mixed, cause: Exception, rows: np.ndarray, j: int, epoch: int) -> PipelineError:
    here, where = os.path.dirname(__file__) + os.sep, made.step.stage.where
    for frame in traceback.extract_tb(cause.__traceback__):
        if frame.filename != jit.GENERATED and not frame.filename.startswith(here):
            where = f"{frame.filename} line {frame.lineno}"
    fields = ", ".join(map(repr, made.step.fields))
    told = f"stage {made.number} {made.name!r} on field {fields}, row {int(rows[j])}, epoch {epoch}"
    return PipelineError(f"{told}: {type(cause).__name__}: {cause}\n  in {where}, on place {j} of a batch of {len(rows)}")
