"""Chunked sources: HDF5 and Zarr datasets decoded when their rows are read, against what their own libraries give."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import threading
import time

import numpy as np
import pytest

import jitloader as jl
from jitloader import filling, residency, storage
from jitloader.storage import chunked

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

ROWS = 1003
X = np.random.default_rng(0).integers(0, 50, (ROWS, 6, 5)).astype("int32")


def chunks_of(data, field="x"):
    """Give the memory below a field."""
    return storage.mapping(data.sources[field].parts[0].array).map


def until(true):
    """Wait for what threads do."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def plain(monkeypatch):
    """Run kernels as plain Python: the same source, and nothing to compile."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")


def every(loader):
    """Give all batches of an epoch as one array a field."""
    return [np.concatenate(column) for column in zip(*loader, strict=True)]


LAYOUTS = {
    "gzip": {"chunks": (64, 6, 5), "compression": "gzip"},
    "shuffle": {"chunks": (64, 6, 5), "compression": "gzip", "shuffle": True},
    "lzf": {"chunks": (64, 6, 5), "compression": "lzf"},
    "checked": {"chunks": (64, 6, 5), "compression": "gzip", "fletcher32": True},
    "plain": {"chunks": (100, 6, 5)},
    "columns": {"chunks": (50, 4, 3), "compression": "gzip", "shuffle": True},
    "large columns": {"chunks": (256, 4, 3), "compression": "gzip"},
    "one row": {"chunks": (1, 6, 5)},
    "beyond the end": {"chunks": (ROWS + 500, 6, 5), "maxshape": (None, 6, 5)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hdf5_layouts(tmp_path, layout):
    """Every filter and shape of chunks gives what h5py gives: rows in order, at random, and one by one."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=X, **LAYOUTS[layout])
    data = jl.open(tmp_path / "d.h5")

    assert np.array_equal(data[777].x, X[777]) and np.array_equal(data[-5:].x, X[-5:])
    assert np.array_equal(every(jl.Loader(data, 100))[0], X)
    rows = np.random.default_rng(1).permutation(ROWS)
    assert np.array_equal(every(jl.Loader(data, 100, order=rows))[0], X[rows])


ZARRS = {
    "v2": {"zarr_format": 2, "chunks": (64, 6, 5)},
    "v3": {"zarr_format": 3, "chunks": (64, 4, 3)},
    "sharded": {"zarr_format": 3, "chunks": (32, 6, 5), "shards": (128, 6, 10)},
    "plain": {"zarr_format": 3, "chunks": (100, 6, 5), "compressors": None},
    "big": {"zarr_format": 2, "chunks": (64, 6, 5), "dtype": ">i4"},
}


@pytest.mark.parametrize("layout", ZARRS)
@pytest.mark.skipif(not hasattr(zarr, "create_array"), reason="needs zarr 3 to write version 3")
def test_zarr_layouts(tmp_path, layout):
    """Both versions, shards and codecs give what zarr gives; an array alone is a field of its folder's name."""
    made = {"dtype": X.dtype, **ZARRS[layout]}
    array = zarr.create_array(store=str(tmp_path / "x.zarr"), shape=X.shape, **made)
    array[...] = X
    data = jl.open(tmp_path / "x.zarr")

    assert data.fields == ("x",) and data.spec["x"].dtype == np.dtype(made["dtype"])
    rows = np.random.default_rng(1).permutation(ROWS)
    assert np.array_equal(every(jl.Loader(data, 100, order=rows))[0], X[rows])
    assert np.array_equal(jl.Dataset(image=tmp_path / "x.zarr")[5:9].image, X[5:9])


def test_zarr_group(tmp_path, plain):
    """The arrays of a group are fields, those in groups inside it with a path for a name."""
    group = zarr.open_group(str(tmp_path / "g"), mode="w")
    wanted = {"a": X, "deep/b": np.arange(ROWS).astype("float64")}
    for name, array in wanted.items():
        create = getattr(group, "create_array", None) or group.create_dataset  # zarr 3, zarr 2
        create(name, shape=array.shape, chunks=(97, *array.shape[1:]), dtype=array.dtype)[...] = array
    data = jl.open(tmp_path / "g")

    assert data.fields == ("a", "deep/b")
    for found, array in zip(every(jl.Loader(data, 64)), wanted.values(), strict=True):
        assert np.array_equal(found, array)


def test_handles_of_h5py_and_zarr(tmp_path, plain):
    """A dataset of h5py or an array of zarr is a field as its file is: mapped, or decoded when it is read; pickled by place."""
    flat = X[:, 0, 0].copy()
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_group("g").create_dataset("x", data=X, chunks=(64, 6, 5), compression="gzip")
        file.create_dataset("flat", data=flat)
        file.create_dataset("t", data=np.tile(flat, 4), chunks=(500,))
    array = zarr.open_group(str(tmp_path / "z"), mode="w").create_array(
        "a", shape=X.shape, chunks=X.shape, dtype=X.dtype
    )
    array[...] = X
    with h5py.File(tmp_path / "d.h5", "r") as file:
        data = jl.Dataset(x=file["g/x"], flat=file["flat"], z=array)
        cut = jl.Dataset(jl.windows(file["t"], x=slice(0, 30), stride=10))
    for field, whether in {"x": True, "flat": False, "z": True}.items():
        below = storage.mapping(data.sources[field].parts[0].array)
        assert below is not None and isinstance(below.map, storage.Map)
        assert storage.is_chunked(data.sources[field].parts[0].array) == whether
    for one in (data, pickle.loads(pickle.dumps(data))):
        found = one[:]
        assert np.array_equal(found.x, X) and np.array_equal(found.flat, flat) and np.array_equal(found.z, X)
    assert chunks_of(cut).decoded == 0 and np.array_equal(cut[50].x, np.tile(flat, 4)[500:530])


def test_groups_are_no_fields(tmp_path):
    """A file or a group, which would be read as the list of its names, is refused with the remedy."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_group("g")["x"] = X
        group = zarr.open_group(tmp_path / "z", mode="w")
        for given, told in ((file, "an h5py File"), (file["g"], "an h5py Group"), (group, "a zarr Group")):
            text = f"field 'x' is {told}, which holds several arrays: give one of them, as file['name']"
            with pytest.raises(TypeError, match=re.escape(text)):
                jl.Dataset(x=given)


def test_handles_that_are_read_whole(tmp_path, plain):
    """What may lie in memory alone, open for writing or in a store of no folder, is read whole, and large ones say so."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        small = file.create_dataset("x", data=X, chunks=(64, 6, 5))
        assert np.array_equal(jl.Dataset(x=small)[:].x, X)
        large = file.create_dataset("large", data=np.arange(200_000), chunks=(1000,))
        with pytest.warns(
            UserWarning, match=r"field 'x': this h5py Dataset is read whole, 1,600,000 bytes; .* mode=\"r\""
        ):
            assert jl.Dataset(x=large)[77_777].x == 77_777
    array = zarr.create_array(store={}, shape=(200_000,), chunks=(1000,), dtype="i8")
    array[...] = np.arange(200_000)
    with pytest.warns(UserWarning, match=r"field 'x': this zarr Array is read whole"):
        assert jl.Dataset(x=array)[77_777].x == 77_777


def test_values_of_every_kind(tmp_path, plain):
    """Byte order, strings, bools, halves, complex numbers, odd integers, fill values and empty datasets are as h5py says."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        for dtype in (">i2", ">f4", "f2", "S5", "?", "c8", "u1"):
            file.create_dataset(dtype, data=(X[:, 0, :2] % 2).astype(dtype), chunks=(600, 2), shuffle=dtype != "?")
        unwritten = file.create_dataset(
            "unwritten", (ROWS, 8), "f4", chunks=(200, 8), fillvalue=3.5, compression="gzip"
        )
        unwritten[200:300] = 1
        file.create_dataset("empty", (0, 4), "f4", chunks=(10, 4), maxshape=(None, 4))
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(20)
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_chunk((100,))
        made = h5py.h5d.create(file.id, b"odd", odd, h5py.h5s.create_simple((ROWS,)), create)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, X[:, 0, 0].copy())
        names = [name for name in file if name != "empty"]
    data = jl.Dataset(jl.open(tmp_path / "d.h5", fields=names).sources)

    with h5py.File(tmp_path / "d.h5") as file:
        for name, found in zip(names, data[:], strict=True):
            assert found.dtype == file[name].dtype and found.tobytes() == file[name][:].tobytes(), name
    assert len(jl.open(tmp_path / "d.h5", fields=["empty"])) == 0


@pytest.fixture
def gzipped(tmp_path):
    """A file with two fields of 64 rows a chunk, of 600 and of 8 bytes a row."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(64, 6, 5), compression="gzip", shuffle=True)
        file.create_dataset("y", data=np.arange(ROWS), chunks=(128,))
    return tmp_path / "d.h5"


def test_epochs_and_resume(gzipped, plain):
    """Batches of shuffled epochs are those of the arrays in memory, in later epochs and after a resume."""
    wanted = jl.Dataset(x=X, y=np.arange(ROWS))
    data = jl.open(gzipped)
    order = jl.blocks(32, 4)
    for one in ({"shuffle": True}, {"order": order}, {"order": order, "prefetch": 0}):
        ours, theirs = (jl.Loader(d, 50, seed=3, **one) for d in (data, wanted))
        for _ in range(2):
            for a, b in zip(ours, theirs, strict=True):
                assert np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
        batches = iter(ours)
        next(batches), next(batches)
        again = jl.Loader(data, 50, seed=3, **one)
        again.load_state_dict(ours.state_dict())
        for a, b in zip(again, batches, strict=True):
            assert np.array_equal(a.x, b.x)
    assert np.array_equal(jl.Loader(data, 50, seed=3)[4].x, wanted[200:250].x)


def test_what_reads_rows(gzipped, tmp_path, plain):
    """Every way to the values brings them in first: each on a data set of which nothing was read."""
    wanted = jl.Dataset(x=X, y=np.arange(ROWS))

    def fresh():
        return jl.open(gzipped)

    assert np.array_equal(fresh().statistics("x").mean, wanted.statistics("x").mean)
    assert repr(fresh().describe()) == repr(wanted.describe())
    fresh().save(tmp_path / "saved")
    assert np.array_equal(np.load(tmp_path / "saved" / "x.npy"), X)
    stage = ("x", jl.normalize(1.0, 2.0))
    kept = fresh().map(*stage).cache(tmp_path / "kept", progress=False)
    assert np.array_equal(kept[:].x, wanted.map(*stage)[:].x)
    assert kept.spec == fresh().map(*stage).cache(tmp_path / "kept", progress=False).spec
    assert jl.Loader(fresh(), 10, shuffle=True).check(8).same
    assert [np.array_equal(v.x, X[9]) for _, v in fresh().trace(9)] == [True]
    picked = fresh().select([900, 3, 3])
    assert np.array_equal(picked[:].x, X[[900, 3, 3]])
    both = fresh().concat(fresh())
    assert np.array_equal(both[[5, ROWS + 6, 2 * ROWS - 1]].x, X[[5, 6, -1]])
    train, valid = fresh().split(0.5, 0.5, groups="y")
    assert sorted([*train[:].y, *valid[:].y]) == list(range(ROWS))
    again = copy.deepcopy(fresh())
    assert np.array_equal(again[500:510].x, X[500:510])
    sent = pickle.loads(pickle.dumps(fresh()))
    assert np.array_equal(sent[500:510].x, X[500:510]) and len(pickle.dumps(fresh())) < 20_000
    make, arguments = fresh().by_value()
    assert np.array_equal(make(*arguments)[500:510].x, X[500:510])
    labels = jl.Loader(fresh(), 50, order=jl.blocks(10, 2)).shuffle_quality("y")
    assert labels.classes == ROWS


def test_partners_windows_and_ragged_rows(gzipped, plain):
    """Rows that a stage draws, windows across chunks, padded ones, and rows of different lengths are all brought in."""
    x = X[:, 0].astype("float32")
    with h5py.File(gzipped, "a") as file:
        file.create_dataset("flat", data=x, chunks=(64, 5), compression="gzip")

    def pair(data):
        return [data, jl.Dataset(flat=x)]

    def flat():
        return jl.open(gzipped, fields=["flat"])

    for data, wanted in [pair(flat())]:
        a, b = (d.map("flat", jl.mixup(0.4)) for d in (data, wanted))
        assert np.array_equal(a[:].flat, b[:].flat)
        assert np.array_equal(
            every(jl.Loader(flat().map("flat", jl.mixup(0.4)), 100, shuffle=True))[0],
            every(jl.Loader(b, 100, shuffle=True))[0],
        )
    mixed = jl.mix((flat(), 0.5), (jl.Dataset(flat=x), 0.5))
    wanted = jl.mix((jl.Dataset(flat=x), 0.5), (jl.Dataset(flat=x), 0.5))
    assert np.array_equal(every(jl.Loader(mixed, 100))[0], every(jl.Loader(wanted, 100))[0])

    groups = [0, 100, 101, 700, ROWS]
    forms = [
        {"past": slice(0, 60), "next": slice(60, 70), "stride": 30},
        {"past": slice(0, 150), "stride": 40, "pad_start": 149, "pad_value": None, "groups": groups},
        {"past": slice(-5, 1), "stride": 7, "pad_start": 5, "groups": groups, "mask": True},
    ]
    for form in forms:
        ours = jl.Dataset(jl.windows(flat().sources["flat"], **form))
        theirs = jl.Dataset(jl.windows(x, **form))
        for a, b in zip(
            every(jl.Loader(ours, 32, shuffle=True)), every(jl.Loader(theirs, 32, shuffle=True)), strict=True
        ):
            assert np.array_equal(a, b)
    offsets = np.array([0, 3, 3, 200, 1000])
    ours, theirs = (jl.Dataset(t=jl.ragged(v, offsets)) for v in (flat().sources["flat"], x))
    assert np.array_equal(ours[:].t.values, theirs[:].t.values)
    padded = [every(jl.Loader(d.map("t", jl.pad_to_longest()), 4))[0] for d in (ours, theirs)]
    assert np.array_equal(*padded)


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize(
    "given", [{"prefetch": 0}, {"threads": 1}, {"threads": 2}, {"threads": 4, "prefetch": 5}], ids=str
)
def test_each_chunk_once_a_window(gzipped, given, windows):
    """Blocks within the bound: each chunk is decoded once, whatever the batches and whichever thread is ahead; later
    epochs find some of them there."""
    total, bound = -(-ROWS // 64), int(64 * 120 * 4 * windows)  # two windows: one is read while the next is decoded
    for batch_size in (7, 64, 300):
        data = jl.open(gzipped).keep("x")
        source = chunks_of(data)
        loader = jl.Loader(data, batch_size, order=jl.blocks(64, 4), seed=1, max_resident=bound, **given)
        for _ in range(3):
            before = source.decoded
            every(loader)
            assert source.decoded - before <= total and source.resident <= bound
        assert before > total and source.decoded < 3 * total and source.decoded >= total
        assert source.holds == 0 and not source.users.any()


def test_each_chunk_once_from_a_resume(gzipped):
    """The same for an epoch begun in its midst, after one that was left: what that had asked for is past."""
    data = jl.open(gzipped).keep("x")
    source = chunks_of(data)
    loader = jl.Loader(data, 10, order=jl.blocks(64, 4), seed=1, max_resident=64 * 120 * 8, threads=2)
    for _ in range(10):
        left = iter(loader)
        for _ in range(30):
            next(left)
        state = loader.state_dict()
        left.close()
        loader.load_state_dict(state)
        before = source.decoded
        rest = np.concatenate([batch.x for batch in loader])
        assert len(rest) == ROWS - 300 and source.decoded - before <= 12  # of the windows from the second on
    assert source.holds == 0 and not source.users.any()


def test_with_room_for_all_a_chunk_is_decoded_once(gzipped):
    """Three shuffled epochs without a bound decode each chunk once in all."""
    data = jl.open(gzipped).keep("x")
    loader = jl.Loader(data, 10, shuffle=True)
    for _ in range(3):
        every(loader)
    assert chunks_of(data).decoded == -(-ROWS // 64)


def test_a_slow_thread_is_waited_for(gzipped, monkeypatch):
    """A thread that dawdles before it fills its unit loses none of its chunks to those that are ahead of it."""
    fill, turns = filling.Plan._fill, iter(range(10**9))

    def dawdle(plan, worker, unit):
        if next(turns) % 3 == 0:
            time.sleep(0.005)
        fill(plan, worker, unit)

    monkeypatch.setattr(filling.Plan, "_fill", dawdle)
    data = jl.open(gzipped).keep("x")
    loader = jl.Loader(data, 50, order=jl.blocks(64, 4), max_resident=64 * 120 * 8, threads=3, prefetch=6)
    wanted = jl.Loader(jl.Dataset(x=X), 50, order=jl.blocks(64, 4))
    assert all(np.array_equal(a.x, b.x) for a, b in zip(loader, wanted, strict=True))
    assert chunks_of(data).decoded == -(-ROWS // 64)


def test_what_was_left_is_not_decoded(gzipped, monkeypatch):
    """Chunks that an iterator asked for ahead are let go where it is dropped; the next one decodes what it needs."""
    data, decode, begun = jl.open(gzipped).keep("x"), chunked.Chunked.decode, []

    def dawdle(source, first, last):
        begun.append(first)
        time.sleep(0.1)
        decode(source, first, last)

    monkeypatch.setattr(chunked.Chunked, "decode", dawdle)
    monkeypatch.setattr(residency, "TASK", 1)
    loader = jl.Loader(data, 10)
    next(iter(loader))
    until(lambda: not chunks_of(data).coming)
    assert len(begun) < 16 and chunks_of(data).decoded == len(begun)
    assert chunks_of(data).resident == 64 * 120 * len(begun)
    monkeypatch.setattr(chunked.Chunked, "decode", decode)
    assert np.array_equal(every(jl.Loader(data, 100))[0], X) and chunks_of(data).decoded == 16


def test_closing_wakes_who_waits(gzipped, monkeypatch):
    """An iterator that is dropped in its midst ends threads that wait for a slower one."""
    fill = filling.Plan._fill

    def dawdle(plan, worker, unit):
        if unit.start == 40:
            time.sleep(0.3)
        fill(plan, worker, unit)

    monkeypatch.setattr(filling.Plan, "_fill", dawdle)
    loader = jl.Loader(
        jl.open(gzipped).keep("x"), 40, order=jl.blocks(64, 2), max_resident=64 * 120 * 3, threads=4, prefetch=8
    )
    next(iter(loader))
    start = time.perf_counter()
    loader.close()
    assert time.perf_counter() - start < 10


def test_a_bound_below_the_working_set(gzipped):
    """A shuffled epoch through a pool of three chunks is right, and no more than these are there at any time."""
    data = jl.open(gzipped).keep("x")
    bound = 3 * 64 * 120
    source = chunks_of(data)
    most = 0
    with pytest.warns(UserWarning, match=r"order=jl\.blocks"):
        loader = jl.Loader(data, 40, shuffle=True, seed=5, max_resident=bound, threads=3, prefetch=3)
    wanted = jl.Loader(jl.Dataset(x=X), 40, shuffle=True, seed=5)
    for a, b in zip(loader, wanted, strict=True):
        most = max(most, source.resident)
        assert np.array_equal(a.x, b.x)
    assert 0 < most <= bound
    assert source.holds == 0 and not source.users.any()


def test_a_bound_below_one_row(gzipped, plain):
    """A row that needs more than the bound is brought in all the same."""
    data = jl.Dataset(jl.windows(jl.open(gzipped).sources["x"], x=slice(0, 300), stride=40))
    for bound in (1000, 1):
        found = every(jl.Loader(data, 8, max_resident=bound))[0]
        assert np.array_equal(found, np.lib.stride_tricks.sliding_window_view(X, 300, 0)[::40].transpose(0, 3, 1, 2))


def test_a_bound_of_one_byte_over_both_kinds_of_file(gzipped, tmp_path, plain):
    """Mapped pages and decoded chunks share the bound, and neither half is nothing."""
    np.save(tmp_path / "i.npy", np.arange(ROWS))
    data = jl.Dataset(i=tmp_path / "i.npy", x=jl.open(gzipped).sources["x"])
    with pytest.warns(UserWarning, match=r"order=jl\.blocks"):
        loader = jl.Loader(data, 100, shuffle=True, max_resident=1)
    rows, found = every(loader)
    assert np.array_equal(found, X[rows]) and np.array_equal(np.sort(rows), np.arange(ROWS))


def broken(path, name):
    """Overwrite the middle of a dataset's third chunk."""
    with h5py.File(path) as file:
        info = file[name].id.get_chunk_info(2)
    with open(path, "r+b") as file:
        file.seek(info.byte_offset + 20)
        file.write(b"\xff" * 40)


def test_a_broken_chunk(gzipped):
    """It is a DataError with path, dataset and rows, in the loader, a single row and a pass; what is whole can be read."""
    broken(gzipped, "x")
    data = jl.open(gzipped)
    told = r"d\.h5, dataset x, rows 128 to 191: error: "
    loader = jl.Loader(data, 32)
    for _ in range(2):
        found = []
        with pytest.raises(jl.DataError, match=told):
            for batch in loader:
                found.append(batch.x)
        assert np.array_equal(np.concatenate(found), X[: 32 * len(found)])
    with pytest.raises(jl.DataError, match=told):
        data[130]
    with pytest.raises(jl.DataError, match=told):
        data.statistics("x")
    assert np.array_equal(data[200:ROWS].x, X[200:])
    assert np.array_equal(every(jl.Loader(data.select(np.r_[0:128, 192:ROWS]), 32))[0], X[np.r_[0:128, 192:ROWS]])
    assert chunks_of(data).holds == 0 and chunks_of(data).coming == 0


def test_a_broken_zarr_chunk(tmp_path, plain):
    """The same for a file of a Zarr folder that was cut; a folder that is gone is no array of fill values."""
    array = zarr.open_array(str(tmp_path / "x.zarr"), mode="w", shape=X.shape, chunks=(100, 6, 5), dtype=X.dtype)
    array[...] = X
    data = jl.open(tmp_path / "x.zarr")
    assert np.array_equal(data[0].x, X[0])
    chunk = tmp_path / "x.zarr" / ("3.0.0" if zarr.__version__ < "3" else "c/3/0/0")
    chunk.write_bytes(chunk.read_bytes()[:50])
    with pytest.raises(jl.DataError, match=r"x\.zarr, rows 300 to 399: "):
        data[350]
    assert np.array_equal(data[499].x, X[499])
    os.rename(tmp_path / "x.zarr", tmp_path / "y.zarr")
    with pytest.raises(jl.DataError, match=r"x\.zarr"):
        data[900]


def test_a_file_that_changed(gzipped, plain):
    """A file that was replaced or written to is refused at the start of an epoch, and where it is first read."""
    data, late = jl.open(gzipped), jl.open(gzipped)
    loader = jl.Loader(data, 50)
    assert np.array_equal(next(iter(loader)).x, X[:50])
    until(lambda: not chunks_of(data).coming and not chunks_of(data, "y").coming)  # HDF5 lets no file be read meanwhile
    with h5py.File(gzipped, "a") as file:
        file["y"][3] = 7
    for one in (loader, jl.Loader(late, 50)):
        with pytest.raises(jl.DataError, match=r"d\.h5: changed since it was opened"):
            next(iter(one))
    assert jl.open(gzipped)[3].y == 7


def test_two_loaders_at_once(gzipped):
    """Loaders in several threads over one source share what is decoded, and each gets its rows."""
    data = jl.open(gzipped).keep("x")
    wrong = []

    def read(seed):
        loader = jl.Loader(data, 16, order=jl.blocks(64, 2), seed=seed, max_resident=64 * 120 * 5)
        wanted = jl.Loader(jl.Dataset(x=X), 16, order=jl.blocks(64, 2), seed=seed)
        for _ in range(3):
            wrong.extend(1 for a, b in zip(loader, wanted, strict=True) if not np.array_equal(a.x, b.x))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert chunks_of(data).holds == 0


def test_after_a_fork(gzipped, plain):
    """A child reads on, from handles of its own, what its parent had and had not decoded."""
    with h5py.File(gzipped, "a") as file:
        file.create_dataset("lzf", data=X, chunks=(64, 6, 5), compression="lzf")
    data = jl.open(gzipped)
    assert np.array_equal(data[5].lzf, X[5])
    child = os.fork()
    if child == 0:
        right = np.array_equal(data[:].lzf, X) and np.array_equal(every(jl.Loader(data, 100))[0], X)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_goes_with_the_data_set(gzipped, plain):
    """Nothing keeps a chunked source alive but its data sets."""
    gc.collect()
    before = len(residency.alive)
    data = jl.open(gzipped)
    loader = jl.Loader(data, 100)
    every(loader)
    loader.close()
    del data, loader
    gc.collect()
    assert len(residency.alive) == before


def test_folders_and_files_without_an_array(tmp_path, plain):
    """A group or file without arrays, a scalar, metadata that is broken and a codec nobody has are told with their path."""
    zarr.open_group(str(tmp_path / "empty"), mode="w")
    with pytest.raises(jl.DataError, match="empty: a Zarr group without arrays"):
        jl.open(tmp_path / "empty")
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file.create_group("inside")
    with pytest.raises(jl.DataError, match=r"empty\.h5: an HDF5 file without datasets"):
        jl.open(tmp_path / "empty.h5")
    array = zarr.open_array(str(tmp_path / "x"), mode="w", shape=(8, 2), chunks=(4, 2), dtype="f4")
    array[...] = 1
    (about,) = [p for p in (tmp_path / "x").iterdir() if p.name in ("zarr.json", ".zarray")]
    whole = about.read_text()
    about.write_text(whole[: len(whole) // 2])
    with pytest.raises(jl.DataError, match=str(tmp_path / "x")):
        jl.open(tmp_path / "x")
    about.write_text(whole.replace("zstd", "nobodys").replace("blosc", "nobodys"))
    with pytest.raises(jl.DataError, match=rf"{tmp_path / 'x'}.*nobodys"):
        jl.open(tmp_path / "x")[0]
    zarr.open_array(str(tmp_path / "scalar"), mode="w", shape=(), dtype="f4")
    with pytest.raises(jl.DataError, match="scalar: a scalar: an array of at least one axis expected"):
        jl.open(tmp_path / "scalar")


def test_a_file_swapped_between_opening_and_reading(gzipped, plain):
    """A chunk is read from the file that was opened or not at all, whenever the path began to mean another one."""
    data = jl.open(gzipped)
    decoder = chunks_of(data)
    with h5py.File(gzipped.parent / "new.h5", "w") as file:
        file.create_dataset("x", data=X[::-1], chunks=(64, 6, 5), compression="gzip")
    os.replace(gzipped.parent / "new.h5", gzipped)
    assert decoder is not None
    with pytest.raises(jl.DataError, match="changed since it was opened"):
        data[3]
