"""Maps, their places in files, watches, and folders saved as a whole."""

from __future__ import annotations

import gc
import json
import mmap
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jitloader as jl
from jitloader import storage
from jitloader.errors import DataError

DTYPES = ["?", "u1", "<i2", ">i2", "<u4", ">f4", "f8", "f2", "<c8", ">c16", "M8[us]", "m8[s]", "S5", "<U3", ">U3", "V7"]
RECORD = np.dtype([("a", ">i2"), ("b", "f4", (2,)), ("größe", "S3")])


def some(dtype, shape=(5, 3)):
    """Any values of a dtype, but no NaN."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 100, (*shape, dtype.itemsize), dtype=np.uint8)
    if dtype.kind == "U":
        return np.array(["xyz", "", "ä"] * 5).reshape(shape).astype(dtype)
    return raw.view(dtype).reshape(shape) if dtype.kind != "b" else (raw[..., 0] % 2).astype(bool)


def bits(array):
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, RECORD], ids=str)
@pytest.mark.parametrize("order", "CF")
def test_npy_of_every_dtype(tmp_path, dtype, order):
    """A .npy is mapped read-only with its own dtype and bytes, in C and Fortran order."""
    x = np.asarray(some(dtype), order=order)
    np.save(tmp_path / "x.npy", x)

    y = storage.open_array(tmp_path / "x.npy")

    assert type(y) is np.ndarray and not y.flags.writeable and y.flags.f_contiguous == (order == "F")
    assert y.dtype == x.dtype and y.shape == x.shape and bits(y) == bits(x)
    assert storage.watch(y) is not None


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_versions(tmp_path, version):
    """All three versions of the .npy header are read."""
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, np.arange(6).reshape(2, 3), version)

    assert storage.open_array(tmp_path / "x.npy").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_npy_of_python_2(tmp_path):
    """The long integers of Python 2 headers are read without a warning."""
    head = b"{'descr': '<i4', 'fortran_order': False, 'shape': (2L, 1L), }"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head + bytes(8))

    assert storage.open_array(tmp_path / "x.npy").shape == (2, 1)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (), (1, 1, 1, 1)])
def test_npy_shapes(tmp_path, shape):
    """Arrays without rows, columns or axes keep their shape."""
    np.save(tmp_path / "x.npy", np.zeros(shape))

    assert storage.open_array(tmp_path / "x.npy").shape == shape


@pytest.mark.parametrize(
    "descr, shape",
    [
        ("'<f8'", "(1000000, 1000000, 1000000)"),
        ("'<f8'", "(9223372036854775807, 9223372036854775807, 16)"),
        ("'<f8'", "(4294967296, 4294967296)"),
        ("'<f8'", "(0, 9223372036854775807, 9223372036854775807)"),
        ("'<f8'", "(99999999999999999999999999,)"),
        ("'<f8'", "(" + "9" * 4000 + ",)"),
        ("'<f8'", "(" + "1," * 100 + ")"),
        ("'<f8'", "(-1, 5)"),
        ("'<f8'", "(True,)"),
        ("'<f8'", "(2.0,)"),
        ("'<f8'", "5"),
        ("'<f8'", "(" * 500),
        ("'<f8'", "__import__('os').getcwd()"),
        ("'|O'", "(1,)"),
        ("[('a', '|O')]", "(1,)"),
        ("'S0'", "(8,)"),
        ("'V99999999999999'", "(8,)"),
        ("('<f8', (2,))", "(4,)"),
        ("'a5'", "(8,"),
        ("'nonsense'", "(8,)"),
        ("7", "(8,)"),
    ],
)
def test_npy_headers_that_lie(tmp_path, descr, shape):
    """A header with an absurd shape or dtype, or with code in it, is refused before anything is allocated."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head + bytes(64))

    with pytest.raises(DataError, match="x.npy: "):
        storage.open_array(path)


@pytest.mark.parametrize("data", [b"", b"hello, not an array", b"\x93NUMPY", b"\x93NUMPY\x09\x00" + bytes(50)], ids=len)
def test_npy_that_is_none(tmp_path, data):
    """Empty, foreign and cut files, and unknown versions, are refused with path and bytes."""
    (tmp_path / "part.npy").write_bytes(data)

    with pytest.raises(DataError, match="part.npy: "):
        storage.open_array(tmp_path / "part.npy")


@pytest.mark.parametrize("size", [40, 127, 4000, 8127])
def test_npy_cut(tmp_path, size):
    """A half-written .npy is refused at open: path, bytes expected and bytes found."""
    path = tmp_path / "part.npy"
    np.save(path, np.arange(1000.0))
    os.truncate(path, size)

    with pytest.raises(DataError, match=rf"part.npy: .*expected.*\b{size}\b.* found"):
        storage.open_array(path)


def test_pickles_do_not_run(tmp_path):
    """Neither an object .npy nor a pickle under the name of a .npy is loaded."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    np.save(tmp_path / "o.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "o.npz", x=np.array([Evil()], dtype=object))
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Evil()))

    for name in ("o.npy", "o.npz", "raw.npy"):
        with pytest.raises(DataError, match=rf"{name}.*pickle.*never loaded"):
            storage.open_fields(tmp_path / name)
    with pytest.raises(DataError, match="field 'x'.*Python objects"):
        storage.save_fields(tmp_path / "out", {"x": np.array([Evil()], dtype=object)})
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_what_the_system_refuses(tmp_path):
    """Missing files and folders are the system's errors, with the full path also for a relative one."""
    for path, error in ((tmp_path / "gone.npy", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=str(path)):
            storage.open_array(path)
    with pytest.raises(FileNotFoundError, match=f"{os.getcwd()}/gone.npy"):
        storage.open_array("gone.npy")
    with pytest.raises(FileNotFoundError, match="gone.npy"):
        storage.open_fields(tmp_path / "gone.npy")
    with pytest.raises(DataError, match="without .npy"):
        storage.open_fields(tmp_path)
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(DataError, match="pipe.npy: not a regular file"):
        storage.open_array(tmp_path / "pipe.npy")


def test_no_permission(tmp_path):
    """A file that may not be read is a PermissionError at open, with its path."""
    np.save(tmp_path / "x.npy", np.arange(3))
    os.chmod(tmp_path / "x.npy", 0)
    script = f"""
import os
from jitloader import storage
if os.geteuid() == 0: os.seteuid(65534)  # root may read everything
try:
    storage.open_array({str(tmp_path / "x.npy")!r})
except PermissionError as error:
    print(error)
"""
    assert str(tmp_path / "x.npy") in run(script)


def test_too_many_open_files(tmp_path):
    """Running out of descriptors is an OSError that names the file."""
    np.save(tmp_path / "x.npy", np.arange(3))
    script = f"""
import resource
from jitloader import storage
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
kept = []
try:
    while True: kept.append(storage.open_array({str(tmp_path / "x.npy")!r}))
except OSError as error:
    assert 'x.npy' in str(error) and len(kept) > 10, error
    print('named')
"""
    assert run(script) == "named"


def run(script, **env):
    """Run a script in a new process; its last line, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


def test_paths_with_any_letters(tmp_path):
    """Spaces and letters outside ASCII work, as str, bytes and Path, also under LC_ALL=C."""
    folder = tmp_path / "a ä日本"
    folder.mkdir()
    path = folder / "dâta 1.npy"
    np.save(path, np.arange(5))

    for name in (path, str(path), os.fsencode(path), pathlib.Path(path)):
        assert storage.open_array(name).tolist() == [0, 1, 2, 3, 4]
    storage.save_fields(folder / "новый", {"größe": np.arange(3)})
    assert storage.open_fields(folder / "новый")["größe"].tolist() == [0, 1, 2]
    script = f"from jitloader import storage; print(storage.open_array({ascii(str(path))}).sum())"
    assert run(script, LC_ALL="C") == "10"


def test_a_hundred_gigabytes_open_at_once(tmp_path):
    """Opening costs the same at any size: a sparse .npy of 100 GB in less than 50 ms."""
    path = tmp_path / "big.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (25_000_000, 1000)}
        )
        file.truncate(file.tell() + 100_000_000_000)

    times = []
    for _ in range(3):
        start = time.perf_counter()
        x = storage.open_array(path)
        times.append(time.perf_counter() - start)

    assert x.shape == (25_000_000, 1000) and x[-1, -1] == 0
    assert min(times) < 0.05, times


def test_nothing_is_left_open(tmp_path):
    """A file is closed when the last view of it is gone."""
    np.save(tmp_path / "lock.npy", np.arange(10.0))

    x = storage.open_array(tmp_path / "lock.npy")[2:]
    guard = storage.watch(x)
    assert "lock.npy" in pathlib.Path("/proc/self/maps").read_text()
    del x, guard
    gc.collect()

    assert "lock.npy" not in pathlib.Path("/proc/self/maps").read_text()


def test_raw(tmp_path):
    """Raw files give rows of the dtype and row shape after the offset."""
    x = np.arange(24, dtype=">u2")
    (tmp_path / "t.bin").write_bytes(b"head" + x.tobytes())

    y = storage.open_array(tmp_path / "t.bin", dtype=">u2", shape=(2, 3), offset=4)

    assert y.shape == (4, 2, 3) and y.dtype == ">u2" and (y.reshape(-1) == x).all() and not y.flags.writeable
    (tmp_path / "none.bin").write_bytes(b"")
    assert storage.open_array(tmp_path / "none.bin", dtype="f4", shape=(3,)).shape == (0, 3)


def test_raw_that_does_not_fit(tmp_path):
    """An odd number of bytes, an offset beyond the file and a missing dtype are errors with both numbers."""
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(11))
    np.save(tmp_path / "x.npy", np.arange(3))

    with pytest.raises(DataError, match=r"t.bin: whole rows of 2 bytes .* 11 bytes found"):
        storage.open_array(path, dtype="u2")
    with pytest.raises(DataError, match=r"offset 12 is beyond the file: 11 bytes"):
        storage.open_array(path, dtype="u1", offset=12)
    with pytest.raises(DataError, match="(a raw file is np.memmap|give dtype too)"):
        storage.open_array(path)
    with pytest.raises(DataError, match="(a raw file is np.memmap|give dtype too)"):
        storage.open_array(path, offset=4)
    with pytest.raises(DataError, match="x.npy: .npy, not a raw file"):
        storage.open_array(tmp_path / "x.npy", dtype="u1")
    for dtype, shape in (("u1", (0,)), ("u1", (-1,)), ("O", ()), ("S0", ())):
        with pytest.raises(DataError, match="t.bin"):
            storage.open_array(path, dtype=dtype, shape=shape)


VIEWS = [
    pytest.param(lambda x: x, id="whole"),
    pytest.param(lambda x: x[3:7], id="rows"),
    pytest.param(lambda x: x[::-2, 1:], id="reversed"),
    pytest.param(lambda x: x.T, id="transposed"),
    pytest.param(lambda x: x.view("u1"), id="bytes"),
    pytest.param(lambda x: np.asarray(x)[2:].reshape(-1), id="flat"),
    pytest.param(lambda x: x[5], id="row"),
    pytest.param(lambda x: x[:0], id="empty"),
]
SOURCES = [
    pytest.param(lambda p: storage.open_array(p), id="ours"),
    pytest.param(lambda p: np.load(p, mmap_mode="r"), id="np.load"),
    pytest.param(lambda p: np.load(p, mmap_mode="r+"), id="writable"),
    pytest.param(lambda p: np.memmap(p, "f8", "r", offset=5000 * 8 + 128, shape=(1000, 5)), id="offset"),
    pytest.param(lambda p: np.memmap(p, "f8", "r", offset=5000 * 8 + 128, shape=(1000, 5))[10:][1:], id="slice"),
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("pick", VIEWS)
def test_an_array_travels_by_reference(tmp_path, source, pick):
    """Any view of a map, ours or np.memmap, is located, pickled small, and reopened with the same values."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100_000.0).reshape(-1, 5))
    x = pick(source(path))

    place = storage.locate(x)
    sent = pickle.dumps(place)
    y = storage.reopen(*pickle.loads(sent))

    assert place.path == str(path) and len(sent) < 1000
    assert y.dtype == x.dtype and y.shape == x.shape and bits(y) == bits(x) and type(y) is np.ndarray
    assert x.size == 0 or y.strides == x.strides
    assert not y.flags.writeable


def test_the_map_below_is_found(tmp_path):
    """`mapping` gives the map and the byte in it at which an array starts, so that rows can be advised."""
    np.save(tmp_path / "x.npy", np.arange(10_000).reshape(100, 100))
    for x in (storage.open_array(tmp_path / "x.npy")[7:], np.load(tmp_path / "x.npy", mmap_mode="r")[7:]):
        found = storage.mapping(x)

        at = found.offset + 2 * x.strides[0]
        assert np.frombuffer(found.map[at : at + 8], "i8")[0] == 900
        found.map.madvise(mmap.MADV_WILLNEED, 0, len(found.map))


def test_arrays_without_a_file(tmp_path):
    """Plain arrays and anonymous maps have no place in a file; a private map has none that others could read."""
    np.save(tmp_path / "x.npy", np.arange(10))
    private = np.load(tmp_path / "x.npy", mmap_mode="c")

    for x in (np.arange(3), np.frombuffer(mmap.mmap(-1, 64), "u1"), np.frombuffer(b"abc", "u1")):
        assert storage.locate(x) is None and storage.watch(x) is None
    assert storage.locate(private) is None and storage.watch(private) is not None


def test_reopen_refuses_another_file(tmp_path):
    """A place beyond the file, or in a file of another size, is an error, not a crash."""
    np.save(tmp_path / "x.npy", np.arange(1000))
    place = storage.locate(storage.open_array(tmp_path / "x.npy"))

    for bad in (
        place._replace(size=5),
        place._replace(shape=(2000,)),
        place._replace(offset=-8),
        place._replace(strides=(-8,)),
        place._replace(dtype=np.dtype("O")),
        place._replace(shape=(2**62,), strides=(2**62,)),
    ):
        with pytest.raises(DataError, match="x.npy"):
            storage.reopen(*bad)
    os.remove(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError, match="x.npy"):
        storage.reopen(*place)


ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(d) for d in ("?", "u1", ">i2", "f4", ">f8", "c8", "S3", "<U2", "M8[ns]")]),
    hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=ARRAYS, flip=st.booleans(), turn=st.booleans())
def test_saved_fields_come_back(tmp_path, x, flip, turn):
    """What is saved is what is opened: dtype, shape and bits, whatever the strides."""
    x = np.flip(x) if flip else x
    x = x.T if turn else x

    storage.save_fields(tmp_path / "out", {"x": x, "n": np.arange(3)})
    y = storage.open_fields(tmp_path / "out")["x"]

    assert y.dtype == x.dtype and y.shape == x.shape and bits(y) == bits(x)


@pytest.mark.parametrize("dtype", [*DTYPES, RECORD], ids=str)
def test_saved_dtypes(tmp_path, dtype):
    """Every dtype of a file is kept by save, and is a plain .npy for NumPy."""
    x = some(dtype)

    storage.save_fields(tmp_path, {"x": x[::-1]})

    for y in (storage.open_fields(tmp_path)["x"], np.load(tmp_path / "x.npy")):
        assert y.dtype == x.dtype and bits(y) == bits(x[::-1])


def test_blocks_of_every_layout(tmp_path, monkeypatch):
    """Arrays larger than a block are written whole, contiguous or not, with rows larger than a block too."""
    monkeypatch.setattr("jitloader.storage.folder._BLOCK", 64)
    x = np.arange(6000).reshape(10, 20, 30)
    fields = {"c": x, "f": np.asfortranarray(x), "s": x[::2, ::-1, ::3], "b": np.broadcast_to(x[0], (4, 20, 30))}

    storage.save_fields(tmp_path, fields)

    for name, y in storage.open_fields(tmp_path).items():
        assert (y == fields[name]).all() and y.flags.c_contiguous


def test_saving_needs_no_memory(tmp_path):
    """Saving an array, contiguous or not, takes blocks of it, never a copy."""
    path = tmp_path / "big.npy"
    with open(path, "wb") as file:
        head = {"descr": "<f8", "fortran_order": True, "shape": (1000, 16_000)}
        np.lib.format.write_array_header_1_0(file, head)
        file.truncate(file.tell() + 128_000_000)
    script = f"""
import tracemalloc
from jitloader import storage
x = storage.open_array({str(path)!r})
tracemalloc.start()
storage.save_fields({str(tmp_path / "out")!r}, {{'x': x, 't': x.T[:8000]}})
print(tracemalloc.get_traced_memory()[1])
"""
    assert int(run(script)) < 24_000_000


def test_extra_dtypes_are_saved(tmp_path, monkeypatch):
    """bfloat16 and eight-bit floats are kept; without ml_dtypes their bits come with a warning."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([1.5, -2, 3e30]).astype(ml_dtypes.bfloat16)
    e = np.array([1.5, -2, 0]).astype(ml_dtypes.float8_e5m2)

    storage.save_fields(tmp_path, {"x": x, "e": e})
    y = storage.open_fields(tmp_path)
    with storage.create_fields(tmp_path / "c", {"x": (ml_dtypes.bfloat16, (3,))}) as arrays:
        arrays["x"][...] = x

    assert y["x"].dtype == ml_dtypes.bfloat16 and bits(y["x"]) == bits(x) and y["e"].dtype == e.dtype
    assert bits(storage.open_fields(tmp_path / "c")["x"]) == bits(x)
    assert np.load(tmp_path / "x.npy").dtype == "<u2"
    with pytest.raises(DataError, match="field 'x'"):
        storage.save_fields(tmp_path, {"x": np.zeros(3, ml_dtypes.int4)})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.warns(UserWarning, match="bfloat16 needs ml_dtypes"):
        z = storage.open_fields(tmp_path, fields=["x"])["x"]
    assert z.dtype == "<u2" and bits(z) == bits(x)


def test_a_new_version_replaces_the_old(tmp_path):
    """Another save replaces the fields: old ones vanish, strangers' files stay, open maps keep the old bytes."""
    storage.save_fields(tmp_path, {"x": np.arange(5), "old": np.zeros(5)}, {"n": 1})
    (tmp_path / "notes.txt").write_text("mine")
    np.save(tmp_path / "mine.npy", np.ones(2))
    before = storage.open_fields(tmp_path)
    guard = storage.watch(before["x"])

    storage.save_fields(tmp_path, {"x": before["x"] * 2, "y": before["x"]}, {"n": [2, None, "z"]})
    fields, meta = storage.open_folder(tmp_path)

    assert list(fields) == ["x", "y"] and meta == {"n": [2, None, "z"]}
    assert fields["x"].tolist() == [0, 2, 4, 6, 8] and before["x"].tolist() == [0, 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "mine.npy", "notes.txt", "x.npy", "y.npy"]
    with pytest.warns(UserWarning, match="x.npy: now another file"):
        guard.verify()


def test_an_array_is_saved_over_its_own_file(tmp_path):
    """The source may be a map of the folder that is written."""
    storage.save_fields(tmp_path, {"x": np.arange(10)})

    storage.save_fields(tmp_path, {"x": storage.open_fields(tmp_path)["x"][::-1]})

    assert storage.open_fields(tmp_path)["x"].tolist() == list(range(10))[::-1]


def test_create_fields(tmp_path):
    """Maps become fields on a clean exit, with the meta as it is then; an exception leaves the old version."""
    meta = {}
    with storage.create_fields(tmp_path / "a" / "b", {"x": (">f4", (3, 2)), "e": ("u1", (0, 5))}, meta) as arrays:
        assert not (tmp_path / "a" / "b" / "x.npy").exists() and (arrays["x"] == 0).all()
        arrays["x"][...] = 7
        meta["mean"] = 7.0
    with pytest.raises(KeyError), storage.create_fields(tmp_path / "a" / "b", {"x": ("i8", (9,))}) as arrays:
        arrays["x"][...] = 1
        raise KeyError

    fields, meta = storage.open_folder(tmp_path / "a" / "b")
    assert fields["x"].dtype == ">f4" and (fields["x"] == 7).all() and fields["e"].shape == (0, 5)
    assert meta == {"mean": 7.0}
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["e.npy", "manifest.json", "x.npy"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a\\b", "x\0", "x" * 300, "a\n", 5, "\ud800"], ids=ascii)
def test_names_that_are_no_file_names(tmp_path, name):
    """A field is called like a file can be called, in every file system."""
    with pytest.raises(DataError, match="field "):
        storage.save_fields(tmp_path / "out", {name: np.arange(3)})
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_saved(tmp_path):
    """Meta that JSON cannot hold is known before anything is written; another program's manifest is not overwritten."""
    with pytest.raises(TypeError):
        storage.save_fields(tmp_path / "out", {"x": np.arange(3)}, {"f": object()})
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        storage.save_fields(tmp_path / "file", {"x": np.arange(3)})
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(DataError, match="another program"):
        storage.save_fields(tmp_path, {"x": np.arange(4)})
    assert storage.open_fields(tmp_path)["x"].tolist() == [0, 1, 2]


def damage(key, value):
    def change(manifest):
        manifest[key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        damage("jitloader", 99),
        damage("token", "../../x"),
        damage("token", 5),
        damage("fields", []),
        damage("fields", {"../x": {"dtype": "<i8", "shape": [3]}}),
        damage("fields", {"/etc/passwd": {"dtype": "<i8", "shape": [3]}}),
        damage("fields", {"x\0": {"dtype": "<i8", "shape": [3]}}),
        damage("fields", {"x": 5}),
        damage("fields", {"x": {"dtype": "<i4", "shape": [3]}}),
        damage("fields", {"x": {"dtype": [[["a"]]], "shape": [3]}}),
        damage("fields", {"x": {"dtype": "<i8", "shape": [4]}}),
        damage("gone", ["../x"]),
        damage("gone", "x"),
        damage("meta", None),
    ],
)
def test_manifests_that_lie(tmp_path, change):
    """A manifest that does not fit its files, or points out of its folder, is refused."""
    storage.save_fields(tmp_path, {"x": np.arange(3)})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    change(manifest)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(DataError, match=str(tmp_path)):
        storage.open_fields(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"jitloader": 1', "\xff"], ids=len)
def test_manifests_that_are_broken(tmp_path, text):
    """A cut or foreign manifest is refused, when read and when written over."""
    np.save(tmp_path / "x.npy", np.arange(3))
    (tmp_path / "manifest.json").write_text(text, encoding="latin1")

    for act in (lambda: storage.open_fields(tmp_path), lambda: storage.save_fields(tmp_path, {"x": np.arange(3)})):
        with pytest.raises(DataError, match="manifest.json: a broken manifest"):
            act()


def test_plain_folders(tmp_path):
    """A folder of .npy that nobody saved as a whole is opened too; hidden and other files are left out."""
    np.save(tmp_path / "b.npy", np.arange(3))
    np.save(tmp_path / "a.npy", np.ones((3, 2)))
    np.save(tmp_path / ".c.npy", np.ones((3, 2)))
    np.save(tmp_path / "o.npy", np.array([None]), allow_pickle=True)
    (tmp_path / "readme.txt").write_text("x")

    with pytest.raises(DataError, match="o.npy"):
        storage.open_fields(tmp_path)
    assert list(storage.open_fields(tmp_path, fields=["b", "a"])) == ["b", "a"]
    with pytest.raises(DataError, match="field 'z' expected, a, b, o found"):
        storage.open_fields(tmp_path, fields=["z"])


def test_two_writers(tmp_path):
    """While one writer is at work another gets BlockingIOError with the path; afterwards it may write."""
    with storage.create_fields(tmp_path, {"x": ("i8", (3,))}) as arrays:
        arrays["x"][...] = 1
        with pytest.raises(BlockingIOError, match=f"another writer.*{tmp_path}"):
            storage.save_fields(tmp_path, {"x": np.zeros(3)})
    storage.save_fields(tmp_path, {"x": np.full(3, 2)})

    assert storage.open_fields(tmp_path)["x"].tolist() == [2, 2, 2]


def test_a_forked_child_keeps_no_lock(tmp_path):
    """A child forked while a folder is written does not keep it locked."""
    script = f"""
import os, time
from jitloader import storage
with storage.create_fields({str(tmp_path)!r}, {{'x': ('i8', (3,))}}):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
storage.save_fields({str(tmp_path)!r}, storage.open_fields({str(tmp_path)!r}))
os.kill(pid, 9)
os.waitpid(pid, 0)
print("saved")
"""
    assert run(script) == "saved"


def test_readers_see_one_version(tmp_path):
    """A reader that opens while a writer saves again and again gets the fields of one version."""
    storage.save_fields(tmp_path, {"x": np.full(50, 0), "y": np.full(50, 0)}, {"v": 0})
    stop, done = threading.Event(), []

    def write():
        for v in range(1, 60):
            storage.save_fields(tmp_path, {"x": np.full(50, v), "y": np.full(50, v)}, {"v": v})
            done.append(v)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not stop.is_set():
        fields, meta = storage.open_folder(tmp_path)
        assert fields["x"].min() == fields["x"].max() == fields["y"].min() == fields["y"].max() == meta["v"]
        seen.add(meta["v"])
    writer.join()

    assert len(done) == 59 and len(seen) > 5


def test_moves_that_fail_are_finished_later(tmp_path, monkeypatch):
    """Where the files cannot be moved up after the commit (open ones on Windows), the new version stands."""
    storage.save_fields(tmp_path, {"x": np.arange(3), "z": np.arange(3)})
    replace = os.replace

    def refuse(source, target):
        if str(target).endswith(".npy"):
            raise PermissionError(13, "in use", target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        storage.save_fields(tmp_path, {"x": np.arange(4), "y": np.arange(4)})
    fields = storage.open_fields(tmp_path)
    assert {name: len(x) for name, x in fields.items()} == {"x": 4, "y": 4}

    storage.save_fields(tmp_path, {"y": fields["y"]})
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "y.npy"]
    assert storage.open_fields(tmp_path)["y"].tolist() == [0, 1, 2, 3]


def test_ctrl_c_after_the_commit(tmp_path, monkeypatch):
    """An interrupt that comes right after the rename does not throw the new version away."""
    storage.save_fields(tmp_path, {"x": np.arange(3)})
    replace = os.replace

    def interrupt(source, target):
        replace(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupt)
        storage.save_fields(tmp_path, {"x": np.arange(4)})

    assert len(storage.open_fields(tmp_path)["x"]) == 4


def test_arrays_that_are_no_data_set_are_refused_with_the_path(tmp_path):
    """Fields that differ in length, and a number without rows, are errors that name the folder or file."""
    np.save(tmp_path / "a.npy", np.arange(3))
    np.save(tmp_path / "b.npy", np.arange(4))
    np.save(tmp_path / "one.npy", np.float64(1))

    with pytest.raises(jl.DataError) as caught:
        jl.open(tmp_path, fields=["a", "b"])
    assert str(caught.value) == f"{tmp_path}: fields differ in length: 'a' has 3 rows, 'b' has 4 rows"
    with pytest.raises(jl.DataError, match=r"one\.npy: field 'one' is 0-d: it has no rows"):
        jl.open(tmp_path / "one.npy")


def test_fields_are_a_list_of_names(tmp_path):
    """One name in place of a list is refused, not taken letter by letter."""
    np.save(tmp_path / "label.npy", np.arange(3))

    with pytest.raises(TypeError, match=r"open: fields= takes a list of names, got 'label': give \['label'\]"):
        jl.open(tmp_path, fields="label")
