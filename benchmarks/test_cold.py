"""Data in files: rows of a file that is not in memory, and of chunked files, beside the plain way to each.

Measured on 2 cores shared with other work (ext4 on a virtual disk, 2026-12-02), medians of interleaved rounds:

| rows/s | jitloader | plain |
|---|---|---|
| cold file, random rows of 150 KB; np.memmap[i] | 5,567 and 3,940 (two runs) | 1,030 and 978: 5.4x and 4.0x |
| gzip HDF5, chunks of 64 rows of 12 KB, jl.blocks(64, 16); dset[i] at random | 2,675 | 70: 38x |
| Zarr (zstd), the same | 5,966 | 213: 28x |

With a disk that others keep busy, the first came to 1.5x to 1.8x: it is then the disk's rate that counts.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interleave import CLOCK, Taken, Way, interleaved, report

import jitloader as jl
from jitloader import storage

ROUNDS = 5

# -- larger than memory -----------------------------------------------------------------------------------------------

ROW = 150_528  # bytes: an image of 224 x 224 x 3
_resident: dict[str, dict[str, Taken]] = {}


def forget(path: Path, data: jl.Dataset) -> None:
    """Let the system drop a file from its cache; pages that a map still shows would stay."""
    below = storage.mapping(data.sources["x"].parts[0].array)
    assert below is not None
    below.map.madvise(mmap.MADV_DONTNEED)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def marks(found: Any, rows: np.ndarray) -> None:
    """Check that batches are these rows: each begins with its number, in four bytes."""
    first = np.concatenate([np.asarray(batch).reshape(len(batch), -1)[:, :4].copy() for batch in found])
    assert np.array_equal(first.view(np.uint32)[:, 0], rows)


@pytest.fixture(scope="session")
def cold(small: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Taken]:
    """Random rows of a cold file: 640 a round, the same of each way."""
    path, total, count = tmp_path_factory.mktemp("cold") / "x.npy", 64 if small else 4000, 32 if small else 640
    x = np.lib.format.open_memmap(path, "w+", np.uint8, (total, ROW))
    noise = np.random.default_rng(0).integers(0, 256, ROW, dtype=np.uint8)
    for row in range(total):
        x[row] = noise
        x[row, :4] = np.uint32(row).reshape(1).view(np.uint8)
    x.flush()
    del x
    seeds, data = np.random.default_rng(1), jl.Dataset(x=path)
    # One program for all: rows come as an order of their own.
    rows = seeds.permutation(total)[:count]

    def loader() -> Iterator[np.ndarray]:
        return (batch.x for batch in jl.Loader(data, 32, order=rows))

    def index() -> Iterator[np.ndarray]:
        mapped = np.load(path, mmap_mode="r")
        buffer = np.empty((32, ROW), np.uint8)
        for low in range(0, count, 32):
            for j, row in enumerate(rows[low : low + 32]):
                buffer[j] = mapped[row]
            yield buffer[: len(rows[low : low + 32])]

    ways = {"jitloader": loader, "np.memmap[i]": index}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        marks(run(), rows)
    for _ in range(1 if small else ROUNDS):
        for name, run in ways.items():
            forget(path, data)  # outside of what is timed
            work, start = time.process_time(), time.perf_counter()
            for _batch in run():
                pass
            wall[name].append((time.perf_counter() - start) / count)
            cpu[name].append((time.process_time() - work) / count)
    found = {name: Taken(wall[name], float(np.median(cpu[name]))) for name in ways}
    report(f"cold file, random rows of {ROW:,} bytes", found)
    return found


@pytest.mark.benchmark(timer=CLOCK, group="storage: a cold file")
@pytest.mark.parametrize("way", ["jitloader", "np.memmap[i]"])
def test_cold_rows(benchmark: Any, cold: dict[str, Taken], way: str) -> None:
    """Seconds a row, of random rows of a file that is not in memory."""
    CLOCK.show(benchmark, cold[way].rounds)


@pytest.fixture
def chunked(small: bool, kind: str, tmp_path: Path) -> dict[str, Taken]:
    """A compressed file of images in chunks of 64 rows: an epoch of blocks, beside rows one by one at random."""
    if kind in _resident:
        return _resident[kind]
    shape = (64, 64, 3)
    total, few = (256, 8) if small else (8192, 128)
    seeds = np.random.default_rng(0)
    x = seeds.integers(0, 256, (total, 8, 8, 3)).repeat(8, 1).repeat(8, 2)
    x = (x + seeds.integers(0, 6, x.shape)).astype(np.uint8)
    x.reshape(total, -1)[:, :4] = np.arange(total, dtype=np.uint32)[:, None].view(np.uint8)
    rows = seeds.permutation(total)[:few]
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        path = tmp_path / "x.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, chunks=(64, *shape), compression="gzip", shuffle=True)
        node = h5py.File(path)["x"]
    else:
        zarr = pytest.importorskip("zarr")
        path = tmp_path / "x.zarr"
        made = zarr.open_array(str(path), mode="w", shape=x.shape, chunks=(64, *shape), dtype=x.dtype)
        made[...] = x
        node = zarr.open_array(str(path), mode="r")
    order = jl.blocks(rows=64, window=16)

    def loader() -> Iterator[np.ndarray]:
        data = jl.open(path)
        yield from (batch.x for batch in jl.Loader(data, 64, order=order, max_resident=32 * 64 * x[0].nbytes))
        memory = storage.mapping(data.sources["x"].parts[0].array)
        assert memory is not None and memory.map.decoded == total // 64, "each chunk once"

    def index() -> Iterator[np.ndarray]:
        return (node[int(i)][None] for i in rows)

    planned = order.plan(total, 0, 0)
    wanted = np.zeros(total, np.int64)
    with np.errstate(all="ignore"):
        planned.kernel(0, 1, wanted, *planned.params)
    marks(loader(), wanted)
    marks(index(), rows)
    _resident[kind] = interleaved({"jitloader": Way(loader, total), "dset[i]": Way(index, few)}, 1 if small else ROUNDS)
    report(f"chunks of 64 rows of {x[0].nbytes:,} bytes, {kind}", _resident[kind])
    if kind == "hdf5":
        node.file.close()
    return _resident[kind]


@pytest.mark.benchmark(timer=CLOCK, group="storage: chunked files")
@pytest.mark.parametrize("way", ["jitloader", "dset[i]"])
@pytest.mark.parametrize("kind", ["hdf5", "zarr"])
def test_chunked_rows(benchmark: Any, chunked: dict[str, Taken], kind: str, way: str) -> None:
    """Seconds a row: blocks mixed within windows, each chunk decoded once, beside the library's own way to one row."""
    CLOCK.show(benchmark, chunked[way].rounds)
