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
BY_NAME = {stage.name: stage for stage in POOL}
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
        assert str(caught.value).startswith("stage 0 'lookup(256)' on field 'x', row 0, epoch 0: value 300 does not fit\n")


def test_names_do_not_collide():
    """However many loops a chain needs, their variables are no names of the functions that it calls."""
    code = Source()

    assert not {code.fresh("i") for _ in range(200)} & set(code.scope)
