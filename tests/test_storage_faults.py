"""What goes wrong round a file: killed and crowded writers, full disks, files cut, replaced, rewritten under maps."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from jitloader import storage
from jitloader.errors import DataError

ROWS = 3000
WRITER = f"""
import sys, time
import numpy as np
from jitloader import storage
folder, v = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
fields = {{name: np.full({ROWS}, v) for name in ("x", "y", f"only{{v}}")}}
storage.save_fields(folder, fields, {{"v": v}})
print("saved", flush=True)
time.sleep(60)
"""
STEPWISE = f"""
import sys
import killed
import numpy as np
from jitloader import storage
def save(v):
    fields = {{name: np.full({ROWS}, v) for name in ("x", "y", f"only{{v}}")}}
    return lambda folder: storage.save_fields(folder, fields, {{"v": v}})
print(killed.stepwise(sys.argv[1], save(1), save(2), ("posix_fallocate", "open")))
"""


def environment():
    here = str(Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}


def version(folder):
    """The version that a folder holds; fails where it is not whole."""
    fields, meta = storage.open_folder(folder)
    v = meta["v"]
    assert list(fields) == ["x", "y", f"only{v}"]
    for x in fields.values():
        assert x.shape == (ROWS,) and (x == v).all()
    return v


def kill_writers(folder, count, seed):
    """Kill a writer at a random moment, again and again; the folder always holds one of two versions, whole."""
    rng, held, kept, longest = random.Random(seed), 0, 0, 0.02
    storage.save_fields(folder, {name: np.full(ROWS, 0) for name in ("x", "y", "only0")}, {"v": 0})
    for v in range(1, count + 1):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(v)], stdout=subprocess.PIPE, env=environment()
        )
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * longest)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        now = version(folder)
        assert now in (held, v)
        kept += now == held
        held = now
    storage.save_fields(folder, {name: np.full(ROWS, 999) for name in ("x", "y", "only999")}, {"v": 999})
    assert version(folder) == 999
    assert sorted(os.listdir(folder)) == ["manifest.json", "only999.npy", "x.npy", "y.npy"]
    return kept


def test_killed_writers(tmp_path):
    """kill -9 at random moments of a save leaves the old fields or the new ones, whole, and the next save tidies up."""
    kill_writers(tmp_path, 15, seed=1)


@pytest.mark.nightly
def test_many_killed_writers(tmp_path):
    """The same, 400 times; some die before the commit and some after."""
    assert 20 < kill_writers(tmp_path, 400, seed=2) < 380


def test_killed_at_each_step(tmp_path):
    """kill -9 before each single call to the system in a save: old or new, whole; once new, never old again."""
    done = subprocess.run(
        [sys.executable, "-c", STEPWISE, str(tmp_path)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / str(limit) for limit in range(1, int(done.stdout) + 1)]

    seen = [version(folder) for folder in folders]

    assert seen == sorted(seen) and seen.count(1) > 10 and seen.count(2) > 5
    for folder in folders:
        storage.save_fields(folder, {name: np.full(ROWS, 3) for name in ("x", "y", "only3")}, {"v": 3})
        assert version(folder) == 3 and len(os.listdir(folder)) == 4


def test_writers_at_once(tmp_path):
    """Of several processes that save at the same time each wins whole or fails with BlockingIOError."""
    storage.save_fields(tmp_path, {name: np.full(ROWS, 0) for name in ("x", "y", "only0")}, {"v": 0})
    script = WRITER.replace("time.sleep(60)", "").replace("storage.save", "for _ in range(40): storage.save")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(v)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        for v in (1, 2, 3)
    ]
    while any(writer.poll() is None for writer in writers):
        version(tmp_path)
    ends = [writer.communicate() for writer in writers]

    won = [out.endswith(b"saved\n") for out, _ in ends]
    assert any(won) and version(tmp_path) in (1, 2, 3)
    assert all(good or b"BlockingIOError" in err for good, (_, err) in zip(won, ends, strict=True)), ends


STEPS = ["posix_fallocate", "fsync", "mkdir", "replace"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", range(4))
def test_a_full_disk(tmp_path, monkeypatch, step, after):
    """A disk that is full at any step is the system's error, or the new version stands; no mix, nothing left."""
    old = {"x": np.arange(5), "y": np.arange(5)}
    storage.save_fields(tmp_path, old, {"v": 1})
    call, left = getattr(os, step), [after]

    def full(*args, **more):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        try:
            storage.save_fields(tmp_path, {"x": np.arange(6), "z": np.arange(6)}, {"v": 2})
        except OSError as error:
            assert error.errno == errno.ENOSPC
            failed = True
        else:
            failed = False
    fields, meta = storage.open_folder(tmp_path)

    assert (meta["v"], list(fields)) in ((1, ["x", "y"]), (2, ["x", "z"]))
    assert {len(x) for x in fields.values()} == {4 + meta["v"]}
    assert meta["v"] == 2 or failed
    if meta["v"] == 1:
        assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy", "y.npy"]
    storage.save_fields(tmp_path, old, {"v": 3})
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy", "y.npy"]


def test_a_file_that_may_not_grow(tmp_path):
    """A real limit on the size of files is an OSError with the path before maps are handed out; the old stays."""
    storage.save_fields(tmp_path, {"x": np.arange(5)}, {"v": 1})
    script = f"""
import resource
import numpy as np
from jitloader import storage
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
def save(): storage.save_fields({str(tmp_path)!r}, {{'x': np.zeros(1_000_000)}})
def create():
    with storage.create_fields({str(tmp_path)!r}, {{'x': ('f8', (1_000_000,))}}): raise AssertionError
for act in (save, create):
    try:
        act()
    except OSError as error:
        print(error.errno, 'x.npy' in str(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())

    assert done.stdout.split() == [str(errno.EFBIG), "True"] * 2, done.stderr
    assert storage.open_fields(tmp_path)["x"].tolist() == [0, 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "x.npy"]


OPENERS = [
    pytest.param(storage.open_array, id="ours"),
    pytest.param(lambda path: np.load(path, mmap_mode="r"), id="np.load"),
    pytest.param(lambda path: np.load(path, mmap_mode="r")[5:, None][::2], id="view"),
    pytest.param(lambda path: np.memmap(path, "i8", "r", offset=8192), id="np.memmap"),
    pytest.param(lambda path: np.load(path, mmap_mode="c"), id="private"),
]


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10_000))
    return tmp_path / "x.npy"


@pytest.mark.parametrize("opener", OPENERS)
def test_untouched(path, opener):
    """A file that stays as it is stays quiet: read, linked, renamed beside, its rights changed."""
    guard = storage.watch(opener(path))
    path.read_bytes()
    os.link(path, path.parent / "y.npy")
    os.chmod(path, 0o600)

    for _ in range(3):
        guard.verify()
    assert guard.path == str(path)


@pytest.mark.parametrize("opener", OPENERS)
def test_truncated(path, opener):
    """A file cut under its map is a DataError with path, bytes expected and found, at each epoch."""
    guard = storage.watch(opener(path))
    os.truncate(path, 5000)

    for _ in range(2):
        with pytest.raises(DataError, match=r"x.npy: truncated under its map: 80128 bytes expected, 5000 found"):
            guard.verify()


@pytest.mark.parametrize("opener", OPENERS)
def test_truncated_after_it_was_replaced(path, opener):
    """It is the mapped file that counts, not the one that has its path now."""
    guard = storage.watch(opener(path))
    other = os.open(path, os.O_RDWR)
    os.replace(path, path.parent / "moved.npy")
    np.save(path, np.arange(20_000))
    os.ftruncate(other, 100)
    os.close(other)

    with pytest.raises(DataError, match="80128 bytes expected, 100 found"):
        guard.verify()


@pytest.mark.parametrize("opener", OPENERS)
def test_replaced(path, opener):
    """Another file under the path: the map keeps the old values whole, and the watch says so once."""
    x = opener(path)
    guard, old = storage.watch(x), x.tobytes()
    np.save(path.parent / "new.npy", np.zeros(50))
    os.replace(path.parent / "new.npy", path)

    with pytest.warns(UserWarning, match=r"x.npy: now another file \(80128 bytes expected, 528 found\)") as seen:
        guard.verify()
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.verify()
    assert x.tobytes() == old and storage.locate(x) is None


@pytest.mark.parametrize("opener", OPENERS)
def test_removed(path, opener):
    """A file that is gone keeps its bytes under the map: no fault."""
    x = opener(path)
    guard, old = storage.watch(x), x.tobytes()
    os.remove(path)

    guard.verify()
    assert x.tobytes() == old and storage.locate(x) is None


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("how", ["same size", "grown"])
def test_rewritten(path, opener, how):
    """A file written in place would mix old and new: DataError, whether its size changed or not."""
    guard = storage.watch(opener(path))
    time.sleep(0.02)  # file times tick in milliseconds
    with open(path, "r+b" if how == "same size" else "ab") as file:
        file.write(path.read_bytes()[:200])

    with pytest.raises(DataError, match="x.npy: written in place since it was opened: 80128 bytes expected"):
        guard.verify()


def test_writable_maps_may_be_written(path):
    """A map that the user writes through is not taken for a file rewritten by somebody else; cutting it still is."""
    x = np.load(path, mmap_mode="r+")
    guard = storage.watch(x)
    time.sleep(0.02)
    x[:] = 5
    x.flush()
    os.utime(path)

    guard.verify()
    os.truncate(path, 100)
    with pytest.raises(DataError, match="truncated"):
        guard.verify()


def test_a_watch_is_cheap(path):
    """Two calls to the system an array: thousands of arrays are checked between two epochs."""
    guard = storage.watch(storage.open_array(path))
    guard.verify()

    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            guard.verify()
        times.append((time.perf_counter() - start) / 100)
    assert min(times) < 100e-6, times


def test_changed_between_open_and_watch(path):
    """Arrays of this room are compared with the file as it was when opened, not when the watch began."""
    x = storage.open_array(path)
    with open(path, "ab") as file:
        file.write(b"more")

    with pytest.raises(DataError, match="80128 bytes expected, 80132 found"):
        storage.watch(x).verify()


def test_cut_before_it_was_watched(path):
    """A np.memmap whose file was cut before anybody watched is found too."""
    x = np.load(path, mmap_mode="r")
    os.truncate(path, 4000)

    with pytest.raises(DataError, match="80128 bytes expected, 4000 found"):
        storage.watch(x).verify()
