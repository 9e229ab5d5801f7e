"""Faults injected: whatever goes wrong, wherever, is told by its row, and the loader is usable afterwards."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import jitloader as jl


def told(make):
    """The text of the PipelineError that all batches of a loader, and that its rows one by one, end in."""
    with pytest.raises(jl.PipelineError) as caught:
        list(make())
    text = str(caught.value)
    assert len(text.splitlines()) <= 5 and os.path.dirname(jl.__file__) not in text
    return text


# -- Python functions over what is no plain array ---------------------------------------------------------------------

RAGGED = jl.Dataset(t=jl.ragged(np.arange(6), [0, 2, 2, 6]), y=np.arange(3))


def test_functions_of_a_row_get_ragged_rows():
    """A ragged row comes as the array it is, in a batch, alone, and with the rows in another order."""
    data = RAGGED.apply_rows(lambda row, rng: {"n": row["t"].sum() + 10 * len(row["t"])})
    assert [n for batch in jl.Loader(data, 2) for n in batch.n.tolist()] == [21, 0, 54]
    assert [int(data[k].n) for k in range(3)] == [21, 0, 54] and data[[2, 0]].n.tolist() == [54, 21]
    assert data[2].t.tolist() == [2, 3, 4, 5] and data[1].t.tolist() == []


def test_functions_of_a_batch_get_the_same_alone():
    """A function that takes a Ragged batch takes one row of it; what it gives is the sample, numbers stand for themselves."""
    data = RAGGED.apply(lambda batch: {"total": batch.t.values.sum(), "mean": 3.0})
    assert (data[2].total, data[2].mean, data[2].t.tolist()) == (14, 3.0, [2, 3, 4, 5])
    assert RAGGED.apply(lambda batch: batch.t)[2].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "first, then, text",
    [
        (lambda b: b.y, lambda row, rng: {}, "takes rows of a batch with named fields; ndarray comes"),
        (lambda b: None, lambda row, rng: {}, "takes rows of a batch with named fields; NoneType comes"),
        (lambda b: {"y": [1]}, lambda row, rng: {}, "row 1, epoch 0: IndexError: list index out of range"),
        (
            None,
            lambda row, rng: {"z": [[1], [1, 2]]},
            "field 'z' is no array: setting an array element with a sequence",
        ),
        (None, lambda row, rng: {1: 2}, "gives a field named 1: give a text"),
    ],
)
def test_functions_that_do_not_fit_together(first, then, text):
    """What one Python function gives and the next cannot take is told by the next one's name and line."""
    data = jl.Dataset(y=np.arange(2))
    data = (data if first is None else data.apply(first)).apply_rows(then)
    found = told(lambda: jl.Loader(data, 2))
    assert text in found and "<lambda>" in found and __file__ in found


# -- the value that is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [
    jl.random_apply(jl.lookup(np.arange(256)), 1.0),
    jl.random_choice(jl.lookup(np.arange(256)), jl.lookup(np.arange(9))),
    jl.random_apply(jl.random_choice(jl.lookup(np.arange(256)), jl.lookup(np.arange(200))), 1.0),
], ids=str)  # fmt: skip
def test_a_drawn_stage_names_the_value_it_refused(stage):
    """A stage that was drawn refuses a value by its number, in whichever field of those mapped together it stands."""
    data = jl.Dataset(a=np.array([3, 3]), b=np.array([3, 300])).map(("a", "b"), stage)
    assert "field 'a', 'b', row 1, epoch 0: value 300 does not fit\n" in told(lambda: jl.Loader(data, 2))


WIDE = """
import numpy as np, jitloader as jl
x = np.zeros((600, 1000)); x[400] = 999
for threads in (1, 2):
    try:
        list(jl.Loader(jl.Dataset(x=x).map("x", jl.cast("uint8"), jl.cast("float64")), 300, prefetch=0, threads=threads))
    except jl.PipelineError as error:
        print(str(error).splitlines()[0])
"""


def test_without_a_compiler_the_row_is_named_too():
    """With NUMBA_DISABLE_JIT a value that does not fit is told by its row, with several threads asked for or one."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    text = "stage 0 'cast(uint8)' on field 'x', row 400, epoch 0: value 999.0 does not fit uint8"
    assert done.stdout.splitlines() == [text, text]


# -- every kind of stage, at every place of a chain, on every place of an epoch ---------------------------------------

BAD = 700  # a row that holds it fails


@jl.elementwise
def value(x):
    if x > 600:
        raise ValueError("bad value")
    return x + 1


@jl.stage
def sample(src, dst, key):
    for i in range(src.size):
        if src[i] > 600:
            raise ValueError("bad value")
        dst[i] = src[i] + 1


@jl.stage(inputs=2)
def joint(src, other, dst, key):
    for i in range(src.size):
        if src[i] > 600 and other[i] == 0:
            raise ValueError("bad value")
        dst[i] = src[i] + 1


@jl.stage
def outside(src, dst, key):
    for i in range(src.size):
        dst[i] = src[min(src[i], 500) * (i - 1) if src[i] > 600 else i] + 1


@jl.batch_stage
def batch(j, xs, x, key):
    for i in range(x.size):
        if xs[j, i] > 600:
            raise ValueError("bad value")
        x[i] = xs[j, i] + 1


@jl.elementwise
def plus(x):
    return x + 1


@jl.batch_stage
def plus_batch(j, xs, x, key):
    for i in range(x.size):
        x[i] = xs[j, i] + 1


def applied(b):
    if (b.x > 600).any():
        raise ValueError("bad value")
    return {"x": b.x + 1}


def applied_row(row, rng):
    if (row["x"] > 600).any():
        raise ValueError("bad value")
    return {"x": row["x"] + 1}


BUILT_IN = jl.lookup(np.arange(1, 602))
KINDS = {  # how it is linked, and what its error says
    "value": (lambda data: data.map("x", value), "'value' on field 'x', row {row}, epoch {epoch}: ValueError: bad value"),
    "index, value": (lambda data: data.map("x", jl.random_flip(axis=0), value), "'value' on field 'x', row {row}, epoch {epoch}: ValueError"),
    "sample": (lambda data: data.map("x", sample), "'sample' on field 'x', row {row}, epoch {epoch}: ValueError: bad value"),
    "joint": (lambda data: data.map(("x", "zero"), joint), "'joint' on field 'x', 'zero', row {row}, epoch {epoch}: ValueError: bad value"),
    "out of bounds": (lambda data: data.map("x", outside), "'outside' on field 'x', row {row}, epoch {epoch}: IndexError"),
    "built-in": (lambda data: data.map("x", BUILT_IN), "'lookup(601)' on field 'x', row {row}, epoch {epoch}: value 70"),
    "drawn": (lambda data: data.map("x", jl.random_choice(BUILT_IN, BUILT_IN)), "row {row}, epoch {epoch}: value 70"),
    "batch": (lambda data: data.map("x", batch), "'batch' on field 'x', row {row}, epoch {epoch}: ValueError: bad value"),
    "apply": (lambda data: data.apply(applied), "stage 'applied', rows {first}, "),
    "apply_rows": (lambda data: data.apply_rows(applied_row), "stage 'applied_row', row {row}, epoch {epoch}: ValueError: bad value"),
}  # fmt: skip
PLAIN = {  # a step that adds one and never fails, beside a kind of step that only such can follow
    "batch": lambda data: data.map("x", plus_batch),
    "apply": lambda data: data.apply(lambda b: {"x": b.x + 1}),
    "apply_rows": lambda data: data.apply_rows(lambda row, rng: {"x": row["x"] + 1}),
}
ROWS, SIZE = 23, 5


def chained(kind, place):
    """Three steps that add one, of which the one at `place` is of this kind; and the array under them."""
    x = np.arange(2 * ROWS).reshape(ROWS, 2)
    data = jl.Dataset(x=x, zero=np.zeros((ROWS, 2), np.int64), i=np.arange(ROWS))
    plain = PLAIN.get(kind, lambda data: data.map("x", plus))
    for k in range(3):
        data = KINDS[kind][0](data) if k == place else plain(data)
    return data, x


def fail_everywhere(kind, place, shuffle=None):
    """Run epochs in which one row fails: what is before it comes, it is named, and once it is mended all goes on."""
    data, x = chained(kind, place)
    for row, epoch, how in [
        (0, 0, {}),
        (11, 2, {"shuffle": True}),
        (ROWS - 1, 1, {"prefetch": 0}),
        (7, 0, {"threads": 2, "shuffle": True}),
    ]:
        how = {**how, "shuffle": shuffle or how.get("shuffle", False)}
        loader = jl.Loader(data, SIZE, seed=3, **how)
        loader.epoch = epoch
        kept = x[row].copy()
        x[row] = BAD
        got = []
        with pytest.raises(jl.PipelineError) as caught:
            for b in loader:
                got.append(b.i.tolist())
        text = str(caught.value)
        loader.epoch = epoch
        x[row] = kept
        whole = list(loader)
        order = [b.i.tolist() for b in whole]
        at = next(k for k, rows in enumerate(order) if row in rows)
        first = ", ".join(map(str, order[at][:3]))
        assert KINDS[kind][1].format(row=row, epoch=epoch, first=first) in text, text
        assert __file__ in text and os.path.dirname(jl.__file__) not in text and len(text.splitlines()) <= 5
        assert got == order[:at]
        assert sorted(sum(order, [])) == list(range(ROWS))
        for b in whole:
            assert np.array_equal(np.sort(b.x), np.sort(x[b.i] + 3))
        assert loader.state_dict()["epoch"] == epoch + 1


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_fails_in_plain_python(kind, place, monkeypatch):
    """A failure of each kind of stage, first, in the middle and last in its chain."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    fail_everywhere(kind, place)


NIGHTLY = {"drawn", "value", "joint"}  # compiled: the others have the same paths


@pytest.mark.parametrize(
    "kind, place",
    [
        pytest.param(k, p, marks=[] if p == 1 and k not in NIGHTLY else [pytest.mark.nightly])
        for k in KINDS
        for p in range(3)
    ],
)
def test_a_row_that_fails_compiled(kind, place):
    """The same, compiled, one order alone."""
    fail_everywhere(kind, place, shuffle=True)
