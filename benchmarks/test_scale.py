"""What one row costs from 10^4 to 10^8 rows, and in batches of 64 to 65,536: flat, for no row has state of its own.

Rows are 8 float32 of one broadcast row, so that what is measured is the order, the loop and the hand-over: real rows add
what their memory costs. `python benchmarks/test_scale.py` draws the table as `benchmarks/scale.svg` (needs matplotlib).

Measured on 2 shared cores (AMD EPYC, 2026-12-03), median ns a row of 2,000,000 in batches of 4096:

| rows | sequential | shuffled | blocks(256, 4096) |
|---|---|---|---|
| 10,000 | 21.9 | 34.7 | 57 |
| 100,000 | 12.6 | 15.9 | 22 |
| 1,000,000 | 3.3 | 5.2 | 8.8 |
| 10,000,000 | 2.7 | 5.4 | 7.9 |
| 100,000,000 | 2.6 | 5.5 | 7.3 |

An epoch of 10,000 rows is over in 0.2 ms, most of which is its start; `blocks` needs more rounds of its cipher for few
blocks. By batch size, 1,000,000 rows shuffled: 64: 33.7, 256: 14.2, 1024: 7.8, 4096: 5.2, 16,384: 4.9, 65,536: 4.9 (the
1 us of Python a batch).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interleave import CLOCK, TABLES

import jitloader as jl

ROWS = [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]
BATCHES = [64, 256, 1024, 4096, 16_384, 65_536]
ORDERS = {"sequential": jl.sequential, "shuffled": jl.shuffled, "blocks": jl.blocks(256, 4096)}
MEASURED = 2_000_000  # rows a round: more than an epoch of the small sizes, less of the large
CASES = [(name, n, 4096) for name in ORDERS for n in ROWS] + [("shuffled", 1_000_000, batch) for batch in BATCHES]


def loader_of(order: str, rows: int, batch: int) -> jl.Loader:
    """Give a loader over so many rows that are all the same eight numbers."""
    return jl.Loader(jl.Dataset(x=np.broadcast_to(np.arange(8, dtype=np.float32), (rows, 8))), batch, order=ORDERS[order])


def nanoseconds(loader: jl.Loader, least: int) -> float:
    """Time at least so many rows, over as many epochs as that takes; ns a row."""
    rows, start = 0, time.perf_counter()
    while rows < least:
        for batch in loader:
            rows += len(batch.x)
            if rows >= least:
                break
    return (time.perf_counter() - start) / rows * 1e9


def interleaved(rounds: int, least: int) -> dict[tuple[str, int, int], list[float]]:
    """Time every case in turn, round after round."""
    loaders = {case: loader_of(*case) for case in dict.fromkeys(CASES)}
    found: dict[tuple[str, int, int], list[float]] = {case: [] for case in loaders}
    for round_ in range(-1, rounds):
        for case, loader in loaders.items():
            taken = nanoseconds(loader, least)
            if round_ >= 0:
                found[case].append(taken)
    return found


_measured: dict[tuple[str, int, int], list[float]] = {}


@pytest.fixture
def measured(small: bool) -> dict[tuple[str, int, int], list[float]]:
    """Give the rounds of all cases, run once."""
    if not _measured:
        _measured.update(interleaved(1 if small else 5, 10_000 if small else MEASURED))
        lines = [f"{'rows':>12}" + "".join(f"{name:>14}" for name in ORDERS)]
        for n in ROWS:
            lines.append(f"{n:12,}" + "".join(f"{np.median(_measured[name, n, 4096]):14.1f}" for name in ORDERS))
        lines.append(f"{'batch':>12}{'':14}{'shuffled':>14}  (1,000,000 rows)")
        lines += [f"{batch:12,}{'':14}{np.median(_measured['shuffled', 1_000_000, batch]):14.1f}" for batch in BATCHES]
        TABLES.append(("ns a row", lines))
    return _measured


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("order, rows, batch", dict.fromkeys(CASES), ids=lambda value: str(value))
def test_rows_cost_the_same(benchmark: Any, measured: Any, order: str, rows: int, batch: int) -> None:
    """The time of a thousand rows at each size; the epoch has all rows, and opening it made no table of them."""
    loader = loader_of(order, rows, batch)
    assert len(loader) == -(-rows // batch)
    assert sum(p.nbytes for p in loader._order.plan(rows, 0, 0).params if isinstance(p, np.ndarray)) < 1 << 18
    benchmark.group = "scale: a thousand rows"
    CLOCK.show(benchmark, [ns * 1e-6 for ns in measured[order, rows, batch]])


def draw(path: Path) -> None:
    """Draw ns a row over the number of rows, and over the batch size."""
    import matplotlib.pyplot as plt

    found = {case: float(np.median(taken)) for case, taken in interleaved(5, MEASURED).items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for name in ORDERS:
        left.plot(ROWS, [found[name, n, 4096] for n in ROWS], marker="o", label=name)
    right.plot(BATCHES, [found["shuffled", 1_000_000, batch] for batch in BATCHES], marker="o", color="C1")
    left.set(xscale="log", xlabel="rows of the data set (batch 4096)", ylabel="ns a row", title="Cost of a row")
    right.set(xscale="log", xlabel="batch size (1,000,000 rows, shuffled)", title="Cost of a row")
    left.set_ylim(0)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with plt.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, metadata={"Date": None})
    for case, ns in found.items():
        print(*case, f"{ns:.1f}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("scale.svg"))
