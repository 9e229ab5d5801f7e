"""Mutated files of every reader: an error that names the file, or what the format's own library reads of that same file;
no crash, no large allocation.

The files are opened in a process of their own, so that a crash is seen: `python tests/test_storage_fuzz.py FOLDER COUNT
READER...` prints what came out, or dies at the file that lies in FOLDER then.
"""

from __future__ import annotations

import collections
import faulthandler
import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jitloader import storage

RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(7, 3)).astype("f4"), np.arange(7, dtype="u1")
ALLOWED = (ImportError, OSError, ValueError)  # DataError is a ValueError


def make_npy(path):
    np.save(path, RNG.normal(size=(20, 3)).astype(">f4"))


def make_record(path):
    np.save(path, np.zeros(20, [("a", ">i2"), ("b", "f4", (2,)), ("c", "S3")]))


def make_npz(path):
    np.savez(path, label=LABELS, x=X, big=np.arange(7, dtype=">i4"))


def make_packed(path):
    np.savez_compressed(path, label=LABELS, x=X, text=np.array(["a", "bcd"]))


def make_raw(path):
    X.tofile(path)


def make_idx(path):
    images = RNG.integers(0, 256, (7, 4, 4), dtype=np.uint8)
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", *images.shape) + images.tobytes())


def make_cifar(path):
    path.write_bytes(b"".join(bytes([k]) + bytes(3072) for k in range(2)))


def make_safetensors(path):
    header = {
        "x": {"dtype": "F32", "shape": [5, 2], "data_offsets": [0, 40]},
        "y": {"dtype": "I64", "shape": [5], "data_offsets": [40, 80]},
        "__metadata__": {"a": "b"},
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(80))


def make_hdf5(path):
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X)
        file.create_dataset("g/y", data=LABELS)


def make_chunked(path):
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.tile(X, (40, 4)), chunks=(100, 12), compression="gzip", shuffle=True)
        file.create_dataset("y", data=LABELS, chunks=(3,), fletcher32=True)


def make_zarr(folder, version):
    import zarr

    given = {} if version == 2 else {"zarr_format": version}
    group = zarr.open_group(str(folder), mode="w", **given)
    group.create_array("x", shape=X.shape, chunks=(4, 3), dtype=X.dtype)[...] = X
    group.create_array("y", shape=LABELS.shape, chunks=(7,), dtype=LABELS.dtype, compressors=None)[...] = LABELS


def arrow_table():
    import pyarrow as pa

    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(np.arange(36.0)), 3), 2)
    lists = pa.array([[k] * k for k in range(6)], pa.list_(pa.int32()))
    return pa.table({"i": np.arange(6, dtype="i4"), "x": np.arange(6.0), "nested": nested, "l": lists, "t": lists})


def make_arrow(path):
    import pyarrow as pa

    table = arrow_table()
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def make_stream(path):
    import pyarrow as pa

    table = arrow_table()
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def make_feather(path):
    import pyarrow as pa
    import pyarrow.feather

    pyarrow.feather.write_feather(pa.table({"x": np.arange(1000)}), str(path), compression="lz4")


def make_parquet(path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow_table(), path, row_group_size=4)


def make_hugging(folder):
    import pyarrow as pa

    folder.mkdir()
    table = arrow_table()
    for name, rows in (("a.arrow", table), ("b.arrow", table.slice(1, 3))):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(rows)
    with pa.ipc.new_stream(str(folder / "indices.arrow"), pa.schema([("indices", pa.uint64())])) as writer:
        writer.write_table(pa.table({"indices": np.array([8, 0, 3], "u8")}))
    files = {"_data_files": [{"filename": "a.arrow"}, {"filename": "b.arrow"}]}
    (folder / "state.json").write_text(json.dumps({**files, "_indices_files": [{"filename": "indices.arrow"}]}))
    info = {"features": {"nested": {"_type": "Array2D", "shape": [2, 3], "dtype": "float64"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def make_folder(folder):
    storage.save_fields(folder, {"x": X, "label": LABELS}, {"meta": [1, 2]})


def opened(path, **given):
    return storage.open_fields(path, **given)


def opened_raw(path):
    return {"x": storage.open_array(path, dtype="f4", shape=(3,))}


# -- what their own libraries read: of each of some names an array, or a list of one a row -----------------------------


def load_npy(path, names):
    return dict.fromkeys(names, np.load(path))


def load_npz(path, names):
    """Members as np.load gives them, but whether their checksum is right: mapping looks at no byte before it is used."""
    checked, zipfile.ZipExtFile._update_crc = zipfile.ZipExtFile._update_crc, lambda *_: None
    try:
        return load_packed(path, names)
    finally:
        zipfile.ZipExtFile._update_crc = checked


def load_packed(path, names):
    with np.load(path) as file:
        return {name: file[name] for name in names}


def load_raw(path, names):
    return dict.fromkeys(names, np.fromfile(path, "f4").reshape(-1, 3))


def load_idx(path, names):
    """As the format's page says: two zeros, a type, a number of axes, their lengths and the values, all big-endian."""
    raw = path.read_bytes()
    dtype = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}[raw[2]]
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    return dict.fromkeys(names, np.frombuffer(raw, dtype, -1, 4 + 4 * len(shape)).reshape(shape))


def load_cifar(path, names):
    rows = np.fromfile(path, "u1").reshape(-1, 3073)
    return {"label": rows[:, 0], "image": rows[:, 1:].reshape(-1, 3, 32, 32)}


def load_safetensors(path, names):
    from safetensors.numpy import load_file

    return load_file(path)


def load_hdf5(path, names):
    import h5py

    with h5py.File(path, "r") as file:
        return {name: file[name][()] for name in names}


def load_chunked(path, names):
    """As h5py reads; but its search, by broken keys, may miss a chunk that it lists: then that one's bytes, decoded here."""
    import h5py

    found = load_hdf5(path, names)
    with h5py.File(path, "r") as file:
        for name, array in found.items():
            node, listed = file[name], []
            node.id.chunk_iter(lambda info: listed.append(info))  # noqa: B023
            for info in listed:
                offsets = info.chunk_offset
                part = array[tuple(slice(o, o + c) for o, c in zip(offsets, node.chunks, strict=True))]
                if name == "x" and not part.any() and not any(o % c for o, c in zip(offsets, node.chunks, strict=True)):
                    with open(path, "rb") as raw:
                        raw.seek(info.byte_offset)
                        data = raw.read(info.size)
                    data = data if info.filter_mask & 2 else zlib.decompress(data)
                    data = data if info.filter_mask & 1 else np.frombuffer(data, "u1").reshape(4, -1).T.tobytes()
                    whole = np.frombuffer(data, array.dtype).reshape(node.chunks)
                    part[...] = whole[tuple(map(slice, part.shape))]
    return found


def load_zarr(folder, names):
    import zarr

    return {name: np.asarray(zarr.open_array(str(folder / name), mode="r")[...]) for name in names}


def arrow_values(table):
    """The columns of a table, each chunk as pyarrow gives it to NumPy; lists of free length as a list of arrays."""
    import pyarrow as pa

    table.validate(full=True)
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            found[name] = [np.array(row) for row in column.to_pylist()]
        elif pa.types.is_fixed_size_list(kind):
            found[name] = np.array(column.to_pylist())
        elif pa.types.is_fixed_size_binary(kind):
            found[name] = np.array(column.to_pylist(), f"V{kind.byte_width}")
        else:
            column = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
            chunks = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
            found[name] = np.concatenate(chunks) if chunks else np.empty(0)
    return found


def load_arrow(path, names):
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        return arrow_values(pa.ipc.open_file(file).read_all())


def stream_table(path):
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()


def load_stream(path, names):
    return arrow_values(stream_table(path))


def load_parquet(path, names):
    import pyarrow.parquet

    return arrow_values(pyarrow.parquet.ParquetFile(path).read())


def load_hugging(folder, names):
    """As `datasets` does: the files that the state names, one after the other, and of them the rows of its indices."""
    import pyarrow as pa

    state = json.loads((folder / "state.json").read_bytes())
    table = pa.concat_tables([stream_table(folder / one["filename"]) for one in state["_data_files"]])
    picked = state.get("_indices_files") or state.get("_indices_data_files") or []
    if picked:
        rows = pa.concat_tables([stream_table(folder / one["filename"]) for one in picked])
        table = table.take(rows.column("indices"))
    return arrow_values(table)


def load_folder(folder, names):
    return {name: np.load(folder / f"{name}.npy") for name in names}


# Who writes the file, its name, where its header lies (the first bytes, the last ones where negative, or all), how it is
# opened, and what its own library reads.
READERS: dict[str, tuple[Any, str, int | None, Any, Any]] = {
    "npy": (make_npy, "x.npy", 128, opened, load_npy),
    "record": (make_record, "r.npy", 192, opened, load_npy),
    "npz": (make_npz, "d.npz", None, opened, load_npz),
    "packed": (make_packed, "d.npz", None, lambda path: opened(path, unpack=True), load_packed),
    "raw": (make_raw, "x.bin", None, opened_raw, load_raw),
    "idx": (make_idx, "x-idx3-ubyte", 16, opened, load_idx),
    "cifar": (make_cifar, "data_batch_1.bin", None, opened, load_cifar),
    "safetensors": (make_safetensors, "m.safetensors", 180, opened, load_safetensors),
    "hdf5": (make_hdf5, "d.h5", None, opened, load_hdf5),
    "chunked": (make_chunked, "d.h5", None, opened, load_chunked),
    "zarr2": (lambda path: make_zarr(path, 2), "d.zarr", None, opened, load_zarr),
    "zarr3": (lambda path: make_zarr(path, 3), "d.zarr", None, opened, load_zarr),
    "arrow": (make_arrow, "t.arrow", None, opened, load_arrow),
    "feather": (make_feather, "t.feather", None, opened, load_arrow),
    "stream": (make_stream, "s.arrow", None, opened, load_stream),
    "parquet": (make_parquet, "t.parquet", -3000, opened, load_parquet),
    "hugging": (make_hugging, "d", None, opened, load_hugging),
    "folder": (make_folder, "f", None, opened, load_folder),
}
UNMAPPED = ("packed", "parquet", "chunked", "zarr2", "zarr3")  # what is read may be larger than the file


def mutate(data, rng, head):
    """Flip bits, set, cut, insert, swap or number bytes; mostly in the header, where bytes mean something."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        low, high = 0, len(data)
        if head is not None and rng.random() < 0.9:
            low, high = (0, min(head, high)) if head > 0 else (max(high + head, 0), high)
        at, how = rng.randrange(low, high) if high > low else 0, rng.randrange(10)
        if how < 3 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how < 5 and data:
            data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x30, 0x39, rng.randrange(256)))
        elif how == 5:
            del data[at:]
        elif how == 6:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif how == 7:
            size = rng.choice((1, 4, 8, 64))
            other = rng.randrange(low, high) if high > low else 0
            data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
        else:
            size, code = rng.choice(((8, "<q"), (4, "<i")))
            most = 1 << (8 * size - 1)
            data[at : at + size] = struct.pack(
                code, rng.choice((-1, most - 1, -most, 1 << 30, 0, min(len(data), most - 1)))
            )
    return bytes(data)


def read(found):
    """Read all bytes of some fields; gives their number, and the fields: an array, or a list of one a row."""
    total, given = 0, {}
    for name, field in found.items():
        arrays = field.arrays if isinstance(field, storage.Column) else (field,)
        for array in arrays:
            assert type(array) is np.ndarray and not array.dtype.hasobject
            if storage.is_chunked(array):
                memory = storage.mapping(array).map
                memory.decode(0, len(memory.state))
            total += len(array.tobytes())
        given[name] = whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if isinstance(field, storage.Column):
            if field.offsets is not None:
                assert field.offsets[0] >= 0 and (np.diff(field.offsets) >= 0).all()
                assert field.offsets[-1] <= len(whole)
                total += field.offsets.nbytes // 2  # of four bytes in the file
                given[name] = [whole[a:b] for a, b in itertools.pairwise(field.offsets)]
            if field.rows is not None:
                given[name] = [given[name][k] for k in field.rows] if field.offsets is not None else whole[field.rows]
    return total, given


def same(got, wanted):
    """Whether the values are the same: bits where dtypes are, since a NaN is a NaN."""
    if isinstance(got, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if not np.size(got):  # a list of no lists has no inner shape
        return np.size(wanted) == 0 and len(np.atleast_1d(got)) == len(np.atleast_1d(wanted))
    if got.dtype == wanted.dtype:
        return got.shape == wanted.shape and got.tobytes() == wanted.tobytes()
    return got.shape == wanted.shape and np.array_equal(got, wanted, equal_nan=got.dtype.kind == "f")


def crashes(call):
    """Whether a call ends its process: made in a child."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            call()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def run(folder: Path, count: int, names: list[str]) -> dict[str, dict[str, int]]:
    """Mutate files of some readers, and count what opening and reading them gave."""
    outcomes = {}
    for name in names:
        maker, file, head, opener, load = READERS[name]
        first, path = folder / f"whole-{name}" / file, folder / name / file
        first.parent.mkdir()
        maker(first)
        rng, seen = random.Random(name), collections.Counter()
        for _ in range(count):
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            if first.is_dir():
                shutil.copytree(first, path)
            parts = sorted(str(f.relative_to(first)) for f in first.rglob("*") if f.is_file())
            part = rng.choice(parts) if parts else ""
            target, whole = path / part, first / part
            target.write_bytes(mutate(whole.read_bytes(), rng, head))
            if name == "chunked" and crashes(lambda: load_hdf5(path, ["x", "y"])):  # noqa: B023
                seen["crash of its library"] += 1  # which we call too, and can do nothing about
                continue
            signal.alarm(60)
            try:
                total, given = read(opener(path))
            except ALLOWED as error:
                assert str(path) in str(error), f"{type(error).__name__}: {error}"
                seen[type(error).__name__] += 1
                continue
            finally:
                signal.alarm(0)
            if name not in UNMAPPED:
                assert total <= sum(f.stat().st_size for f in ([path] if path.is_file() else path.iterdir())) * 2
            try:
                wanted = load(path, list(given))
            except Exception as error:
                seen[f"{type(error).__name__} of its library: {error!s:.80}"] += 1
                continue
            for field, array in given.items():
                assert same(array, wanted[field]), f"{name} {field}: {array!r} read, {wanted[field]!r} expected"
            seen["read"] += 1
        outcomes[name] = dict(seen)
    return outcomes


def fuzz(tmp_path, count, names):
    """Run readers in a child that may take 8 GiB of addresses, and write no file beyond 1 GiB."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(storage.__file__).parents[2]), *sys.path]),
        "JITLOADER_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", __file__, str(tmp_path), str(count), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert list(outcomes) == names and all(sum(seen.values()) == count for seen in outcomes.values())
    for name, seen in outcomes.items():
        print(name, seen)
        assert seen.get("read", 0) < count
        assert seen.get("read") or name == "feather", name
        assert not [what for what in seen if " of its library:" in what], "what it refuses we refuse"
    return outcomes


def installed():
    """The readers whose packages are there."""
    needs = {"h5py": {"hdf5", "chunked"}, "safetensors": {"safetensors"}, "zarr": {"zarr2", "zarr3"}}
    needs["pyarrow"] = {"arrow", "feather", "stream", "parquet", "hugging"}
    missing = set().union(*(names for package, names in needs.items() if not _there(package)))
    if "zarr3" not in missing and not hasattr(
        __import__("zarr"), "create_array"
    ):  # of a version that writes neither so
        missing |= needs["zarr"]
    return [name for name in READERS if name not in missing]


def _there(package):
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def test_mutated_files(tmp_path):
    """100 mutated files of each format: an error that names the file, or arrays that can be read."""
    fuzz(tmp_path, 100, installed())


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
def test_many_mutated_files(tmp_path, name):
    """The same, 2,000 files of each format."""
    if name not in installed():
        pytest.skip("its package is not installed")
    fuzz(tmp_path, 2000, [name])


if __name__ == "__main__":
    import resource

    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
