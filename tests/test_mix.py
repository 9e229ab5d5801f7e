"""Mixes: shares exact to a row, each source with its own stages and its own shuffle, resumable, parted between ranks."""

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitloader as jl


def source(k, n):
    """Rows that say which source and row they are."""
    return jl.Dataset(s=np.full(n, k), i=np.arange(n))


def flat(loader):
    return [(int(s), int(i)) for b in loader for s, i in zip(b.s, b.i, strict=True)]


def worst(sequence, shares):
    """The largest distance of any source's count in any prefix from its share of it."""
    seen, most = [0] * len(shares), Fraction(0)
    for t, (k, _) in enumerate(sequence, 1):
        seen[k] += 1
        most = max(most, *(abs(n - share * t / sum(shares)) for n, share in zip(seen, shares, strict=True)))
    return most


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    stop=st.sampled_from(["first", "last", "never"]),
    batch=st.integers(1, 9),
)
def test_shares_are_exact_and_rows_come_when_they_should(sizes, shares, stop, batch):
    """Within one row of the share in every prefix; once each, or all at least once, as `stop` says."""
    mix = jl.mix(*((source(k, n), share) for k, (n, share) in enumerate(zip(sizes, shares, strict=True))), stop=stop)
    found = flat(jl.Loader(mix, batch, seed=3))
    assert worst(found, shares) < 1
    rows = [[i for s, i in found if s == k] for k in range(2)]
    if stop == "first":
        assert all(len(set(r)) == len(r) for r in rows)
    if stop == "last":
        assert all(set(r) == set(range(n)) for r, n in zip(rows, sizes, strict=True))
    if stop == "never":
        assert len(found) == sum(sizes)


def web_and_books():
    rng = np.random.default_rng(0)
    web = jl.Dataset(x=rng.integers(0, 256, (300, 8, 8, 3), dtype="u1"), y=np.arange(300)).map(
        "x", jl.random_crop(8, padding=2), jl.normalize(10, 2)
    )
    books = jl.Dataset(x=rng.random((50, 8, 8, 3), dtype="f4"), y=np.arange(50)).map("x", jl.random_flip())
    return web, books


def test_sources_keep_their_own_stages():
    """A row comes with the bits and the draws that it has in its own data set; threads and batch size change nothing."""
    web, books = web_and_books()
    mix = jl.mix({web: 3, books: 1}, stop="last").apply(lambda b: {"z": b.y * 2})
    epochs = [list(jl.Loader(mix, size, seed=5, threads=t, prefetch=p)) for size, t, p in ((64, 2, 2), (7, 1, 0))]
    x, y, z = (np.concatenate([b[k] for b in epochs[0]]) for k in range(3))
    assert all((np.concatenate([b[k] for b in epochs[1]]) == whole).all() for k, whole in enumerate((x, y, z)))
    assert (z == 2 * y).all()
    turns = flat(jl.Loader(jl.mix((source(0, 300), 3), (source(1, 50), 1), stop="last"), 64, seed=5))
    assert [i for _, i in turns] == y.tolist()
    for k, data in enumerate((web, books)):
        at = [p for p, (s, _) in enumerate(turns) if s == k]
        assert (data.gather(y[at], seed=5).x == x[at]).all()


def test_a_mix_is_indexed_over_its_sources():
    """Row 90 is the second source's first; a batch of rows equals its samples one by one."""
    web, books = source(0, 90), source(1, 60)
    mix = jl.mix((web, 1), (books, 1))
    assert len(mix) == 150 and mix[92] == books[2] and mix[-147] == web[3]
    assert [tuple(map(int, mix[i])) for i in (3, 92, 4)] == [*zip(*(a.tolist() for a in mix[[3, 92, 4]]), strict=True)]
    assert mix[-2:].i.tolist() == [58, 59]
    rows = mix.apply_rows(lambda row, rng: {"i": np.int64(rng.integers(1 << 62))})
    assert rows[92].i != rows[2].i
    assert rows[92].i in np.concatenate([b.i for b in jl.Loader(rows, 10, seed=0)])


def test_a_mix_resumes_and_parts_between_ranks():
    """Two ranks, then three after a saved state: together exactly the uninterrupted order."""
    mix = jl.mix((source(0, 90), 2), (source(1, 60), 1), stop="last")
    whole = flat(jl.Loader(mix, 10, seed=1))
    loaders = [jl.Loader(mix, 6, seed=1, rank=r, world_size=2, tail="drop") for r in range(2)]
    its = [iter(loader) for loader in loaders]
    parts = [[next(it) for _ in range(4)] for it in its]
    seen = [p for pair in zip(*map(flat, parts), strict=True) for p in pair]
    assert seen == whole[:48]
    state = json.loads(json.dumps(loaders[0].state_dict()))
    after = [jl.Loader(mix, 5, seed=1, rank=r, world_size=3, tail="drop") for r in range(3)]
    for loader in after:
        loader.load_state_dict(state)
    rest = [p for trio in zip(*map(flat, after), strict=True) for p in trio]
    assert seen + rest == whole[: 48 + len(rest)] and len(whole) - 48 - len(rest) < 3


def test_ragged_sources_are_padded_together():
    """Rows of both sources are padded to the longest of the batch."""
    a = jl.ragged([np.ones(n, "f4") for n in (1, 5, 2)])
    b = jl.ragged([np.full(n, 2, "f4") for n in (3, 1)])
    mix = jl.mix((jl.Dataset(w=a), 1), (jl.Dataset(w=b), 1), stop="last").map("w", jl.pad_to_longest(mask="m"))
    seen = []
    for w, m in jl.Loader(mix, 2):
        assert w.shape[1] == m.sum(1).max()
        seen += [tuple(row[mask]) for row, mask in zip(w, m, strict=True)]
    assert {(1.0,) * 5, (1.0,), (1.0, 1.0), (2.0,) * 3, (2.0,)} == set(seen)


def test_a_bad_row_names_its_source():
    """The good batches come first, then the error of the source's own row; a state goes on after it as ever."""
    good = jl.Dataset(x=np.zeros(50)).map("x", jl.cast("uint8"))
    bad = jl.Dataset(x=np.where(np.arange(50) == 7, 999.0, 0)).map("x", jl.cast("uint8"))
    loader = jl.Loader(jl.mix((good, 1), (bad, 1)), 4, seed=2)
    rows = jl.mix((source(0, 50), 1), (source(1, 50), 1))
    at = flat(jl.Loader(rows, 4, seed=2)).index((1, 7))
    it, came = iter(loader), 0
    with pytest.raises(jl.PipelineError, match=r"source 1: stage 0 'cast\(uint8\)' on field 'x', row 7, epoch 0: value 999.0"):
        for _ in it:
            came += 1
    assert came == at // 4


def test_printing_a_mix_tells_its_sources():
    """repr names shares, sources and specs."""
    text = repr(jl.Loader(jl.mix((source(0, 30), 0.7), (source(1, 10), 0.3), stop="never"), 4))
    assert text.splitlines()[:4] == [
        "Loader: 10 batches of 4 from 40 rows, mixed(70%, 30%, stop='never'), seed 0",
        "  source 0 of 30 rows",
        "    s: records int64 ()",
        "    i: records int64 ()",
    ]
    assert repr(jl.mix((source(0, 30), 1))).startswith("Mix(100%, stop='first') of 30 rows\n")


A, B = source(0, 5), source(1, 5)


@pytest.mark.parametrize(
    "call, kind, says",
    [
        (lambda: jl.mix(), ValueError, "mix takes at least one pair (dataset, share)"),
        (lambda: jl.mix(A, B), TypeError, "mix takes pairs (dataset, share), as mix((web, 0.7), (books, 0.3)), got a data set without a share"),
        (lambda: jl.mix((1, A)), TypeError, "mix takes pairs (dataset, share), as mix((web, 0.7), (books, 0.3)), got a pair whose first is of type int"),
        (lambda: jl.mix(7), TypeError, "mix takes pairs (dataset, share), as mix((web, 0.7), (books, 0.3)), got int"),
        (lambda: jl.mix((A, 1), (B, 0)), ValueError, "mixed(shares=) takes positive, finite shares, got 0 for source 1"),
        (lambda: jl.mix((A, 1), (B, -2)), ValueError, "mixed(shares=) takes positive, finite shares, got -2 for source 1"),
        (lambda: jl.mix((A, 1), (A.take(0), 1)), ValueError, "mixed(counts=) for source 1 takes at least 1, got 0"),
        (lambda: jl.mix((A, 1), stop="soon"), ValueError, "mixed(stop=) takes \"first\", \"last\" or \"never\", got 'soon'"),
        (lambda: jl.mix((A, 1), (A.keep("i"), 1)), ValueError, "mix: source 0 has the fields s, i, source 1 i: keep those that all have"),
        (
            lambda: jl.mix((A, 1), (B.map("i", jl.cast("float32")), 1)), ValueError,
            "mix: field 'i' is int64 () in source 0 and float32 () in source 1: map to one type",
        ),
        (lambda: jl.mix((A, 1), (B.apply(print), 1)), ValueError, "mix: source 1 has a function applied: mix first, then apply"),
        (lambda: jl.Loader(jl.mix((A, 1)), 2, order=jl.shuffled), ValueError, "the order of a mix is given by its shares: leave order= out"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, kind, says):
    """Each wrong mix has its own short message."""
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == says


def test_sources_go_in_any_order_of_fields():
    """The fields of later sources are taken by name."""
    mix = jl.mix((A, 1), (B.keep("i", "s"), 1))
    assert {(s, i) for s, i in flat(jl.Loader(mix, 3))} <= set(itertools.product((0, 1), range(5)))
