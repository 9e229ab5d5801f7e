"""Ranks: found in the frameworks that run, refused where they disagree, elastic through the state; in real processes."""

import itertools
import json
import os
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

import jitloader as jl
from jitloader.ranks import find_rank

HERE = Path(__file__).parent


def processes(code, count, folder):
    """Run one program in some processes at once, each with its number as its argument; give what each printed, as JSON."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", code]
    running = [
        subprocess.Popen(
            [*command, str(k), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=env
        )
        for k in range(count)
    ]
    try:
        done = [p.communicate(timeout=120) for p in running]
    finally:
        for p in running:
            p.kill()
    assert all(p.returncode == 0 for p in running), "\n".join(err[-1500:] for _, err in done)
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


ELASTIC = """
import json, sys, pathlib, numpy as np, torch.distributed as dist, jitloader as jl
me, found, here = int(sys.argv[1]), {}, pathlib.Path()
data = jl.Dataset(i=np.arange(103))
def rows(batches): return [b.i.tolist() for b in batches]
def loader(**options): return jl.Loader(data, 5, shuffle=True, seed=3, **options)
for world, take in ((2, 4), (3, 3), (1, None)):
    if me < world:
        dist.init_process_group("gloo", init_method=f"file://{here.absolute()}/meet{world}", rank=me, world_size=world)
        run = loader(tail="drop")
        if world == 2:
            found["ends"] = {tail: rows(loader(tail=tail)) for tail in ("drop", "wrap")}
        else:
            run.load_state_dict(json.loads((here / "state").read_text()))
        it = iter(run)
        found[world] = [run.rank, run.world_size, rows(next(it) for _ in range(take)) if take else rows(it)]
        states = [None] * world
        dist.all_gather_object(states, run.state_dict())
        assert all(s == states[0] for s in states)
        if me == 0:
            (here / "state").write_text(json.dumps(states[0]))
        dist.destroy_process_group()
    else:
        import time
        while not (here / "go").exists(): time.sleep(0.01)
    if me == 0 and world == 2:
        (here / "go").touch()
print(json.dumps(found))
"""


def in_turn(ranks):
    """The global order, from the batches of each rank: one row of each in turn."""
    return [row for trio in zip(*(list(itertools.chain(*r)) for r in ranks), strict=True) for row in trio]


def test_torch_distributed_from_two_ranks_to_three_to_one(tmp_path):
    """gloo: rank and world are found, ranks part the rows, go in equal steps, and a state moves between world sizes."""
    pytest.importorskip("torch")
    found = processes(ELASTIC, 3, tmp_path)
    for world in (2, 3, 1):
        assert [f[str(world)][:2] for f in found[:world]] == [[r, world] for r in range(world)]
    drop, wrap = ([f["ends"][tail] for f in found[:2]] for tail in ("drop", "wrap"))
    assert [len(r) for r in drop] == [11, 11] and [len(r) for r in wrap] == [11, 11]
    assert len(set(in_turn(drop))) == 102 and set(in_turn(wrap)) == set(range(103)) and len(in_turn(wrap)) == 104
    whole = [i for b in jl.Loader(jl.Dataset(i=np.arange(103)), 5, shuffle=True, seed=3, rank=0, world_size=1) for i in b.i]
    assert [i for w in (2, 3, 1) for i in in_turn([f[str(w)][2] for f in found[:w]])] == whole


def test_jax_distributed(tmp_path):
    """Two processes of JAX's own runtime: their numbers are found, and their rows part."""
    pytest.importorskip("jax")
    code = """
import json, sys, numpy as np, jax, jitloader as jl
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
loader = jl.Loader(jl.Dataset(i=np.arange(20)), 5, shuffle=True)
found = [loader.rank, loader.world_size, [b.i.tolist() for b in loader]]
jax.distributed.shutdown()
print(json.dumps(found))
"""
    found = processes(code, 2, tmp_path)
    assert [f[:2] for f in found] == [[0, 2], [1, 2]]
    assert in_turn([f[2] for f in found]) == [i for b in jl.Loader(jl.Dataset(i=np.arange(20)), 5, shuffle=True) for i in b.i]


RAY = """
import json, os, sys, tempfile, numpy as np, ray, ray.train
from ray.train.torch import TorchTrainer
from ray.train import RunConfig, ScalingConfig
folder = sys.argv[1]
def work(config):
    sys.path.insert(0, config["here"])
    import jitloader as jl
    loader = jl.Loader(jl.Dataset(i=np.arange(40)), 5, shuffle=True)
    with open(f"{config['folder']}/{loader.rank}.json", "w") as file:
        json.dump([loader.world_size, [b.i.tolist() for b in loader]], file)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
config = {"here": os.getcwd(), "folder": folder}
TorchTrainer(work, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=folder)).fit()
ray.shutdown()
"""


@pytest.mark.nightly
def test_ray_train(tmp_path):
    """Two real workers of Ray Train."""
    pytest.importorskip("ray.train")
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RAY, str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=HERE.parent,
        env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    assert [f[0] for f in found] == [2, 2]
    assert in_turn([f[1] for f in found]) == [i for b in jl.Loader(jl.Dataset(i=np.arange(40)), 5, shuffle=True) for i in b.i]


def fake(monkeypatch, torch=None, ray=None, jax=None, environment=None):
    """Let frameworks say that this process is a rank of so many; where None, they are not there or not initialised."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if environment:
        monkeypatch.setenv("RANK", environment[0])
        monkeypatch.setenv("WORLD_SIZE", environment[1])

    def context():
        if ray is None:
            raise RuntimeError("not in a worker")
        return types.SimpleNamespace(get_world_rank=lambda: ray[0], get_world_size=lambda: ray[1])

    modules = {
        "torch.distributed": types.SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: torch is not None, get_rank=lambda: torch[0],
            get_world_size=lambda: torch[1],
        ),
        "ray.train": types.SimpleNamespace(get_context=context),
        "jax": types.SimpleNamespace(
            distributed=types.SimpleNamespace(is_initialized=lambda: jax is not None), process_index=lambda: jax[0],
            process_count=lambda: jax[1],
        ),
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("who", ["torch", "ray", "jax", "environment"])
def test_each_source_is_asked(monkeypatch, who):
    """Whichever framework is initialised says rank and world; the others, loaded but idle, say nothing."""
    fake(monkeypatch, **{who: ("1", "4") if who == "environment" else (1, 4)})
    assert find_rank(None, None) == (1, 4)
    assert find_rank(0, 2) == (0, 2)


def test_no_source_is_rank_zero_of_one(monkeypatch):
    """Frameworks that are loaded but not initialised leave a process alone."""
    fake(monkeypatch)
    assert find_rank(None, None) == (0, 1)


def test_sources_may_agree(monkeypatch):
    """torchrun sets the environment as well; Ray Train initialises torch.distributed."""
    fake(monkeypatch, torch=(2, 3), ray=(2, 3), jax=(2, 3), environment=("2", "3"))
    assert find_rank(None, None) == (2, 3)


@pytest.mark.parametrize(
    "told, says",
    [
        (
            {"torch": (1, 2), "environment": ("0", "2")},
            "torch.distributed says rank 1 of 2, the environment (RANK, WORLD_SIZE) rank 0 of 2: give rank= and world_size=",
        ),
        ({"torch": (0, 2), "ray": (0, 4)}, "torch.distributed says rank 0 of 2, Ray Train rank 0 of 4: give rank= and world_size="),
        ({"ray": (1, 2), "jax": (0, 1)}, "Ray Train says rank 1 of 2, JAX rank 0 of 1: give rank= and world_size="),
        ({"environment": ("one", "2")}, "RANK='one' and WORLD_SIZE='2' in the environment must be whole numbers"),
        ({"environment": ("2", "2")}, "rank 2 is not below world_size 2"),
        ({"environment": ("-1", "2")}, "rank must be at least 0, got -1"),
    ],
)
def test_sources_that_disagree_are_named(monkeypatch, told, says):
    """Two sources that say different things would give each process wrong rows."""
    fake(monkeypatch, **told)
    with pytest.raises(ValueError) as error:
        jl.Loader(jl.Dataset(i=np.arange(4)), 2)
    assert str(error.value) == says


@pytest.mark.parametrize(
    "tail, says",
    [
        ("keep", "world_size 5 is more than the 3 rows: 2 ranks get none; use tail='wrap'"),
        ("drop", "world_size 5 is more than the 3 rows: 5 ranks get none; use tail='wrap'"),
    ],
)
def test_more_ranks_than_rows_are_told(tail, says):
    """A warning, for nothing is what some ranks then get; with wrap each gets a row."""
    data = jl.Dataset(i=np.arange(3))
    with pytest.warns(UserWarning) as told:
        jl.Loader(data, 2, rank=0, world_size=5, tail=tail)
    assert [str(w.message) for w in told] == [says]
    loaders = [jl.Loader(data, 2, rank=r, world_size=5, tail="wrap") for r in range(5)]
    assert [[b.i.tolist() for b in loader] for loader in loaders] == [[[0]], [[1]], [[2]], [[0]], [[1]]]


@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_saves_the_same_state(tail, world):
    """In step, all ranks are at one place: at the end of an epoch too, and the state of any goes on with the next epoch."""
    for n, batch, drop_last in itertools.product((6, 7, 8, 10), (1, 2, 4), (False, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaders = [
                jl.Loader(jl.Dataset(i=np.arange(n)), batch, rank=r, world_size=world, tail=tail, drop_last=drop_last)
                for r in range(world)
            ]
        for steps in itertools.zip_longest(*loaders):
            if all(b is not None for b in steps):
                assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        ends = [loader.state_dict() for loader in loaders]
        assert {(s["epoch"], s["position"]) for s in ends if len(loaders[0]) == len(loaders[-1])} <= {(1, 0)}
        assert (ends[0]["epoch"], ends[0]["position"]) == (1, 0)
