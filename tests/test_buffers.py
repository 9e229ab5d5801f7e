"""No batch that anybody holds is written again: random holders of every kind, over buffers full of garbage once free."""

import collections
import ctypes
import functools
import gc
import importlib.util
import queue
import sys
import threading

import numpy as np
import pytest

import jitloader as jl
from jitloader import buffers

ROWS = 3_000
X = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("f4")
OFFSETS = np.concatenate([[0], np.cumsum(np.random.default_rng(1).integers(0, 6, ROWS))])
VALUES = np.arange(OFFSETS[-1], dtype="f4")
FIXED = jl.Dataset(x=X, i=np.arange(ROWS))
VARIED = jl.Dataset(i=np.arange(ROWS), x=jl.ragged(VALUES, OFFSETS), p=jl.ragged(VALUES, OFFSETS)).map(
    "p", jl.pad_to_longest()
)
DATA = {
    "fixed": FIXED,
    "varied": VARIED,
    "applied": FIXED.apply(lambda batch: {"x": batch.x[:, ::-1][:, ::-1], "i": batch.i[: len(batch.i)]}),
}


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every pool fills with garbage what is free."""
    monkeypatch.setenv("JITLOADER_CHECK_BUFFERS", "1")


# -- holders: what keeps an array alive, as a function that gives the array back --------------------------------------


def in_cycle(a):
    cycle = [a]
    cycle.append(cycle)
    return lambda: cycle[0]


def in_frame(a):
    def frame(array):
        while True:
            yield array

    running = frame(a)
    next(running)
    return lambda: next(running)


def in_traceback(a):
    def fail(array):
        raise KeyError("kept")

    try:
        fail(a)
    except KeyError as error:
        trace = error.__traceback__.tb_next
    return lambda: trace.tb_frame.f_locals["array"]


def in_capsule(a):
    class Once:
        """What is behind a capsule, which can be opened once."""

        held, array = a.__dlpack__(), None

        def __dlpack__(self, **_):
            return self.held

        def __dlpack_device__(self):
            return 1, 0

    once = Once()

    def look():
        if once.array is None:
            once.array = np.from_dlpack(once)
        return once.array

    return look


def in_tensor(a):
    import torch

    tensor = torch.from_numpy(a)
    return lambda: tensor.numpy()


def in_slice_of_tensor(a):
    import torch

    halves = torch.from_dlpack(a).split(2)
    return lambda: torch.cat(halves).numpy()


def keeping(make, back):
    """A holder of what `make` makes of an array, which `back(made, shape)` gives back."""
    return lambda a: functools.partial(back, make(a), a.shape)


def floats(view, shape):
    return np.frombuffer(view, "f4").reshape(shape)


HOLDERS = {
    "itself": keeping(lambda a: a, lambda a, _: a),
    "slices": keeping(lambda a: [a[:2], a[2:]], lambda parts, _: np.concatenate(parts)),
    "elements": keeping(list, lambda parts, _: np.stack(parts)),
    "turned": keeping(lambda a: a.T[::-1], lambda view, _: view[::-1].T),
    "bytes": keeping(lambda a: a.view("u1"), lambda view, _: view.view("f4")),
    "memoryview": keeping(memoryview, lambda view, _: np.asarray(view)),
    "memoryview of its bytes": keeping(lambda a: memoryview(a).cast("B"), floats),
    "frombuffer": keeping(lambda a: np.frombuffer(a.reshape(-1), "f4"), floats),
    "flatiter": keeping(lambda a: a.flat, lambda flat, _: flat.base),
    "method": keeping(lambda a: a.sum, lambda method, _: method.__self__),
    "masked array": keeping(lambda a: np.ma.masked_array(a, copy=False), lambda held, _: held.data),
    "ctypes": keeping(lambda a: (ctypes.c_byte * a.nbytes).from_buffer(a), floats),
    "cycle": in_cycle,
    "frame": in_frame,
    "traceback": in_traceback,
    "capsule": in_capsule,
}
if importlib.util.find_spec("torch"):
    HOLDERS |= {"tensor": in_tensor, "slices of a tensor": in_slice_of_tensor}


def contents(batch):
    """The array of a batch to hold, and what must be in it by the numbers of its rows."""
    if not isinstance(batch.x, np.ndarray):
        rows = [VALUES[OFFSETS[i] : OFFSETS[i + 1]] for i in batch.i]
        assert np.array_equal(batch.p, [np.pad(r, (0, batch.p.shape[1] - len(r))) for r in rows])
        return batch.x.values, np.concatenate(rows)
    return batch.x, X[batch.i]


def check(look, wanted):
    found = look()
    assert np.array_equal(found, wanted), "a batch that was held has changed"


def hold(data, seed, count):
    """Take batches from several iterators at random, hold some of them in random ways, for random times, in this thread
    and in another."""
    random = np.random.default_rng(seed)
    loader = jl.Loader(
        data,
        int(random.integers(3, 200)),
        shuffle=True,
        threads=int(random.integers(1, 3)),
        prefetch=int(random.integers(0, 4)),
    )
    given, wrong = queue.SimpleQueue(), []

    def other():
        kept = []
        while (pair := given.get()) is not None:
            kept.append(pair)
            del pair
            if len(kept) > 5:
                for pair in kept:
                    try:
                        check(*pair)
                    except BaseException as problem:
                        wrong.append(problem)
                kept = kept[3:]

    thread = threading.Thread(target=other)
    thread.start()
    held, live, kinds = [], [iter(loader)], list(HOLDERS)
    gc.disable()  # what only cycles hold is held until the next look
    try:
        for step in range(count):
            at = int(random.integers(len(live)))
            batch = next(live[at], None)
            if batch is None or random.random() < 0.01:
                live[at] = iter(loader)
                continue
            if len(live) < 3 and random.random() < 0.02:
                live.append(iter(loader))
            a, wanted = contents(batch)
            assert np.array_equal(a, wanted)
            if a.size and random.random() < 0.3:  # a batch is its holder's to write to
                a *= 2
                wanted = wanted * 2
            if len(a) > 2 and a.flags.c_contiguous and random.random() < 0.3:
                pair = HOLDERS[kinds[int(random.integers(len(kinds)))]](a), wanted
                given.put(pair) if random.random() < 0.3 else held.append(pair)
                del pair
            while len(held) > 12:
                check(*held.pop(int(random.integers(len(held)))))
            if step % 199 == 0:
                gc.collect()
        for pair in held:
            check(*pair)
    finally:
        gc.enable()
        given.put(None)
        thread.join()
    assert not wrong, wrong
    return loader._pool.made


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize(
    "seed, count", [(0, 500), *(pytest.param(k, 20_000, marks=pytest.mark.nightly) for k in range(1, 9))]
)
def test_no_held_batch_changes(name, seed, count):
    """Whatever holds a batch, for however long, finds in it what it had."""
    hold(DATA[name], seed, count)


@pytest.mark.parametrize("holder", HOLDERS)
def test_each_holder_alone(holder):
    """Each kind of holder keeps the one batch it holds, over an epoch; and lets its buffer go."""
    loader = jl.Loader(FIXED, 100, threads=1, prefetch=1)
    look = HOLDERS[holder](next(iter(loader)).x)
    collections.deque(loader, maxlen=0)
    check(look, X[:100])
    del look
    gc.collect()
    assert loader.stats()["slots_held"] == 0


def test_holders_would_find_a_pool_that_is_wrong(monkeypatch):
    """Were buffers used again while they are held, the test above would see it."""
    monkeypatch.setattr(buffers.Slot, "free", property(lambda slot: not slot.busy))
    with pytest.raises(AssertionError):
        hold(FIXED, 0, 300)


def test_who_writes_by_a_bare_address_is_told():
    """Bytes written into a buffer that was let go are an error that says where; then the loader goes on."""
    loader = jl.Loader(FIXED, ROWS, prefetch=0)
    (batch,) = loader
    address = batch.x.ctypes.data
    del batch
    loader._pool._slots[0].poison()
    ctypes.memset(address + 40, 0, 4)
    with pytest.raises(
        RuntimeError, match="4 bytes of a batch buffer that nobody held were written, the first at byte 40 of output 0"
    ):
        next(iter(loader))
    assert np.array_equal(next(iter(loader)).x, X)


# -- builds whose counts say nothing ----------------------------------------------------------------------------------


def test_counts_are_not_trusted_on_free_threaded_builds(monkeypatch):
    """Without the GIL, and on a build that could be without it, every unit gets new memory and the pool keeps none."""
    assert buffers.counts_are_exact() == (getattr(sys.flags, "gil", 1) != 0 and "free-threading" not in sys.version)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert not buffers.counts_are_exact()
        hold(FIXED, 5, 200)
        loader = jl.Loader(FIXED, 1000, shuffle=True)
        for _ in range(3):
            assert sorted(i for batch in loader for i in batch.i.tolist()) == list(range(ROWS))
        assert loader.stats()["slots"] == 0 and loader._pool.made >= 3
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version", "3.13.0 experimental free-threading build (main)")
        patched.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
        assert not buffers.counts_are_exact()
