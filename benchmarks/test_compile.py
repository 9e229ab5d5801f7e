"""How long a fresh process takes: `import jitloader`, and from there to the first batch, kernel on disk or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from interleave import CLOCK, TABLES

IMPORT = """
import json, sys, time
import numpy
start = time.perf_counter()
import jitloader
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "cpu": 0.0, "origins": [], "numba": "numba" in sys.modules}))
"""
FIRST = """
import json, sys, time
start, work = time.perf_counter(), time.process_time()
import jitloader as jl
data = jl.Dataset(image="image.npy", label="label.npy")
data = data.map("image", jl.random_crop(32, padding=4), jl.random_flip(), jl.normalize([125.0] * 3, [60.0] * 3))
batch = next(iter(jl.Loader(data, 256, shuffle=True)))
seconds, cpu = time.perf_counter() - start, time.process_time() - work
assert batch.image.shape == (256, 32, 32, 3)
origins = [event.origin for event in jl.compile_events]
print(json.dumps({"seconds": seconds, "cpu": cpu, "origins": origins, "numba": "numba" in sys.modules}))
"""


class Process(NamedTuple):
    """A kind of process: its program, whether the cache is empty, and what is asked of it."""

    title: str
    program: str
    cold: bool
    target: str
    rounds: int


KINDS = {
    "import": Process("import jitloader, NumPy imported before", IMPORT, False, "at most 0.15 s", 9),
    "warm": Process("import to first batch of three stages, kernel on disk", FIRST, False, "at most 0.8 s", 7),
    "cold": Process("import to first batch of three stages, empty cache", FIRST, True, "at most 2.5 CPU s", 3),
}


def run(kind: Process, folder: Path, cache: Path) -> dict[str, Any]:
    """Run a process and give what it printed."""
    environment = {**os.environ, "JITLOADER_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", kind.program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.benchmark(timer=CLOCK, group="a fresh process")
@pytest.mark.parametrize("kind", KINDS)
def test_process(benchmark: Any, small: bool, tmp_path: Path, kind: str) -> None:
    """A cold process compiles one kernel; a warm one takes it from disk and never imports Numba."""
    process = KINDS[kind]
    np.save(tmp_path / "image.npy", np.zeros((300, 32, 32, 3), np.uint8))
    np.save(tmp_path / "label.npy", np.arange(300))
    if not process.cold:
        run(process, tmp_path, tmp_path / "cache")

    rounds = [
        run(process, tmp_path, tmp_path / (f"cache-{k}" if process.cold else "cache"))
        for k in range(1 if small else process.rounds)
    ]

    for found in rounds:
        assert found["numba"] == process.cold
        assert set(found["origins"]) <= {"compiled" if process.cold else "disk"}
    wall, cpu = (np.median([found[part] for found in rounds]) for part in ("seconds", "cpu"))
    times = f"{wall:6.3f} s" + (f", {cpu:6.3f} CPU s" if cpu else "")
    TABLES.append((process.title, [f"{times} (target: {process.target}; {len(rounds)} processes)"]))
    CLOCK.show(benchmark, [found["seconds"] for found in rounds])
