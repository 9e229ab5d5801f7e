"""Random everything: whatever is drawn, a loader gives what slow twins say, or an error of a documented kind."""

import functools
import itertools
import json
import warnings

import naive_orders
import naive_stages as naive
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from naive_access import interpreted
from test_stages import CASES, same, sample
from test_stages_fusion import IMAGES, POOL

import jitloader as jl
from jitloader import compose, rng
from jitloader import loader as loader_module
from jitloader.rng import epoch_key
from jitloader.samples import records

QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}

# -- few kernels, everything else drawn -------------------------------------------------------------------------------


@functools.cache
def images(n):
    """Pixels through three stages with draws, labels as they are."""
    x = np.random.default_rng(n).integers(0, 256, (n, 6, 7, 3), dtype="u1")
    data = jl.Dataset(x=x, i=np.arange(n)).map(
        "x", jl.random_crop(4, padding=1), jl.random_flip(), jl.normalize(128, 64), jl.channels_first()
    )

    def twin(row, key):
        out = naive.window(x[row], rng.subkey(key, 0), 4, 1, 0)
        out = naive.flip(out, rng.subkey(key, 1), 0.5, 1)
        return ((out.astype("f8") - 128) / 64).astype("f4").transpose(2, 0, 1)

    return data, lambda rows, keys: {"x": np.stack([twin(r, k) for r, k in zip(rows, keys, strict=True)]), "i": rows}


@functools.cache
def numbers(n):
    """Every other column of a table from the last, a column read backwards, numbers in the other byte order."""
    draw = np.random.default_rng(n)
    x, y, z = draw.normal(size=(n, 6))[:, ::-2], np.arange(2 * n)[::-2], draw.integers(0, 9, n).astype(">i4")
    x[draw.random((n, 3)) < 0.2] = np.nan
    data = jl.Dataset(x=x, y=y, z=z, i=np.arange(n)).map("x", jl.fill_nan(-1))
    filled = np.where(np.isnan(x), -1.0, x)
    return data, lambda rows, keys: {"x": filled[rows], "y": y[rows], "z": z[rows], "i": rows}


@functools.cache
def texts(n):
    """Rows of different lengths: as they are, and padded to the longest of the batch."""
    sizes = np.random.default_rng(n).integers(0, 5, n)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    values = np.arange(offsets[-1] + 1)[: offsets[-1]]
    data = jl.Dataset(x=jl.ragged(values, offsets), p=jl.ragged(values, offsets), i=np.arange(n)).map(
        "p", jl.pad_to_longest(value=-7)
    )

    def batch(rows, keys):
        each = [values[offsets[r] : offsets[r + 1]] for r in rows]
        most = max(map(len, each))
        padded = [np.pad(e, (0, most - len(e)), constant_values=-7) for e in each]
        return {"x": np.concatenate(each), "offsets": np.cumsum([0, *map(len, each)]), "p": np.stack(padded), "i": rows}

    return data, batch


@functools.cache
def series(n):
    """Windows over steps: the row is where one begins."""
    steps = np.arange(2.0 * n + 3).astype("f4")
    data = jl.Dataset({**jl.windows(steps, a=slice(0, 3), b=slice(3, 4), stride=2), "i": np.arange(n)})
    return data, lambda rows, keys: {
        "a": steps[2 * rows[:, None] + np.arange(3)],
        "b": steps[2 * rows[:, None] + [3]],
        "i": rows,
    }


ORDERS = {
    "sequential": lambda n: jl.sequential,
    "shuffled": lambda n: jl.shuffled,
    "blocks": lambda n: jl.blocks(3, 2),
    "weighted": lambda n: jl.weighted(np.arange(1.0, n + 1)),
    "indices": lambda n: jl.indices(np.arange(2 * n) % n),
}
KERNELS = [*itertools.product([numbers], ORDERS), (images, "shuffled"), (texts, "shuffled"), (series, "blocks")]


def batches_of(rows, start, size, rank, world, tail, drop_last):
    """What a rank gets of an epoch from a position on: every world-th of its rows, cut into batches."""
    left = len(rows) - start
    if tail == "keep":
        mine = rows[start + rank :: world]
    else:
        count = left // world if tail == "drop" else -(-left // world)
        mine = [rows[(start + rank + world * k) % len(rows)] for k in range(count)]
    cut = [mine[k : k + size] for k in range(0, len(mine), size)]
    return cut[:-1] if drop_last and cut and len(cut[-1]) < size else cut


def arrays(batch):
    """The arrays of a batch by name, of a ragged field its values and offsets."""
    found = {}
    for name, value in batch._asdict().items():
        if isinstance(value, jl.Ragged):
            found |= {name: value.values, "offsets": value.offsets}
        else:
            found[name] = value
    return found


def loader_is_its_twin(draw, least):
    """An epoch of one rank, stopped anywhere, and its rest on other ranks, sizes and threads; then a bit of the next."""
    make, name = draw(some.sampled_from(KERNELS))
    n = draw(some.integers(least, 40))
    data, twin = make(n)
    order, seed, number = ORDERS[name](n), draw(some.integers(0, 2**64 - 1)), draw(some.integers(0, 5))
    start, stop = 0, None
    state = None
    for part in range(2):
        size, world = draw(some.integers(1, 12)), draw(some.integers(1, 4))
        rank = draw(some.integers(0, world - 1))
        tail, drop_last = draw(some.sampled_from(["keep", "drop", "wrap"])), draw(some.booleans())
        how = {"threads": draw(some.integers(1, 3)), "prefetch": draw(some.integers(0, 3))}
        positions = order.plan(n, seed, number)
        epoch = naive_orders.one_by_one(positions, range(positions.length))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ranks that get nothing
            loader = jl.Loader(
                data, size, order=order, seed=seed, rank=rank, world_size=world, tail=tail, drop_last=drop_last, **how
            )
        if state is None:
            loader.epoch = number
        else:
            loader.load_state_dict(json.loads(json.dumps(state)))
        wanted = batches_of(epoch, start, size, rank, world, tail, drop_last)
        stop = draw(some.integers(0, len(wanted)))
        key = epoch_key(seed, number)
        batches = iter(loader)
        for rows in wanted[: stop if part == 0 else None]:
            found = arrays(next(batches))
            expected = twin(np.array(rows), [rng.subkey(key, r) for r in rows])
            assert found.keys() == expected.keys()
            for field, value in expected.items():
                assert found[field].shape == value.shape
                assert np.array_equal(found[field], value), (field, rows)
        if part:
            assert next(batches, None) is None
            assert loader.state_dict()["epoch"] == number + 1
            return
        state = loader.state_dict()
        batches.close()
        length = len(epoch)
        start = min(stop * size * world, length) if stop else 0
        rest = length - start
        most = {"keep": -(-rest // world), "drop": rest // world, "wrap": -(-rest // world)}[tail]  # of any rank
        if start and (not most or (drop_last and most < size)):
            number, start = number + 1, 0
        assert (state["epoch"], state["position"]) == (number, start)


@settings(max_examples=1_000, **QUICK)
@given(data=some.data())
def test_loaders_are_their_twins(data):
    """Any data, order, ranks, sizes, threads and point to go on from: rows, bits and states are as the twins say."""
    loader_is_its_twin(data.draw, 2)  # a data set of one row has kernels of its own


@pytest.mark.nightly
@settings(max_examples=20_000, **QUICK)
@given(data=some.data())
def test_loaders_are_their_twins_at_night(data):
    """The same, twenty times as often, with units of one batch and of many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "UNIT", data.draw(some.sampled_from([1, 500, 4 << 20])))
        loader_is_its_twin(data.draw, 1)


# -- any chain, in plain Python and compiled --------------------------------------------------------------------------

EXACT = {case.name: case for case in CASES if case.near == "exact" and case.name not in ("log1p", "contrast")}
LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim > 1 else np.repeat(x, 2)[::2],
    "other bytes": lambda x: x.astype(x.dtype.newbyteorder()),
}
SHAPES = {**IMAGES, "row": (8,), "number": (), "series": (9, 3)}
DTYPES = ["uint8", "int16", "int32", "int64", "uint64", "float32", "float64", "bool"]


def fits(case, shape):
    """Whether a twin is meant for samples of this shape."""
    image = len(shape) == 2 or (len(shape) == 3 and (shape[0] in (1, 3)) != (shape[2] in (1, 3, 4)))
    return {"any": True, "axis": shape != (), "series": len(shape) in (1, 2), "one axis": len(shape) == 1,
            "image": image, "square": image and len({n for n in shape if n > 4}) == 1}[case.shapes]  # fmt: skip


def chain(draw, x):
    """A data set over an array with any stages that fit where they stand, and the slow way of each."""
    data, ways = jl.Dataset(x=x, i=np.arange(len(x))), []
    for _ in range(draw(some.integers(1, 6))):
        spec = data.spec["x"]
        name = draw(some.sampled_from([*EXACT, *map(str, range(len(POOL)))]))
        case = EXACT.get(name)
        if case is not None and not fits(case, spec.shape):
            continue
        stage = POOL[int(name)] if case is None else case.stage(spec.shape)
        if stage.user and spec.dtype == np.uint64:  # beside plain numbers it is signed to Numba, and exact to Python
            continue
        try:
            longer = data.map("x", stage)
        except jl.PipelineError:
            continue
        twin = case.twin if case is not None and spec.dtype.name in case.dtypes else None
        data, ways = longer, [*ways, twin]
    return data, ways


def native(x):
    """Numbers in the machine's byte order: where stages only move them, they keep their own."""
    return np.asarray(x).astype(np.asarray(x).dtype.newbyteorder("="))


def slow(data, ways, x, row, key):
    """A row through its stages one by one: by twins where there are, else alone in plain Python."""
    for step, twin in zip(data.steps, ways, strict=True):
        if twin is not None:
            with np.errstate(all="ignore"):
                x = np.asarray(twin(native(x), rng.subkey(rng.subkey(key, row), step.salt))).astype(
                    step.bound[0].out.dtype
                )
        else:
            whole = records(np.broadcast_to(x, (row + 1, *x.shape)))
            x = np.asarray(compose.sample_of({"x": whole}, (step,), ("x",), row, key)["x"])
    return x


def chain_is_its_stages(draw):
    """Batches of any chain over any array are its stages one after the other."""
    n, dtype = draw(some.integers(1, 4)), draw(some.sampled_from(DTYPES))
    shape = SHAPES[draw(some.sampled_from(list(SHAPES)))]
    first = draw(some.integers(0, 2**32))
    x = np.stack([sample(shape, dtype, first + k) for k in range(n)])
    laid = LAYOUTS[draw(some.sampled_from(list(LAYOUTS)))](x)
    data, ways = chain(draw, laid)
    seed, number = draw(some.integers(0, 2**64 - 1)), draw(some.integers(0, 3))
    loader = jl.Loader(data, draw(some.integers(1, 5)), shuffle=True, seed=seed, prefetch=0)
    loader.epoch = number
    try:
        found = {int(i): value for batch in loader for i, value in zip(batch.i, batch.x, strict=True)}
    except jl.PipelineError as error:  # a value that a stage refuses
        assert "does not fit" in str(error) or "cannot pass the value stages" in str(error)
        return
    assert sorted(found) == list(range(n))
    for row in range(n):
        try:
            wanted = slow(data, ways, laid[row : row + 1].reshape(shape), row, epoch_key(seed, number))
        except compose.RowError:  # an element that a later stage cuts off: alone the stage refuses it
            continue
        assert same(native(found[row]), native(wanted))


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_chains_are_their_stages(count):
    """Any chain of stages and twins, shape, dtype and layout, with the loop as plain Python runs it."""

    @settings(max_examples=count, **QUICK)
    @given(data=some.data())
    def run(data):
        chain_is_its_stages(data.draw)

    with interpreted():
        run()


@pytest.mark.nightly
def test_compiled_chains_are_their_stages():
    """The same as machine code: a second or two an example."""

    @settings(max_examples=250, **QUICK)
    @given(data=some.data())
    def run(data):
        chain_is_its_stages(data.draw)

    run()
