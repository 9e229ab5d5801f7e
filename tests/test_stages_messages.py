"""What a stage refuses, and in which words: bad arguments where it is made, misfits on the line that links it."""

from pathlib import Path

import numpy as np
import pytest

import jitloader as jl
from jitloader import stages as st

IMAGE = np.zeros((2, 6, 8, 3), np.uint8)
SERIES = np.zeros((2, 9, 5), np.float32)
LONG = np.zeros((2, 6, 8), np.int64)
BOOLS = np.zeros((2, 6, 6), bool)
RAGGED = jl.ragged(np.zeros((9, 4), np.uint8), [0, 4, 9])
TEXT = np.zeros((2, 4), "U3")
SIZED = "must be one or two whole numbers of at least 1"
LAYOUTS = "images (H, W), (H, W, C) or (C, H, W) with 1 to 4 channels; else name axes=(height, width)"
NARROW = "takes floats, or integers of at most 32 bits"

ARGUMENTS = [
    (lambda: st.normalize(0, 1e-310), ValueError, "normalize: 1 / std must be finite, got a std of 1e-310"),
    (lambda: st.normalize([[1, 2], [3]], 1), ValueError, "normalize: mean must be numbers in rows of one length"),
    (lambda: st.pad(-1), ValueError, "pad: padding must be a whole number of at least 0, got -1"),
    (lambda: st.pad_rows(0), ValueError, "pad_rows: length must be a whole number of at least 1, got 0"),
    (lambda: st.pad((1, 2)), ValueError, "pad: padding must be a number, or (before, after) for each axis, got (1, 2)"),
    (lambda: st.pad(((1, -2),)), ValueError, "pad: padding must be a whole number of at least 0, got -2"),
    (lambda: st.random_crop(4, -1), ValueError, "random_crop: padding must be a whole number of at least 0, got -1"),
    (lambda: st.random_crop((4, 4, 4)), ValueError, f"random_crop: size {SIZED}, got (4, 4, 4)"),
    (lambda: st.random_crop(True), ValueError, f"random_crop: size {SIZED}, got True"),
    (lambda: st.resize(0), ValueError, "resize: size must be a whole number of at least 1, got 0"),
    (lambda: st.resize((3, 2.5)), ValueError, f"resize: size {SIZED}, got (3, 2.5)"),
    (lambda: st.resize(3, "cubic"), ValueError, "resize: mode must be bilinear or nearest, got 'cubic'"),
    (lambda: st.resize(3, antialias=2), TypeError, "resize: antialias must be True or False, got 2"),
    (
        lambda: st.random_resized_crop(3, scale=(0.5, 1.5)),
        ValueError,
        "random_resized_crop: scale must be (low, high), above 0 and at most 1, got (0.5, 1.5)",
    ),
    (
        lambda: st.random_resized_crop(3, ratio=(0, 1)),
        ValueError,
        "random_resized_crop: ratio must be (low, high), above 0, got (0, 1)",
    ),
    (
        lambda: st.random_resized_crop(3, scale=0.5),
        ValueError,
        "random_resized_crop: scale must be two numbers (low, high), got 0.5",
    ),
    (lambda: st.rotate90(1.5), TypeError, "rotate90: k must be a whole number or None, got 1.5"),
    (lambda: st.random_flip(1.5), ValueError, "random_flip: p must be in [0, 1], got 1.5"),
    (lambda: st.random_vertical_flip("x"), TypeError, "random_vertical_flip: p must be a number, got 'x'"),
    (lambda: st.random_erasing(p=2), ValueError, "random_erasing: p must be in [0, 1], got 2"),
    (
        lambda: st.random_erasing(value="x"),
        ValueError,
        "random_erasing: value must be a number, or one for each channel, got 'x'",
    ),
    (lambda: st.brightness(-1), ValueError, "brightness: amount must not be negative, got -1"),
    (lambda: st.contrast((2, 1)), ValueError, "contrast: amount must be (low, high), at least 0, got (2, 1)"),
    (lambda: st.gaussian_noise(-1), ValueError, "gaussian_noise: std must not be negative, got -1.0"),
    (lambda: st.jitter(np.nan), ValueError, "jitter: std must be finite, got nan"),
    (lambda: st.gaussian_noise(1, "x"), TypeError, "gaussian_noise: mean must be numbers, got <U1"),
    (
        lambda: st.random_apply(abs),
        TypeError,
        "random_apply takes stages, got <built-in function abs>; make one of a function by elementwise or stage",
    ),
    (lambda: st.random_apply(st.log1p(), -0.1), ValueError, "random_apply: p must be in [0, 1], got -0.1"),
    (lambda: st.random_choice(), TypeError, "random_choice takes at least one stage"),
    (
        lambda: st.random_choice(st.log1p(), p=[0]),
        ValueError,
        "random_choice: p must be 1 weights, none below 0 and one above, got [0]",
    ),
    (lambda: st.standardize_sample(eps=-1), ValueError, "standardize_sample: eps must not be negative, got -1"),
    (lambda: st.standardize_sample(()), ValueError, "standardize_sample: axis must name an axis, got ()"),
    (lambda: st.fill_nan(np.inf), ValueError, "fill_nan: value must be finite, got inf"),
    (lambda: st.random_shift(-1), ValueError, "random_shift: max_shift must be a whole number of at least 0, got -1"),
    (lambda: st.time_mask(3, 0), ValueError, "time_mask: count must be a whole number of at least 1, got 0"),
    (lambda: st.time_mask(2.0), ValueError, "time_mask: max_length must be a whole number of at least 0, got 2.0"),
    (
        lambda: st.one_hot(3, "float16"),
        TypeError,
        "one_hot: a kernel cannot write float16; it can write bool, int8 to int64, uint8 to uint64, float32, float64",
    ),
    (
        lambda: st.elementwise(lambda x: x, dtype=">i4"),
        TypeError,
        "<lambda>: a kernel cannot write >i4; it can write bool, int8 to int64, uint8 to uint64, float32, float64",
    ),
]


@pytest.mark.parametrize("make, kind, text", ARGUMENTS, ids=[text for *_, text in ARGUMENTS])
def test_arguments(make, kind, text):
    """A bad argument is refused where the stage is made: the stage, what came, and what is taken."""
    with pytest.raises(kind) as caught:
        make()

    assert str(caught.value) == text


MISFITS = [
    (st.pad(((1, 1),)), IMAGE, "pad(((1, 1),)) takes samples of 1 axes"),
    (st.pad_rows(2), IMAGE, "pad_rows(2) takes ragged rows, whose first axis varies"),
    (st.pad(2), SERIES[:, :, :, None, None], f"pad(2) takes {LAYOUTS}"),
    (st.pad(1, value=256), IMAGE, "pad(1) puts in 256, which uint8 cannot hold"),
    (st.pad(1, value=np.nan), LONG, "pad(1) puts in nan, which int64 cannot hold"),
    (st.pad(1, value=2), BOOLS, "pad(1) puts in 2, which bool cannot hold"),
    (st.random_crop(4, 1, fill=0.5), IMAGE, "random_crop(4) puts in 0.5, which uint8 cannot hold"),
    (st.random_crop(2), RAGGED, "random_crop(2) takes samples of one fixed shape; close ragged rows by pad_rows(length) before it"),
    (st.random_crop(9, 1), IMAGE, "random_crop(9) takes images of at least 7 x 7"),
    (
        st.random_flip(),
        SERIES[:, 0],
        "random_flip takes images of 1 to 4 channels; for other samples give random_flip(axis=...)",
    ),
    (st.random_flip(axis=3), IMAGE, "random_flip has axis=3, which is not an axis of the sample"),
    (st.rotate90(), IMAGE, "rotate90 by a random number of turns takes square images"),
    (st.rotate90(1), SERIES[:, 0], f"rotate90(1) takes {LAYOUTS}"),
    (st.resize(4), LONG, f"resize(4) {NARROW}"),
    (st.resize(4), BOOLS, 'resize(4) mixes pixels, which bools cannot; give mode="nearest"'),
    (
        st.resize((3, 4), axes=(0, 2)),
        IMAGE,
        "resize(3, 4) takes images whose height and width are neighbouring axes; transpose first",
    ),
    (st.random_resized_crop((3, 4)), LONG, f"random_resized_crop(3, 4) {NARROW}"),
    (st.random_erasing(value=(1, 2)), IMAGE, "random_erasing has 2 values, one for each channel"),
    (st.random_erasing(value=-1), IMAGE, "random_erasing puts in -1, which uint8 cannot hold"),
    (st.brightness(0.1), BOOLS, f"brightness {NARROW}"),
    (st.contrast(0.1), LONG, f"contrast {NARROW}"),
    (st.gaussian_noise([1, 2]), IMAGE, "gaussian_noise has std of shape (2,), which does not broadcast against it"),
    (st.jitter(1), LONG, f"jitter(1) {NARROW}"),
    (st.random_shift(2, axis=2), SERIES, "random_shift has axis=2, which is not an axis of the sample"),
    (st.random_shift(2, fill=0.5), LONG, "random_shift puts in 0.5, which int64 cannot hold"),
    (st.time_mask(10), SERIES, "time_mask(10) takes an axis of at least 10 steps"),
    (
        st.standardize_sample((0, 2)),
        IMAGE,
        "standardize_sample has axis=(0, 2): several axes must be neighbours, each named once",
    ),
    (st.standardize_sample(5), IMAGE, "standardize_sample has axis=5, which is not an axis of the sample"),
    (
        st.random_apply(st.resize(3)),
        IMAGE,
        "random_apply(resize(3), 0.5): resize(3) gives uint8 (3, 4, 3), "
        "and a stage that may be skipped must keep dtype and shape",
    ),
    (
        st.random_choice(st.clip(0, 1), st.log1p()),
        IMAGE,
        "random_choice(clip(0, 1), log1p): clip(0, 1) gives uint8 (6, 8, 3) and log1p float32 (6, 8, 3): "
        "all must give the same",
    ),
]


@pytest.mark.parametrize("stage, x, text", MISFITS, ids=[text for *_, text in MISFITS])
def test_misfits(stage, x, text):
    """A misfit is refused on the user's line that links it, in one line: stage, field, what is taken, what came."""
    data = jl.Dataset(x=x)

    with pytest.raises(jl.PipelineError) as caught:
        data.map("x", stage)

    told = str(caught.value)
    assert told.startswith(f"stage 0 {stage.name!r} on field 'x': {text}; got {data.spec['x']} [{Path(__file__)} line ")
    assert "\n" not in told and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "stage",
    [
        st.log1p(), st.fill_nan(0), st.standardize_sample(), st.gaussian_noise(1), st.brightness(1), st.normalize(0, 1),
        st.cast("float32"), st.contrast(1), st.resize(2), st.elementwise(abs_of := lambda x: abs(x)),
    ],
    ids=str,
)  # fmt: skip
def test_text_is_refused(stage):
    """A stage that computes refuses text on the line that links it."""
    with pytest.raises(jl.PipelineError, match="on field 'x'.*got <U3"):
        jl.Dataset(x=TEXT).map("x", stage)


@pytest.mark.parametrize(
    "stage",
    [st.pad(1), st.random_shift(1), st.time_mask(1), st.standardize_sample(), st.random_apply(st.log1p())],
    ids=str,
)
def test_ragged_rows_are_refused(stage):
    """A stage that needs one shape refuses rows of different lengths, and says what closes them."""
    data = jl.Dataset(t=jl.ragged(np.arange(5.0), [0, 4, 5]))

    with pytest.raises(jl.PipelineError, match="takes samples of one fixed shape; close ragged rows by pad_rows"):
        data.map("t", stage)


def test_a_value_that_is_refused_inside_a_choice():
    """Where a stage inside a choice refuses a value, the error names the choice, its field and the row."""
    picky = st.random_choice(st.lookup(np.arange(5)), st.lookup(np.arange(6)))
    data = jl.Dataset(x=np.array([1, 9])).map("x", picky)

    assert data[[0]].x.tolist() == [1]
    for read in (data.sample, lambda row: data[[row]]):
        with pytest.raises(jl.PipelineError) as caught:
            read(1)
        assert str(caught.value).startswith(f"stage 0 {picky.name!r} on field 'x', row 1, epoch 0: ")
