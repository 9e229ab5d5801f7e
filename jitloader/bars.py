"""Progress bars: tqdm's where it is installed, in notebooks a widget."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def bar(
    what: str, total: int | None, wanted: bool, unit: str = "row", done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Give what is told the number of rows (or bytes) done, from any thread: a bar, shown after a second, where there is
    tqdm and it is wanted."""
    kind = bar_type() if wanted else None
    if kind is None:
        yield lambda count: None
        return
    lock = threading.Lock()
    quiet = type(kind.__name__, (kind,), {"monitor_interval": 0})  # without tqdm's thread, which stays for ever
    with quiet(total=total, initial=done, desc=what, unit=unit, unit_scale=True, delay=1) as shown:

        def tell(count: int) -> None:
            with lock:
                shown.update(count)

        yield tell
