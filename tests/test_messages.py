"""Every wrong input has its own short message: type and whole text, at the line that can first know."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jitloader as jl

X, Y = np.arange(40.0).reshape(10, 4), np.arange(10)
DATA = jl.Dataset(x=X, y=Y)
IMAGES = jl.Dataset(image=np.zeros((4, 8, 8, 3), np.uint8))
HERE = str(Path(__file__))


def attribute(x: Any) -> Any:
    return x.foo


def unknown(x: Any) -> Any:
    return undefined_name + x  # type: ignore[name-defined]  # noqa: F821


def nothing(x: Any) -> Any:
    pass


def beyond(src: Any, dst: Any, key: Any) -> None:
    for i in range(src.size):
        dst[i + 1] = src[i]


def hundredfold(x: Any) -> Any:
    return x * 100


def lines_of(function: Callable[..., Any]) -> int:
    """Give the line where a function was written."""
    return function.__code__.co_firstlineno


ARRAYS = [
    (lambda: jl.Dataset(), ValueError, "a data set needs at least one field, as Dataset(image=array)"),
    (lambda: jl.Dataset(x=X, y=Y[:5]), ValueError, "fields differ in length: 'x' has 10 rows, 'y' has 5 rows"),
    (lambda: jl.Dataset(x=np.float64(1)), ValueError, "field 'x' is 0-d: it has no rows"),
    (
        lambda: jl.Dataset(x=np.array([1, "a", None], object)),
        TypeError,
        "field 'x' holds Python objects (dtype object): give an array of numbers",
    ),
    (
        lambda: jl.Dataset(x=np.zeros(3, [("a", "i4"), ("b", "f4")])),
        TypeError,
        "field 'x' holds records: give its columns as fields of their own, array[name] for a, b",
    ),
    (
        lambda: jl.Dataset({1: Y}),
        TypeError,
        "a field name is a string of at least one character, got 1",
    ),
]

ROWS = [
    (lambda: DATA[10], IndexError, "row 10 is out of range: the data has 10 rows"),
    (lambda: DATA[-11], IndexError, "row -11 is out of range: the data has 10 rows"),
    (lambda: DATA[np.array([0.5])], TypeError, "indices must be integers or a bool mask, got float64"),
    (lambda: DATA[np.ones(9, bool)], ValueError, "mask has 9 entries, the data has 10 rows"),
    (lambda: DATA[np.zeros((2, 2), int)], ValueError, "indices must be 1-D, got shape (2, 2)"),
    (lambda: DATA.select([1.5]), TypeError, "indices must be integers or a bool mask, got float64"),
    (lambda: DATA.select([0, 10]), IndexError, "row 10 is out of range: the data has 10 rows"),
    (lambda: DATA.select(np.ones(3, bool)), ValueError, "mask has 3 entries, the data has 10 rows"),
    (
        lambda: DATA.split(0.8, 0.3),
        ValueError,
        "split takes fractions above 0 that sum to at most 1, got (0.8, 0.3)",
    ),
    (lambda: DATA.zip(jl.Dataset(y=Y)), ValueError, "zip: both data sets have a field 'y'"),
    (
        lambda: DATA.zip(jl.Dataset(z=Y[:3])),
        ValueError,
        "zip takes data sets of one length, got 10 and 3 rows",
    ),
    (lambda: DATA.concat(jl.Dataset(y=Y)), ValueError, "concat: fields differ: x, y and y"),
    (
        lambda: jl.Dataset(x=X).concat(jl.Dataset(x=X[:, :2])),
        ValueError,
        "field 'x': cannot join float64 (4,) and float64 (2,)",
    ),
    (
        lambda: DATA.concat(DATA.map("x", jl.clip(0, 1))),
        ValueError,
        "concat: the stages of the two differ: concat first, then map",
    ),
    (
        lambda: iter(DATA),
        TypeError,
        "a data set is not iterable: use jl.Loader(data, batch_size) for batches, or data[i] for a sample",
    ),
    (lambda: DATA.statistics("z"), KeyError, "no field 'z': there are x, y"),
]

STAGES = [
    (lambda: jl.normalize(float("nan"), 1), ValueError, "normalize: mean must be finite, got nan"),
    (lambda: jl.normalize("a", 1), TypeError, "normalize: mean must be numbers, got <U1"),
    (lambda: jl.normalize(0, -1), ValueError, "normalize: std must not be negative, got -1.0"),
    (lambda: jl.scale(1, 0), ValueError, "scale: low must be below high, got 1 and 0"),
    (lambda: jl.clip(1, 0), ValueError, "clip: low must not be above high, got 1 and 0"),
    (
        lambda: jl.cast("float16"),
        TypeError,
        "cast: a kernel cannot write float16; it can write bool, int8 to int64, uint8 to uint64, float32, float64",
    ),
    (
        lambda: jl.lookup([]),
        ValueError,
        "lookup: table must be a 1-D array of numbers with an entry, got float64 (0,)",
    ),
    (lambda: jl.random_crop(0), ValueError, "random_crop: size must be one or two whole numbers of at least 1, got 0"),
    (
        lambda: jl.random_crop(4, padding=-1),
        ValueError,
        "random_crop: padding must be a whole number of at least 0, got -1",
    ),
    (lambda: jl.random_flip(2), ValueError, "random_flip: p must be in [0, 1], got 2"),
    (lambda: jl.transpose((0, 0)), ValueError, "transpose: axes must name each axis once, got (0, 0)"),
    (lambda: jl.one_hot(0), ValueError, "one_hot: classes must be a whole number of at least 1, got 0"),
]

LINKS = [
    (lambda: DATA.map("z", jl.clip(0, 1)), KeyError, "no field 'z': there are x, y"),
    (
        lambda: DATA.map(("x", "x"), jl.clip(0, 1)),
        ValueError,
        "map takes one field or several different ones, got ('x', 'x')",
    ),
    (
        lambda: DATA.map("x", 3),
        TypeError,
        "3 is not a stage: give one such as jl.normalize(mean, std), or a function",
    ),
    (
        lambda: DATA.map("x", jl.scale()),
        jl.PipelineError,
        "stage 0 'scale' on field 'x': scale takes an unsigned integer dtype, as uint8; got float64 (4,) [{here}]",
    ),
    (
        lambda: DATA.map("x", jl.normalize([1, 2, 3], 1)),
        jl.PipelineError,
        "stage 0 'normalize' on field 'x': normalize has mean of shape (3,), which does not broadcast against it; "
        "got float64 (4,) [{here}]",
    ),
    (
        lambda: DATA.map("x", jl.clip(0, 9), jl.channels_first()),
        jl.PipelineError,
        "stage 1 'channels_first' on field 'x': channels_first takes samples of 3 axes; got float64 (4,) [{here}]",
    ),
    (
        lambda: IMAGES.map("image", jl.random_crop(9)),
        jl.PipelineError,
        "stage 0 'random_crop(9)' on field 'image': random_crop(9) takes images of at least 9 x 9; "
        "got uint8 (8, 8, 3) [{here}]",
    ),
    (
        lambda: DATA.map("x", jl.one_hot(3)),
        jl.PipelineError,
        "stage 0 'one_hot(3)' on field 'x': one_hot(3) takes one integer a row, 0 to 2; got float64 (4,) [{here}]",
    ),
    (
        lambda: jl.Dataset(t=np.array(["2020-01-01"], "M8[D]")).map("t", jl.clip(0, 1)),
        jl.PipelineError,
        "stage 0 'clip(0, 1)' on field 't': clip takes numbers of at most 64 bits; got datetime64[D] () [{here}]",
    ),
    (
        lambda: DATA.map("x", attribute),
        jl.PipelineError,
        "stage 0 'attribute' on field 'x': cannot take float64: Unknown attribute 'foo' of type float64; "
        f"got float64 (4,) [{HERE} line {lines_of(attribute) + 1}]",
    ),
    (
        lambda: DATA.map("x", unknown),
        jl.PipelineError,
        "stage 0 'unknown' on field 'x': cannot take float64: NameError: name 'undefined_name' is not defined; "
        f"got float64 (4,) [{HERE} line {lines_of(unknown) + 1}]",
    ),
    (
        lambda: DATA.map("x", nothing),
        jl.PipelineError,
        "stage 0 'nothing' on field 'x': nothing must return a number; "
        f"got float64 (4,) [{HERE} line {lines_of(nothing)}]",
    ),
]

RUNS = [
    (
        lambda: DATA.map("y", jl.one_hot(3))[:],
        jl.PipelineError,
        "stage 0 'one_hot(3)' on field 'y', row 3, epoch 0: value 3 does not fit\n  in {here}; data[3] reproduces it",
    ),
    (
        lambda: list(jl.Loader(DATA.map("y", jl.lookup([1.0, 2.0])), 4)),
        jl.PipelineError,
        "stage 0 'lookup(2)' on field 'y', row 2, epoch 0: value 2 does not fit\n  in {here}; data[2] reproduces it",
    ),
    (
        lambda: list(jl.Loader(DATA.map("x", jl.elementwise(hundredfold, dtype="uint8")), 4)),
        jl.PipelineError,
        "stage 0 'hundredfold' on field 'x', row 0, epoch 0: a result does not fit uint8\n"
        f"  in {HERE} line {lines_of(hundredfold)}; data[0] reproduces it",
    ),
    (
        lambda: DATA.map("x", beyond)[3],
        jl.PipelineError,
        "stage 0 'beyond' on field 'x', row 3, epoch 0: IndexError: index 4 is out of bounds for axis 0 with size 4\n"
        f"  in {HERE} line {lines_of(beyond) + 2}; data[3] reproduces it",
    ),
    (
        lambda: list(jl.Loader(DATA, 2, order=[0, 99])),
        IndexError,
        "order names row 99 at position 1, but there are 10 rows",
    ),
]

LOADERS = [
    (lambda: jl.Loader(X, 2), TypeError, "Loader takes a jl.Dataset, got ndarray: wrap arrays as jl.Dataset(x=array)"),
    (lambda: jl.Loader(DATA, 0), ValueError, "batch_size must be at least 1, got 0"),
    (lambda: jl.Loader(DATA, True), TypeError, "batch_size must be a whole number, got True"),
    (lambda: jl.Loader(DATA, 2.0), TypeError, "batch_size must be a whole number, got 2.0"),
    (lambda: jl.Loader(DATA, 2, seed=None), TypeError, "seed must be a whole number, got None"),
    (lambda: jl.Loader(DATA, 2, threads=0), ValueError, "threads must be at least 1, got 0"),
    (lambda: jl.Loader(DATA, 2, prefetch=-1), ValueError, "prefetch must be at least 0, got -1"),
    (lambda: jl.Loader(DATA, 2, shuffle=True, order=[1]), ValueError, "give shuffle=True or order=, not both"),
    (lambda: jl.Loader(DATA, 2, rank=2, world_size=2), ValueError, "rank 2 is not below world_size 2"),
    (
        lambda: jl.Loader(DATA, 2, rank=2),
        ValueError,
        "give rank and world_size together, got rank=2 and world_size=None",
    ),
    (lambda: jl.Loader(DATA, 2, tail="x"), ValueError, "tail must be 'keep', 'drop' or 'wrap', got 'x'"),
    (lambda: jl.Loader(DATA, 3)[4], IndexError, "batch 4 is out of range: an epoch has 4 batches"),
    (lambda: jl.Loader(DATA, 3)["a"], TypeError, "a loader is indexed by a batch number, got 'a'"),
    (lambda: setattr(jl.Loader(DATA, 3), "epoch", -1), ValueError, "epoch must be at least 0, got -1"),
]


CASES: list[Any] = [*ARRAYS, *ROWS, *STAGES, *LINKS, *RUNS, *LOADERS]


def state(**parts: Any) -> dict[str, Any]:
    """Give the state of a fresh loader with some parts changed."""
    return {**jl.Loader(DATA, 3).state_dict(), **parts}


STATES = [
    ([], "a state is a dict, got list"),
    (
        {"version": 1, "seed": 0},
        "the state lacks 'epoch', 'fingerprint', 'order', 'position', 'rows': it was cut or is not a loader's",
    ),
    (state(rows=9), "the state has another rows: 9, this loader has 10"),
    (state(seed=4), "the state has another seed: 4, this loader has 0"),
    (state(position=99), "the state has position 99: a whole number of at least 0, at most 10"),
    (state(position="3"), "the state has position '3': a whole number of at least 0, at most 10"),
    (state(epoch=-1), "the state has epoch -1: a whole number of at least 0"),
]


def check(raised: pytest.ExceptionInfo[BaseException], text: str) -> None:
    """The whole text, at most five lines, nothing of ours in it, and no other traceback above it."""
    error = raised.value
    found = error.args[0] if isinstance(error, KeyError) else str(error)
    assert found == text
    assert found.count("\n") < 5
    assert str(Path(jl.__file__).parent) not in found
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__


@pytest.mark.parametrize("call, kind, text", CASES, ids=[text for _, _, text in CASES])
def test_message(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    """A wrong input raises this type with this text."""
    with pytest.raises(kind) as raised:
        call()

    check(raised, text.replace("{here}", f"{HERE} line {lines_of(call)}"))


@pytest.mark.parametrize("given, text", STATES)
def test_state_message(given: Any, text: str) -> None:
    """A state that does not belong to the loader says which part differs, and leaves the loader as it was."""
    loader = jl.Loader(DATA, 3)
    with pytest.raises(jl.StateError) as raised:
        loader.load_state_dict(given)

    check(raised, text)
    assert loader.state_dict() == state()


def test_batch_too_large_for_memory() -> None:
    """A batch that no memory holds says how many bytes were asked for."""
    with pytest.raises(MemoryError) as raised:
        list(jl.Loader(jl.Dataset(x=np.broadcast_to(X[0], (10**13, 4))), 10**13))

    text = (
        "no memory for a batch buffer of 320,000,000,000,000 bytes (10,000,000,000,000 rows): use a smaller batch_size"
    )
    check(raised, text)


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: jl.Loader(DATA, 20, drop_last=True),
            "drop_last leaves no batch: 10 rows are fewer than batch_size 20",
        ),
        (
            lambda: jl.Loader(DATA, 3, rank=0, world_size=3),
            "ranks will get different numbers of batches (1 and 2): training in step would hang; "
            "use tail='drop' or tail='wrap'",
        ),
    ],
)
def test_warning(make: Callable[[], Any], text: str) -> None:
    """What is allowed but rarely meant is warned of, at the user's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()

    assert [str(w.message) for w in caught] == [text]
    assert caught[0].filename == HERE


def test_library_frames_are_few() -> None:
    """The traceback starts at the user's line and shows at most three frames of the library."""
    with pytest.raises(jl.PipelineError) as raised:
        DATA.map("x", jl.scale())

    frames = [entry.path for entry in raised.traceback]
    assert str(frames[0]) == HERE
    assert len(frames) <= 4
