"""Figures of shuffle quality: expected values from counting, and orders whose quality is known."""

import math
import re
import time
from fractions import Fraction

import numpy as np
import pytest

import jitloader as jl
from jitloader import quality


def plain_spread(sizes, batch):
    """The mean total variation of a batch drawn without replacement, by summing over all counts of each class."""
    n, total = sum(sizes), Fraction(0)
    for k in sizes:
        for x in range(max(0, batch - (n - k)), min(k, batch) + 1):
            chance = Fraction(math.comb(k, x) * math.comb(n - k, batch - x), math.comb(n, batch))
            total += chance * abs(Fraction(x, batch) - Fraction(k, n))
    return float(total / 2)


@pytest.mark.parametrize("sizes", [[5, 5], [1, 2, 30], [7], [10, 10, 1, 1], [99, 1]])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_the_expected_spread_is_that_of_all_shuffles(sizes, batch):
    """The closed form equals the sum over all counts."""
    n = sum(sizes)
    assert quality.true_spread(np.array(sizes) / n, batch, n) == pytest.approx(plain_spread(sizes, batch), abs=1e-12)
    assert quality.true_spread(np.array(sizes) / n, n, n) == 0


def test_orders_show_their_price():
    """A full shuffle is a true one; blocks cost a little, one chunk at a time a lot, no shuffle most; labels by array or field."""
    n = 200_000
    labels = np.arange(n) * 100 // n
    data = jl.Dataset(x=np.zeros(n), label=labels)
    found = {
        name: jl.Loader(data, 256, order=order).shuffle_quality("label")
        for name, order in (
            ("full", jl.shuffled), ("small", jl.blocks(16, 1024)), ("large", jl.blocks(1000, 2)), ("none", jl.sequential),
        )
    }  # fmt: skip
    assert abs(found["full"].excess) < 5 * found["full"].error and found["full"].batches == 256
    assert abs(found["full"].adjacency - found["full"].true_adjacency) < 0.001
    assert found["full"].excess < found["small"].excess < 0.05 < 0.5 < found["large"].excess < found["none"].excess
    assert found["none"].adjacency == found["none"].overlap == 1 and found["full"].overlap < 0.01
    assert found["large"].adjacency > 0.1
    again = jl.Loader(data, 256, shuffle=True).shuffle_quality(labels)
    assert again == found["full"]
    fine = jl.Loader(data, 256, order=jl.stratified(labels)).shuffle_quality(labels)
    assert fine.excess < -0.1
    ranks = jl.Loader(data, 256, order=jl.sequential, rank=1, world_size=2, tail="drop").shuffle_quality()
    assert ranks.spread > 0.9 and not ranks.labelled


def test_chance_is_as_expected():
    """Adjacency and overlap of a true shuffle, over NumPy's permutations."""
    n, size, rng = 2000, 50, np.random.default_rng(0)
    found = jl.Loader(jl.Dataset(x=np.zeros(n)), size, shuffle=True).shuffle_quality()
    orders = np.stack([rng.permutation(n) for _ in range(400)])
    near = (np.abs(np.diff(orders, axis=1)) <= found.near).mean()
    shared = np.mean([np.intersect1d(a[:size], b[:size]).size for a, b in zip(orders[::2], orders[1::2], strict=True)])
    assert near == pytest.approx(found.true_adjacency, rel=0.05)
    assert shared / size == pytest.approx(found.true_overlap, rel=0.2)


def test_printed_in_four_lines():
    """The repr tells each figure beside the true one; here each batch is one of the 32 stretches."""
    loader = jl.Loader(jl.Dataset(x=np.zeros(1024)), 32)
    true = plain_spread([32] * 32, 32)
    assert repr(loader.shuffle_quality()).splitlines() == [
        "Shuffle quality, from 32 batches (1,024 rows), beside a true shuffle:",
        f"  spread of 32 stretches of the data in a batch: 0.9688, true {true:.4f}, excess {31 / 32 - true:+.4f} (standard error 0.0000)",
        "  neighbours within 1 rows of storage: 100.000%, true 0.195%",
        "  rows again in the same batch of the next epoch: 100.000%, true 3.125%",
    ]


def test_large_data_are_sampled():
    """At 10**8 rows at most 2**16 positions and 2**20 labels are looked at."""
    data = jl.Dataset(x=np.lib.stride_tricks.as_strided(np.zeros(1), (10**8,), (0,)))
    loader = jl.Loader(data, 512, order=jl.blocks(64, 4096))
    loader.shuffle_quality()
    started = time.perf_counter()
    found = loader.shuffle_quality()
    assert time.perf_counter() - started < 2 and found.rows == 65536 and abs(found.excess) < 0.05


@pytest.mark.parametrize(
    "labels, kind, says",
    [
        (np.zeros(9), ValueError, "shuffle_quality takes a label a row, got shape (9,) for 10 rows"),
        ("z", KeyError, "no field 'z': there are x, w"),
        ("w", ValueError, "shuffle_quality takes labels of one number or string a row"),
    ],
)
def test_bad_labels_are_named(labels, kind, says):
    """Labels of another length, or that are none."""
    loader = jl.Loader(jl.Dataset(x=np.arange(10), w=np.zeros((10, 2))), 2)
    with pytest.raises(kind, match=re.escape(says)):
        loader.shuffle_quality(labels)


def test_too_few_rows():
    """One row cannot be shuffled."""
    with pytest.raises(ValueError, match="shuffle_quality takes at least two rows and a batch, got 1 rows, 1 batches"):
        jl.Loader(jl.Dataset(x=np.zeros(1)), 1).shuffle_quality()
