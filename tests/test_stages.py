"""Each stage is what its plain twin says, compiled or not, for any shape and dtype it takes."""

import doctest
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import naive_stages as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import jitloader as jl
from jitloader import rng
from jitloader import stages as st
from jitloader.stages import noise

COPY = ("uint8", "int16", "int32", "int64", "uint64", "float32", "float64", "bool")
NUMBERS = COPY
WHOLE = ("uint8", "int16", "int32", "uint32")
FLOATS = ("float32", "float64")
PIXELS = WHOLE + FLOATS


class Case(NamedTuple):
    """A stage and its twin: exact, or rounded, cut or within an ulp of float32."""

    name: str
    stage: Callable[[tuple[int, ...]], Any]
    twin: Callable[[np.ndarray, int], np.ndarray]
    shapes: str
    dtypes: tuple[str, ...]
    near: str = "exact"


def same(a, b):
    """Whether two arrays have the same dtype, shape and bits; NaN is NaN whatever its payload."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind == "f":
        nan = np.isnan(a) & np.isnan(b)
        a, b = np.where(nan, 0, a), np.where(nan, 0, b)
    return a.tobytes() == b.tobytes()


def check(got, wanted, near):
    """Compare what a stage gives to its unrounded twin."""
    assert got.shape == wanted.shape
    with np.errstate(invalid="ignore", over="ignore"):
        if near == "exact":
            assert same(got, np.asarray(wanted).astype(got.dtype))
        elif got.dtype.kind == "f":
            eps = 1.2e-7 if got.dtype == np.float32 else 1e-13
            np.testing.assert_allclose(got, np.asarray(wanted, np.float64), rtol=eps, atol=eps)
        else:
            error = wanted - got.astype(np.float64)
            low, high = (-0.5, 0.5) if near == "round" else (0.0, 1.0)
            assert (error >= low - 1e-5).all() and (error <= high + 1e-5).all()


def sample(shape, dtype, seed, special=True):
    """A sample over the whole range of its dtype; floats with NaN, infinities, -0.0 and a subnormal among them."""
    draw, kind = np.random.default_rng(seed), np.dtype(dtype)
    if kind.kind == "b":
        return draw.random(shape) < 0.5
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return draw.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    x = (draw.random(shape) * 1.2 - 0.1).astype(kind)
    if special and x.size:
        x.flat[draw.integers(0, x.size, 5)] = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40], kind)
    return x


def shapes(kind):
    """Shapes of a kind of sample: odd sizes, channels first and last, and single axes of length one."""
    small = some.integers(1, 5)
    if kind == "any":
        return some.lists(small, min_size=0, max_size=3).map(tuple)
    if kind == "axis":
        return some.lists(small, min_size=1, max_size=3).map(tuple)
    if kind == "series":
        return some.one_of(some.tuples(some.integers(4, 9)), some.tuples(some.integers(4, 9), small))
    sides = some.integers(5, 8)
    pairs = sides.map(lambda n: (n, n)) if kind == "square" else some.tuples(sides, sides)
    channels = some.sampled_from([(), (1, "last"), (3, "last"), (4, "last"), (1, "first"), (3, "first")])
    return some.tuples(pairs, channels).map(_image)


def _image(drawn):
    size, channels = drawn
    if not channels:
        return size
    n, where = channels
    return (*size, n) if where == "last" else (n, *size)


def fixed(stage, twin):
    """A case whose stage does not depend on the shape."""
    return (lambda shape: stage), twin


def wide(x):
    return x.astype(np.float64)


def float_of(x):
    return np.float64 if x.dtype == np.float64 else np.float32


def log1p(x, key):
    with np.errstate(all="ignore"):
        return np.log1p(wide(x))


def noisy(x, key, std, mean):
    z = [noise.normal(key, k, noise.EDGES, noise.RATIOS) for k in range(x.size)]
    y = wide(x) + (mean + std * np.array(z).reshape(x.shape))
    return y if x.dtype.kind == "f" else y.clip(np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)


def chosen(x, key):
    k, own = naive.picked(key, [1, 1, 2])
    return [lambda: np.flip(x, 0), lambda: naive.shift(x, own, 2, 0, 0), lambda: x][k]()


def mixed(x, key):
    k, own = naive.picked(key, [1, 1, 1])
    return [
        lambda: naive.turn(x, 1),
        lambda: naive.turn(x, rng.randint(own, 0, 4)),
        lambda: naive.brightness(x, own, 0.5, 0.5).astype(x.dtype),
    ][k]()


def applied(x, key):
    k, own = naive.picked(key, [0.5, 0.5])
    return naive.mask(x, own, 3, 1, 0, 0) if k == 0 else x


@st.elementwise
def halved(x):
    return x // 2 if x > 3 else -(x // 3)


@st.stage
def running(src, dst, key):
    for i in range(src.size):
        dst[i] = src[src.size - 1 - i]


CASES = [
    Case("cast", *fixed(st.cast("float32"), lambda x, k: x), "any", NUMBERS),
    Case("normalize", *fixed(st.normalize(3, 0.7), lambda x, k: (wide(x) - 3) / 0.7), "any", NUMBERS, "float"),
    Case("scale", *fixed(st.scale(), lambda x, k: wide(x) / 255), "any", ("uint8",)),
    Case("clip", *fixed(st.clip(0, 1), lambda x, k: x.clip(0, 1)), "any", PIXELS),
    Case("lookup", *fixed(st.lookup(np.arange(256) ** 2), lambda x, k: wide(x) ** 2), "any", ("uint8",)),
    Case("log1p", *fixed(st.log1p(), log1p), "any", NUMBERS, "float"),
    Case("fill_nan", *fixed(st.fill_nan(7), lambda x, k: np.where(x != x, x.dtype.type(7), x)), "any", NUMBERS),
    Case("random_crop", *fixed(st.random_crop(4, 2, 1), lambda x, k: naive.window(x, k, 4, 2, 1)), "image", COPY),
    Case("center_crop", *fixed(st.center_crop(4), lambda x, k: naive.center(x, k, 4)), "image", COPY),
    Case("random_flip", *fixed(st.random_flip(), lambda x, k: naive.flip(x, k, 0.5, naive.spatial(x.shape)[1])), "image", COPY),
    Case("flip axis", *fixed(st.random_flip(axis=0), lambda x, k: naive.flip(x, k, 0.5, 0)), "axis", COPY),
    Case(
        "random_vertical_flip",
        *fixed(st.random_vertical_flip(), lambda x, k: naive.flip(x, k, 0.5, naive.spatial(x.shape)[0])),
        "image",
        COPY,
    ),
    Case(
        "pad",
        lambda shape: st.pad([(k, 2 - k % 3) for k in range(len(shape))], value=1),
        lambda x, k: np.pad(x, [(k, 2 - k % 3) for k in range(x.ndim)], constant_values=1),
        "axis",
        COPY,
    ),
    Case("flatten", *fixed(st.flatten(), lambda x, k: x.reshape(-1)), "any", COPY),
    Case("rotate90(1)", *fixed(st.rotate90(1), lambda x, k: naive.turn(x, 1)), "image", COPY),
    Case("rotate90(-2)", *fixed(st.rotate90(-2), lambda x, k: naive.turn(x, 2)), "image", COPY),
    Case("rotate90(3)", *fixed(st.rotate90(3), lambda x, k: naive.turn(x, 3)), "image", COPY),
    Case("rotate90", *fixed(st.rotate90(), lambda x, k: naive.turn(x, rng.randint(k, 0, 4))), "square", COPY),
    Case("resize", *fixed(st.resize((3, 11)), lambda x, k: naive.resize(x, (3, 11))), "image", PIXELS, "round"),
    Case(
        "resize plain",
        *fixed(st.resize((2, 4), antialias=False), lambda x, k: naive.resize(x, (2, 4), antialias=False)),
        "image",
        PIXELS,
        "round",
    ),
    Case("nearest", *fixed(st.resize((3, 9), "nearest"), lambda x, k: naive.resize(x, (3, 9), "nearest")), "image", COPY),
    Case(
        "random_resized_crop",
        *fixed(
            st.random_resized_crop((4, 3), (0.2, 0.9)),
            lambda x, k: naive.resized_crop(x, k, (4, 3), (0.2, 0.9), (3 / 4, 4 / 3), "bilinear"),
        ),
        "image",
        PIXELS,
        "round",
    ),
    Case(
        "rrc at the centre",
        *fixed(
            st.random_resized_crop(4, (1, 1), (3, 4), "nearest"),
            lambda x, k: naive.resized_crop(x, k, (4, 4), (1, 1), (3, 4), "nearest"),
        ),
        "image",
        COPY,
    ),
    Case(
        "random_erasing",
        *fixed(
            st.random_erasing(0.8, (0.1, 0.6), (0.4, 2), 1),
            lambda x, k: naive.erase(x, k, 0.8, (0.1, 0.6), (0.4, 2), [1]),
        ),
        "image",
        COPY,
    ),
    Case("brightness", *fixed(st.brightness(0.6), lambda x, k: naive.brightness(x, k, 0.4, 1.6)), "any", PIXELS, "exact"),
    Case("contrast", *fixed(st.contrast((0, 3)), lambda x, k: naive.contrast(x, k, 0, 3)), "image", PIXELS, "floor"),
    Case("gaussian_noise", *fixed(st.gaussian_noise(3, 1), lambda x, k: noisy(x, k, 3, 1)), "any", PIXELS, "round"),
    Case("jitter", *fixed(st.jitter(0.5), lambda x, k: noisy(x, k, 0.5, 0)), "series", FLOATS, "float"),
    Case("random_shift", *fixed(st.random_shift(3), lambda x, k: naive.shift(x, k, 3, 0, 0)), "axis", COPY),
    Case("time_mask", *fixed(st.time_mask(3, 2, fill=1), lambda x, k: naive.mask(x, k, 3, 2, 0, 1)), "series", COPY),
    Case("standardize", *fixed(st.standardize_sample(), lambda x, k: naive.standardize(x, k, None, 0)), "any", NUMBERS, "float"),
    Case(
        "standardize axis",
        *fixed(st.standardize_sample(-1, eps=0.1), lambda x, k: naive.standardize(x, k, -1, 0.1)),
        "axis",
        FLOATS,
        "float",
    ),
    Case(
        "choice of moves",
        *fixed(st.random_choice(st.random_flip(1, axis=0), st.random_shift(2), st.pad(((0, 0),)), p=[1, 1, 2]), chosen),
        "one axis",
        COPY,
    ),
    Case("choice", *fixed(st.random_choice(st.rotate90(1), st.rotate90(), st.brightness((0.5, 0.5))), mixed), "square", PIXELS),
    Case("random_apply", *fixed(st.random_apply(st.time_mask(3)), applied), "series", COPY),
    Case("user's value", *fixed(halved, lambda x, k: np.where(x > 3, x // 2, -(x // 3))), "any", ("int16", "int64")),
    Case("user's sample", *fixed(running, lambda x, k: x[::-1]), "one axis", COPY),
]
FINITE = {"resize", "resize plain", "random_resized_crop", "contrast", "standardize", "standardize axis"}  # sums mix all


def of(case):
    """The strategy of a case's shapes."""
    return shapes(case.shapes) if case.shapes != "one axis" else some.tuples(some.integers(1, 9))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@settings(max_examples=25, deadline=None)
@given(data=some.data())
def test_twin(case, data):
    """A stage gives, in plain Python, what its twin gives from first principles."""
    shape, dtype = data.draw(of(case)), data.draw(some.sampled_from(case.dtypes))
    seed, key = data.draw(some.integers(0, 2**32)), data.draw(some.integers(0, 2**64 - 1))
    x = sample(shape, dtype, seed, case.name not in FINITE)

    got = case.stage(shape)(x, key)

    check(got, case.twin(x, rng.subkey(rng.subkey(key, 0), 0)), case.near)


SHAPES = {"any": (5, 3), "axis": (3, 4, 2), "series": (9, 3), "image": (7, 6, 3), "square": (3, 6, 6), "one axis": (8,)}


# The same kernels as others in the list, with other constants: compiled at night.
ALIKE = {"rotate90(-2)", "rotate90(3)", "resize plain", "rrc at the centre", "flip axis", "standardize axis"}
NUMBERED = [
    pytest.param(k, id=c.name, marks=[pytest.mark.nightly] if c.name in ALIKE else []) for k, c in enumerate(CASES)
]


@pytest.mark.parametrize("number", NUMBERED)
def test_compiled(number):
    """A compiled batch has the same bits as each row in plain Python, and the twin's values."""
    case = CASES[number]
    shape, dtype = SHAPES[case.shapes], case.dtypes[number % len(case.dtypes)]
    x = np.stack([sample(shape, dtype, seed, case.name not in FINITE) for seed in range(9)])
    stage = case.stage(shape)
    data = jl.Dataset(x=x).map("x", stage)

    batch = data[np.arange(9)].x

    key = rng.subkey(rng.mix(0), 0)
    for row in range(9):
        assert same(batch[row], data[row].x), row
        check(batch[row], case.twin(x[row], rng.subkey(rng.subkey(key, row), 0)), case.near)


MORE = [  # paths that the cases above do not compile: 5 channels, integers, other axes
    (st.resize((3, 4), axes=(0, 1)), (5, 6, 5), "uint8"),
    (st.random_resized_crop(4), (3, 6, 7), "float32"),
    (st.gaussian_noise([1, 2, 3]), (4, 5, 3), "uint8"),
    (st.standardize_sample((1, 2)), (3, 4, 5), "uint8"),
    (st.random_erasing(1.0, value=(1, 2, 3)), (6, 7, 3), "float32"),
    (st.brightness(0.4), (4, 5, 3), "int16"),
    (st.contrast(0.4), (3, 6, 7), "uint8"),
    (st.one_hot(4, "int16"), (), "small"),
]


@pytest.mark.parametrize("stage, shape, dtype", MORE, ids=lambda v: str(v))
def test_compiled_more(stage, shape, dtype):
    """Other dtypes, layouts and numbers of channels have the same bits compiled and plain too."""
    x = np.arange(4) if dtype == "small" else np.stack([sample(shape, dtype, seed, False) for seed in range(4)])
    data = jl.Dataset(x=x).map("x", stage)

    batch = data[np.arange(4)].x

    assert all(same(batch[row], data[row].x) for row in range(4))
    assert not same(batch, x.astype(batch.dtype))


@pytest.mark.parametrize("module", ["choice", "image", "index", "noise", "resize", "rows", "sample", "series", "stage", "value"])
def test_examples(module):
    """The examples in the docstrings run."""
    found = doctest.testmod(importlib.import_module(f"jitloader.stages.{module}"))

    assert found.failed == 0 and found.attempted > 0


# -- meaning, by hand -------------------------------------------------------------------------------------------------


def test_resize_by_hand():
    """Shrinking weighs all pixels by area, growing interpolates, a constant stays constant, the shorter side is named."""
    row = np.array([[0, 2, 4, 6]], np.float64)

    np.testing.assert_allclose(st.resize((1, 2))(row), [[2.5 / 1.75, 8 / 1.75]])
    np.testing.assert_allclose(st.resize((1, 2), antialias=False)(row), [[1, 5]])
    np.testing.assert_allclose(st.resize((1, 8))(row), [[0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6]])
    assert (st.resize((13, 5))(np.full((7, 9, 3), 255, np.uint8)) == 255).all()
    assert st.resize(4)(np.zeros((3, 8, 10))).shape == (3, 4, 5) and st.resize(4)(np.zeros((10, 7))).shape == (5, 4)


def test_random_resized_crop_windows():
    """Windows keep to the asked area and ratio up to rounding, and their corners reach all four sides."""
    found = [naive.box(k * 7919, 64, 48, (0.1, 0.5), (0.5, 2)) for k in range(400)]

    for _, _, h, w in found:
        assert 0.08 < h * w / (64 * 48) < 0.52 and 0.45 < w / h < 2.2
    tops, lefts = np.array(found)[:, 0], np.array(found)[:, 1]
    assert tops.min() == 0 and lefts.min() == 0 and (np.array(found)[:, 0] + np.array(found)[:, 2]).max() == 64


def test_erased_area():
    """About the share p of images is erased, in one rectangle of the asked area, with each channel's value."""
    stage = st.random_erasing(0.5, (0.2, 0.4), (0.5, 2), (1, 2))
    images = [stage(np.zeros((2, 20, 20), np.uint8), key) for key in range(120)]

    areas = np.array([(image[0] > 0).sum() for image in images])
    assert 40 <= (areas > 0).sum() <= 80
    assert ((areas == 0) | ((areas > 60) & (areas < 180))).all()
    for image in images:
        assert (image[1] == 2 * image[0]).all()
        rows, columns = image[0].any(1), image[0].any(0)
        assert image[0].sum() == rows.sum() * columns.sum()


def test_noise_is_normal():
    """The ziggurat has a normal's moments, quantiles and tail, its elements do not repeat, and none is shared."""
    from statistics import NormalDist

    data = jl.Dataset(x=np.zeros((40, 100, 250))).map("x", st.gaussian_noise(1.0))
    z = data[np.arange(40)].x.ravel()
    n = z.size

    assert abs(z.mean()) < 4 / math.sqrt(n) and abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n) and abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
    edges = [NormalDist().inv_cdf(k / 100) for k in range(1, 100)]
    counts = np.bincount(np.searchsorted(edges, z), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 165  # chi-square of 99 degrees: 1 in 30 000
    far = (abs(z) > noise.EDGE).sum()
    wanted = 2 * NormalDist().cdf(-noise.EDGE) * n
    assert abs(far - wanted) < 4 * math.sqrt(wanted)
    assert len(np.unique(z)) > n - 10
    for lag in (1, 2, 3, 250, 25000):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 4 / math.sqrt(n)


def test_choice_shares():
    """A choice takes its stages in the shares asked for, and random_apply its one with probability p."""
    pick = st.random_choice(st.clip(0, 0), st.clip(1, 1), st.clip(2, 2), p=[1, 2, 5])
    data = jl.Dataset(x=np.zeros(800, np.int64)).map("x", pick, st.random_apply(st.clip(9, 9), 0.25))

    counts = np.bincount(data[np.arange(800)].x, minlength=10)

    assert abs(counts[9] - 200) < 50
    for k, share in enumerate((1, 2, 5)):
        assert abs(counts[k] - 600 * share / 8) < 4 * math.sqrt(600 * share / 8)


# -- values, from public reports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_moves_keep_bits(dtype):
    """Stages that move elements keep each bit: NaN, infinities, -0.0, subnormals and the largest integers."""
    raw = np.random.default_rng(0).bytes(64 * np.dtype(dtype).itemsize)
    x = np.frombuffer(raw, np.uint8)[:64] > 127 if dtype == "?" else np.frombuffer(raw, dtype).copy()
    if x.dtype.kind == "f":
        x[:5] = [np.nan, -0.0, np.inf, -np.inf, np.finfo(dtype).smallest_subnormal * 3]
    image = x.reshape(8, 8)

    assert st.rotate90(2)(image).tobytes() == np.rot90(image, 2).tobytes()
    assert st.random_flip(1.0)(image).tobytes() == image[:, ::-1].tobytes()
    assert st.pad(1)(image)[1:-1, 1:-1].tobytes() == image.tobytes()
    assert st.flatten()(image).tobytes() == image.tobytes()


@pytest.mark.parametrize("mean, std", [([128], [64]), (np.float16(128), np.float16(64)), (np.uint8(128), 64), (128, 64)])
def test_bytes_do_not_wrap(mean, std):
    """Subtracting a mean from uint8 pixels is done in floats, whatever the dtypes of mean and std."""
    z = jl.Dataset(x=np.array([[3], [250]], np.uint8)).map("x", st.normalize(mean, std))[[0, 1]].x

    assert z.dtype == np.float32 and z.ravel().tolist() == [-1.953125, 1.90625]


def test_constant_columns():
    """A constant column normalises to exact zeros, a later value in it stays finite, and others are unharmed."""
    x = np.array([[5, 1], [5, 3]], np.float32)
    told = jl.Dataset(x=x).statistics("x")

    assert jl.Dataset(x=x).map("x", st.normalize(told.mean, told.std))[[0, 1]].x.tolist() == [[0, -1], [0, 1]]
    assert st.normalize([5, 1], [0, 2])(np.array([7, 1], np.float32)).tolist() == [2, 0]
    assert st.standardize_sample(0)(np.full((7, 2), 0.1)).tolist() == [[0, 0]] * 7


def test_other_byte_order():
    """Numbers in the other byte order normalise as the native ones do."""
    x = np.array([[1, 256], [65535, 2], [7, 8]], ">u2")

    swapped = jl.Dataset(x=x).map("x", st.normalize(1, 2))[[0, 1, 2]].x

    assert (swapped == jl.Dataset(x=x.astype("u2")).map("x", st.normalize(1, 2))[[0, 1, 2]].x).all()


def test_any_place_in_a_batch():
    """A row has the same bits at any place of a batch of any size."""
    x = np.random.default_rng(0).normal(3, 2, (37, 5)).astype(np.float32)
    mean, std = x.astype(np.float64).mean(0), x.astype(np.float64).std(0)
    data = jl.Dataset(x=x).map("x", st.normalize(mean, std))
    whole = data[np.arange(37)].x

    for size in (1, 4, 36):
        parts = [data[np.arange(k, min(k + size, 37))].x for k in range(0, 37, size)]
        assert same(np.concatenate(parts), whole)
    exact = ((x.astype(np.float64) - mean) / std).astype(np.float32)
    assert (abs(whole - exact) <= np.spacing(abs(exact))).all()


def test_scale_of_bytes():
    """uint8 scaling gives 0.0 and exactly 1.0 at its ends, rises strictly, and is within an ulp of v / 255."""
    v = np.arange(256, dtype=np.uint8)
    z = jl.Dataset(x=v).map("x", st.scale())[np.arange(256)].x

    assert z[0] == 0 and z[255] == 1 and (np.diff(z) > 0).all()
    assert (abs(z - v / 255) <= np.spacing(z.clip(1e-3))).all()
