"""What the numbers of a data set look like: counts, moments and histograms of every field, in passes over all rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import jit
from .compose import Program, Ragged
from .passes import Bar, Consume, exact_sum, sweep
from .spec import Spec
from .tables import html_bars, html_table, number_of, sparkline, text_table

BINS = 20
NUMBERS = ("finite", "nan", "mean", "square", "low", "high")  # what `scan` finds in a chunk


class Summary(NamedTuple):
    """The numbers of one field over all rows and elements: mean, std (of the population), min and max of the finite
    ones, float64, NaN where there is none; `histogram[i]` of them lie from `edges[i]` on and below `edges[i + 1]` (the
    last bin holds its end too)."""

    spec: Spec
    count: int  # type: ignore[assignment]
    nan: int
    inf: int
    mean: float
    std: float
    min: float
    max: float
    histogram: np.ndarray
    edges: np.ndarray


class Description(dict[str, "Summary | None"]):
    """What `Dataset.describe()` gives: a Summary for each field of numbers, None for others; as text or HTML, a table."""

    def __init__(self, found: dict[str, Summary | None], specs: dict[str, Spec], rows: int) -> None:
        super().__init__(found)
        self.specs, self.rows = specs, rows

    def lines(self) -> list[tuple[str, ...]]:
        """Give the cells of the table but the histogram, the heads first."""
        made: list[tuple[str, ...]] = [("field", "type", "count", "nan", "inf", "mean", "std", "min", "max")]
        for name, found in self.items():
            head = (name, repr(self.specs[name]))
            if found is None:
                made.append((*head, *[""] * 7))
                continue
            counts = (f"{n:,}" for n in (found.count, found.nan, found.inf))
            made.append((*head, *counts, *map(number_of, (found.mean, found.std, found.min, found.max))))
        return made

    def __repr__(self) -> str:
        heads, *lines = self.lines()
        bars = [sparkline(found.histogram.tolist()) if found else "no numbers" for found in self.values()]
        table = [(*heads, "histogram"), *((*line, bar) for line, bar in zip(lines, bars, strict=True))]
        return f"{self.rows:,} rows\n{text_table(table)}"

    def _repr_html_(self) -> str:
        heads, *lines = self.lines()
        bars = [html_bars(found.histogram.tolist(), told(found)) if found else "no numbers" for found in self.values()]
        table = [(*heads, "histogram"), *((*line, bar) for line, bar in zip(lines, bars, strict=True))]
        return f"<p>{self.rows:,} rows</p>{html_table(table, raw=[len(heads)])}"


def told(found: Summary) -> str:
    """Say in words what a histogram shows."""
    parts = (
        f"{number_of(low)} to {number_of(high)}: {n:,}"
        for low, high, n in zip(found.edges, found.edges[1:], found.histogram.tolist(), strict=False)
    )
    return "; ".join(parts)


def scan(x, found):  # type: ignore[no-untyped-def]
    """Find the NUMBERS of a chunk: how many are finite and NaN, and of the finite ones the mean, the sum of squared
    differences from it, least and greatest."""
    finite, missing, base = 0, 0, 0.0
    for i in range(x.size):
        if x[i] - x[i] == 0.0:
            base = x[i]  # differences from the first: a column of one value has exactly that mean
            break
    low, high = np.inf, -np.inf
    even, odd = 0.0, 0.0  # two sums at once: each waits four cycles for its last addition
    for i in range(x.size):
        v = x[i]
        good = v - v == 0.0
        finite += good
        missing += v != v
        low = v if good and v < low else low
        high = v if good and v > high else high
        d = v - base if good else 0.0
        even, odd = odd, even + d
    mean = base + (even + odd) / np.float64(max(finite, 1))
    even, odd = 0.0, 0.0
    for i in range(x.size):
        d = x[i] - mean if x[i] - x[i] == 0.0 else 0.0
        even, odd = odd, even + d * d
    square = even + odd
    found[0] = np.float64(finite)
    found[1] = np.float64(missing)
    found[2] = mean
    found[3] = square
    found[4] = low
    found[5] = high


def tally(x, edges, counts):  # type: ignore[no-untyped-def]
    """Count the finite numbers of a chunk in bins of one width: bin i from edges[i] on, below edges[i + 1]."""
    bins = counts.size
    low = edges[0] * 0.5
    width = edges[bins] * 0.5 - low  # of halves, which do not overflow
    scale = np.float64(bins) / width if width > 1e-300 else 0.0  # no narrower: the quotient would be infinite
    for i in range(x.size):
        v = x[i]
        if v - v != 0.0:
            continue
        k = min(max(np.int64((v * 0.5 - low) * scale), 0), bins - 1)
        while k > 0 and v < edges[k]:
            k -= 1
        while k < bins - 1 and v >= edges[k + 1]:
            k += 1
        counts[k] += 1


def edges_of(low: float, high: float, whole: bool) -> np.ndarray:
    """Give the edges of the bins: a bin for each value where few whole numbers lie between, else BINS of one width.

    >>> edges_of(0, 2, True).tolist(), edges_of(0, 1, False).size
    ([-0.5, 0.5, 1.5, 2.5], 21)
    """
    if low > high:
        return np.zeros(1)
    if whole and high - low < BINS and max(-low, high) < 2**52:  # beyond, halves are no float64
        return np.arange(low - 0.5, high + 1)
    edges = np.linspace(low / 2, high / 2, BINS + 1) * 2 if low < high else np.zeros(2)
    edges[0], edges[-1] = low, high  # half of the least number there is is 0
    return edges


def describe(program: Program, count: int, key: int, bar: Bar) -> list[Summary | None]:
    """Give the summaries of a program's outputs over its rows, in two passes: moments and extent, then histograms.

    Chunks are merged in the order of their rows, so that no sum depends on which thread was first (Chan, Golub, LeVeque
    1979). Padding is left out: rows that vary come at their own lengths.
    """
    outputs = [o._replace(form="ragged") if o.form == "longest" else o for o in program.outputs]
    program = program._replace(outputs=tuple(outputs))
    picked = [k for k, output in enumerate(outputs) if is_number(output.spec.dtype)]
    numbers = jit.Array("float64", 1)
    look, place = jit.load(scan, [numbers, numbers]), jit.load(tally, [numbers, numbers, jit.Array("int64", 1)])
    parts: dict[int, list[tuple[int, int, np.ndarray]]] = {k: [] for k in picked}

    def first() -> Consume:
        def consume(start: int, arrays: list[np.ndarray]) -> None:
            for k in picked:
                x, found = doubles(arrays[k]), np.zeros(len(NUMBERS))
                with np.errstate(all="ignore"):  # for kernels run as plain Python
                    look(x, found)
                parts[k].append((start, x.size, found))

        return consume

    if count and picked:
        sweep(program, count, key, first, bar=bar)
    merged = {k: merge(parts[k]) for k in picked}
    edges = {k: edges_of(m.low, m.high, outputs[k].spec.dtype.kind in "iub") for k, m in merged.items()}
    counted = [k for k in picked if edges[k].size > 1]
    bins: dict[int, list[np.ndarray]] = {k: [] for k in counted}

    def second() -> Consume:
        own = {k: np.zeros(edges[k].size - 1, np.int64) for k in counted}
        for k in counted:
            bins[k].append(own[k])

        def consume(start: int, arrays: list[np.ndarray]) -> None:
            for k in counted:
                with np.errstate(all="ignore"):
                    place(doubles(arrays[k]), edges[k], own[k])

        return consume

    if counted:
        sweep(program, count, key, second, bar=bar)
    made: list[Summary | None] = [None] * len(outputs)
    for k, m in merged.items():
        histogram = np.sum(bins[k], axis=0) if k in counted else np.zeros(0, np.int64)
        low, high = (m.low, m.high) if m.finite else (math.nan, math.nan)
        counts = (m.count, m.nan, m.count - m.finite - m.nan)
        made[k] = Summary(outputs[k].spec, *counts, m.mean, m.std, low, high, histogram, edges[k])
    return made


def is_number(dtype: np.dtype) -> bool:
    """Whether a dtype is of numbers that float64 holds: bools, integers, floats, bfloat16."""
    return dtype.kind in "biuf" or (dtype.kind == "V" and dtype.type is not np.void)


def doubles(array: np.ndarray | Ragged) -> np.ndarray:
    """Give the numbers of a chunk as float64: one kernel serves all dtypes, for a copy of what is in cache anyway."""
    return (array.values if isinstance(array, Ragged) else array).reshape(-1).astype(np.float64, copy=False)


class Moments(NamedTuple):
    """What a first pass finds of a field."""

    count: int  # type: ignore[assignment]
    finite: int
    nan: int
    mean: float
    std: float
    low: float
    high: float


def merge(parts: list[tuple[int, int, np.ndarray]]) -> Moments:
    """Merge chunks: (first row, count, NUMBERS) each."""
    parts.sort(key=lambda part: part[0])
    size = sum(part[1] for part in parts)
    table = np.array([part[2] for part in parts]).reshape(-1, len(NUMBERS))
    finite, missing = int(table[:, 0].sum()), int(table[:, 1].sum())
    table = table[table[:, 0] > 0]
    if not len(table):
        return Moments(size, 0, missing, math.nan, math.nan, math.inf, -math.inf)
    weight, mean, square = table[:, 0], table[:, 2], table[:, 3]
    low, high = float(table[:, 4].min()), float(table[:, 5].max())
    if low == high:
        return Moments(size, finite, missing, low, 0.0, low, high)
    with np.errstate(all="ignore"):
        centre = float(mean[0] + exact_sum((mean - mean[0]) * weight) / finite)
        deviation = math.sqrt(exact_sum(square + weight * (mean - centre) ** 2) / finite)
    return Moments(size, finite, missing, centre, deviation, low, high)
