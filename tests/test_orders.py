"""Orders: every row when it should come, at any position, on any number of ranks."""

from collections import Counter, defaultdict
from fractions import Fraction

import naive_orders as naive
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jitloader import jit, orders
from jitloader.orders import shuffle

SIZES = [1, 2, 3, 7, 64, 257, 1000]


def labels_of(n):
    """Classes of very unequal sizes: 0 every second row, 1 every fourth, ..., in an order of no meaning."""
    return [(i * 7919 % n + 1 & -(i * 7919 % n + 1)).bit_length() for i in range(n)]


def lengths_of(n):
    return [1 + i * 31 % 97 for i in range(n)]


def backwards(position, count, seed, epoch):
    return (count - 1 - position + epoch) % count


def every_second(epoch):
    return np.arange(epoch % 2, 0 if epoch < 0 else 2, 1)


def thirds(n):
    """Three sources that make up n rows, or one where there are too few rows."""
    return [n // 2, n // 3, n - n // 2 - n // 3] if n >= 3 else [n]


def once_each(rows, n):
    assert naive.is_permutation(rows, n)


def in_file_order(rows, n):
    assert rows == list(range(n))


def within_windows(rows, n):
    once_each(rows, n)
    size, window = 4, 3
    total = -(-n // size)
    at, seen = 0, set()
    for first in range(0, total, window):  # each window holds whole blocks, the short one among them somewhere
        blocks = min(window, total - first)
        taken = rows[at : at + blocks * size]
        found = {r // size for r in taken}
        if len(found) > blocks or any(len([r for r in taken if r // size == b]) not in (size, n % size) for b in found):
            taken = rows[at : at + blocks * size - (size - n % size)]
            found = {r // size for r in taken}
        assert len(found) == blocks and not found & seen
        seen |= found
        at += len(taken)
    assert at == n


def possible(rows, n):
    assert len(rows) == n and set(rows) <= {r for r in range(n) if weights_of(n)[r] > 0}


def weights_of(n):
    return [float((i % 5) ** 2) if n > 1 else 1.0 for i in range(n)]


def positive_once(rows, n):
    assert sorted(rows) == [r for r in range(n) if weights_of(n)[r] > 0]


def in_shares(rows, n):
    once_each(rows, n)
    labels = labels_of(n)
    sequence, shares = [labels[r] for r in rows], naive.shares_of(labels)
    for size in {1, 2, 5, min(32, n), max(1, n // 2)}:
        if size <= min(n, 64):
            assert naive.window_error(sequence, shares, size) < 2


def in_batch_shares(rows, n):
    once_each(rows, n)
    labels = labels_of(n)
    assert naive.batch_error([labels[r] for r in rows], naive.shares_of(labels), 32) < 1


def equally(rows, n):
    labels = labels_of(n)
    classes = sorted(set(labels))
    assert len(rows) == n
    assert naive.prefix_error([labels[r] for r in rows], {c: Fraction(1, len(classes)) for c in classes}) < 2


def together(rows, n):
    once_each(rows, n)
    labels = labels_of(n)
    runs = [labels[r] for i, r in enumerate(rows) if i == 0 or labels[rows[i - 1]] != labels[r]]
    assert len(runs) == len(set(runs))
    assert all(a < b for a, b in zip(rows, rows[1:], strict=False) if labels[a] == labels[b])


def sorted_batches(rows, n):
    once_each(rows, n)
    lengths, batch = lengths_of(n), 8
    cut = n // batch * batch
    batches = [[lengths[r] for r in rows[i : i + batch]] for i in range(0, cut, batch)]
    assert all(b == sorted(b) for b in batches)
    spans = sorted((b[0], b[-1]) for b in batches)
    windows = -(-len(batches) // 4)
    for low in range(0, 99, 7):  # within one window at most one batch straddles a given length
        assert sum(a < low < z for a, z in spans) <= windows


def twice(rows, n):
    once_each(rows[:n], n)
    once_each(rows[n:], n)


def few(rows, n):
    assert rows == [n - 1, 0, n - 1]


def reverse(rows, n):
    assert sorted(rows) == list(range(n)) and (n == 1 or rows[0] - rows[1] in (1, 1 - n))


def from_sources(rows, n):
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(n))


def from_all(rows, n):
    assert set(rows) == set(range(n))


def as_long(rows, n):
    assert len(rows) == n and set(rows) <= set(range(n))


ORDERS = [  # how to make one for n rows, what must hold of an epoch over them
    pytest.param(lambda n: orders.sequential, in_file_order, id="sequential"),
    pytest.param(lambda n: orders.shuffled, once_each, id="shuffled"),
    pytest.param(lambda n: orders.blocks(4, 3), within_windows, id="blocks"),
    pytest.param(lambda n: orders.blocks(1, 10**6), once_each, id="one-window"),
    pytest.param(lambda n: orders.weighted(weights_of(n)), possible, id="weighted"),
    pytest.param(lambda n: orders.weighted(weights_of(n), replacement=False), positive_once, id="weighted-once"),
    pytest.param(lambda n: orders.stratified(labels_of(n)), in_shares, id="stratified"),
    pytest.param(lambda n: orders.stratified(labels_of(n), batch_size=32), in_batch_shares, id="stratified-batches"),
    pytest.param(lambda n: orders.balanced(labels_of(n)), equally, id="balanced"),
    pytest.param(lambda n: orders.grouped(labels_of(n)), together, id="grouped"),
    pytest.param(lambda n: orders.bucketed(lengths_of(n), batch_size=8, window=4), sorted_batches, id="bucketed"),
    pytest.param(lambda n: orders.repeat(orders.shuffled, 2), twice, id="repeat"),
    pytest.param(lambda n: orders.repeat(orders.blocks(4, 3), 2), twice, id="repeat-blocks"),
    pytest.param(lambda n: orders.mixed(thirds(n), [5, 3, 2][: len(thirds(n))]), from_sources, id="mixed-first"),
    pytest.param(lambda n: orders.mixed(thirds(n), [5, 3, 2][: len(thirds(n))], "last"), from_all, id="mixed-last"),
    pytest.param(lambda n: orders.mixed(thirds(n), [5, 3, 2][: len(thirds(n))], "never"), as_long, id="mixed-never"),
    pytest.param(lambda n: orders.indices([-1, 0, n - 1]), few, id="indices"),
    pytest.param(lambda n: orders.indices(lambda epoch: [-1, 0, -1]), few, id="indices-by-epoch"),
    pytest.param(lambda n: orders.custom(backwards), reverse, id="custom"),
]
FIXED = ("sequential", "indices", "indices-by-epoch", "custom")  # the same whatever the seed
SHUFFLES = [p for p in ORDERS if p.id not in FIXED]
PERMUTATIONS = [p for p in ORDERS if p.id in ("shuffled", "blocks", "one-window", "stratified", "stratified-batches")]


def run(positions, first=0, step=1, size=None):
    """Give rows at positions first, first + step, ... from the compiled kernel, in blocks as a loader asks for them."""
    size = len(range(first, positions.length, step)) if size is None else size
    rows = np.full(size, -1, np.int64)
    kernel = jit.load(positions.kernel, tuple(jit.typeof(v) for v in (0, 1, rows, *positions.params)))
    for done in range(0, size, 256):
        kernel(first + done * step, step, rows[done : done + 256], *positions.params)
    return rows.tolist()


@pytest.mark.parametrize("make, holds", ORDERS)
@pytest.mark.parametrize("n", SIZES)
def test_an_epoch_is_what_the_order_promises(make, holds, n):
    """The rows of whole epochs have the property the order is chosen for, whatever seed and epoch."""
    for seed, epoch in [(0, 0), (1, 0), (2**63 + 5, 3), (-1, 1)]:
        holds(run(make(n).plan(n, seed, epoch)), n)


@pytest.mark.parametrize("make, holds", ORDERS)
def test_the_compiled_kernel_equals_plain_python(make, holds):
    """Blocks from machine code equal the same function asked for one position at a time by the interpreter."""
    positions = make(150).plan(150, 3, 1)

    assert run(positions) == naive.one_by_one(positions, range(positions.length))


@pytest.mark.parametrize("make, holds", ORDERS)
@pytest.mark.parametrize("world", [2, 3, 300])
def test_ranks_part_the_order(make, holds, world):
    """Rank r of W gets positions r, r + W, ... of the one order, in blocks that start anywhere."""
    positions = make(257).plan(257, 5, 2)
    everything = run(positions)

    for rank in range(min(world, positions.length)):
        assert run(positions, rank, world) == everything[rank::world]
    for first in (1, positions.length // 2, positions.length - 1):
        assert run(positions, first) == everything[first:]


@pytest.mark.parametrize("make, holds", ORDERS)
def test_kernel_and_types_stay_from_epoch_to_epoch(make, holds):
    """One compiled program serves all epochs and seeds of an order over the same rows."""
    order = make(100)
    plans = [order.plan(100, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (2**64 - 1, 7)]]

    assert len({p.kernel for p in plans}) == 1
    assert len({tuple(jit.typeof(v) for v in p.params) for p in plans}) == 1
    assert all(v.flags.c_contiguous for p in plans for v in p.params if isinstance(v, np.ndarray))


@pytest.mark.parametrize("make, holds", ORDERS)
def test_a_second_order_made_alike_gives_the_same(make, holds):
    """Token, name and rows depend on what an order was made from, not on the object or on epochs run before."""
    used, fresh = make(200), make(200)
    for epoch in range(2):
        run(used.plan(200, 4, epoch))

    assert used.token == fresh.token or "lambda" in used.name
    assert repr(used) == used.name == fresh.name
    assert run(used.plan(200, 4, 2)) == run(fresh.plan(200, 4, 2))


@pytest.mark.parametrize("make, holds", SHUFFLES)
def test_seeds_and_epochs_are_mixed_not_added(make, holds):
    """Another epoch is another order, and no seed's epoch 1 is its neighbour's epoch 0 (Grain, FFCV, torch)."""
    orders_of = {(seed, epoch): run(make(300).plan(300, seed, epoch)) for seed in (0, 1, 42, 43) for epoch in (0, 1)}
    epochs = list(orders_of.values())

    assert all(a != b for i, a in enumerate(epochs) for b in epochs[:i])
    assert orders_of[42, 1] != orders_of[43, 0] and orders_of[0, 1] != orders_of[1, 0]


def test_draws_of_neighbouring_seeds_are_not_shifted_copies():
    """Draw 11 of seed 7 is not draw 10 of seed 8 (Grain's IndexSampler): they agree as often as chance has it."""
    order = orders.weighted(np.ones(1000))
    seven, eight = (np.array(run(order.plan(1000, seed, 0))) for seed in (7, 8))

    for shift in (0, 1):
        assert (seven[shift:] == eight[: 1000 - shift]).sum() < 8


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**31))
@pytest.mark.parametrize("make, holds", PERMUTATIONS)
def test_each_row_comes_once(make, holds, n, seed, epoch):
    """For any number of rows, seed and epoch the order is one to one."""
    assert (np.sort(run(make(n).plan(n, seed, epoch))) == np.arange(n)).all()


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(shuffle.TABLE + 1, 2**61),
    seed=st.integers(0, 2**64 - 1),
    first=st.integers(0, 2**61),
    step=st.integers(1, 2**20),
)
def test_a_shuffle_of_any_size_equals_the_textbook(n, seed, first, step):
    """Without a table: the rows at some positions are those of the plain Feistel permutation, distinct and in range."""
    positions = orders.shuffled.plan(n, seed, 0)
    first %= n
    where = range(first, n, step)[:40]
    rows = run(positions, first, step, len(where))

    assert not any(isinstance(v, np.ndarray) for v in positions.params)
    assert len(set(rows)) == len(rows) and min(rows) >= 0 and max(rows) < n
    assert rows[:8] == [naive.feistel(p, n, positions.params[-1], 8) for p in where[:8]]


@pytest.mark.parametrize("n", [65536, 65537, 65792, 65793, 100_003, 999_999])
def test_shuffles_round_the_switch_to_a_cipher_are_whole(n):
    """Each row comes once on both sides of the size where tables end, and where the domain is full and emptiest."""
    for epoch in range(2):
        assert (np.sort(run(orders.shuffled.plan(n, 1, epoch))) == np.arange(n)).all()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2000), key=st.integers(-(2**63), 2**63 - 1), rounds=st.sampled_from([2, 8, 24]))
def test_the_cipher_is_one_to_one(n, key, rounds):
    """For any number of rounds and any key, and as the textbook has it."""
    a = shuffle.side(n)
    rows = np.empty(n, np.int64)
    values = (0, 1, rows, n, a, shuffle.other_side(n, a), key, rounds)
    jit.load(shuffle.permute, tuple(jit.typeof(v) for v in values))(*values)

    assert (np.sort(rows) == np.arange(n)).all()
    assert rows[:5].tolist() == [naive.feistel(p, n, key % 2**64, rounds) for p in range(min(n, 5))]


@given(n=st.one_of(st.integers(0, 10**6), st.integers(2**40, 2**62), st.integers(1, 2**31 - 1).map(lambda r: r * r)))
def test_the_domain_barely_exceeds_the_rows(n):
    """Sides a and b are below 2**32 and hold the rows with at most one row of the larger side to spare."""
    a = shuffle.side(n)
    b = shuffle.other_side(n, a)

    assert max(a, b) < 2**32 and max(n, 1) <= a * b < max(n, 1) + a


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(1, 400), size=st.integers(1, 20), window=st.integers(1, 20))
def test_blocks_of_any_size_part_the_rows(data, n, size, window):
    """A window of the order holds whole blocks, each in one window alone, for any sizes that do not divide the rows."""
    seed = data.draw(st.integers(0, 100))
    rows = run(orders.blocks(size, window).plan(n, seed, 0))
    places = defaultdict(list)
    for p, row in enumerate(rows):
        places[row // size].append(p)

    assert naive.is_permutation(rows, n)
    assert all(max(p) - min(p) < size * window for p in places.values())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    n=st.one_of(st.integers(1, 5000), st.integers(1, 2**51 - 1)),
    size=st.one_of(st.integers(1, 300), st.integers(1, 2**40)),
    window=st.one_of(st.integers(1, 300), st.integers(1, 2**40)),
    step=st.sampled_from([1, 3, 1000]),
)
@example(data=None, n=1000, size=2**40, window=2**40, step=1)
@example(data=None, n=2**51 - 1, size=2**40, window=2**40, step=1000)
def test_blocks_at_any_size_are_as_the_textbook_has_them(data, n, size, window, step):
    """Rows anywhere in the order, also past 2**32 blocks and at the end, are those of whole-number arithmetic."""
    positions = orders.blocks(size, window).plan(n, data.draw(st.integers(0, 100)) if data else 0, 1)
    size, window = min(size, n), min(window, n)
    odd, key = positions.params[-2:]
    first = data.draw(st.integers(0, n - 1)) if data else 0
    where = range(first, n, step)[:300]

    rows = run(positions, first, step, len(where))

    assert rows == [naive.block_row(p, n, size, window, odd, key) for p in where]


def test_blocks_of_more_rows_than_float64_tells_apart_are_refused():
    """2**51 rows are an error where the order is laid out, never wrong rows."""
    with pytest.raises(ValueError, match="blocks takes less than 2,251,799,813,685,248 rows"):
        orders.blocks(4, 4).plan(2**51, 0, 0)


@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(0, 8), min_size=1, max_size=120), seed=st.integers(0, 99), batch=st.integers(1, 40))
def test_strata_are_exact_for_any_classes(labels, seed, batch):
    """Windows are less than two rows off (two classes: one); with the batch size known, batches less than one."""
    n, shares = len(labels), naive.shares_of(labels)
    free = run(orders.stratified(labels).plan(n, seed, 0))
    laid = run(orders.stratified(labels, batch_size=batch).plan(n, seed, 0))

    assert naive.is_permutation(free, n) and naive.is_permutation(laid, n)
    error = naive.window_error([labels[r] for r in free], shares, min(batch, n))
    assert error < 2 if len(shares) > 2 else error <= 1
    assert naive.batch_error([labels[r] for r in laid], shares, batch) < 1


def test_a_class_keeps_no_places():
    """From epoch to epoch a rare class comes elsewhere, and its rows in another order."""
    labels = [0] * 97 + [1] * 3
    order = orders.stratified(labels)
    rows = [run(order.plan(100, 0, epoch)) for epoch in range(40)]

    assert len({tuple(r >= 97 for r in epoch) for epoch in rows}) > 10
    assert len({tuple(r for r in epoch if r >= 97) for epoch in rows}) == 6


def test_two_ranks_both_see_both_of_two_equal_classes():
    """A schedule that went a, b, a, b would give each of two ranks one class alone."""
    labels = [0, 1] * 500
    for order in (orders.stratified(labels), orders.balanced(labels), orders.mixed([500, 500], [1, 1])):
        ones = sum(r % 2 if order.name[0] != "m" else r >= 500 for r in run(order.plan(1000, 0, 0), 0, 2, 500))
        assert 200 < ones < 300


def test_balanced_gets_through_a_large_class():
    """Where an epoch has no room for all rows of a class, the next goes on with the others; none comes twice before."""
    labels = [0] * 90 + [1] * 10
    order = orders.balanced(labels)
    large = [r for epoch in range(2) for r in run(order.plan(100, 3, epoch)) if r < 90]
    small = Counter(r for r in run(order.plan(100, 3, 0)) if r >= 90)

    assert len(large) == 100 and len(set(large[:90])) == 90
    assert set(small.values()) == {5}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    shares=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_a_mix_is_exact_and_stops_when_it_should(sizes, shares, seed):
    """Each prefix has the shares to within one row, each source comes in a permutation, and epochs end to the row."""
    shares = shares[: len(sizes)]
    n, total = sum(sizes), sum(shares)
    source = [c for c, size in enumerate(sizes) for _ in range(size)]
    longest = run(orders.mixed(sizes, shares, "last").plan(n, seed, 0))
    sequence = [source[r] for r in longest]

    assert naive.prefix_error(sequence, {c: Fraction(s, total) for c, s in enumerate(shares)}) < 1
    assert len(longest) == naive.mixed_length(sequence, sizes, "last")
    first = run(orders.mixed(sizes, shares, "first").plan(n, seed, 0))
    assert first == longest[: len(first)] and len(set(first)) == len(first)
    if len(first) < len(longest):
        assert len(first) == naive.mixed_length(sequence, sizes, "first")
    for c, size in enumerate(sizes):
        own = [r for r in longest if source[r] == c]
        assert all(len(set(own[k : k + size])) == len(own[k : k + size]) for k in range(0, len(own), size))


def test_a_mix_that_never_stops_goes_on_in_the_next_epoch():
    """With "never", a source's rows all come before one comes twice, across the ends of epochs."""
    order = orders.mixed([50, 7], [1, 1], "never")
    rows = [r for epoch in range(3) for r in run(order.plan(57, 2, epoch))]
    large, small = [r for r in rows if r < 50], [r for r in rows if r >= 50]

    assert len(rows) == 171 and abs(len(large) - len(small)) <= 1
    assert len(set(large[:50])) == 50
    assert all(len(set(small[k : k + 7])) == 7 for k in range(0, 77, 7))


def test_shares_that_people_type_are_exact():
    """Decimal fractions, thirds and any unit give the shares meant, not their binary neighbours."""
    assert orders.mixed([9, 9, 9], [0.7, 0.2, 0.1]).token == orders.mixed([9, 9, 9], [7, 2, 1]).token
    assert orders.mixed([9, 9], [1 / 3, 2 / 3]).token == orders.mixed([9, 9], [10, 20]).token
    odd = orders.mixed([5, 5], [123_456_789, 987_654_321]).plan(10, 0, 0).params[2]
    assert abs((odd >> 32 == 0).mean() - 123_456_789 / 1_111_111_110) < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.integers(0, 9)), min_size=1, max_size=60
    ).filter(any)
)
def test_an_alias_table_has_the_weights_exactly(weights):
    """The chance of each row, added up from the table in fractions, is its weight's share; of weight 0, none at all."""
    table = orders.weighted(weights).plan(len(weights), 0, 0).params[-1]
    total = sum(map(Fraction, weights))

    for chance, weight in zip(naive.chances(table), weights, strict=True):
        assert abs(chance - Fraction(weight) / total) < 1e-13
        assert weight or not chance


def test_draws_have_the_weights():
    """A million draws, by chi-square; with a column of weight 0 that never comes."""
    weights = np.arange(1000) % 10
    rows = run(orders.weighted(np.tile(weights, 1000)).plan(10**6, 11, 0))
    seen = np.bincount(np.array(rows) % 1000 % 10, minlength=10)

    assert seen[0] == 0
    assert abs(naive.z_score(seen[1:], np.arange(1, 10) / 45 * 1e6)) < 5


def test_without_replacement_the_first_row_has_the_weights():
    """Over many epochs, the row that comes first is a draw by weight, and so is the second among those left."""
    order = orders.weighted([1, 2, 3, 0, 4], replacement=False)
    pairs = Counter(tuple(run(order.plan(5, 0, epoch))[:2]) for epoch in range(5000))
    weights = {0: 1, 1: 2, 2: 3, 4: 4}
    chance = {(a, b): weights[a] / 10 * weights[b] / (10 - weights[a]) for a in weights for b in weights if a != b}

    assert set(pairs) == set(chance)
    assert naive.z_score([pairs[k] for k in chance], [5000 * p for p in chance.values()]) < 5


def test_buckets_waste_little_and_keep_no_batch():
    """Padding to the longest of a batch costs far less than in a full shuffle, and batches change between epochs."""
    lengths = np.array([1 + i * i % 997 for i in range(4000)])
    epochs = [np.array(run(orders.bucketed(lengths, 16, window=50).plan(4000, 0, e))).reshape(-1, 16) for e in range(2)]
    plain = np.array(run(orders.shuffled.plan(4000, 0, 0))).reshape(-1, 16)
    waste = [1 - lengths.sum() / (lengths[rows].max(1).sum() * 16) for rows in (epochs[0], plain)]

    assert waste[0] < 0.05 < 0.3 < waste[1]
    assert len({frozenset(b) for b in epochs[0].tolist()} & {frozenset(b) for b in epochs[1].tolist()}) < 5
    longest_first = lengths[epochs[0]].max(1)
    assert abs(np.corrcoef(longest_first[1:], longest_first[:-1])[0, 1]) < 0.3


def test_row_numbers_may_change_between_epochs():
    """A function of the epoch gives other rows, and another number of them, each epoch."""
    order = orders.as_order(lambda epoch: np.arange(epoch + 1, dtype=np.uint8))

    assert [run(order.plan(10, 0, epoch)) for epoch in range(3)] == [[0], [0, 1], [0, 1, 2]]


def test_as_order_knows_what_users_pass():
    """An Order stays; lists, arrays and ranges are row numbers; functions are told apart by their arguments."""
    assert orders.as_order(orders.shuffled) is orders.shuffled
    for rows in ([3, 1], (3, 1), np.array([3, 1], np.int16), range(3, 0, -2)):
        assert run(orders.as_order(rows).plan(4, 0, 0)) == [3, 1]
    assert run(orders.as_order(backwards).plan(3, 0, 0)) == [2, 1, 0]
    assert run(orders.as_order([]).plan(3, 0, 0)) == []


def test_an_array_changed_later_changes_no_order():
    """The order keeps a copy: state tokens and rows stay true."""
    rows, weights = np.array([2, 1, 0]), np.array([1.0, 0.0])
    by_rows, by_weight = orders.indices(rows), orders.weighted(weights)
    rows[:], weights[:] = 0, [0.0, 1.0]

    assert run(by_rows.plan(3, 0, 0)) == [2, 1, 0]
    assert run(by_weight.plan(2, 0, 0)) == [0, 0]


TOKENS = [
    orders.sequential,
    orders.shuffled,
    orders.blocks(4, 3),
    orders.blocks(3, 4),
    orders.weighted([1, 2]),
    orders.weighted([2, 1]),
    orders.weighted([1, 2], replacement=False),
    orders.stratified([0, 1]),
    orders.stratified([0, 0]),
    orders.stratified([0, 1], batch_size=2),
    orders.balanced([0, 1]),
    orders.grouped([0, 1]),
    orders.bucketed([1, 2], 2),
    orders.bucketed([1, 2], 2, window=1),
    orders.bucketed([2, 1], 2),
    orders.repeat(orders.shuffled, 2),
    orders.repeat(orders.shuffled, 3),
    orders.repeat(orders.sequential, 2),
    orders.mixed([1, 1], [1, 2]),
    orders.mixed([1, 2], [1, 2]),
    orders.mixed([1, 1], [1, 1]),
    orders.mixed([1, 1], [1, 2], "last"),
    orders.indices([0, 1]),
    orders.indices([1, 0]),
    orders.indices(every_second),
    orders.custom(backwards),
    orders.custom(lambda position, count, seed, epoch: position),
]


def test_tokens_tell_orders_apart():
    """No two orders that give other rows share the identity under which a state is saved."""
    assert len({order.token for order in TOKENS}) == len(TOKENS)


@pytest.mark.parametrize("make, holds", [p for p in ORDERS if not p.id.startswith(("indices", "mixed"))])
def test_no_rows_make_no_positions(make, holds):
    """Data without rows have an epoch without positions; weights, which cannot be all zero, are refused with a word."""
    if "weighted" in make(3).name:
        with pytest.raises(ValueError, match="at least one weight"):
            make(0)
    else:
        assert run(make(0).plan(0, 0, 0)) == []


NAN = float("nan")
BAD = [
    (lambda: orders.weighted([1, -1]), ValueError, r"at least 0, got -1.0 at row 1"),
    (lambda: orders.weighted([1, NAN]), ValueError, r"finite weights of at least 0, got nan at row 1"),
    (lambda: orders.weighted([float("inf")]), ValueError, r"got inf at row 0"),
    (lambda: orders.weighted([0, 0]), ValueError, r"above 0, got 2 zeros"),
    (lambda: orders.weighted([[1, 2]]), ValueError, r"1-D\), got shape \(1, 2\)"),
    (lambda: orders.weighted(["a"]), TypeError, r"weighted takes numbers, got <U1"),
    (lambda: orders.weighted([1, 2]).plan(3, 0, 0), ValueError, r"weighted holds 2 values, but there are 3 rows"),
    (lambda: orders.weighted([1, 2], False).plan(3, 0, 0), ValueError, r"weighted holds 2 values"),
    (lambda: orders.stratified([1, 2]).plan(3, 0, 0), ValueError, r"stratified holds 2 values, but there are 3 rows"),
    (lambda: orders.balanced([1, 2]).plan(1, 0, 0), ValueError, r"balanced holds 2 values, but there are 1 rows"),
    (lambda: orders.grouped([1, 2]).plan(3, 0, 0), ValueError, r"grouped holds 2 values"),
    (lambda: orders.bucketed([1, 2], 2).plan(3, 0, 0), ValueError, r"bucketed holds 2 values"),
    (lambda: orders.stratified([0, NAN]), ValueError, r"got NaN at row 1"),
    (lambda: orders.stratified([object()]), TypeError, r"numbers or strings, got object"),
    (lambda: orders.stratified([0], batch_size=0), ValueError, r"at least 1, got 0"),
    (lambda: orders.bucketed([1, -2], 2), ValueError, r"at least 0, got -2 at row 1"),
    (lambda: orders.bucketed([1, NAN], 2), ValueError, r"got nan at row 1"),
    (lambda: orders.bucketed([1], 2.5), TypeError, r"takes an integer, got 2.5"),
    (lambda: orders.blocks(0, 5), ValueError, r"blocks\(rows=\) takes at least 1, got 0"),
    (lambda: orders.blocks(5, "x"), TypeError, r"blocks\(window=\) takes an integer, got 'x'"),
    (lambda: orders.repeat(orders.shuffled, 0), ValueError, r"repeat\(times=\) takes at least 1, got 0"),
    (lambda: orders.repeat(lambda e: range(e + 1), 2).plan(9, 0, 0), ValueError, r"of one length, got \[1, 2\]"),
    (lambda: orders.mixed([1, 2], [1]), ValueError, r"one share a source, got 2 counts and 1 shares"),
    (lambda: orders.mixed([], []), ValueError, r"got 0 counts"),
    (lambda: orders.mixed([1, 2], [1, 0]), ValueError, r"positive, finite shares, got 0 for source 1"),
    (lambda: orders.mixed([1, 2], [1, -0.5]), ValueError, r"got -0.5 for source 1"),
    (lambda: orders.mixed([1, 2], [1, NAN]), ValueError, r"got nan for source 1"),
    (lambda: orders.mixed([1, 2], ["a", "b"]), TypeError, r"takes numbers, got <U1"),
    (lambda: orders.mixed([0, 2], [1, 1]), ValueError, r"source 0 takes at least 1, got 0"),
    (lambda: orders.mixed([1, 2], [1, 1], stop="soon"), ValueError, r"\"never\", got 'soon'"),
    (lambda: orders.mixed([1, 2], [1, 1]).plan(4, 0, 0), ValueError, r"3 rows together, but there are 4 rows"),
    (lambda: orders.indices([0.0, 1.0]), TypeError, r"integer row numbers, got float64"),
    (lambda: orders.indices(np.empty(0)), TypeError, r"integer row numbers, got float64"),
    (lambda: orders.indices([True, False]), TypeError, r"got bool; select rows by a mask"),
    (lambda: orders.indices([[1]]), ValueError, r"1-D\), got shape \(1, 1\)"),
    (lambda: orders.indices([0, 5]).plan(5, 0, 0), IndexError, r"row 5 at position 1, but there are 5 rows"),
    (lambda: orders.indices([-6]).plan(5, 0, 0), IndexError, r"row -6 at position 0, but there are 5 rows"),
    (lambda: orders.indices(np.array([2**63], np.uint64)), IndexError, r"below 2\*\*63, got 9223372036854775808"),
    (lambda: orders.indices(lambda epoch: [0.5]).plan(5, 0, 0), TypeError, r"got float64"),
    (lambda: orders.custom(lambda position: 0), TypeError, r"\(position, count, seed, epoch\) -> row, got <lambda>"),
    (lambda: orders.custom(lambda p, n, s, e: p / 2).plan(5, 0, 0), TypeError, r"integer row, got 0.0 for position 0"),
    (lambda: orders.custom(print), TypeError, r"plain function \(def or lambda\), got builtin"),
    (lambda: orders.as_order("shuffled"), TypeError, r"row numbers or a plain function, got str"),
    (lambda: orders.as_order(None), TypeError, r"got NoneType"),
    (lambda: orders.as_order(3), TypeError, r"got int"),
    (lambda: orders.as_order(lambda a, b: 0), TypeError, r"got <lambda>\(a, b\)"),
]


@pytest.mark.parametrize("make, kind, says", BAD)
def test_bad_input_is_named(make, kind, says):
    """What came, what is taken, in one short line."""
    with pytest.raises(kind, match=says) as caught:
        make()

    assert len(str(caught.value)) < 150 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: orders.weighted([1, -1]), "weighted takes finite weights of at least 0, got -1.0 at row 1"),
        (lambda: orders.weighted([1, NAN]), "weighted takes finite weights of at least 0, got nan at row 1"),
        (lambda: orders.weighted([0, 0]), "weighted takes at least one weight above 0, got 2 zeros"),
        (lambda: orders.weighted([1, 2]).plan(3, 0, 0), "weighted holds 2 values, but there are 3 rows"),
        (lambda: orders.stratified([1, 2]).plan(3, 0, 0), "stratified holds 2 values, but there are 3 rows"),
        (lambda: orders.balanced([1, 2]).plan(3, 0, 0), "balanced holds 2 values, but there are 3 rows"),
        (lambda: orders.grouped([1, 2]).plan(3, 0, 0), "grouped holds 2 values, but there are 3 rows"),
        (lambda: orders.bucketed([1, 2], 2).plan(3, 0, 0), "bucketed holds 2 values, but there are 3 rows"),
        (lambda: orders.mixed([1, 2], [1, 0]), "mixed(shares=) takes positive, finite shares, got 0 for source 1"),
        (lambda: orders.mixed([1, 2], [1, -2]), "mixed(shares=) takes positive, finite shares, got -2 for source 1"),
    ],
)
def test_what_users_get_wrong_is_told_in_these_words(make, says):
    """The whole text for weights, labels and shares."""
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == says
