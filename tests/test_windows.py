"""Windows against a plain twin: ends, groups, strides, steps, padding, masks, standardising, orders, errors."""

import math
import re

import naive_access as naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_access import interpreted

import jitloader as jl
from jitloader.windows import bounds_of

DTYPES = ["uint8", "uint16", "uint32", "int64", "float32", "bool"]
many = settings(deadline=None, max_examples=250)


def series(n, dtype="int64", shape=()):
    """Rows of which no two neighbours are alike."""
    return (np.arange(n * math.prod(shape)).reshape(n, *shape) % (2 if dtype == "bool" else 251)).astype(dtype)


@st.composite
def problems(draw):
    """An array and arguments of `windows` that give at least one window."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
    n = sum(lengths)
    array = series(n, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (2,), (1, 3), (0,)])))
    steps = draw(st.booleans())
    slices = {}
    for name in draw(st.sampled_from(["x", "xy", "xyz"])):
        start = draw(st.integers(-3, 3))
        slices[name] = slice(start, start + draw(st.integers(1, 4)), draw(st.integers(1, 2)) if steps else None)
    given = {"stride": draw(st.integers(1, 4)), "step": draw(st.integers(1, 3)) if steps else 1}
    if draw(st.booleans()):
        assume(0 not in lengths or len(lengths) + 1 != sum(lengths))  # they might be marks
        given["groups"] = np.cumsum([0, *lengths])
    low = min([0, *(s.start for s in slices.values())])
    last = max(range(s.start, s.stop, s.step or 1)[-1] for s in slices.values())
    span = 1 + given["step"] * (last - low)
    for side in ("pad_start", "pad_end"):
        given[side] = draw(st.integers(0, span - 1)) if draw(st.booleans()) else 0
    given["pad_value"] = draw(st.sampled_from([0, 1] if steps else [0, 1, None]))
    return array, slices, given


@many
@given(problems())
def test_windows_equal_the_plain_twin(problem):
    """Fields, masks, group numbers and the count of unused rows are those of the definition, whatever is padded."""
    array, slices, given = problem
    expected = naive.windows(array, slices, **given)
    if not expected:
        with pytest.raises(ValueError, match="a window spans"):
            jl.windows(array, **slices, **given)
        return

    data = jl.Dataset(jl.windows(array, mask=True, group_field="g", **slices, **given))
    with interpreted():
        batch = data[:]._asdict()

    assert len(data) == len(expected)
    for i, (fields, masks, number, _) in enumerate(expected):
        for name, field in fields.items():
            np.testing.assert_array_equal(batch[name][i], field)
            assert batch[name].dtype == array.dtype
            assert batch[f"{name}_mask"][i].tolist() == masks[name]
        assert batch["g"][i] == number
    unused = len(array) - len(set().union(*(rows for *_, rows in expected)))
    assert data.sources[next(iter(slices))].name == (
        f"windows ({unused:,} of {len(array):,} rows in none)" if unused else "windows"
    )


TRADE = np.random.default_rng(3).normal(size=(60, 3)).astype("float32")
COMPILED = [
    pytest.param(series(40), {"x": slice(0, 5), "y": slice(5, 7)}, {}, id="plain"),
    pytest.param(series(40, "uint16"), {"x": slice(0, 5), "y": slice(1, 6)}, {"groups": [0, 13, 13, 40]}, id="tokens"),
    pytest.param(
        TRADE, {"x": slice(-4, 0), "y": slice(0, 2)}, {"pad_start": 4, "pad_end": 1, "stride": 3}, id="padded"
    ),
    pytest.param(TRADE, {"x": slice(-3, 1)}, {"pad_start": 3, "pad_value": None, "groups": [0, 20, 60]}, id="repeated"),
    pytest.param(series(30), {"x": slice(-3, 1)}, {"pad_start": 3, "pad_value": None}, id="repeated-numbers"),
    pytest.param(TRADE, {"x": slice(0, 8, 2)}, {"step": 2, "stride": 2, "groups": [0, 25, 60]}, id="dilated"),
    pytest.param(TRADE[::-2, 1:], {"x": slice(0, 5)}, {"pad_end": 4}, id="strided-source"),
    pytest.param(TRADE.astype("float16"), {"x": slice(0, 4)}, {"pad_start": 2, "pad_value": 1.5}, id="float16"),
]


@pytest.mark.parametrize("array, slices, given", COMPILED)
def test_an_epoch_holds_each_window_once(array, slices, given):
    """Compiled, shuffled and kept in a list, batches hold every window of the twin once; data[i] is the same sample."""
    expected = naive.windows(array, slices, **given)
    fields = jl.windows(array, group_field="g", **slices, **given)
    fields["i"] = jl.records(np.arange(len(expected)))
    data = jl.Dataset(fields)

    batches = list(jl.Loader(data, 7, shuffle=True, seed=1))

    seen = []
    for batch in batches:
        for k, i in enumerate(batch.i.tolist()):
            seen.append(i)
            for name, field in expected[i][0].items():
                np.testing.assert_array_equal(getattr(batch, name)[k], field)
            assert batch.g[k] == expected[i][2]
    assert sorted(seen) == list(range(len(expected)))
    for i in (0, len(expected) - 1):
        for name, field in expected[i][0].items():
            np.testing.assert_array_equal(getattr(data[i], name), field)


def test_a_repeated_first_frame_goes_on_through_stages():
    """Frames that stand in for those before an episode pass later stages like any others, transposed or cropped too."""
    frames = series(20, "uint8", (6, 5))
    given = {"pad_start": 2, "pad_value": None, "groups": [0, 3, 20]}
    data = jl.Dataset(jl.windows(frames, x=slice(-2, 1), **given))
    plain = np.stack([f["x"] for f, *_ in naive.windows(frames, {"x": slice(-2, 1)}, **given)])

    scaled = data.map("x", jl.channels_last(), jl.scale())[:].x
    with interpreted():
        cut = data.map("x", jl.center_crop((2, 4), axes=(0, 1)))[:].x

    np.testing.assert_array_equal(scaled, (plain.transpose(0, 2, 3, 1) / 255).astype("float32"))
    np.testing.assert_array_equal(cut, jl.Dataset(x=plain).map("x", jl.center_crop((2, 4), axes=(0, 1)))[:].x)


def test_a_filled_start_goes_on_through_stages():
    """What stands before the start passes later stages: 0 becomes -mean / std."""
    data = jl.Dataset(jl.windows(series(9), x=slice(-2, 1), pad_start=2)).map("x", jl.normalize(1, 2))

    assert data[[0, 1]].x.tolist() == [[-0.5, -0.5, -0.5], [-0.5, -0.5, 0.0]]


def test_marks_and_offsets_are_the_same_groups():
    """A mark a row, a number or a string, parts rows where it changes. What may be both marks and offsets is refused, and
    so are flags, which end episodes."""
    for marks in ([7, 7, 2, 2, 2, 7], list("aabbba"), np.array([0, 0, 1, 1, 1, 6]).astype(str)):
        assert bounds_of(marks, 6).tolist() == [0, 2, 5, 6]
    assert bounds_of(np.array([0, 2, 5, 5, 6], "uint64"), 6).tolist() == [0, 2, 5, 5, 6]
    assert bounds_of([0, 1, 3], 3).tolist() == [0, 1, 3]
    with pytest.raises(
        ValueError, match="6 integers from 0 to 6 may be a mark a row or offsets with empty groups: give"
    ):
        bounds_of([0, 0, 1, 1, 1, 6], 6)
    with pytest.raises(TypeError, match=r"got flags: give jl.episodes\(flags\), which end at them$"):
        bounds_of([False, True, False, False, False, True], 6)


def test_many_windows_open_without_a_list():
    """1e9 windows are described by an entry or two a group, not one a window."""
    tokens = np.broadcast_to(np.uint16(5), 10**9)
    fields = jl.windows(tokens, groups=np.arange(0, 10**9 + 1, 10**6), x=slice(0, 8), y=slice(1, 9))
    held = {id(p): p.nbytes for s in fields.values() for p in s.params if isinstance(p, np.ndarray)}

    assert len(jl.Dataset(fields)) == 1000 * (10**6 - 8)
    assert sum(held.values()) < 20_000


# -- several arrays ---------------------------------------------------------------------------------------------------


def test_several_arrays_share_windows():
    """Each slice is a field of each array, or of the one it names; masks come once a slice."""
    price, load = series(12, "float32", (2,)), series(12, "uint8")
    given = {"past": slice(0, 4), "next": ("load", slice(4, 6)), "pad_start": 1, "mask": True}

    data = jl.Dataset(jl.windows({"price": price, "load": load}, **given))

    assert data.fields == ("price_past", "load_past", "next", "past_mask", "next_mask")
    row = data[3]
    np.testing.assert_array_equal(row.price_past, price[2:6])
    np.testing.assert_array_equal(row.load_past, load[2:6])
    np.testing.assert_array_equal(row.next, load[6:8])


def test_several_files_are_one_stream(tmp_path):
    """Token files given as a list are read in place, and no window crosses from one to the next."""
    parts = []
    for k, n in enumerate((30, 3, 17)):
        (np.arange(n) + 100 * k).astype("uint16").tofile(tmp_path / f"{k}.bin")
        parts.append(np.memmap(tmp_path / f"{k}.bin", "uint16", "r"))
    data = jl.Dataset(jl.windows(parts, x=slice(0, 4), y=slice(1, 5))).map(("x", "y"), jl.cast("int64"))

    batches = list(jl.Loader(data, 6, shuffle=True))

    x, y = np.concatenate([b.x for b in batches]), np.concatenate([b.y for b in batches])
    starts = [*range(26), *range(200, 213)]
    assert sorted(x[:, 0].tolist()) == starts
    assert x.dtype == np.int64
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(4))
    np.testing.assert_array_equal(y, x + 1)
    assert len(jl.Dataset(jl.windows(parts, groups=[0, 10, 50], x=slice(0, 5)))) == 6 + 16 + 13


# -- the rest of the library over windows -----------------------------------------------------------------------------


def starts_of(batches):
    """The first element of x of each row."""
    return np.concatenate([b.x[:, 0] for b in batches]).tolist()


def test_windows_are_rows_like_any_other():
    """Select, split, take, ranks and resume act on windows."""
    data = jl.Dataset(jl.windows(np.arange(50), groups=[0, 20, 50], x=slice(0, 4)))
    firsts = [*range(17), *range(20, 47)]
    with interpreted():
        assert data[:].x[:, 0].tolist() == firsts
        assert data.select([3, -1, 3])[:].x[:, 0].tolist() == [3, 46, 3]
        assert data.take(5)[:].x[:, 0].tolist() == firsts[:5]
        assert data.take(-5)[:].x[:, 0].tolist() == firsts[-5:]
        left, right = data.split(0.5, 0.5)
        assert sorted([*left[:].x[:, 0], *right[:].x[:, 0]]) == firsts

    shares = [starts_of(jl.Loader(data, 5, shuffle=True, rank=r, world_size=2)) for r in range(2)]
    assert sorted(shares[0] + shares[1]) == firsts
    assert len(shares[0]) == len(shares[1]) == len(firsts) // 2

    whole = starts_of(jl.Loader(data, 5, shuffle=True))
    loader = jl.Loader(data, 5, shuffle=True)
    batches = iter(loader)
    begun = [next(batches) for _ in range(3)]
    other = jl.Loader(data, 5, shuffle=True)
    other.load_state_dict(loader.state_dict())
    assert starts_of(begun) + starts_of(other) == whole


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.8, 0.1, 0.1), (0.3,)])
def test_split_by_group_keeps_groups_whole(fractions):
    """Windows of one series go to one part, and parts come near their shares."""
    lengths = np.random.default_rng(0).integers(0, 30, 80)
    fields = jl.windows(np.arange(lengths.sum()), groups=np.cumsum([0, *lengths]), group_field="g", x=slice(0, 4))
    data = jl.Dataset(fields)

    parts = data.split(*fractions, groups="g")

    held = [set(part[:].g.tolist()) for part in parts]
    assert sum(len(h) for h in held) == len(set.union(*held))
    assert sum(len(p) for p in parts) >= len(data) * sum(fractions) - 30
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * len(data)) <= 60
    if sum(fractions) == 1:
        assert sum(len(p) for p in parts) == len(data)
    again = data.split(*fractions, groups=data[:].g)
    assert [p[:].x.tolist() for p in again] == [p[:].x.tolist() for p in parts]
    assert data.split(*fractions, groups="g", seed=1)[0][:].x.tolist() != parts[0][:].x.tolist()


def test_split_by_group_wants_a_mark_a_row():
    """Marks of another number are an error with both."""
    with pytest.raises(ValueError, match=r"a mark for each of 5 rows, got \(4,\)"):
        jl.Dataset(x=np.arange(5)).split(0.5, groups=[0, 0, 1, 1])


def test_an_error_says_which_window_failed():
    """A token that does not fit names the row, its group, and where in it the window lies."""
    tokens = np.arange(40) * 8  # 256 at row 32
    grouped = jl.Dataset(jl.windows(tokens, groups=[0, 25, 40], x=slice(0, 4))).map("x", jl.cast("uint8"))
    alone = jl.Dataset(jl.windows(tokens, stride=3, x=slice(0, 4))).map("x", jl.cast("uint8"))

    with pytest.raises(jl.PipelineError, match=r"row 26 \(the window from row 4 of group 1 on, array row 29\)"):
        list(jl.Loader(grouped, 8))
    with pytest.raises(jl.PipelineError, match=r"row 10 \(the window from array row 30 on\).*\n.*data\[10\]"):
        list(jl.Loader(alone, 8))
    padded = jl.windows(tokens, groups=[0, 25, 40], stride=2, pad_start=3, x=slice(0, 4))
    with pytest.raises(jl.PipelineError, match=r"the window from row 5 of group 1 on, array row 30\)"):
        jl.Dataset(padded).map("x", jl.cast("uint8"))[17]


# -- standardise by a slice -------------------------------------------------------------------------------------------


@many
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
def test_standardize_by_equals_the_plain_twin(past, following, shape, dtype, seed):
    """The first field's own statistics, channel by channel, are applied to all fields."""
    source = np.random.default_rng(seed)
    array = (source.normal(size=(past + following, *shape)) * 50 + 60).clip(0, 250).astype(dtype)
    data = jl.Dataset(jl.windows(array, past=slice(0, past), next=slice(past, past + following)))
    a, b = naive.standardize(array[:past], array[past:])

    with interpreted():
        found = data.map(("past", "next"), jl.standardize_by())[0]

    np.testing.assert_allclose(found.past, a, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.next, b, rtol=1e-4, atol=1e-4)
    assert found.past.dtype == found.next.dtype == np.float32


def test_standardize_by_compiled_in_batches():
    """Compiled, on the fly in shuffled batches, one to three fields give what the twin gives."""
    cuts = {"a": slice(0, 12), "b": slice(12, 15), "c": slice(15, 16)}
    data = jl.Dataset({**jl.windows(TRADE, **cuts), "i": jl.records(np.arange(45))})
    for fields in (("a",), ("a", "b"), ("a", "b", "c")):
        for batch in jl.Loader(data.map(fields, jl.standardize_by()), 16, shuffle=True):
            for k, i in enumerate(batch.i):
                plain = naive.standardize(*(TRADE[i:][cuts[name]] for name in fields))
                for name, field in zip(fields, plain, strict=True):
                    np.testing.assert_allclose(getattr(batch, name)[k], field, rtol=2e-5, atol=2e-5)


def test_standardize_by_known_rows_alone():
    """With a mask, rows before the series began do not count."""
    given = {"past": slice(-5, 0), "next": slice(0, 1), "pad_start": 4, "mask": True}
    data = jl.Dataset(jl.windows(TRADE, **given)).map(("past", "next", "past_mask"), jl.standardize_by(masked=True))

    batch = data[:]

    for t in range(1, 12):
        known = min(t, 5)
        a, b = naive.standardize(TRADE[t - known : t], TRADE[t : t + 1])
        np.testing.assert_allclose(batch.past[t - 1][5 - known :], a, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(batch.next[t - 1], b, rtol=2e-5, atol=2e-5)


def test_standardize_by_constants_and_nan():
    """A constant channel becomes exactly 0; a NaN makes its own channel NaN alone; no known row changes nothing."""
    array = np.full((3, 6, 3), 0.1)
    array[:, :, 1] = np.arange(6)
    array[0, 2, 2] = np.nan
    data = jl.Dataset(x=array)

    found = data.map("x", jl.standardize_by())[:].x
    with interpreted():
        masked = jl.Dataset(x=array, m=np.zeros((3, 6), bool)).map(("x", "m"), jl.standardize_by(masked=True))[:].x

    assert (found[:, :, 0] == 0).all()
    assert (found[1:, :, 2] == 0).all()
    assert np.isnan(found[0, :, 2]).all()
    np.testing.assert_allclose(found[:, :, 1], np.tile((np.arange(6) - 2.5) / np.arange(6).std(), (3, 1)))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(masked, array)


def test_standardize_by_refuses_what_does_not_agree():
    """Other channels, a mask of another length, strings, a negative eps."""
    data = jl.Dataset(a=np.zeros((2, 4, 3)), b=np.zeros((2, 4, 2)), m=np.zeros((2, 3), bool), s=np.array(["x", "y"]))
    with pytest.raises(jl.PipelineError, match="alike but for the first axis; got"):
        data.map(("a", "b"), jl.standardize_by())
    with pytest.raises(jl.PipelineError, match=r"a bool mask \(4,\)"):
        data.map(("a", "m"), jl.standardize_by(masked=True))
    with pytest.raises(jl.PipelineError, match="takes numbers"):
        data.map("s", jl.standardize_by())
    with pytest.raises(jl.PipelineError, match="at least one row"):
        jl.Dataset(a=np.zeros((2, 0, 3))).map("a", jl.standardize_by())
    with pytest.raises(ValueError, match="eps"):
        jl.standardize_by(eps=-1.0)


# -- subsequences -----------------------------------------------------------------------------------------------------


@many
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(1, 5), st.booleans())
def test_sequences_hold_each_row_once(lengths, length, pad):
    """Subsequences hold each row of each episode once, in order; without padding what is left over is in none."""
    assume(0 not in lengths or len(lengths) + 1 != sum(lengths))  # they might be marks
    offsets = np.cumsum([0, *lengths])
    rows = np.arange(offsets[-1])
    expected = []
    for a, b in zip(offsets[:-1], offsets[1:], strict=True):
        runs = [list(range(t, min(t + length, b))) for t in range(a, b, length)]
        expected += [run for run in runs if pad or len(run) == length]
    if not expected:
        with pytest.raises(ValueError, match=f"spans {length} rows, the longest group has {max(lengths)}"):
            jl.sequences(rows, length, groups=offsets, pad=pad)
        return
    given = {"row": rows, "pair": np.stack([rows, -rows], 1)}

    data = jl.Dataset(jl.sequences(given, length, groups=offsets, pad=pad, pad_value=7))
    with interpreted():
        batch = data[:]

    for i, run in enumerate(expected):
        assert batch.row[i].tolist() == run + [7] * (length - len(run))
        assert batch.pair[i, : len(run), 1].tolist() == [-t for t in run]
        if pad:
            assert batch.mask[i].tolist() == [True] * len(run) + [False] * (length - len(run))
    assert len(data) == len(expected)
    assert ("mask" in data.fields) == pad


def test_sequences_may_overlap():
    """With a stride below their length subsequences share rows, as burn-in needs."""
    data = jl.Dataset(jl.sequences(np.arange(7), 4, stride=2, pad=False))

    assert data[:].sequence.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "needs a field"),
        ({"x": slice(0, 13)}, "a window spans 13 rows, the series has 12"),
        ({"x": slice(0, 5), "groups": [0, 3, 7, 12], "step": 2}, "a window spans 9 rows, the longest group has 5"),
        ({"x": slice(0, 30), "pad_start": 9, "pad_end": 2}, "spans 30 rows, the longest group has 12 and padding 11"),
        ({"x": slice(0, 2), "groups": [0, 5, 3, 12]}, r"must not fall: offsets[1] = 5, then 3"),
        ({"x": slice(0, 2), "groups": [0, 5, 13]}, "groups has 3 entries: give a mark for each of 12 rows"),
        ({"x": slice(0, 2), "groups": [0.0, 5.0, 12.0]}, "integer offsets from 0 to 12"),
        ({"x": slice(0, 2), "groups": np.zeros((12, 1))}, "groups must be 1-D"),
        ({"x": slice(0, 2), "stride": 0}, "stride must be a whole number of at least 1, got 0"),
        ({"x": slice(0, 2), "step": 1.0}, "step must be a whole number of at least 1, got 1.0"),
        ({"x": slice(0, 2), "pad_start": True}, "pad_start must be a whole number of at least 0, got True"),
        ({"x": slice(0, 2), "pad_start": 2}, "pad_start must be below the 2 rows that a window spans, got 2"),
        ({"x": slice(0, 4, 2), "pad_start": 1, "pad_value": None}, "takes steps of 1"),
        ({"x": slice(0, None)}, "x must be a slice with an end"),
        ({"x": 3}, "x must be a slice with an end, as slice(0, 60), got 3"),
        ({"x": slice(2, 2)}, "x must run forward and hold an element"),
        ({"x": slice(0, 2, -1)}, "x must run forward"),
        ({"x": ("b", slice(0, 2))}, "names array 'b'; there are ''"),
        ({"x": slice(0, 2), "x_mask": slice(0, 2), "mask": True}, "two fields are called 'x_mask'"),
        ({"x": slice(0, 2), "group_field": "x"}, "two fields are called 'x'"),
    ],
)
def test_bad_input_of_windows(given, words):
    """Each mistake is one short ValueError that says what came and what is taken."""
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        jl.windows(np.arange(12), **given)
    assert "\n" not in str(caught.value)


def test_bad_arrays_of_windows():
    """Arrays of other lengths, types or layout in a list, of no rows, padded lists, windows of windows are refused."""
    with pytest.raises(ValueError, match="'a' has 4 rows, 'b' has 5 rows"):
        jl.windows({"a": np.arange(4), "b": np.arange(5)}, x=slice(0, 2))
    with pytest.raises(ValueError, match="cannot join int64 .* and float64"):
        jl.windows([np.arange(4), np.arange(4.0)], x=slice(0, 2))
    with pytest.raises(ValueError, match="lie in memory in different ways"):
        jl.windows([np.arange(4), np.arange(8)[::2]], x=slice(0, 2))
    with pytest.raises(ValueError, match="padding takes one array"):
        jl.windows([np.arange(4), np.arange(4)], x=slice(0, 2), pad_start=1)
    with pytest.raises(ValueError, match="the series has 0"):
        jl.windows(np.zeros(0), x=slice(0, 2))
    with pytest.raises(ValueError, match="at least one array"):
        jl.windows({}, x=slice(0, 2))
    with pytest.raises(ValueError, match="plain arrays"):
        jl.windows(jl.windows(np.arange(9), x=slice(0, 2))["x"], x=slice(0, 2))
    with pytest.raises(ValueError, match="plain arrays"):
        jl.windows(jl.windows(np.arange(9), groups=[0, 4, 9], x=slice(0, 2))["x"], x=slice(0, 2))
    with pytest.raises(ValueError, match="two fields are called 'a_x'"):
        jl.windows({"a": np.arange(4), "b": np.arange(4)}, x=slice(0, 2), a_x=("a", slice(0, 2)))
    with pytest.raises(ValueError, match="length must be a whole number of at least 1, got 0"):
        jl.sequences(np.arange(4), 0)
    with pytest.raises(ValueError, match="two fields are called 'mask'"):
        jl.sequences({"mask": np.arange(4)}, 2)


def test_next_token_windows_reach_the_last_token():
    """11 tokens and a block of 4 give the 7 starts 0 .. 6, targets are one further, and the last token is a target."""
    data = jl.Dataset(jl.windows(np.arange(11), t=slice(0, 4), y=slice(1, 5)))
    batches = list(jl.Loader(data, 3))
    x, y = np.concatenate([b.t for b in batches]), np.concatenate([b.y for b in batches])

    assert x.shape == (7, 4)
    assert (y == x + 1).all()
    assert sorted(x[:, 0]) == list(range(7))
    assert y.max() == 10


def test_data_shorter_than_the_window_is_an_error_with_both_numbers():
    """The rows that a window needs, and those that the longest sequence has."""
    with pytest.raises(ValueError, match="9.*5"):
        jl.windows(np.arange(5), t=slice(0, 8), y=slice(1, 9))
    with pytest.raises(ValueError, match="4.*3"):
        jl.windows(np.arange(6), t=slice(0, 4), groups=[0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    "marks",
    [
        [0.0, 0.0, np.nan, np.nan],
        np.array(["2020", "2020", "NaT", "NaT"], "M8[D]"),
        np.array(["a", "a", np.nan, 1], object),
    ],
)
def test_a_mark_that_is_no_mark_is_refused_everywhere(marks):
    """NaN equals nothing, itself included: neither a group of its own nor one of all of them, but an error with its row."""
    data = jl.Dataset(x=np.arange(4))
    flags = {"reward": np.zeros(4), "terminated": np.zeros(4, bool), "truncated": np.zeros(4, bool)}
    for use in (
        lambda: jl.windows(np.arange(4), groups=marks, x=slice(0, 1)),
        lambda: jl.sequences(np.arange(4), 1, groups=marks),
        lambda: jl.transitions(obs=np.arange(4), action=np.arange(4), groups=marks, **flags),
        lambda: data.split(0.5, 0.5, groups=marks),
    ):
        with pytest.raises(ValueError, match="groups: row 2 has (nan|NaT) for a mark"):
            use()
