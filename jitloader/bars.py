"""Progress bars: tqdm's where it is installed, in notebooks a widget."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def bar_type() -> Any:
    """Give the class of tqdm's that suits the place, or None where tqdm is not installed."""
    if find_spec("tqdm") is None:
        return None
    if find_spec("ipywidgets") is None:  # without which tqdm.auto warns, and falls back to this one
        from tqdm import tqdm
    else:
        from tqdm.auto import tqdm
    return tqdm
