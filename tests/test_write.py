"""Rows written from anywhere: what is in the folder is what came, however often the writer was killed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import jitloader as jl
from jitloader import bars, storage
from jitloader.errors import DataError, PipelineError
from jitloader.storage import grow

X = np.arange(300.0).reshape(100, 3)
SPECS = {"x": ("float64", (3,)), "t": ("int32", (None,))}


def make(i: int) -> dict[str, Any]:
    """Row i: three numbers, and i % 7 words."""
    return {"x": X[i], "t": np.arange(i % 7) + i}


def whole(folder: Any, count: int = 100) -> bool:
    """Whether a folder holds the first rows of `make`, and nothing else."""
    arrays = storage.open_fields(folder)
    lengths = np.arange(count) % 7
    names = sorted(name for name in os.listdir(folder))
    return (
        names == ["manifest.json", "t.npy", "t.offsets.npy", "x.npy"]
        and np.array_equal(np.load(Path(folder, "x.npy")), X[:count])
        and np.array_equal(arrays["t.offsets"], np.cumsum([0, *lengths]))
        and np.array_equal(arrays["t"], np.concatenate([np.arange(n) + i for i, n in enumerate(lengths)]))
    )


class Pair(NamedTuple):
    x: Any
    t: Any


class Sequence:
    """A data set as torch has them."""

    def __init__(self, form: Any = make) -> None:
        self.form, self.asked = form, []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        return self.form(i)


# -- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [None, 1, 5])
def test_a_function_of_the_row(tmp_path: Path, threads: int | None) -> None:
    """Rows made by a function, by several threads, lie in order; the folder opens with its ragged field."""
    asked: list[int] = []

    def noted(i: int) -> dict[str, Any]:
        asked.append(i)
        return make(i)

    data = jl.write(tmp_path / "d", 100, noted, threads=threads, **SPECS)

    assert sorted(asked) == [0, *range(100)][len(asked) == 100 :]
    assert whole(tmp_path / "d")
    assert data.fields == ("x", "t") and len(data) == 100
    assert data[9].x.tolist() == X[9].tolist() and data[9].t.tolist() == [9, 10]
    assert jl.open(tmp_path / "d", fields=["t"])[13].t.tolist() == [13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize(
    "rows",
    [
        lambda: (make(i) for i in range(100)),
        lambda: [make(i) for i in range(100)],
        lambda: Sequence(),
        lambda: Sequence(lambda i: tuple(make(i).values())),
        lambda: [Pair(**make(i)) for i in range(100)],
        lambda: map(make, range(100)),
    ],
)
def test_forms_of_rows(tmp_path: Path, rows: Any) -> None:
    """Generators, lists and data sets, of dicts, tuples and NamedTuples."""
    jl.write(tmp_path, rows(), **SPECS)

    assert whole(tmp_path)


def test_specs_are_those_of_the_first_row(tmp_path: Path) -> None:
    """Fields that no spec names are as in row 0; numbers are wide, and parts of a tuple are x and y."""
    data = jl.write(tmp_path / "a", ((np.uint8(i), i, 0.5) for i in range(5)))
    assert {n: str(s) for n, s in data.spec.items()} == {"x0": "uint8 ()", "x1": "int64 ()", "x2": "float64 ()"}
    data = jl.write(tmp_path / "b", 5, lambda i: {"image": np.zeros((4, 4), "u1"), "label": i}, label="int16")
    assert {n: str(s) for n, s in data.spec.items()} == {"image": "uint8 (4, 4)", "label": "int16 ()"}
    assert jl.write(tmp_path / "c", [5, 7]).fields == ("x",)
    assert jl.write(tmp_path / "d", [(5, 7)]).fields == ("x", "y")
    assert jl.write(tmp_path / "e", [], x="float32", t=("int8", (None, 2))).spec["t"].shape == (None, 2)


def test_dtypes_are_kept(tmp_path: Path) -> None:
    """Rare dtypes, one row as well as many, and text that has a spec."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    day = np.datetime64("2020-01-01", "D")
    row = {"f": np.float16(1.5), "b": ml_dtypes.bfloat16(2.5), "c": 1 + 2j, "d": day, "s": "grün", "n": True}

    jl.write(tmp_path, [row] * 3, s="U6", d=day.dtype)

    found = storage.open_fields(tmp_path)
    assert [found[k].dtype.name for k in "fbcn"] == ["float16", "bfloat16", "complex128", "bool"]
    for name, value in row.items():
        assert found[name].tolist() == np.array([value] * 3).tolist()


def test_torch_data_sets(tmp_path: Path) -> None:
    """A map-style data set of tensors, and an iterable one."""
    torch = pytest.importorskip("torch")

    class Counting(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(7))

    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.arange(100))
    data = jl.convert(pairs, tmp_path / "a", x=("float32", (3,)), threads=3)
    assert data.spec["x"] == jl.Spec(np.dtype("float32"), (3,))
    assert np.array_equal(data[:].x, X.astype("float32")) and data[:].y.tolist() == list(range(100))
    assert jl.convert(Counting(), tmp_path / "b")[:].x.tolist() == list(range(7))


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_data_sets(tmp_path: Path) -> None:
    """Columns of numbers, arrays and lists of free length."""
    datasets = pytest.importorskip("datasets")
    lists = [[i] * (i % 4) for i in range(50)]
    source = datasets.Dataset.from_dict({"ids": lists, "label": list(range(50))})

    data = jl.convert(source, tmp_path, ids=("int64", (None,)))

    assert [data[i].ids.tolist() for i in range(50)] == lists and data[:].label.tolist() == list(range(50))


def test_convert(tmp_path: Path) -> None:
    """Paths, URLs, arrays by name and data sets with stages, applied functions and ragged fields."""
    np.savez(tmp_path / "in.npz", x=X, y=np.arange(100))
    for k, source in enumerate([str(tmp_path / "in.npz"), (tmp_path / "in.npz").as_uri()]):
        assert np.array_equal(jl.convert(source, tmp_path / f"{k}")[:].x, X)
    jl.convert({"x": X, "t": jl.ragged([make(i)["t"].astype("i4") for i in range(100)])}, tmp_path / "c")
    assert whole(tmp_path / "c")
    pandas = pytest.importorskip("pandas")
    frame = jl.convert(pandas.DataFrame({"x": np.arange(5), "y": np.arange(5) / 2}), tmp_path / "f")
    assert frame.fields == ("x", "y") and np.load(tmp_path / "f" / "y.npy").tolist() == [0, 0.5, 1, 1.5, 2]
    data = jl.Dataset(x=X, y=np.arange(100)).map("x", jl.clip(0, 50)).apply(lambda b: {"z": b.y * 2})
    out = jl.convert(data, tmp_path / "d")
    assert np.array_equal(out[:].x, data[:].x) and out[:].z.tolist() == list(range(0, 200, 2))
    assert out.spec["x"] == data.spec["x"]


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar hears of each row once, and of those that were there."""
    told: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            told.append((options["total"], options["initial"], options["desc"]))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def update(self, count: int) -> None:
            told.append(count)

    monkeypatch.setattr(bars, "bar_type", lambda: Bar)
    jl.write(tmp_path / "out", 100, make, **SPECS)
    assert told[0] == (100, 0, "write out") and sum(told[1:]) == 100
    told.clear()
    jl.write(tmp_path / "out", 100, make, progress=False, **SPECS)
    assert told == []


# -- what is wrong ----------------------------------------------------------------------------------------------------


def misfit(i: int, **change: Any) -> dict[str, Any]:
    return {**make(i), **change} if i == 5 else make(i)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"x": [1, 2]},
            "write: row 5, field x: shape (3,) expected, got (2,): give x=('float64', (None, ...)) where rows vary",
        ),
        ({"x": [[1, 2, 3]] * 2}, "write: row 5, field x: shape (3,) expected, got (2, 3)"),
        ({"t": [1.5]}, "write: row 5, field t: 1.5 (float64) does not go into int32"),
        ({"t": [2**40]}, "write: row 5, field t: 1099511627776 does not fit int32"),
        ({"t": 3}, "write: row 5, field t: shape (None,) expected, got ()"),
        ({"x": None}, "write: row 5, field x: numbers or text expected, got a NoneType"),
        ({"x": 2**70}, "write: row 5, field x: numbers or text expected, got an integer past 64 bits"),
        ({"z": 1}, "write: row 5 has the fields x, t, z, not x, t"),
    ],
)
def test_rows_that_do_not_fit(tmp_path: Path, change: Any, text: str) -> None:
    """A value that its spec does not hold is an error naming row and field, and nothing is left that opens."""
    with pytest.raises(PipelineError) as raised:
        jl.write(tmp_path / "d", 100, lambda i: misfit(i, **change), **SPECS)

    assert str(raised.value) == text
    with pytest.raises(DataError):
        jl.open(tmp_path / "d")


def test_an_error_names_the_row(tmp_path: Path) -> None:
    """What the user's function raises comes with the row and the user's own line."""

    def fails(i: int) -> Any:
        return make(i) if i < 40 else {}["gone"]

    here = re.escape(str(Path(__file__)))
    with pytest.raises(PipelineError, match=rf"^write: row 40: KeyError: 'gone' \[{here} line \d+\]$"):
        jl.write(tmp_path, 100, fails, threads=4, **SPECS)
    with pytest.raises(PipelineError, match=rf"^write: row 40: KeyError: 'gone' \[{here} line \d+\]$"):
        jl.write(tmp_path / "b", map(fails, range(100)), **SPECS)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda d: jl.write(d, 5),
            TypeError,
            "write takes a number of rows and a function: jl.write(folder, 1000, make)",
        ),
        (
            lambda d: jl.write(d, make),
            TypeError,
            "write takes a number of rows and a function: jl.write(folder, 1000, make)",
        ),
        (lambda d: jl.write(d, 5, 6), TypeError, "write takes a function of the row, got 6"),
        (lambda d: jl.write(d, -1, make), ValueError, "write: the number of rows must be at least 0, got -1"),
        (
            lambda d: jl.write(d, "rows"),
            TypeError,
            "write takes rows; jl.convert(path, folder) takes what lies at a path",
        ),
        (
            lambda d: jl.write(d, {"x": X}),
            TypeError,
            "write takes rows; arrays by name are jl.Dataset(arrays), which saves itself",
        ),
        (lambda d: jl.write(d, 5.5), TypeError, "write takes rows: something to iterate over, got a float"),
        (lambda d: jl.write(d, []), ValueError, "write: no rows to take the fields from: give specs, as x='float32'"),
        (
            lambda d: jl.write(d, ["a"]),
            PipelineError,
            "write: field 'x' is text, of any length: give its spec, as x='U20'",
        ),
        (
            lambda d: jl.write(d, ["ab", "abc"], x="U2"),
            PipelineError,
            "write: row 1, field x: 'abc' does not fit <U2",
        ),
        (lambda d: jl.write(d, [1], y="i4", x="i4"), ValueError, "write: spec of a field 'y'; rows have x"),
        (lambda d: jl.write(d, [{"x": 1}], y="i4"), ValueError, "write: spec of a field 'y'; rows have x"),
        (lambda d: jl.write(d, [(1, 2), (3,)]), PipelineError, "write: row 1 has 1 parts, the fields are x, y"),
        (lambda d: jl.write(d, 5, make, threads=0), ValueError, "write: threads must be at least 1, got 0"),
        (
            lambda d: jl.write(d, [1], x=("i4", (2, None))),
            ValueError,
            "field 'x': only the first axis of a row may vary, got (2, None)",
        ),
        (
            lambda d: jl.write(d, [{"a/b": 1}]),
            DataError,
            "field 'a/b': not a file name: letters, digits and _ expected",
        ),
        (
            lambda d: jl.write("s3://b/d", [1]),
            ValueError,
            "s3://b/d: a local folder expected; write there, and copy it",
        ),
    ],
)
def test_bad_calls(tmp_path: Path, call: Any, kind: type[Exception], text: str) -> None:
    """Each wrong call has its own short message."""
    with pytest.raises(kind) as raised:
        call(tmp_path / "d")

    assert str(raised.value) == text


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block goes to the journal."""
    monkeypatch.setattr(grow, "SYNC", 0.0)


def test_missing_rows_alone_are_made(tmp_path: Path) -> None:
    """After an error the rows that were written are not asked for again, once the data set answers."""
    source = Sequence(lambda i: make(i) if i != 57 else {}["gone"])
    with pytest.raises(PipelineError, match="row 57"):
        jl.write(tmp_path, source, **SPECS)
    source.form, source.asked = make, []

    jl.write(tmp_path, source, **SPECS)

    assert whole(tmp_path)
    assert source.asked == list(range(57, 100))


def test_an_iterator_goes_on(tmp_path: Path) -> None:
    """Of an iterator the rows that were written are skipped; one that has fewer is an error."""

    def rows(last: int) -> Iterator[Any]:
        yield from (make(i) for i in range(last))
        raise OSError("unplugged")

    with pytest.raises(PipelineError, match="write: row 60: OSError: unplugged"):
        jl.write(tmp_path, rows(60), **SPECS)
    with pytest.raises(
        ValueError, match="write: 60 rows were written before, and now there are 10: is it the same source"
    ):
        jl.write(tmp_path, (make(i) for i in range(10)), **SPECS)
    jl.write(tmp_path, ({"x": 0} if i < 60 else make(i) for i in range(100)), **SPECS)

    assert whole(tmp_path)


def test_another_job_starts_over(tmp_path: Path) -> None:
    """Rows of other code, another number or other specs never mix with those there; resume=False starts over silently."""

    def stopped(by: int) -> Any:
        return lambda i: make(i) if i < 50 else [][by]

    for k, (rows, function, specs) in enumerate(
        [
            (100, make, SPECS),
            (100, stopped(7), SPECS),
            (99, stopped(0), SPECS),
            (100, stopped(0), {**SPECS, "t": ("i8", (None,))}),
        ]
    ):
        folder = tmp_path / str(k)
        with pytest.raises(PipelineError):
            jl.write(folder, 100, stopped(0), **SPECS)
        assert (folder / ".write").exists()
        with pytest.warns(UserWarning, match="an earlier run was stopped in the middle of another job"):
            if function is make:
                jl.write(folder, rows, function, **specs)
                assert whole(folder)
            else:
                with pytest.raises(PipelineError):
                    jl.write(folder, rows, function, **specs)
    jl.write(tmp_path / "3", 100, make, resume=False, **SPECS)
    assert whole(tmp_path / "3")


KILLED = """
import os, signal, sys, time
import numpy as np
import test_write
from jitloader import storage
from jitloader.storage import grow
import jitloader as jl
grow.SYNC = 0.0
folder, kind = sys.argv[1], sys.argv[3]
asked = open(os.path.join(os.path.dirname(folder), "asked"), "a")
def make(i):
    if i == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)
    print(os.getpid(), i, file=asked, flush=True)
    time.sleep(0.004)
    return test_write.make(i)
if kind == "function": jl.write(folder, 100, make, threads=1, **test_write.SPECS)
elif kind == "threads": jl.write(folder, 100, make, threads=3, **test_write.SPECS)
else: jl.write(folder, map(make, range(100)), **test_write.SPECS)
"""


def environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}


@pytest.mark.parametrize("kind", ["function", "threads", "iterator"])
def test_a_killed_writer_goes_on(tmp_path: Path, kind: str) -> None:
    """kill -9 at several rows: each run goes on from where the one before was, and the end is exact."""
    folder = tmp_path / "d"
    for last in (20, 70, 1000):
        command = [sys.executable, "-c", KILLED, str(folder), str(last), kind]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment())
        assert ended.returncode == (0 if last == 1000 else -signal.SIGKILL), ended.stderr

    assert whole(folder)
    runs: dict[str, list[int]] = {}
    for line in (tmp_path / "asked").read_text().splitlines():
        runs.setdefault(line.split()[0], []).append(int(line.split()[1]))
    first, second, third = (sorted(rows) for rows in runs.values())
    assert set(first + second + third) == set(range(100))
    if kind != "iterator":
        assert 0 < min(second) < min(third)


STEPWISE = """
import sys
import killed, test_write
import jitloader as jl
from jitloader.storage import grow
grow.SYNC = 0.0
first = lambda folder: jl.write(folder, 10, test_write.make, threads=1, **test_write.SPECS)
second = lambda folder: jl.write(folder, map(test_write.make, range(100)), **test_write.SPECS)
print(killed.stepwise(sys.argv[1], first, second, ("link",), int(sys.argv[2])))
"""


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.nightly), 6])
def test_killed_at_each_step(tmp_path: Path, stride: int) -> None:
    """kill -9 before calls to the system: the old version or the new one, and the next run ends with the new."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", STEPWISE, str(tmp_path), str(stride)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert ended.returncode == 0, ended.stderr
    counts = []
    for limit in range(1, int(ended.stdout) + 1, stride):
        folder = tmp_path / str(limit)
        counts.append(len(storage.open_fields(folder)["x"]))
        assert np.array_equal(storage.open_fields(folder)["x"], X[: counts[-1]])
        jl.write(folder, map(make, range(100)), **SPECS)
        assert whole(folder)

    assert counts == sorted(counts) and set(counts) == {10, 100} and counts.count(100) * stride > 3


def test_power_loss(tmp_path: Path, synced: None) -> None:
    """What follows the last whole line of the journal is cut off, whatever it is; files shorter than a line take the one
    before it; nothing of use starts anew."""
    source = Sequence(lambda i: make(i) if i < 60 else {}["gone"])
    with pytest.raises(PipelineError):
        jl.write(tmp_path, source, **SPECS)
    work = tmp_path / ".write"
    lines = (work / "journal").read_bytes().splitlines(keepends=True)
    last, before = (json.loads(line)[""] for line in lines[:-3:-1])
    while before == last:  # the last block and the end of the writer
        lines.pop()
        last, before = (json.loads(line)[""] for line in lines[:-3:-1])
    with open(work / "x.npy", "r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    with open(work / "t.npy", "ab") as file:
        file.write(b"junk")
    with open(work / "journal", "ab") as file:
        file.write(b'{"": 99, "x": 99, ')
    source.form, source.asked = make, []

    jl.write(tmp_path, source, **SPECS)

    assert whole(tmp_path)
    assert source.asked == list(range(before, 100))


def test_the_old_version_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows are written, when that fails and when the disk is full; maps of it stay too."""
    jl.write(tmp_path, 10, make, **SPECS)
    mapped = storage.open_fields(tmp_path)["x"]

    def looks(i: int) -> dict[str, Any]:
        assert len(storage.open_fields(tmp_path)["x"]) == 10
        return make(i)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            if name == "link":
                patch.setattr(os, "replace", full)
            with pytest.raises(OSError, match="No space left"):
                jl.write(tmp_path, 100, looks, **SPECS)
        assert len(storage.open_fields(tmp_path)["x"]) == 10
    with monkeypatch.context() as patch:
        patch.setattr(grow.Growing, "_append", full)
        with pytest.raises(OSError, match="No space left"):
            jl.write(tmp_path, 100, looks, resume=False, **SPECS)
    jl.write(tmp_path, 100, looks, resume=False, **SPECS)

    assert whole(tmp_path) and np.array_equal(mapped, X[:10])


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files is an OSError; once it is gone the next run goes on."""
    resource = pytest.importorskip("resource")
    code = (
        "import resource, signal, sys, test_write, jitloader as jl\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))\n"
        "try: jl.write(sys.argv[1], test_write.Sequence(), **test_write.SPECS)\n"
        "except OSError as error: print(error.errno)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment()
    )
    assert ended.stdout.strip() == str(errno.EFBIG), ended.stderr
    assert resource.RLIMIT_FSIZE is not None

    source = Sequence()
    jl.write(tmp_path, source, **SPECS)

    assert whole(tmp_path)


def test_a_second_writer(tmp_path: Path) -> None:
    """While one writes another is refused, and so is a save."""
    inside, done = threading.Event(), threading.Event()

    def slow(i: int) -> dict[str, Any]:
        if i:  # row 0 is looked at before the folder is
            inside.set()
            done.wait(10)
        return make(i)

    thread = threading.Thread(target=lambda: jl.write(tmp_path, 100, slow, **SPECS))
    thread.start()
    try:
        inside.wait(10)
        with pytest.raises(BlockingIOError, match="another writer is saving to this folder"):
            jl.write(tmp_path, 100, make, **SPECS)
        with pytest.raises(BlockingIOError):
            storage.save_fields(tmp_path, {"x": X})
    finally:
        done.set()
        thread.join()

    assert whole(tmp_path)
