"""A cache holds what its chain gives, is made once, is made again when anything it depends on changes, and is never broken."""

from __future__ import annotations

import copy
import errno
import inspect
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitloader as jl
from jitloader import bars, cache, storage

HERE = str(Path(__file__))
X = np.random.default_rng(0).random((60, 4)).astype("float32")
Y = np.arange(60)
OFFSET = 1.0


def twice(v: Any) -> Any:
    return v * 2


def shifted(v: Any) -> Any:
    return v + OFFSET


def previous(src: Any, dst: Any, key: Any) -> None:
    for i in range(src.size):
        dst[i] = src[i - 1] - src[i]


def drawn(src: Any, dst: Any, key: Any) -> None:
    for i in range(src.size):
        dst[i] = src[i] + jl.uniform(key, i)


def chain(x: Any = X, y: Any = Y) -> jl.Dataset:
    return jl.Dataset(x=x, y=y).map("x", twice, previous, jl.clip(-1, 1))


def held(data: jl.Dataset, field: str = "x") -> np.ndarray:
    """Give the array that a field is, without a kernel."""
    return data.sources[field].parts[0].array


def by_hand(x: np.ndarray) -> np.ndarray:
    doubled = x * np.float32(2)
    return np.clip(np.roll(doubled, 1, axis=1) - doubled, -1, 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Give the fields of every making of a cache, as they come."""
    calls: list[tuple[str, ...]] = []
    make = cache._make

    def counted(chain: Any, path: str, lacking: tuple[str, ...], *more: Any) -> None:
        make(chain, path, lacking, *more)
        calls.append(lacking)

    monkeypatch.setattr(cache, "_make", counted)
    return calls


# -- values -----------------------------------------------------------------------------------------------------------

INDEX = st.lists(st.integers(0, 59), min_size=1, max_size=80)


@settings(max_examples=25, deadline=None)
@given(before=INDEX, after=st.data())
def test_a_cache_is_its_chain(before: list[int], after: st.DataObject) -> None:
    """Cached fields, selected before and after, are what the stages give by hand; specs stay, others are linked."""
    with tempfile.TemporaryDirectory() as folder:
        data = chain().select(before)
        kept = data.cache(folder)
        assert kept.spec == data.spec and kept.fields == data.fields and not kept.steps and len(kept) == len(data)
        assert storage.locate(kept.sources["x"].parts[0].array).path == os.path.join(folder, "x.npy")
        assert kept.sources["y"].parts[0].array is data.sources["y"].parts[0].array
        rows = after.draw(st.lists(st.integers(0, len(before) - 1), max_size=20))
        batch = kept.select(rows)[:]
        np.testing.assert_array_equal(batch.x, by_hand(X)[before][rows])
        np.testing.assert_array_equal(batch.y, np.array(before)[rows])


def test_what_follows_draws_as_without_it(tmp_path: Path) -> None:
    """Samples of a chain with random stages are the same bits with and without a cache in it."""

    def rest(data: jl.Dataset) -> jl.Dataset:
        return data.map("x", drawn).zip(jl.Dataset(z=X).map("z", drawn)).map("z", drawn)

    plain, kept = rest(chain()), rest(chain().cache(tmp_path))
    for row in (0, 7, 59):
        one, two = plain.sample(row, seed=2, epoch=3), kept.sample(row, seed=2, epoch=3)
        np.testing.assert_array_equal(one.x, two.x)
        np.testing.assert_array_equal(one.z, two.z)
    bare = chain().cache(tmp_path)
    make, parts = bare.by_value()
    for copied in (make(*parts), pickle.loads(pickle.dumps(bare)), copy.deepcopy(bare), bare.take(60), bare.keep("x")):
        assert [step.salt for step in copied.map("x", drawn, twice).steps] == [3, 4]


def test_a_seed_keeps_its_draws(tmp_path: Path) -> None:
    """With a seed, random stages are kept as they come in epoch 0 of that seed."""
    data = chain().map("x", drawn)
    kept = data.cache(tmp_path / "c", seed=3)
    np.testing.assert_array_equal(held(kept), data.gather(np.arange(60), seed=3).x)
    assert not np.array_equal(held(data.cache(tmp_path / "other", seed=4)), held(kept))


@pytest.mark.parametrize("dtype", [">f4", "<U3"])
def test_any_dtype_comes_back(dtype: str, tmp_path: Path) -> None:
    """A stage that moves elements keeps their dtype, and so does the cache."""
    x = np.arange(24).reshape(4, 3, 2).astype(dtype)
    data = jl.Dataset(x=x, flat=x, both=x).map(("x", "both"), jl.transpose((1, 0))).map(("flat", "both"), jl.flatten())
    kept = data.cache(tmp_path)
    assert kept.spec == data.spec
    found = storage.open_fields(tmp_path)
    np.testing.assert_array_equal(found["x"], x.transpose(0, 2, 1))
    np.testing.assert_array_equal(found["flat"], x.reshape(4, 6))
    np.testing.assert_array_equal(found["both"], x.transpose(0, 2, 1).reshape(4, 6))


def test_fields_made_beside_and_joined(tmp_path: Path) -> None:
    """New fields, of a pad's mask or of several fields at once, are kept; what they came from may be dropped."""

    def sum_of(a: Any, b: Any) -> Any:
        return a + b

    words = jl.ragged(np.arange(10), [0, 3, 3, 10])
    data = jl.Dataset(words=words, a=np.arange(3), b=np.arange(3) * 10).map("words", jl.pad_rows(7, mask="mask"))
    data = data.map(("a", "b"), jl.elementwise(sum_of), to="c").keep("mask", "c", "b")
    kept = data.cache(tmp_path)
    assert held(kept, "c").tolist() == [0, 11, 22] and held(kept, "b").tolist() == [0, 10, 20]
    assert held(kept, "mask").tolist() == [[True] * 3 + [False] * 4, [False] * 7, [True] * 7]
    assert sorted(os.listdir(tmp_path)) == ["c.npy", "manifest.json", "mask.npy"]
    assert set(kept.sources) == {"mask", "c", "b"}


def test_without_stages_there_is_nothing_to_keep(tmp_path: Path) -> None:
    """Fields that no stage changed stay links, and no folder is made; no rows are no problem."""
    data = jl.Dataset(x=X, words=jl.ragged(np.arange(60), np.arange(61)))
    assert np.array_equal(held(data.cache(tmp_path / "c")), X) and not (tmp_path / "c").exists()
    assert len(chain().take(0).cache(tmp_path / "c")) == 0


# -- reuse ------------------------------------------------------------------------------------------------------------


def test_made_once(tmp_path: Path, made: list[tuple[str, ...]]) -> None:
    """A second cache of the same data, in other arrays and functions of the same content, is the first one's files."""
    first = chain().cache(tmp_path / "c")
    times = {file: os.stat(tmp_path / "c" / file)[1:] for file in os.listdir(tmp_path / "c")}
    again = chain(X.copy(), Y.copy()).cache(tmp_path / "c")
    assert made == [("x",)]
    assert {file: os.stat(tmp_path / "c" / file)[1:] for file in os.listdir(tmp_path / "c")} == times
    np.testing.assert_array_equal(held(first), held(again))


def test_only_what_changed_is_made(tmp_path: Path, made: list[tuple[str, ...]]) -> None:
    """Of two fields the one with other stages is made anew; the other's file stays; those unwanted go."""
    chain().map("y", jl.cast("float32")).cache(tmp_path)
    inode = os.stat(tmp_path / "x.npy").st_ino
    kept = chain().map("y", jl.cast("float32"), twice).cache(tmp_path)
    assert made == [("x", "y"), ("y",)] and os.stat(tmp_path / "x.npy").st_ino == inode
    assert held(kept, "y").tolist() == (2.0 * Y).tolist()
    np.testing.assert_array_equal(held(kept), by_hand(X))
    chain().cache(tmp_path)
    assert made[2:] == [] and sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy", "y.npy"]
    chain(X + 1).cache(tmp_path)
    assert made[2:] == [("x",)] and sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy"]


@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_a_damaged_file_is_made_again(tmp_path: Path, made: list[tuple[str, ...]], damage: str) -> None:
    """A file that is gone or cut is as if it had not been made."""
    chain().map("y", jl.cast("float32")).cache(tmp_path)
    if damage == "remove":
        os.remove(tmp_path / "x.npy")
    else:
        shutil.copy(tmp_path / "x.npy", tmp_path / ".x")
        os.truncate(tmp_path / ".x", 100)
        os.replace(tmp_path / ".x", tmp_path / "x.npy")
    np.testing.assert_array_equal(held(chain().map("y", jl.cast("float32")).cache(tmp_path)), by_hand(X))
    assert made[1:] == [("x",)]


def test_what_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no hard links, a field that stays is copied."""

    def refuses(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    chain().map("y", jl.cast("float32")).cache(tmp_path)
    monkeypatch.setattr(os, "link", refuses)
    kept = chain().map("y", jl.cast("float32"), twice).cache(tmp_path)
    np.testing.assert_array_equal(held(kept), by_hand(X))


def mark(data: jl.Dataset, seed: int | None = None, field: str = "x") -> str:
    return cache.fingerprints(data._chain, (field,), seed)[field]


def test_whatever_a_field_depends_on_marks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these makes another fingerprint; building the same again does not."""

    def scaled(by: float) -> Any:
        def times(v: Any) -> Any:
            return v * by

        return times

    other = X.copy()
    other[-1, -1] += 1e-6
    base = jl.Dataset(x=X, y=Y)
    changed = [
        base.map("x", twice),
        base.map("x", shifted),
        base.map("x", scaled(2.0)),
        base.map("x", scaled(3.0)),
        base.map("x", jl.clip(0, 1)),
        base.map("x", jl.clip(0, 2)),
        base.map("x", jl.clip(0, 1), twice),
        base.map("x", jl.normalize([1, 2, 3, 4], 1)),
        base.map("x", jl.normalize([1, 2, 3, 5], 1)),
        base.map("x", previous),
        base.take(59).map("x", twice),
        base.select(np.arange(60)[::-1]).map("x", twice),
        jl.Dataset(x=other).map("x", twice),
        jl.Dataset(x=X.astype("float64")).map("x", twice),
        jl.Dataset(x=X.reshape(60, 2, 2)).map("x", twice),
        base.concat(base).map("x", twice),
    ]
    marks = [mark(data) for data in changed]
    assert len(set(marks)) == len(marks)
    assert marks == [mark(data) for data in changed]
    assert mark(jl.Dataset(x=X.copy(), z=X).map("z", jl.clip(0, 1)).map("x", scaled(2.0))) == marks[2]
    monkeypatch.setitem(globals(), "OFFSET", 2.0)
    assert mark(changed[1]) == marks[1] != mark(base.map("x", shifted))  # a global is taken where its function is linked

    random_one = base.map("x", drawn)
    assert mark(random_one, 1) != mark(random_one, 2) and mark(changed[0], 1) == mark(changed[0], 2) == marks[0]


def test_files_are_known_by_size_and_time(tmp_path: Path) -> None:
    """A mapped source is not read: path, size and mtime stand for it, and its place in the file."""
    np.save(tmp_path / "x.npy", X)
    first = mark(jl.Dataset(x=tmp_path / "x.npy").map("x", twice))
    assert mark(jl.Dataset(x=np.load(tmp_path / "x.npy", mmap_mode="r")).map("x", twice)) == first
    assert mark(jl.Dataset(x=np.load(tmp_path / "x.npy", mmap_mode="r")[:, ::-1]).map("x", twice)) != first
    os.utime(tmp_path / "x.npy", (1, 1))
    assert mark(jl.Dataset(x=tmp_path / "x.npy").map("x", twice)) != first
    shutil.copy2(tmp_path / "x.npy", tmp_path / "z.npy")
    assert mark(jl.Dataset(x=tmp_path / "z.npy").map("x", twice)) != mark(
        jl.Dataset(x=tmp_path / "x.npy").map("x", twice)
    )


def test_another_process_finds_it(tmp_path: Path) -> None:
    """Fingerprints are the same in another process, with other hashes and addresses."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(HERE).parent)!r})\n"
        "import test_cache as t, jitloader as jl\n"
        "data = t.chain().map('x', jl.random_apply(jl.normalize([1, 2, 3, 4], 1), 0.5), t.drawn)\n"
        "print(t.mark(data, 0), t.mark(jl.Dataset(jl.windows(t.X, x=slice(0, 3))).map('x', t.twice)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**environment(), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1 and len(found.pop().split()) == 2


def test_sources_of_cached_fields_are_let_go(tmp_path: Path) -> None:
    """Once cached, the source's file may change: only files still in use are watched."""
    np.save(tmp_path / "x.npy", X)
    kept = chain(tmp_path / "x.npy").cache(tmp_path / "c")
    with open(tmp_path / "x.npy", "r+b") as file:
        file.truncate(1000)
    np.testing.assert_array_equal(held(kept), by_hand(X))
    os.truncate(tmp_path / "c" / "x.npy", 1000)
    with pytest.raises(jl.DataError, match="truncated under its map"):
        kept[0]


class Bar:
    """Remembers what a progress bar was told."""

    bars: list[Bar] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.rows = options, 0
        self.bars.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, rows: int) -> None:
        self.rows += rows


def test_progress_counts_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar hears of every row once, from whatever thread; none where it is not wanted, tqdm lacks, or all is there."""
    monkeypatch.setattr(bars, "bar_type", lambda: Bar)
    Bar.bars.clear()
    data = jl.Dataset(x=np.zeros((5000, 100), "float32"), y=np.arange(5000)).map("x", twice)
    data.cache(tmp_path / "c")
    data.cache(tmp_path / "c")
    data.cache(tmp_path / "other", progress=False)
    assert [bar.rows for bar in Bar.bars] == [5000]
    assert Bar.bars[0].options == {
        "total": 5000,
        "initial": 0,
        "desc": "cache c",
        "unit": "row",
        "unit_scale": True,
        "delay": 1,
    }
    monkeypatch.setattr(bars, "bar_type", lambda: None)
    data.cache(tmp_path / "third")


def test_other_long_steps_have_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics and descriptions tell of their rows, one pass and two; unpacking of its bytes; all keep still if asked."""
    monkeypatch.setattr(bars, "bar_type", lambda: Bar)
    monkeypatch.setenv("JITLOADER_CACHE_DIR", str(tmp_path / "cache"))
    x = np.zeros((5000, 100), "float32")
    np.savez_compressed(tmp_path / "p.npz", x=x)
    for progress in (True, False):
        Bar.bars.clear()
        data = jl.Dataset(x=x)
        data.statistics("x", progress=progress)
        data.describe(progress=progress)
        jl.open(tmp_path / "p.npz", unpack=tmp_path / str(progress), progress=progress)
        told = [(bar.options["desc"], bar.options["total"], bar.rows) for bar in Bar.bars]
        wanted = [("statistics x", 5000, 5000), *[("describe", 5000, 5000)] * 2, ("unpack p.npz", x.nbytes, x.nbytes)]
        assert told == (wanted if progress else [])


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(data: jl.Dataset, path: Any, error: type[Exception] = jl.PipelineError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        data.cache(path, **options)
    return str(caught.value)


def line_of(function: Any) -> str:
    return f"[{HERE} line {function.__code__.co_firstlineno}]"


def test_random_stages_are_refused(tmp_path: Path) -> None:
    """A stage that draws: a built-in one, or one of the user's that reads its key."""
    assert refused(chain().map("x", drawn), tmp_path) == (
        "cache: stage 3 'drawn' on field 'x' is random, and a cache would keep one draw for all epochs: "
        f"link it after cache, or ask for that by cache(path, seed=0) {line_of(drawn)}"
    )
    assert refused(chain().map("x", jl.random_flip(axis=0)), tmp_path).startswith(
        "cache: stage 3 'random_flip' on field 'x' is random, and a cache would keep one draw for all epochs: "
    )
    assert os.listdir(tmp_path) == []
    assert chain().map("y", jl.cast("float32")).map("x", drawn).keep("y").cache(tmp_path).fields == ("y",)


def test_what_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many lengths, Python functions, seeds that are none, arrays too large to hash."""
    words = jl.Dataset(words=jl.ragged(np.arange(10), [0, 3, 3, 10])).map("words", jl.pad_to_longest())
    assert refused(words, tmp_path) == (
        "cache takes fields of one shape, or ragged; 'words' is int64 (?,), padded in each batch: pad it by "
        "pad_rows(length), or link its stages after cache"
    )
    assert refused(chain().apply(lambda batch: batch), tmp_path) == (
        "cache runs a row at a time: take it before apply(<lambda>)"
    )
    assert refused(chain(), tmp_path, TypeError, seed=0.5) == "cache: seed must be a whole number, got 0.5"
    monkeypatch.setattr(cache, "HASHED", 900)
    assert refused(chain(), tmp_path) == (
        "cache: field 'x' is 0.0 GB in memory, more than the 0.0 GB that are hashed to know it again: "
        "np.save it, and give Dataset the path of the file"
    )
    assert os.listdir(tmp_path) == []


def test_other_folders_are_not_written_over(tmp_path: Path) -> None:
    """A saved data set, a plain folder of .npy, any other file, the source's own folder: nothing is touched."""
    saved, plain, file, broken = (tmp_path / name for name in ("saved", "plain", "file", "broken"))
    jl.Dataset(x=X, y=Y).save(saved)
    plain.mkdir()
    np.save(plain / "x.npy", X)
    file.write_text("mine")
    broken.mkdir()
    (broken / "notes.txt").write_text("mine")
    told = "which no cache wrote; give the cache a folder of its own"
    assert refused(jl.open(saved).map("x", twice), saved, jl.DataError) == (
        f"{saved}: field 'x' lies there itself; give the cache a folder of its own"
    )
    assert refused(chain(), saved, jl.DataError) == f"{saved}: holds 'manifest.json', {told}"
    assert refused(chain(), plain, jl.DataError) == f"{plain}: holds 'x.npy', {told}"
    assert refused(chain(), broken, jl.DataError) == f"{broken}: holds 'notes.txt', {told}"
    assert refused(chain(), file, NotADirectoryError) == f"[Errno 20] Not a directory: {str(file)!r}"
    assert np.array_equal(np.load(plain / "x.npy"), X) and file.read_text() == "mine"
    cached = chain().cache(tmp_path / "c")
    assert refused(cached.map("x", twice), tmp_path / "c", jl.DataError) == (
        f"{tmp_path / 'c'}: field 'x' lies there itself; give the cache a folder of its own"
    )


def test_a_row_that_fails_leaves_the_old_cache(tmp_path: Path) -> None:
    """A value that does not fit is the error of a batch; the version before stands."""
    small = jl.Dataset(x=np.array([1, 2, 3])).map("x", jl.cast("uint8")).cache(tmp_path)
    wrong = jl.Dataset(x=np.array([1, 300, 3])).map("x", jl.cast("uint8"))
    line = sys._getframe().f_lineno - 1
    assert refused(wrong, tmp_path) == (
        "stage 0 'cast(uint8)' on field 'x', row 1, epoch 0: value 300 does not fit uint8\n"
        f"  in {HERE} line {line}; data[1] reproduces it"
    )
    assert held(small).tolist() == storage.open_fields(tmp_path)["x"].tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy"]


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["posix_fallocate", "fsync", "mkdir", "replace"])
def test_a_full_disk_leaves_the_old_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A disk that is full at any step is the system's error and the old version; once there is room it is made."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    old = chain().cache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            chain(X + 1).cache(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy"]
    np.testing.assert_array_equal(storage.open_fields(tmp_path)["x"], held(old))
    np.testing.assert_array_equal(held(chain(X + 1).cache(tmp_path)), by_hand(X + 1))


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    """A stage that was never committed is removed, though the cache is used as it is."""
    chain().cache(tmp_path)
    (tmp_path / ".new-0123").mkdir()
    np.save(tmp_path / ".new-0123" / "x.npy", X)
    np.testing.assert_array_equal(held(chain().cache(tmp_path)), by_hand(X))
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy"]


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, on whichever thread a chunk is done, ends all of them, leaves the old cache, and the next run is clean."""

    class Interrupting(Bar):
        def update(self, rows: int) -> None:
            raise KeyboardInterrupt

    old = chain().cache(tmp_path)
    monkeypatch.setattr(bars, "bar_type", lambda: Interrupting)
    with pytest.raises(KeyboardInterrupt):
        chain(X + 1).cache(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name == "jitloader-pass"]
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy"]
    np.testing.assert_array_equal(storage.open_fields(tmp_path)["x"], held(old))
    np.testing.assert_array_equal(held(chain(X + 1).cache(tmp_path, progress=False)), by_hand(X + 1))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


ROWS = 20_000


def version(v: int) -> jl.Dataset:
    x = np.full((ROWS, 4), v, "float32")
    return jl.Dataset(x=x, y=x, still=np.arange(ROWS)).map(("x", "y"), jl.clip(-1, 1)).map("still", jl.clip(0, 5))


WRITER = f"""
from __future__ import annotations
import sys
import numpy as np, jitloader as jl
from jitloader import compose
ROWS = {ROWS}
{inspect.getsource(version)}
for v in (0, 1): version(v).program(compose.only_row, ()).load()
print("ready", flush=True)
while True:
    for v in (0, 1): version(v).cache(sys.argv[1], progress=False)
"""


def kill_writers(folder: Path, count: int, seed: int) -> set[int]:
    """Kill a process that writes two versions in turn at random moments; after each, one of them is there, whole."""
    generator, seen = random.Random(seed), set()
    marks = [cache.fingerprints(version(v)._chain, ("x", "y", "still"), None) for v in (0, 1)]
    assert marks[0]["still"] == marks[1]["still"]
    version(0).cache(folder)
    for _ in range(count):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, env=environment()
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(generator.random() * 0.5)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        fields, meta = storage.open_folder(folder)
        v = marks.index(meta["cache"])
        assert {name: (fields[name] == v).all() for name in "xy"} == {"x": True, "y": True}
        assert (fields["still"] == np.minimum(np.arange(ROWS), 5)).all()
        seen.add(v)
    kept = version(1).cache(folder)
    assert (held(kept) == 1).all() and sorted(os.listdir(folder)) == ["manifest.json", "still.npy", "x.npy", "y.npy"]
    return seen


def test_killed_writers(tmp_path: Path) -> None:
    """kill -9 at random moments leaves the old cache or the new one, whole, and the next run is as if nothing had been."""
    kill_writers(tmp_path, 10, seed=1)


@pytest.mark.nightly
def test_many_killed_writers(tmp_path: Path) -> None:
    """The same, 150 times, in which both versions are met."""
    assert kill_writers(tmp_path, 150, seed=2) == {0, 1}


TOGETHER = f"""
import sys
sys.path.insert(0, {str(Path(HERE).parent)!r})
import numpy as np
import test_cache
make, made = test_cache.cache._make, []
def counted(*given):
    make(*given)
    made.append(1)
test_cache.cache._make = counted
print("ready", flush=True)
sys.stdin.readline()
for n in (10, 20, 30):
    kept = test_cache.chain(test_cache.X[:n], test_cache.Y[:n]).cache(sys.argv[1] + str(n))
    assert np.array_equal(test_cache.held(kept), test_cache.by_hand(test_cache.X[:n]))
print(len(made))
"""


def test_processes_at_once(tmp_path: Path) -> None:
    """Of several processes that ask at the same moment one makes each cache; all get it, right."""
    every = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(tmp_path / "c")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for _ in range(3)
    ]
    for process in every:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    ends = []
    for process in every:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in every:
        ends.append(process.communicate()[0])
        assert process.returncode == 0
    assert sum(map(int, ends)) >= 3
    assert sorted(os.listdir(tmp_path / "c10")) == ["manifest.json", "x.npy"]


def test_who_is_replaced_again_and_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data sets cached to one folder at the same time: an error, not a fight without end."""
    make = cache._make

    def replaced(*given: Any) -> None:
        make(*given)
        monkeypatch.setattr(cache, "_make", make)
        chain(X[:5], Y[:5]).cache(tmp_path)
        monkeypatch.setattr(cache, "_make", replaced)

    monkeypatch.setattr(cache, "_make", replaced)
    assert refused(chain(), tmp_path, jl.DataError) == (
        f"{tmp_path}: another process caches other data there; give each cache a folder of its own"
    )


def test_who_comes_second_waits(tmp_path: Path) -> None:
    """While another writer holds the folder a cache waits for it, and then takes what is there."""
    data = chain()
    data.cache(tmp_path)
    other = chain(X + 1)
    with storage.create_fields(tmp_path, {"x": ("float32", (1,))}, {"cache": {}}):
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(held(other.cache(tmp_path))))
        thread.start()
        time.sleep(0.2)
        assert not results
    thread.join(30)
    np.testing.assert_array_equal(results[0], by_hand(X + 1))


def test_ragged_rows_are_kept_as_values_and_offsets(tmp_path: Path) -> None:
    """Of the lengths that stages left them; a second program finds them, other stages make them again."""
    values, offsets = np.arange(2000.0).reshape(1000, 2), np.sort(np.random.default_rng(0).integers(0, 1000, 200))
    offsets[0], offsets[-1] = 0, 1000
    data = jl.Dataset(t=jl.ragged(values, offsets), i=np.arange(199)).map("t", jl.truncate(9), jl.normalize(1, 2))
    data = data.map("i", jl.cast("float32"))
    kept = data.cache(tmp_path, progress=False)
    assert sorted(f.name for f in tmp_path.glob("*.npy")) == ["i.npy", "t.npy", "t.offsets.npy"]
    for row in range(199):
        wanted = (values[offsets[row] : offsets[row + 1]][:9] - 1) / 2
        assert kept[row].t.tolist() == wanted.tolist() and kept[row].i == row
    before = (tmp_path / "t.npy").stat().st_ino
    again = data.cache(tmp_path, progress=False)
    assert (tmp_path / "t.npy").stat().st_ino == before
    batch, plain = (next(iter(jl.Loader(d.map("t", jl.pad_to_longest()), 50, shuffle=True))) for d in (again, data))
    assert np.array_equal(batch.t, plain.t) and np.array_equal(batch.i, plain.i)
    seventh = kept[7].t.tolist()
    other = data.map("i", jl.clip(0, 5)).cache(tmp_path, progress=False)  # another i beside the same t
    assert other[:].i.max() == 5 and other[7].t.tolist() == seventh
    assert len(data.map("t", jl.truncate(1)).cache(tmp_path, progress=False)[:].t.values) <= 199
