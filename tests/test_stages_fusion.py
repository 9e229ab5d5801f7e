"""Fusing stages never changes a result, and what they draw depends on seed, epoch, row and stage alone."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as some
from test_stages import same, sample

import jitloader as jl
from jitloader import compose
from jitloader import stages as st
from jitloader.compose.source import Source
from jitloader.dataset import epoch_key
from jitloader.samples import records


@st.elementwise
def halved(x):
    return x // 2 + 1 if x > 3 else x


@st.stage
def rolled(src, dst, key):
    a, b = src.reshape(src.size), dst.reshape(dst.size)
    for i in range(a.size):
        b[i] = a[(i + 1) % a.size]


POOL = [
    st.random_flip(),
    st.random_flip(axis=0),
    st.random_vertical_flip(),
    st.random_crop(4, padding=1, fill=2),
    st.random_crop((5, 4)),
    st.center_crop(4),
    st.pad(1, value=3),
    st.pad(((1, 0), (0, 2), (0, 0))),
    st.rotate90(1),
    st.rotate90(2),
    st.rotate90(),
    st.random_shift(2),
    st.random_shift(2, axis=1, fill=1),
    st.channels_first(),
    st.channels_last(),
    st.transpose((1, 0, 2)),
    st.flatten(),
    st.cast("float32"),
    st.normalize([1.0, 2.0, 3.0], [4.0, 5.0, 0.0]),
    st.normalize(100, 50),
    st.scale(),
    st.clip(1, 90),
    st.lookup(np.arange(256, dtype=np.int16)[::-1]),
    st.log1p(),
    st.fill_nan(1),
    st.brightness(0.5),
    st.gaussian_noise(2.0),
    st.gaussian_noise([0.0, 1.0, 2.0]),
    st.contrast(0.5),
    st.random_erasing(0.7),
    st.resize((6, 5)),
    st.random_resized_crop(5),
    st.standardize_sample(0),
    st.time_mask(2),
    st.random_apply(st.rotate90(2)),
    st.random_apply(st.gaussian_noise(1.0)),
    st.random_choice(st.random_flip(), st.random_shift(1), st.random_vertical_flip(1.0)),
    st.random_choice(st.brightness(0.2), st.time_mask(1), st.random_apply(st.random_flip())),
    halved,
    rolled,
]
IMAGES = {"hwc": (6, 7, 3), "chw": (3, 7, 6), "square": (6, 6, 3), "hw": (6, 7), "five": (6, 7, 5), "grey": (7, 6, 1)}


def linked(x, stages):
    """A data set with those of the stages that fit where they stand."""
    data = jl.Dataset(x=x)
    for stage in stages:
        try:
            data = data.map("x", stage)
        except jl.PipelineError:
            continue
    return data


def apart(data, x, row, seed=0, epoch=0):
    """A row through the stages of a data set, each run by itself and written whole, with its draws in the chain."""
    key = epoch_key(seed, epoch)
    for step in data.steps:
        rows = records(np.broadcast_to(x, (row + 1, *x.shape)))
        x = np.asarray(compose.sample_of({"x": rows}, (step,), ("x",), row, key)["x"])
    return x


@settings(max_examples=250, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    some.lists(some.sampled_from(POOL), min_size=2, max_size=6),
    some.sampled_from(list(IMAGES)),
    some.sampled_from(["uint8", "int16", "int32", "float32", "float64"]),
    some.integers(0, 2**32),
)
def test_fused_is_apart(stages, shape, dtype, seed):
    """A chain of any stages gives a row the same bits as its stages one by one, each written whole."""
    x = sample(IMAGES[shape], dtype, seed)
    data = linked(x[None], stages)
    try:
        fused = data.sample(0, seed=seed).x
    except jl.PipelineError as error:  # a value that a stage refuses
        assert "does not fit" in str(error)
        return

    assert same(fused, apart(data, x, 0, seed))


def test_refused_by_the_first():
    """Where stages are fused, the one that refuses a value is named, not the last of the loop."""
    data = jl.Dataset(x=np.array([[3, 300]])).map("x", st.lookup(np.arange(256)), st.cast("uint8"), st.normalize(0, 2))

    for read in (data.sample, lambda row: data[[row]]):
        with pytest.raises(jl.PipelineError) as caught:
            read(0)
        assert str(caught.value).startswith(
            "stage 0 'lookup(256)' on field 'x', row 0, epoch 0: value 300 does not fit\n"
        )


@pytest.mark.parametrize("dtype", ["int16", ">i2"])
def test_a_fill_value_that_is_refused_is_told(dtype):
    """As it was given, whatever bits carry it."""
    data = jl.Dataset(x=np.ones((3, 4), dtype)).map("x", st.pad(((0, 1),), value=300), st.lookup(np.arange(10.0)))

    with pytest.raises(jl.PipelineError, match="^the fill value 300 of a padded stage cannot pass the value stages"):
        data[[0]]


def test_names_do_not_collide():
    """However many loops a chain needs, their variables are no names of the functions that it calls."""
    code = Source()

    assert not {code.fresh("i") for _ in range(200)} & set(code.scope)


FLIP, CROP, NOISE = st.random_flip(), st.random_crop(4, padding=1, fill=2), st.gaussian_noise(2.0)
MOVES = st.random_choice(st.random_flip(), st.random_shift(1), st.random_vertical_flip(1.0))
MIXED = st.random_choice(st.brightness(0.2), st.time_mask(1), st.random_apply(st.random_flip()))
CHANNELS = st.normalize([1.0, 2.0, 3.0], [4.0, 5.0, 0.0])
CHAINS = {
    "crop, flip, normalize": ("hwc", "uint8", [CROP, FLIP, CHANNELS, st.channels_first()]),
    "mirror, noise, mirror": ("hwc", "float32", [FLIP, NOISE, st.channels_first(), FLIP]),
    "channels, noise, mirror": ("hwc", "float32", [st.channels_first(), NOISE, st.random_vertical_flip()]),
    "pad, noise, brightness": ("chw", "int16", [st.pad(1, value=3), NOISE, FLIP, st.brightness(0.5)]),
    "turn, shift, log": (
        "hwc",
        "uint8",
        [st.rotate90(1), st.random_shift(2), st.log1p(), st.random_apply(st.rotate90(2))],
    ),
    "erase, resize": ("hwc", "uint8", [st.random_erasing(0.7), st.resize((6, 5)), FLIP, CHANNELS]),
    "choices": ("square", "uint8", [MOVES, MIXED, st.random_apply(NOISE), st.scale()]),
    "user's own": ("hwc", "int32", [FLIP, halved, rolled, st.center_crop(4)]),
    "five channels": ("five", "float32", [st.random_shift(2, axis=1), st.fill_nan(1), st.standardize_sample(0), NOISE]),
    "numbers before moves": ("square", "float32", [st.log1p(), CROP, st.rotate90(), st.transpose((1, 0, 2))]),
}


NIGHTLY = {"erase, resize", "turn, shift, log", "channels, noise, mirror", "pad, noise, brightness"}


@pytest.mark.parametrize(
    "chain", [pytest.param(c, marks=[pytest.mark.nightly] if c in NIGHTLY else []) for c in CHAINS]
)
def test_compiled_chain(chain):
    """A fused chain has the same bits compiled, in plain Python, and stage by stage."""
    shape, dtype, stages = CHAINS[chain]
    x = np.stack([sample(IMAGES[shape], dtype, seed) for seed in range(6)])
    data = jl.Dataset(x=x).map("x", *stages)

    batch = data.gather(np.arange(6), seed=5, epoch=2).x

    for row in range(6):
        plain = data.sample(row, seed=5, epoch=2).x
        assert same(batch[row], plain)
        assert same(plain, apart(data, x[row], row, 5, 2))


WIDE = {
    "channels first": ((4, 70, 3), [st.random_flip(1.0), st.normalize([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), st.channels_first()]),
    "channels last": ((4, 70, 3), [st.random_flip(1.0), st.normalize([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])]),
    "bytes": ((4, 70, 3), [st.random_flip(1.0)]),
    "grey, shifted": ((70, 90), [st.random_shift(30, axis=1, fill=7), st.random_flip(1.0), st.cast("float32")]),
}


@pytest.mark.parametrize("chain", WIDE)
def test_long_mirrored_runs(chain):
    """Runs long enough to be turned round through scratch come as NumPy turns them."""
    shape, stages = WIDE[chain]
    x = np.stack([sample(shape, "uint8", seed) for seed in range(4)])
    still = [st.random_flip(0.0) if str(stage) == str(st.random_flip(1.0)) else stage for stage in stages]
    data, plain = (jl.Dataset(x=x).map("x", *chosen) for chosen in (stages, still))
    axis = -2 if shape[-1] == 3 and chain != "channels first" else -1

    batch = data[np.arange(4)].x

    assert same(batch, np.flip(plain[np.arange(4)].x, axis))
    assert all(same(batch[k], data[k].x) for k in range(4))


# -- draws ------------------------------------------------------------------------------------------------------------

RANDOM = [
    st.random_crop(6, padding=2),
    st.random_flip(),
    st.random_vertical_flip(),
    st.random_resized_crop(6, mode="nearest"),
    st.rotate90(),
    st.random_erasing(0.9),
    st.random_shift(3),
    st.time_mask(4),
    st.gaussian_noise(40),
    st.brightness(0.5),
    st.contrast(0.5),
    st.random_choice(st.rotate90(1), st.random_erasing(1.0), st.random_flip()),
    st.random_apply(st.random_crop(8, padding=3), 0.7),
]
ROWS = 24


@pytest.mark.parametrize("stage", RANDOM, ids=str)
def test_mapped_together(stage):
    """Fields mapped together get the same draws; the same stage mapped to one after the other does not."""
    x = np.random.default_rng(0).integers(0, 256, (ROWS, 8, 8), dtype=np.uint8)
    data = jl.Dataset(image=x, mask=x)

    together = data.map(("image", "mask"), stage)
    in_turn = data.map("image", stage).map("mask", stage)

    assert all(same(*together.sample(row)) for row in range(ROWS))
    assert not all(same(*in_turn.sample(row)) for row in range(ROWS))


@pytest.mark.parametrize("stage", RANDOM, ids=str)
def test_draws_have_one_cause(stage):
    """Draws change with the seed, the epoch, the row and the stage's place, and with nothing else."""
    x = np.broadcast_to(np.arange(64, dtype=np.uint8).reshape(8, 8) * 3 + 1, (ROWS, 8, 8))
    data = jl.Dataset(x=x).map("x", stage)

    def rows(data, **at):
        return [data.sample(row, **at).x.tobytes() for row in range(ROWS)]

    first = rows(data)
    beside = jl.Dataset(y=np.arange(ROWS), x=x).map("x", stage)
    others = [rows(data, seed=1), rows(data, epoch=1), rows(jl.Dataset(x=x).map("x", st.clip(0, 255), stage))]
    assert len(set(first)) > 1
    assert first == rows(data) == rows(beside)
    assert all(first != other for other in others)
    assert others[0] != others[1] and rows(data, seed=0, epoch=2) != rows(data, seed=1, epoch=1)


def test_draws_do_not_know_the_batch():
    """A row has the same draws in any batch: its order, its size and the neighbours do not matter."""
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    data = jl.Dataset(x=x).map("x", st.random_crop(6, padding=1), st.random_erasing(), st.gaussian_noise(9))
    order = np.random.default_rng(1).permutation(40)
    whole = data[np.arange(40)].x

    assert same(data[order].x, whole[order])
    assert same(np.concatenate([data[order[k : k + 7]].x for k in range(0, 40, 7)]), whole[order])
    assert len({row.tobytes() for row in data[np.zeros(5, np.int64)].x}) == 1


def test_noise_of_channels_and_mirrors():
    """Each element has noise of its own: channels share none, and a mirror before the noise does not mirror it."""
    still = jl.Dataset(x=np.zeros((2, 5, 7, 3), np.float32))
    plain, turned = (
        still.map("x", st.random_flip(p), st.channels_first(), st.gaussian_noise(1))[[0, 1]].x for p in (0.0, 1.0)
    )

    assert same(plain, turned)
    assert len(np.unique(plain)) == plain.size
