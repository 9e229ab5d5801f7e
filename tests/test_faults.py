"""Faults injected: whatever goes wrong, wherever, is told by its row, and the loader is usable afterwards."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import jitloader as jl
from jitloader import loader as loader_module
from jitloader.jit import store


def told(make):
    """The text of the PipelineError that all batches of a loader, and that its rows one by one, end in."""
    with pytest.raises(jl.PipelineError) as caught:
        list(make())
    text = str(caught.value)
    assert len(text.splitlines()) <= 5 and os.path.dirname(jl.__file__) not in text
    return text


# -- Python functions over what is no plain array ---------------------------------------------------------------------

RAGGED = jl.Dataset(t=jl.ragged(np.arange(6), [0, 2, 2, 6]), y=np.arange(3))


def test_functions_of_a_row_get_ragged_rows():
    """A ragged row comes as the array it is, in a batch, alone, and with the rows in another order."""
    data = RAGGED.apply_rows(lambda row, rng: {"n": row["t"].sum() + 10 * len(row["t"])})
    assert [n for batch in jl.Loader(data, 2) for n in batch.n.tolist()] == [21, 0, 54]
    assert [int(data[k].n) for k in range(3)] == [21, 0, 54] and data[[2, 0]].n.tolist() == [54, 21]
    assert data[2].t.tolist() == [2, 3, 4, 5] and data[1].t.tolist() == []


def test_functions_of_a_batch_get_the_same_alone():
    """A function that takes a Ragged batch takes one row of it; what it gives is the sample, numbers stand for themselves."""
    data = RAGGED.apply(lambda batch: {"total": batch.t.values.sum(), "mean": 3.0})
    assert (data[2].total, data[2].mean, data[2].t.tolist()) == (14, 3.0, [2, 3, 4, 5])
    assert RAGGED.apply(lambda batch: batch.t)[2].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "first, then, text",
    [
        (lambda b: b.y, lambda row, rng: {}, "takes rows of a batch with named fields; ndarray comes"),
        (lambda b: None, lambda row, rng: {}, "takes rows of a batch with named fields; NoneType comes"),
        (lambda b: {"y": [1]}, lambda row, rng: {}, "row 1, epoch 0: IndexError: list index out of range"),
        (
            None,
            lambda row, rng: {"z": [[1], [1, 2]]},
            "field 'z' is no array: setting an array element with a sequence",
        ),
        (None, lambda row, rng: {1: 2}, "gives a field named 1: give a text"),
    ],
)
def test_functions_that_do_not_fit_together(first, then, text):
    """What one Python function gives and the next cannot take is told by the next one's name and line."""
    data = jl.Dataset(y=np.arange(2))
    data = (data if first is None else data.apply(first)).apply_rows(then)
    found = told(lambda: jl.Loader(data, 2))
    assert text in found and "<lambda>" in found and __file__ in found


# -- the value that is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [
    jl.random_apply(jl.lookup(np.arange(256)), 1.0),
    jl.random_choice(jl.lookup(np.arange(256)), jl.lookup(np.arange(9))),
    jl.random_apply(jl.random_choice(jl.lookup(np.arange(256)), jl.lookup(np.arange(200))), 1.0),
], ids=str)  # fmt: skip
def test_a_drawn_stage_names_the_value_it_refused(stage):
    """A stage that was drawn refuses a value by its number, in whichever field of those mapped together it stands."""
    data = jl.Dataset(a=np.array([3, 3]), b=np.array([3, 300])).map(("a", "b"), stage)
    assert "field 'a', 'b', row 1, epoch 0: value 300 does not fit\n" in told(lambda: jl.Loader(data, 2))


WIDE = """
import numpy as np, jitloader as jl
x = np.zeros((600, 1000)); x[400] = 999
for threads in (1, 2):
    try:
        list(jl.Loader(jl.Dataset(x=x).map("x", jl.cast("uint8"), jl.cast("float64")), 300, prefetch=0, threads=threads))
    except jl.PipelineError as error:
        print(str(error).splitlines()[0])
"""


def test_without_a_compiler_the_row_is_named_too():
    """With NUMBA_DISABLE_JIT a value that does not fit is told by its row, with several threads asked for or one."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    text = "stage 0 'cast(uint8)' on field 'x', row 400, epoch 0: value 999.0 does not fit uint8"
    assert done.stdout.splitlines() == [text, text]


# -- every kind of stage, at every place of a chain, on every place of an epoch ---------------------------------------

BAD = 700  # a row that holds it fails


@jl.elementwise
def value(x):
    if x > 600:
        raise ValueError("bad value")
    return x + 1


@jl.stage
def sample(src, dst, key):
    for i in range(src.size):
        if src[i] > 600:
            raise ValueError("bad value")
        dst[i] = src[i] + 1


@jl.stage(inputs=2)
def joint(src, other, dst, key):
    for i in range(src.size):
        if src[i] > 600 and other[i] == 0:
            raise ValueError("bad value")
        dst[i] = src[i] + 1


@jl.stage
def outside(src, dst, key):
    for i in range(src.size):
        dst[i] = src[min(src[i], 500) * (i - 1) if src[i] > 600 else i] + 1


@jl.batch_stage
def batch(j, xs, x, key):
    for i in range(x.size):
        if xs[j, i] > 600:
            raise ValueError("bad value")
        x[i] = xs[j, i] + 1


@jl.elementwise
def plus(x):
    return x + 1


@jl.batch_stage
def plus_batch(j, xs, x, key):
    for i in range(x.size):
        x[i] = xs[j, i] + 1


def applied(b):
    if (b.x > 600).any():
        raise ValueError("bad value")
    return {"x": b.x + 1}


def applied_row(row, rng):
    if (row["x"] > 600).any():
        raise ValueError("bad value")
    return {"x": row["x"] + 1}


BUILT_IN = jl.lookup(np.arange(1, 602))
KINDS = {  # how it is linked, and what its error says
    "value": (lambda data: data.map("x", value), "'value' on field 'x', row {row}, epoch {epoch}: ValueError: bad value"),
    "index, value": (lambda data: data.map("x", jl.random_flip(axis=0), value), "'value' on field 'x', row {row}, epoch {epoch}: ValueError"),
    "sample": (lambda data: data.map("x", sample), "'sample' on field 'x', row {row}, epoch {epoch}: ValueError: bad value"),
    "joint": (lambda data: data.map(("x", "zero"), joint), "'joint' on field 'x', 'zero', row {row}, epoch {epoch}: ValueError: bad value"),
    "out of bounds": (lambda data: data.map("x", outside), "'outside' on field 'x', row {row}, epoch {epoch}: IndexError"),
    "built-in": (lambda data: data.map("x", BUILT_IN), "'lookup(601)' on field 'x', row {row}, epoch {epoch}: value 70"),
    "drawn": (lambda data: data.map("x", jl.random_choice(BUILT_IN, BUILT_IN)), "row {row}, epoch {epoch}: value 70"),
    "batch": (lambda data: data.map("x", batch), "'batch' on field 'x', row {row}, epoch {epoch}: ValueError: bad value"),
    "apply": (lambda data: data.apply(applied), "stage 'applied', rows {first}, "),
    "apply_rows": (lambda data: data.apply_rows(applied_row), "stage 'applied_row', row {row}, epoch {epoch}: ValueError: bad value"),
}  # fmt: skip
PLAIN = {  # a step that adds one and never fails, beside a kind of step that only such can follow
    "batch": lambda data: data.map("x", plus_batch),
    "apply": lambda data: data.apply(lambda b: {"x": b.x + 1}),
    "apply_rows": lambda data: data.apply_rows(lambda row, rng: {"x": row["x"] + 1}),
}
ROWS, SIZE = 23, 5


def chained(kind, place):
    """Three steps that add one, of which the one at `place` is of this kind; and the array under them."""
    x = np.arange(2 * ROWS).reshape(ROWS, 2)
    data = jl.Dataset(x=x, zero=np.zeros((ROWS, 2), np.int64), i=np.arange(ROWS))
    plain = PLAIN.get(kind, lambda data: data.map("x", plus))
    for k in range(3):
        data = KINDS[kind][0](data) if k == place else plain(data)
    return data, x


def fail_everywhere(kind, place, shuffle=None):
    """Run epochs in which one row fails: what is before it comes, it is named, and once it is mended all goes on."""
    data, x = chained(kind, place)
    for row, epoch, how in [
        (0, 0, {}),
        (11, 2, {"shuffle": True}),
        (ROWS - 1, 1, {"prefetch": 0}),
        (7, 0, {"threads": 2, "shuffle": True}),
    ]:
        how = {**how, "shuffle": shuffle or how.get("shuffle", False)}
        loader = jl.Loader(data, SIZE, seed=3, **how)
        loader.epoch = epoch
        kept = x[row].copy()
        x[row] = BAD
        got = []
        with pytest.raises(jl.PipelineError) as caught:
            for b in loader:
                got.append(b.i.tolist())
        text = str(caught.value)
        loader.epoch = epoch
        x[row] = kept
        whole = list(loader)
        order = [b.i.tolist() for b in whole]
        at = next(k for k, rows in enumerate(order) if row in rows)
        first = ", ".join(map(str, order[at][:3]))
        assert KINDS[kind][1].format(row=row, epoch=epoch, first=first) in text, text
        assert __file__ in text and os.path.dirname(jl.__file__) not in text and len(text.splitlines()) <= 5
        assert got == order[:at]
        assert sorted(sum(order, [])) == list(range(ROWS))
        for b in whole:
            assert np.array_equal(np.sort(b.x), np.sort(x[b.i] + 3))
        assert loader.state_dict()["epoch"] == epoch + 1


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_fails_in_plain_python(kind, place, monkeypatch):
    """A failure of each kind of stage, first, in the middle and last in its chain."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    fail_everywhere(kind, place)


NIGHTLY = {"drawn", "value", "joint"}  # compiled: the others have the same paths


@pytest.mark.parametrize(
    "kind, place",
    [
        pytest.param(k, p, marks=[] if p == 1 and k not in NIGHTLY else [pytest.mark.nightly])
        for k in KINDS
        for p in range(3)
    ],
)
def test_a_row_that_fails_compiled(kind, place):
    """The same, compiled, one order alone."""
    fail_everywhere(kind, place, shuffle=True)


# -- no memory, no reading, killed ------------------------------------------------------------------------------------


def script(code, *arguments):
    """Run a script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


LIMITED = """
import resource
import numpy as np, jitloader as jl

def limit(extra):
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) for line in file if line.startswith("VmSize")) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + extra if extra else -1, -1))

def epoch(loader):
    try:
        return sum(int(batch.i.sum()) for batch in loader)
    except MemoryError as error:
        return str(error)

data = jl.Dataset(x=np.broadcast_to(np.float32(3), (2048, 1 << 16)), i=np.arange(2048))  # 256 KB a row, nowhere in memory
large, middle, small = (jl.Loader(data, size, threads=1) for size in (1024, 512, 16))
small.warmup(), middle.warmup(), large.warmup()
limit(220 << 20)
print(epoch(large))
print(epoch(small))
print(epoch(middle))  # of which one buffer can be had
print(epoch(small))
try:
    large[0]
except MemoryError as error:
    print("alone:", isinstance(error, MemoryError))
limit(0)
print(epoch(large), epoch(middle))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self")
def test_a_limit_on_memory():
    """A batch there is no memory for is an error with its bytes and rows; smaller batches go on; with memory, all do."""
    found = script(LIMITED)
    total = sum(range(2048))
    assert found[0] == "no memory for a batch buffer of 268,435,456 bytes (1,024 rows): use a smaller batch_size"
    assert found[1] == found[3] == str(total)
    assert found[2] == "no memory for a batch buffer of 134,217,728 bytes (512 rows): use a smaller batch_size"
    assert found[4:] == ["alone: True", f"{total} {total}"]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from jitloader.jit import store

folder, count = Path(sys.argv[1]), int(sys.argv[2])
file, generator, seen = folder / "one.kernel", random.Random(7), set()
payloads = [bytes([v]) * 300_000 for v in range(4)]
for run in range(count):
    child = os.fork()
    if not child:
        while True:
            for v, payload in enumerate(payloads):
                store.write(file, {"v": v}, payload)
    time.sleep(generator.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = store.read(file)
    if found is None:
        assert not file.exists()  # killed before the first was there
    else:
        assert found[1] == payloads[found[0]["v"]]
        seen.add(found[0]["v"])
print(len(seen), len(list(folder.glob("*.part"))))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks writers")
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.nightly)])
def test_killed_writers_of_kernels(tmp_path, count):
    """kill -9 at random moments leaves a whole kernel or none; what was half written goes once it is an hour old."""
    (found,) = script(KILLED, tmp_path, count)
    seen, parts = map(int, found.split())
    assert seen > 1 and parts > 0
    newest = tmp_path / "new.part"
    newest.write_bytes(b"")
    for part in set(tmp_path.glob("*.part")) - {newest}:
        os.utime(part, (time.time() - 4000,) * 2)
    store.write(tmp_path / "other.kernel", {}, b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.part", "one.kernel", "other.kernel"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    """Ctrl-C while a kernel is written is Ctrl-C, and no half file stays."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write(tmp_path / "one.kernel", {}, b"abc")
    assert not list(tmp_path.iterdir())


UNREADABLE = """
import os, sys
import numpy as np, jitloader as jl
if os.geteuid() == 0:
    os.seteuid(65534)  # root reads everything
try:
    jl.Dataset(x=sys.argv[1])
except PermissionError as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="the permission bits are POSIX")
def test_a_file_that_may_not_be_read(tmp_path):
    """A file without permission is the system's error, with its path, on the line that names it."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(10))
    path.chmod(0)
    assert script(UNREADABLE, path) == [f"[Errno 13] field 'x': Permission denied: {str(path)!r}"]


def test_a_file_that_becomes_unreadable_is_still_mapped(tmp_path):
    """Permissions that are taken away, or a name that is, change nothing for a map that is open."""
    np.save(tmp_path / "x.npy", np.arange(100))
    loader = jl.Loader(jl.Dataset(x=tmp_path / "x.npy"), 10)
    batches = iter(loader)
    next(batches)
    (tmp_path / "x.npy").chmod(0)
    assert sum(int(b.x.sum()) for b in batches) == sum(range(10, 100))
    assert sum(int(b.x.sum()) for b in loader) == sum(range(100))


# -- background threads that end --------------------------------------------------------------------------------------


def end(thread, kind):
    """Let a kind of exception come up in a thread, wherever it is."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind)) == 1


@pytest.mark.parametrize("apply", [False, True])
def test_a_thread_that_is_ended_from_outside(apply):
    """Where the background thread of an epoch is gone the consumer fills by itself, Python functions too; none is lost."""
    data = jl.Dataset(i=np.arange(400))
    data = data.apply(lambda batch: {"i": batch.i + 1}) if apply else data
    loader = jl.Loader(data, 10, threads=1, prefetch=2)
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "UNIT", 80)  # a batch a unit
        patch.setattr(threading, "excepthook", lambda args: None)
        batches = iter(loader)
        rows = next(batches).i.tolist()
        (thread,) = set(threading.enumerate()) - before
        time.sleep(0.1)  # until it waits for work
        end(thread, SystemExit)
        rows += [i for batch in batches for i in batch.i.tolist()]
        thread.join(10)
    assert rows == list(range(apply, 400 + apply)) and not thread.is_alive()
    assert [i for batch in loader for i in batch.i.tolist()] == rows
    assert not any(slot.busy for slot in loader._pool._slots)


def test_a_thread_that_is_ended_at_work():
    """What comes up in a Python function on the background thread comes to the consumer; the next epoch is whole."""
    began, sent = threading.Event(), threading.Event()

    def wait(batch):
        began.set()
        while not sent.is_set():
            time.sleep(0.01)
        return {}

    loader = jl.Loader(jl.Dataset(i=np.arange(400)).apply(wait), 10, threads=1)
    before = set(threading.enumerate())

    def ended():
        assert began.wait(60)
        (thread,) = [t for t in set(threading.enumerate()) - before if t.name == "jitloader"]
        end(thread, InterruptedError)
        time.sleep(0.1)
        sent.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "UNIT", 80)
        ending = threading.Thread(target=ended)
        ending.start()
        with pytest.raises(jl.PipelineError, match="stage 'wait', rows 0, 1, 2, ..., epoch 0: InterruptedError"):
            list(loader)
        ending.join()
        assert [i for batch in loader for i in batch.i.tolist()] == list(range(400))
