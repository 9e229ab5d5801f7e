"""describe: its kernels against NumPy, its passes against the whole array, its tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jitloader as jl
from jitloader import jit
from jitloader.describe import NUMBERS, edges_of, merge, scan, tally

DOUBLES = jit.Array("float64", 1)
EXTREMES = [0.0, -0.0, 5e-324, 1e300, -1e300, math.nan, math.inf, -math.inf, 1.0]
chunks = st.lists(st.lists(st.one_of(st.floats(-100, 100), st.sampled_from(EXTREMES)), max_size=20), max_size=5)


@pytest.mark.parametrize("plain", [False, True])
def test_chunks_add_up_to_the_whole(plain: bool) -> None:
    """Scanned in chunks and merged, any numbers have NumPy's count, extent, mean and std of their finite part."""
    look = scan if plain else jit.load(scan, [DOUBLES, DOUBLES])

    @settings(max_examples=60, deadline=None)
    @example([[math.nan], [], [3.25, math.inf]])
    @given(chunks)
    def check(parts: list[list[float]]) -> None:
        found = []
        for k, part in enumerate(parts):
            numbers = np.zeros(len(NUMBERS))
            with np.errstate(all="ignore"):
                look(np.array(part, float), numbers)
            found.append((k, len(part), numbers))
        made = merge(found[::-1])
        whole = np.array([v for part in parts for v in part], float)
        finite = whole[np.isfinite(whole)]
        assert (made.count, made.finite, made.nan) == (whole.size, finite.size, np.isnan(whole).sum())
        if not finite.size:
            assert math.isnan(made.mean) and math.isnan(made.std) and made.low > made.high
            return
        assert (made.low, made.high) == (finite.min(), finite.max())
        scale = np.abs(finite).max()
        mean = math.fsum(finite / finite.size)
        assert abs(made.mean - mean) <= 1e-12 * scale + 5e-324
        if scale < 1e100:
            std = math.sqrt(math.fsum((finite - mean) ** 2) / finite.size)
            assert abs(made.std - std) <= 1e-7 * scale

    check()


@pytest.mark.parametrize("plain", [False, True])
def test_bins_hold_what_lies_between_their_edges(plain: bool) -> None:
    """Each finite number is in the one bin whose edges hold it, whatever its size."""
    count = tally if plain else jit.load(tally, [DOUBLES, DOUBLES, jit.Array("int64", 1)])

    @settings(max_examples=60, deadline=None)
    @example([-1e308, 1e308, 0.5], False)
    @example([0.0, 5e-324], False)
    @example([0.0, -5e-324], False)
    @given(st.lists(st.one_of(st.floats(-100, 100), st.sampled_from(EXTREMES)), min_size=1, max_size=40), st.booleans())
    def check(values: list[float], whole: bool) -> None:
        x = np.array([math.floor(v) if whole and math.isfinite(v) else v for v in values], float)
        finite = x[np.isfinite(x)]
        if not finite.size:
            return
        edges = edges_of(finite.min(), finite.max(), whole)
        found = np.zeros(edges.size - 1, np.int64)
        with np.errstate(all="ignore"):
            count(x, edges, found)
        wanted = [0] * found.size
        for v in finite:
            wanted[max(k for k in range(found.size) if edges[k] <= v)] += 1
        assert found.tolist() == wanted

    check()


def test_fields_of_all_kinds() -> None:
    """One pass serves bools, integers, halves, the other byte order, text (no numbers) and rows that vary; over many
    chunks it gives what NumPy gives of the whole."""
    n = 3000
    random = np.random.default_rng(3)
    offsets = np.cumsum(np.r_[0, random.integers(0, 9, n)])
    values = random.integers(0, 500, offsets[-1]).astype("uint16")
    image = random.integers(0, 256, (n, 6, 40)).astype("uint8")
    x = random.standard_normal((n, 50)).astype(">f4")
    x[5, 7], x[6, 8] = np.nan, -np.inf
    half, flag, text = random.random(n).astype("float16"), random.random(n) > 0.5, np.full(n, "word")
    data = jl.Dataset(image=image, x=x, half=half, flag=flag, text=text, tokens=jl.ragged(values, offsets))
    found = data.map("tokens", jl.pad_to_longest(mask="mask")).describe()

    assert list(found) == ["image", "x", "half", "flag", "text", "tokens", "mask"]
    assert found["text"] is None
    assert (found["x"].nan, found["x"].inf, found["mask"].mean) == (1, 1, 1.0)
    for name, whole in {"image": image, "x": x, "half": half, "flag": flag, "tokens": values}.items():
        whole = whole.reshape(-1).astype(float)
        finite = whole[np.isfinite(whole)]
        made = found[name]
        assert made.count == whole.size
        assert (made.min, made.max) == (finite.min(), finite.max())
        assert np.allclose([made.mean, made.std], [finite.mean(), finite.std()], rtol=1e-12)
        assert made.histogram.tolist() == np.histogram(finite, made.edges)[0].tolist()


def test_nothing_and_constants() -> None:
    """No rows, rows of nothing, and a column of one value."""
    found = jl.Dataset(x=np.full((7, 2), 0.1), y=np.zeros((7, 0))).describe()
    assert (found["x"].mean, found["x"].std, found["x"].histogram.tolist()) == (0.1, 0.0, [14])
    assert found["y"].count == 0 and math.isnan(found["y"].mean)
    empty = jl.Dataset(x=np.zeros((0, 2))).describe()
    assert empty["x"].count == 0 and repr(empty).startswith("0 rows\n")


def test_stages_are_described_too() -> None:
    """What is described is what a batch holds; a row that fails is named."""
    data = jl.Dataset(x=np.array([1, 2, 3]))
    assert data.map("x", jl.lookup([0.5, 1.5, 2.5, 3.5])).describe()["x"].mean == 2.5
    with pytest.raises(jl.PipelineError, match="'lookup.2.' on field 'x', row 1"):
        data.map("x", jl.lookup([0.5, 1.5])).describe()
    with pytest.raises(jl.PipelineError, match="^describe runs a row at a time: take it before apply"):
        data.apply(lambda batch: batch).describe()


def test_html_is_safe_and_told_in_words() -> None:
    """Names are escaped, and each histogram says in words what it shows."""
    html = jl.Dataset({"<b>": np.array([0, 1, 1])}).describe()._repr_html_()

    assert "<b>" not in html and "&lt;b&gt;" in html
    assert "<title>-0.5 to 0.5: 1; 0.5 to 1.5: 2</title>" in html
