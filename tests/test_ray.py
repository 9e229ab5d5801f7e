"""The door to Ray: blocks through our kernels (over stand-ins here), and Ray itself in tests marked nightly."""

import doctest
import json
import subprocess
import sys
import types

import numpy as np
import pytest

import jitloader as jl
import jitloader.ray as door


class Source:
    """Blocks of uneven sizes, as `iter_batches(batch_size=None)` of Ray Data gives them, read-only."""

    def __init__(self, *sizes, **columns):
        self.sizes, self.columns = sizes, columns or {"x": np.arange(sum(sizes)), "y": np.arange(sum(sizes)) * 0.5}

    def iter_batches(self, batch_size=0, batch_format=""):
        assert batch_size is None and batch_format == "numpy"
        at = 0
        for size in self.sizes:
            block = {name: column[at : at + size] for name, column in self.columns.items()}
            for column in block.values():
                column.flags.writeable = False
            yield block
            at += size


def rows_of(batches):
    return [batch.x.tolist() for batch in batches]


@pytest.mark.parametrize("window", [1, 20, 50, 10_000])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_row_comes_once(window, drop_last):
    """Whatever the blocks and windows: batches are full, fields agree, and no row is lost or repeated."""
    source = Source(7, 0, 30, 1, 1, 44, 20)
    found = list(door.batches(source, 10, window=window, drop_last=drop_last))
    assert [len(batch.x) for batch in found] == [10] * 10 + ([3] if not drop_last else [])
    rows = np.concatenate([batch.x for batch in found])
    assert len(set(rows.tolist())) == len(rows) == (100 if drop_last else 103)
    assert all(np.array_equal(batch.x * 0.5, batch.y) for batch in found)


def test_unshuffled_rows_keep_their_order():
    """Without a shuffle batches are the stream, cut."""
    assert rows_of(door.batches(Source(7, 30, 13), 10, window=16, shuffle=False)) == [
        list(range(k, k + 10)) for k in range(0, 50, 10)
    ]


def test_rows_stay_near_their_window():
    """The shuffle reaches as far as the window: rows of the first window come before all of those two windows on."""
    rows = np.concatenate(rows_of(door.batches(Source(*[100] * 10), 50, window=200)))
    assert sorted(rows.tolist()) == list(range(1000)) and rows.tolist() != list(range(1000))
    assert np.abs(rows - np.arange(1000)).max() < 200


def test_epochs_differ_and_repeat():
    """Each epoch has its own shuffle and draws; an epoch chosen again gives the same batches."""
    found = door.batches(Source(60, 60), 20, window=60)
    first, second = rows_of(found), rows_of(found)
    assert first != second
    found.set_epoch(0)
    assert rows_of(found) == first
    assert rows_of(door.batches(Source(60, 60), 20, window=60, seed=1)) != first


def noise(src, dst, key):
    dst[0] = jl.uniform(key, 0)


def test_stages_are_linked_to_every_window():
    """`link` sees a data set of a window's columns; two windows share no draws."""
    found = door.batches(
        Source(100, 100), 50, lambda data: data.map("y", noise).map("x", jl.cast("float32")), window=100, shuffle=False
    )
    batches = list(found)
    assert batches[0].x.dtype == np.float32
    draws = np.concatenate([batch.y for batch in batches])
    assert len(np.unique(draws)) == 200


def test_steps_are_the_same_for_all():
    """With `steps` an epoch has so many batches; a source that ends before is told."""
    assert len(list(door.batches(Source(50, 50), 10, steps=7))) == 7
    with pytest.raises(ValueError) as error:
        list(door.batches(Source(25), 10, steps=3))
    assert str(error.value) == (
        "the source gave 2 batches of 10 rows, not the 3 that were agreed: every worker must be given as many "
        "(count the rows, and take the least)"
    )


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: door.batches([1], 4), TypeError, "batches takes a source with iter_batches, got list"),
        (lambda: door.from_ray(3), TypeError, "from_ray takes a source with iter_batches, got int"),
        (lambda: door.from_ray(Source(0, x=np.zeros(0))), ValueError, "the source has no rows"),
        (
            lambda: list(door.batches(Source(2, name=np.array(["a", None], object)), 1)),
            TypeError,
            "column 'name' holds Python objects (text, or rows that differ in shape), which no kernel takes: encode or "
            "pad it in Ray, or leave it out by select_columns",
        ),
        (lambda: door.batches(Source(3), 0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: door.to_ray(np.zeros(3)), TypeError, "to_ray takes a jl.Dataset, got ndarray"),
    ],
)
def test_bad_input(make, kind, text):
    """It is told in one line."""
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == text


def test_state_goes_through_a_checkpoint(monkeypatch, tmp_path):
    """`report` puts the state beside what is in the folder; `resume` finds it, or says that there is none."""
    reported = {}

    class Checkpoint:
        def __init__(self, path):
            self.state = (path / "jitloader.json").read_text()

        @classmethod
        def from_directory(cls, path):
            return cls(type(tmp_path)(path))

        def as_directory(self):
            (tmp_path / "back").mkdir(exist_ok=True)
            (tmp_path / "back" / "jitloader.json").write_text(self.state)
            return door.contextlib.nullcontext(str(tmp_path / "back"))

    train = types.SimpleNamespace(
        Checkpoint=Checkpoint,
        report=lambda metrics, checkpoint: reported.update(metrics=metrics, checkpoint=checkpoint),
        get_checkpoint=lambda: reported.get("checkpoint"),
    )
    monkeypatch.setattr(door, "_ray", lambda part: train)
    data = jl.Dataset(x=np.arange(100))

    def loader_of():
        return jl.Loader(data, 10, shuffle=True)

    assert not door.resume(loader_of())
    loader = loader_of()
    batches = iter(loader)
    next(batches), next(batches)
    door.report({"loss": 1.0}, loader)
    assert reported["metrics"] == {"loss": 1.0} and json.loads(reported["checkpoint"].state)["position"] == 20
    again = loader_of()
    assert door.resume(again)
    assert rows_of(again) == rows_of(batches)


def test_a_reader_takes_its_data_set_along(tmp_path):
    """Sent by value, as Ray does: files by path, stages and access patterns as they are, any layout of memory."""
    cloudpickle = pytest.importorskip("cloudpickle")
    np.save(tmp_path / "x.npy", np.arange(2000.0).reshape(1000, 2))
    mapped, held = np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(60.0).reshape(20, 3)
    for data in (
        jl.Dataset(x=mapped[::-2, 1:]).map("x", noise_all),
        jl.Dataset(x=held[::-1, 1:], y=np.arange(20)).select([3, 1]).apply(lambda b: {"y": -b.y}),
        jl.Dataset(jl.windows(held, a=slice(0, 4), b=slice(4, 6))),
        jl.Dataset(x=held).concat(jl.Dataset(x=held + 1)).map("x", jl.cast("float32")),
    ):
        sent = cloudpickle.dumps(door._Reader(data))
        there = cloudpickle.loads(sent).data
        assert there.spec == data.spec and len(sent) < 20_000 + 2 * held.nbytes
        assert all(np.array_equal(a, b) for a, b in zip(there[:], data[:], strict=True))


def noise_all(x):
    return x * 0.5


def test_what_stands_in_for_ray(monkeypatch):
    """`to_ray` asks for row numbers in blocks and reads the rows of each; without Ray it says what to install."""
    data = jl.Dataset(x=np.arange(10) * 2, y=np.arange(10.0))
    asked = {}

    class Numbers:
        def map_batches(self, reader, batch_format, batch_size):
            asked.update(format=batch_format, size=batch_size)
            return [reader({"id": np.arange(a, min(a + batch_size, 10))}) for a in range(0, 10, batch_size)]

    def numbers(count, override_num_blocks):
        asked.update(count=count, blocks=override_num_blocks)
        return Numbers()

    package, module = types.ModuleType("ray"), types.ModuleType("ray.data")
    module.range = numbers
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.data", module)
    blocks = door.to_ray(data, rows=4, blocks=99)
    assert asked == {"count": 10, "blocks": 10, "format": "numpy", "size": 4}
    assert np.array_equal(np.concatenate([b["x"] for b in blocks]), np.arange(10) * 2)
    assert np.array_equal(np.concatenate([b["y"] for b in blocks]), np.arange(10.0))
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ImportError, match=r"pip install 'ray\[data\]'"):
        door.to_ray(data)
    with pytest.raises(TypeError, match="to_ray takes a jl.Dataset, got ndarray"):
        door.to_ray(np.arange(3))
    with pytest.raises(TypeError, match="'r' varies: pad it first"):
        door.to_ray(jl.Dataset(r=jl.ragged([[1], [2, 3]])))


def test_blocks_of_other_columns_are_refused():
    """A block that lacks a column, or has another, cannot go on from those before."""

    class Changing:
        def iter_batches(self, batch_size=0, batch_format=""):
            yield {"x": np.arange(3)}
            yield {"y": np.arange(3)}

    with pytest.raises(ValueError, match="a block has the columns y, those before x"):
        list(door.batches(Changing(), 2, window=100))


def test_docstring_examples_run():
    """The examples in the door's docstrings."""
    assert doctest.testmod(door).failed == 0


def test_importing_the_door_leaves_ray_alone():
    """Only what needs Ray imports it."""
    subprocess.run([sys.executable, "-c", "import sys, jitloader.ray; assert 'ray' not in sys.modules"], check=True)


REAL = """
import json, os, tempfile, numpy as np, ray, ray.data, ray.train
from ray.train.torch import TorchTrainer
import jitloader as jl, jitloader.ray

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
folder = tempfile.mkdtemp()
np.save(folder + "/x.npy", np.arange(2000).reshape(1000, 2))
data = jl.Dataset(x=folder + "/x.npy", i=np.arange(1000)).map("x", jl.cast("float32"))

there = jl.ray.to_ray(data, blocks=8, rows=100)
back = jl.ray.from_ray(there)
order = np.argsort(back[:].i)
assert back.spec["x"].dtype == np.float32 and np.array_equal(back[:].x[order], data[:].x)

def loop(config):
    import jitloader as jl, jitloader.ray
    shard = ray.train.get_dataset_shard("train")
    steps, rows = 0, []
    for batch in jl.ray.batches(shard, 32, lambda d: d.map("x", jl.clip(0, 1e9)), window=256):
        steps += 1
        rows += batch.i.tolist()
    loader = jl.Loader(config["data"], 50, shuffle=True)
    resumed = jl.ray.resume(loader, config["checkpoint"])
    mine = []
    for k, batch in enumerate(loader):
        mine += batch.i.tolist()
        if k == 3 and not resumed:
            break
    with open(f"{config['folder']}/{config['run']}-{loader.rank}.json", "w") as file:
        json.dump({"rank": loader.rank, "world": loader.world_size, "steps": steps, "rows": rows, "mine": mine, "resumed": resumed}, file)
    jl.ray.report({"steps": steps}, loader)

def run(name, workers, checkpoint=None):
    scaling = ray.train.ScalingConfig(num_workers=workers)
    settings = ray.train.RunConfig(storage_path=folder, name=name)
    plain = jl.Dataset(x=folder + "/x.npy", i=np.arange(1000))
    trainer = TorchTrainer(loop, train_loop_config={"folder": folder, "run": name, "data": plain, "checkpoint": checkpoint}, scaling_config=scaling,
                           run_config=settings, datasets={"train": there})
    result = trainer.fit()
    return result, [json.load(open(f"{folder}/{name}-{r}.json")) for r in range(workers)]

result, two = run("two", 2)
assert [t["rank"] for t in two] == [0, 1] and {t["world"] for t in two} == {2}
assert two[0]["steps"] == two[1]["steps"] == 500 // 32
assert not set(two[0]["rows"]) & set(two[1]["rows"])
seen = set(two[0]["mine"]) | set(two[1]["mine"])
assert len(seen) == 400
_, one = run("one", 1, result.checkpoint)
assert one[0]["resumed"] and seen | set(one[0]["mine"]) == set(range(1000)) and not seen & set(one[0]["mine"])
print("whole")
"""


@pytest.mark.nightly
def test_ray_itself():
    """On a local Ray: there and back, two workers with equal steps over a shard, and a resume from two ranks to one."""
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip().endswith("whole"), done.stderr[-4000:]
