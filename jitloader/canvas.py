"""Figures of matplotlib's, made without pyplot: no window opens, no global state changes, a notebook shows them."""

from __future__ import annotations

import functools
import io
from typing import Any

# Told apart by the colour-blind as well (Okabe and Ito, 2008).
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#dddddd"


def figure(width: float, height: float) -> Any:
    """Give an empty figure of so many inches; raises ImportError naming the extra where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'jitloader[plot]'") from None
    made = Figure(figsize=(width, height), layout="constrained")
    # What is no pyplot figure is shown by notebooks only where it says how.
    made._repr_png_ = functools.partial(png, made)  # type: ignore[attr-defined]
    return made


def png(made: Any) -> bytes:
    """Give a figure as a PNG file."""
    file = io.BytesIO()
    made.savefig(file, format="png", dpi=100)
    return file.getvalue()
