"""Stages that mix rows: a partner drawn by key, the whole batch in user code, and several fields under one draw."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import jitloader as jl
from jitloader import rng
from jitloader.stages import mix

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (40, 6, 8, 3), dtype="uint8")
DATA = jl.Dataset(image=IMAGES, label=np.arange(40) % 5).map("label", jl.one_hot(5))
AUGMENTED = DATA.map("image", jl.random_flip(), jl.gaussian_noise(3))
CHAINS = {
    "mixup": AUGMENTED.map("image", jl.scale()).map(("image", "label"), jl.mixup(0.4)).map("image", jl.channels_first()),
    "cutmix": AUGMENTED.map(("image", "label"), jl.cutmix()).map("image", jl.random_flip(), jl.scale()),
    "both": AUGMENTED.map(("image", "label"), jl.cutmix(2)).map("image", jl.scale()).map(("image", "label"), jl.mixup(3)),
    "to": AUGMENTED.map("image", jl.scale()).map(("image", "label"), jl.mixup(1), to=("mixed", "soft")),
}


def equal(a, b):
    """Whether two batches or samples have the same bits."""
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True))


def rows_of(loader):
    """Give all rows that a loader gives, in order, as bytes."""
    return [tuple(np.asarray(a[j]).tobytes() for a in batch) for batch in loader for j in range(len(batch[0]))]


@pytest.mark.parametrize("name", ["mixup", "to", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("cutmix", "both"))])
def test_a_mixed_row_is_the_same_compiled_and_plain(name):
    """A batch has the bits of each row run in plain Python, alone; the last of the trace is the row."""
    data = CHAINS[name]
    whole = data[:]

    assert all(equal([a[i] for a in whole], data[i]) for i in range(40))
    last = data.trace(7)[-1][1]._asdict()
    assert equal([last[name] for name in data.fields], data[7])


@pytest.mark.parametrize("how", [{"batch_size": 7}, {"batch_size": 40, "threads": 2}])
def test_a_mixed_row_knows_no_batch(how):
    """Neither batch size nor threads nor prefetch change a row; ranks part the same rows; a resumed run goes on alike."""
    data = CHAINS["cutmix"]
    wanted = rows_of(jl.Loader(data, 10, shuffle=True, seed=3))

    assert rows_of(jl.Loader(data, shuffle=True, seed=3, **how)) == wanted
    for rank in range(2):
        assert rows_of(jl.Loader(data, shuffle=True, seed=3, rank=rank, world_size=2, **how)) == wanted[rank::2]


def test_mixup_by_hand():
    """A row is lam of itself and 1 - lam of its partner, which came through the steps before with its own draws."""
    before, after = AUGMENTED.map("image", jl.scale()), CHAINS["mixup"]
    salt = after.steps[-2].salt
    for i in range(10):
        key = rng.subkey(rng.subkey(rng.epoch_key(0, 0), i), salt)
        other, part = rng.randint(key, 0, 40), mix._beta(key, 0.4)
        for name in ("image", "label"):
            a, b = (np.asarray(getattr(before[k], name), np.float64) for k in (i, other))
            wanted = (part * a + (1 - part) * b).astype(np.float32)
            assert equal([wanted.transpose(2, 0, 1) if wanted.ndim == 3 else wanted], [getattr(after[i], name)])


def test_cutmix_by_hand():
    """Each pixel is the row's or its partner's, those of the partner a box, and the label tells how many."""
    data = DATA.map(("image", "label"), jl.cutmix())
    boxes = set()
    for i in range(40):
        key = rng.subkey(rng.subkey(rng.epoch_key(0, 0), i), data.steps[-1].salt)
        other, (top, bottom, left, right) = rng.randint(key, 0, 40), mix._box(key, 1.0, 6, 8)
        wanted = IMAGES[i].copy()
        wanted[top:bottom, left:right] = IMAGES[other][top:bottom, left:right]
        part = 1 - (bottom - top) * (right - left) / 48
        weights = part * np.eye(5)[i % 5] + (1 - part) * np.eye(5)[other % 5]
        assert equal([wanted], [data[i].image])
        assert np.allclose(data[i].label, weights, atol=1e-7)
        boxes.add((top, bottom, left, right))
    assert len(boxes) > 10


@pytest.mark.parametrize("alpha", [0.001, 0.2, 1.0, 5.0])
def test_beta(alpha):
    """The parts have the mean and variance of Beta(alpha, alpha), and are never NaN."""
    drawn = np.array([mix._beta(rng.mix(k), alpha) for k in range(4000)])
    variance = 1 / (4 * (2 * alpha + 1))

    assert (drawn >= 0).all() and (drawn <= 1).all()
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(variance / 4000)
    assert abs(drawn.var() - variance) < 0.06 * variance


def test_partners_are_uniform():
    """Over many epochs each row is the partner of a row about equally often: chi-square of 40 cells."""
    salt, count = 3, np.zeros(40)
    for epoch in range(100):
        for row in range(40):
            key = rng.subkey(rng.subkey(rng.epoch_key(1, epoch), row), salt)
            count[rng.randint(key, 0, 40)] += 1
    assert ((count - 100) ** 2 / 100).sum() < 80


def fails_on_30(x):
    return x // (x - 30)


def test_the_row_of_a_failure_is_the_partner():
    """What fails on a partner is told of the partner's own row."""
    data = jl.Dataset(x=np.arange(40)).map("x", fails_on_30, jl.cast("float32")).map("x", jl.mixup(1))
    salt = data.steps[-1].salt
    row, epoch = next(
        (i, e) for e in range(50) for i in range(30)
        if rng.randint(rng.subkey(rng.subkey(rng.epoch_key(0, e), i), salt), 0, 40) == 30
    )  # fmt: skip
    with pytest.raises(jl.PipelineError, match=rf"'fails_on_30' on field 'x', row 30, epoch {epoch}: ZeroDivisionError"):
        data.sample(row, epoch=epoch)


# -- batch stages -----------------------------------------------------------------------------------------------------


@jl.batch_stage
def blend(j, images, labels, image, label, key):
    other, part = jl.randint(key, 0, len(images)), jl.uniform(key, 1)
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            for c in range(image.shape[2]):
                image[y, x, c] = part * np.float64(images[j, y, x, c]) + (1 - part) * np.float64(images[other, y, x, c])
    for k in range(label.size):
        label[k] = part * np.float64(labels[j, k]) + (1 - part) * np.float64(labels[other, k])


@jl.batch_stage
def ahead(j, xs, x, key):
    x[0] = xs[j + 1]


BLENDED = AUGMENTED.map("image", jl.scale()).map(("image", "label"), blend)


def test_a_batch_stage_by_hand():
    """It gets the batch as it came and the key of each row; a single row is a batch of one."""
    before, after = AUGMENTED.map("image", jl.scale())[5:25], BLENDED[5:25]
    for j, row in enumerate(range(5, 25)):
        key = rng.subkey(rng.subkey(rng.epoch_key(0, 0), row), max(s.salt for s in BLENDED.steps) + 1)
        other, part = rng.randint(key, 0, 20), rng.uniform(key, 1)
        for a, b in zip(before, after, strict=True):
            wanted = part * a[j].astype(np.float64) + (1 - part) * a[other].astype(np.float64)
            assert equal([wanted.astype(np.float32)], [b[j]])
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(BLENDED[3], AUGMENTED.map("image", jl.scale())[3], strict=True))
    assert equal(BLENDED[[3]].image, BLENDED[3].image[None]) and BLENDED.trace(3)[-1][0] == "blend"


def test_a_batch_stage_knows_no_threads_and_resumes():
    """Threads and prefetch change nothing, and a resumed run gives the same batches."""
    first = jl.Loader(BLENDED, 8, shuffle=True, seed=3, threads=1)
    batches = iter(first)
    head = [next(batches), next(batches)]
    state = json.dumps(first.state_dict())
    rest = list(batches)
    again = jl.Loader(BLENDED, 8, shuffle=True, seed=3, threads=2, prefetch=4)

    assert all(equal(a, b) for a, b in zip(again, head + rest, strict=True))
    again.load_state_dict(json.loads(state))
    assert all(equal(a, b) for a, b in zip(again, rest, strict=True))


def test_batch_stages_and_apply_follow():
    """Other batch stages and apply may follow, each on what came before."""
    data = DATA.keep("label").map("label", centre, centre).apply(lambda batch: {"label": batch.label + 1})
    assert np.allclose(data[:20].label.mean(0), 1, atol=1e-6)


@jl.batch_stage
def centre(j, xs, x, key):
    for k in range(x.size):
        total = 0.0
        for i in range(len(xs)):
            total += xs[i, k]
        x[k] = xs[j, k] - total / len(xs)


def text_of(run):
    """Give what a run raises, without the place of this file."""
    with pytest.raises((jl.PipelineError, TypeError, ValueError)) as caught:
        run()
    return str(caught.value).replace(__file__, "FILE")


SCALAR = jl.Dataset(x=np.arange(12.0), half=np.zeros((12, 3), "float16"), i=np.arange(12))
REFUSED = [
    (lambda: jl.mixup(0), "mixup: alpha must be above 0, got 0"),
    (lambda: jl.cutmix(-1), "cutmix: alpha must be above 0, got -1"),
    (
        lambda: SCALAR.map("i", jl.mixup(1)),
        "stage 0 'mixup(1)' on field 'i': mixup(1) mixes floats: one_hot labels, and scale or cast numbers before it; got int64 ()",
    ),
    (
        lambda: SCALAR.map("x", jl.cutmix()),
        "stage 0 'cutmix(1)' on field 'x': cutmix(1) takes an image among its fields, "
        'as map(("image", "label"), cutmix(1)); got float64 ()',
    ),
    (
        lambda: SCALAR.map("x", jl.random_apply(jl.mixup(1))),
        "stage 0 'random_apply(mixup(1), 0.5)' on field 'x': mixup(1) mixes two rows, which random_apply cannot draw: "
        "link it by map itself; got float64 ()",
    ),
    (lambda: SCALAR.map("x", ahead)[3:6], "stage 0 'ahead' on field 'x', row 5, epoch 0: IndexError: index 3 is out of "
     "bounds for axis 0 with size 3\n  in FILE line LINE, on place 2 of a batch of 3"),
    (lambda: SCALAR.map("x", ahead, jl.clip(0, 1)), "stage 1 'clip(0, 1)': after the batch stage 'ahead' only batch "
     "stages and apply may follow; link it before"),
    (lambda: SCALAR.map("x", ahead).statistics("x"), "statistics runs a row at a time: take it before the batch stage 'ahead'"),
    (lambda: SCALAR.map("half", centre), "stage 0 'centre' on field 'half': a kernel cannot compute with float16; cast before it"),
    (lambda: SCALAR.map(("x", "i"), ahead), "stage 0 'ahead' on fields 'x', 'i': ahead takes 1 field(s) at once; "
     "got float64 (), int64 ()"),
    (lambda: SCALAR.map({"x": ahead}), "batch stage 'ahead' takes fields as map((a, b), stage)"),
    (lambda: SCALAR.map({}), "map takes at least one field, as map({'image': a, 'mask': b})"),
    (lambda: SCALAR.map({"x": jl.clip(0, 1)}, jl.clip(0, 1)), "map takes a dict {field: stage} alone, as map({'image': a, 'mask': b})"),
    (lambda: SCALAR.map({"x": jl.clip(0, 1), ("x", "i"): jl.clip(0, 1)}), "map takes a dict {field: stage} with each "
     "field once, got ['x', ('x', 'i')]"),
    (lambda: jl.batch_stage(abs), "batch_stage takes a function (j, a batch for each field, a target for each field, key), got abs"),
]  # fmt: skip


@pytest.mark.parametrize("run, wanted", REFUSED, ids=range(len(REFUSED)))
def test_refused(run, wanted):
    """What does not fit is told where it is linked; what fails on a row names the row."""
    wanted = wanted.replace("LINE", str(ahead.bind.__code__ and int(ahead.where.rpartition(" ")[2]) + 2))
    assert text_of(run).partition(" [")[0] if " [FILE" in text_of(run) else text_of(run)
    assert text_of(run).partition(" [FILE")[0] == wanted


# -- several fields under one draw ------------------------------------------------------------------------------------


def test_a_dict_of_stages_shares_draws():
    """An image and its mask get the same window and the same flip, each by its own rule."""
    masks = IMAGES[..., 0]
    data = jl.Dataset(image=masks, mask=masks).map(
        {
            "image": (jl.random_crop(6, padding=2), jl.random_flip()),
            "mask": [jl.random_crop(6, padding=2, fill=9), jl.random_flip()],
        }
    )
    alone = jl.Dataset(x=masks).map("x", jl.random_crop(6, padding=2), jl.random_flip())[:].x
    nearest = jl.Dataset(x=masks).map("x", jl.random_crop(6, padding=2, fill=9), jl.random_flip())[:].x

    assert equal(data[:], (alone, nearest))
    assert len({step.salt for step in data.steps}) == 2
    later = data.map("image", jl.random_flip())
    assert later.steps[-1].salt == 2


# -- plain Python, warm processes, many axes --------------------------------------------------------------------------

WARM = """
import sys, numpy as np, jitloader as jl
x = (np.arange(2 * 8 * 8 * 3) % 251).astype("uint8").reshape(2, 8, 8, 3)
data = jl.Dataset(image=x, label=np.arange(2)).map("label", jl.one_hot(2))
data = data.map("image", jl.brightness(0.5), jl.standardize_sample())
data = data.map(("image", "label"), jl.mixup(2.0))
print([float(a.sum().round(3)) for a in data[:]], [e.origin for e in jl.compile_events], "numba" in sys.modules)
"""
PLAIN = """
import numpy as np, jitloader as jl
def bad(x):
    return 0 * (10 // (x - 3))
data = jl.Dataset(x=np.arange(8, dtype="uint8").reshape(8, 1, 1), u=np.arange(8, dtype="uint64") + (1 << 63))
flipped = data.map(("x", "u"), jl.cast("float64")).map("x", jl.random_flip(p=0.5), jl.gaussian_noise(1)).map(("x", "u"), jl.mixup(2))
print([sorted(map(float, np.concatenate([b[k].ravel() for b in jl.Loader(flipped, 3, shuffle=True)]))) for k in (0, 1)])
for run in (lambda: list(jl.Loader(data.map("x", bad), 4)), lambda: data.map("x", jl.elementwise(lambda x: x * 100))[:]):
    try:
        run()
    except jl.PipelineError as error:
        print(str(error).splitlines()[0])
print(jl.compile_events)
"""


def subprocess_text(code, folder, **env):
    """Give what a script prints in a process of its own; warnings are errors."""
    full = {**os.environ, "JITLOADER_CACHE_DIR": str(folder), **env}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, env=full)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_a_warm_first_batch_needs_no_numba(tmp_path):
    """Sample stages and functions of the C library are linked without it too."""
    cold, warm = subprocess_text(WARM, tmp_path), subprocess_text(WARM, tmp_path)
    assert cold.partition("]")[0] == warm.partition("]")[0]
    assert cold.endswith("['compiled', 'compiled'] True\n") and warm.endswith("['disk', 'disk'] False\n")


def test_without_jit_all_is_plain_python(tmp_path):
    """NUMBA_DISABLE_JIT gives the same batches and the same errors, and compiles nothing."""
    told = subprocess_text(PLAIN, tmp_path), subprocess_text(PLAIN, tmp_path, NUMBA_DISABLE_JIT="1")
    assert told[0].splitlines()[0] == told[1].splitlines()[0]
    assert told[1].splitlines()[1:] == [
        "stage 0 'bad' on field 'x', row 3, epoch 0: ZeroDivisionError: integer division or modulo by zero",
        "stage 0 '<lambda>' on field 'x', row 3, epoch 0: a result does not fit uint8",
        "[]",
    ]


def test_samples_of_many_axes():
    """Maps of index stages have room for each axis."""
    x = np.arange(3 * 2**11).reshape(3, *[2] * 11)
    data = jl.Dataset(x=x).map("x", jl.random_flip(p=1, axis=10), jl.random_flip(p=1, axis=2))

    assert (data[:].x == np.flip(x, (11, 3))).all() and (data[1].x == data[:].x[1]).all()


def test_log1p_is_within_an_ulp():
    """Of float32 and float64, from subnormal numbers to the largest, against a wider type; the ends are IEEE's."""
    powers = np.concatenate([10.0 ** DRAW.uniform(-320, 300, 20000), DRAW.uniform(-1, 1, 20000), -(10.0 ** DRAW.uniform(-20, 0, 20000))])
    for dtype, most in (("float32", 1.0), ("float64", 2.0)):
        with np.errstate(over="ignore", under="ignore"):
            x = powers.astype(dtype)
            x = x[np.isfinite(x) & (x > -1)]
            wanted = np.log1p(x.astype(np.longdouble))
        got = jl.Dataset(x=x).map("x", jl.log1p())[:].x
        assert (np.abs(got - wanted) <= most * np.spacing(np.abs(got))).all()
    ends = np.array([-0.0, -1.0, -2.0, np.inf, -np.inf, np.nan])
    with np.errstate(all="ignore"):
        assert jl.log1p()(ends).tobytes() == np.array([-0.0, -np.inf, np.nan, np.inf, np.nan, np.nan]).tobytes()
