"""Numbers are right: to the last place where they are computed, to the last bit where they are moved, or refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jitloader as jl
from jitloader.spec import Spec
from jitloader.stages import levels


def raw(dtype, shape, seed=0):
    """Any bits: of floats every kind, subnormal, infinite, NaN with payloads."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(n), dtype).reshape(shape).copy()


MEANS, STDS = [0.0, 123.675, -3e-5, 1e30], [1.0, 58.395, 7e-4, 3e25]


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i4"])
def test_normalize_is_within_an_ulp(dtype):
    """(x - mean) / std is within an ulp of what wider numbers give, rounded, for ordinary numbers and for any bits."""
    draw = np.random.default_rng(1)
    x = raw(dtype, (20_000, 4))
    if x.dtype.kind == "f":
        x[: len(x) // 2] = draw.normal(0, 1, (len(x) // 2, 4)) * np.array(STDS) + MEANS
    got = jl.Dataset(x=x).map("x", jl.normalize(MEANS, STDS))[:].x
    with np.errstate(all="ignore"):
        wanted = ((x.astype(np.longdouble) - MEANS) / np.array(STDS)).astype(got.dtype)
        near = abs(got - wanted) <= np.spacing(np.minimum(abs(wanted), np.finfo(got.dtype).max))
        if dtype == "f8":  # x - mean is rounded once, and rounded again by the division
            near |= abs(got - wanted) <= 2 * np.spacing(abs(wanted))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    assert (near | same).all()


LEVELS = {"u1": np.arange(0, 256, dtype="u1"), "i1": np.arange(-128, 128, dtype="i1")}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["u1", "i1"]),
    st.one_of(st.integers(-300, 300), st.floats(-300, 300), st.floats(-1e30, 1e30)),
    st.one_of(st.integers(1, 300), st.floats(1e-3, 1e3), st.floats(1e-300, 1e300)),
)
def test_normalize_of_all_8_bit_numbers(dtype, mean, std):
    """Every 8-bit number gives the bits of (x - mean) * (1 / std) in float64, rounded once, whichever way is taken."""
    x = LEVELS[dtype]
    with np.errstate(all="ignore"):
        wanted = ((x.astype(np.float64) - mean) * (1.0 / np.float64(std))).astype(np.float32)
        bound = jl.normalize(mean, std).bind(Spec(x.dtype, ()))
        made = [np.float32(bound.kernel(int(v), *(float(e) for e in bound.elements))) for v in x]
    assert (np.array(made, np.float32).view("u4") == wanted.view("u4")).all()


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e38, 1e38), st.floats(-1e38, 1e38))
@example(0.0, 1.0)
@example(-1.0, 1.0)
@example(0.0, 5e-324)
@example(-1e308, 1e308)
def test_scale_of_all_bytes(low, high):
    """Every byte gives the bits of the float64 formula, rounded once; 0 gives `low` and 255 `high`."""
    if not low < high:
        low, high = high, np.nextafter(low, np.inf).item() if low == high else low
    x = LEVELS["u1"].astype(np.float64)
    with np.errstate(all="ignore"):
        part = x / 255.0
        wanted = (low * (1.0 - part) + high * part if (low, high) != (0, 1) else part).astype(np.float32)
        bound = jl.scale(low, high).bind(Spec(np.dtype("u1"), ()))
        made = np.array([np.float32(bound.kernel(int(v), *bound.params)) for v in x], np.float32)
        assert made[0] == np.float32(low) and made[-1] == np.float32(high)
    assert (made.view("u4") == wanted.view("u4")).all()


def test_scale_by_numbers_of_numpy():
    """Bounds of a narrow dtype do not wrap, and are scaled as the same plain numbers are."""
    x = LEVELS["u1"]
    for dtype in (np.uint8, np.float16, np.float64):
        assert (jl.scale(dtype(1), dtype(5))(x) == jl.scale(1, 5)(x)).all()
        assert jl.scale(dtype(1), dtype(5)).bind(Spec(x.dtype, ())).kernel is levels.affine
    assert jl.scale(np.float64(-1e308), np.float64(1e308))(x)[0] == -np.inf


def test_8_bit_numbers_are_computed_in_float32():
    """The narrow way is taken for the usual statistics, compiled as in plain Python, and not where it does not pay."""
    x = LEVELS["u1"].reshape(4, 1, 8, 8)
    for stage in (jl.scale(), jl.scale(-1, 1), jl.normalize(33.318, 78.567), jl.normalize([[[127.5]]], [[[64]]])):
        data = jl.Dataset(x=x).map("x", stage)
        assert stage.bind(Spec(x.dtype, (1, 8, 8))).kernel is levels.affine
        compiled, plain = data[:].x, np.stack([data[i].x for i in range(4)])
        assert (compiled.view("u4") == plain.view("u4")).all() and not jl.Loader(data, 2).check(4).differences
    channels = jl.normalize([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    assert channels.bind(Spec(np.dtype("u1"), (3, 8, 8))).kernel is levels.affine  # a plane has one mean
    assert channels.bind(Spec(np.dtype("u1"), (8, 8, 3))).kernel is not levels.affine
    for dtype in ("u2", "f4", "?"):
        assert jl.normalize(1, 2).bind(Spec(np.dtype(dtype), (8,))).kernel is not levels.affine


def test_a_map_that_float32_misses_stays_in_float64():
    """What `single` gives has been compared for all values: one bit elsewhere and it gives nothing."""
    slope, zero = np.float64(1 / 58.395), np.float64(123.675)
    exact = lambda x: (x - zero) * slope  # noqa: E731
    assert levels.single(np.dtype("u1"), exact, slope, zero) is not None
    for k in (0, 77, 255):
        off = lambda x, k=k: np.where(x == k, np.nextafter(np.float32(exact(x)), np.float32(9)), exact(x))  # noqa: E731
        assert levels.single(np.dtype("u1"), off, slope, zero) is None
    assert levels.single(np.dtype("u1"), exact, np.float64(np.inf), zero) is None


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_moved_bits_are_kept_compiled(dtype):
    """A kernel that moves numbers keeps each bit, of NaN too; and one that has nothing to do to a number leaves it."""
    x = raw(dtype, (4_000, 6))
    words = f"u{x.itemsize}"
    data = jl.Dataset(x=x)
    assert (data[:].x.view(words) == x.view(words)).all()
    assert (data.map("x", jl.random_flip(1.0, axis=0))[:].x.view(words) == x[:, ::-1].copy().view(words)).all()
    clipped, filled = data.map("x", jl.clip(-math.inf, math.inf))[:].x, data.map("x", jl.fill_nan(0))[:].x
    number = ~np.isnan(x)
    assert (clipped.view(words) == x.view(words))[number].all() and np.isnan(clipped[~number]).all()
    assert (filled.view(words) == x.view(words))[number].all() and (filled[~number] == 0).all()


INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
EDGES = sorted(
    {e + d for name in INTEGERS for e in (int(np.iinfo(name).min), int(np.iinfo(name).max)) for d in (-1, 0, 1)}
)


@pytest.mark.parametrize("target", [*INTEGERS, "?"])
def test_cast_keeps_a_value_or_refuses_it(target):
    """At the edges of every integer dtype, from integers and floats: the same number, or the error that names it."""
    low, high = (0, 1) if target == "?" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
    sources = {name: [e for e in EDGES if np.iinfo(name).min <= e <= np.iinfo(name).max] for name in INTEGERS}
    for name in ("f4", "f8"):
        sources[name] = [*map(float, EDGES), math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e300]
    for source, values in sources.items():
        with np.errstate(over="ignore"):
            x = np.array(values).astype(source) if source[0] == "f" else np.array(values, source)
        data = jl.Dataset(x=x).map("x", jl.cast(target))
        if target == "?":  # as in NumPy, whether a number is not zero
            assert [bool(data[row].x) for row in range(len(x))] == [bool(v) for v in x.tolist()]
            continue
        for row, value in enumerate(x.tolist()):
            fits = math.isfinite(value) and low <= int(value) <= high
            try:
                found = data[row].x
            except jl.PipelineError as error:
                assert not fits and f"does not fit {np.dtype(target)}" in str(error), (source, value)
            else:
                assert fits and int(found) == int(value), (source, value)


@pytest.mark.parametrize("source, target", [("f8", "i8"), ("i8", "u1")])
def test_cast_refuses_compiled(source, target):
    """The compiled cast takes and refuses what the plain one does."""
    info = np.iinfo(target)
    edges = [
        v
        for v in (int(info.min) - 1, int(info.min), int(info.max), int(info.max) + 1, 0, -1)
        if source == "f8" or abs(v) < 2**63
    ]
    x = np.array([float(v) for v in edges] + [math.nan, math.inf, -math.inf, -0.0] if source == "f8" else edges, source)
    data = jl.Dataset(x=x).map("x", jl.cast(target))

    def ends(read):
        try:
            return int(np.ravel(read().x)[0])
        except jl.PipelineError as error:
            return str(error).splitlines()[0]

    assert [ends(lambda row=row: data[[row]]) for row in range(len(x))] == [
        ends(lambda row=row: data[row]) for row in range(len(x))
    ]


@pytest.mark.parametrize("kind", ["ordinary", "far from zero", "cancelling", "tiny", "large integers"])
def test_statistics_against_exact_sums(kind):
    """Mean and std against rational arithmetic, where naive sums lose all digits."""
    draw = np.random.default_rng(3)
    x = {
        "ordinary": draw.normal(3, 2, 3000),
        "far from zero": 1e9 + draw.normal(0, 1e-3, 3000),
        "cancelling": np.where(
            np.arange(3000) % 3 == 1, draw.normal(0, 1, 3000), np.where(np.arange(3000) % 3, -1e16, 1e16)
        ),
        "tiny": draw.normal(0, 1e-310, 3000),
        "large integers": draw.integers(2**52, 2**53, 3000),
    }[kind]
    exact = [Fraction(v) for v in x.tolist()]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact)
    std = math.sqrt(variance) if kind != "tiny" else math.sqrt(variance * 2**2000) / 2**1000
    found = jl.Dataset(x=x).statistics("x")

    assert abs(float(found.mean) - float(mean)) <= 2e-15 * np.abs(x.astype("f8")).mean()
    if kind != "tiny":  # squares of subnormal numbers are below all numbers
        rounded = float(np.spacing(abs(float(mean)))) / std  # squares are taken round the mean as float64 has it
        assert abs(float(found.std) / std - 1) < 1e-12 + rounded**2
    assert (float(found.min), float(found.max)) == (float(min(exact)), float(max(exact)))


@pytest.mark.parametrize("rows", [4, 1 << 17])  # in one chunk, in several
def test_statistics_give_nan_where_no_number_is_right(rows):
    """Columns that hold NaN, infinities or numbers whose sums overflow: never a finite mean, a wrong sign or an error."""
    odd = {
        (math.nan, 0.0): (math.nan, math.nan),
        (math.nan, math.inf): (math.nan, math.nan),
        (math.inf, 0.0): (0.0, math.inf),
        (-math.inf, math.inf): (-math.inf, math.inf),
        (-math.inf, 1.7e308): (-math.inf, 1.7e308),
        (1.7e308, 1.7e308): (0.0, 1.7e308),
        (1.7e308, -1.7e308): (-1.7e308, 1.7e308),
        (-1.7e308, math.inf): (-1.7e308, math.inf),
    }
    for first, last in [pair for one in odd for pair in (one, one[::-1])]:
        x = np.zeros(rows)
        x[1], x[-1] = first, last
        data = jl.Dataset(x=x)
        found, told = data.statistics("x"), data.describe()["x"]
        low, high = odd[(first, last)] if (first, last) in odd else odd[(last, first)]
        assert np.array_equal([found.min, found.max], [low, high], equal_nan=True)
        finite = x[np.isfinite(x)]
        mean = math.fsum(finite / finite.size)
        assert (told.min, told.max) == (finite.min(), finite.max())
        assert math.isnan(told.mean) or math.isclose(told.mean, mean, abs_tol=1e292)  # sums may happen to fit
        assert math.isnan(told.std) or not finite.any()
        assert math.isnan(found.std)
        assert math.isnan(found.mean) or (finite.size == rows and math.isclose(found.mean, mean, abs_tol=1e292))
    for value in (math.inf, -math.inf, 1.7e308):
        found = jl.Dataset(x=np.full(rows, value)).statistics("x")
        assert (found.mean, found.std, found.min, found.max) == (value, 0, value, value)
