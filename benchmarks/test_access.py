"""Windows, tokens, ragged rows and transitions through the loader, beside the best NumPy, torch, and a memcpy.

Rows are in random order in every way but memcpy, which moves half of (bytes read + bytes written) in runs of a batch.
NumPy writes into buffers that it uses again; torch's DataLoader runs in this process, without workers, over fewer rows,
and so do the libraries of access_peers.py where they are installed.
Each way's batches are checked before they are timed. Small sizes with `--benchmark-disable` or JITLOADER_SMOKE=1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import access_peers as peers
import numpy as np
import pytest
from interleave import CLOCK, Taken, Way, interleaved, report
from numpy.lib.stride_tricks import sliding_window_view

import jitloader as jl

ROUNDS = 7
WAYS = ["jitloader", "jitloader 1 thread", "numpy", "torch DataLoader", "memcpy"]


class Workload(NamedTuple):
    """One access pattern; the last output of every batch but torch's holds row numbers."""

    title: str
    data: jl.Dataset
    batch: int
    fill: Callable[[np.ndarray], tuple[np.ndarray, ...]]  # the best NumPy: row numbers to a batch
    item: Callable[[int], tuple[Any, ...]]  # one row, as a map-style torch data set gives it
    moved: int  # half of the bytes read and written a row
    some: int  # rows for torch's DataLoader
    collate: Callable[[Any], Any] | None = None
    other: tuple[str, Callable[[], Way]] | None = None  # another library, and its own way of it


def tokens(small: bool) -> Workload:
    """Next-token pairs of 1024 uint16 tokens to int64, every window of 1024 apart; batch 64."""
    length, batch = 1024, 64
    n = (200 if small else 20_000) * length + 1
    stream = np.random.default_rng(1).integers(0, 50_257, n).astype(np.uint16)
    fields = jl.windows(stream, x=slice(0, length), y=slice(1, length + 1), stride=length)
    count = fields["x"].rows.count
    every = sliding_window_view(stream, length + 1)[::length]
    x, y = np.empty((batch, length), np.int64), np.empty((batch, length), np.int64)
    ids = np.arange(count)

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        k = len(index)
        raw = every[index]  # np.take would copy the whole view first
        np.copyto(x[:k], raw[:, :-1])
        np.copyto(y[:k], raw[:, 1:])
        return x[:k], y[:k], ids[index]

    def item(i: int) -> tuple[Any, ...]:
        a = i * length
        return stream[a : a + length].astype(np.int64), stream[a + 1 : a + length + 1].astype(np.int64)

    data = jl.Dataset({**fields, "i": jl.records(ids)}).map(("x", "y"), jl.cast("int64"))
    moved = length * (2 + 16) // 2
    return Workload(
        f"tokens 1024 uint16 -> int64 pair ({count:,} windows, batch 64)", data, batch, fill, item, moved, 2000
    )


def standardised(small: bool) -> Workload:
    """Windows of 192 steps and 8 channels, standardised by their own mean and std; batch 256."""
    length, batch = 192, 256
    n = 2_000 if small else 100_000
    series = np.random.default_rng(2).normal(size=(n, 8)).astype(np.float32)
    fields = jl.windows(series, x=slice(0, length))
    count = fields["x"].rows.count
    every = sliding_window_view(series, length, axis=0)  # (count, 8, 192)
    out, ids = np.empty((batch, length, 8), np.float32), np.arange(count)
    wide, square = np.empty((batch, length, 8)), np.empty((batch, length, 8))

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        k = len(index)
        np.copyto(wide[:k], every[index].transpose(0, 2, 1))
        mean = wide[:k].mean(axis=1, keepdims=True)
        np.subtract(wide[:k], mean, out=wide[:k])
        np.multiply(wide[:k], wide[:k], out=square[:k])
        std = np.sqrt(square[:k].mean(axis=1, keepdims=True))
        np.divide(wide[:k], std, out=out[:k], casting="same_kind")
        return out[:k], ids[index]

    def item(i: int) -> tuple[Any, ...]:
        x = series[i : i + length].astype(np.float64)
        return (((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32),)

    data = jl.Dataset({**fields, "i": jl.records(ids)}).map("x", jl.standardize_by())
    title = f"windows 192 x 8 standardised by themselves ({count:,} windows, batch 256)"
    return Workload(title, data, batch, fill, item, length * 8 * 4, 2000)


def forecast(small: bool) -> Workload:
    """Windows of 60 past and 10 next steps of 3 channels; batch 128."""
    past, following, batch = 60, 10, 128
    n = 2_000 if small else 200_000
    series = np.random.default_rng(3).normal(size=(n, 3)).astype(np.float32)
    fields = jl.windows(series, x=slice(0, past), y=slice(past, past + following))
    count = fields["x"].rows.count
    flat = series.reshape(-1)
    # Rows of a window lie in a row in memory: one strided view of whole windows is the best that NumPy has.
    a = sliding_window_view(flat, past * 3)[::3][:count]
    b = sliding_window_view(flat, following * 3)[past * 3 :: 3][:count]
    ids = np.arange(count)

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        k = len(index)
        return a[index].reshape(k, past, 3), b[index].reshape(k, following, 3), ids[index]

    def item(i: int) -> tuple[Any, ...]:
        return series[i : i + past], series[i + past : i + past + following]

    data = jl.Dataset({**fields, "i": jl.records(ids)})
    title = f"windows 60 + 10 of 3 channels ({count:,} windows, batch 128)"
    some = min(4000, count)
    return Workload(
        title, data, batch, fill, item, 70 * 12, some,
        other=("pytorch-forecasting", lambda: peers.forecasting(series, past, following, batch, some)),
    )  # fmt: skip


def ragged(small: bool) -> Workload:
    """Rows of lognormal length (some 100 tokens) padded to the longest of their batch, with a mask; batch 64."""
    batch, n = 64, 500 if small else 50_000
    source = np.random.default_rng(4)
    sizes = np.clip(source.lognormal(4.4, 0.6, n).astype(np.int64), 1, 1000)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    values = source.integers(1, 50_000, offsets[-1]).astype(np.int32)
    ids = np.arange(n)

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        begins, ends = offsets[index], offsets[index + 1]
        width = int((ends - begins).max())
        out, mask = np.zeros((len(index), width), np.int32), np.zeros((len(index), width), bool)
        for k, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            out[k, : end - begin] = values[begin:end]
            mask[k, : end - begin] = True
        return out, mask, ids[index]

    def item(i: int) -> tuple[Any, ...]:
        return (values[offsets[i] : offsets[i + 1]],)

    def collate(rows: Any) -> Any:
        import torch

        lengths = torch.tensor([len(t) for (t,) in rows])
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(t) for (t,) in rows], batch_first=True)
        return padded, torch.arange(padded.shape[1]) < lengths[:, None]

    stage = jl.pad_to_longest(mask="mask")
    data = jl.Dataset(t=jl.ragged(values, offsets), i=ids).map("t", stage).keep("t", "mask", "i")
    title = f"ragged rows padded to the longest, with mask ({n:,} rows, batch 64)"
    return Workload(title, data, batch, fill, item, int(sizes.mean() * 4 * 2), 4000, collate)


def replay(small: bool) -> Workload:
    """Transitions of 5 steps, observations of 17 float32; batch 256."""
    batch, n, steps, gamma = 256, 2_000 if small else 1_000_000, 5, 0.99
    source = np.random.default_rng(5)
    obs = source.normal(size=(n, 17)).astype(np.float32)
    action = source.normal(size=(n, 6)).astype(np.float32)
    reward = source.normal(size=n).astype(np.float32)
    ends = source.random(n) < 0.005
    terminated = ends & (source.random(n) < 0.5)
    truncated = ends & ~terminated
    ids = np.arange(n)
    last = ends.copy()
    last[-1] = True
    powers, ahead = gamma ** np.arange(steps + 1), np.arange(steps)

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.minimum(index[:, None] + ahead, n - 1)
        over = last[rows]
        stop = np.where(over.any(axis=1), over.argmax(axis=1), steps - 1)
        inside = ahead <= stop[:, None]
        total = (reward[rows] * powers[:-1] * inside).sum(axis=1).astype(np.float32)
        end = index + stop
        discount = np.where(terminated[end], 0.0, powers[stop + 1]).astype(np.float32)
        return obs[index], action[index], total, discount, obs[np.where(last[end], end, end + 1)], ids[index]

    def item(i: int) -> tuple[Any, ...]:
        k, total = i, 0.0
        while True:
            total += gamma ** (k - i) * float(reward[k])
            if last[k] or k - i == steps - 1:
                break
            k += 1
        discount = 0.0 if terminated[k] else gamma ** (k - i + 1)
        after = obs[k if last[k] else k + 1]
        return obs[i], action[i], np.float32(total), np.float32(discount), after

    data = jl.transitions(
        obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, n=steps, gamma=gamma, i=ids
    )
    title = f"transitions of 5 steps, 17 float32 ({n:,} rows, batch 256)"
    return Workload(
        title, data, batch, fill, item, 2 * 17 * 4 + 6 * 4 + 28, 4000,
        other=("stable-baselines3", lambda: peers.sb3(obs, action, reward, terminated, truncated, steps, gamma, batch)),
    )  # fmt: skip


def slices(small: bool) -> Workload:
    """Slices of 32 steps within episodes, at any start, observations of 17 float32 and actions of 6; batch 8."""
    length, batch, n = 32, 8, 3_000 if small else 1_000_000
    source = np.random.default_rng(6)
    obs = source.normal(size=(n, 17)).astype(np.float32)
    action = source.normal(size=(n, 6)).astype(np.float32)
    ends = source.random(n) < 0.002
    ends[-1] = True
    fields = jl.sequences(
        {"obs": obs, "action": action, "i": np.arange(n)}, length, groups=jl.episodes(ends), stride=1, pad=False
    )
    begins = np.lib.stride_tricks.sliding_window_view(ends[:-1], length - 1).any(axis=1)
    starts = np.flatnonzero(~begins)  # no episode ends before the last step
    wide = sliding_window_view(obs.reshape(-1), length * 17)[::17]
    acts = sliding_window_view(action.reshape(-1), length * 6)[::6]

    def fill(index: np.ndarray) -> tuple[np.ndarray, ...]:
        k, rows = len(index), starts[index]
        return wide[rows].reshape(k, length, 17), acts[rows].reshape(k, length, 6), index

    def item(i: int) -> tuple[Any, ...]:
        a = starts[i]
        return obs[a : a + length], action[a : a + length]

    data = jl.Dataset({"obs": fields["obs"], "action": fields["action"], "i": jl.records(np.arange(len(starts)))})
    title = f"slices of 32 steps, 17 + 6 float32, within episodes ({len(starts):,} starts, batch 8)"
    return Workload(
        title, data, batch, fill, item, length * 23 * 4, 2000,
        other=("torchrl", lambda: peers.torchrl({"obs": obs, "action": action}, ends, length, batch)),
    )  # fmt: skip


WORKLOADS = {
    "tokens": tokens,
    "standardised": standardised,
    "forecast": forecast,
    "ragged": ragged,
    "replay": replay,
    "slices": slices,
}


def ways(work: Workload) -> dict[str, Way]:
    """Give every way of going through one shuffled epoch of a workload."""
    n, batch = len(work.data), work.batch
    seeds = np.random.default_rng(5)
    loader = jl.Loader(work.data, batch, shuffle=True)
    alone = jl.Loader(work.data, batch, shuffle=True, threads=1, prefetch=0)

    def numpy_epoch() -> Iterator[Any]:
        order = seeds.permutation(n)
        for low in range(0, n, batch):
            yield work.fill(order[low : low + batch])

    size = work.moved * batch
    source = np.ones(size * max(1, min(-(-n // batch), (1 << 27) // size)), np.uint8).reshape(-1, size)
    buffer = np.empty(size, np.uint8)

    def memcpy() -> Iterator[None]:
        for k in range(-(-n // batch)):
            np.copyto(buffer, source[k % len(source)])
            yield

    found = {
        "jitloader": Way(lambda: loader, n),
        "jitloader 1 thread": Way(lambda: alone, n),
        "numpy": Way(numpy_epoch, n),
        "memcpy": Way(memcpy, -(-n // batch) * batch),
    }
    if work.other is not None:
        with contextlib.suppress(ImportError):  # shown in the table where it is installed
            found[work.other[0]] = work.other[1]()
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        return found

    class Rows:
        def __len__(self) -> int:
            return min(n, work.some)

        def __getitem__(self, i: int) -> Any:
            return work.item(i)

    plain: Any = DataLoader(Rows(), batch, shuffle=True, collate_fn=work.collate)  # type: ignore[arg-type]
    return {**found, "torch DataLoader": Way(lambda: plain, min(n, work.some))}


def check(work: Workload, name: str, way: Way) -> None:
    """Every row comes once, and holds what one row alone holds."""
    seen = []
    for number, batch in enumerate(way.run()):
        rows = np.asarray(batch[-1])
        seen.append(rows.copy())
        for k in range(0, len(rows), 17) if number < 3 else ():
            for out, plain in zip(batch, work.item(int(rows[k])), strict=False):
                whole = np.asarray(out)[k]
                part = whole[: len(plain)] if np.ndim(plain) else whole
                np.testing.assert_allclose(part, plain, rtol=1e-4, atol=1e-4, err_msg=name)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(way.rows)), name


_measured: dict[str, dict[str, Taken]] = {}


@pytest.fixture
def measured(small: bool, workload: str) -> dict[str, Taken]:
    """Give the interleaved rounds of a workload, run once for all its tests."""
    if workload not in _measured:
        quick = small or os.environ.get("JITLOADER_SMOKE") == "1"
        work = WORKLOADS[workload](quick)
        before = len(jl.compile_events)
        jl.Loader(work.data, work.batch, shuffle=True).warmup()
        made = [f"{e.seconds:.2f} s ({e.origin})" for e in jl.compile_events[before:]]
        every = ways(work)
        for name, way in every.items():
            if name in WAYS and name not in ("memcpy", "torch DataLoader"):
                check(work, name, way)
        _measured[workload] = interleaved(every, 1 if quick else ROUNDS)
        report(f"{work.title}; kernel made in {', '.join(made) or 'this process'}", _measured[workload])
    return _measured[workload]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_access(benchmark: Any, measured: dict[str, Taken], workload: str, way: str) -> None:
    """Every way makes right batches; the table shows the time of a thousand rows in each interleaved round."""
    if way not in measured:
        pytest.skip("torch is not installed")
    benchmark.group = f"{workload}: a thousand rows"
    CLOCK.show(benchmark, [seconds * 1000 for seconds in measured[way].rounds])
