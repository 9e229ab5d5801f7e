"""A chain of stages beside the same work written by hand in one Numba kernel, in NumPy, and as a pass a stage.

Everything here runs in one thread over the same rows in the same order, so that only the kernels differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from interleave import CLOCK, Taken, Way, interleaved, report

import jitloader as jl

BATCH = 512
ROUNDS = 9
WAYS = ["jitloader", "one kernel by hand", "a kernel a stage", "numpy"]
Fill = Callable[[np.ndarray, np.ndarray], None]  # row numbers and the batch to fill
njit = numba.njit(nogil=True, error_model="numpy")


class Chain(NamedTuple):
    """Data with its chain of stages, and the same work by hand, as passes and in NumPy."""

    title: str
    data: jl.Dataset
    by_hand: Fill
    passes: Fill
    numpy: Fill


def built_in(small: bool) -> Chain:
    """center_crop(28), normalize and clip over float32 images (32, 32)."""
    n = 1_000 if small else 40_000
    x = np.random.default_rng(1).standard_normal((n, 32, 32), np.float32)
    crop, whole = np.empty((BATCH, 28, 28), np.float32), np.empty((BATCH, 28, 28), np.float32)
    mean, inverse, low, high = 0.1, 1 / 1.7, -1.0, 1.0

    @njit
    def hand(x: Any, rows: Any, out: Any, mean: float, inverse: float, low: float, high: float) -> None:
        for j in range(rows.size):
            source, target = x[rows[j]].reshape(1024), out[j].reshape(784)
            for y in range(28):
                s, t = source[(y + 2) * 32 + 2 : (y + 2) * 32 + 30], target[y * 28 : (y + 1) * 28]
                for k in range(28):
                    v = np.float64(np.float32((np.float64(s[k]) - mean) * inverse))
                    t[k] = np.float32(low if v < low else high if v > high else v)

    @njit
    def cut(x: Any, rows: Any, out: Any) -> None:
        for j in range(rows.size):
            source, target = x[rows[j]].reshape(1024), out[j].reshape(784)
            for y in range(28):
                s, t = source[(y + 2) * 32 + 2 : (y + 2) * 32 + 30], target[y * 28 : (y + 1) * 28]
                for k in range(28):
                    t[k] = s[k]

    @njit
    def shift(x: Any, out: Any, mean: float, inverse: float) -> None:
        s, t = x.reshape(x.size), out.reshape(out.size)
        for k in range(s.size):
            t[k] = np.float32((np.float64(s[k]) - mean) * inverse)

    @njit
    def limit(x: Any, out: Any, low: float, high: float) -> None:
        s, t = x.reshape(x.size), out.reshape(out.size)
        for k in range(s.size):
            v = np.float64(s[k])
            t[k] = np.float32(low if v < low else high if v > high else v)

    def passes(rows: np.ndarray, out: np.ndarray) -> None:
        cut(x, rows, crop[: len(rows)])
        shift(crop[: len(rows)], whole[: len(rows)], mean, inverse)
        limit(whole[: len(rows)], out, low, high)

    def plain(rows: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, x[rows, 2:30, 2:30])
        out -= np.float32(mean)
        out *= np.float32(inverse)
        np.clip(out, low, high, out=out)

    data = jl.Dataset(x=x).map("x", jl.center_crop(28), jl.normalize(mean, 1.7), jl.clip(low, high))
    return Chain(
        f"center_crop + normalize + clip of float32 32x32 ({n:,} rows, batch {BATCH}, one thread)",
        data,
        lambda rows, out: hand(x, rows, out, mean, inverse, low, high),
        passes,
        plain,
    )


def double(v: float) -> float:
    """The first of five functions of a user."""
    return v * 2.0


def lift(v: float) -> float:
    """The second."""
    return v + 0.25


def square(v: float) -> float:
    """The third."""
    return v * v


def squash(v: float) -> float:
    """The fourth."""
    return v / (1.0 + abs(v))


def sink(v: float) -> float:
    """The fifth."""
    return v - 0.5


def elementwise(small: bool) -> Chain:
    """Five functions of a user over rows of 64 float32, each stored as float32 for the next."""
    n = 2_000 if small else 400_000
    x = np.random.default_rng(2).standard_normal((n, 64), np.float32)
    functions = double, lift, square, squash, sink
    f1, f2, f3, f4, f5 = (numba.njit(f) for f in functions)

    @njit
    def hand(x: Any, rows: Any, out: Any) -> None:
        for j in range(rows.size):
            s, t = x[rows[j]], out[j]
            for k in range(s.size):
                v = np.float64(np.float32(f1(np.float64(s[k]))))
                v = np.float64(np.float32(f2(v)))
                v = np.float64(np.float32(f3(v)))
                v = np.float64(np.float32(f4(v)))
                t[k] = np.float32(f5(v))

    def one(f: Any) -> Any:
        @njit
        def run(x: Any, out: Any) -> None:
            s, t = x.reshape(x.size), out.reshape(out.size)
            for k in range(s.size):
                t[k] = np.float32(f(np.float64(s[k])))

        return run

    kernels = [one(f) for f in (f1, f2, f3, f4, f5)]

    def passes(rows: np.ndarray, out: np.ndarray) -> None:
        np.take(x, rows, axis=0, out=out, mode="clip")
        for kernel in kernels:
            kernel(out, out)

    work = np.empty((BATCH, 64), np.float32)

    def plain(rows: np.ndarray, out: np.ndarray) -> None:
        np.take(x, rows, axis=0, out=out, mode="clip")
        out *= np.float32(2)
        out += np.float32(0.25)
        out *= out
        np.abs(out, out=work[: len(rows)])
        work[: len(rows)] += np.float32(1)
        out /= work[: len(rows)]
        out -= np.float32(0.5)

    return Chain(
        f"five elementwise functions over 64 float32 ({n:,} rows, batch {BATCH}, one thread)",
        jl.Dataset(x=x).map("x", *functions),
        lambda rows, out: hand(x, rows, out),
        passes,
        plain,
    )


CHAINS = {"built-in": built_in, "elementwise": elementwise}
_measured: dict[str, dict[str, Taken]] = {}


@pytest.fixture
def measured(small: bool, chain: str) -> dict[str, Taken]:
    """Check that all ways give the same batches, and time them in turn, once for all tests of a chain."""
    if chain in _measured:
        return _measured[chain]
    work = CHAINS[chain](small)
    n = len(work.data)
    order = np.random.default_rng(3).permutation(n)
    out = np.empty((BATCH, *work.data.spec["x"].shape), np.float32)

    def epoch(fill: Fill) -> Callable[[], Iterator[np.ndarray]]:
        def run() -> Iterator[np.ndarray]:
            for low in range(0, n, BATCH):
                rows = order[low : low + BATCH]
                fill(rows, out[: len(rows)])
                yield out[: len(rows)]

        return run

    loader = jl.Loader(work.data, BATCH, order=order, threads=1, prefetch=0)
    ways = {
        "jitloader": Way(lambda: (batch.x for batch in loader), n),
        "one kernel by hand": Way(epoch(work.by_hand), n),
        "a kernel a stage": Way(epoch(work.passes), n),
        "numpy": Way(epoch(work.numpy), n),
    }
    want = np.concatenate([batch.copy() for batch in ways["one kernel by hand"].run()])
    for name, way in ways.items():
        got = np.concatenate([batch.copy() for batch in way.run()])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)
    _measured[chain] = interleaved(ways, 1 if small else ROUNDS)
    report(work.title, _measured[chain], "one kernel by hand")
    return _measured[chain]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chain", CHAINS)
def test_chain(benchmark: Any, measured: dict[str, Taken], chain: str, way: str) -> None:
    """All ways give the same batches; the table shows the time of a thousand rows in each interleaved round."""
    benchmark.group = f"{chain} chain: a thousand rows"

    CLOCK.show(benchmark, [seconds * 1000 for seconds in measured[way].rounds])
