"""Mutated files of every reader: an error that names the file, or arrays that can be read; no crash, no large allocation.

The files are opened in a process of their own, so that a crash is seen: `python tests/test_storage_fuzz.py FOLDER COUNT
READER...` prints what came out, or dies at the file that lies in FOLDER then.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
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


# Who writes the file, its name, where its header lies (the first bytes, the last ones where negative, or all), and how it
# is opened.
READERS: dict[str, tuple[Any, str, int | None, Any]] = {
    "npy": (make_npy, "x.npy", 128, opened),
    "record": (make_record, "r.npy", 192, opened),
    "npz": (make_npz, "d.npz", None, opened),
    "packed": (make_packed, "d.npz", None, lambda path: opened(path, unpack=True)),
    "raw": (make_raw, "x.bin", None, opened_raw),
    "idx": (make_idx, "x-idx3-ubyte", 16, opened),
    "cifar": (make_cifar, "data_batch_1.bin", None, opened),
    "safetensors": (make_safetensors, "m.safetensors", 180, opened),
    "hdf5": (make_hdf5, "d.h5", None, opened),
    "arrow": (make_arrow, "t.arrow", None, opened),
    "feather": (make_feather, "t.feather", None, opened),
    "stream": (make_stream, "s.arrow", None, opened),
    "parquet": (make_parquet, "t.parquet", -3000, opened),
    "hugging": (make_hugging, "d", None, opened),
    "folder": (make_folder, "f", None, opened),
}


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
    """Read all bytes of some fields; gives their number."""
    total = 0
    for field in found.values():
        arrays = field.arrays if isinstance(field, storage.Column) else (field,)
        for array in arrays:
            assert type(array) is np.ndarray and not array.dtype.hasobject
            total += len(array.tobytes())
        if isinstance(field, storage.Column) and field.offsets is not None:
            assert field.offsets[0] >= 0 and (np.diff(field.offsets) >= 0).all()
            assert field.offsets[-1] <= sum(map(len, arrays))
            total += field.offsets.nbytes // 2  # of four bytes in the file
    return total


def run(folder: Path, count: int, names: list[str]) -> dict[str, dict[str, int]]:
    """Mutate files of some readers, and count what opening and reading them gave."""
    outcomes = {}
    for name in names:
        maker, file, head, opener = READERS[name]
        first, path = folder / f"whole-{name}" / file, folder / name / file
        first.parent.mkdir()
        maker(first)
        rng, seen = random.Random(name), collections.Counter()
        for _ in range(count):
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            if first.is_dir():
                shutil.copytree(first, path)
            target = path / rng.choice(sorted(os.listdir(first))) if first.is_dir() else path
            whole = first / target.name if first.is_dir() else first
            target.write_bytes(mutate(whole.read_bytes(), rng, head))
            signal.alarm(60)
            try:
                total = read(opener(path))
            except ALLOWED as error:
                assert str(path) in str(error), f"{type(error).__name__}: {error}"
                seen[type(error).__name__] += 1
                continue
            finally:
                signal.alarm(0)
            if name not in ("packed", "parquet"):
                assert total <= sum(f.stat().st_size for f in ([path] if path.is_file() else path.iterdir())) * 2
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
    return outcomes


def installed():
    """The readers whose packages are there."""
    missing = {"hdf5"} if not _there("h5py") else set()
    missing |= {"arrow", "feather", "stream", "parquet", "hugging"} if not _there("pyarrow") else set()
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
