"""Small batches: what one batch of 1, 8 or 32 rows of 8 float32 costs, beside NumPy and torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from interleave import CLOCK, TABLES, Taken, Way, interleaved

import jitloader as jl

ROUNDS = 9
SIZES = [1, 8, 32]
WAYS = ["jitloader", "numpy take", "numpy index", "torch index_select", "torch index"]
_measured: dict[int, dict[str, Taken]] = {}


@pytest.fixture
def measured(small: bool, size: int) -> dict[str, Taken]:
    """Check that each way gives every row once, and time whole shuffled epochs in turn: seconds a batch."""
    if size in _measured:
        return _measured[size]
    batches = 50 if small else 10_000
    n = batches * size
    x = np.random.default_rng(1).standard_normal((n, 8), np.float32)
    x[:, 0] = np.arange(n)
    seeds, buffer = np.random.default_rng(2), np.empty((size, 8), np.float32)
    loader = jl.Loader(jl.Dataset(x=x), size, shuffle=True)

    def take() -> Iterator[np.ndarray]:
        order = seeds.permutation(n)
        for low in range(0, n, size):
            np.take(x, order[low : low + size], axis=0, out=buffer, mode="clip")
            yield buffer

    def index() -> Iterator[np.ndarray]:
        order = seeds.permutation(n)
        for low in range(0, n, size):
            yield x[order[low : low + size]]

    ways = {
        "jitloader": Way(lambda: (batch.x for batch in loader), batches),
        "numpy take": Way(take, batches),
        "numpy index": Way(index, batches),
        **torch_ways(x, size),
    }
    for name, way in ways.items():
        rows = np.concatenate([np.asarray(batch)[:, 0].copy() for batch in way.run()])
        assert np.array_equal(np.sort(rows), np.arange(n)), name
    # A generator round the loader would add its own cost to every batch.
    ways["jitloader"] = Way(lambda: loader, batches)
    _measured[size] = interleaved(ways, 1 if small else ROUNDS)
    lines = [f"{name:20}{t.median * 1e6:10.2f} us a batch  +-{t.spread:4.0%}" for name, t in _measured[size].items()]
    TABLES.append((f"{size} rows of 8 float32 a batch ({batches:,} batches)", lines))
    return _measured[size]


def torch_ways(x: np.ndarray, size: int) -> dict[str, Way]:
    """Give torch's two ways of picking rows, where torch is installed."""
    try:
        import torch
    except ImportError:
        return {}
    rows, out, n = torch.from_numpy(x), torch.empty(size, 8), len(x)

    def select() -> Iterator[Any]:
        for index in torch.randperm(n).split(size):
            yield torch.index_select(rows, 0, index, out=out)

    def pick() -> Iterator[Any]:
        for index in torch.randperm(n).split(size):
            yield rows[index]

    return {"torch index_select": Way(select, n // size), "torch index": Way(pick, n // size)}


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_batch(benchmark: Any, measured: dict[str, Taken], size: int, way: str) -> None:
    """Each way gives every row once; the table shows the time of one batch in each interleaved round."""
    if way not in measured:
        pytest.skip("torch is not installed")
    benchmark.group = f"{size} rows of 8 float32: one batch"

    CLOCK.show(benchmark, measured[way].rounds)
