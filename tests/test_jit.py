"""Compiled kernels: kept on disk, found by the next process, never stale, never broken, never somebody else's."""

import functools
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import jitloader as jl
from jitloader import jit

SCRIPT = """
import numpy as np, jitloader as jl, sys
{before}
def f(x):
    {body}
data = jl.Dataset(x=np.arange(4.0)).map("x", f)
print(data[:].x.tolist(), [e.origin for e in jl.compile_events if e.name == "fill"], "numba" in sys.modules)
"""


def run(cache, body="return x + A", before="A = 1.0", told="", **env):
    code = SCRIPT.format(before=before, body=body)
    full = {**os.environ, "JITLOADER_CACHE_DIR": str(cache), **env}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=full)
    assert done.returncode == 0 and told in done.stderr and bool(told) == bool(done.stderr), done.stderr
    return done.stdout.strip()


def test_the_second_process_finds_the_kernel_and_needs_no_numba(tmp_path):
    """A function of __main__ is compiled once; the next process links it from disk without importing Numba."""
    assert run(tmp_path) == "[1.0, 2.0, 3.0, 4.0] ['compiled'] True"
    assert run(tmp_path) == "[1.0, 2.0, 3.0, 4.0] ['disk'] False"


@pytest.mark.parametrize(
    "change, result",
    [
        ({"body": "return x + 2.0 * A"}, [2, 3, 4, 5]),
        ({"before": "A = 5.0"}, [5, 6, 7, 8]),
        ({"before": "def A_(): return 7.0\nA = 1.0", "body": "return x + A_()"}, [7, 8, 9, 10]),
    ],
    ids=["body", "global", "helper"],
)
def test_what_is_edited_is_compiled_again(tmp_path, change, result):
    """Another body, constant, global or helper is another kernel."""
    run(tmp_path)
    assert run(tmp_path, **change) == f"{[float(r) for r in result]} ['compiled'] True"
    assert run(tmp_path) == "[1.0, 2.0, 3.0, 4.0] ['disk'] False"


def test_an_edited_helper_of_the_same_name(tmp_path):
    """The function itself is the same to the byte; what it calls is not."""
    first = run(tmp_path, body="return h(x)", before="def h(x): return x + 1.0")
    second = run(tmp_path, body="return h(x)", before="def h(x): return x + 2.0")
    assert (first, second) == ("[1.0, 2.0, 3.0, 4.0] ['compiled'] True", "[2.0, 3.0, 4.0, 5.0] ['compiled'] True")


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "foreign"])
def test_a_damaged_file_is_compiled_again(tmp_path, damage):
    """A file that was cut, emptied or altered is no kernel; the right one takes its place."""
    run(tmp_path)
    for file in tmp_path.glob("*.kernel"):  # the fill's and the order's
        raw = file.read_bytes()
        flipped = raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:]
        file.write_bytes(
            {"cut": raw[: len(raw) // 2], "empty": b"", "flipped": flipped, "foreign": b"MZ" * 500}[damage]
        )

    assert run(tmp_path) == "[1.0, 2.0, 3.0, 4.0] ['compiled'] True"
    assert run(tmp_path) == "[1.0, 2.0, 3.0, 4.0] ['disk'] False"


def test_no_folder_to_be_had(tmp_path):
    """Without a home, and with a cache folder that cannot be made, a temporary one will do, and at last none at all."""
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "tmp").mkdir()
    lost = {"HOME": "/nonexistent", "XDG_CACHE_HOME": str(file / "x"), "TMPDIR": str(tmp_path / "tmp")}
    assert run(file / "below", told="kernels are kept in", **lost) == "[1.0, 2.0, 3.0, 4.0] ['compiled'] True"
    assert run(file / "below", told="kernels are kept in", **lost) == "[1.0, 2.0, 3.0, 4.0] ['disk'] False"

    none = f"import tempfile; tempfile.tempdir = {str(file)!r}; A = 1.0"
    assert run(file / "below", before=none, told="no kernels are kept", **lost) == "[1.0, 2.0, 3.0, 4.0] ['compiled'] True"


@pytest.mark.skipif(os.name == "nt", reason="the permission bits are POSIX")
def test_a_folder_that_others_can_write_is_not_used(tmp_path):
    """Machine code is loaded from the folder, so nobody else may put any there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    told = f"UserWarning: JITLOADER_CACHE_DIR: {shared} is no folder that you alone can write; kernels are kept in {tmp_path}"
    assert run(shared, told=told, XDG_CACHE_HOME=str(tmp_path / "own")) == "[1.0, 2.0, 3.0, 4.0] ['compiled'] True"
    assert not list(shared.iterdir()) and list((tmp_path / "own" / "jitloader").glob("*.kernel"))
    assert stat.S_IMODE((tmp_path / "own" / "jitloader").stat().st_mode) == 0o700


def test_many_processes_fill_one_folder(tmp_path):
    """Six at once, all cold: each gives the right rows, and one whole file a kernel is left: of the fill, of the order."""
    code = SCRIPT.format(before="A = 1.0", body="return x + A")
    env = {**os.environ, "JITLOADER_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) for _ in range(6)]
    assert {p.communicate(timeout=120)[0].decode().partition("]")[0] for p in started} == {"[1.0, 2.0, 3.0, 4.0"}
    assert len(list(tmp_path.glob("*.kernel"))) == 2 and not list(tmp_path.glob("*.part"))


def test_a_full_disk_costs_the_cache_alone(tmp_path):
    """Where the file cannot be written the kernel is used all the same, and no half is left."""
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); A = 1.0"
    before = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + before
    assert run(tmp_path, before=before) == "[1.0, 2.0, 3.0, 4.0] ['compiled'] True"
    assert not list(tmp_path.glob("*.kernel")) and not list(tmp_path.glob("*.part"))


def test_the_folder_stays_where_it_was_first(tmp_path):
    """A relative folder is that of the start, wherever the process goes later; one that was removed is made again."""
    work, before = tmp_path / "work", "import os, shutil; A = 1.0"
    work.mkdir()
    after = """
def made(): return sorted(name.rpartition(".")[2] for name in os.listdir(there))
there = os.path.abspath("kept")
first = made()
os.chdir("work")
data.map("x", lambda x: x * 2)[:]
print(len(first), len(made()) - len(first), os.listdir("."))
shutil.rmtree(there)
data.map("x", lambda x: x * 3)[:]
print(made(), jl.clear_cache(), made())
"""
    code = SCRIPT.format(before=before, body="return x + A") + after
    env = {**os.environ, "JITLOADER_CACHE_DIR": "kept"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.splitlines()[1:] == ["3 2 []", "['kernel', 'type'] 2 []"]


def test_what_is_cleared_is_ours_alone(tmp_path, monkeypatch):
    """Kernels, types and unpacked folders go; what only looks a little like them stays."""
    monkeypatch.setenv("JITLOADER_CACHE_DIR", str(tmp_path))
    ours = [f"{'a1' * 20}.kernel", f"{'b2' * 20}.type"]
    theirs = ["linux.kernel", "font.type", f"{'A1' * 20}.kernel", "notes.txt"]
    for name in ours + theirs:
        (tmp_path / name).write_text(name)
    for name in ("data.npz-0123456789abcdef", "holiday"):
        (tmp_path / "unpacked" / name).mkdir(parents=True)
        (tmp_path / "unpacked" / name / "x.npy").write_text("x")

    assert jl.clear_cache() == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*theirs, "unpacked"])
    assert [p.name for p in (tmp_path / "unpacked").iterdir()] == ["holiday"]


def adder(n):
    return lambda x: x + n


class Callable:
    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return x + self.n

    def method(self, x):
        return x + self.n


TABLE = np.arange(3)


def reads_table(x):
    return TABLE[x]


def sum_of(x, y):
    return x + y


@pytest.mark.parametrize(
    "one, other",
    [
        (adder(1), adder(2)),
        (functools.partial(sum_of, 1), functools.partial(sum_of, 2)),
        (Callable(1), Callable(2)),
        (Callable(1).method, Callable(2).method),
        (np.arange(3), np.arange(1, 4)),
        (np.zeros(3, "f4"), np.zeros(3, "f8")),
        ({"a": 1}, {"a": 2}),
        (1, 1.0),
        (np.sin, np.cos),
        (lambda x: x + 1, lambda x: x - 1),
    ],
)
def test_fingerprints_tell_apart_what_computes_differently(one, other):
    """Closures, partials, bound methods, objects, arrays and constants all count; the same thing gives the same."""
    assert jit.fingerprint(one) != jit.fingerprint(other)
    assert jit.fingerprint(one) == jit.fingerprint(one)


def test_a_fingerprint_follows_arrays_behind_globals(monkeypatch):
    """An array that a function reads is part of it."""
    before = jit.fingerprint(reads_table)
    monkeypatch.setitem(globals(), "TABLE", np.arange(3) + 1)
    assert jit.fingerprint(reads_table) != before


def test_a_docstring_or_a_comment_changes_nothing():
    """What is not computed with is not in the fingerprint."""
    made = []
    for text in ("def f(x):\n    return x + 1\n", 'def f(x):\n    "Adds one."\n    # a comment\n    return x + 1\n'):
        scope: dict = {}
        exec(textwrap.dedent(text), scope)
        made.append(jit.fingerprint(scope["f"]))
    assert made[0] == made[1]


def test_calls_from_many_kinds_of_argument():
    """Arrays of any rank, whole numbers of 64 bits and floats arrive as they are."""

    def kernel(a, b, n, x, out):
        out[0] = a[1, 2] + b[0, 1, 1] + x
        out[1] = n
        return a.shape[0] * 100 + b.shape[2]

    a, b, out = np.arange(12.0).reshape(3, 4), np.ones((2, 2, 5), np.int32), np.zeros(2)
    loaded = jit.load(kernel, [jit.typeof(v) for v in (a, b, 1 << 40, 0.25, out)])

    assert loaded(a, b, 1 << 40, 0.25, out) == 305
    assert out.tolist() == [6 + 1 + 0.25, float(1 << 40)]
    with pytest.raises(TypeError, match="argument 0 of kernel"):
        loaded(a.astype(np.float32), b, 0, 0.0, out)


@pytest.mark.parametrize(
    "text, allowed, cpus",
    [
        ("max 100000", 16, 16), ("200000 100000", 16, 2), ("150000 100000", 16, 2), ("50000 100000", 16, 1),
        ("6400000 100000", 16, 16), ("-1 100000", 4, 4), ("nonsense", 4, 4), ("100000 0", 4, 4), ("", 3, 3),
    ],
)  # fmt: skip
def test_quota(text, allowed, cpus):
    """A cgroup's line leaves that many CPUs, rounded up, never none, never more than allowed."""
    assert jit.quota(text, allowed) == cpus


# ---------------------------------------------------------------------------------------------------------------------
# Functions over what changes

FACTOR, TABLE, SETTINGS = 2, np.array([10.0]), types.ModuleType("settings")
SETTINGS.inner = types.ModuleType("settings.inner")
SETTINGS.inner.shift = 0.5


def scaled(x):
    return x * FACTOR


def shifted(x):
    return scaled(x) + TABLE[0] + SETTINGS.inner.shift


@pytest.mark.parametrize("jitted", [False, True])
def test_what_a_function_refers_to_is_taken_where_it_is_linked(monkeypatch, jitted):
    """A global of its own, of one it calls, an array's element or a number of a module that changes afterwards changes
    neither `data[i]` nor batches, compiled already or not; linked again both see it."""
    numba = pytest.importorskip("numba")
    if jitted:
        monkeypatch.setitem(globals(), "scaled", numba.njit(lambda x: x * FACTOR))
    base = jl.Dataset(x=np.arange(3.0))
    compiled, late = base.map("x", shifted), base.map("x", shifted)
    assert (compiled[1].x, compiled[[1]].x[0]) == (12.5, 12.5)

    monkeypatch.setitem(globals(), "FACTOR", 3)
    monkeypatch.setattr(SETTINGS.inner, "shift", 0.25)
    TABLE[0] = 20.0
    try:
        again = base.map("x", shifted)
        for data, wanted in (
            (compiled, 12.5),
            (late, 12.5),
            (again, 23.25),
            (pickle.loads(pickle.dumps(again)), 23.25),
        ):
            assert (data[1].x, data[[1]].x[0]) == (wanted, wanted)
    finally:
        TABLE[0] = 10.0


def test_a_closure_is_taken_where_it_is_linked():
    """As a global is; stages over samples and orders of a function likewise."""
    step = 1

    def add(src, dst, key):
        dst[0] = src[0] + step

    def turned(position, count, seed, epoch):
        return (position + step) % count

    data = jl.Dataset(x=np.arange(3.0)).map("x", add)
    order = jl.custom(turned)
    step = 2
    assert (data[0].x, data[:].x.tolist()) == (1.0, [1.0, 2.0, 3.0])
    assert next(iter(jl.Loader(data, 3, order=order))).x.tolist() == [2.0, 3.0, 1.0]
    assert next(iter(jl.Loader(data.map("x", add), 3, order=jl.custom(turned)))).x.tolist() == [5.0, 3.0, 4.0]


def test_functions_that_are_alike_are_one():
    """Linked again and again a function is typed and compiled once; its file and line stay its own."""
    data = jl.Dataset(x=np.arange(3.0))
    first, second = (data.map("x", shifted)._steps[0].bound[0].kernel for _ in range(2))

    assert first is second
    assert first is not shifted
    assert first.__code__ is shifted.__code__
    assert jit.captured(first) is first
