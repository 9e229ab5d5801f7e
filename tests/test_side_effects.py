"""The user's process stays as it was: thread counts, seeds, filters, environment, signal handlers, folder, files."""

import os
import subprocess
import sys

SCRIPT = """
import os, random, signal, sys, threading, warnings, locale
import numpy as np

def now():
    found = {
        "python": random.getstate(), "numpy": str(np.random.get_state()), "filters": list(warnings.filters),
        "environ": dict(os.environ), "cwd": os.getcwd(), "recursion": sys.getrecursionlimit(),
        "signals": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS)},
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook), "switch": sys.getswitchinterval(),
        "errstate": np.geterr(), "print": np.get_printoptions(), "umask": os.umask(0), "path": list(sys.path),
    }
    os.umask(found["umask"])
    for name in ("torch", "numba"):
        if name in sys.modules:
            module = sys.modules[name]
            found[name] = module.get_num_threads()
            if name == "numba":
                found["config"] = {k: v for k, v in vars(module.config).items() if k.isupper()}
    return found

random.seed(5); np.random.seed(6)
for name in sys.argv[1:]:
    __import__(name)
before = now()
import jitloader as jl
data = jl.Dataset(x=np.arange(4000.0).reshape(1000, 4), i=np.arange(1000))
data = data.map("x", jl.random_flip(axis=0), lambda v: v * 1.5, jl.gaussian_noise(0.1)).map("i", jl.cast("int32"))
loader = jl.Loader(data, 64, shuffle=True, seed=1)
for _ in range(2):
    for batch in loader:
        pass
jl.Loader(data, 500, prefetch=0, threads=2).warmup()
data.statistics("x"), data[5], data.trace(3), data.explain(), loader.check(8), loader.report(), repr(loader)
try:
    data.map("x", jl.one_hot(3))
except jl.PipelineError:
    pass
loader.close()
after = now()
for key, value in before.items():
    assert after[key] == value, (key, value, after[key])
assert threading.active_count() == 1, threading.enumerate()
"""


def run(tmp_path, *modules):
    cache, home = tmp_path / "cache", tmp_path / "home"
    work = tmp_path / "work"
    for folder in (cache, home, work):
        folder.mkdir(mode=0o700)
    env = {**os.environ, "JITLOADER_CACHE_DIR": str(cache), "HOME": str(home), "TMPDIR": str(home)}
    command = [sys.executable, "-B", "-c", SCRIPT, *modules]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stdout and not done.stderr
    # Nothing is written but kernels, in the cache folder alone.
    assert not list(work.iterdir()) and not [p for p in home.rglob("*") if p.is_file() and "numba" not in p.name]
    assert {p.suffix for p in cache.iterdir()} <= {".kernel", ".type"}


def test_the_process_stays_as_it_was(tmp_path):
    """With Numba and torch there before us, every one of their settings and of Python's is what it was."""
    import importlib.util

    run(tmp_path, "numba", *(["torch"] if importlib.util.find_spec("torch") else []))
