"""`loader.check()` finds the first row that fails, before it is run compiled, and says where compiled and plain Python part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitloader as jl
from jitloader import check as module
from jitloader.check import Check, Difference, apart
from jitloader.compose import Ragged

HERE = str(Path(__file__))
X = np.arange(400.0).reshape(100, 4)


def twice(v: Any) -> Any:
    return v * 2


def inverse(v: Any) -> Any:
    return 1.0 / v


def quotient(v: Any) -> Any:
    return 10 // v


def beyond(src: Any, dst: Any, key: Any) -> None:
    for i in range(src.size):
        dst[i] = src[i + 1 if src[0] == 8.0 else i]


def tenth(src: Any, dst: Any, key: Any) -> None:
    for i in range(src.size):
        dst[i] = src[i] * 0.1


def message(loader: jl.Loader, rows: Any = None, error: type[Exception] = jl.PipelineError) -> str:
    with pytest.raises(error) as caught:
        loader.check(rows)
    return str(caught.value)


def line_of(function: Any, down: int) -> int:
    return function.__code__.co_firstlineno + down


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 200),
    world=st.integers(1, 4),
    wanted=st.integers(1, 80),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_rows_are_spread_over_the_epoch(length: int, world: int, wanted: int, shuffle: bool, seed: int) -> None:
    """As many rows as asked for, or all: this rank's own, in the order they come, the first and the last among them."""
    data = jl.Dataset(x=np.arange(length))
    rank = seed % world
    loader = jl.Loader(data, length, shuffle=shuffle, seed=seed, rank=rank, world_size=world, tail="wrap")
    places = np.arange(-(-length // world)) * world + rank
    order = np.concatenate([np.asarray(jl.Loader(data, length, shuffle=shuffle, seed=seed)[0].x)]) if length else []
    own = np.asarray(order)[places % length]
    rows = loader.check(wanted).rows
    assert len(rows) == min(wanted, len(own))
    at, found = 0, []
    for row in rows:
        at += own[at:].tolist().index(row)
        found.append(at)
    gaps = np.diff(found)
    assert found[0] == 0 and (len(rows) == 1 or found[-1] == len(own) - 1)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_what_a_check_gives() -> None:
    """Rows, stages, no differences, as text; 64 rows where nothing is said, fewer large ones; numbers and masks."""
    data = jl.Dataset(x=X).map("x", twice, jl.clip(0, 500))
    loader = jl.Loader(data, 10, shuffle=True)
    found = loader.check()
    assert found.same and len(set(found.rows.tolist())) == 64 and found.stages == ("twice", "clip(0, 500)")
    assert repr(found) == "64 rows checked: twice, clip(0, 500); compiled and plain Python agree bit by bit"
    assert loader.check([3, -1]).rows.tolist() == [3, 99]
    assert loader.check(np.arange(100) == 7).rows.tolist() == [7]
    assert loader.check([]).rows.tolist() == []
    assert repr(jl.Loader(jl.Dataset(x=X), 4).check(1)) == (
        "1 row checked: no stages; compiled and plain Python agree bit by bit"
    )
    assert loader.state_dict()["position"] == 0 and loader.epoch == 0
    assert message(loader, 0, ValueError) == "check: rows must be at least 1, got 0"
    assert message(loader, [100], IndexError) == "row 100 is out of range: the data has 100 rows"
    assert message(loader, 0.5, ValueError) == "check: rows must be 1-D, got shape ()"
    assert module.number_of_rows(jl.Dataset(x=np.zeros((1, 300, 300)))) == 11
    assert module.number_of_rows(jl.Dataset(x=np.zeros((1, 3000, 3000), "uint8"))) == 8


def test_draws_are_those_of_the_epoch() -> None:
    """A stage that fails on some draws fails in the check as in the batch."""
    data = jl.Dataset(x=np.full((50, 1), 250, "uint8")).map("x", jl.cast("int64"), drawn, jl.cast("uint8"))
    loader = jl.Loader(data, 50, shuffle=True, seed=5, threads=1, prefetch=0)
    for epoch in (0, 3):
        loader.epoch = epoch
        told = message(loader, 50)
        assert f"epoch {epoch}: value 256 does not fit uint8" in told
        with pytest.raises(jl.PipelineError) as caught:
            list(loader)
        assert str(caught.value) == told


def drawn(src: Any, dst: Any, key: Any) -> None:
    dst[0] = src[0] + 6 * (jl.randint(key, 0, 8) == 0)


def test_out_of_bounds() -> None:
    """A sample stage that reads beyond its row: the error names stage, row and line, and the row is not run compiled."""
    loader = jl.Loader(jl.Dataset(x=X).map("x", beyond), 10, shuffle=True)
    assert message(loader, 100) == (
        "stage 0 'beyond' on field 'x', row 2, epoch 0: IndexError: index 4 is out of bounds for axis 0 with size 4\n"
        f"  in {HERE} line {line_of(beyond, 2)}; data[2] reproduces it"
    )
    assert len(loader.check([0, 1, 3]).rows) == 3


def test_division_by_zero() -> None:
    """Of whole numbers, which plain Python refuses, and of floats, which are inf in plain Python too."""
    whole = jl.Loader(jl.Dataset(x=X.astype("int64")).map("x", quotient), 10)
    assert message(whole) == (
        "stage 0 'quotient' on field 'x', row 0, epoch 0: ZeroDivisionError: integer division or modulo by zero\n"
        f"  in {HERE} line {line_of(quotient, 1)}; data[0] reproduces it"
    )
    data = jl.Dataset(x=X).map("x", jl.clip(0, 500), inverse)
    assert message(jl.Loader(data, 10)) == (
        "stage 1 'inverse' on field 'x', row 0, epoch 0: divides by zero, which compiled is inf or nan\n"
        f"  in {HERE} line {line_of(inverse, 1)}"
    )
    assert data[0].x[0] == np.inf and jl.Loader(data, 10).check([1, 2]).same
    built_in = jl.Dataset(x=np.zeros((3, 2))).map("x", jl.log1p())
    assert jl.Loader(built_in, 3).check().same


def test_differences_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 times a plain number is float32 in NumPy and float64 in a kernel: the last place differs, and is told."""
    x = np.arange(40, dtype="float32").reshape(10, 4)
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    loader = jl.Loader(jl.Dataset(x=x).map("x", tenth), 4)
    found = loader.check()
    single = x * np.float32(0.1)
    double = (x.astype("float64") * 0.1).astype("float32")
    rows = np.flatnonzero((single != double).any(axis=1))
    most = float(np.abs(single.astype("float64") - double).max())
    assert not found.same and found.differences == (Difference("x", len(rows), int(rows[0]), most),)
    assert repr(found) == (
        f"10 rows checked: tenth\n  compiled, 'x' differs on {len(rows)} rows, first on row {rows[0]}, "
        f"by at most {most:.3g}"
    )
    assert repr(Check(np.arange(1), ("a", "b"), (Difference("y", 1, 0, 0.5),))) == (
        "1 row checked: a, b\n  compiled, 'y' differs on 1 row, first on row 0, by at most 0.5"
    )


def test_every_kind_of_field() -> None:
    """Ragged rows, padding with a mask, new fields, bits that no kernel computes with."""
    words = jl.ragged({"a": np.arange(10), "b": np.arange(10) * 0.5}, [0, 3, 3, 10])
    data = jl.Dataset(words).map("a", jl.pad_to_longest(mask="mask")).map("b", twice)
    found = jl.Loader(data, 2, shuffle=True).check()
    assert found.same and sorted(found.rows.tolist()) == [0, 1, 2]
    other = jl.Dataset(s=np.array(["ab", "c"]), h=np.array([1, np.nan], "float16"), z=np.zeros((2, 0)))
    assert jl.Loader(other, 2).check().same


def test_applied_functions_run() -> None:
    """Python functions of a batch see batches of the rows; what they raise is what a batch raises."""
    sizes: list[int] = []

    def seen(batch: Any) -> Any:
        sizes.append(len(batch.x))
        return {"x": batch.x + 1}

    def fails(batch: Any) -> Any:
        raise KeyError("mine")

    data = jl.Dataset(x=X).map("x", twice)
    found = jl.Loader(data.apply(seen), 30).check(70)
    assert found.stages == ("twice", "seen") and sizes == [30, 30, 10]
    line = line_of(fails, 1)
    assert message(jl.Loader(data.apply(fails), 30), [5, 9]) == (
        f"stage 'fails', rows 5, 9, epoch 0: KeyError: 'mine' [{HERE} line {line}]"
    )


def test_orders_of_the_users() -> None:
    """A row that is none, and an order that raises, are named."""

    def far(position: int, count: int, seed: int, epoch: int) -> int:
        return position + 1

    def broken(position: int, count: int, seed: int, epoch: int) -> int:
        return position if position < 50 else count // (position - 99)

    data = jl.Dataset(x=X)
    assert message(jl.Loader(data, 10, order=far), 100, IndexError) == (
        "row 100 is out of range: the data has 100 rows"
    )
    assert message(jl.Loader(data, 10, order=broken)) == (
        "order custom(broken) at position 99, epoch 0: ZeroDivisionError: integer division or modulo by zero"
    )


def test_closed_and_empty() -> None:
    """A closed loader has no rows to check, an empty epoch none that fail."""
    loader = jl.Loader(jl.Dataset(x=X).take(0), 4)
    assert loader.check().rows.tolist() == []
    loader.close()
    assert message(loader, None, ValueError) == "this loader is closed"


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.5, np.inf, -np.inf, np.nan, -np.nan])


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5))
def test_apart(pairs: list[tuple[float, float]]) -> None:
    """Two arrays are apart where any pair of numbers differs by value or by the sign of zero."""
    one, other = (np.array([p[k] for p in pairs], "float32") for k in (0, 1))
    gaps = []
    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        if a == b and np.signbit(a) == np.signbit(b) or (a != a and b != b):
            continue
        gaps.append(np.inf if a != a or b != b else abs(a - b))
    assert apart(one, other) == (max(gaps) if gaps else None)


def test_apart_of_other_kinds() -> None:
    """Shapes and lengths that differ, and bytes that are no numbers, are infinitely apart; whole numbers by value."""
    assert apart(np.zeros(2), np.zeros(3)) == np.inf
    assert apart(np.array(["a"]), np.array(["b"])) == np.inf and apart(np.array(["a"]), np.array(["a"])) is None
    assert apart(np.array([3, 4], "uint8"), np.array([3, 250], "uint8")) == 246
    rows = Ragged(np.arange(3), np.array([0, 3]))
    assert apart(rows, Ragged(np.arange(3), np.array([0, 2]))) == np.inf
    assert apart(rows, Ragged(np.arange(3) * 2, np.array([0, 3]))) == 2


def half(src, dst, key):
    dst[0] = src[0]


def gives(src, dst, key):
    return src * 2


def test_elements_that_a_stage_leaves_unwritten_are_found():
    """They hold what lay in memory before: another thing each time."""
    loader = jl.Loader(jl.Dataset(x=np.ones((100, 3))).map("x", half), 10)
    with pytest.raises(jl.PipelineError, match=r"^field 'x', row 0: 'half' \[.*\] leaves elements of its target unwritten$"):
        loader.check()
    inner = jl.Dataset(x=np.ones((100, 3))).map("x", half, jl.normalize(1, 2))
    with pytest.raises(jl.PipelineError, match="'half' .* leaves elements of its target unwritten"):
        jl.Loader(inner, 10).check()
    with pytest.raises(TypeError, match="^gives returns a value, which nobody would see: a stage writes every element of its target$"):
        jl.Dataset(x=np.ones((100, 3))).map("x", gives)
