"""Who fills a batch: one background thread, several at once, a `prange` loop inside the batch, or the consumer itself.

Each way runs the same program over the same 200,000 rows of 64 float32, beside a consumer that does nothing, one that
works in NumPy about as long as a fill takes, and one whose BLAS keeps all cores busy meanwhile.

Measured on 2 shared cores (Zen 4 VM, Numba 0.68.1, omp layer, 2026-12-03; noise about 20 %), median ms an epoch, batch
8192 (batch 256 in brackets, where no batch is large enough for `prange`):

| consumer | serial, when asked | `prange`, when asked | one thread ahead | two threads ahead | left to the loader |
|---|---|---|---|---|---|
| idle | 9.0 (13.8) | 8.6 (10.8) | 8.4 (10.0) | 7.7 (10.5) | 6.5 (8.6) |
| NumPy work | 15.5 (17.6) | 12.2 (17.1) | 9.4 (14.6) | 10.7 (15.3) | 7.6 (12.2) |
| BLAS on all cores | 13.3 (84) | **224** (100) | 17.4 (97) | 14.9 (101) | 14.1 (89) |

So: threads ahead by default, one fewer than there are CPUs, filling runs of batches without the GIL; a consumer that would
have to wait fills along, and since all take rows of one run at a time (`jitloader/sharing.py`), which the table was measured
before, the wait is that of the last rows; and where a thread is kept waiting for a core more than a
quarter of its time, the consumer fills for itself for a while, as each hand-over then only costs. With one process
spinning beside, an epoch takes 1.01 to 1.09 of serial loading, with two 0.86 to 1.08 (five workloads of `peers.py` before
that rule: 1.05 to 1.23, and 0.77 to 1.4). `prange` stalls where the consumer's own threads hold the cores (a launch waits for a scheduler's turn), so it is
used only where it is asked for (prefetch=0 and threads above 1).
"""

import subprocess
import sys
import time

import numpy as np
import pytest

import jitloader as jl

WAYS = {
    "serial, when asked": {"prefetch": 0, "threads": 1},
    "prange, when asked": {"prefetch": 0, "threads": 2},
    "one thread ahead": {"prefetch": 2, "threads": 1},
    "two threads ahead": {"prefetch": 2, "threads": 2},
    "left to the loader": {},
}


def idle(batch):
    """A consumer that takes batches and does nothing."""


def numpy_work(batch):
    """A consumer that works on one core about as long as a fill takes."""
    batch.x.sum()
    np.multiply(batch.x, 2.0, out=batch.x)


SQUARE = np.ones((192, 192), np.float32)


def matrix_work(batch):
    """A consumer whose BLAS keeps all cores busy, as a training step does."""
    SQUARE @ SQUARE


@pytest.mark.parametrize("batch_size", [256, 8192])
@pytest.mark.parametrize("consumer", [idle, numpy_work, matrix_work], ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_threads(benchmark, small, way, consumer, batch_size):
    """One epoch of standardised rows of 64 float32, consumed."""
    benchmark.group = f"{consumer.__name__}, batch {batch_size}"
    rows = 20_000 if small else 200_000
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    data = jl.Dataset(x=x, i=np.arange(rows)).map("x", jl.normalize(1.0, 2.0))
    loader = jl.Loader(data, batch_size, shuffle=True, **WAYS[way])
    seen = np.zeros(rows, np.int64)
    for batch in loader:  # compiles, and proves that each row comes once and right
        seen[batch.i] += 1
        assert (batch.x[0] == ((x[batch.i[0]].astype(np.float64) - 1.0) * 0.5).astype(np.float32)).all()
    assert (seen == 1).all()

    def epoch():
        for batch in loader:
            consumer(batch)

    benchmark.pedantic(epoch, rounds=1 if small else 7, warmup_rounds=1)


def test_overlap(small):
    """With a consumer of the fill's own cost, an epoch takes about the longer of the two (printed, for judging)."""
    x = np.random.default_rng(0).normal(size=(20_000 if small else 200_000, 64)).astype(np.float32)
    data = jl.Dataset(x=x).map("x", jl.normalize(1.0, 2.0))
    loader = jl.Loader(data, 8192, shuffle=True)

    def timed(work):
        best = 1e9
        for _ in range(1 if small else 5):
            start = time.perf_counter()
            count = sum(1 for batch in loader if work(batch) is None)
            best = min(best, time.perf_counter() - start)
            assert count == len(loader)
        return best

    batch = next(iter(loader))
    fill = timed(idle)
    start = time.perf_counter()
    for _ in range(len(loader)):
        numpy_work(batch)
    alone = time.perf_counter() - start
    print(f"\nfill {fill * 1e3:.1f} ms, consumer {alone * 1e3:.1f} ms, together {timed(numpy_work) * 1e3:.1f} ms")


@pytest.mark.parametrize("others", [0, 1, 2])
def test_beside_other_work(small, others):
    """What the loader does by itself takes about as long as serial loading where other processes hold cores (printed)."""
    rows = 20_000 if small else 1_000_000
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    data = jl.Dataset(x=x).map("x", jl.normalize(1.0, 2.0))
    loaders = [jl.Loader(data, 1024, shuffle=True, **options) for options in ({}, {"prefetch": 0})]
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    times = []
    try:
        for _ in range(2 if small else 15):
            times.append([])
            for loader in loaders:
                start = time.perf_counter()
                assert sum(len(batch.x) for batch in loader) == rows
                times[-1].append(time.perf_counter() - start)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    own, serial = np.median(times[1:], axis=0)
    ratio = np.median([a / b for a, b in times[1:]])
    print(f"\n{others} others: {own * 1e3:.1f} ms, serial {serial * 1e3:.1f} ms, ratio {ratio:.2f} (median of pairs)")
