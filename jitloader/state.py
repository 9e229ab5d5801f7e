"""What a saved state must say before a loader goes on from it."""

from __future__ import annotations

import numbers
import re
from typing import Any, NamedTuple

from . import jit
from .errors import StateError

VERSION = 1
MOST = 1 << 62  # of a number that kernels count with


def fingerprint(data: Any) -> str:
    """Hash what the rows of a data set are: fields, types, counts, stages and (sampled) row selections, not contents."""
    parts: list[Any] = [len(data)]
    for one in data.datasets:
        for name, samples in one.sources.items():
            table = samples.rows.table
            some = None if table is None else table[:: max(1, len(table) // 4096)]
            parts += [name, samples.name, str(samples.spec), samples.rows.start, samples.rows.step, some]
        parts += [(step.stage.name, step.fields) for step in one.steps]
    return jit.fingerprint(*parts)[:16]


class Layout(NamedTuple):
    """The batches that an order is laid out for: rows a batch and its padded size, of each of so many ranks; 0: any."""

    rows: int
    world: int
    tokens: int


def laid_out(token: str, layout: Layout | None) -> str:
    """Tell an order that was laid out."""
    if layout is None:
        return token
    return f"{token}@{layout.rows}x{layout.world}" + (f"t{layout.tokens}" if layout.tokens else "")


def layout_of(token: str) -> Layout | None:
    """Give the layout that a token tells, None where it tells none."""
    found = re.search(r"@(\d{1,18})x(\d{1,18})(?:t(\d{1,18}))?$", token, re.ASCII)
    if found is None:
        return None
    layout = Layout(*(int(part or 0) for part in found.groups()))
    whole = layout.world and (layout.rows or layout.tokens) and layout.rows * layout.world < MOST
    return layout if whole else None


def check_state(state: Any, own: dict[str, Any], positions: int) -> None:
    """Raise StateError, naming the part, where a state is not of this loader or was cut or edited.

    `own` is the loader's state now; an order that is laid out may be for batches of another size.
    """
    if not isinstance(state, dict):
        raise StateError(f"a state is a dict, got {type(state).__name__}")
    missing = sorted(set(own) - set(state))
    if missing:
        raise StateError(f"the state lacks {', '.join(map(repr, missing))}: it was cut or is not a loader's")
    for part in ("version", "order", "rows", "fingerprint", "seed"):
        came, have = state[part], own[part]
        if part == "order" and isinstance(came, str) and layout_of(came) is not None and layout_of(have) is not None:
            came, have = came.rpartition("@")[0], have.rpartition("@")[0]
        if not isinstance(came, (str, numbers.Integral)) or came != have:
            raise StateError(f"the state has another {part}: {state[part]!r}, this loader has {own[part]!r}")
    for part, top in (("epoch", None), ("position", positions)):
        value = state[part]
        most = MOST if top is None else top
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise StateError(
                f"the state has {part} {value!r}: a whole number of at least 0" + (f", at most {top}" if top else "")
            )
