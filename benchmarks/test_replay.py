"""Draws by priority and rings of rows, a million rows each, beside the best NumPy for the same."""

import itertools

import numpy as np
import pytest

from jitloader.replay import Prioritized, Ring

ROWS, BATCH, ALPHA = 1_000_000, 256, 0.6
SOURCE = np.random.default_rng(0)
PRIORITIES = SOURCE.exponential(size=ROWS)
UPDATES = [(SOURCE.integers(0, ROWS, BATCH), SOURCE.exponential(size=BATCH)) for _ in range(256)]


class Compiled:
    """Eight children a node, in one kernel."""

    def __init__(self):
        self.memory = Prioritized(ROWS, ALPHA, stratified=False)
        self.update(np.arange(ROWS), PRIORITIES)

    def update(self, rows, priorities):
        self.memory.update(rows, priorities)

    def sample(self):
        return self.memory.sample(BATCH)

    def total(self):
        return self.memory.total


class NumPyTree:
    """Two children a node, all rows of a level at once: the sum tree of most replay libraries, in NumPy."""

    def __init__(self):
        self.leaves = 1 << (ROWS - 1).bit_length()
        self.sums, self.least = np.zeros(2 * self.leaves), np.full(2 * self.leaves, np.inf)
        self.source = np.random.default_rng(1)
        self.update(np.arange(ROWS), PRIORITIES)

    def update(self, rows, priorities):
        nodes = rows + self.leaves
        self.sums[nodes] = self.least[nodes] = priorities**ALPHA
        while nodes[0] > 1:
            nodes = nodes >> 1
            if len(nodes) > BATCH:
                nodes = np.unique(nodes)
            left, right = 2 * nodes, 2 * nodes + 1
            self.sums[nodes] = self.sums[left] + self.sums[right]
            self.least[nodes] = np.minimum(self.least[left], self.least[right])

    def sample(self):
        draws, nodes = self.source.random(BATCH) * self.sums[1], np.ones(BATCH, np.int64)
        while nodes[0] < self.leaves:
            nodes *= 2
            left = self.sums[nodes]
            right = draws >= left
            draws -= left * right
            nodes += right
        return nodes - self.leaves, ((self.sums[nodes] / self.least[1]) ** -0.4).astype(np.float32)

    def total(self):
        return self.sums[1]


class NumPyCumsum:
    """A flat array, and a cumulative sum of it for each batch."""

    def __init__(self):
        self.shares = PRIORITIES**ALPHA
        self.source = np.random.default_rng(1)

    def update(self, rows, priorities):
        self.shares[rows] = priorities**ALPHA

    def sample(self):
        sums = np.cumsum(self.shares)
        rows = sums.searchsorted(self.source.random(BATCH) * sums[-1], "right")
        return rows, ((self.shares[rows] / self.shares.min()) ** -0.4).astype(np.float32)

    def total(self):
        return self.shares.sum()


WAYS = pytest.mark.parametrize(
    "way", [Compiled, NumPyTree, NumPyCumsum], ids=["jitloader", "numpy_tree", "numpy_cumsum"]
)


@WAYS
def test_update(benchmark, way):
    """New priorities for 256 random rows of a million."""
    memory, turns = way(), itertools.cycle(UPDATES)
    plain = PRIORITIES**ALPHA
    for rows, priorities in UPDATES:
        memory.update(rows, priorities)
        plain[rows] = priorities**ALPHA
    assert memory.total() == pytest.approx(plain.sum(), rel=1e-9)

    benchmark.pedantic(memory.update, setup=lambda: (next(turns), {}), rounds=2000)

    assert memory.total() == pytest.approx(plain.sum(), rel=1e-2)


@WAYS
def test_sample(benchmark, way):
    """256 rows of a million with their importance weights, drawn independently."""
    memory = way()
    shares = PRIORITIES**ALPHA
    memory.sample()

    rows, weights = benchmark(memory.sample)

    np.testing.assert_allclose(weights, (shares[rows] / shares.min()) ** -0.4, rtol=1e-5)
    drawn = np.concatenate([memory.sample()[0] for _ in range(20)])
    expected = (shares**2).sum() / shares.sum()  # the mean share of a row drawn in proportion to it
    assert shares[drawn].mean() == pytest.approx(expected, rel=0.05)


STEP = {"obs": np.ones((64, 8), np.float32), "action": np.arange(64), "reward": np.ones(64, np.float32)}


def ring():
    """Rows into a ring that readers may watch."""
    own = Ring(ROWS, obs=("float32", 8), action="int64", reward="float32")
    return own.fields, lambda: own.extend(**STEP)


def modulo():
    """Rows into three arrays by computed indices, with no readers in mind."""
    fields = {name: np.zeros((ROWS, *rows.shape[1:]), rows.dtype) for name, rows in STEP.items()}
    written = itertools.count(0, 64)

    def extend():
        places = (next(written) + np.arange(64)) % ROWS
        for name, rows in STEP.items():
            fields[name][places] = rows
        return places

    return fields, extend


@pytest.mark.parametrize("way", [ring, modulo], ids=["jitloader", "numpy_modulo"])
def test_extend(benchmark, way):
    """64 rows of three fields, 44 bytes each."""
    fields, extend = way()

    places = benchmark(extend)

    for name, rows in STEP.items():
        np.testing.assert_array_equal(fields[name][places], rows)
