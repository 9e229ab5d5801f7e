"""Packing against the textbook, and batches of packs against plain lists."""

import doctest
import math
from collections import Counter

import naive_packing as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitloader import packing, rng
from jitloader.packing import Packed, emit, pack

quick = settings(deadline=None, max_examples=60)


@st.composite
def problems(draw, low=1):
    """Lengths and a capacity that takes all of them."""
    capacity = draw(st.integers(1, 100))
    lengths = draw(st.lists(st.integers(low, capacity), max_size=80))
    return np.array(lengths, np.int64), capacity


def contents(packs):
    """The (row, begin, size) entries of each pack."""
    entries = list(zip(packs.rows.tolist(), packs.begins.tolist(), packs.sizes.tolist(), strict=True))
    return [entries[a:b] for a, b in zip(packs.starts[:-1].tolist(), packs.starts[1:].tolist(), strict=True)]


@quick
@given(problems(), st.integers(0, 5))
def test_packs_equal_the_textbook(problem, epoch):
    """One group is packed as best-fit-decreasing by its definition: the same lengths lie together."""
    lengths, capacity = problem

    packs = pack(lengths, capacity, epoch=epoch)

    ours = Counter(tuple(sorted(size for _, _, size in entries)) for entries in contents(packs))
    assert ours == Counter(tuple(sorted(p)) for p in naive.best_fit_decreasing(lengths.tolist(), capacity))


@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 1023, 1024, 1025, 40_000])
def test_packs_equal_the_textbook_at_every_depth(capacity):
    """The set of free spaces is right where it takes one, two, three and four levels."""
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 300) // 2 + 1
    lengths = np.minimum(lengths, capacity)

    ours = Counter(tuple(sorted(size for _, _, size in entries)) for entries in contents(pack(lengths, capacity)))

    assert ours == Counter(tuple(sorted(p)) for p in naive.best_fit_decreasing(lengths.tolist(), capacity))


@quick
@given(problems(low=0), st.integers(1, 90), st.integers(0, 3))
def test_every_row_once_and_no_pack_too_full(problem, group, seed):
    """Each row with elements lies whole in one pack, whatever the groups, and the counts add up."""
    lengths, capacity = problem

    packs = pack(lengths, capacity, group=group, seed=seed)

    assert sorted(packs.rows.tolist()) == np.flatnonzero(lengths).tolist()
    assert packs.sizes.tolist() == lengths[packs.rows].tolist()
    assert not packs.begins.any()
    assert packs.starts[0] == 0 and packs.starts[-1] == len(packs.rows) and (np.diff(packs.starts) > 0).all()
    assert packs.empty == np.count_nonzero(lengths == 0)
    assert packs.dropped == 0
    assert all(1 <= sum(size for _, _, size in entries) <= capacity for entries in contents(packs))
    assert packs.most == max(map(len, contents(packs)), default=0)
    assert packs.elements == lengths.sum()
    assert packs.fill == (packs.elements / (packs.number * capacity) if lengths.any() else 1.0)


@quick
@given(problems(), st.integers(1, 40), st.integers(0, 3))
def test_groups_are_packed_on_their_own(problem, group, seed):
    """The shuffled rows are cut into equal groups, and each is packed as the textbook says."""
    lengths, capacity = problem
    order = np.empty(len(lengths), np.int64)
    rng.permutation(rng.subkey(rng.subkey(seed, packing.PACKING), 0), 0, order)
    groups = math.ceil(len(lengths) / group)

    packs = pack(lengths, capacity, group=group, seed=seed)

    expected = Counter()
    for g in range(groups):
        rows = order[g * len(lengths) // groups : (g + 1) * len(lengths) // groups]
        assert 1 <= len(rows) <= group
        expected.update(tuple(sorted(p)) for p in naive.best_fit_decreasing(lengths[rows].tolist(), capacity))
    assert Counter(tuple(sorted(size for _, _, size in entries)) for entries in contents(packs)) == expected


@quick
@given(st.lists(st.integers(0, 70), max_size=40), st.integers(1, 30))
def test_rows_longer_than_a_pack(lengths, capacity):
    """Split keeps every element once, truncate the head of each row, drop the rows that fit."""
    lengths = np.array(lengths, np.int64)

    split, cut, drop = (pack(lengths, capacity, overflow=o) for o in ("split", "truncate", "drop"))

    elements = [(row, begin + t) for p in contents(split) for row, begin, size in p for t in range(size)]
    assert sorted(elements) == [(row, t) for row, length in enumerate(lengths) for t in range(length)]
    assert len(split.rows) == sum(math.ceil(length / capacity) for length in lengths)
    kept = np.flatnonzero(lengths)
    assert sorted(zip(cut.rows, cut.begins, cut.sizes, strict=True)) == [
        (r, 0, min(lengths[r], capacity)) for r in kept
    ]
    assert sorted(drop.rows) == [r for r in kept if lengths[r] <= capacity]
    assert drop.dropped == np.count_nonzero(lengths > capacity)
    assert split.dropped == cut.dropped == 0
    assert all(sum(s for _, _, s in p) <= capacity for packs in (split, cut, drop) for p in contents(packs))


def test_a_long_row_is_an_error():
    """The row and both lengths are named."""
    with pytest.raises(ValueError, match=r"row 2 has 9 elements and a pack holds 8 "):
        pack([3, 8, 9, 10], 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lengths": [1, -2], "capacity": 4}, "row 1 has length -2"),
        ({"lengths": [1], "capacity": 0}, "a pack of 0 elements"),
        ({"lengths": [1], "capacity": 2**31}, "a pack of 2147483648 elements"),
        ({"lengths": [1.5], "capacity": 4}, "lengths must be a flat array of integers, not float64"),
        ({"lengths": [[1]], "capacity": 4}, r"lengths must be a flat array of integers, not int64 \(1, 1\)"),
        ({"lengths": [1], "capacity": 4, "group": 0}, "groups of 0 rows"),
        ({"lengths": [1], "capacity": 4, "overflow": "wrap"}, "overflow='wrap'"),
    ],
)
def test_bad_arguments(arguments, message):
    """What cannot be packed is said before anything is."""
    with pytest.raises(ValueError, match=message):
        pack(**arguments)


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_nothing_to_pack(lengths):
    """No elements make no packs."""
    packs = pack(lengths, 8)

    assert (packs.number, packs.elements, packs.fill, packs.empty) == (0, 0, 1.0, len(lengths))


LENGTHS = np.minimum(np.random.default_rng(1).lognormal(4.6, 1.0, 20_000).astype(np.int64) + 1, 1024)


def test_the_same_arguments_give_the_same_packs():
    """Packs depend on seed and epoch, and on those alone."""
    first, again = (pack(LENGTHS, 1024, seed=3, epoch=2) for _ in range(2))

    assert contents(first) == contents(again)
    for other in ({"seed": 3, "epoch": 3}, {"seed": 4, "epoch": 2}, {"seed": 2, "epoch": 3}):
        changed = pack(LENGTHS, 1024, **other)
        assert not np.array_equal(first.rows, changed.rows)


def test_lengths_do_not_order_packs():
    """Neither the number of rows in a pack nor the length of a row goes up or down with the position."""
    packs = pack(LENGTHS, 1024, group=4096)

    counts = np.diff(packs.starts)
    assert abs(np.corrcoef(np.arange(packs.number), counts)[0, 1]) < 5 / math.sqrt(packs.number)
    assert abs(np.corrcoef(np.arange(len(packs.rows)), packs.sizes)[0, 1]) < 5 / math.sqrt(packs.number)


def test_rows_meet_other_rows_in_another_epoch():
    """Of the pairs that share a pack in one epoch few do so in the next."""
    pairs = []
    for epoch in (0, 1):
        pack_of = np.empty(len(LENGTHS), np.int64)
        packs = pack(LENGTHS, 1024, epoch=epoch, group=2048)
        pack_of[packs.rows] = np.repeat(np.arange(packs.number), np.diff(packs.starts))
        order = np.lexsort((np.arange(len(LENGTHS)), pack_of))
        together = pack_of[order][1:] == pack_of[order][:-1]
        pairs.append(set(zip(order[:-1][together].tolist(), order[1:][together].tolist(), strict=True)))

    assert len(pairs[0] & pairs[1]) < 0.02 * len(pairs[0])


def test_fill():
    """Lognormal lengths fill packs to 99.5 % and more."""
    assert pack(LENGTHS, 1024).fill > 0.995


def test_plain_python_gives_the_same_packs(monkeypatch):
    """The kernels run by Python give the same bits."""
    lengths = LENGTHS[:400]
    values, offsets = np.arange(lengths.sum(), dtype=np.int32), np.concatenate([[0], np.cumsum(lengths)])
    compiled = pack(lengths, 1024, group=150, epoch=1)
    batch = emit(compiled, values, offsets, np.arange(compiled.number), dtype=np.int64, padding=-1)

    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    packing._kernel.cache_clear()
    plain = pack(lengths, 1024, group=150, epoch=1)
    plain_batch = emit(plain, values, offsets, np.arange(plain.number), dtype=np.int64, padding=-1)
    packing._kernel.cache_clear()

    for a, b in zip(compiled + batch, plain + plain_batch, strict=True):
        np.testing.assert_array_equal(a, b)


@quick
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(1, 30),
    st.sampled_from([("uint16", "int64"), ("float32", "float64"), ("int32",) * 2, ("float16",) * 2, ("bool",) * 2]),
    st.sampled_from([(), (3,), (2, 2)]),
    st.data(),
)  # fmt: skip
def test_batches_equal_plain_lists(lengths, capacity, dtypes, inner, data):
    """Values, segments, positions and boundaries are those of the rows laid one after the other."""
    lengths = np.array(lengths, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = (np.arange(offsets[-1] * math.prod(inner)).reshape(-1, *inner) % 1000).astype(dtypes[0])
    packs = pack(lengths, capacity, overflow="split")
    which = data.draw(st.lists(st.integers(0, packs.number - 1), max_size=6)) if packs.number else []

    batch = emit(packs, values, offsets, which, dtype=dtypes[1], padding=1)

    boundaries = [0]
    for i, k in enumerate(which):
        plain = naive.emit(contents(packs)[k], values, offsets, capacity, 1, dtypes[1])
        np.testing.assert_array_equal(batch.values[i], plain[0])
        assert batch.segments[i].tolist() == plain[1]
        assert batch.positions[i].tolist() == plain[2]
        boundaries += [i * capacity + end for end in plain[3]]
    assert batch.values.dtype == dtypes[1]
    assert batch.cu_seqlens[: batch.used].tolist() == boundaries
    assert (batch.cu_seqlens[batch.used :] == len(which) * capacity).all()


def test_out_is_written_over():
    """A batch can be filled again, and a field of old boundaries does not shine through."""
    lengths = LENGTHS[:500]
    values, offsets = np.arange(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    packs = pack(lengths, 1024)

    first = emit(packs, values, offsets, [0, 1])
    again = emit(packs, values, offsets, [2, 3], out=first)

    fresh = emit(packs, values, offsets, [2, 3])
    assert again.values is first.values
    for a, b in zip(again, fresh, strict=True):
        np.testing.assert_array_equal(a, b)


def test_big_endian_values():
    """Bytes in foreign order arrive as the same numbers."""
    values = np.array([1, 2, 300], ">u2")
    packs = pack([3], 4)

    assert emit(packs, values, [0, 3], [0], dtype=np.int32, padding=9).values.tolist() == [[1, 2, 300, 9]]
    assert emit(packs, values, [0, 3], [0], padding=9).values.tolist() == [[1, 2, 300, 9]]


VALUES, OFFSETS, PACKS = np.array([1, 2, 3, 4, 5, 6]), np.array([0, 3, 6]), pack([3, 3], 4)
OUT = emit(PACKS, VALUES, OFFSETS, [0])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: emit(PACKS, VALUES, OFFSETS, [0, 2]), IndexError, "there is no pack 2: packs are numbered 0 to 1"),
        (lambda: emit(PACKS, VALUES, OFFSETS, [-1]), IndexError, "there is no pack -1"),
        (lambda: emit(PACKS, VALUES, OFFSETS[:2], [0, 1]), ValueError, "names row 1, which does not lie so"),
        (lambda: emit(PACKS, VALUES, [0, 2, 6], [0, 1]), ValueError, "names row 0, which does not lie so"),
        (lambda: emit(PACKS, VALUES[:5], OFFSETS, [0, 1]), ValueError, "names row 1, which does not lie so"),
        (lambda: emit(PACKS, VALUES, [-1, 2, 5], [0, 1]), ValueError, "names row 0, which does not lie so"),
        (lambda: emit(PACKS, VALUES * 60, OFFSETS, [0, 1], dtype=np.uint8), ValueError, "of row 1 does not fit uint8"),
        (lambda: emit(PACKS, -VALUES, OFFSETS, [0], dtype=np.uint64), ValueError, "does not fit uint64"),
        (lambda: emit(PACKS, VALUES, OFFSETS, [0.0]), ValueError, "which must be a flat array of integers"),
        (lambda: emit(PACKS, VALUES, OFFSETS, [0], dtype=np.float16), ValueError, "no kernel casts float16"),
        (lambda: emit(PACKS, VALUES.astype(object), OFFSETS, [0]), ValueError, "fixed-size elements, not object"),
        (
            lambda: emit(PACKS, VALUES, OFFSETS, [0], out=emit(PACKS, VALUES, OFFSETS, [0, 1])),
            ValueError,
            r"out holds \(2, 4\), and these packs take \(1, 4\)",
        ),
        (
            lambda: emit(PACKS, VALUES, OFFSETS, [0], dtype="i4", out=emit(PACKS, VALUES, OFFSETS, [0])),
            ValueError,
            "out holds int64, not int32",
        ),
        (
            lambda: emit(PACKS, VALUES, OFFSETS, [0], out=OUT._replace(cu_seqlens=np.zeros(1, np.int32))),
            ValueError,
            "pack 0 holds more than out can take",
        ),
    ],
)  # fmt: skip
def test_bad_batches(call, error, message):
    """A pack, a row or a value that does not belong is an error, never garbage."""
    with pytest.raises(error, match=message):
        call()


def test_ranks_part_the_packs():
    """Every rank takes its own packs, and all together every element."""
    lengths = LENGTHS[:300]
    values, offsets = np.arange(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    packs = pack(lengths, 1024)

    seen = []
    for rank in range(3):
        batch = emit(packs, values, offsets, np.arange(rank, packs.number, 3))
        seen += batch.values[batch.segments > 0].tolist()

    assert isinstance(batch, Packed)
    assert sorted(seen) == values.tolist()


def test_examples():
    """The examples in the docstrings hold."""
    failed, tried = doctest.testmod(packing)

    assert tried > 0
    assert failed == 0
