"""Numbers are right: to the last place where they are computed, to the last bit where they are moved, or refused."""

import math
from fractions import Fraction

import numpy as np
import pytest

import jitloader as jl


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
