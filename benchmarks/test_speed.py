"""Whole shuffled epochs through the loader, beside the best NumPy, torch, and a memcpy of the same bytes.

Rows are in random order in every way but memcpy, which moves half of (bytes read + bytes written) from one place in
memory to another, sequentially, in runs of a batch. NumPy and torch indexing write into buffers that they use again;
torch's DataLoader runs in this process, without workers, and over fewer rows where it is slow: rates are per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from interleave import CLOCK, Taken, Way, interleaved, report

import jitloader as jl

MEAN, STD = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
SCALE, BIAS = (1 / STD).astype(np.float32), (-MEAN / STD).astype(np.float32)
ROUNDS = 7
WAYS = ["jitloader", "numpy", "torch indexing", "torch DataLoader batched", "torch DataLoader", "memcpy"]
Fill = Callable[[np.ndarray], tuple[np.ndarray, ...]]


class Workload(NamedTuple):
    """One kind of work over some arrays; the last output of every batch holds row numbers."""

    title: str
    data: jl.Dataset
    batch: int
    fill: Fill  # the best NumPy: row numbers to a batch
    tensors: Callable[[Any], Callable[[Any], tuple[Any, ...]]]  # of torch: a function of row numbers
    item: Callable[[int], tuple[Any, ...]]  # one row, as a map-style torch data set gives it
    moved: int  # half of the bytes read and written a row
    some: int  # rows for torch's default DataLoader
    fits: Callable[[np.ndarray, int], bool]  # whether an output is right for a row


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays agree to the rounding of the arithmetic."""
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-4))


def standardised(small: bool, folder: Path) -> Workload:
    """Rows of 64 float32, standardised; batch 1024."""
    n, batch = (5_000 if small else 1_000_000), 1024
    random = np.random.default_rng(1)
    x, y = random.standard_normal((n, 64), np.float32), np.arange(n)
    mean, std = random.normal(0, 1, 64), random.uniform(0.5, 2, 64)
    shift, inverse = mean.astype(np.float32), (1 / std).astype(np.float32)
    buffers = np.empty((batch, 64), np.float32), np.empty(batch, np.int64)

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        image, label = buffers[0][: len(index)], buffers[1][: len(index)]
        np.take(x, index, axis=0, out=image, mode="clip")
        np.take(y, index, out=label, mode="clip")
        image -= shift
        image *= inverse
        return image, label

    def tensors(torch: Any) -> Callable[[Any], tuple[Any, ...]]:
        rows, labels = torch.from_numpy(x), torch.from_numpy(y)
        a, b = torch.from_numpy(shift), torch.from_numpy(inverse)
        image = torch.empty(batch, 64)

        def get(index: Any) -> tuple[Any, ...]:
            out = image[: len(index)]
            torch.index_select(rows, 0, index, out=out)
            return out.sub_(a).mul_(b), labels[index]

        return get

    return Workload(
        f"standardise rows of 64 float32 ({n:,} rows, batch {batch})",
        jl.Dataset(x=x, y=y).map("x", jl.normalize(mean, std)),
        batch,
        fill,
        tensors,
        lambda i: ((x[i] - shift) * inverse, y[i]),
        (512 + 16) // 2,
        20_000,
        lambda out, row: close(out, (x[row] - mean) / std),
    )


def cropped(small: bool, folder: Path) -> Workload:
    """Images uint8 (32, 32, 3): random crop with padding 4, flip, normalise, float32 channels first; batch 512."""
    n, batch = (600 if small else 50_000), 512
    random = np.random.default_rng(2)
    x, y = random.integers(0, 256, (n, 32, 32, 3), np.uint8), np.arange(n)
    padded = np.zeros((n, 3, 40, 40), np.uint8)  # laid out and padded once, so that a crop is one strided gather
    padded[:, :, 4:36, 4:36] = x.transpose(0, 3, 1, 2)
    cut = np.lib.stride_tricks.sliding_window_view
    windows, mirrored = cut(padded, (32, 32), axis=(2, 3)), cut(padded[..., ::-1], (32, 32), axis=(2, 3))
    buffers = np.empty((batch, 3, 32, 32), np.float32), np.empty(batch, np.int64)
    scale, bias = SCALE[:, None, None], BIAS[:, None, None]

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        k = len(index)
        image, label = buffers[0][:k], buffers[1][:k]
        top, left = random.integers(0, 9, (2, k))
        raw = windows[index, :, top, left]
        flip = np.flatnonzero(random.random(k) < 0.5)
        raw[flip] = mirrored[index[flip], :, top[flip], left[flip]]
        np.copyto(image, raw)
        image *= scale
        image += bias
        np.take(y, index, out=label, mode="clip")
        return image, label

    def tensors(torch: Any) -> Callable[[Any], tuple[Any, ...]]:
        crops = torch.from_numpy(padded).unfold(2, 32, 1).unfold(3, 32, 1)
        labels, a, b = torch.from_numpy(y), torch.from_numpy(scale), torch.from_numpy(bias)

        def get(index: Any) -> tuple[Any, ...]:
            k = len(index)
            raw = crops[index, :, torch.randint(9, (k,)), torch.randint(9, (k,))]
            flip = torch.rand(k) < 0.5
            raw[flip] = raw[flip].flip(-1)
            return raw.float().mul_(a).add_(b), labels[index]

        return get

    def item(i: int) -> tuple[Any, ...]:
        top, left = random.integers(0, 9, 2)
        image = np.pad(x[i], ((4, 4), (4, 4), (0, 0)))[top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image = image[:, ::-1]
        return np.multiply(image.transpose(2, 0, 1), scale, dtype=np.float32, order="C") + bias, y[i]

    def fits(out: np.ndarray, row: int) -> bool:
        places = cut(np.pad(x[row].transpose(2, 0, 1), ((0, 0), (4, 4), (4, 4))), (32, 32), axis=(1, 2))
        raw = out * STD[:, None, None] + MEAN[:, None, None]
        every = np.moveaxis(places, 0, 2).reshape(81, 3, 32, 32)
        wrong = [np.abs(every[..., ::step] - raw).max(axis=(1, 2, 3)).min() for step in (1, -1)]
        return min(wrong) < 0.01

    stages = jl.random_crop(32, padding=4), jl.random_flip(), jl.normalize(MEAN, STD), jl.channels_first()
    return Workload(
        f"crop + flip + normalise uint8 32x32x3 to float32 NCHW ({n:,} rows, batch {batch})",
        jl.Dataset(x=x, y=y).map("x", *stages),
        batch,
        fill,
        tensors,
        item,
        (3072 * 5 + 16) // 2,
        2_000,
        fits,
    )


def large(small: bool, folder: Path) -> Workload:
    """Images uint8 (224, 224, 3) from a memory map: flip, normalise, float32 channels first; batch 128."""
    n, batch = (140 if small else 2_000), 128
    random = np.random.default_rng(3)
    np.save(folder / "large.npy", random.integers(0, 256, (n, 224, 224, 3), np.uint8))
    x, y = np.load(folder / "large.npy", mmap_mode="r"), np.arange(n)
    buffers = np.empty((batch, 3, 224, 224), np.float32), np.empty(batch, np.int64)
    planes = np.empty((3, 224, 224), np.uint8)
    scale, bias = SCALE[:, None, None], BIAS[:, None, None]

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        label = buffers[1][: len(index)]
        flips = random.random(len(index)) < 0.5
        for out, row, flip in zip(buffers[0], index, flips, strict=False):
            raw = x[row].transpose(2, 0, 1)
            np.copyto(planes, raw[:, :, ::-1] if flip else raw)
            np.copyto(out, planes)
            out *= scale
            out += bias
        np.take(y, index, out=label, mode="clip")
        return buffers[0][: len(index)], label

    def tensors(torch: Any) -> Callable[[Any], tuple[Any, ...]]:
        rows = torch.from_numpy(np.load(folder / "large.npy", mmap_mode="c"))  # torch warns of read-only arrays
        labels, a, b = torch.from_numpy(y), torch.from_numpy(scale), torch.from_numpy(bias)
        image = torch.empty(batch, 3, 224, 224)

        def get(index: Any) -> tuple[Any, ...]:
            out = image[: len(index)]
            raw = rows[index].permute(0, 3, 1, 2)
            flip = torch.rand(len(index)) < 0.5
            out.copy_(raw)
            out[flip] = out[flip].flip(-1)
            return out.mul_(a).add_(b), labels[index]

        return get

    def item(i: int) -> tuple[Any, ...]:
        image = x[i][:, ::-1] if random.random() < 0.5 else x[i]
        return np.multiply(image.transpose(2, 0, 1), scale, dtype=np.float32, order="C") + bias, y[i]

    def fits(out: np.ndarray, row: int) -> bool:
        want = ((x[row] - MEAN) / STD).transpose(2, 0, 1)
        return close(out, want) or close(out, want[:, :, ::-1])

    return Workload(
        f"flip + normalise uint8 224x224x3 from a map to float32 NCHW ({n:,} rows, batch {batch})",
        jl.Dataset(x=folder / "large.npy", y=y).map(
            "x", jl.random_flip(), jl.normalize(MEAN, STD), jl.channels_first()
        ),
        batch,
        fill,
        tensors,
        item,
        (150_528 * 5 + 16) // 2,
        256,
        fits,
    )


def narrow(small: bool, folder: Path) -> Workload:
    """Rows of 8 float32, as they are; batch 256. The first column holds the row number."""
    n, batch = (2_000 if small else 1_000_000), 256
    x = np.random.default_rng(4).standard_normal((n, 8), np.float32)
    x[:, 0] = np.arange(n)
    buffer = np.empty((batch, 8), np.float32)

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        out = buffer[: len(index)]
        np.take(x, index, axis=0, out=out, mode="clip")
        return (out,)

    def tensors(torch: Any) -> Callable[[Any], tuple[Any, ...]]:
        rows, out = torch.from_numpy(x), torch.empty(batch, 8)

        def get(index: Any) -> tuple[Any, ...]:
            return (torch.index_select(rows, 0, index, out=out[: len(index)]),)

        return get

    return Workload(
        f"rows of 8 float32 ({n:,} rows, batch {batch})",
        jl.Dataset(x=x),
        batch,
        fill,
        tensors,
        lambda i: (x[i],),
        32,
        20_000,
        lambda out, row: bool((out == x[row]).all()),
    )


WORKLOADS = {"standardise": standardised, "crop": cropped, "large": large, "narrow": narrow}


def ways(work: Workload) -> dict[str, Way]:
    """Give every way of going through one shuffled epoch of a workload."""
    n, batch = len(work.data), work.batch
    loader = jl.Loader(work.data, batch, shuffle=True)
    seeds = np.random.default_rng(5)

    def numpy_epoch() -> Iterator[Any]:
        order = seeds.permutation(n)
        for low in range(0, n, batch):
            yield work.fill(order[low : low + batch])

    found = {"jitloader": Way(lambda: loader, n), "numpy": Way(numpy_epoch, n)}
    try:
        import torch
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler
    except ImportError:
        return {**found, "memcpy": memcpy(work)}
    get = work.tensors(torch)

    def torch_epoch() -> Iterator[Any]:
        for index in torch.randperm(n).split(batch):
            yield get(index)

    class Rows:
        def __init__(self, count: int) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, i: Any) -> Any:
            return work.fill(np.asarray(i)) if isinstance(i, list) else work.item(i)

    few, whole = Rows(min(n, work.some)), Rows(n)
    plain = DataLoader(few, batch, shuffle=True)
    runs = BatchSampler(RandomSampler(whole), batch, drop_last=False)
    batched = DataLoader(whole, sampler=runs, batch_size=None)
    return {
        **found,
        "torch indexing": Way(torch_epoch, n),
        "torch DataLoader batched": Way(lambda: batched, n),
        "torch DataLoader": Way(lambda: plain, len(few)),
        "memcpy": memcpy(work),
    }


def memcpy(work: Workload) -> Way:
    """Copy as many bytes as an epoch moves, in runs of a batch, from memory larger than the caches."""
    size = work.batch * work.moved
    count = -(-len(work.data) // work.batch)
    source = np.ones(size * min(count, max(1, (1 << 28) // size)), np.uint8).reshape(-1, size)
    buffer = np.empty(size, np.uint8)

    def run() -> Iterator[None]:
        for k in range(count):
            np.copyto(buffer, source[k % len(source)])
            yield

    return Way(run, count * work.batch)


def check(work: Workload, name: str, way: Way) -> None:
    """Every row comes once, and some rows of the first batches hold what they should."""
    seen = []
    for number, batch in enumerate(way.run()):
        x = np.asarray(batch[0])
        rows = np.asarray(batch[1] if len(batch) == 2 else x[:, 0]).astype(np.int64)
        seen.append(rows.copy())
        if number < 2:
            assert all(work.fits(x[k], int(rows[k])) for k in range(0, len(x), 37)), name
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(way.rows)), name


_measured: dict[str, dict[str, Taken]] = {}


@pytest.fixture
def measured(request: pytest.FixtureRequest, small: bool, tmp_path: Path, workload: str) -> dict[str, Taken]:
    """Give the interleaved rounds of a workload, run once for all its tests."""
    if workload not in _measured:
        work = WORKLOADS[workload](small, tmp_path)
        before = len(jl.compile_events)
        jl.Loader(work.data, work.batch, shuffle=True).warmup()
        made = [f"{e.seconds:.2f} s ({e.origin})" for e in jl.compile_events[before:]]
        every = ways(work)
        for name, way in every.items():
            if name != "memcpy":
                check(work, name, way)
        _measured[workload] = interleaved(every, 1 if small else ROUNDS)
        report(f"{work.title}; kernel made in {', '.join(made) or 'this process'}", _measured[workload])
    return _measured[workload]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_epoch(benchmark: Any, measured: dict[str, Taken], workload: str, way: str) -> None:
    """Every way makes right batches; the table shows the time of a thousand rows in each interleaved round."""
    if way not in measured:
        pytest.skip("torch is not installed")
    benchmark.group = f"{workload}: a thousand rows"
    benchmark.extra_info.update(cpu_seconds_a_million_rows=measured[way].cpu * 1e6)

    CLOCK.show(benchmark, [seconds * 1000 for seconds in measured[way].rounds])
