"""Data over a ring that is still written: whole rows, epochs of what is there, draws by priority, transitions at the seam."""

import copy
import pickle
import threading

import numpy as np
import pytest

import jitloader as jl


def test_an_epoch_is_what_is_there_when_it_begins():
    """Oldest first, the last `capacity` rows; each epoch sees the rows written before it."""
    ring = jl.ring(6, x="int64", pair=("float32", 2))
    loader = jl.Loader(jl.live(ring).map("x", jl.clip(0, 100)), 4)
    seen = []
    for start, count in ((0, 3), (3, 2), (5, 4), (9, 20)):
        values = np.arange(start, start + count)
        ring.extend(x=values, pair=np.stack([values, -values], 1))
        batches = list(loader)
        seen.append([i for b in batches for i in b.x.tolist()])
        assert all((b.pair == np.stack([b.x, -b.x], 1)).all() for b in batches)
    assert seen == [[0, 1, 2], [0, 1, 2, 3, 4], [3, 4, 5, 6, 7, 8], [23, 24, 25, 26, 27, 28]]
    assert jl.live(ring)[0].x == 23 and jl.live(ring)[[1, -1]].x.tolist() == [24, 28]


def test_a_shuffled_epoch_has_every_row_once():
    """Any order, over a ring that has gone round."""
    ring = jl.ring(50, x="int64")
    ring.extend(x=np.arange(77))
    for order in (jl.shuffled, jl.blocks(4, 3)):
        rows = [i for b in jl.Loader(jl.live(ring), 8, order=order) for i in b.x.tolist()]
        assert sorted(rows) == list(range(27, 77)) and rows != sorted(rows)


def test_rows_read_while_they_are_written_are_whole():
    """A writer goes on and on: fields of one row always belong together, and none is torn."""
    ring = jl.ring(64, a="int64", wide=("int64", 200))
    stop = threading.Event()

    def write():
        k = 0
        while not stop.is_set():
            values = np.arange(k, k + 16)
            ring.extend(a=values, wide=np.repeat(values[:, None], 200, 1))
            k += 16

    ring.extend(a=np.zeros(64, "i8"), wide=np.zeros((64, 200), "i8"))
    writer = threading.Thread(target=write)
    writer.start()
    try:
        loader = jl.Loader(jl.live(ring), 8, shuffle=True)
        for _ in range(40):
            for batch in loader:
                assert (batch.wide == batch.a[:, None]).all()
    finally:
        stop.set()
        writer.join()


def test_replay_draws_by_priority():
    """Rows of priority 0 never come, others in proportion; `row` and `weight` are those of the memory."""
    replay = jl.Replay(
        jl.live(jl.ring(8, x="float32")).map("x", lambda x: x * 2.0), jl.prioritized(8, alpha=1.0, beta=1.0)
    )
    rows = replay.extend(x=np.arange(4))
    replay.update(rows, [0, 1, 0, 3])
    count = np.zeros(4)
    for _ in range(200):
        batch = replay.sample(16)
        assert (batch.x == 2.0 * batch.row).all() and batch._fields == ("x", "row", "weight")
        # N * P is 4 * 1/4 and 4 * 3/4; the weight is its inverse, over the largest.
        assert np.allclose(batch.weight, np.where(batch.row == 1, 1.0, 1 / 3))
        count += np.bincount(batch.row, minlength=4)
    assert count[0] == count[2] == 0 and abs(count[3] / count.sum() - 0.75) < 0.03


def test_new_rows_come_first_and_old_priorities_go():
    """A row that is written over has the highest priority again."""
    replay = jl.Replay(jl.ring(4, x="int64"), jl.prioritized(4, alpha=1.0))
    replay.update(replay.extend(x=[0, 1, 2, 3]), [0.0, 0.0, 0.0, 0.0])
    number = replay.append(x=9)
    assert number == 0 and set(replay.sample(8).x.tolist()) == {9} and len(replay) == 4


@pytest.mark.parametrize("n, stack", [(1, 1), (3, 1), (2, 2)])
def test_transitions_of_a_ring_are_those_of_its_rows_in_time(n, stack):
    """At every fill, before and after it has gone round: the same as over a plain copy of the rows, oldest first."""
    random = np.random.default_rng(0)
    ring = jl.ring(11, obs=("float32", 2), action="int64", reward="float32", terminated="bool", truncated="bool")
    data = jl.transitions(ring, n=n, gamma=0.5, stack=stack)
    for step in range(40):
        ended = random.random() < 0.2
        ring.append(
            obs=[step, -step],
            action=step,
            reward=random.random(),
            terminated=ended,
            truncated=not ended and random.random() < 0.2,
        )
        if step % 3:
            continue
        snapshot = ring.snapshot()
        order = ring.rows(np.arange(snapshot.length), snapshot)
        plain = {name: array[order] for name, array in ring.fields.items()}
        want = jl.transitions(**plain, n=n, gamma=0.5, stack=stack)
        got, expected = data[:], want[:]
        for name in expected._fields:
            assert np.allclose(getattr(got, name), getattr(expected, name)), (step, name)


def test_it_pickles_whole():
    """A live data set and its ring keep sharing the rows after a pickle."""
    ring = jl.ring(4, x="int64")
    ring.extend(x=[1, 2])
    replay = pickle.loads(pickle.dumps(jl.Replay(ring, jl.prioritized(4))))
    replay.extend(x=[3])
    assert replay.ring.fields["x"][:3].tolist() == [1, 2, 3] and set(replay.sample(9).x.tolist()) <= {3}


def test_what_is_linked_is_what_a_data_set_links():
    """keep, drop, apply and apply_rows over a ring give what they give over a copy of its rows; a deep copy stands alone."""
    ring = jl.ring(8, x="int64", y="float32")
    ring.extend(x=np.arange(5), y=np.arange(5) / 2)
    plain = jl.Dataset({name: array[:5].copy() for name, array in ring.fields.items()})
    for link in (
        lambda data: data.keep("y"),
        lambda data: data.drop("y"),
        lambda data: data.map("x", jl.clip(1, 3)).keep("y", "x"),
        lambda data: data.apply(lambda batch: {"z": batch.x + 1}),
        lambda data: data.apply_rows(lambda row, generator: {"z": int(row["x"]) * 3}),
    ):
        live, copy_of = link(jl.live(ring)), link(plain)
        assert live.fields == copy_of.fields
        for got, want in zip(jl.Loader(live, 2), jl.Loader(copy_of, 2), strict=True):
            assert got._fields == want._fields
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    live = jl.live(ring)
    again = copy.deepcopy(live)
    again.ring.extend(x=[99], y=[9])
    assert len(live) == 5 and len(again) == 6 and again[5].x == 99


def test_a_replay_goes_on_from_its_state():
    """State and copy hold the priorities: both draw what the first draws next; a failing row is named."""
    replay = jl.Replay(jl.ring(8, x="int64"), jl.prioritized(8, alpha=1.0))
    replay.update(replay.extend(x=np.arange(6)), [1, 2, 3, 4, 5, 6])
    replay.sample(4)
    other = jl.Replay(replay.ring, jl.prioritized(8, alpha=1.0))
    other.load_state_dict(replay.state_dict())
    again = pickle.loads(pickle.dumps(replay))
    assert other.memory.step == replay.memory.step == again.memory.step
    want = replay.sample(16)
    for same in (other, again):
        got = same.sample(16)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    short = jl.Replay(jl.ring(8, x="int64"), jl.prioritized(8, alpha=1.0))
    short.extend(x=np.arange(4))
    before = short.state_dict()
    with pytest.raises(jl.StateError, match="a priority for row 4, and 4 rows were written: load these first"):
        short.load_state_dict(replay.state_dict())
    assert short.state_dict() == before
    failing = jl.Replay(jl.live(replay.ring).map("x", jl.cast("uint8")), jl.prioritized(8))
    failing.extend(x=[999])
    with pytest.raises(jl.PipelineError, match="value 999 does not fit uint8"):
        failing.sample(4)


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: jl.live(np.zeros(3)), TypeError, "live takes a ring (jl.ring), got ndarray"),
        (
            lambda: jl.Replay(jl.ring(4, x="int64"), jl.prioritized(5)),
            ValueError,
            "the ring has 4 rows and the memory 5: give them one capacity",
        ),
        (
            lambda: jl.Replay(jl.ring(4, row="int64"), jl.prioritized(4)),
            ValueError,
            "Replay adds fields 'row' and 'weight' to a batch, and there is a field 'row' already",
        ),
        (
            lambda: jl.Replay(jl.ring(4, x="int64"), 3),
            TypeError,
            "Replay takes a ring (or jl.live, jl.transitions of one) and a jl.prioritized, got Live and int",
        ),
        (
            lambda: jl.transitions(jl.ring(4, x="int64")),
            ValueError,
            "transitions: the ring has no field 'action': there are x",
        ),
        (
            lambda: jl.Replay(jl.ring(4, x="int64"), jl.prioritized(4)).sample(2),
            ValueError,
            "nothing to sample: no row has a priority above 0 (add rows first)",
        ),
    ],
)
def test_bad_input(make, kind, text):
    """It is told in one line."""
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == text
