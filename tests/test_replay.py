"""Draws by priority against plain sums, and the ring against a deque."""

import base64
import copy
import json
import math
import pickle
import threading

import naive_packing as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jitloader import rng
from jitloader.errors import StateError
from jitloader.replay import Prioritized, Ring, Snapshot, tree

quick = settings(deadline=None, max_examples=40)
priorities = st.floats(0, 1e6, allow_subnormal=False)


def filled(shares, **options):
    """A memory whose rows have these shares."""
    memory = Prioritized(len(shares), alpha=1.0, **options)
    memory.update(np.arange(len(shares)), shares)
    return memory


def shares_of(memory):
    """The shares in a memory's state, which is plain values."""
    return np.frombuffer(base64.b64decode(memory.state_dict()["shares"]), "<f8")


# ---------------------------------------------------------------------------------------------------------------------
# Draws by priority


@quick
@given(st.integers(1, 700), st.floats(0, 2), st.data())
def test_the_tree_sums_what_was_set(capacity, alpha, data):
    """After any updates, rows named twice among them, the root is the sum and the least of all shares."""
    memory = Prioritized(capacity, alpha)
    shares = np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 4))):
        pairs = data.draw(st.lists(st.tuples(st.integers(0, capacity - 1), priorities), max_size=60))
        memory.update([row for row, _ in pairs], [p for _, p in pairs])
        for row, p in pairs:
            shares[row] = p**alpha if p > 0 else 0.0

    assert memory.total == pytest.approx(math.fsum(shares), rel=1e-14)
    assert memory._least[-1] == min(shares[shares > 0], default=math.inf)
    np.testing.assert_array_equal(shares_of(memory), shares)


@quick
@given(st.lists(st.integers(0, 50), min_size=1, max_size=600).filter(any), st.integers(1, 40), st.booleans())
def test_rows_drawn_equal_plain_sums(shares, batch, stratified):
    """The row drawn is the one at that place of all shares laid end to end (exact: the shares are whole numbers)."""
    memory = filled(shares, seed=5, stratified=stratified)
    total = sum(shares)

    for step in range(3):
        rows, weights = memory.sample(batch)

        key = rng.subkey(rng.subkey(5, tree.REPLAY), step)
        places = [rng.uniform(key, i) for i in range(batch)]
        places = [(i + u) / batch if stratified else u for i, u in enumerate(places)]
        assert rows.tolist() == [naive.draw(shares, place * total) for place in places]
        np.testing.assert_allclose(weights, naive.importance(shares, rows, 0.4), rtol=1e-6)
        assert (rows.dtype, weights.dtype) == (np.int64, np.float32)


@quick
@given(st.lists(priorities, min_size=1, max_size=100).filter(any), st.integers(0, 9))
def test_a_row_of_priority_zero_is_never_drawn(shares, seed):
    """However the sums are rounded."""
    rows, weights = filled(shares, seed=seed).sample(50)

    assert all(shares[row] > 0 for row in rows)
    assert ((weights >= 0) & (weights <= 1)).all()


def test_a_draw_past_the_end_takes_the_last_row():
    """Rounding in the sums does not lead out of the tree, nor to a row of priority 0."""
    shares = np.r_[np.full(40, 0.1), np.zeros(30)]
    memory = filled(shares)
    memory._sums[-1] = 4.5  # as if the sums above the leaves had been rounded up

    rows, _ = memory.sample(1000)

    assert rows.max() < 40
    assert set(range(40)) <= set(rows.tolist())


RAISED = np.random.default_rng(3).exponential(size=300) ** 2


def test_frequencies_follow_the_priorities():
    """Independent draws pass a chi-square test against priority ** alpha, over many steps and within one."""
    memory = Prioritized(300, alpha=0.6, stratified=False)
    memory.update(np.arange(300), RAISED)
    expected = RAISED**0.6 / (RAISED**0.6).sum()

    for steps, batch in ((2000, 32), (1, 64_000)):
        counts = np.bincount(np.concatenate([memory.sample(batch)[0] for _ in range(steps)]), minlength=300)
        statistic, bound = naive.chi_square(counts, expected * steps * batch)
        assert statistic < bound


def test_wrong_frequencies_do_not_pass():
    """The same test refuses draws by another alpha."""
    memory = Prioritized(300, alpha=0.55, stratified=False)
    memory.update(np.arange(300), RAISED)

    counts = np.bincount(memory.sample(64_000)[0], minlength=300)

    statistic, bound = naive.chi_square(counts, RAISED**0.6 / (RAISED**0.6).sum() * 64_000)
    assert statistic > bound


def test_stratified_draws_are_even():
    """No row comes two times more, or less, than its share of the batch."""
    shares = np.random.default_rng(4).random(50)

    counts = np.bincount(filled(shares).sample(500)[0], minlength=50)

    assert np.abs(counts - 500 * shares / shares.sum()).max() < 2


def test_new_rows_have_the_highest_priority():
    """Rows added are as likely as the likeliest row so far, even after that one fell."""
    memory = Prioritized(10, alpha=0.5)
    memory.add(0)
    assert memory.total == 1.0

    memory.update([0], [16.0])
    memory.update([0], [1.0])
    memory.add([1, 2])

    assert shares_of(memory)[:4].tolist() == [1.0, 4.0, 4.0, 0.0]


def test_weights_fall_with_beta():
    """beta 0 corrects nothing, beta 1 makes the weight inverse to the priority."""
    memory = filled([1.0, 4.0], seed=2)

    memory.beta = 0.0
    assert memory.sample(20)[1].tolist() == [1.0] * 20
    memory.beta = 1.0
    rows, weights = memory.sample(20)
    assert weights.tolist() == [0.25 if row else 1.0 for row in rows]
    assert set(rows.tolist()) == {0, 1}


def test_alpha_zero_draws_all_rows_alike():
    """Priorities do not count, but for 0."""
    memory = Prioritized(4, alpha=0.0)

    memory.update([0, 1, 2], [5.0, 0.1, 0.0])

    assert shares_of(memory).tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "rows, values, error, message",
    [
        ([0, 10], [1, 1], IndexError, "row 10 is outside 0 .. 9"),
        ([0, -1], [1, 1], IndexError, "row -1 is outside 0 .. 9"),
        ([0, 3], [1, -0.5], ValueError, "row 3 has priority -0.5"),
        ([0, 3], [1, math.nan], ValueError, "row 3 has priority nan"),
        ([0, 3], [1, math.inf], ValueError, "row 3 has priority inf"),
        ([0, 3], [1, 1e300], ValueError, "row 3 has priority 1e.300: it must be a number from 0 to 1e.290"),
        ([0, 3], [1], ValueError, r"\(2,\) rows and \(1,\) priorities"),
        ([[0, 3]], [[1, 1]], ValueError, r"\(1, 2\) rows"),
        ([0.0], [1], TypeError, "rows must be integers, not float64"),
        ([0], ["1"], TypeError, "priorities must be numbers, not <U1"),
    ],
)
def test_bad_updates_change_nothing(rows, values, error, message):
    """Bad rows and priorities are named, and no row before them is set."""
    memory = Prioritized(10, alpha=1.0)
    memory.update([0], [7.0])
    before = memory.state_dict()

    with pytest.raises(error, match=message):
        memory.update(rows, values)

    np.testing.assert_equal(memory.state_dict(), before)
    assert memory.total == 7.0


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Prioritized(0), ValueError, "a memory of 0 rows"),
        (lambda: Prioritized(5, alpha=-1), ValueError, "alpha=-1"),
        (lambda: Prioritized(5, beta=math.nan), ValueError, "beta=nan"),
        (lambda: Prioritized(5).sample(4), ValueError, "nothing to sample"),
        (lambda: filled([1.0]).sample(0), ValueError, "a batch of 0 rows"),
        (lambda: filled([0.0, 0.0]).sample(1), ValueError, "nothing to sample"),
        (lambda: Prioritized(5).add(5), IndexError, "row 5 is outside 0 .. 4"),
        (lambda: Prioritized(5, alpha=2).update([1], [1e150]), ValueError, "must be a number from 0 to 1e.145"),
        (lambda: Prioritized(5).add([[1]]), ValueError, r"\(1, 1\) rows"),
    ],
)
def test_bad_use(call, error, message):
    """Each misuse has its own message."""
    with pytest.raises(error, match=message):
        call()


def test_no_rows_are_fine():
    """An empty update is an update of nothing."""
    memory = Prioritized(5)
    memory.add([])
    memory.update([], [])

    assert memory.total == 0.0


def test_batches_are_not_overwritten():
    """A batch in hand stays as it is when the next is drawn."""
    memory = filled(np.arange(100.0))
    first = memory.sample(20)
    kept = [a.copy() for a in first]

    second = memory.sample(20)

    assert not np.array_equal(first[0], second[0])
    np.testing.assert_equal(list(first), kept)


@pytest.mark.parametrize(
    "clone",
    [
        lambda m: pickle.loads(pickle.dumps(m)),
        copy.deepcopy,
        lambda m: _loaded(m.state_dict()),
        lambda m: _loaded(json.loads(json.dumps(m.state_dict()))),
        lambda m: _loaded(m.state_dict() | {"shares": shares_of(m).tolist()}),
    ],
    ids=["pickle", "deepcopy", "state", "json", "list"],
)
def test_a_copy_goes_on_alike(clone):
    """A copy draws what the original draws, now and after the same updates, with the same bits."""
    memory = Prioritized(1000, seed=8, stratified=False)
    memory.add(np.arange(900))
    memory.update(np.arange(0, 900, 3), np.random.default_rng(0).random(300) * 9)
    memory.beta = 0.7
    memory.sample(10)

    other = clone(memory)

    for _ in range(3):
        (rows, weights), (again, weights_again) = memory.sample(64), other.sample(64)
        np.testing.assert_array_equal(rows, again)
        np.testing.assert_array_equal(weights, weights_again)
        for m in (memory, other):
            m.update(rows, rows / 100)
            m.add([int(rows[0]), 950])
    np.testing.assert_array_equal(memory._sums, other._sums)
    np.testing.assert_array_equal(memory._least, other._least)


def _loaded(state):
    other = Prioritized(1000, seed=1)
    other.add(np.arange(1000))
    other.sample(64)  # something to forget
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize(
    "change, message",
    [
        ({"capacity": 4}, "the state has capacity 4, and this memory 3"),
        ({"alpha": 0.5}, "the state has alpha 0.5, and this memory 1.0"),
        ({"version": 99}, "the state has version 99"),
        ({"shares": [1.0, 2.0]}, "the state is damaged"),
        ({"shares": [1.0, 2.0, -1.0]}, "the state is damaged"),
        ({"shares": [1.0, 2.0, math.nan]}, "the state is damaged"),
        ({"shares": "all"}, "the state is damaged"),
        ({"shares": "AAAA"}, "the state is damaged"),
        ({"step": 1.5}, "the state is damaged"),
        ({"step": -1}, "the state is damaged: step -1, "),
        ({"step": 10**30}, "the state is damaged: step 1000"),
        ({"stratified": "no"}, "the state is damaged: step 0, stratified 'no'"),
        ({"stratified": np.zeros(2)}, "the state is damaged"),
        ({"highest": 1e300}, "the state is damaged: .* highest 1e\\+300: .* at most 1e\\+290 expected"),
        ({"shares": [10**400] * 3}, "the state is damaged"),
        ({"alpha": np.zeros(2)}, "the state has alpha"),
        ({"seed": None}, "the state is damaged"),
        ({"beta": -1.0}, "the state is damaged"),
    ],
)
def test_bad_states_change_nothing(change, message):
    """A state of another memory, or a damaged one, is refused by the part that differs."""
    memory = filled([1.0, 2.0, 3.0])
    before = memory.state_dict()

    with pytest.raises(StateError, match=message):
        memory.load_state_dict(before | change)
    with pytest.raises(StateError, match="the state lacks seed"):
        memory.load_state_dict({k: v for k, v in before.items() if k != "seed"})

    np.testing.assert_equal(memory.state_dict(), before)


def test_plain_python_gives_the_same_draws(monkeypatch):
    """The kernels run by Python give the same bits."""
    results = []
    for disabled in ("0", "1"):
        monkeypatch.setenv("NUMBA_DISABLE_JIT", disabled)
        memory = Prioritized(700, seed=6)
        memory.add(np.arange(600))
        memory.update(np.arange(0, 600, 7), np.random.default_rng(0).random(86) * 3)
        memory.update([3, 3], [2.5, 0.0])
        draws = memory.sample(40)
        memory.load_state_dict(memory.state_dict())
        results.append([*draws, *memory.sample(33), memory._sums.copy(), memory._least.copy()])

    for compiled, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(compiled, plain)


def test_threads_may_share_a_memory():
    """Draws and updates from several threads leave a tree that adds up."""
    memory = Prioritized(5000, alpha=1.0)
    memory.add(np.arange(5000))
    errors = []

    def work(seed):
        try:
            source = np.random.default_rng(seed)
            for _ in range(100):
                rows, weights = memory.sample(64)
                assert rows.min() >= 0 and rows.max() < 5000 and 0 < weights.min() <= weights.max() <= 1
                memory.update(rows, source.random(64) + 0.1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
    assert memory.total == pytest.approx(math.fsum(shares_of(memory)), rel=1e-13)
    assert memory.state_dict()["step"] == 400


# ---------------------------------------------------------------------------------------------------------------------
# The ring


class RingMachine(RuleBasedStateMachine):
    """A ring does what a deque of rows does, and a snapshot knows which of its rows are gone."""

    @initialize(capacity=st.integers(1, 9))
    def start(self, capacity):
        self.ring = Ring(capacity, value="int64", pair=("float32", (2,)))
        self.model = naive.Ring(capacity)
        self.snapshots = []

    @rule()
    def append(self):
        value = self.model.written

        assert self.ring.append(value=value, pair=[value, -value]) == self.model.append(value)

    @rule(count=st.integers(0, 25))
    def extend(self, count):
        values = np.arange(self.model.written, self.model.written + count)

        places = self.ring.extend(value=values, pair=np.stack([values, -values], 1).astype("f4"))

        assert places.tolist() == [self.model.append(value) for value in values.tolist()][-self.model.capacity :]

    @precondition(lambda self: len(self.snapshots) < 5)
    @rule()
    def snapshot(self):
        self.snapshots.append((self.ring.snapshot(), list(self.model.rows)))

    @invariant()
    def same_rows(self):
        rows = self.ring.rows(np.arange(len(self.ring)))

        assert len(self.ring) == len(self.model.rows)
        assert rows.tolist() == [place for place, _ in self.model.rows]
        values = [value for _, value in self.model.rows]
        assert self.ring.fields["value"][rows].tolist() == values
        assert self.ring.fields["pair"][rows].tolist() == [[value, -value] for value in values]

    @invariant()
    def seam(self):
        """Between storage neighbours time runs on, but for the seam."""
        value = self.ring.fields["value"]
        assert self.ring.seam == self.model.written % self.model.capacity
        for row in range(1, len(self.ring)):
            assert (value[row] - value[row - 1] == 1) == (row != self.ring.seam)

    @invariant()
    def gone(self):
        alive = dict(self.model.rows)
        for snapshot, rows in self.snapshots:
            stale = self.ring.overwritten(snapshot)
            assert [alive.get(place) == value for place, value in rows] == [False] * stale + [True] * (
                len(rows) - stale
            )
            assert self.ring.rows(range(snapshot.length), snapshot).tolist() == [place for place, _ in rows]


TestRing = RingMachine.TestCase
TestRing.settings = settings(deadline=None, max_examples=30, stateful_step_count=25)


def test_a_snapshot_leaves_out_what_is_being_written():
    """Rows whose overwriting has begun are not in a snapshot, and count as overwritten in an older one."""
    ring = Ring(4, value="int64")
    ring.extend(value=[0, 1, 2, 3, 4])
    old = ring.snapshot()
    seen = []

    class Rows:
        """Rows that look at the ring while they are being copied into it."""

        def __getitem__(self, part):
            seen.append((ring.snapshot(), ring.overwritten(old), len(ring)))
            return np.arange(5, 7)[part]

    ring._write({"value": Rows()}, 2)

    assert set(seen) == {(Snapshot(start=3, length=2, version=5), 2, 4)}
    assert ring.snapshot() == Snapshot(start=3, length=4, version=7)


def test_readers_see_whole_rows():
    """While a writer goes round, a reader never mistakes an overwritten row for one of its snapshot."""
    ring = Ring(50, number="int64", double=("int64", (300,)))
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            snapshot = ring.snapshot()
            rows = ring.rows(np.arange(snapshot.length), snapshot)
            number, double = ring.fields["number"][rows], ring.fields["double"][rows]
            stale = ring.overwritten(snapshot)
            first = snapshot.version - snapshot.length
            expected = np.arange(first + stale, snapshot.version)
            good = np.array_equal(number[stale:], expected) and (double[stale:] == 2 * expected[:, None]).all()
            seen.append((good, stale))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for start in range(0, 60_000, 12):
        numbers = np.arange(start, start + 12)
        ring.extend(number=numbers, double=np.repeat(2 * numbers[:, None], 300, 1))
    done.set()
    for reader in readers:
        reader.join()

    assert seen
    assert all(good for good, _ in seen)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Ring(0, x="int64"), ValueError, "a ring of 0 rows"),
        (lambda: Ring(3), ValueError, "a ring without fields"),
        (lambda: Ring(3, x=object), TypeError, "field x: object is not of fixed size"),
        (lambda: ring().append(a=1), ValueError, "a row has the fields a, b, not a$"),
        (lambda: ring().append(a=1, b=[1, 2], c=3), ValueError, "a row has the fields a, b, not a, b, c"),
        (lambda: ring().append(a=1, b=1.0), ValueError, r"field b: rows are \(2,\), not \(\)"),
        (lambda: ring().extend(a=[1], b=[[1, 2], [3]]), ValueError, "field b: rows of one shape expected, some differ"),
        (
            lambda: ring().extend(a=1, b=[[1, 2]]),
            ValueError,
            r"field a: an array of rows of \(\) expected, one value found",
        ),
        (lambda: Ring(3, x="nonsense"), TypeError, r"field x: a dtype, or a pair .* expected, got 'nonsense'"),
        (lambda: Ring(3, x=("f4", -1)), ValueError, r"field x: sizes of at least 0 expected, got \(-1,\)"),
        (lambda: ring().append(a=256, b=[1, 2]), ValueError, "field a: 256 does not fit uint8"),
        (lambda: ring().append(a=-1, b=[1, 2]), ValueError, "field a: -1 does not fit uint8"),
        (lambda: ring().append(a=0.5, b=[1, 2]), TypeError, r"field a: 0.5 \(float64\) does not go into uint8"),
        (lambda: ring().append(a=1, b=["x", "y"]), TypeError, r"field b: 'x' \(<U1\) does not go into float32"),
        (lambda: ring().append(a=1, b=[1, -1e300]), ValueError, r"field b: -1e\+300 does not fit float32"),
        (lambda: Ring(3, x="float16").append(x=70000), ValueError, "field x: 70000 does not fit float16"),
        (lambda: Ring(3, x="U3").append(x="longer"), ValueError, "field x: 'longer' does not fit <U3"),
        (lambda: Ring(3, x="U3").append(x=1), TypeError, r"field x: 1 \(int64\) does not go into <U3"),
        (lambda: Ring(3, x="U3").append(x=b"\xff"), ValueError, "is not ASCII, which <U3 asks for"),
        (lambda: ring().extend(a=[1], b=np.zeros((2, 2))), ValueError, "fields of different lengths: a 1, b 2"),
        (lambda: ring().rows([0]), IndexError, "row 0 of an empty ring"),
        (lambda: ring(2).rows([0, 2]), IndexError, "row 2 is outside 0 .. 1"),
        (lambda: ring(2).rows([-1]), IndexError, "row -1 is outside 0 .. 1"),
        (lambda: ring(2).rows([0.5]), TypeError, "rows must be integers"),
    ],
)
def test_bad_rows(call, error, message):
    """A row that does not belong is refused, by field, and both sides are named."""
    with pytest.raises(error, match=message):
        call()


def ring(count=0):
    """A ring of 3 rows, so many of them written."""
    ring = Ring(3, a="uint8", b=("float32", 2))
    ring.extend(a=np.arange(count), b=np.zeros((count, 2)))
    return ring


def test_infinite_and_short_values_go_in():
    """What a dtype holds is no error: inf and NaN, a number that is rounded, and short text of a wider dtype."""
    own = Ring(4, x="float32", s="U3")
    own.extend(x=[np.inf, np.nan, 1e-300, 3.4e38], s=np.array(["a", "bcd", "", "e"], "U9"))

    np.testing.assert_array_equal(own.fields["x"], np.array([np.inf, np.nan, 0, 3.4e38], "float32"))
    assert own.fields["s"].tolist() == ["a", "bcd", "", "e"]


def test_a_refused_row_leaves_no_trace():
    """Nothing of a bad row is written, not even its good fields."""
    own = ring(2)

    with pytest.raises(ValueError, match="does not fit"):
        own.extend(b=np.ones((2, 2)), a=[1, 300])

    assert own.snapshot() == Snapshot(0, 2, 2)
    assert not own.fields["b"].any()


def test_fields_cannot_be_exchanged():
    """The arrays of a ring are its own for life; what is in them may be changed."""
    own = ring(1)

    with pytest.raises(TypeError):
        own.fields["a"] = np.zeros(3)
    own.fields["a"][0] = 9
    assert own.fields["a"][own.rows([0])].tolist() == [9]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_ring_is_apart(clone):
    """A copy has the same rows, and is written alone."""
    own = ring(5)

    other = clone(own)
    other.append(a=200, b=[1, 1])

    assert own.fields["a"].tolist() == [3, 4, 2]
    assert other.fields["a"].tolist() == [3, 4, 200]
    assert (own.snapshot().version, other.snapshot().version) == (5, 6)


def test_ring_and_priorities_together():
    """The storage rows of a ring are the rows of a memory."""
    own, memory = ring(), Prioritized(3, alpha=1.0)
    for a in range(5):
        memory.add(own.append(a=a, b=[0, 0]))
        memory.update([own.rows(len(own) - 1)], [a])

    rows, _ = memory.sample(9)

    assert memory.total == 2 + 3 + 4
    assert np.bincount(own.fields["a"][rows]).tolist() == [0, 0, 2, 3, 4]


def test_what_a_ring_and_a_memory_tell_of_themselves():
    """Copies are the rows in time, specs and exponents are what was given, and what cannot be is told."""
    ring = Ring(3, x="int64", y=("float32", 2))
    ring.extend(x=[1, 2, 3, 4], y=np.zeros((4, 2)))
    assert repr(ring) == "Ring(3 of 3 rows, x=int64 (), y=float32 (2,))"
    assert ring.copy()["x"].tolist() == [2, 3, 4] and ring.copy()["y"].shape == (3, 2)
    with pytest.raises(ValueError, match=r"field x: rows of a ring have one shape, got \(None,\)"):
        Ring(3, x=("int64", (None,)))
    memory = Prioritized(5, alpha=0.5, beta=0.25, seed=3)
    assert repr(memory) == "Prioritized(5, alpha=0.5, beta=0.25, seed=3)"
    assert (memory.capacity, memory.alpha, memory.beta) == (5, 0.5, 0.25)
    with pytest.raises(ValueError, match=r"capacity must be at most 2\*\*48"):
        Prioritized((1 << 48) + 1)
    with pytest.raises(ValueError, match="alpha"):
        Prioritized(4, alpha=10**400)
