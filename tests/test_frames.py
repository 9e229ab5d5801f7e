"""Frames, tables and other libraries' arrays as fields: the same memory, or a refusal that names the column."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import jitloader as jl

pa = pytest.importorskip("pyarrow", exc_type=ImportError)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Where bytes lie is the same in plain Python, and nothing is compiled for it."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")


def address(data, name, part=0):
    return data.sources[name].parts[part].array.ctypes.data


def test_pandas_columns_by_reference():
    """Blocks of NumPy, masked columns without nulls and Arrow columns come as they lie."""
    pd = pytest.importorskip("pandas", exc_type=ImportError)
    frame = pd.DataFrame(
        {
            "a": np.arange(5.0),
            "b": np.arange(5.0) * 2,
            "flag": np.arange(5) % 2 == 0,
            "when": pd.date_range("2020-01-01", periods=5),
            "masked": pd.array([1, 2, 3, 4, 5], "Int16"),
            "arrow": pd.array([1, 2, 3, 4, 5], "int64[pyarrow]"),
        },
        index=list("vwxyz"),
    )
    data = jl.Dataset(frame)

    assert data.fields == tuple(frame.columns) and data.spec["masked"].dtype == np.int16
    for name in frame:
        assert (data[:][data.fields.index(name)] == frame[name].to_numpy()).all(), name
    for name in ("a", "b", "flag", "when"):
        assert address(data, name) == frame[name].to_numpy(copy=False).ctypes.data, name
    assert address(data, "arrow") == frame["arrow"].array.__arrow_array__().chunk(0).buffers()[1].address
    assert (jl.Dataset(x=frame["masked"])[:].x == [1, 2, 3, 4, 5]).all()


def test_pandas_columns_that_are_no_arrays():
    """Nulls, objects, text, categories and time zones are refused, naming column and remedy: of a frame, a series, and an
    array or index of pandas alike."""
    pd = pytest.importorskip("pandas", exc_type=ImportError)
    cases = [
        (pd.array([1, None, None], "Int64"), "column 'x': 2 nulls found, none expected; fill them"),
        (np.array([1, "a", None], object), "field 'x' holds Python objects"),
        (pd.array(["a", "b", "c"], "string"), r"column 'x' is of pandas' string.*codes"),
        (pd.Categorical(["a", "b", "a"]), r"column 'x' is of pandas' category.*\.cat\.codes"),
        (pd.date_range("2020", periods=3, tz="UTC"), r"column 'x' is of pandas' datetime64.*tz_convert\(None\)"),
        (pd.array([1, None, 3], "int64[pyarrow]"), "column 'x': 1 nulls found"),
        (pd.arrays.SparseArray([1, 0, 3]), r"column 'x' is of pandas' Sparse.*to_dense"),
    ]
    for column, told in cases:
        for given in (pd.DataFrame({"x": column}), {"x": pd.Series(column)}, {"x": column}):
            with pytest.raises((TypeError, jl.DataError), match=told):
                jl.Dataset(given)
    with pytest.raises(TypeError, match="a field name is a string, got the column 0: rename it"):
        jl.Dataset(pd.DataFrame(np.eye(2)))
    with pytest.raises(ValueError, match="two columns are called 'x'"):
        jl.Dataset(pd.DataFrame(np.eye(2), columns=["x", "x"]))
    with pytest.raises(TypeError, match=r"open takes a path, got a DataFrame: give what is in memory to jl\.Dataset"):
        jl.open(pd.DataFrame({"x": [1]}))


def test_polars_columns_by_reference():
    """Chunks are joined where they lie; lists are ragged rows, arrays an axis, booleans unpacked."""
    pl = pytest.importorskip("polars", exc_type=ImportError)
    one = pl.DataFrame(
        {
            "x": [1, 2, 3],
            "flag": [True, False, True],
            "day": pl.Series([0, 1, 2], dtype=pl.Int32).cast(pl.Date),
            "list": [[1], [2, 3], []],
            "pair": pl.Series([[1, 2], [3, 4], [5, 6]], dtype=pl.Array(pl.Int64, 2)),
        }
    )
    frame = pl.concat([one, one], rechunk=False)
    data = jl.Dataset(frame)
    batch = data[:]

    assert batch.x.tolist() == [1, 2, 3] * 2 and batch.flag.tolist() == [True, False, True] * 2
    assert batch.day.tolist() == np.array([0, 1, 2] * 2, "M8[D]").tolist()
    assert batch.list.values.tolist() == [1, 2, 3] * 2 and batch.list.offsets.tolist() == [0, 1, 3, 3, 4, 6, 6]
    assert batch.pair.tolist() == [[1, 2], [3, 4], [5, 6]] * 2
    for k, chunk in enumerate(frame["x"].get_chunks()):
        assert address(data, "x", k) == chunk.to_numpy(allow_copy=False).ctypes.data
    with pytest.raises(jl.DataError, match="column 'n': 1 nulls found, none expected; fill them first"):
        jl.Dataset(pl.DataFrame({"n": [1, None]}))
    with pytest.raises(jl.DataError, match="column 's': Arrow .*cannot be mapped.*codes"):
        jl.Dataset(pl.DataFrame({"s": ["a", "b"]}))
    with pytest.raises(TypeError, match=r"a lazy frame has no rows yet: give frame\.collect\(\)"):
        jl.Dataset(frame.lazy())


def test_arrow_tables_and_columns_by_reference():
    """Tables, record batches, arrays and chunked arrays; a slice shows its own rows."""
    table = pa.table({"x": np.arange(10), "l": [[k] * k for k in range(10)]})
    data = jl.Dataset(table.slice(3, 4))
    batch = table.to_batches()[0]

    assert data[:].x.tolist() == [3, 4, 5, 6] and data[1].l.tolist() == [4] * 4
    assert address(data, "x") == table["x"].chunk(0).buffers()[1].address + 3 * 8
    assert jl.Dataset(batch)[9].l.tolist() == [9] * 9
    given = jl.Dataset(x=table["x"], y=batch.column(1), z=pa.chunked_array([[1.0] * 4, [2.0] * 6]))
    assert given[5].x == 5 and given[5].y.tolist() == [5] * 5 and given[5].z == 2
    with pytest.raises(TypeError, match="field 'x' is a frame of several columns: give it alone, as Dataset"):
        jl.Dataset(x=table)
    empty = jl.Dataset(table.slice(0, 0))
    assert len(empty) == 0 and empty.spec["l"].shape == (None,)


def test_tables_need_pyarrow(monkeypatch):
    """What pyarrow must read says which extra to install."""
    pl = pytest.importorskip("polars", exc_type=ImportError)
    frame = pl.DataFrame({"x": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ImportError, match=r"reading a DataFrame needs pyarrow: pip install 'jitloader\[arrow\]'"):
        jl.Dataset(frame)


def test_structured_arrays_are_a_field_each(tmp_path):
    """Columns of records, in memory and in a .npy, strided where they lie."""
    records = np.zeros(4, [("a", ">i2"), ("b", "f4", (2,)), ("c", "S3")])
    records["a"], records["b"], records["c"] = np.arange(4), np.arange(8.0).reshape(4, 2), [b"x", b"yz", b"", b"abc"]
    np.save(tmp_path / "r.npy", records)

    for data in (jl.Dataset(records), jl.open(tmp_path / "r.npy")):
        assert data.fields == ("a", "b", "c")
        for name in data.fields:
            got = data[:][data.fields.index(name)]
            assert got.dtype == records[name].dtype and (got == records[name]).all()


class Capsule:
    """An array that has DLPack and nothing else."""

    def __init__(self, array, device=None):
        self.array, self.device = array, device or array.__dlpack_device__()

    def __dlpack__(self, **given):
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self):
        return self.device


class Interface:
    """An array that has the array interface and nothing else."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


@pytest.mark.parametrize("kind", [Capsule, Interface])
def test_arrays_of_other_libraries_without_copying(kind):
    """DLPack and the array interface show the same memory."""
    array = np.arange(12.0).reshape(4, 3)
    data = jl.Dataset(x=kind(array))

    assert address(data, "x") == array.ctypes.data and (data[:].x == array).all()


def test_arrays_on_devices():
    """What lies in a device's memory is refused before anything is moved."""
    with pytest.raises(TypeError, match=r"field 'x' lies in a device's memory \(2\): copy it to the host first"):
        jl.Dataset(x=Capsule(np.zeros(3), (2, 0)))


def test_torch_tensors_without_copying():
    """CPU tensors of all kinds, strided, under gradients, bfloat16, show their own memory; others are refused."""
    torch = pytest.importorskip("torch", exc_type=ImportError)
    ml_dtypes = pytest.importorskip("ml_dtypes", exc_type=ImportError)
    base = torch.arange(12.0).reshape(4, 3)
    for tensor in (base, base.T, base[1:, 1:], base.clone().requires_grad_(), torch.nn.Parameter(base), base.half()):
        data = jl.Dataset(x=tensor)
        assert address(data, "x") == tensor.data_ptr()
        assert (data[:].x == tensor.detach().numpy()).all()
    brain = base.bfloat16()
    data = jl.Dataset(x=brain)
    assert address(data, "x") == brain.data_ptr() and data.spec["x"].dtype == ml_dtypes.bfloat16
    assert (data.map("x", jl.cast("float32"))[:].x == base.numpy()).all()
    for tensor, told in [
        (base.to_sparse(), r"field 'x' is a tensor of layout torch.sparse_coo: give tensor.to_dense\(\)"),
        (base.to("meta"), r"field 'x' is a tensor on meta: give tensor.cpu\(\)"),
        (torch.view_as_complex(torch.ones(3, 2)).conj(), "field 'x' is a tensor seen conjugated or negated"),
    ]:
        with pytest.raises(TypeError, match=told):
            jl.Dataset(x=tensor)


def test_brain_floats_need_ml_dtypes(monkeypatch):
    """Without ml_dtypes the extra is named."""
    torch = pytest.importorskip("torch", exc_type=ImportError)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    with pytest.raises(ImportError, match=r"field 'x' is a tensor of bfloat16, .*'jitloader\[bfloat16\]'"):
        jl.Dataset(x=torch.zeros(3, dtype=torch.bfloat16))
