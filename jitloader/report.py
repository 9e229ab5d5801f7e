"""What a loader did with the time: a verdict, a table, a timeline; and its batches under a progress bar."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from . import canvas
from .bars import bar_type
from .loader import Loader
from .tables import html_table, seconds_of, size_of

SHORT = 0.005  # seconds in all, below which a cause would be a guess
SLOW = 0.05  # share of the step from which waiting is worth a word
BOUND = 0.5  # of a memcpy's rate, from which moving bytes is what takes the time
IDLE = 0.5  # threads that fill for less than this part of the waiting are not what is waited for
BINS = 80  # of the lower half of the timeline


class Report:
    """What `Loader.report()` gives: the loader's `stats`, as they were then, to be printed, shown and plotted."""

    def __init__(self, loader: Loader) -> None:
        self.stats = loader.stats()
        self.events = tuple(loader._meter.events)
        self.consumer = loader._meter.consumer
        self.prefetch = loader.prefetch
        data = loader.data
        one = data.datasets[0]  # of a mix the first stands for all
        used = {*one.fields, *(name for step in one.steps for name in step.fields)}
        sources = [samples for name, samples in one.sources.items() if name in used]
        # Bytes of memory that a row is read from; rows that vary at the length they have in the mean.
        self._read = sum(
            s.nbytes / max(sum(part.count for part in s.parts), 1) if s.spec.ragged else s.spec.nbytes for s in sources
        )
        self._stages = bool(one.steps)
        self._python = data.applies

    @property
    def fill_rate(self) -> float:
        """Bytes a second that one thread reads and writes while it fills."""
        filled = sum(event.rows for event in self.events)
        seconds = sum(event.seconds for event in self.events)
        return (sum(event.nbytes for event in self.events) + self._read * filled) / seconds if seconds else 0.0

    @property
    def busy(self) -> tuple[float, float]:
        """What share of the step the background threads fill, in the mean, and what share of the waiting the consumer."""
        filled = sum(event.seconds for event in self.events) or 1.0
        own = sum(event.seconds for event in self.events if event.thread == self.consumer) / filled
        wait, seconds = self.stats["wait_seconds"], self.stats["fill_seconds"]
        step = (wait + self.stats["consumer_seconds"]) * max(self.stats["threads"], 1)
        return (min((1 - own) * seconds / step, 1.0) if step else 0.0, min(own * seconds / wait, 1.0) if wait else 0.0)

    @property
    def verdict(self) -> str:
        """The one line: how much of the step is the loader's, and by what it is bound where that is much."""
        if not self.stats["batches"]:
            return "no batch yet"
        share = self.stats["wait_share"]
        told = f"loader {100 * share:.0f} % of the step"
        if share < SLOW:
            return f"{told}: the consumer sets the pace"
        step = self.stats["wait_seconds"] + self.stats["consumer_seconds"]
        if step < SHORT:
            return f"{told}, of {seconds_of(step)} in all: too short to say why"
        rate, most = self.fill_rate, copy_rate()
        behind, own = self.busy
        if self.stats["threads"] and behind < IDLE * share and own < IDLE:
            return f"{told}; bound by hand-over: threads fill {100 * behind:.0f} % of the time"
        if rate >= BOUND * most:
            cause = "memory"
        elif self._python:
            cause = "Python functions and stages" if self._stages else "Python functions"
        else:
            cause = "its stages" if self._stages else f"reads of {self._read:,.0f} bytes a row"
        return f"{told}; fill bound by {cause} at {rate / 1e9:.2g} GB/s of a memcpy's {most / 1e9:.2g}" + (
            "" if self.prefetch else "; prefetch=2 would fill while the consumer works"
        )

    def lines(self) -> list[tuple[str, str]]:
        """Give what the table shows: (part, what is known of it)."""
        s = self.stats
        threads = int(s["threads"])
        behind, own = self.busy
        where = "the consumer's thread"
        if threads:
            where = f"{threads} background thread{'s' * (threads > 1)} ({100 * behind:.0f} % of the time)"
            where += f" and the waiting consumer ({100 * own:.0f} % of it)" if own else ""
        padding = f", {100 * s['padding_share']:.0f} % of the padded fields padding" if s["padding_share"] else ""
        return [
            ("handed out", f"{s['batches']:,} batches, {s['rows']:,} rows, {size_of(s['bytes'])}{padding}"),
            (
                "step",
                f"{seconds_of(s['wait_seconds'])} waiting, {seconds_of(s['consumer_seconds'])} consumer's own work",
            ),
            (
                "fill",
                f"{seconds_of(s['fill_seconds'])} in {where}, {size_of(s['fill_bytes_per_second'])}/s written a thread",
            ),
            ("kernels", f"ready after {seconds_of(s['compile_seconds'])}" if s["compile_seconds"] else "were ready"),
            ("pool", f"{s['slots']:,} slots, {s['slots_held']:,} in use, {size_of(s['pool_bytes'])}"),
        ]

    def __repr__(self) -> str:
        if not self.stats["batches"]:
            return self.verdict
        return "\n".join([self.verdict, *(f"  {part.ljust(10)}  {told}" for part, told in self.lines())])

    def _repr_html_(self) -> str:
        if not self.stats["batches"]:
            return f"<p>{self.verdict}</p>"
        return f"<p><b>{self.verdict}</b></p>{html_table([('', ''), *self.lines()])}"

    def plot(self) -> Any:
        """Draw the last 4,096 runs of batches: when threads filled and the consumer waited, above; below, what share of
        the time that was. Gives a matplotlib Figure, shown by notebooks; in a script, `savefig(path)`.

        Raises ImportError without matplotlib, ValueError before the first batch.
        """
        if not self.events:
            raise ValueError("no batch yet: there is nothing to plot")
        begin = min(min(e.asked, e.begun) for e in self.events)
        end = max(max(e.got, e.begun + e.seconds) for e in self.events)
        scale, unit = (1.0, "s") if end - begin >= 1 else (1e3, "ms")
        own = [((e.begun - begin) * scale, e.seconds * scale) for e in self.events if e.thread == self.consumer]
        others = [((e.begun - begin) * scale, e.seconds * scale) for e in self.events if e.thread != self.consumer]
        lanes = side_by_side(others)  # each epoch has threads of its own: their numbers would give a lane an epoch
        waits = [((e.asked - begin) * scale, (e.got - e.asked) * scale) for e in self.events]

        drawn = canvas.figure(9, 3.2 + 0.3 * len(lanes))
        time_axes, share_axes = drawn.subplots(2, 1, sharex=True, height_ratios=[1.6 + 0.6 * len(lanes), 2.2])
        names = [f"thread {k + 1}" for k in range(len(lanes))] + ["consumer"]
        for k, spans in enumerate(lanes):
            time_axes.broken_barh(spans, (k - 0.35, 0.7), color=canvas.BLUE, linewidth=0)
        last = len(lanes)
        time_axes.broken_barh([(0, (end - begin) * scale)], (last - 0.35, 0.7), color=canvas.GREY, linewidth=0)
        time_axes.broken_barh(waits, (last - 0.35, 0.7), color=canvas.ORANGE, linewidth=0)
        time_axes.broken_barh(own, (last - 0.15, 0.3), color=canvas.BLUE, linewidth=0)
        time_axes.set_yticks(range(len(names)), names)
        time_axes.set_ylim(last + 0.6, -0.6)
        time_axes.tick_params(axis="y", length=0)
        time_axes.set_title(self.verdict, loc="left", fontsize=10)

        edges = np.linspace(0, (end - begin) * scale, BINS + 1)
        waiting = 100 * covered(waits, edges)
        filling = 100 * np.mean([covered(spans, edges) for spans in lanes or [own]], axis=0)
        share_axes.stairs(waiting, edges, color=canvas.ORANGE, fill=True, alpha=0.5)
        share_axes.stairs(filling, edges, color=canvas.BLUE, linewidth=1.5, baseline=None)
        share_axes.set(
            ylim=(0, 105), xlim=(0, edges[-1]), ylabel="share of time, %", xlabel=f"time since the first run, {unit}"
        )
        share_axes.set_yticks([0, 50, 100])
        for axes in (time_axes, share_axes):
            axes.spines[["top", "right"]].set_visible(False)
        time_axes.spines["left"].set_visible(False)
        patches = [
            time_axes.broken_barh([], (0, 0), color=colour, label=label)
            for colour, label in (
                (canvas.BLUE, "filling"), (canvas.ORANGE, "consumer waiting"), (canvas.GREY, "consumer's own work"),
            )
        ]  # fmt: skip
        drawn.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return drawn


def side_by_side(spans: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Part spans of (start, length) into as few lanes as there are at once, each without overlaps.

    >>> side_by_side([(0, 2), (1, 2), (2, 1)])
    [[(0, 2), (2, 1)], [(1, 2)]]
    """
    lanes: list[list[tuple[float, float]]] = []
    for span in sorted(spans):
        free = next((lane for lane in lanes if sum(lane[-1]) <= span[0]), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def covered(spans: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """Give what share of each bin lies in spans of (start, length) that do not overlap.

    >>> covered([(0.5, 1.0)], np.array([0.0, 1.0, 2.0])).tolist()
    [0.5, 0.5]
    """
    starts = np.array([s for s, _ in spans] or [0.0])[:, None]
    ends = starts + np.array([n for _, n in spans] or [0.0])[:, None]
    inside = np.minimum(ends, edges[1:]) - np.maximum(starts, edges[:-1])
    return np.minimum(np.maximum(inside, 0).sum(axis=0) / np.diff(edges), 1.0)


@functools.cache
def copy_rate() -> float:
    """Give the bytes a second that a memcpy in one thread reads and writes, from memory larger than caches to 1 MB used
    again, as a loader does; measured once a process, in some 50 ms."""
    size = 1 << 20
    source, target = np.ones(96 * size, np.uint8), np.ones(size, np.uint8)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        for low in range(0, source.size, size):
            np.copyto(target, source[low : low + size])
        taken.append(time.perf_counter() - start)
    return 2 * source.size / min(taken)


def progress(batches: Iterator[Any], options: dict[str, Any]) -> Iterable[Any]:
    """Give batches under a bar of tqdm's where it is installed and not disabled, else the batches."""
    kind = None if options.get("disable") else bar_type()
    return batches if kind is None else kind(batches, **options)  # type: ignore[no-any-return]
