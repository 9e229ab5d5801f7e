"""Batches cut by their padded size: where they end, against a slow twin; ranks, resume, errors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitloader as jl
from jitloader import jit
from jitloader.cutting import _CUT, cut_rows

COUNT = 700
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(2.5, 0.8, COUNT).astype(int), 90)
LENGTHS[[5, 6, 300]] = 0
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
VALUES = np.arange(OFFSETS[-1], dtype=np.int32)


def padded(multiple: int = 1) -> jl.Dataset:
    """Rows of many lengths, padded, beside their numbers."""
    data = jl.Dataset(t=jl.ragged(VALUES, OFFSETS), i=np.arange(COUNT))
    return data.map("t", jl.pad_to_longest(multiple=multiple, mask="m"))


def cut_slowly(
    lengths: Sequence[Sequence[int]], world: int, multiples: Sequence[int], tokens: int, most: int
) -> list[int] | None:
    """Where batches end, in rows of a rank, group by group and batch by batch; None where a row is too long."""
    groups = [
        [max(max(field[p : p + world]), 1) for field in lengths] for p in range(0, len(lengths[0]), world)
    ]  # the longest of what the ranks have

    def cost(batch: list[list[int]]) -> int:
        costs = [len(batch)]
        for f, multiple in enumerate(multiples):
            column = [group[f] for group in batch]
            costs.append(sum(column) if not multiple else len(batch) * -(-max(column) // multiple) * multiple)
        return max(costs)

    ends, batch = [], []
    for number, group in enumerate(groups):
        if cost([group]) > tokens:
            return None
        if batch and (cost([*batch, group]) > tokens or len(batch) == most):
            ends.append(number)
            batch = []
        batch.append(group)
    return ends


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.tuples(st.sampled_from([0, 1, 4]), st.sampled_from([0, 1, 8])),
    st.integers(1, 60),
    st.integers(1, 9),
)
def test_cuts_are_those_of_the_slow_twin(
    rows: list[tuple[int, int]], world: int, multiples: tuple[int, int], tokens: int, most: int
) -> None:
    lengths = [[a for a, _ in rows], [b for _, b in rows]]
    ends, room = np.empty(len(rows) + 1, np.int64), np.empty(4, np.int64)
    kernel = jit.load(cut_rows, _CUT)
    flat = np.array(lengths, np.int64).reshape(-1)
    found = kernel(flat, len(rows), world, np.array(multiples, np.int64), tokens, most, room, ends)
    plain = np.empty(len(rows) + 1, np.int64)
    assert cut_rows(flat, len(rows), world, np.array(multiples, np.int64), tokens, most, room, plain) == found
    wanted = cut_slowly(lengths, world, multiples, tokens, most)
    if wanted is None:
        assert found < 0
    else:
        assert ends[:found].tolist() == plain[:found].tolist() == wanted


ORDERS: dict[str, Callable[[], dict[str, object]]] = {
    "shuffled": lambda: {"shuffle": True},
    "bucketed": lambda: {"order": jl.bucketed(LENGTHS, window=5)},
    "sequential": dict,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("most", [None, 20])
def test_batches_are_as_full_as_they_can_be_in_the_order_that_rows_come(order: str, most: int | None) -> None:
    loader = jl.Loader(padded(), most, max_tokens=500, **ORDERS[order]())
    for _ in range(2):
        count = len(loader)
        batches = list(loader)
        assert len(batches) == count
        rows = np.concatenate([b.i for b in batches])
        assert sorted(rows.tolist()) == list(range(COUNT))
        ends = cut_slowly([LENGTHS[rows].tolist()], 1, [1], 500, most or COUNT)
        assert np.cumsum([len(b.i) for b in batches])[:-1].tolist() == ends
        for batch in batches:
            assert batch.t.shape == batch.m.shape == (len(batch.i), LENGTHS[batch.i].max())
            for row, values, mask in zip(batch.i, batch.t, batch.m, strict=True):
                assert values[mask].tolist() == VALUES[OFFSETS[row] : OFFSETS[row + 1]].tolist()
    assert loader.stats()["rows"] == 2 * COUNT


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_has_a_number_and_a_state_has_the_rest(order: str) -> None:
    def new(**more: int) -> jl.Loader:
        return jl.Loader(padded(), max_tokens=500, seed=3, **ORDERS[order](), **more)

    loader = new()
    batches = iter(loader)
    first = [next(batches).i.tolist() for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == sum(map(len, first))
    assert [loader[k].i.tolist() for k in range(5)] == first
    last = loader[-1].i.tolist()
    rest = [batch.i.tolist() for batch in batches]
    assert rest[-1] == last
    for again in (new(), new(prefetch=0), new(threads=3)):
        again.load_state_dict(state)
        assert [batch.i.tolist() for batch in again] == rest
        assert [batch.i.tolist() for batch in again] == [batch.i.tolist() for batch in loader]
        loader.epoch = 1
    # Another size: the same rows, cut otherwise; the order of this epoch is the one it was begun with.
    other = jl.Loader(padded(), max_tokens=300, seed=3, **ORDERS[order]())
    other.load_state_dict(state)
    assert sum((batch.i.tolist() for batch in other), []) == sum(rest, [])


@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_cut_alike(order: str, world: int, tail: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loaders = [
            jl.Loader(padded(), max_tokens=200, rank=r, world_size=world, tail=tail, **ORDERS[order]())
            for r in range(world)
        ]
    second = [len(loader[1].i) for loader in loaders]
    found = [list(loader) for loader in loaders]
    assert second == [len(batches[1].i) for batches in found]
    counts = [len(batches) for batches in found]
    assert max(counts) - min(counts) <= (tail == "keep")
    rows = sorted(np.concatenate([b.i for batches in found for b in batches]).tolist())
    if tail == "keep":
        assert rows == list(range(COUNT))
    elif tail == "drop":
        assert len(rows) == len(set(rows)) == COUNT // world * world
    else:
        assert set(rows) == set(range(COUNT)) and len(rows) == -(-COUNT // world) * world
    for step in zip(*found, strict=False):
        assert all(batch.t.size <= 200 for batch in step)
        assert len({len(batch.i) for batch in step}) == 1 or step[0] is found[0][-1]


def test_bucketed_batches_of_tokens_waste_little_and_end_where_the_loader_cuts() -> None:
    loader = jl.Loader(padded(), max_tokens=800, order=jl.bucketed(LENGTHS, window=10))
    batches = list(loader)
    for batch in batches[:-1]:  # each begins with its longest row
        assert LENGTHS[batch.i][0] == LENGTHS[batch.i].max()
    assert [b.i.tolist() for b in batches] != [b.i.tolist() for b in loader]
    assert "max_tokens=800" not in loader.state_dict()["order"] and loader.state_dict()["order"].endswith("@0x1t800")


def test_bucketed_batches_of_tokens_are_nearly_full() -> None:
    count, tokens = 20_000, 4096
    lengths = np.minimum(np.random.default_rng(1).lognormal(3, 0.8, count).astype(int), 500)
    order = jl.bucketed(lengths).sized(0, 1, tokens).plan(count, 0, 0)
    rows = np.empty(count, np.int64)
    order.kernel(0, 1, rows, *order.params)
    assert sorted(rows.tolist()) == list(range(count))
    ends = cut_slowly([lengths[rows].tolist()], 1, [1], tokens, count)
    assert ends is not None
    size = sum(len(part) * part.max() for part in np.split(lengths[rows], ends))
    assert lengths.sum() >= 0.95 * size  # shuffled rows come to 0.25
    assert size >= 0.95 * tokens * (len(ends) + 1)


def test_bucketed_batches_of_64_waste_less_than_15_percent_and_stay_mixed() -> None:
    count = 20_000
    lengths = np.minimum(np.random.default_rng(1).lognormal(3, 0.8, count).astype(int), 500)
    found = []
    for epoch in range(2):
        order = jl.bucketed(lengths, 64).plan(count, 0, epoch)
        rows = np.empty(count, np.int64)
        order.kernel(0, 1, rows, *order.params)
        batches = [rows[low : low + 64] for low in range(0, count, 64)]
        assert lengths.sum() >= 0.85 * sum(len(b) * lengths[b].max() for b in batches)
        means = np.array([lengths[b].mean() for b in batches[:-1]])  # long and short batches come as they may
        assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 4 / np.sqrt(len(means))
        found.append(batches)
    first = {row: k for k, batch in enumerate(found[0]) for row in batch.tolist()}
    came_from = [len({first[row] for row in batch.tolist()}) for batch in found[1][:-1]]
    assert np.mean(came_from) > 8  # batches of the epoch before; rows of one length are in all three windows of it


def test_bucketed_takes_the_batch_size_of_the_loader() -> None:
    loader = jl.Loader(padded(), 20, order=jl.bucketed(LENGTHS, window=5))
    given = jl.Loader(padded(), 20, order=jl.bucketed(LENGTHS, 20, window=5))
    assert [b.i.tolist() for b in loader] == [b.i.tolist() for b in given]


def test_multiples_and_rows_that_stay_ragged_count() -> None:
    for batch in jl.Loader(padded(multiple=8), max_tokens=256):
        assert batch.t.shape[1] % 8 == 0 and batch.t.size <= 256
    ragged = jl.Dataset(t=jl.ragged(VALUES, OFFSETS), i=np.arange(COUNT))
    batches = list(jl.Loader(ragged, max_tokens=256))
    ends = cut_slowly([LENGTHS.tolist()], 1, [0], 256, COUNT)
    assert np.cumsum([len(b.i) for b in batches])[:-1].tolist() == ends


def test_epochs_longer_than_what_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [b.i.tolist() for b in jl.Loader(padded(), max_tokens=500, shuffle=True)]
    monkeypatch.setattr("jitloader.cutting.ROOM", 7)  # less than a batch, too
    assert [b.i.tolist() for b in jl.Loader(padded(), max_tokens=500, shuffle=True)] == wanted


def test_the_share_of_padding_is_counted() -> None:
    """Lognormal lengths: sorted windows waste less than 15 %, where shuffled rows waste more than half."""
    shares = []
    for order in (jl.bucketed(LENGTHS), None):
        loader = jl.Loader(padded(), 16, order=order, shuffle=order is None)
        batches = list(loader)
        used, every = (sum(int(f(b)) for b in batches) for f in (lambda b: b.m.sum(), lambda b: b.m.size))
        shares.append(loader.stats()["padding_share"])
        assert shares[-1] == pytest.approx(1 - used / every, abs=1e-12)
    assert shares[0] < 0.15 and shares[1] > 0.5
    assert f"{100 * shares[1]:.0f} % of the padded fields padding" in repr(loader.report())


def test_functions_of_a_batch_see_these_batches() -> None:
    data = padded().apply(lambda batch: {"t": batch.t, "n": np.array([len(batch.i)] * len(batch.i))})
    sizes = [len(b.i) for b in jl.Loader(padded(), max_tokens=500)]
    assert [b.n.tolist() for b in jl.Loader(data, max_tokens=500)] == [[n] * n for n in sizes]


def test_mixes_and_rings_are_cut_too() -> None:
    mixed = jl.mix((padded(), 0.5), (padded(), 0.5))
    loader = jl.Loader(mixed, max_tokens=500)
    batches = list(loader)
    assert max(b.t.size for b in batches) <= 500 and len(batches) > 20
    with pytest.raises(ValueError, match="here none does: give batch_size"):
        jl.Loader(jl.live(jl.ring(4, x="float32")), max_tokens=10)


def test_what_cannot_be_cut_is_refused() -> None:
    data = padded()
    with pytest.raises(TypeError, match=r"^Loader takes a batch_size, or max_tokens where rows vary in length$"):
        jl.Loader(data)
    with pytest.raises(ValueError, match="max_tokens is for fields whose rows vary in length, and here none does"):
        jl.Loader(jl.Dataset(x=np.arange(4)), max_tokens=10)
    with pytest.raises(ValueError, match=r"give max_tokens or drop_last=True, not both"):
        jl.Loader(data, max_tokens=100, drop_last=True)
    with pytest.raises(ValueError, match="max_tokens"):
        jl.Loader(data, max_tokens=0)
    row = int(LENGTHS.argmax())
    loader = jl.Loader(data, max_tokens=int(LENGTHS.max()) - 1, order=[0, row, 1])
    told = f"row {row} has {LENGTHS.max()} elements, and max_tokens is {LENGTHS.max() - 1}: "
    with pytest.raises(ValueError, match=f"^{told}select shorter rows, or link jl.truncate or jl.random_cut$"):
        next(iter(loader))
    three = jl.Dataset(t=jl.ragged(np.arange(15), [0, 5, 10, 15])).map("t", jl.pad_to_longest())
    loader = jl.Loader(three, max_tokens=5, rank=0, world_size=2)
    with pytest.warns(UserWarning, match=r"ranks get different numbers of batches \(1 and 2\): training in step would hang"):
        assert len(list(loader)) == 2
    assert len(list(jl.Loader(three, max_tokens=10, rank=0, world_size=2))) == 1  # one each, and nothing to warn of


def test_a_plan_says_what_ends_a_batch() -> None:
    text = repr(jl.Loader(padded(), 32, max_tokens=500))
    assert text.startswith("Loader: batches of at most 500 tokens and 32 rows from 700 rows, sequential, seed 0\n")
    assert "batch: varies;" in text


def test_an_epoch_without_rows_has_no_batch() -> None:
    loader = jl.Loader(padded().take(0), max_tokens=10)
    assert len(loader) == 0 and list(loader) == []
