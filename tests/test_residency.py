"""Which bytes of files are in memory: asked for ahead, within a bound, and never at the price of a value."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import numpy as np
import pytest

import jitloader as jl
from jitloader import residency

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="needs madvise")
PAGE = mmap.PAGESIZE


def every(loader):
    """Give all batches of an epoch as one array a field."""
    return [np.concatenate(column) for column in zip(*loader, strict=True)]


def ground(data):
    """Give the one file below a data set."""
    return residency.grounds(data.sources)[0]


@pytest.fixture
def rows(tmp_path):
    """A file of 2000 rows of 3000 bytes, and its values."""
    x = np.random.default_rng(0).integers(0, 256, (2000, 3000), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    return tmp_path / "x.npy", x


@pytest.fixture
def plain(monkeypatch):
    """Run kernels as plain Python: the same source, and nothing to compile."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")


@pytest.fixture
def advised(monkeypatch):
    """Record what the system is asked for: (address, bytes)."""
    found, real = [], residency._advise

    def advise(address, length, advice):
        if advice == mmap.MADV_WILLNEED:
            found.append((address, length))
        real(address, length, advice)

    monkeypatch.setattr(residency, "_advise", advise)
    return found


def pages(ranges):
    """Give the pages that some (first byte, bytes) touch."""
    return {p for a, n in ranges for p in range(a // PAGE, -(-(a + n) // PAGE))}


def test_exact_rows_are_asked_for(rows, advised, monkeypatch, plain):
    """Of a cold file the pages of the rows that come are asked for, before they are read, and no others."""
    monkeypatch.setattr(residency, "cold", lambda ground: True)
    path, x = rows
    chosen = np.random.default_rng(1).permutation(2000)[:300]
    data = jl.Dataset(x=path).select(chosen)
    loader = jl.Loader(data, 10, shuffle=True, seed=1)
    found = np.concatenate([batch.x for batch in loader])

    assert sorted(map(bytes, found)) == sorted(map(bytes, x[chosen]))
    start = ground(data).address + 128  # the header of a .npy
    assert pages(advised) == pages([(start + 3000 * r, 3000) for r in chosen.tolist()])
    advised.clear()
    whole = jl.Dataset(x=path)
    iterator = iter(jl.Loader(whole, 10, max_resident=1 << 20))
    assert np.array_equal(next(iterator).x, x[:10])
    ahead = max(a + n for a, n in advised) - ground(whole).address
    assert 10 * 3000 <= ahead < 1500 * 3000, "as far as the bound allows, not all of the file"


def test_windows_and_partners_are_asked_for(rows, advised, monkeypatch, plain):
    """What a sample reads beyond its own row is asked for with it: windows, and rows that mixup draws."""
    monkeypatch.setattr(residency, "cold", lambda ground: True)
    path, x = rows
    series = jl.Dataset(jl.windows(jl.Dataset(x=path).sources["x"], past=slice(0, 4), stride=50))
    assert np.array_equal(every(jl.Loader(series, 5))[0][:, 3], x[3:2000:50])
    start = ground(series).address + 128
    assert pages(advised) == pages([(start + 3000 * r, 4 * 3000) for r in range(0, 1997, 50)])
    advised.clear()
    mixed = jl.Dataset(x=path).select(np.arange(0, 2000, 100)).map("x", jl.cast("float32"), jl.mixup(0.5))
    every(jl.Loader(mixed, 5))
    partners = pages([(start + 3000 * r, 3000) for r in range(0, 2000, 100)])
    assert pages((a - ground(mixed).address + ground(series).address, n) for a, n in advised) == partners


def test_a_file_in_memory_is_left_alone(rows, advised):
    """What is in the system's cache costs a look at 16 pages an epoch: nothing is asked for or compiled for it."""
    path, x = rows
    x = np.load(path)
    data = jl.Dataset(x=path)
    loader = jl.Loader(data, 50, shuffle=True)
    assert np.array_equal(np.sort(every(loader)[0].sum(1)), np.sort(x.sum(1)))
    assert not advised and loader._program.reach._made is None


def test_cold_files_are_known(tmp_path):
    """A file that the system dropped is cold, one that was read is not."""
    path = tmp_path / "x.npy"
    np.save(path, np.ones(4 << 20, np.uint8))
    place = ground(jl.Dataset(x=path))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = residency.cold(place)
        file.read()
    if not dropped:
        pytest.skip("this file system keeps files in memory")
    assert not residency.cold(place)
    data = jl.Dataset(x=path)
    assert every(jl.Loader(data, 1 << 16))[0].all()


@pytest.mark.parametrize("bound", [1, 1 << 20])
def test_a_bound_on_mapped_pages(rows, bound):
    """With pages given back behind, values stay what they are; a map that may be written to keeps what was written."""
    path, x = rows
    assert np.array_equal(every(jl.Loader(jl.Dataset(x=path), 50, max_resident=bound))[0], x)
    order = np.random.default_rng(1).permutation(2000)
    assert np.array_equal(every(jl.Loader(jl.Dataset(x=path), 7, order=order, max_resident=bound))[0], x[order])
    private = np.load(path, mmap_mode="c")
    private[5] = 7
    shared = np.load(path, mmap_mode="r+")
    shared[6] = 8
    for array, row, value in ((private, 5, 7), (shared, 6, 8)):
        found = every(jl.Loader(jl.Dataset(x=array), 50, max_resident=bound))[0]
        assert (found[row] == value).all() and np.array_equal(found[100:], x[100:])
    with pytest.raises(ValueError, match="max_resident"):
        jl.Loader(jl.Dataset(x=path), 50, max_resident=0)


EPOCH = textwrap.dedent(
    """
    import json, sys, threading, time
    import numpy as np, jitloader as jl

    def memory(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

    path, kind, bound, order = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
    data = jl.open(path)
    orders = {"sequential": None, "shuffled": jl.shuffled, "blocks": jl.blocks(64, 8)}
    loader = jl.Loader(data, 16, order=orders[order], max_resident=bound).warmup()
    loader._program.reach().load()  # the compiler takes memory too
    loader[0]
    base, most, running = memory(kind), [0], [True]

    def watch():
        while running[0]:
            most[0] = max(most[0], memory(kind))
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    total = 0
    for batch in loader:
        total += int(batch[0][:, 0].sum())
        most[0] = max(most[0], memory(kind))
    running[0] = False
    thread.join()
    print(json.dumps([total, most[0] - base - (loader.stats()["pool_bytes"] if kind == "RssAnon" else 0)]))
    """
)


def epoch(path, kind, bound, order, before=None):
    """Run an epoch in a process of their own; give the sum of the first column, and how far its memory grew."""
    command = [sys.executable, "-c", EPOCH, str(path), kind, json.dumps(bound), order]
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=before, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def write(folder, rows):
    """Write a .npy and an HDF5 file of rows of 64 KiB, row i of which begins with i % 251."""
    h5py = pytest.importorskip("h5py")
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (rows, 1 << 16))
    x[:, 0] = np.arange(rows) % 251
    with h5py.File(folder / "x.h5", "w") as file:
        made = file.create_dataset("x", x.shape, "u1", chunks=(16, 1 << 16), compression="gzip", compression_opts=1)
        for low in range(0, rows, 256):
            made[low : low + 256] = x[low : low + 256]
    return folder, int((np.arange(rows) % 251).sum())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Files of 128 MiB."""
    return write(tmp_path_factory.mktemp("large"), 2048)


BOUND = 32 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("order", ["shuffled"])
def test_mapped_pages_stay_within_the_bound(large, order):
    """An epoch of a file four times the bound never has more of it in memory."""
    folder, wanted = large
    total, grown = epoch(folder / "x.npy", "RssFile", BOUND, order)

    assert total == wanted
    assert grown <= BOUND


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("order", ["blocks"])
def test_decoded_chunks_stay_within_the_bound(large, order):
    """An epoch of a chunked file four times the bound never has more of it decoded; 8 MiB is for what is being inflated."""
    folder, wanted = large
    total, grown = epoch(folder / "x.h5", "RssAnon", BOUND, order)

    assert total == wanted
    assert grown <= BOUND + (8 << 20)


@pytest.mark.nightly
@pytest.mark.parametrize("name, order", [("x.h5", "blocks"), ("x.h5", "sequential"), ("x.npy", "shuffled")])
def test_an_epoch_under_a_memory_limit(tmp_path, name, order):
    """In a cgroup that may have a quarter of the file's bytes for all of the process, an epoch runs to its end."""
    folder, wanted = write(tmp_path, 16384)
    bound = 64 << 20
    assert epoch(folder / name, "RssAnon", bound, order)[0] == wanted  # compiles what the limited process then finds
    group = Path("/sys/fs/cgroup/memory", f"jitloader-{uuid.uuid4().hex[:8]}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make a memory cgroup")
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))

        def enter():
            (group / "cgroup.procs").write_text(str(os.getpid()))

        for given in (bound, None):
            assert epoch(folder / name, "RssAnon", given, order, enter)[0] == wanted
    finally:
        group.rmdir()
