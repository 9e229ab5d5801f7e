"""Wrong input to every public function: an error of a documented kind with a short text, never another, no crash, no hang."""

import contextlib
import decimal
import faulthandler
import fractions
import inspect
import itertools
import os
import random
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from naive_access import interpreted

import jitloader as jl

# What wrong input may end in: each is documented where it is raised, DataError, PipelineError and StateError are ours.
DOCUMENTED = (
    ValueError, TypeError, IndexError, KeyError, OSError, ImportError, MemoryError, jl.PipelineError, jl.DataError, jl.StateError,
)  # fmt: skip
LIBRARY = os.path.dirname(jl.__file__)

CYCLE: list = []
CYCLE.append(CYCLE)
WRONG = [
    None, True, False, 0, -1, 1, 2, 3, 7, 300, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30, -(10**30), 10**400,
    0.5, -0.5, 1.0, float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 1j,
    "", "x", "no such", "a/b", "\0", "float32", "int64", "U3", "O", b"x", b"",
    (), (1,), (0, 1), (1, 0), (-1, -2), (1, 2, 3), (0.5, 0.1), (float("nan"), 1), [], [1], [0, 1], [1, 2, 3], [-1, 5], [2**70], [0.5, float("nan")],
    [None], ["a"], ["x", "y"], [[1], [1, 2]], [[1, 2], [3, 4]], [()], {}, {"x": 1}, {"x": None}, {"x": jl.scale()}, {1: 2}, {"y": [1, 2]}, set(), {1, 2}, CYCLE,
    range(3), range(0), slice(0, 2), slice(None, None, 0), slice("a"), Ellipsis, NotImplemented,
    np.array(1), np.array(1.5), np.zeros(0), np.zeros((2, 2)), np.zeros((0, 3)), np.zeros((5, 0)), np.arange(5), np.arange(5.0), np.array([np.nan] * 5), np.array(["a"] * 5),
    np.array([None] * 5), np.zeros(5, bool), np.ones(5, bool), np.arange(5).astype("M8[s]"), np.zeros(5, [("a", "i4")]), np.ma.masked_array([1, 2], [0, 1]),
    np.float16(3), np.int8(-1), np.uint64(2**64 - 1), np.float64("nan"), np.bool_(True), np.datetime64("2020"), np.str_("x"),
    np.dtype("f4"), np.dtype("V3"), np.float32, int, object, type,
    object(), lambda: 1, lambda v: v, lambda v: "x", lambda src, dst, key: None, lambda *a, **k: None, len, print, np.sin, np.add, iter([1]), (i for i in ()),
    decimal.Decimal("1.5"), fractions.Fraction(1, 3), jl.scale(), jl.one_hot(3), jl.shuffled, jl.Spec(np.dtype("f4"), (2,)), sys, warnings, Exception, ValueError("x"),
]  # fmt: skip


def fresh():
    """A small data set."""
    return jl.Dataset(
        x=np.arange(40, dtype="f4").reshape(5, 8), y=np.arange(5), r=jl.ragged(np.arange(9), [0, 2, 2, 5, 8, 9])
    )


def images():
    return jl.Dataset(x=np.arange(5 * 48, dtype="u1").reshape(5, 4, 4, 3))


def on_images(stage):
    images().map("x", stage).sample(1)


def on_numbers(stage):
    data = fresh()
    for field in "xyr":
        with contextlib.suppress(jl.PipelineError):
            data.map(field, stage).sample(3)


def on_classes(stage):
    jl.Dataset(x=np.eye(5)).map("x", stage).sample(1)


def run_order(order):
    """The first rows of an epoch of an order over five rows."""
    positions = order.plan(5, 3, 1)
    rows = np.zeros(min(positions.length, 300), np.int64)
    positions.kernel(0, 1, rows, *positions.params)


def run_loader(loader):
    list(itertools.islice(loader, 3)), loader.state_dict(), repr(loader)


def run_data(data):
    len(data), repr(data), data.spec, data[:2]


def filled():
    ring = jl.Ring(4, x=("f4", (2,)), done="bool", cut="bool")
    ring.extend(x=np.zeros((3, 2)), done=np.array([0, 0, 1], bool), cut=np.zeros(3, bool))
    return ring


def trajectory():
    ring = jl.Ring(4, obs=("f4", (2,)), action="i8", reward="f4", terminated="bool", truncated="bool")
    for k in range(3):
        ring.append(obs=[k, k], action=k, reward=1.0, terminated=False, truncated=k == 2)
    return ring


def replay():
    memory = jl.Prioritized(4)
    memory.add([0, 1, 2])
    return jl.Replay(filled(), memory)


def prioritized():
    memory = jl.Prioritized(8)
    memory.add([0, 1, 2])
    return memory


def state():
    return jl.Loader(fresh(), 2).state_dict()


def nothing(made):
    """What comes is not looked at."""


FLOATS, LABELS, EPISODES = np.arange(5.0), [0, 1, 0, 1, 1], [0, 1, 0, 0, 1]
# Name, a call that is right, and what is done with its result. Each argument is replaced by each wrong value in turn.
CALLS = {
    "Dataset": (lambda *a, **k: jl.Dataset(*a, **k), [{"x": np.arange(5)}], {"y": np.arange(5)}, run_data),
    "records": (jl.records, [np.arange(5)], {"field": "x"}, lambda s: run_data(jl.Dataset(x=s))),
    "ragged": (jl.ragged, [np.arange(4), [0, 1, 4]], {"field": "x"}, lambda s: run_data(jl.Dataset(s) if isinstance(s, dict) else jl.Dataset(x=s))),
    "windows": (jl.windows, [np.arange(30)], {"a": slice(0, 3), "stride": 2, "step": 1, "groups": [0, 9, 30],
        "pad_start": 1, "pad_end": 1, "pad_value": 0, "mask": True, "group_field": "g"}, lambda s: run_data(jl.Dataset(s))),
    "sequences": (jl.sequences, [np.arange(30), 4], {"groups": [0, 9, 30], "stride": 2, "pad": True, "pad_value": 0, "mask": "m"}, lambda s: run_data(jl.Dataset(s))),
    "transitions": (jl.transitions, [], {"obs": FLOATS, "action": FLOATS, "reward": FLOATS, "terminated": EPISODES, "truncated": np.zeros(5, bool),
        "n": 2, "gamma": 0.9, "stack": 2, "steps": True, "extra": FLOATS, "seam": 0}, run_data),
    "transitions of a ring": (lambda *a, **k: jl.transitions(*a, **k), [trajectory()], {"n": 2, "gamma": 0.9, "stack": 2, "steps": True}, nothing),
    "episodes": (jl.episodes, [EPISODES, np.zeros(5, bool)], {"seam": 1}, nothing),
    "pack": (jl.pack, [[1, 2, 3], 5], {"seed": 0, "epoch": 0, "group": 100, "overflow": "error"}, len),
    "packed": (jl.packed, [np.arange(6), [0, 3, 5, 6], 6], {"padding": 0, "field": "x", "seed": 0, "epoch": 0, "group": 9, "overflow": "error"}, run_data),
    "Loader max_tokens": (lambda *a, **k: jl.Loader(*a, **k), [fresh().drop("x").map("r", jl.pad_to_longest())], {"max_tokens": 9, "batch_size": 2}, run_loader),
    "open": (jl.open, ["/nonexistent.npy"], {"fields": ["x"], "unpack": None, "storage_options": None, "progress": False}, run_data),
    "mix": (jl.mix, [(fresh(), 1.0), (fresh(), 2.0)], {"stop": "first"}, run_data),
    "live": (lambda *a: jl.live(*a), [filled()], {}, run_data),
    "Loader": (lambda *a, **k: jl.Loader(*a, **k), [fresh(), 2], {"shuffle": True, "seed": 0, "drop_last": False, "rank": 0, "world_size": 2,
        "tail": "drop", "threads": 1, "prefetch": 1}, run_loader),
    "Loader order": (lambda *a, **k: jl.Loader(*a, **k), [fresh(), 2], {"order": [0, 1]}, run_loader),
    "Loader.epoch": (lambda epoch: setattr(jl.Loader(fresh(), 2), "epoch", epoch), [1], {}, nothing),
    "Loader[]": (lambda i: jl.Loader(fresh(), 2)[i], [1], {}, nothing),
    "Loader.check": (lambda rows: jl.Loader(fresh(), 2).check(rows), [2], {}, nothing),
    "Loader.load_state_dict": (lambda s: jl.Loader(fresh(), 2).load_state_dict(s), [state()], {}, nothing),
    "Loader.shuffle_quality": (lambda labels: jl.Loader(fresh(), 2).shuffle_quality(labels), ["y"], {}, nothing),
    "map": (lambda *a, **k: fresh().map(*a, **k), ["x", jl.clip(0, 1), lambda v: v + 1], {}, run_data),
    "map to": (lambda *a, **k: fresh().map(*a, **k), [("x", "y"), jl.stage(lambda a, b, c, key: None, inputs=2)], {"to": "z"}, run_data),
    "apply": (lambda f: fresh().apply(f), [lambda batch: {}], {}, run_data),
    "apply_rows": (lambda f: fresh().apply_rows(f), [lambda row, rng: {}], {}, run_data),
    "keep": (lambda *a: fresh().keep(*a), ["x", "y"], {}, run_data),
    "drop": (lambda *a: fresh().drop(*a), ["x"], {}, run_data),
    "select": (lambda i: fresh().select(i), [[0, 1]], {}, run_data),
    "take": (lambda n: fresh().take(n), [2], {}, run_data),
    "split": (lambda *a, **k: fresh().split(*a, **k), [0.5, 0.5], {"seed": 0, "groups": LABELS}, lambda parts: [run_data(p) for p in parts if len(p)]),
    "zip": (lambda other: fresh().zip(other), [jl.Dataset(z=np.arange(5))], {}, run_data),
    "concat": (lambda other: jl.Dataset(z=FLOATS).concat(other), [jl.Dataset(z=FLOATS)], {}, run_data),
    "Dataset[]": (lambda i: fresh()[i], [[0, 1]], {}, nothing),
    "sample": (lambda row, **k: fresh().sample(row, **k), [1], {"seed": 0, "epoch": 0}, nothing),
    "trace": (lambda row, **k: fresh().trace(row, **k), [1], {"seed": 0, "epoch": 0}, nothing),
    "statistics": (lambda field: fresh().statistics(field), ["x"], {}, nothing),
    "save": (lambda path: fresh().drop("r").save(path), ["/dev/null/x"], {}, nothing),
    "cache": (lambda path, **k: fresh().drop("r").map("x", jl.clip(0, 1)).cache(path, **k), ["/dev/null/x"], {"seed": None, "progress": False}, nothing),
    "Ring": (lambda *a, **k: jl.Ring(*a, **k), [4], {"x": ("f4", (2,)), "y": "i8"}, len),
    "Ring.append": (lambda **k: filled().append(**k), [], {"x": [1, 2], "done": False, "cut": False}, nothing),
    "Ring.extend": (lambda **k: filled().extend(**k), [], {"x": [[1, 2]], "done": [False], "cut": [False]}, nothing),
    "Ring.ends": (lambda *a: filled().ends(*a), ["done", "cut"], {}, nothing),
    "Ring.rows": (lambda i: filled().rows(i), [[0, 1]], {}, nothing),
    "Prioritized": (lambda *a, **k: jl.Prioritized(*a, **k), [4], {"alpha": 0.5, "beta": 0.5, "seed": 1, "stratified": True}, lambda m: (m.add([0]), m.sample(2))),
    "Prioritized.add": (lambda rows: prioritized().add(rows), [[3]], {}, nothing),
    "Prioritized.update": (lambda *a: prioritized().update(*a), [[0, 1], [1.0, 2.0]], {}, nothing),
    "Prioritized.sample": (lambda n: prioritized().sample(n), [2], {}, nothing),
    "Prioritized.load_state_dict": (lambda s: prioritized().load_state_dict(s), [prioritized().state_dict()], {}, nothing),
    "Replay": (lambda *a: jl.Replay(*a), [filled(), jl.Prioritized(4)], {}, nothing),
    "Replay.append": (lambda **k: replay().append(**k), [], {"x": [1, 2], "done": False, "cut": False}, nothing),
    "Replay.sample": (lambda n: replay().sample(n), [2], {}, nothing),
    "Replay.update": (lambda *a: replay().update(*a), [[0, 1], [1.0, 2.0]], {}, nothing),
    "balanced": (jl.balanced, [LABELS], {}, run_order),
    "blocks": (jl.blocks, [2, 2], {}, run_order),
    "bucketed": (jl.bucketed, [LABELS, 2], {"window": 2}, run_order),
    "custom": (jl.custom, [lambda position, count, seed, epoch: position], {}, run_order),
    "grouped": (jl.grouped, [LABELS], {}, run_order),
    "indices": (jl.indices, [[0, 1]], {}, run_order),
    "mixed": (jl.mixed, [[3, 2], [0.5, 0.5]], {"stop": "first"}, run_order),
    "repeat": (jl.repeat, [jl.shuffled, 2], {}, run_order),
    "sampled": (jl.sampled, [3], {}, run_order),
    "stratified": (jl.stratified, [LABELS], {"batch_size": 2}, run_order),
    "weighted": (jl.weighted, [FLOATS], {"replacement": False}, run_order),
    "brightness": (jl.brightness, [0.5], {}, on_images),
    "cast": (jl.cast, ["int32"], {}, on_numbers),
    "center_crop": (jl.center_crop, [2], {"axes": (0, 1)}, on_images),
    "clip": (jl.clip, [0, 1], {}, on_numbers),
    "contrast": (jl.contrast, [0.5], {"axes": (0, 1)}, on_images),
    "cutmix": (jl.cutmix, [1.0], {"axes": (0, 1)}, on_images),
    "elementwise": (jl.elementwise, [lambda v: v + 1], {"dtype": "f4"}, on_numbers),
    "stage": (jl.stage, [lambda src, dst, key: None], {"shape": (2,), "dtype": "f4", "out": None, "inputs": 1}, on_numbers),
    "stage out": (jl.stage, [lambda src, dst, key: None], {"out": lambda spec: spec}, on_numbers),
    "batch_stage": (jl.batch_stage, [lambda j, xs, x, key: None], {}, on_numbers),
    "fill_nan": (jl.fill_nan, [0], {}, on_numbers),
    "gaussian_noise": (jl.gaussian_noise, [0.5, 1], {}, on_numbers),
    "jitter": (jl.jitter, [0.5], {}, on_numbers),
    "lookup": (jl.lookup, [np.arange(300)], {}, on_numbers),
    "mixup": (jl.mixup, [1.0], {}, on_classes),
    "normalize": (jl.normalize, [0, 1], {}, on_numbers),
    "one_hot": (jl.one_hot, [5], {"dtype": "f4"}, on_numbers),
    "pad": (jl.pad, [1], {"value": 0}, on_numbers),
    "pad_rows": (jl.pad_rows, [4], {"value": 0, "mask": "m", "lengths": "n", "front": True}, on_numbers),
    "pad_to_longest": (jl.pad_to_longest, [2], {"value": 0, "mask": "m", "lengths": "n", "front": True}, on_numbers),
    "random_apply": (jl.random_apply, [jl.clip(0, 1), 0.5], {}, on_numbers),
    "random_choice": (jl.random_choice, [jl.clip(0, 1), jl.clip(1, 2)], {"p": [1, 2]}, on_numbers),
    "random_crop": (jl.random_crop, [3], {"padding": 1, "fill": 0, "axes": (0, 1)}, on_images),
    "random_cut": (jl.random_cut, [2], {}, on_numbers),
    "random_erasing": (jl.random_erasing, [0.5], {"scale": (0.1, 0.2), "ratio": (0.5, 2), "value": 1, "axes": (0, 1)}, on_images),
    "random_flip": (jl.random_flip, [0.5], {"axis": 0}, on_images),
    "random_resized_crop": (jl.random_resized_crop, [3], {"scale": (0.1, 1), "ratio": (0.5, 2), "mode": "bilinear", "antialias": True, "axes": (0, 1)}, on_images),
    "random_shift": (jl.random_shift, [2], {"axis": 0, "fill": 0}, on_numbers),
    "random_vertical_flip": (jl.random_vertical_flip, [0.5], {}, on_images),
    "resize": (jl.resize, [3], {"mode": "bilinear", "antialias": True, "axes": (0, 1)}, on_images),
    "rotate90": (jl.rotate90, [1], {}, on_images),
    "scale": (jl.scale, [0, 1], {}, on_images),
    "standardize_by": (jl.standardize_by, [], {"masked": False, "eps": 0.1}, on_numbers),
    "standardize_sample": (jl.standardize_sample, [0], {"eps": 0.1}, on_numbers),
    "time_mask": (jl.time_mask, [2], {"count": 2, "axis": 0, "fill": 0, "p": 0.5}, on_numbers),
    "transpose": (jl.transpose, [(1, 0, 2)], {"name": "t"}, on_images),
    "truncate": (jl.truncate, [2], {}, on_numbers),
    "a stage called": (lambda *a: jl.clip(0, 1)(*a), [[1.0, 2.0], 3], {}, nothing),
    "channels_first": (jl.channels_first, [], {}, on_images),
    "channels_last": (jl.channels_last, [], {}, on_images),
    "flatten": (jl.flatten, [], {}, on_numbers),
    "log1p": (jl.log1p, [], {}, on_numbers),
    "show": (jl.show, [np.zeros((4, 8, 8, 3))], {"n": 2, "fields": None, "kind": None}, nothing),
}  # fmt: skip


UNCHECKED = {"uniform", "normal", "randint", "bernoulli", "permutation"}  # draws, words for kernels: they check nothing
NO_CALLS = {
    "write",  # whose wrong input test_write.py tries: these would fill the disk
    "convert",
    "clear_cache",
    "DataError",
    "PipelineError",
    "StateError",
    "Live",
    "Mix",
    "Quality",
    "Ragged",
    "Packs",
    "Order",
    "Positions",
    "Spec",
    "Stage",
    "prioritized",
    "ring",
}  # made by others, plain records, other names


def complaint(call, arguments, named, use):
    """What is wrong with how a call ends, or nothing."""
    start = time.perf_counter()
    try:
        use(call(*arguments, **named))
    except DOCUMENTED as error:
        text = str(error)
        if len(text.splitlines()) > 5:
            return f"{type(error).__name__} of {len(text.splitlines())} lines: {text[:200]}"
        if LIBRARY in text:
            return f"{type(error).__name__} with a frame of the library: {text[:200]}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    if time.perf_counter() - start > 5:
        return f"{time.perf_counter() - start:.0f} s"
    return None


def mutations(arguments, named, wrong):
    """A right call with one argument replaced, each by each wrong value, or left out; and with one too many."""
    for k in range(len(arguments)):
        for value in wrong:
            yield [*arguments[:k], value, *arguments[k + 1 :]], named
        yield [*arguments[:k], *arguments[k + 1 :]], named
    for name in named:
        for value in wrong:
            yield arguments, {**named, name: value}
    yield [*arguments, None], named
    yield arguments, {**named, "no_such_argument": 1}


@pytest.fixture
def bounded(tmp_path, monkeypatch):
    """A folder to fall into, no kernels to compile, and an end to memory and to patience."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        if sys.platform.startswith("linux"):
            import resource

            with open("/proc/self/status") as file:
                used = next(int(line.split()[1]) for line in file if line.startswith("VmSize")) << 10
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_AS, before)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(interpreted())
        faulthandler.dump_traceback_later(120, exit=True)  # a hang ends the run and says where
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


def wrong_inputs(names, share):
    """What is wrong with how calls of these names end, a random share of all calls with one wrong argument."""
    found = []
    for name in names:
        call, arguments, named, use = CALLS[name]
        try:
            use(call(*arguments, **named)) if name not in FAILING else None
        except ImportError as error:  # matplotlib is in no extra of the tests
            assert "pip install 'jitloader[" in str(error)
        draw = random.Random(name)
        for given, also in mutations(arguments, named, WRONG):
            if draw.random() < share and (told := complaint(call, given, also, use)):
                changed = {k: v for k, v in also.items() if v is not named.get(k)}
                found.append(f"{name}{tuple(given)!r:.80} {changed!r:.80}: {told}")
    return found


FAILING = {"open", "save", "cache"}  # calls whose right arguments lead nowhere: nothing is to be written


@pytest.mark.parametrize("share", [0.12, pytest.param(1.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("part", range(4))
def test_wrong_input_is_a_documented_error(bounded, part, share):
    """Any argument of any public function replaced by any wrong value: it works, or fails as documented, soon and shortly."""
    assert wrong_inputs(list(CALLS)[part::4], share) == []


def test_the_readme_tells_how_many():
    """The numbers of the README's table are those of the calls above."""
    counts = []
    for share in (0.12, 1.0):
        draws = ((random.Random(name), mutations(*CALLS[name][1:3], WRONG)) for name in CALLS)
        counts.append(sum(draw.random() < share for draw, calls in draws for _ in calls))
    assert "{:,} ({:,}); (20,000)".format(*counts) in Path(__file__).parents[1].joinpath("README.md").read_text()


@pytest.mark.nightly
def test_pairs_of_wrong_input(bounded):
    """The same with two arguments replaced, 20,000 random pairs."""
    draw, found = random.Random(0), []
    for _ in range(20_000):
        name = draw.choice(list(CALLS))
        call, arguments, named, use = CALLS[name]
        places = [*range(len(arguments)), *named]
        given, also = list(arguments), dict(named)
        for at in draw.sample(places, min(2, len(places))):
            (given if isinstance(at, int) else also)[at] = draw.choice(WRONG)
        faulthandler.dump_traceback_later(120, exit=True)
        if told := complaint(call, given, also, use):
            found.append(f"{name}{tuple(given)!r:.80} {also!r:.80}: {told}")
    assert found == []


def test_every_public_function_is_tried():
    """A new public name gets a line in the table of calls."""
    public = {n for n, v in vars(jl).items() if callable(v) and not n.startswith("_") and not inspect.ismodule(v)}
    public -= {"annotations"}
    assert public <= {name.split()[0] for name in CALLS} | UNCHECKED | NO_CALLS
    methods = {n for n, v in vars(jl.Dataset).items() if callable(v) and not n.startswith("_")}
    inner = {"verify", "explain", "finish", "gather", "failed", "positions", "program", "by_value", "describe"}
    assert methods <= set(CALLS) | inner
