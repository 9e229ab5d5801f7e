"""Every wrong input has its own short message: type and whole text, at the line that can first know."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jitloader as jl

X, Y = np.arange(40.0).reshape(10, 4), np.arange(10)


def by_keyword(v, *, by=2):
    return v * by


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


def prints(x: Any) -> Any:
    print(x)
    return x


def prints_below(x: Any) -> Any:
    return prints(x) + 1


def rolls(src: Any, dst: Any, key: Any) -> None:
    dst[0] = np.random.rand()


def rolls_python(src: Any, dst: Any, key: Any) -> None:
    dst[0] = random.random()


def multiplies(src: Any, dst: Any, key: Any) -> None:
    dst[0] = src @ src


def bad_array(src: Any, dst: Any, key: Any) -> None:
    dst[0] = src.foo


TABLE = [1.0, 2.0]


def from_list(src: Any, dst: Any, key: Any) -> None:
    dst[0] = TABLE[int(src[0])]


def writes_source(src: Any, dst: Any, key: Any) -> None:
    src[0] = 1


def sorts_source(src: Any, dst: Any, key: Any) -> None:
    src.sort()


def far(src: Any, dst: Any, key: Any) -> None:
    dst[10**7] = 1


def near(src: Any, dst: Any, key: Any) -> None:
    dst[7] = 1


def raises(x: Any) -> Any:
    if x > 5:
        raise ValueError("too large")
    return x


def recurses(x: Any) -> Any:
    return x if x < 0 else recurses(x - 1)


def two_kinds(x: Any) -> Any:
    y = x
    for _ in range(3):
        y = "a"
    return 1.0 if y else 0.0


def two_returns(x: Any) -> Any:
    if x > 0:
        return x
    return "a"


def adds_text(x: Any) -> Any:
    return x + "a"


def needs_two(a: Any, b: Any) -> Any:
    return a + b


def gives_one(x: Any) -> Any:
    return needs_two(x)  # type: ignore[call-arg]


def imports(x: Any) -> Any:
    import math

    return math.sqrt(x)


def catches(x: Any) -> Any:
    try:
        return 1 / x
    except ZeroDivisionError as error:  # noqa: F841
        return 0.0


def whole(x: Any) -> Any:
    return 300


async def later(x: Any) -> Any:
    return x


def yields(x: Any) -> Any:
    yield x


async def streams(src: Any, dst: Any, key: Any) -> Any:
    yield dst


def powered(x: Any, y: Any = 2) -> Any:
    return x**y


def fills(src: Any, dst: Any, key: Any, by: Any = 1) -> None:
    dst[0] = by


def inverse(x: Any) -> Any:
    return x**-1


SUSPENDED = "{}, and a stage gives its result when it is called"


def same(src: Any, dst: Any, key: Any) -> None:
    for i in range(dst.size):
        dst[i] = src[i]


class Holder:
    def __call__(self, x: Any) -> Any:
        return x

    def method(self, x: Any) -> Any:
        return x


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
        "field 'x' holds records: give its columns (a, b) as fields of their own, "
        "Dataset({name: array[name] for name in array.dtype.names})",
    ),
    (
        lambda: jl.Dataset({1: Y}),
        TypeError,
        "a field name is a string of at least one character, got 1",
    ),
    (lambda: jl.Dataset(X), TypeError, "name the field: Dataset(x=array)"),
    (lambda: jl.Dataset(DATA), TypeError, "that is a Dataset already"),
    (
        lambda: jl.Dataset("x.npy"),
        TypeError,
        "name the field: Dataset(x=path), or open a folder or file by jl.open(path)",
    ),
    (
        lambda: jl.Dataset(x=np.zeros(3, [("a", "i4"), ("b", "f4")])),
        TypeError,
        "field 'x' holds records: give its columns (a, b) as fields of their own, "
        "Dataset({name: array[name] for name in array.dtype.names})",
    ),
    (
        lambda: jl.Dataset(x=[[1], [2, 3]]),
        ValueError,
        "field 'x': rows differ in length: give jl.ragged(rows)",
    ),
    (lambda: jl.Dataset(x=DATA), TypeError, "field 'x' is a Dataset: join the fields of two by zip"),
    (lambda: jl.Dataset(x=None), TypeError, "field 'x' is None: give an array"),
    (lambda: jl.Dataset(x={"a": 1}), TypeError, "field 'x' is of type dict: give an array"),
    (
        lambda: jl.Dataset(x=np.ma.masked_array([1, 2], [True, False])),
        TypeError,
        "field 'x' is a masked array, and kernels see no mask: give array.filled(value)",
    ),
]

INDEX = "a data set is indexed by a row number, a slice, an array of row numbers or a mask, got "

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
    (lambda: DATA[1.0], TypeError, INDEX + "1.0"),
    (lambda: DATA["x"], TypeError, INDEX + "'x'; for a field, keep(name)"),
    (lambda: DATA[None], TypeError, INDEX + "None"),
    (lambda: DATA[...], TypeError, INDEX + "Ellipsis"),
    (lambda: DATA[True], TypeError, INDEX + "True"),
    (lambda: DATA[1, 2], TypeError, INDEX + "(1, 2); for several rows, give a list"),
    (lambda: DATA[1.5:], TypeError, "a slice of rows takes whole numbers, got slice(1.5, None, None)"),
    (
        lambda: DATA[[[1], [2, 3]]],
        TypeError,
        "indices must be integers or a bool mask, got rows of different lengths",
    ),
    (lambda: DATA.take(True), TypeError, "take: n must be a whole number, got True"),
    (lambda: DATA.take(2.5), TypeError, "take: n must be a whole number, got 2.5"),
    (lambda: DATA.split("a"), TypeError, "split takes fractions above 0 that sum to at most 1, got 'a'"),
    (lambda: DATA.split(True), TypeError, "split takes fractions above 0 that sum to at most 1, got True"),
    (lambda: DATA.split(0.5, seed=1.5), TypeError, "split: seed must be a whole number, got 1.5"),
    (lambda: DATA.zip(X), TypeError, "zip takes a jl.Dataset, got ndarray: wrap arrays as jl.Dataset(x=array)"),
    (lambda: DATA.concat(X), TypeError, "concat takes a jl.Dataset, got ndarray: wrap arrays as jl.Dataset(x=array)"),
    (
        lambda: DATA.take(0).statistics("x"),
        ValueError,
        "statistics takes at least one row: the data has none",
    ),
    (
        lambda: pickle.dumps(DATA.apply(functools.partial(print, threading.Lock()))),
        TypeError,
        "a data set does not pickle: cannot pickle '_thread.lock' object",
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
    (
        lambda: jl.stage(shape=(-2,))(same),
        TypeError,
        "same: shape must be whole numbers of at least 0, got (-2,)",
    ),
    (lambda: jl.stage(shape="ab")(same), TypeError, "same: shape must be whole numbers of at least 0, got 'ab'"),
    (
        lambda: jl.stage(dtype="O")(same),
        TypeError,
        "same: a kernel cannot write object; it can write bool, int8 to int64, uint8 to uint64, float32, float64",
    ),
    (
        lambda: jl.stage(dtype="float16")(same),
        TypeError,
        "same: a kernel cannot write float16; it can write bool, int8 to int64, uint8 to uint64, float32, float64",
    ),
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
        "stage 0 'clip(0, 1)' on field 't': clip takes numbers of at most 64 bits: "
        "give the dates' count of units, array.view('int64'); got datetime64[D] () [{here}]",
    ),
    (
        lambda: jl.Dataset(c=np.zeros(2, complex)).map("c", jl.cast("float32")),
        jl.PipelineError,
        "stage 0 'cast(float32)' on field 'c': cast(float32) takes numbers of at most 64 bits: "
        "give array.real and array.imag as fields; got complex128 () [{here}]",
    ),
    (lambda: DATA.map("x", later), TypeError, SUSPENDED.format("later is an async def") + ": write a plain def"),
    (lambda: jl.stage(streams), TypeError, SUSPENDED.format("streams is an async def") + ": write a plain def"),
    (
        lambda: jl.elementwise(yields),
        TypeError,
        SUSPENDED.format("yields is a generator function (it has a yield)") + ": write a plain def",
    ),
    (
        lambda: jl.batch_stage(yields),
        TypeError,
        SUSPENDED.format("yields is a generator function (it has a yield)") + ": write a plain def",
    ),
    (
        lambda: DATA.apply(yields),
        TypeError,
        SUSPENDED.format("apply: yields is a generator function (it has a yield)"),
    ),
    (lambda: DATA.apply_rows(later), TypeError, SUSPENDED.format("apply: later is an async def")),
    (
        lambda: jl.Loader(DATA, 2, order=later),
        TypeError,
        "order takes a plain function, and later is an async def",
    ),
    (
        lambda: DATA.map("x", powered),
        TypeError,
        "powered takes 2 arguments: a stage function takes one number, or (src, dst, key); "
        "'y', with a default, counts too: let it stand in the closure",
    ),
    (
        lambda: DATA.map("x", jl.elementwise(powered)),
        jl.PipelineError,
        "stage 0 'powered' on field 'x': powered takes 2 fields of one shape; "
        "'y', with a default, counts too: let it stand in the closure; "
        f"got float64 (4,) [{HERE} line {lines_of(powered)}]",
    ),
    (
        lambda: jl.stage(fills),
        TypeError,
        "stage takes a function (src, dst, key), got fills; "
        "'by', with a default, counts too: let it stand in the closure",
    ),
    (
        lambda: DATA.map("y", inverse),
        jl.PipelineError,
        "stage 0 'inverse' on field 'y': cannot take int64: an integer to a negative power is 0 in a kernel: "
        f"write 1 / x, or float(x) to that power; got int64 () [{HERE} line {lines_of(inverse) + 1}]",
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
    (
        lambda: DATA.map("x", prints),
        jl.PipelineError,
        "stage 0 'prints' on field 'x': prints: a kernel runs without Python: print and other Python calls cannot run in it; "
        f"got float64 (4,) [{HERE} line {lines_of(prints) + 1}]",
    ),
    (
        lambda: DATA.map("x", prints_below),
        jl.PipelineError,
        "stage 0 'prints_below' on field 'x': prints: a kernel runs without Python: print and other Python calls cannot run in it; "
        f"got float64 (4,) [{HERE} line {lines_of(prints) + 1}]",
    ),
    (
        lambda: DATA.map("x", rolls),
        jl.PipelineError,
        "stage 0 'rolls' on field 'x': rolls: np.random in a kernel would make batches irreproducible: "
        "draws must come from jl.uniform(key, k) and its like; "
        f"got float64 (4,) [{HERE} line {lines_of(rolls) + 1}]",
    ),
    (
        lambda: DATA.map("x", rolls_python),
        jl.PipelineError,
        "stage 0 'rolls_python' on field 'x': rolls_python: random in a kernel would make batches irreproducible: "
        "draws must come from jl.uniform(key, k) and its like; "
        f"got float64 (4,) [{HERE} line {lines_of(rolls_python) + 1}]",
    ),
    (
        lambda: DATA.map("x", multiplies),
        jl.PipelineError,
        "stage 0 'multiplies' on field 'x': multiplies: np.dot, np.linalg and @ run through Python, "
        "which no kernel can: write the loops; "
        f"got float64 (4,) [{HERE} line {lines_of(multiplies) + 1}]",
    ),
    (
        lambda: DATA.map("x", from_list),
        jl.PipelineError,
        "stage 0 'from_list' on field 'x': from_list: 'TABLE' is a list: give a tuple or an array; "
        f"got float64 (4,) [{HERE} line {lines_of(from_list) + 1}]",
    ),
    (
        lambda: DATA.map("x", recurses),
        jl.PipelineError,
        "stage 0 'recurses' on field 'x': recurses: a kernel cannot call itself; "
        f"got float64 (4,) [{HERE} line {lines_of(recurses) + 0}]",
    ),
    (
        lambda: DATA.map("x", bad_array),
        jl.PipelineError,
        "stage 0 'bad_array' on field 'x': cannot take float64: Unknown attribute 'foo' of type array(float64, 1d, C); "
        f"got float64 (4,) [{HERE} line {lines_of(bad_array) + 1}]",
    ),
    (
        lambda: DATA.map("x", writes_source),
        jl.PipelineError,
        "stage 0 'writes_source' on field 'x': cannot take float64: a source is the data itself: write to dst alone; "
        f"got float64 (4,) [{HERE} line {lines_of(writes_source) + 1}]",
    ),
    (
        lambda: DATA.map("x", two_returns),
        jl.PipelineError,
        "stage 0 'two_returns' on field 'x': cannot take float64: it returns more than one type: str, float64; "
        f"got float64 (4,) [{HERE} line {lines_of(two_returns)}]",
    ),
    (
        lambda: DATA.map("x", adds_text),
        jl.PipelineError,
        "stage 0 'adds_text' on field 'x': cannot take float64: no kernel can run add(float64, str); "
        f"got float64 (4,) [{HERE} line {lines_of(adds_text) + 1}]",
    ),
    (
        lambda: DATA.map("x", gives_one),
        jl.PipelineError,
        "stage 0 'gives_one' on field 'x': cannot take float64: needs_two(float64): missing a required argument: 'b'; "
        f"got float64 (4,) [{HERE} line {lines_of(gives_one) + 1}]",
    ),
    (
        lambda: DATA.map("x", imports),
        jl.PipelineError,
        "stage 0 'imports' on field 'x': cannot take float64: a kernel has no import: do it at the top of the file; "
        f"got float64 (4,) [{HERE} line {lines_of(imports) + 1}]",
    ),
    (
        lambda: DATA.map("x", catches),
        jl.PipelineError,
        "stage 0 'catches' on field 'x': cannot take float64: Exception object cannot be stored into variable (error); "
        f"got float64 (4,) [{HERE} line {lines_of(catches) + 3}]",
    ),
    (
        lambda: jl.Dataset(x=np.ones(3, np.longdouble)).map("x", jl.normalize(0, 1)),
        jl.PipelineError,
        "stage 0 'normalize' on field 'x': normalize takes numbers of at most 64 bits: give array.astype('float64'); "
        f"got {np.dtype(np.longdouble)} () [{{here}}]",
    ),
    (
        lambda: jl.Dataset(x=np.ones(3, complex)).map("x", jl.stage(same)),
        jl.PipelineError,
        "stage 0 'same' on field 'x': same takes numbers of at most 64 bits: give array.real and array.imag as fields; "
        f"got complex128 () [{HERE} line {lines_of(same)}]",
    ),
    (
        lambda: DATA.map("x", jl.stage(out=lambda spec: 3)(same)),
        jl.PipelineError,
        "stage 0 'same' on field 'x': same: out must give a jl.Spec for each target, got 3; "
        f"got float64 (4,) [{HERE} line {lines_of(same)}]",
    ),
    (
        lambda: DATA.map("x", sorts_source),
        jl.PipelineError,
        "stage 0 'sorts_source' on field 'x': cannot take float64: a source is the data itself: write to dst alone; "
        f"got float64 (4,) [{HERE} line {lines_of(sorts_source)}]",
    ),
    (
        lambda: DATA.map("x", jl.stage),
        TypeError,
        "stage of jitloader is not a stage: give one such as jl.normalize(mean, std), or a function",
    ),
    (lambda: DATA.map("x", jl.scale), TypeError, "scale makes a stage: call it, as jl.scale()"),
    (lambda: DATA.map("x", jl.normalize), TypeError, "normalize makes a stage: call it, as jl.normalize(mean, std)"),
    (
        lambda: DATA.map("x", [jl.clip(0, 1)]),
        TypeError,
        "stages come one by one, not as a list: map(field, *stages)",
    ),
    (lambda: DATA.map("x"), ValueError, "map takes at least one stage, as map('x', jl.clip(0, 1))"),
    (lambda: DATA.map(3, jl.clip(0, 1)), TypeError, "map takes the name of a field, or several, got 3"),
    (
        lambda: DATA.map("x", np.add),
        TypeError,
        "add takes 2 arguments: a stage function takes one number, or (src, dst, key)",
    ),
    (
        lambda: DATA.map("x", by_keyword),
        TypeError,
        "by_keyword takes 'by=2', and a stage function has positional arguments alone: let it stand in the closure",
    ),
    (
        lambda: DATA.map("x", functools.partial(math.pow, 2)),
        TypeError,
        "a stage is made of a plain function, got an object of type partial: wrap it in def or lambda",
    ),
    (
        lambda: DATA.map("x", Holder().method),
        TypeError,
        "a stage is made of a plain function, got an object of type method: wrap it in def or lambda",
    ),
    (
        lambda: DATA.map("x", len),
        jl.PipelineError,
        "stage 0 'len' on field 'x': cannot take float64: no kernel can run len(float64); got float64 (4,) [{here}]",
    ),
    (
        lambda: IMAGES.map("image", jl.random_crop(8, padding=2, fill=300)),
        jl.PipelineError,
        "stage 0 'random_crop(8)' on field 'image': random_crop(8) puts in 300, which uint8 cannot hold; "
        "got uint8 (8, 8, 3) [{here}]",
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
        lambda: DATA.map("x", far)[:],
        jl.PipelineError,
        "stage 0 'far' on field 'x', row 0, epoch 0: IndexError: "
        "index 10000000 is out of bounds for axis 0 with size 4\n"
        f"  in {HERE} line {lines_of(far) + 1}; data[0] reproduces it",
    ),
    (
        lambda: list(jl.Loader(DATA.map("x", near), 4)),
        jl.PipelineError,
        "stage 0 'near' on field 'x', row 0, epoch 0: IndexError: index 7 is out of bounds for axis 0 with size 4\n"
        f"  in {HERE} line {lines_of(near) + 1}; data[0] reproduces it",
    ),
    (
        lambda: DATA.map("x", raises)[:],
        jl.PipelineError,
        "stage 0 'raises' on field 'x', row 1, epoch 0: ValueError: too large\n"
        f"  in {HERE} line {lines_of(raises) + 2}; data[1] reproduces it",
    ),
    (
        lambda: jl.Dataset(x=np.array([3.0, 300.0])).map("x", jl.cast("uint8"))[:],
        jl.PipelineError,
        "stage 0 'cast(uint8)' on field 'x', row 1, epoch 0: value 300.0 does not fit uint8\n"
        "  in {here}; data[1] reproduces it",
    ),
    (
        lambda: jl.Dataset(x=np.array([3.0, np.nan])).map("x", jl.cast("uint8"))[1],
        jl.PipelineError,
        "stage 0 'cast(uint8)' on field 'x', row 1, epoch 0: value nan does not fit uint8\n"
        "  in {here}; data[1] reproduces it",
    ),
    (
        lambda: DATA.map("x", jl.elementwise(whole, dtype="uint8"))[0],
        jl.PipelineError,
        "stage 0 'whole' on field 'x', row 0, epoch 0: a result does not fit uint8\n"
        f"  in {HERE} line {lines_of(whole)}; data[0] reproduces it",
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


@pytest.mark.parametrize("function", [math.sqrt, abs, float, np.sqrt, np.float32, jl.elementwise(math.sqrt)])
def test_functions_of_python_and_numpy_are_stages(function: Any) -> None:
    """What Numba knows by itself is linked like a function of the user's own, and gives its own results."""
    found = DATA.map("x", function)[:].x

    plain = math.sqrt if isinstance(function, tuple) else function
    assert (found == np.array([[plain(v) for v in row] for row in X])).all()


def test_two_ufuncs_do_not_share_a_kernel() -> None:
    """The key of a kernel tells one built-in function from another."""
    assert not (DATA.map("x", np.sqrt)[:].x == DATA.map("x", np.cbrt)[:].x).all()


def test_rows_in_steps() -> None:
    """A slice of any step is a batch."""
    assert (DATA[::-3].y == Y[::-3]).all()
    assert (DATA[8:1:-2].x == X[8:1:-2]).all()


@pytest.mark.parametrize("again", [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy, copy.copy])
def test_batches_pickle_and_copy(again: Callable[[Any], Any]) -> None:
    """A batch of a data set, of a loader, after apply or of names that are no identifiers comes back as it was."""
    applied = DATA.apply(lambda batch: {"z": batch.x + 1})
    for batch in (DATA[0:3], DATA[2], next(iter(jl.Loader(DATA, 3))), applied[0:2], jl.Dataset({"a b": Y})[0:2]):
        back = again(batch)
        assert type(back) is type(batch)
        for one, other in zip(back, batch, strict=True):
            np.testing.assert_array_equal(one, other)


def test_data_sets_of_plain_arrays_pickle(tmp_path: Path) -> None:
    """Arrays in memory travel along, files by reference; rows taken, fields kept and joined parts stay."""
    np.save(tmp_path / "x.npy", X)
    data = (
        jl.Dataset(x=tmp_path / "x.npy", y=Y)
        .concat(jl.Dataset(x=X[::-1].copy(), y=Y))
        .select([3, 12, 3])
        .keep("y", "x")
    )
    text = pickle.dumps(data)
    back = pickle.loads(text)

    assert b"x.npy" in text
    assert back.fields == ("y", "x")
    for one, other in zip(back[:], data[:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_deepcopy_of_mapped_data(tmp_path: Path) -> None:
    """A deep copy holds its own bytes."""
    np.save(tmp_path / "x.npy", X)
    made = copy.deepcopy(jl.Dataset(x=tmp_path / "x.npy").map("x", jl.clip(0, 1)))

    (tmp_path / "x.npy").write_bytes(b"")
    assert (made[:].x == np.clip(X, 0, 1)).all()


def test_cut_files_are_seen_before_they_are_read(tmp_path: Path) -> None:
    """Every way to read rows asks first whether the mapped file is still whole."""
    np.save(tmp_path / "x.npy", np.zeros((5000, 4)))
    data = jl.Dataset(x=tmp_path / "x.npy")
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(4096)
    reads: list[Callable[[], Any]] = [
        data.verify,
        lambda: data[4000],
        lambda: data[:],
        lambda: data.statistics("x"),
        lambda: data.save(tmp_path / "out"),
        lambda: data.concat(jl.Dataset(x=np.zeros((1, 4)))).take(3)[:],
    ]
    for read in reads:
        with pytest.raises(jl.DataError, match="truncated under its map: 160128 bytes expected, 4096 found"):
            read()


def test_seeds_of_split_may_be_negative() -> None:
    """Any whole number is a seed, and another one parts otherwise."""
    first, second = (DATA.split(0.5, 0.5, seed=seed)[0][:].y for seed in (-1, 1))

    assert len(first) == len(second) == 5 and (first != second).any()


def mean(src: Any, dst: Any, key: Any) -> None:
    dst[0] = src.mean()


def test_a_method_of_the_name_of_the_stage_is_no_call_of_itself() -> None:
    """What is loaded is looked at, not what is only named."""
    assert (DATA.map("x", jl.stage(shape=())(mean))[:].x == X.mean(1)).all()


def test_closures_over_lists_are_refused() -> None:
    """What a closure holds is looked at like a global."""
    values = [1.0, 2.0]

    def pick(src: Any, dst: Any, key: Any) -> None:
        dst[0] = values[0]

    with pytest.raises(jl.PipelineError, match="pick: 'values' is a list: give a tuple or an array"):
        DATA.map("x", pick)


def test_functions_that_call_each_other_are_refused() -> None:
    """Recursion over two functions is found like that of one."""
    with pytest.raises(jl.PipelineError, match="a kernel cannot call itself"):
        DATA.map("x", ping)


def ping(x: Any) -> Any:
    return pong(x)


def pong(x: Any) -> Any:
    return ping(x - 1)


def test_functions_of_one_signature_are_taken() -> None:
    """A function compiled by the user for arrays that can be written to may be called with a source."""
    numba = pytest.importorskip("numba")
    total = numba.njit("float64(float64[::1])")(lambda values: values.sum())

    def sums(src: Any, dst: Any, key: Any) -> None:
        dst[0] = total(src)

    assert (DATA.map("x", jl.stage(shape=())(sums))[:].x == X.sum(1)).all()


def test_fields_of_anything_with_keys() -> None:
    """What can be read by key, as a data frame or an .npz file, gives its columns as fields."""

    class Frame:
        def keys(self) -> list[str]:
            return ["a", "b"]

        def __getitem__(self, name: str) -> Any:
            return Y

    assert jl.Dataset(Frame()).fields == ("a", "b")  # type: ignore[arg-type]
    assert jl.Dataset(a=X, b=X).map({"a": 0, "b": 0}.keys(), jl.clip(0, 1))[0].b.max() == 1  # type: ignore[arg-type]


def test_a_variable_of_two_types() -> None:
    """The message names the variable and both types; which of the function's lines it gives differs between Pythons."""
    with pytest.raises(jl.PipelineError) as raised:
        DATA.map("x", two_kinds)
    text, line = re.fullmatch(r"(.*) \[.* line (\d+)\]", str(raised.value)).groups()  # type: ignore[union-attr]
    wanted = (
        "stage 0 'two_kinds' on field 'x': cannot take float64: cannot unify float64 and str for 'y'; got float64 (4,)"
    )
    assert text == wanted
    assert 0 < int(line) - lines_of(two_kinds) <= 4
