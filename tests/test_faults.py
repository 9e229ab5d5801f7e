"""Faults injected: whatever goes wrong, wherever, is told by its row, and the loader is usable afterwards."""

import os
import subprocess
import sys

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
