"""What cannot be mapped: Parquet and compressed .npz, decoded once, found again, made anew when the file is another."""

from __future__ import annotations

import contextlib
import os
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest

import jitloader as jl
from jitloader import storage
from jitloader.errors import DataError

RNG = np.random.default_rng(0)
FIELDS = {
    "x": RNG.normal(size=(50, 3)),
    "turned": np.asfortranarray(RNG.normal(size=(4, 5)).astype(">f4")),
    "group/n": np.arange(7, dtype="i2"),
    "text": np.array(["a", "ab", "déf"]),
    "empty": np.zeros((0, 2)),
    "scalar": np.array(3),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own; its kernels, which others test, run as plain Python."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    monkeypatch.setenv("JITLOADER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unpacked"


def same(got, wanted):
    return all((got[n] == x).all() and got[n].dtype == x.dtype and got[n].shape == x.shape for n, x in wanted.items())


def test_compressed_npz(tmp_path, cache):
    """Every member with dtype, shape and order, as maps; the same files the next time; stored members stay in the zip."""
    path = tmp_path / "d.npz"
    np.savez_compressed(path, **FIELDS)

    found = storage.open_fields(path, unpack=True)

    assert list(found) == list(FIELDS) and same(found, FIELDS)
    assert all(storage.locate(x).path.startswith(str(cache)) for x in found.values() if x.size)
    inode = os.stat(storage.locate(found["x"]).path).st_ino
    assert os.stat(storage.locate(storage.open_fields(path, unpack=True)["x"]).path).st_ino == inode
    assert jl.open(path, fields=["x"], unpack=True)[7].x.tolist() == FIELDS["x"][7].tolist()
    with pytest.raises(DataError, match="unpack it once by unpack=True"):
        storage.open_fields(path)
    with zipfile.ZipFile(path, "a") as archive:
        np.save(tmp_path / "more.npy", np.arange(5))
        archive.write(tmp_path / "more.npy", "more.npy", zipfile.ZIP_STORED)
    again = storage.open_fields(path, unpack=True)
    assert storage.locate(again["more"]).path == str(path) and same(again, FIELDS)
    jl.clear_cache()
    assert not cache.exists() and same(again, FIELDS)


def test_unpacked_into_a_folder(tmp_path):
    """A folder of one's own is a plain one of .npy; columns asked for later join it; another file replaces it."""
    path, folder = tmp_path / "d.npz", tmp_path / "out"
    np.savez_compressed(path, x=np.arange(3), y=np.arange(4))
    storage.open_fields(path, fields=["x"], unpack=folder)
    inode = (folder / "x.npy").stat().st_ino
    assert sorted(os.listdir(folder)) == ["manifest.json", "x.npy"]
    found = storage.open_fields(path, unpack=folder)
    assert same(found, {"x": np.arange(3), "y": np.arange(4)}) and (folder / "x.npy").stat().st_ino == inode
    assert np.load(folder / "y.npy").tolist() == [0, 1, 2, 3]

    np.savez_compressed(path, x=np.arange(9))
    assert storage.open_fields(path, unpack=folder)["x"].tolist() == list(range(9))
    assert sorted(os.listdir(folder)) == ["manifest.json", "x.npy"] and found["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="unpack='.*out' is for one file; give unpack=True for several"):
        storage.open_fields(path, path, unpack=folder)


def test_folders_of_others_are_left_alone(tmp_path):
    """Nothing is unpacked over files that were not unpacked there."""
    np.savez_compressed(tmp_path / "d.npz", x=np.arange(3))
    for name in ("plain", "saved"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain" / "thesis.txt").write_text("mine")
    jl.Dataset(z=np.arange(3)).save(tmp_path / "saved")

    for name, held in (("plain", "thesis.txt"), ("saved", "manifest.json")):
        with pytest.raises(DataError, match=f"{name}: holds '{held}', which was not unpacked there"):
            storage.open_fields(tmp_path / "d.npz", unpack=tmp_path / name)
    assert (tmp_path / "plain" / "thesis.txt").read_text() == "mine" and len(jl.open(tmp_path / "saved")) == 3


def test_unpacking_takes_no_memory(tmp_path):
    """A member of 160 MB is unpacked a block at a time."""
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros(20_000_000))
    tracemalloc.start()
    found = storage.open_fields(tmp_path / "d.npz", unpack=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert found["x"].shape == (20_000_000,) and most < 80_000_000


def test_broken_members(tmp_path, cache):
    """A wrong checksum, a size that cannot be and a cut stream are errors; nothing half made stays."""
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=RNG.normal(size=5000))
    raw = bytearray(path.read_bytes())
    raw[3000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="d.npz, member x.npy: broken"):
        storage.open_fields(path, unpack=True)
    assert not [name for _, _, names in os.walk(cache) for name in names]

    np.savez_compressed(path, x=np.zeros(5000))
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02") + 24
    raw[at : at + 4] = (2**31).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(DataError, match="member x.npy: .* bytes found, too few for 2147483648 unpacked"):
        storage.open_fields(path, unpack=True)


def test_no_room(tmp_path, monkeypatch):
    """A disk without room is the system's error, naming both sizes, before a byte is written."""
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros(5000))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 999}))

    with pytest.raises(OSError, match="40000 bytes to unpack, 999 free"):
        storage.open_fields(tmp_path / "d.npz", unpack=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def parquet(path, count=1000, **given):
    """A file of several row groups with a column of each kind, and what they are in NumPy."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    pq = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    lists = [[k] * (k % 4) for k in range(count)]
    wanted = {
        "x": RNG.normal(size=count),
        "n": np.arange(count, dtype="u2"),
        "half": np.arange(count).astype("f2"),
        "flag": np.arange(count) % 3 == 0,
        "day": np.arange(count).astype("M8[D]"),
        "time": np.arange(count).astype("M8[us]"),
        "pair": np.arange(2 * count).reshape(-1, 2),
        "code": np.array([b"%03d" % (k % 1000) for k in range(count)], "V3"),
    }
    columns = {name: pa.array(x) for name, x in wanted.items() if x.ndim == 1 and x.dtype.kind != "V"}
    columns["pair"] = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * count)), 2)
    columns["code"] = pa.array([b"%03d" % (k % 1000) for k in range(count)], pa.binary(3))
    columns["a.b"] = pa.array(np.arange(count))
    columns["tokens"] = pa.array(lists, pa.list_(pa.int32()))
    columns["pairs"] = pa.array([[[k, k + 1]] * (k % 3) for k in range(count)], pa.list_(pa.list_(pa.int16(), 2)))
    wanted["a.b"] = np.arange(count)
    pq.write_table(pa.table(columns), path, **{"row_group_size": 130, **given})
    return wanted, lists


@pytest.mark.parametrize("groups", [130, 5000])
def test_parquet(tmp_path, cache, groups):
    """All kinds of columns of many row groups and of one, lists too, once."""
    wanted, lists = parquet(tmp_path / "d.parquet", row_group_size=groups)

    found = storage.open_fields(tmp_path / "d.parquet")

    assert same(found, wanted)
    data = jl.open(tmp_path / "d.parquet")
    assert data[:].tokens.values.tolist() == sum(lists, []) and data[999].tokens.tolist() == lists[999]
    assert data[:].pairs.values.tolist() == [[k, k + 1] for k in range(1000) for _ in range(k % 3)]
    inode = os.stat(storage.locate(found["x"]).path).st_ino
    again = storage.open_fields(tmp_path / "d.parquet", fields=["x"])
    assert os.stat(storage.locate(again["x"]).path).st_ino == inode
    assert (jl.Dataset(x=np.arange(1000)).zip(data.keep("n"))[5].n) == 5


def test_parquet_columns(tmp_path):
    """Only the columns asked for are decoded; strings, structs and nulls are refused, naming column and count."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    pq = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    path = tmp_path / "d.parquet"
    nulls = pa.array([None if k % 100 == 99 else k for k in range(1000)])
    table = {"x": np.arange(1000), "s": ["a"] * 1000, "o": [{"a": 1}] * 1000, "n": nulls, "l": [[1, None]] * 1000}
    for statistics in (True, False):
        pq.write_table(pa.table(table), path, row_group_size=300, write_statistics=statistics)
        assert jl.open(path, fields=["x"], unpack=tmp_path / "out")[999].x == 999
        assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", "x.npy"]
        for name, told in (("s", "string"), ("o", "struct"), ("n", "10 nulls found"), ("l", "nulls found")):
            with pytest.raises(DataError, match=f"d.parquet, column {name}: .*{told}"):
                jl.open(path, fields=["x", name])
    pq.write_table(pa.table({"x": pa.array([], pa.float32())}), path)
    assert len(jl.open(path)) == 0


def test_parquet_that_changes(tmp_path):
    """Another file under the path is decoded anew; the old arrays keep their values."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    pq = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    path = tmp_path / "d.parquet"
    made = []
    for value in (1, 2):
        pq.write_table(pa.table({"x": np.full(10, value)}), path)
        made.append(jl.open(path))
        assert (made[-1][:].x == value).all()
    with pytest.warns(UserWarning, match="x.npy: now another file"):
        assert (made[0][:].x == 1).all()
    os.truncate(path, 100)
    with pytest.raises(DataError, match="d.parquet: a cut Parquet file"):
        jl.open(path)


def test_several_decode_at_once(tmp_path):
    """Threads that open one file at the same time all get it."""
    wanted, _ = parquet(tmp_path / "d.parquet")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(storage.open_fields(tmp_path / "d.parquet"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 4 and all(same(one, wanted) for one in found)


def test_parquet_that_lies(tmp_path):
    """Footers longer than the file, columns of one name and bytes that are no Parquet inside its marks are told."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    pq = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"x": np.arange(50)}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + (1 << 30).to_bytes(4, "little") + whole[-4:])
    with pytest.raises(DataError, match=f"a footer of {1 << 30} bytes expected, {len(whole)} bytes found"):
        jl.open(path)
    length = int.from_bytes(whole[-8:-4], "little")
    path.write_bytes(whole[: -8 - length] + b"\xff" * length + whole[-8:])
    with pytest.raises(DataError, match=f"d.parquet: a broken Parquet file of {len(whole)} bytes"):
        jl.open(path)
    path.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])  # the first page, whose footer is right
    with pytest.raises(DataError, match="d.parquet"):
        jl.open(path)
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]), path)
    with pytest.raises(DataError, match="columns of different names expected, x, x found"):
        jl.open(path)


def test_where_unpacked_fields_go(tmp_path, cache, monkeypatch):
    """No folder to be had is an error that says what to give; one that is broken is made again; one that two files fight
    over is told; long names and names that differ in case alone get files of their own."""
    path = tmp_path / "d.npz"
    wanted = {"a": np.arange(5), "A": np.arange(6), "n" * 190: np.arange(7)}
    np.savez_compressed(path, **wanted)
    assert same(storage.open_fields(path, unpack=True), wanted)
    (manifest,) = cache.glob("*/manifest.json")
    manifest.write_text("{")
    assert same(storage.open_fields(path, unpack=True), wanted)
    with monkeypatch.context() as patch:
        patch.setattr("jitloader.storage.unpacked._known", lambda *_: ({}, {}))  # another process is always later
        with pytest.raises(DataError, match="another process unpacks another file there"):
            storage.open_fields(path, unpack=tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr("jitloader.jit.cache_folder", lambda: None)
        with pytest.raises(DataError, match="no folder to unpack to can be written; give one by unpack=folder"):
            storage.open_fields(path, unpack=True)


def test_a_file_that_changes_while_it_is_unpacked(tmp_path, monkeypatch):
    """What was read of two versions is not kept."""
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=np.arange(5))
    create = storage.unpacked.create_fields

    @contextlib.contextmanager
    def changing(*given):
        with create(*given) as maps:
            os.utime(path, ns=(1, 1))
            yield maps

    monkeypatch.setattr(storage.unpacked, "create_fields", changing)
    with pytest.raises(DataError, match="d.npz: changed while it was read"):
        storage.open_fields(path, unpack=tmp_path / "out")
    monkeypatch.undo()
    assert storage.open_fields(path, unpack=tmp_path / "out")["x"].tolist() == [0, 1, 2, 3, 4]


def test_who_comes_second_waits(tmp_path, monkeypatch):
    """While another process unpacks into the folder its lock is waited for."""
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=np.arange(5))
    create, tried = storage.unpacked.create_fields, []

    def crowded(*given):
        tried.append(1)
        if len(tried) < 3:
            raise BlockingIOError
        return create(*given)

    monkeypatch.setattr(storage.unpacked, "create_fields", crowded)
    assert storage.open_fields(path, unpack=tmp_path / "out")["x"].tolist() == [0, 1, 2, 3, 4] and len(tried) == 3
