"""Ragged rows against a plain twin: cut, padded, masked, left ragged; in batches of every make; errors."""

import math
import re

import naive_access as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_access import interpreted

import jitloader as jl
from jitloader import jit
from jitloader.compose.program import LAY, lay_rows
from jitloader.ragged import as_rows, lengths

DTYPES = ["uint8", "uint16", "uint32", "int64", "float32"]
many = settings(deadline=None, max_examples=150)


def rows_of(sizes, dtype="int64", shape=()):
    """Values of which no two are alike (within a byte), and their offsets."""
    total = int(sum(sizes))
    values = (1 + np.arange(total * math.prod(shape)).reshape(total, *shape) % 250).astype(dtype)
    return values, np.cumsum([0, *sizes])


@st.composite
def problems(draw):
    """Values, offsets, and how rows are cut and closed."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    values, offsets = rows_of(sizes, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (2,), (1, 3)])))
    cut = draw(st.sampled_from(["", "truncate", "random"]))
    most = draw(st.integers(1, 6))
    close = draw(st.sampled_from(["", "rows", "longest"]))
    longest = max(sizes) if not cut else min(max(sizes), most)
    length = longest + draw(st.integers(0, 3)) or 1
    return values, offsets, cut, most, close, length, draw(st.integers(1, 5)), draw(st.booleans())


@many
@given(problems(), st.integers(1, 5), st.sampled_from([0, 9]))
def test_batches_equal_the_plain_twin(problem, batch_size, value):
    """Each row is right in any batch, batches are as wide as their longest row, masks and lengths tell."""
    values, offsets, cut, most, close, length, multiple, front = problem
    fields = {"t": jl.ragged(values, offsets), "i": jl.records(np.arange(len(offsets) - 1))}
    data = jl.Dataset(fields)
    if cut:
        data = data.map("t", jl.truncate(most) if cut == "truncate" else jl.random_cut(most))
    beside = {"mask": "m", "lengths": "n", "front": front}
    if close:
        closing = (
            jl.pad_rows(length, value, **beside) if close == "rows" else jl.pad_to_longest(multiple, value, **beside)
        )
        data = data.map("t", closing)

    with interpreted():
        batches = list(jl.Loader(data, batch_size, shuffle=True))

    assert sorted(np.concatenate([b.i for b in batches]).tolist()) == list(range(len(data)))
    for batch in batches:
        whole = [values[offsets[i] : offsets[i + 1]] for i in batch.i]
        sizes = [min(len(row), most) if cut else len(row) for row in whole]
        if close:
            np.testing.assert_array_equal(batch.n, sizes)
            took = [t[m] for t, m in zip(batch.t, batch.m, strict=True)]
        else:
            assert np.diff(batch.t.offsets).tolist() == sizes
            took = as_rows(*batch.t)
        for row, part, size in zip(whole, took, sizes, strict=True):
            begins = range(len(row) - size + 1) if cut == "random" else [0]
            assert any(np.array_equal(row[a : a + size], part) for a in begins)
        if close:
            width = length if close == "rows" else -(-max(sizes) // multiple) * multiple
            expected, mask = naive.pad(took, width, value, front)
            np.testing.assert_array_equal(batch.t, expected)
            np.testing.assert_array_equal(batch.m, mask)
            assert batch.t.dtype == values.dtype


SIZES = np.random.default_rng(5).integers(0, 20, 60)
CLOSED = [
    pytest.param((jl.pad_to_longest(4, 3, mask="m", lengths="n"),), (), "uint16", id="longest"),
    pytest.param((jl.truncate(9), jl.pad_rows(12, mask="m", lengths="n", front=True)), (), "int64", id="front"),
    pytest.param((jl.cast("float32"), jl.pad_to_longest(mask="m", lengths="n")), (3,), "uint8", id="vectors"),
]


@pytest.mark.parametrize("stages, shape, dtype", CLOSED)
def test_compiled_batches_equal_interpreted_ones(stages, shape, dtype):
    """Compiled or not, and one row at a time, the same bits come."""
    data = jl.Dataset(t=jl.ragged(*rows_of(SIZES, dtype, shape))).map("t", *stages)

    compiled = list(jl.Loader(data, 16, shuffle=True))
    with interpreted():
        plain = list(jl.Loader(data, 16, shuffle=True))

    for a, b in zip(compiled, plain, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype
    row = data[3]
    assert int(row.n) == row.m.sum() == len(row.t[row.m])


def test_used_buffers_leave_nothing_behind():
    """A mask kept without its field is whole in memory that other batches were in."""
    data = jl.Dataset(t=jl.ragged(*rows_of(SIZES))).map("t", jl.pad_to_longest(8, mask="m", lengths="n")).keep("m", "n")
    loader = jl.Loader(data, 5, shuffle=True)

    for _ in range(3):
        for batch in loader:
            assert batch.m.shape[1] == -(-batch.n.max() // 8) * 8
            np.testing.assert_array_equal(batch.m, np.arange(batch.m.shape[1]) < batch.n[:, None])
            batch.m[:] = True


def test_several_fields_over_the_same_offsets():
    """One pass closes fields of one length together: the same cut, one mask."""
    offsets = np.cumsum([0, *SIZES])
    token, weight = np.arange(offsets[-1]), np.arange(offsets[-1], dtype="float32") / 2
    fields = jl.ragged({"token": token, "weight": weight}, offsets)

    data = jl.Dataset(fields).map(("token", "weight"), jl.random_cut(6), jl.pad_to_longest(4, mask="m"))

    assert data.fields == ("token", "weight", "m")
    for batch in jl.Loader(data, 7, shuffle=True):
        np.testing.assert_array_equal(batch.weight, batch.token / 2)
        assert (np.diff(batch.token)[batch.m[:, 1:]] == 1).all()
        assert batch.m.any(axis=1).sum() == (batch.m.sum(axis=1) > 0).sum()
        assert batch.token.shape == batch.m.shape


def test_fields_over_different_offsets_have_their_own_width():
    """Questions and answers padded by one stage are each as wide as their own longest."""
    fields = {"q": jl.ragged(np.arange(6), [0, 1, 3, 6]), "a": jl.ragged(np.arange(9), [0, 5, 8, 9])}

    with interpreted():
        batch = jl.Dataset(fields).map(("q", "a"), jl.pad_to_longest(mask="m"))[:]

    assert batch.q.tolist() == [[0, 0, 0], [1, 2, 0], [3, 4, 5]]
    assert batch.a.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 0, 0], [8, 0, 0, 0, 0]]
    assert batch.m.sum(axis=1).tolist() == [1, 2, 3]


def test_many_channels_pass_before_and_after_padding():
    """Constants of many channels apply on either side of the padding, to rows of any length."""
    values, offsets = rows_of(SIZES, "float32", (20,))
    mean, std = np.arange(20.0), np.arange(1.0, 21.0)
    expected = ((values.astype(float) - mean) / std).astype("float32")
    rows = as_rows(expected, offsets)
    data = jl.Dataset(t=jl.ragged(values, offsets))

    before = data.map("t", jl.normalize(mean, std), jl.pad_to_longest())
    after = data.map("t", jl.pad_to_longest(), jl.normalize(mean, std))

    np.testing.assert_allclose(before[:].t, naive.pad(rows, 19, 0)[0], rtol=1e-6)
    blank = ((0 - mean) / std).astype("float32")
    with interpreted():
        np.testing.assert_allclose(after[:].t, naive.pad(rows, 19, blank)[0], rtol=1e-6)


def test_stages_that_do_not_fuse_are_refused_on_ragged_rows():
    """Where rows would have to be set down between two stages, the chain is refused and nothing is written."""
    data = jl.Dataset(t=jl.ragged(np.arange(9), [0, 4, 9])).map("t", jl.pad_to_longest(), jl.pad_to_longest())

    with pytest.raises(jl.PipelineError, match="two stages in a row that do not fuse"):
        data[:]


def test_lists_are_packed_once():
    """Rows given as arrays or lists, some empty, by name or alone, are the rows that come."""
    alone = jl.Dataset(t=jl.ragged([np.arange(3.0), np.zeros(0), np.arange(2.0)]))
    named = jl.Dataset(jl.ragged({"id": [[1, 2], [], [3]], "w": [[[0.5, 1.0]] * 2, [], [[2.0, 3.0]]]}))

    assert [alone[i].t.tolist() for i in range(3)] == [[0, 1, 2], [], [0, 1]]
    assert [named[i].id.tolist() for i in range(3)] == [[1, 2], [], [3]]
    assert named[:].w.values.tolist() == [[0.5, 1.0], [0.5, 1.0], [2.0, 3.0]]
    assert named[:].id.values.dtype == np.int64


def test_values_are_referred_to():
    """Nothing is copied: values changed later are the values that come; offsets may leave values out at both ends."""
    values = np.arange(10)
    data = jl.Dataset(t=jl.ragged(values, np.array([2, 5, 5, 8], "uint32")))
    values[2] = 77

    assert [data[i].t.tolist() for i in range(3)] == [[77, 3, 4], [], [5, 6, 7]]


def test_ragged_rows_are_rows_like_any_other(tmp_path):
    """Select, split, take, ranks and resume act on them, over a memory map too."""
    values, offsets = rows_of(SIZES)
    np.save(tmp_path / "values.npy", np.arange(offsets[-1]))
    mapped = np.load(tmp_path / "values.npy", mmap_mode="r")
    data = jl.Dataset(t=jl.ragged(mapped, offsets), i=np.arange(60)).map("t", jl.pad_to_longest(lengths="n"))
    with interpreted():
        picked = data.select([5, -1, 5])[:]
        parts = [part[:] for part in data.split(0.5, 0.5)]
    assert picked.n.tolist() == SIZES[[5, -1, 5]].tolist()
    assert lengths(data.take(-7).sources["t"]).tolist() == SIZES[-7:].tolist()
    assert lengths(data.select([5, -1, 5]).sources["t"]).tolist() == SIZES[[5, -1, 5]].tolist()
    assert sorted(i for part in parts for i in part.i) == list(range(60))
    shares = [list(jl.Loader(data, 4, shuffle=True, rank=r, world_size=2)) for r in range(2)]
    assert sorted(i for share in shares for b in share for i in b.i) == list(range(60))

    whole = list(jl.Loader(data, 4, shuffle=True))
    loader = jl.Loader(data, 4, shuffle=True)
    batches = iter(loader)
    begun = [next(batches) for _ in range(4)]
    other = jl.Loader(data, 4, shuffle=True)
    other.load_state_dict(loader.state_dict())
    for a, b in zip(whole, [*begun, *other], strict=True):
        np.testing.assert_array_equal(a.t, b.t)
    for batch in whole:
        for t, n, i in zip(batch.t, batch.n, batch.i, strict=True):
            np.testing.assert_array_equal(t[:n], np.arange(offsets[i], offsets[i + 1]))


@pytest.mark.parametrize("where, row", [(3, 0), (30, 2)])
def test_a_token_that_does_not_fit_names_its_row(where, row):
    """An id beyond the output dtype is an error with the row, its values' place, and the id."""
    values = np.arange(60)
    values[where] = 70_000
    data = jl.Dataset(t=jl.ragged(values, [0, 20, 25, 60])).map("t", jl.cast("uint16"), jl.pad_to_longest())
    offsets = [0, 20, 25, 60]

    told = rf"row {row} \(values {offsets[row]} to {offsets[row + 1]}\), epoch 0: .*70000"
    with pytest.raises(jl.PipelineError, match=told):
        list(jl.Loader(data, 2))


def test_a_row_too_long_for_its_padding_names_itself():
    """A row of 5 does not fit 4 elements: the row, and both numbers."""
    data = jl.Dataset(t=jl.ragged(np.arange(9), [0, 4, 9])).map("t", jl.pad_rows(4))

    with pytest.raises(jl.PipelineError, match=r"row 1 \(values 4 to 9\), epoch 0: a row of 5 does not fit"):
        list(jl.Loader(data, 2))


@pytest.mark.parametrize(
    "values, offsets, words",
    [
        (np.arange(5), [0, 3, 2, 5], "offsets must not fall: offsets[1] = 3, offsets[2] = 2"),
        (np.arange(5), [0, 6], "offsets run from 0 to 6, 'values' has 5 rows"),
        (np.arange(5), [-1, 3], "offsets run from -1 to 3"),
        (np.arange(5), [0.0, 5.0], "n + 1 integers, got float64 (2,)"),
        (np.arange(5), [[0, 5]], "n + 1 integers, got int64 (1, 2)"),
        (np.arange(5), [], "n + 1 integers"),
        (np.arange(5), None, "'values' is one array of values: give its offsets"),
        ([], None, "an empty list has no dtype"),
        ([np.zeros(2), np.zeros(2, int)], None, "rows must be arrays of one dtype"),
        ([np.zeros((2, 2)), np.zeros((2, 3))], None, "alike but for their length; got float64 (2,), float64 (3,)"),
        ([1, 2], None, "rows must be arrays"),
        ({}, [0, 1], "at least one array"),
        ({"a": np.arange(4), "b": np.arange(5)}, [0, 4], "'a' has 4 rows, 'b' has 5 rows"),
        ({"a": [[1, 2], [3]], "b": [[1], [2, 3]]}, None, "row 0 has 2 elements in 'a', 1 in 'b'"),
        ({"a": [[1, 2]], "b": [[1], [2, 3]]}, None, "'a' has 1 rows, 'b' 2"),
        ({"a": np.arange(4)}, [0, 5], "offsets run from 0 to 5, 'a' has 4 rows"),
    ],
)
def test_bad_input_of_ragged(values, offsets, words):
    """Each mistake is one short ValueError that says what came and what is taken."""
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        jl.ragged(values, offsets)
    assert "\n" not in str(caught.value)


def test_bad_stages_over_ragged_rows():
    """Lengths below 1, rows that are not ragged, and names that are taken are refused where they are linked."""
    data = jl.Dataset(t=jl.ragged(np.arange(5), [0, 3, 5]), x=np.arange(2))
    for make in (jl.truncate, jl.random_cut, jl.pad_rows, jl.pad_to_longest):
        with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
            make(0)
    with pytest.raises(jl.PipelineError, match="takes ragged rows, whose first axis varies; got int64"):
        data.map("x", jl.pad_rows(3))
    with pytest.raises(jl.PipelineError, match="there is a field 'x' already"):
        data.map("t", jl.pad_rows(3, mask="x"))
    with pytest.raises(jl.PipelineError, match="there is a field 'm' already"):
        data.map("t", jl.pad_rows(3, mask="m", lengths="m"))


@given(
    sizes=st.lists(st.integers(0, 9), max_size=20),
    batch=st.integers(1, 7),
    multiple=st.integers(1, 5),
    size=st.integers(1, 3),
    longest=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_laid_end_to_end(sizes, batch, multiple, size, longest):
    """Each run of `batch` rows is as long as its longest, rounded up, or each row as long as it is; none overlap."""
    extents = list(sizes)
    if longest:
        for low in range(0, len(sizes), batch):
            most = -(-max(sizes[low : low + batch]) // multiple) * multiple
            extents[low : low + batch] = [most] * len(sizes[low : low + batch])
    starts = [size * sum(extents[:i]) for i in range(len(extents))]

    found, told = np.zeros((2, len(sizes)), np.int64), np.zeros(2 * len(sizes) + 1, np.int64)
    kernel = jit.load(lay_rows, LAY)
    ends = np.arange(batch, len(sizes) + batch, batch)
    total = kernel(np.array(sizes, np.int64), ends, int(longest), multiple, size, found[0], found[1], told)

    assert found.tolist() == [starts, extents] and total == size * sum(extents)
    batches = [
        x for low in range(0, len(sizes), batch) for x in (starts[low], extents[min(low + batch, len(sizes)) - 1])
    ]
    assert told[: 1 + len(batches)].tolist() == [sum(sizes), *batches]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("applied", [False, True])
def test_batches_before_a_row_that_is_not_there_come_whole(prefetch, applied):
    """Rows are measured before they are filled: a failure there takes no batch before it away."""
    values, offsets = np.arange(3000), np.arange(0, 3003, 3)
    data = jl.Dataset(x=jl.ragged(values, offsets), i=np.arange(1000)).map("x", jl.pad_to_longest(mask="mask"))
    data = data.apply(lambda batch: batch) if applied else data
    order = jl.custom(lambda position, count, seed, epoch: position if position < 500 else 5000)

    found = []
    with pytest.raises(IndexError, match="row 5000 is out of range: the data has 1000 rows"):
        for batch in jl.Loader(data, 64, order=order, prefetch=prefetch):
            found.append((batch.x.copy(), batch.mask.copy(), batch.i.copy()))  # noqa: PERF401 (what came before the error)

    assert len(found) == 7
    x, mask, i = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    assert (x == values[: 7 * 64 * 3].reshape(-1, 3)).all() and mask.all() and (i == np.arange(7 * 64)).all()
