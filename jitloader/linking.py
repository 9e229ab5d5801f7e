"""Check that a stage fits the fields it is linked to: what comes out, or an error on the user's line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from . import jit
from .compose import decoded
from .errors import PipelineError
from .spec import Spec
from .stages import Bound, Misfit, Stage, Step


def linked(
    made: Stage, names: tuple[str, ...], to: tuple[str, ...], specs: Mapping[str, Spec], number: int, salt: int
) -> Step:
    """Check a stage against each of some fields of a data set of these specs, as its step of this number and salt."""
    if to:
        raise ValueError(f"to= is for a stage over several fields; {made.name!r} takes one at a time")
    before, bound = [], []
    beside: list[tuple[str, Bound]] = []
    for name in names:
        spec, ready = _bind(made, name, specs[name], number)
        before.append(spec)
        bound.append(ready)
        for place, (other, told) in enumerate(ready.beside):
            check_name(other)
            if name != names[0] and beside[place][0] == other:
                continue  # of several fields padded alike there is one mask
            if other in specs or other in [known for known, _ in beside]:
                raise PipelineError(f"stage {number} {made.name!r}: there is a field {other!r} already")
            beside.append((other, told))
    outputs = (*names, *(other for other, _ in beside))
    return Step(made, names, salt, tuple(before), (*bound, *(told for _, told in beside)), outputs)


def joined(
    made: Stage, names: tuple[str, ...], to: tuple[str, ...], specs: Mapping[str, Spec], number: int, salt: int
) -> Step:
    """Check a stage over several fields at once, which writes into the first of them, or into the fields `to`."""
    given = tuple(decoded(specs[name]) for name in names)
    where = f"stage {number} {made.name!r} on field{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
    came = ", ".join(map(str, given))
    assert made.join is not None
    try:
        bound = made.join(given)
    except Misfit as misfit:
        raise PipelineError(f"{where}: {misfit}; got {came} [{made.where}]") from None
    except jit.CompileError as error:
        raise PipelineError(f"{where}: {error.what}; got {came} [{error.where or made.where}]") from None
    outputs = to or names[: len(bound)]
    if len(outputs) != len(bound):
        raise PipelineError(f"{where} makes {len(bound)} field(s): name them by to=, got {to or names}")
    return Step(made, names, salt, given, bound, outputs, joint=True)


def _bind(made: Stage, name: str, spec: Spec, number: int) -> tuple[Spec, Bound]:
    """Check a stage against a spec; where it computes, bits that no kernel computes with are decoded for it first."""
    seen = decoded(spec)
    try:
        if seen != spec:
            with contextlib.suppress(Misfit):
                ready = made.bind(spec)
                if ready.kind in ("index", "shape"):
                    return spec, ready
        return seen, made.bind(seen)
    except Misfit as misfit:
        reason, where = str(misfit), made.where
    except jit.CompileError as error:
        unfit = "" if isinstance(error, jit.Refused) else f"cannot take {spec.dtype}: "
        reason, where = unfit + error.what, error.where or made.where
    raise PipelineError(f"stage {number} {made.name!r} on field {name!r}: {reason}; got {spec} [{where}]") from None


def told(step: Step) -> tuple[Any, ...]:
    """Tell what a step does: steps that are told alike do the same."""
    kernels = [bound.kernel for bound in step.bound]
    return step.stage.name, step.outputs, step.salt, jit.fingerprint(step.stage.bind, step.stage.join, kernels)


def names_of(given: Any, told: str) -> tuple[str, ...]:
    """Give one name or several as a tuple."""
    if isinstance(given, str):
        return (given,)
    names = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{told}, got {given!r}")
    return names


def check_name(name: str) -> None:
    """Refuse a field name that is not a string of at least one character."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"a field name is a string of at least one character, got {name!r}")
