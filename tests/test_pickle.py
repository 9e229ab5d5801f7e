"""Loaders, data sets, orders and stages pickle with their state, and go on exactly in another process."""

import copy
import functools
import multiprocessing
import pickle
import threading
import types

import numpy as np
import pytest
import spawned
from test_orders import ORDERS

import jitloader as jl


def again(value):
    return pickle.loads(pickle.dumps(value))


def test_another_process_goes_on_exactly(tmp_path, monkeypatch):
    """A half-used loader over a mapped file, with built-in and user stages and Python functions, continues in a spawned
    process with the very next batch, and with globals as they were when it was linked; the file travels by path."""
    monkeypatch.setattr(spawned, "HALF", 0.25)  # the other process imports 0.5
    np.save(tmp_path / "x.npy", np.arange(4_000_000, dtype="f4").reshape(1_000_000, 4))
    np.save(tmp_path / "i.npy", np.arange(1_000_000))
    data = jl.Dataset(x=tmp_path / "x.npy", i=tmp_path / "i.npy")
    data = data.select(np.arange(0, 1_000_000, 10_000)).map("x", spawned.halve, jl.normalize(1, 2), spawned.shifted(3))
    loader = jl.Loader(data.apply(spawned.tag), 7, order=spawned.backwards, seed=4, rank=1, world_size=2, tail="drop")
    batches = iter(loader)
    next(batches), next(batches)
    text = pickle.dumps(loader)
    assert len(text) < 100_000 and loader.state_dict() == again(loader).state_dict()
    wanted = [[(b.x.tolist(), b.i.tolist()) for b in it] for it in (batches, loader)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(spawned.rest_of, (text,)) == wanted


@pytest.mark.parametrize("make, holds", ORDERS)
def test_orders_pickle(make, holds):
    """An order that was pickled, alone or after use, gives the same rows under the same token."""
    order = make(64)
    for made in (order, again(order)):
        made.plan(64, 0, 0)
        back = again(made)
        assert back.token == order.token and repr(back) == repr(order) and copy.deepcopy(order) is order
        for epoch in (0, 3):
            ours, theirs = (o.plan(64, 5, epoch) for o in (order, back))
            rows = [np.empty(ours.length, np.int64) for _ in range(2)]
            for positions, out in zip((ours, theirs), rows, strict=True):
                positions.kernel(0, 1, out, *positions.params)
            assert (rows[0] == rows[1]).all()


SERIES = np.arange(400.0).reshape(100, 4)
DATA = {
    "windows": lambda: jl.Dataset(jl.windows(SERIES, a=slice(0, 5), b=slice(5, 7))),
    "ragged": lambda: jl.Dataset(w=jl.ragged(np.arange(18), np.cumsum([0, 3, 9, 1, 5]))).map("w", jl.pad_to_longest(mask="m")),
    "columns": lambda: jl.Dataset(x=SERIES[5:, 1], y=np.asfortranarray(SERIES)[3:98].T[:, ::-1].T),
    "strided": lambda: jl.Dataset(x=SERIES[::-2, 1:3]).concat(jl.Dataset(x=SERIES[:7, :2])),
    "big-endian": lambda: jl.Dataset(x=np.arange(9, dtype=">i4")).map("x", jl.cast("float32")),
    "text": lambda: jl.Dataset(x=np.array(["ab", "c"]), y=np.array([1, 2], "datetime64[s]")),
    "transitions": lambda: jl.transitions(
        obs=SERIES, action=np.arange(100), reward=np.ones(100), terminated=np.arange(100) % 9 == 0, n=3, stack=2
    ),
    "images": lambda: jl.Dataset(x=np.arange(960, dtype="u1").reshape(5, 8, 8, 3)).map(
        "x", jl.random_choice(jl.random_flip(), jl.random_crop(8, padding=1)), jl.lookup(np.arange(256.0)), jl.channels_first()
    ),
    "rows": lambda: jl.Dataset(x=SERIES).apply_rows(lambda row, rng: {"y": row["x"][0] + rng.random()}),
    "mix": lambda: jl.mix((jl.Dataset(x=SERIES), 2), (jl.Dataset(x=SERIES + 1000).map("x", jl.clip(1005, 1100)), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_data_sets_pickle(name):
    """Access patterns, layouts, dtypes and stages of all kinds come back with the same bits."""
    data = DATA[name]()
    back = again(data)
    assert repr(back) == repr(data)
    for a, b in zip(data[:4], back[:4], strict=True):
        assert type(a) is type(b) and np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(a, b)


def test_shared_memory_is_shared_again():
    """Two fields over one array are one array after pickling, and take its bytes once; a small slice takes its own."""
    big = np.zeros(100_000)
    text = pickle.dumps(jl.Dataset(jl.windows(big, a=slice(0, 2), b=slice(2, 3))))
    assert big.nbytes < len(text) < 1.1 * big.nbytes
    back = pickle.loads(text).sources
    a, b = (back[name].parts[0].array for name in "ab")
    assert np.shares_memory(a, b)
    assert len(pickle.dumps(jl.Dataset(x=big[:10]))) < 5000


def test_a_function_that_names_itself():
    """Closures may be circular."""

    def down(n):
        return n if n < 1 else down(n - 1)

    def stage(x):
        return x + down(3)

    back = again(jl.Dataset(x=np.arange(3)).apply(lambda b: {"x": np.array([stage(int(v)) for v in b.x])}))
    assert back[:].x.tolist() == [0, 1, 2]


CONFIG = types.ModuleType("config")
CONFIG.factor, TABLE = 3.0, np.arange(4.0)


def tripled(x):
    return moved(x) * CONFIG.factor


def moved(x):
    return x + TABLE[1]


@jl.batch_stage
def doubled(j, xs, x, key):
    x[0] = xs[j] * 2


def test_what_a_stage_was_linked_with_travels(monkeypatch):
    """Globals, those of functions that it calls, and attributes of modules that were changed or are gone meanwhile."""
    data = jl.Dataset(x=np.arange(3.0)).map("x", tripled)
    text = pickle.dumps(data)
    monkeypatch.setattr(CONFIG, "factor", 0.0)
    monkeypatch.delitem(globals(), "TABLE")
    for back in (pickle.loads(text), again(pickle.loads(text)), again(data)):
        assert back[:].x.tolist() == [3.0, 6.0, 9.0] and back[2].x == 9.0


def test_functions_of_numpy_and_batch_stages_pickle():
    """What is generated round them belongs to no module."""
    data = jl.Dataset(x=np.array([1.0, 4.0, 9.0])).map("x", np.sqrt, doubled)
    assert again(data)[:].x.tolist() == [2.0, 4.0, 6.0]


def test_stages_alone_pickle():
    """A stage value, built-in or a user's, is the same after pickling."""
    for stage, array in ((jl.normalize([1, 2], [3, 4]), [[5.0, 6.0]]), (spawned.shifted(1), [1.0, 2.0])):
        assert (again(stage)(array, key=7) == stage(array, key=7)).all() and copy.deepcopy(stage) is stage


def test_live_rings_pickle():
    """A ring with what is kept beside it, and priorities, go on apart from each other."""
    ring = jl.ring(8, obs="float32", action="int64", reward="float32", terminated="bool")
    replay = jl.Replay(jl.transitions(ring, n=2, gamma=0.5), jl.prioritized(8))
    replay.extend(obs=range(5), action=range(5), reward=[1.0] * 5, terminated=[False] * 5)
    back = again(replay)
    for one in (replay, back):
        one.append(obs=5, action=5, reward=3, terminated=True)
    a, b = replay.sample(20), back.sample(20)
    assert all((x == y).all() for x, y in zip(a, b, strict=True)) and back.ring is not ring and len(back) == 6
    assert {4: 2.5, 5: 3.0}.items() <= dict(zip(b.obs.tolist(), b.reward.tolist(), strict=True)).items()


@pytest.mark.parametrize("clone", [again, copy.deepcopy, copy.copy])
def test_a_copy_is_independent(clone):
    """What one of two does changes nothing of the other."""
    loader = jl.Loader(jl.Dataset(i=np.arange(20)), 4, shuffle=True, seed=1)
    it = iter(loader)
    next(it)
    other = clone(loader)
    rest = [b.i.tolist() for b in it]
    list(loader)
    assert [b.i.tolist() for b in other] == rest and other.epoch == 1 and loader.epoch == 2
    assert other.stats()["batches"] == 4 and loader.stats()["batches"] == 10


def test_what_does_not_pickle_is_named():
    """A lock inside a Python function."""
    loader = jl.Loader(jl.Dataset(x=np.zeros(2)).apply(functools.partial(print, threading.Lock())), 1)
    with pytest.raises(TypeError) as error:
        pickle.dumps(loader)
    assert str(error.value) == "a loader does not pickle: cannot pickle '_thread.lock' object"


def test_code_of_another_python_is_refused(monkeypatch):
    """Bytecode is of one version of Python: an error says so, where running it would crash."""
    text = pickle.dumps(jl.weighted([1, 2]))
    monkeypatch.setattr("jitloader.pickling.VERSION", "cpython-399")
    with pytest.raises(pickle.UnpicklingError, match=r"drawn was pickled as code of cpython-3\d+, this is cpython-399"):
        pickle.loads(text)
