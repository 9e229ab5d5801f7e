"""How good shuffles are: the tests that published loaders fail, each tied to what a true shuffle gives.

Seeds are fixed, so nothing here is left to chance; bounds are 4.5 to 5 standard deviations.
"""

import itertools
import math

import naive_orders as naive
import numpy as np
import pytest

from jitloader import jit, orders, rng
from jitloader.orders import shuffle

SEEDS = 8000


def caller(order, n, size):
    """Give a function (seed, epoch, first) -> rows at `size` positions, compiled once and without checks in between."""
    out = np.empty(size, np.int64)
    positions = order.plan(n, 0, 0)
    call = jit.load(positions.kernel, tuple(jit.typeof(v) for v in (0, 1, out, *positions.params))).bind(
        0, 1, out, *positions.params
    )

    def rows(seed, epoch=0, first=0):
        call.set(0, first)
        for i, value in enumerate(order.plan(n, seed, epoch).params):
            call.set(3 + i, value)
        call()
        return out.copy()

    return rows


def normal(count, expected):
    """The distance of a Poisson count from its mean, in standard deviations."""
    return (count - expected) / math.sqrt(expected)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: orders.shuffled,
        lambda n: orders.blocks(1, 8),
        lambda n: orders.stratified([0] * n),
        lambda n: orders.mixed([n], [1], "never"),
    ],
    ids=["shuffled", "blocks", "stratified", "mixed"],
)
def test_all_orders_of_few_rows_are_equally_likely(make, n):
    """Uniform over n! orders, over seeds: ciphers of 8 rounds are hundreds of deviations off at n = 5."""
    rows = caller(make(n), n, n)
    seen = dict.fromkeys(itertools.permutations(range(n)), 0)
    trials = max(2000, 12 * len(seen))
    for seed in range(trials):
        seen[tuple(rows(seed).tolist())] += 1

    assert naive.z_score(list(seen.values()), [trials / len(seen)] * len(seen)) < 4.5


def test_epochs_of_one_seed_are_uniform_too():
    """Over the epochs of one seed, all 24 orders of 4 rows are equally likely, and so are pairs of epochs."""
    rows = caller(orders.shuffled, 4, 4)
    number = {order: k for k, order in enumerate(itertools.permutations(range(4)))}
    seen = np.array([number[tuple(rows(7, epoch).tolist())] for epoch in range(12000)])

    assert naive.z_score(np.bincount(seen, minlength=24), np.full(24, 500.0)) < 4.5
    assert naive.z_score(np.bincount(seen[1:] * 24 + seen[:-1], minlength=576), np.full(576, 11999 / 576)) < 4.5


@pytest.mark.parametrize("n", [2, 17, 1000, 65_536, 65_537, 1_000_003, 10**8])
def test_every_place_gets_every_row_alike(n):
    """Chi-square over seeds, in up to 64 bins: which rows come first, in the middle and last, and how far apart."""
    bins, trials = min(n, 64), 400 if 10**4 < n <= shuffle.TABLE else SEEDS  # a table is filled for each seed
    bounds = -(-np.arange(bins + 1) * n // bins)  # bin k: rows r with r * bins // n == k
    expected = np.diff(bounds) / n * trials
    rows = caller(orders.shuffled, n, 2)
    for first in {0, (n - 2) // 2, n - 2}:
        pairs = np.array([rows(seed, 0, first) for seed in range(trials)])
        for k in (0, 1):
            assert naive.z_score(np.bincount(pairs[:, k] * bins // n, minlength=bins), expected) < 4.5
        if n > bins:
            apart = (pairs[:, 1] - pairs[:, 0]) % n - 1  # 0 .. n - 2, all alike
            share = np.diff(-(-np.arange(65) * (n - 1) // 64)) / (n - 1)
            assert naive.z_score(np.bincount(apart * 64 // (n - 1), minlength=64), share * trials) < 4.5


def epochs_of(n, epochs, rounds):
    """Whole epochs of the cipher with so many rounds."""
    a = shuffle.side(n)
    rows = np.empty(n, np.int64)
    values = (0, 1, rows, n, a, shuffle.other_side(n, a), 0, rounds)
    call = jit.load(shuffle.permute, tuple(jit.typeof(v) for v in values)).bind(*values)
    for epoch in range(epochs):
        call.set(6, rng.i64(rng.subkey(99, epoch)))
        call()
        yield rows.copy()


def neighbours(rows):
    return int((np.diff(rows) == 1).sum())


def test_neighbours_in_the_data_are_no_neighbours_in_the_order():
    """Row r + 1 follows row r as often as in a true shuffle: (n - 1) / n times an epoch; likewise row r - 1."""
    rows, n, epochs = caller(orders.shuffled, 70_000, 70_000), 70_000, 150
    ups = downs = 0
    for epoch in range(epochs):
        difference = np.diff(rows(3, epoch))
        ups, downs = ups + int((difference == 1).sum()), downs + int((difference == -1).sum())

    assert abs(normal(ups, epochs * (n - 1) / n)) < 4.5
    assert abs(normal(downs, epochs * (n - 1) / n)) < 4.5


def test_the_neighbour_count_sees_a_bad_cipher():
    """The same count over ciphers of 4 rounds is far off, and of 8 rounds it is not: the test can fail."""
    counts = {rounds: sum(map(neighbours, epochs_of(1000, 2000, rounds))) for rounds in (4, 8)}

    assert normal(counts[4], 1998) > 10
    assert abs(normal(counts[8], 1998)) < 4.5


@pytest.mark.parametrize("n, trials", [(2, 4000), (3, 4000), (64, 2000), (1000, 1000), (70_000, 150)])
def test_rows_stay_nowhere(n, trials):
    """Fixed points, and places that keep their row in the next epoch or for the next seed: one each on average, and of
    variance one."""
    rows = caller(orders.shuffled, n, n)
    fixed = same_epoch = same_seed = 0
    for k in range(trials):
        now = rows(k, 0)
        fixed += int((now == np.arange(n)).sum())
        same_epoch += int((now == rows(k, 1)).sum())
        same_seed += int((now == rows(k + 1, 0)).sum())

    assert max(abs(normal(x, trials)) for x in (fixed, same_epoch, same_seed)) < 4.5


def test_nothing_stays_near_among_many_rows():
    """At 10**8 rows, from 2**22 positions: rows near the one before, near their own place, or near the row that the next
    epoch or the next seed has there, come as often as by chance."""
    n, size, near = 10**8, 1 << 22, 1000
    rows = caller(orders.shuffled, n, size)
    places = np.arange(size) + n // 3
    now = rows(11, 0, n // 3)
    others = {
        "neighbours": now[1:] - now[:-1],
        "fixed points": now - places,
        "next epoch": now - rows(11, 1, n // 3),
        "next seed": now - rows(12, 0, n // 3),
    }
    for what, apart in others.items():
        assert abs(normal(int((np.abs(apart) <= near).sum()), size * (2 * near + 1) / n)) < 4.5, what


@pytest.mark.parametrize("n", [5000, 100_000])
def test_epochs_and_seeds_are_unrelated(n):
    """Places of a row in two epochs or for two seeds, and neighbours within one, correlate as chance has it."""
    rows = caller(orders.shuffled, n, n)
    a, b, c = rows(42, 0), rows(42, 1), rows(43, 0)

    for x, y in ((a, b), (a, c), (b, c), (a[1:], a[:-1]), (a, np.arange(n))):
        assert abs(np.corrcoef(x, y)[0, 1]) * math.sqrt(n) < 4.5


def test_batches_of_two_epochs_share_what_chance_gives():
    """The rows that two epochs' first batches have in common: hypergeometric, size ** 2 / n on average."""
    n, size, trials = 100_000, 4096, 100
    rows = caller(orders.shuffled, n, size)
    shared = sum(np.intersect1d(rows(5, epoch), rows(5, epoch + 1)).size for epoch in range(0, 2 * trials, 2))

    assert abs(normal(shared, trials * size * size / n)) < 4.5


def spread_of(rows, classes, batch):
    """Mean total variation between a batch's histogram of classes and that of all rows, rows being sorted by class."""
    labels = (rows * classes // rows.size)[: rows.size // batch * batch].reshape(-1, batch)
    parts = np.stack([np.bincount(row, minlength=classes) for row in labels]) / batch
    return float(np.abs(parts - 1 / classes).sum(1).mean() / 2)


def test_classes_spread_as_in_a_true_shuffle():
    """On sorted data: a full shuffle equals NumPy's, small blocks cost little, one chunk at a time costs dearly."""
    n = 100_000
    true = [spread_of(np.random.default_rng(k).permutation(n), 100, 256) for k in range(5)]
    full, small, large = (
        spread_of(caller(order, n, n)(1), 100, 256)
        for order in (orders.shuffled, orders.blocks(16, 1024), orders.blocks(1000, 1))
    )

    assert abs(full - np.mean(true)) < 5 * np.std(true) + 1e-3
    assert small - np.mean(true) < 0.05
    assert large - np.mean(true) > 0.5


def test_stratified_batches_are_better_than_shuffled_ones():
    """The class spread of a stratified order is what rounding leaves, far below that of a full shuffle."""
    n = 20_000
    labels = np.arange(n) * 100 // n
    free = spread_of(caller(orders.stratified(labels), n, n)(1), 100, 256)
    laid = spread_of(caller(orders.stratified(labels, batch_size=256), n, n)(1), 100, 256)

    assert laid <= free < 0.15 < spread_of(caller(orders.shuffled, n, n)(1), 100, 256)
