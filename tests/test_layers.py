"""Each of Numba's threading layers under loaders in threads, loaders in loaders, and forks before and after an epoch."""

import contextlib
import importlib.metadata
import os
import subprocess
import sys

import pytest

# The sizes are such that `prefetch=0, threads=2` fills by a parallel loop; one kernel serves all, with its parallel form.
CODE = """
import os, sys, threading, time, warnings
import numpy as np, jitloader as jl

warnings.simplefilter("ignore")  # of forks in processes that have threads
N = 512
X = np.arange(N * 1024, dtype="f4").reshape(N, 1024)
data = jl.Dataset(x=X, i=np.arange(N)).map("x", jl.normalize(1.0, 2.0))

def loader(wide=True, seed=0):
    return jl.Loader(data, 256, shuffle=True, seed=seed, prefetch=0 if wide else 2, threads=2)

def whole(batches):
    rows = []
    for batch in batches:
        assert np.array_equal(batch.x, ((X[batch.i].astype("f8") - 1) / 2).astype("f4"))
        rows += batch.i.tolist()
    return sorted(rows) == list(range(N))

def forked(run):
    child = os.fork()
    if not child:
        os._exit(0 if run() else 3)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

early = forked(lambda: whole(loader()) and whole(loader(False)))  # before anything was launched here
assert whole(loader()) and ended(early)
assert any(event.name == "fill_wide" for event in jl.compile_events) or os.cpu_count() == 1

found = []
threads = [threading.Thread(target=lambda k=k: found.extend(whole(loader(k < 2, k)) for _ in range(3))) for k in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
assert found == [True] * 12

for wide in (True, False):
    outer, inner = loader(wide), loader(not wide, 5)
    rows = []
    for batch in outer:
        rows += batch.i.tolist()
        assert whole(inner)
    assert sorted(rows) == list(range(N))

batches = iter(loader())
rest = next(batches).i.tolist()
late = forked(lambda: len([i for b in batches for i in b.i]) == N - 256 and whole(loader()) and whole(loader(False)))
assert ended(late) and whole(loader())
assert sorted(rest + [i for b in batches for i in b.i.tolist()]) == list(range(N))
import numba
assert numba.threading_layer() == sys.argv[1] or os.cpu_count() == 1
print("all")
"""


def environment(layer):
    """What a child's loader needs to find a layer: pip puts libtbb beside Python's own folder, off the loader's path."""
    env = {**os.environ, "NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    if layer == "tbb":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = [f.locate() for f in importlib.metadata.files("tbb") or () if f.name.startswith("libtbb.so")]
            paths = dict.fromkeys(str(file.resolve().parent) for file in found)
            env["LD_LIBRARY_PATH"] = ":".join([*paths, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    return env


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("layer", ["omp", "workqueue", "tbb"])
def test_layer(layer):
    """Every row once and every bit right: loaders in threads, nested, and in children made before and after."""
    env = environment(layer)
    probe = [sys.executable, "-c", "from numba.np.ufunc import tbbpool"]
    if layer == "tbb" and subprocess.run(probe, capture_output=True, env=env).returncode:
        pytest.skip("tbb is not installed")
    done = subprocess.run([sys.executable, "-c", CODE, layer], capture_output=True, text=True, timeout=300, env=env)
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr[-2000:]
