"""Every format: right data from the real libraries' files, remedies for what is refused, no harm from bad bytes."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import sys
import zipfile

import numpy as np
import pytest

import jitloader as jl
from jitloader import storage
from jitloader.errors import DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 28, 28), dtype=np.uint8)
LABELS = np.arange(7, dtype=np.uint8)
FIELDS = {
    "image": IMAGES,
    "label": LABELS,
    "x": RNG.normal(size=(7, 3)).astype("f4"),
    "big": np.arange(7, dtype=">i4"),
    "flag": np.arange(7) % 2 == 0,
    "half": np.arange(7, dtype="f2"),
    "empty": np.zeros((0, 4), "f4"),
}


def check(got, wanted):
    """Fields are mapped, read-only, plain arrays with these values."""
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        y = got[name]
        assert type(y) is np.ndarray and y.dtype == x.dtype and y.shape == x.shape and (y == x).all(), name
        assert x.size == 0 or (storage.locate(y) is not None and not y.flags.writeable), name


def write_idx(path, x, code):
    path.write_bytes(bytes([0, 0, code, x.ndim]) + struct.pack(f">{x.ndim}I", *x.shape) + x.tobytes())


def write_cifar(path, labels, rows=11, seed=0):
    """Records as the data set has them: label bytes, then a channel after the other."""
    rng = np.random.default_rng(seed)
    y = [rng.integers(0, n, rows, dtype=np.uint8) for n in labels]
    x = rng.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)
    path.write_bytes(b"".join(bytes(v[i] for v in y) + x[i].tobytes() for i in range(rows)))
    return [*y, x]


def write_safetensors(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


# ---- zip


def test_npz(tmp_path):
    """Stored members are mapped in place, Fortran order and scalars too."""
    wanted = {**FIELDS, "f": np.asfortranarray(FIELDS["x"]), "scalar": np.array(3.5)}
    np.savez(tmp_path / "d.npz", **wanted)

    check(storage.open_fields(tmp_path / "d.npz"), wanted)
    assert list(storage.open_fields(tmp_path / "d.npz", fields=["x"])) == ["x"]
    with pytest.raises(DataError, match="one array expected, 9 found"):
        storage.open_array(tmp_path / "d.npz")


def test_npz_with_a_long_name_and_a_prefix(tmp_path):
    """A zip after other bytes (a self-extractor), members in folders and extra fields are found by the local header."""
    stream = io.BytesIO()
    np.savez(stream, **{"group/" + "n" * 50: LABELS})
    for prefix in (b"", b"#!/bin/sh\n"):
        (tmp_path / "d.npz").write_bytes(prefix + stream.getvalue())
        check(storage.open_fields(tmp_path / "d.npz"), {"group/" + "n" * 50: LABELS})


def test_npz_compressed(tmp_path):
    """A compressed member is refused with the remedy; the others of its file can be had."""
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros(1000))
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        for name, how in (("x.npy", zipfile.ZIP_STORED), ("c.npy", zipfile.ZIP_DEFLATED), ("readme.txt", 0)):
            stream = io.BytesIO()
            np.save(stream, np.zeros(1000))
            archive.writestr(name, stream.getvalue(), how)

    for name in ("c.npz", "m.npz"):
        with pytest.raises(DataError, match=rf"{name}, member .*: compressed.*np\.savez, not np\.savez_compressed"):
            storage.open_fields(tmp_path / name)
    check(storage.open_fields(tmp_path / "m.npz", fields=["x"]), {"x": np.zeros(1000)})


@pytest.mark.parametrize("name", ["/etc/x.npy", "../x.npy", "a/../../x.npy", "C:\\x.npy", "\\x.npy", "..\\x.npy"])
def test_npz_paths_that_leave(tmp_path, name):
    """Absolute and parent paths inside a zip are refused."""
    stream = io.BytesIO()
    np.save(stream, LABELS)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr(name, stream.getvalue())

    with pytest.raises(DataError, match="a plain relative name expected"):
        storage.open_fields(tmp_path / "d.npz")


def test_npz_that_is_none(tmp_path):
    """Zips without .npy, cut zips, and members that are no .npy are refused."""
    np.savez(tmp_path / "d.npz", x=LABELS)
    whole = (tmp_path / "d.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "none.npz", "w"):
        pass
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("x.npy", "hello, not an array")
    (tmp_path / "cut.npz").write_bytes(whole[:-30])

    for name in ("none.npz", "text.npz", "cut.npz"):
        with pytest.raises(DataError, match=name):
            storage.open_fields(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "words.npz", "w") as archive:
        archive.writestr("words.txt", "no array")
    with pytest.raises(DataError, match="words.npz: a zip of 1 members: at least one .npy expected, none found"):
        storage.open_fields(tmp_path / "words.npz")
    with zipfile.ZipFile(tmp_path / "d.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x.npy", archive.read("x.npy"))
    with pytest.raises(DataError, match="d.npz: member 'x.npy' found twice, once expected"):
        storage.open_fields(tmp_path / "d.npz")
    secret = bytearray(whole)
    secret[6] |= 1  # of the flags of the local header, then of the directory's
    secret[secret.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "secret.npz").write_bytes(secret)
    for unpack in (None, tmp_path / "out"):
        with pytest.raises(DataError, match="secret.npz, member x.npy: encrypted"):
            storage.open_fields(tmp_path / "secret.npz", unpack=unpack)


# ---- IDX and CIFAR


@pytest.mark.parametrize(
    "code, dtype", [(8, "u1"), (9, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
def test_idx_types(tmp_path, code, dtype):
    """All types of IDX, big-endian."""
    x = np.arange(24).reshape(2, 3, 4).astype(dtype)
    write_idx(tmp_path / "some.idx", x, code)

    check(storage.open_fields(tmp_path / "some.idx"), {"some": x})


def test_mnist(tmp_path):
    """The pair of MNIST's files gives image and label."""
    write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES, 8)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS, 8)
    pair = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"

    check(storage.open_fields(*pair), {"image": IMAGES, "label": LABELS})
    assert storage.open_array(pair[0]).shape == (7, 28, 28)
    with pytest.raises(DataError, match="field 'image' again"):
        storage.open_fields(pair[0], pair[0])


@pytest.mark.parametrize("size", [2, 6, 15, 100])
def test_idx_cut(tmp_path, size):
    """A cut IDX names path and bytes."""
    path = tmp_path / "train-images-idx3-ubyte"
    write_idx(path, IMAGES, 8)
    os.truncate(path, size)

    with pytest.raises(DataError, match="ubyte: .*expected.*found"):
        storage.open_array(path)


FOREIGN = [
    pytest.param("train-images-idx3-ubyte.gz", gzip.compress(bytes(99)), "gunzip", id="gzip"),
    pytest.param("x.npy.xz", b"\xfd7zXZ\0" + bytes(99), "unxz", id="xz"),
    pytest.param("x.zst", b"\x28\xb5\x2f\xfd" + bytes(99), "unzstd", id="zstd"),
    pytest.param("x.parquet", b"PARE" + bytes(99), "never decrypted", id="encrypted parquet"),
    pytest.param("y.parquet", b"PAR1" + bytes(99), "a cut Parquet file", id="cut parquet"),
    pytest.param("x.feather", b"FEA1" + bytes(99), "write_feather", id="feather 1"),
    pytest.param("data_batch_1", b"\x80\x02}q\x01" + bytes(99), "np.save", id="pickle"),
    pytest.param("x.bin", bytes(range(1, 99)), "a raw file is np.memmap", id="raw"),
    pytest.param("photo.jpg", b"\xff\xd8\xff" + bytes(99), "a known format expected", id="jpeg"),
]


@pytest.mark.parametrize("name, data, remedy", FOREIGN)
def test_foreign_files(tmp_path, name, data, remedy):
    """Files that cannot be mapped are refused with what to do."""
    (tmp_path / name).write_bytes(data)

    with pytest.raises(DataError, match=f"{name}: .*{remedy}"):
        storage.open_fields(tmp_path / name)


def test_content_goes_before_the_name(tmp_path):
    """A file is taken for what it is, whatever it is called."""
    np.save(tmp_path / "x.npy", LABELS)
    os.rename(tmp_path / "x.npy", tmp_path / "x.h5")

    check(storage.open_fields(tmp_path / "x.h5"), {"x": LABELS})


def test_cifar_10(tmp_path):
    """Records of 3073 bytes are a strided view for each field."""
    label, image = write_cifar(tmp_path / "data_batch_1.bin", [10])
    got = storage.open_fields(tmp_path / "data_batch_1.bin")

    check(got, {"label": label, "image": image})
    assert got["image"].strides[0] == 3073


def test_cifar_100(tmp_path):
    """Records of 3074 bytes have a coarse and a fine label."""
    coarse, fine, image = write_cifar(tmp_path / "train.bin", [20, 100])

    check(storage.open_fields(tmp_path / "train.bin"), {"coarse": coarse, "fine": fine, "image": image})


def test_cifar_or_tokens(tmp_path):
    """A cut batch is refused with both numbers; a token file called train.bin is not taken for images."""
    write_cifar(tmp_path / "test_batch.bin", [10])
    os.truncate(tmp_path / "test_batch.bin", 3073 * 10 + 5)
    RNG.integers(0, 50_000, 3074 * 5, dtype=np.uint16).tofile(tmp_path / "train.bin")

    with pytest.raises(DataError, match="records of 3073 bytes expected, 30735 bytes found"):
        storage.open_fields(tmp_path / "test_batch.bin")
    with pytest.raises(DataError, match="a raw file is np.memmap"):
        storage.open_fields(tmp_path / "train.bin")
    assert storage.open_array(tmp_path / "train.bin", dtype="u2").shape == (3074 * 5,)


# ---- safetensors


def test_safetensors(tmp_path):
    """Tensors of the real library are mapped, all its dtypes."""
    numpy = pytest.importorskip("safetensors.numpy")
    wanted = {f"t{i}": np.arange(6).reshape(2, 3).astype(d) for i, d in enumerate("?bBhHiIqQefd")}
    wanted["scalar"], wanted["none"] = np.array(2.5), np.zeros((0, 3), "f4")
    numpy.save_file(wanted, tmp_path / "m.safetensors", metadata={"format": "np"})

    got = storage.open_fields(tmp_path / "m.safetensors")

    check({name: got[name] for name in wanted}, wanted)
    assert len(got) == len(wanted)


def test_safetensors_bfloat16(tmp_path, monkeypatch):
    """BF16 and F8 come as ml_dtypes has them; without it their bits come with a warning."""
    header = {
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "e": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [4, 7]},
    }
    path = tmp_path / "m.safetensors"
    write_safetensors(path, header, b"\xc0\x3f\x00\xc0" + b"\x38\x38\x38")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.warns(UserWarning, match="tensor b: bfloat16 needs ml_dtypes"):
            assert storage.open_fields(path, fields=["b"])["b"].tolist() == [0x3FC0, 0xC000]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    got = storage.open_fields(path)
    assert got["b"].dtype == ml_dtypes.bfloat16 and got["b"].astype("f4").tolist() == [1.5, -2]
    assert got["e"].astype("f4").tolist() == [1, 1, 1]


def entry(dtype="F32", shape=(2,), ends=(0, 8)):
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(ends)}}


@pytest.mark.parametrize(
    "header, size",
    [
        (entry(), 7),
        (entry(), 9),
        (entry(ends=(4, 12)), 12),
        (entry(ends=(8, 0)), 8),
        (entry(ends=(0, 4)), 4),
        (entry(ends=(-8, 0)), 8),
        (entry(ends=(0, 8.0)), 8),
        (entry(ends=(0,)), 8),
        (entry(dtype="F5"), 8),
        (entry(dtype=["F32"]), 8),
        (entry(shape=(-2,)), 8),
        (entry(shape=(True, 2)), 8),
        (entry(shape=(2**40, 2**40)), 8),
        (entry(shape=(2**70,)), 8),
        (entry(shape=(2**62, 0), ends=(0, 0)), 8),
        ({"x": 5}, 0),
        ({**entry(), "y": entry()["x"]}, 8),
        (b'{"x": ' * 3, 0),
        (b'{"a":' + b"[" * 100_000, 0),
        (b'{"\xff": 1}', 0),
        (json.dumps(entry()).encode()[:-1] + b", " + json.dumps(entry()).encode()[1:], 8),
    ],
)
def test_safetensors_that_lie(tmp_path, header, size):
    """Holes, overlaps, other sizes, unknown dtypes and broken headers are refused."""
    write_safetensors(tmp_path / "m.safetensors", header, bytes(size))

    with pytest.raises(DataError, match="m.safetensors"):
        storage.open_fields(tmp_path / "m.safetensors")


@pytest.mark.parametrize("length", [0, 1000, 2**40, 2**64 - 1])
def test_safetensors_lengths(tmp_path, length):
    """A header length beyond the file is refused without an allocation."""
    write_safetensors(tmp_path / "m.safetensors", entry(), bytes(8), length)

    with pytest.raises(DataError, match="m.safetensors"):
        storage.open_fields(tmp_path / "m.safetensors")


# ---- HDF5


def test_hdf5(tmp_path):
    """Contiguous datasets of h5py are mapped where they lie, in groups and after a user block too."""
    h5py = pytest.importorskip("h5py")
    record = np.zeros(3, [("a", ">i2"), ("b", "f4", (2,))])
    wanted = {**FIELDS, "c": np.arange(3) * 1j, "record": record, "s": np.array([b"ab", b"cde"])}
    wanted = dict(sorted({**wanted, "group/deep/x": FIELDS["x"]}.items()))
    for userblock in (0, 512):
        with h5py.File(tmp_path / "d.h5", "w", userblock_size=userblock) as file:
            for name, x in wanted.items():
                file.create_dataset(name, data=x)

        check(dict(sorted(storage.open_fields(tmp_path / "d.h5").items())), wanted)


def test_hdf5_that_cannot_be_mapped(tmp_path):
    """Compact, external, virtual, unwritten, ragged and empty datasets are refused one by one."""
    h5py = pytest.importorskip("h5py")
    x = np.arange(100.0)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("plain", data=x)
        file.create_dataset("external", data=x, external=[(str(tmp_path / "other.bin"), 0, h5py.h5f.UNLIMITED)])
        file.create_dataset("unwritten", (100,), "f8")
        file.create_dataset("text", data=["a", "bcd"])
        file.create_dataset("null", data=h5py.Empty("f4"))
        layout = h5py.VirtualLayout((100,), "f8")
        layout[:] = h5py.VirtualSource(file["plain"])
        file.create_virtual_dataset("virtual", layout)
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((100,)), create)
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(20)
        h5py.h5d.create(file.id, b"odd", odd, h5py.h5s.create_simple((100,))).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.arange(100, dtype="i4")
        )

    check(storage.open_fields(tmp_path / "d.h5", fields=["plain"]), {"plain": x})
    reasons = {
        "external": "other files",
        "virtual": "other files",
        "unwritten": "never written",
        "compact": "compact",
        "text": "Python objects",
        "null": "null dataspace",
        "odd": "not stored as",
    }
    for name, reason in reasons.items():
        with pytest.raises(DataError, match=f"d.h5, dataset {name}: .*{reason}"):
            storage.open_fields(tmp_path / "d.h5", fields=[name])


# ---- Arrow


def table(pa):
    """Columns of every kind that has the bytes of an array, and what they are in NumPy."""
    wanted = {t: np.arange(6).astype(t) for t in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")}
    wanted["time"] = np.arange(6).astype("M8[us]")
    wanted["span"] = np.arange(6).astype("m8[ns]")
    columns = {name: pa.array(x) for name, x in wanted.items()}
    flat = pa.array(np.arange(36.0))
    columns["list"] = pa.FixedSizeListArray.from_arrays(flat, 6)
    columns["nested"] = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    columns["tensor"] = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float64(), (3, 2)), columns["list"])
    columns["bytes"] = pa.array([b"abc"] * 6, pa.binary(3))
    wanted["list"], wanted["nested"] = np.arange(36.0).reshape(6, 6), np.arange(36.0).reshape(6, 2, 3)
    wanted["tensor"], wanted["bytes"] = np.arange(36.0).reshape(6, 3, 2), np.array([b"abc"] * 6, "V3")
    return pa.table(columns), wanted


@pytest.mark.parametrize("kind", ["file", "stream", "feather", "sliced"])
def test_arrow(tmp_path, kind):
    """Columns of an Arrow file, stream or Feather file of one batch are mapped, fixed-size lists as axes."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    feather = pytest.importorskip("pyarrow.feather", exc_type=ImportError)
    rows, wanted = table(pa)
    path = tmp_path / "t.arrow"
    if kind == "feather":
        feather.write_feather(rows, str(path), compression="uncompressed")
    else:
        if kind == "sliced":
            rows, wanted = rows.slice(2, 3), {name: x[2:5] for name, x in wanted.items()}
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), rows.schema) as writer:
            writer.write_table(rows)

    check(storage.open_fields(path), wanted)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_of_several_batches(tmp_path, kind, monkeypatch):
    """Batches are joined by reference: columns of numbers, fixed-size lists, and lists of free length."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", str(int(kind == "stream")))
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    path, lists = tmp_path / "t.arrow", [[k] * (k % 4) for k in range(100)]
    pairs = pa.array([[[k, 0], [k, 1]] for k in range(100)], pa.list_(pa.list_(pa.int64())))
    rows = pa.table(
        {"x": np.arange(100), "l": lists, "big": pa.array(lists, pa.large_list(pa.int64())), "pairs": pairs}
    )
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)
    found = storage.open_fields(path)

    assert len(found["x"].arrays) == 15 and all(storage.locate(a).path == str(path) for a in found["x"].arrays)
    data = jl.open(path)
    assert (data[:].x == np.arange(100)).all()
    for name in ("l", "big"):
        assert [data[k][data.fields.index(name)].tolist() for k in (99, 0, 42)] == [[99] * 3, [], [42] * 2]
        got = data[::-1][data.fields.index(name)]
        assert (
            got.values.tolist() == sum(lists[::-1], []) and np.diff(got.offsets).tolist() == list(map(len, lists))[::-1]
        )
    assert data.spec["pairs"].shape == (None, 2) and data[7].pairs.tolist() == [[7, 0], [7, 1]]
    copy = pickle.loads(pickle.dumps(data))
    assert len({id(storage.mapping(part.array).map) for part in copy.sources["x"].parts}) == 1
    assert copy[50].l.tolist() == lists[50] and (copy[:].x == np.arange(100)).all()


def test_arrow_offsets_that_lie(tmp_path):
    """List offsets that fall or end beyond the values are refused, never followed."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "t.arrow"
    rows = pa.table({"l": pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32()))})
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)
    raw = path.read_bytes()
    ends = struct.pack("<4i", 0, 2, 3, 6)
    assert raw.count(ends) == 1
    for other in ((0, 2, 3, 7), (0, 4, 3, 6), (-1, 2, 3, 6), (0, 2, 3, 2**31 - 1)):
        path.write_bytes(raw.replace(ends, struct.pack("<4i", *other)))
        with pytest.raises(DataError, match="t.arrow, column l: .*expected.*found"):
            storage.open_fields(path)


def test_arrow_without_rows(tmp_path):
    """No rows, and no batch at all, are columns of length 0."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    rows, wanted = table(pa)
    for count in (0, 1):
        with pa.ipc.new_file(str(tmp_path / "t.arrow"), rows.schema) as writer:
            for _ in range(count):
                writer.write_batch(pa.RecordBatch.from_pylist([], rows.schema))
        check(storage.open_fields(tmp_path / "t.arrow"), {name: x[:0] for name, x in wanted.items()})


# ---- Hugging Face datasets


def hugging(datasets, count=250):
    """A data set with a field of each kind that we take, and what its columns are."""
    lists = [[k] * (k % 3) for k in range(count)]
    image = np.arange(count * 6, dtype="f4").reshape(count, 2, 3)
    columns = {"x": np.arange(count), "label": np.arange(count) % 3, "pair": np.arange(2 * count).reshape(-1, 2)}
    features = datasets.Features(
        x=datasets.Value("int64"),
        label=datasets.ClassLabel(names=["a", "b", "c"]),
        pair=datasets.Sequence(datasets.Value("int16"), length=2),
        image=datasets.Array2D((2, 3), "float32"),
        tokens=datasets.Sequence(datasets.Value("int32")),
    )
    table = {name: column.tolist() for name, column in columns.items()}
    return (
        datasets.Dataset.from_dict({**table, "image": image, "tokens": lists}, features),
        {**columns, "image": image},
        lists,
    )


def test_hugging_face(tmp_path, monkeypatch):
    """Folders of save_to_disk, several shards of several batches, and data sets in memory, with rows selected."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    datasets.disable_progress_bars()
    given, wanted, lists = hugging(datasets)
    given.save_to_disk(tmp_path / "d", num_shards=3)
    rows = np.array([249, 0, 7, 7])
    # As datasets 1 saved what had been selected.
    given.save_to_disk(tmp_path / "old")
    pa = pytest.importorskip("pyarrow")
    with pa.ipc.new_stream(str(tmp_path / "old" / "indices.arrow"), pa.schema([("indices", pa.uint64())])) as writer:
        writer.write_table(pa.table({"indices": rows.astype("u8")}))
    state = json.loads((tmp_path / "old" / "state.json").read_text())
    (tmp_path / "old" / "state.json").write_text(
        json.dumps({**state, "_indices_files": [{"filename": "indices.arrow"}]})
    )

    every = np.arange(250)
    loaded = datasets.load_from_disk(str(tmp_path / "d"))
    for data, taken in [
        (jl.open(tmp_path / "d"), every),
        (jl.open(tmp_path / "old"), rows),
        (jl.Dataset(given), every),
        (jl.Dataset(loaded.select(rows)), rows),
        (jl.Dataset(loaded.select(range(100, 103))), every[100:103]),
    ]:
        batch = data[:]
        for name, column in wanted.items():
            assert (getattr(batch, name) == column[taken]).all(), name
        assert batch.tokens.values.tolist() == sum((lists[k] for k in taken), [])
        assert data.spec["image"].shape == (2, 3) and data.spec["tokens"].shape == (None,)
    assert all(storage.locate(a) for a in storage.open_fields(tmp_path / "d")["x"].arrays)


def test_hugging_face_shards_cut_under_their_map(tmp_path, monkeypatch):
    """A shard that is cut after it was opened is an error with its path and bytes before a row is read."""
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    datasets.disable_progress_bars()
    folder = tmp_path / "größe ü"
    hugging(datasets)[0].save_to_disk(folder, num_shards=2)
    data = jl.open(folder)
    shard = folder / "data-00001-of-00002.arrow"
    size = shard.stat().st_size
    os.truncate(shard, 1000)

    with pytest.raises(DataError, match=f"{shard.name}: truncated under its map: {size} bytes expected, 1000 found"):
        data[0]
    with pytest.raises(DataError, match=shard.name):
        jl.open(folder)


def test_hugging_face_folders_that_lie(tmp_path):
    """Splits, names that leave the folder, shards that differ, broken state and row numbers are refused with the remedy."""
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    datasets.disable_progress_bars()
    given = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    datasets.DatasetDict(train=given, test=given).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match=r"dict: a folder of splits.*'train', 'test'"):
        jl.open(tmp_path / "dict")
    assert len(jl.open(tmp_path / "dict" / "train")) == 3
    with pytest.raises(TypeError, match=r"a dict of splits \(train\): give one of them"):
        jl.Dataset(datasets.DatasetDict(train=given))
    with pytest.raises(TypeError, match="an IterableDataset has no rows"):
        jl.Dataset(given.to_iterable_dataset())
    with pytest.raises(TypeError, match="field 'x' is a frame of several columns: give it alone"):
        jl.Dataset(x=given)

    state = tmp_path / "dict" / "train" / "state.json"
    good = json.loads(state.read_text())
    file = good["_data_files"][0]["filename"]
    for files in ([{"filename": "../x.arrow"}], [{"filename": "/etc/passwd"}], [], "x", [{"filename": 5}], [None]):
        state.write_text(json.dumps({**good, "_data_files": files}))
        with pytest.raises(DataError, match="train/state.json: _data_files with file names of this folder expected"):
            jl.open(tmp_path / "dict" / "train")
    for text in ("", "{", "[]", "[" * 100_000):
        state.write_text(text)
        with pytest.raises(DataError, match="state.json: a broken file of .* bytes: a JSON object expected"):
            jl.open(tmp_path / "dict" / "train")
    state.write_text(
        json.dumps({**good, "_data_files": [{"filename": file}] * 2, "_indices_files": [{"filename": file}]})
    )
    with pytest.raises(DataError, match="indices: a column 'indices' expected, none found"):
        jl.open(tmp_path / "dict" / "train")
    state.write_text(json.dumps({**good, "_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(FileNotFoundError, match="gone.arrow"):
        jl.open(tmp_path / "dict" / "train")


# ---- what is there


def test_arrow_that_cannot_be_mapped(tmp_path):
    """Compression refuses a file; nulls, strings, bits, structs, dictionaries and lists of lists a column."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    feather = pytest.importorskip("pyarrow.feather", exc_type=ImportError)
    path = tmp_path / "t.arrow"
    rows = pa.table({"x": np.arange(1000)})
    for compression in ("lz4", "zstd"):
        feather.write_feather(rows, str(path), compression=compression)
        with pytest.raises(DataError, match="t.arrow: compressed"):
            storage.open_fields(path)

    mixed = pa.table(
        {
            "x": np.arange(3),
            "nulls": pa.array([1, None, 3]),
            "text": ["a", "b", "c"],
            "bits": [True, False, True],
            "struct": [{"a": 1}, {"a": 2}, {"a": 3}],
            "words": pa.array(["a", "b", "a"]).dictionary_encode(),
            "holes": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
            "inner": pa.array([[1, 2], [None, 5], [3, 4]], pa.list_(pa.int8(), 2)),
            "deep": [[[1], [2, 3]], [[4]], []],
        }
    )
    with pa.ipc.new_file(str(path), mixed.schema) as writer:
        writer.write_table(mixed)
    check(storage.open_fields(path, fields=["x"]), {"x": np.arange(3)})
    for name in mixed.column_names[1:]:
        reason = "nulls found" if name in ("nulls", "holes", "inner") else "cannot be mapped"
        reason = "lists within lists differ in length" if name == "deep" else reason
        with pytest.raises(DataError, match=f"t.arrow, column {name}: .*{reason}"):
            storage.open_fields(path, fields=[name])


@pytest.mark.parametrize(
    "name, data, extra",
    [
        ("x.h5", b"\x89HDF\r\n\x1a\n", "hdf5"),
        ("x.arrow", b"ARROW1\0\0", "arrow"),
        ("x.parquet", b"PAR1", "arrow"),
    ],
)
def test_missing_packages(tmp_path, monkeypatch, name, data, extra):
    """A format whose package is missing says which extra to install, and needs it for nothing else."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(data + bytes(99))

    with pytest.raises(ImportError, match=rf"{name}.*pip install 'jitloader\[{extra}\]'"):
        storage.open_fields(tmp_path / name)


def test_packages_that_fail(tmp_path, monkeypatch):
    """A package that is there but cannot be imported is not called missing."""
    (tmp_path / "h5py.py").write_text("raise ImportError('requires another NumPy')")
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "h5py", raising=False)

    with pytest.raises(ImportError, match="needs h5py, which is installed but fails: requires another NumPy"):
        storage.open_fields(tmp_path / "x.h5")
