"""Time several ways of the same work in turn, round after round, so that drift of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np


class Way(NamedTuple):
    """One way of doing the work: `run()` gives an iterable to go through once, which makes `rows` rows."""

    run: Callable[[], Iterable[Any]]
    rows: int


class Taken(NamedTuple):
    """What one way took: wall seconds a row for each round, and the median CPU seconds a row of the whole process."""

    rounds: list[float]
    cpu: float

    @property
    def median(self) -> float:
        """Median seconds a row."""
        return float(np.median(self.rounds))

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a share of the median."""
        low, high = np.percentile(self.rounds, [25, 75])
        return float((high - low) / 2 / self.median)


def interleaved(ways: dict[str, Way], rounds: int) -> dict[str, Taken]:
    """Run every way once untimed (compiling, filling caches), then `rounds` times in turn."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(-1, rounds):
        for name, (run, rows) in ways.items():
            work, start = time.process_time(), time.perf_counter()
            for _ in run():
                pass
            seconds = time.perf_counter() - start
            if round_ >= 0:
                wall[name].append(seconds / rows)
                cpu[name].append((time.process_time() - work) / rows)
    return {name: Taken(wall[name], float(np.median(cpu[name]))) for name in ways}


class Replay:
    """A timer for pytest-benchmark that shows rounds timed elsewhere: its tables then hold the interleaved rounds."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self.running = False

    def __call__(self) -> float:
        """Give 0 at the start of a round and its recorded duration at the end."""
        self.running = not self.running
        return 0.0 if self.running else self.durations.pop(0)

    def show(self, benchmark: Any, durations: list[float]) -> None:
        """Hand rounds to pytest-benchmark as those of this test."""
        self.durations, self.running = list(durations), False
        benchmark.pedantic(lambda: None, rounds=len(durations))


CLOCK = Replay()
TABLES: list[tuple[str, list[str]]] = []  # what the session prints at its end


def report(title: str, taken: dict[str, Taken], reference: str = "jitloader") -> None:
    """Keep a table for the end of the session: rows/s, spread, time relative to the reference, CPU time."""
    lines = [f"{'':28}{'rows/s':>14}{'+-':>6}{'time':>10}{'CPU s / M rows':>16}"]
    for name, t in taken.items():
        ratio = f"{t.median / taken[reference].median:.2f}x"
        lines.append(f"{name:28}{1 / t.median:14,.0f}{t.spread:6.0%}{ratio:>10}{t.cpu * 1e6:16.3f}")
    TABLES.append((title, lines))
