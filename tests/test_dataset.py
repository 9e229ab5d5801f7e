"""Datasets: fields by reference, links checked where they are made, samples and batches equal to what NumPy gives."""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jitloader as jl

X = np.random.default_rng(0).normal(3, 2, (41, 5)).astype(np.float32)
IMAGES = np.random.default_rng(1).integers(0, 256, (23, 6, 7, 3), dtype=np.uint8)


def layouts(rows):
    """The same kind of array lying in memory in many ways."""
    base = np.arange(rows * 12, dtype=np.int32).reshape(rows, 3, 4)
    wide = np.arange(rows * 48, dtype=np.int32).reshape(2 * rows, 6, 4)
    packed = np.zeros(rows, [("a", "u1"), ("b", "<f8", (2,))])
    packed["b"] = np.arange(rows * 2.0).reshape(rows, 2)
    return {
        "contiguous": base,
        "fortran": np.asfortranarray(base),
        "reversed": base[::-1],
        "inner reversed": base[:, ::-1, ::-2],
        "strided": wide[::2, 1:4],
        "transposed": np.arange(rows * 12).reshape(3, 4, rows).transpose(2, 0, 1),
        "broadcast": np.broadcast_to(np.arange(4.0), (rows, 4)),
        "unaligned": packed["b"],
        "zero columns": np.empty((rows, 0)),
        "big-endian": base.astype(">i4"),
        "float16": base.astype(np.float16),
        "complex": base + 1j,
        "dates": np.arange(rows).astype("M8[D]"),
        "text": np.array([f"row {i}" for i in range(rows)]),
        "bytes": np.array([b"ab" * (i % 3) for i in range(rows)]),
        "bool": base % 3 == 0,
    }


@pytest.mark.parametrize("name", layouts(1))
def test_a_batch_holds_the_arrays_own_bits_however_it_lies_in_memory(name):
    """Without stages, each field keeps its dtype, shape and bits."""
    array = layouts(9)[name]
    rows = np.array([8, 0, 3, 3])

    batch = jl.Dataset(x=array)[rows]

    assert batch.x.dtype == array.dtype and batch.x.shape == (4, *array.shape[1:])
    assert batch.x.tobytes() == array[rows].tobytes()
    assert np.asarray(jl.Dataset(x=array)[3].x).tobytes() == array[3].tobytes()


def test_nothing_is_copied():
    """The data set refers to the array: what is written to it shows."""
    x = np.zeros((5, 2))
    data = jl.Dataset(x=x)
    x[3] = 7

    assert data[3].x.tolist() == [7, 7]


@given(
    start=st.integers(-15, 15), stop=st.integers(-15, 15), step=st.integers(-3, 3).filter(bool),
    index=st.lists(st.integers(-5, 4), min_size=1, max_size=8),
)  # fmt: skip
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_selections_compose_as_they_do_in_numpy(monkeypatch, start, stop, step, index):
    """select, take and slices one after the other pick the rows that NumPy's indexing picks."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    order = np.arange(11)
    first = order[start:stop:step]
    data = jl.Dataset(x=order).select(np.arange(11)[start:stop:step])
    if len(first) >= 5:
        first, data = first[index], data.select(index)

    assert len(data) == len(first)
    assert data[:].x.tolist() == first.tolist()
    assert data.take(2)[:].x.tolist() == first[:2].tolist()
    assert data[::-1].x.tolist() == first[::-1].tolist()


def test_split_parts_the_rows():
    """Each row is in one part, parts have the shares asked for, and a seed gives the same parting."""
    data = jl.Dataset(i=np.arange(1000))
    train, valid, test = data.split(0.8, 0.15, 0.05, seed=3)
    rows = [part[:].i for part in (train, valid, test)]

    assert [len(r) for r in rows] == [800, 150, 50]
    assert sorted(np.concatenate(rows)) == list(range(1000))
    assert (data.split(0.8, 0.2, seed=3)[0][:].i == rows[0]).all()
    assert (data.split(0.8, 0.2, seed=4)[0][:].i != rows[0]).any()


def test_concat_is_the_rows_of_both_by_reference():
    """Rows of the second follow those of the first, also after select and through stages, also more than two."""
    a, b = jl.Dataset(x=X[:10]), jl.Dataset(x=X[10:]).select([5, 6, 30, 2])
    both = a.concat(b).concat(a).map("x", jl.normalize(1.0, 2.0))
    wanted = (np.concatenate([X[:10], X[10:][[5, 6, 30, 2]], X[:10]]).astype(np.float64) - 1.0) * 0.5

    assert len(both) == 24
    assert (both[:].x == wanted.astype(np.float32)).all()
    assert (both.select([23, 11])[:].x == wanted[[23, 11]].astype(np.float32)).all()


def test_zip_joins_fields_and_keeps_draws_apart():
    """zip gives the fields of both; stages linked to the two before do not share their draws."""

    @jl.stage
    def noise(src, dst, key):
        for i in range(dst.size):
            dst[i] = jl.uniform(key, i)

    zeros = np.zeros((20, 3))
    data = jl.Dataset(a=zeros).map("a", noise).zip(jl.Dataset(b=zeros).map("b", noise))
    batch = data[:]

    assert not np.intersect1d(batch.a, batch.b).size
    together = jl.Dataset(a=zeros, b=zeros).map(("a", "b"), noise)[:]
    assert (together.a == together.b).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8", "bool", "float16", ">f4", "int64"])
def test_statistics_are_those_of_exact_sums(dtype):
    """Mean, std, min and max match NumPy in float64 on the same numbers."""
    values = (np.random.default_rng(2).normal(50, 20, (5000, 3)) % 100).astype(dtype)
    found = jl.Dataset(x=values).statistics("x")
    exact = values.astype(np.float64)

    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.std, exact.std(0), rtol=1e-12)
    assert found.min.tolist() == exact.min(0).tolist() and found.max.tolist() == exact.max(0).tolist()
    assert found.count == 5000


@pytest.mark.parametrize("value", [0.1, 1e300, -7.25, 123456789.123])
def test_statistics_of_a_constant_column_are_exact(value):
    """A column of one value has that mean and a std of zero, to the last bit."""
    found = jl.Dataset(x=np.full((9999, 2), value)).statistics("x")

    assert found.mean.tolist() == [value, value] and found.std.tolist() == [0, 0]


def test_statistics_take_images_a_channel_at_a_time():
    """(H, W, C) and (C, H, W) both give one number for each channel; stages before are counted in."""
    hwc = jl.Dataset(x=IMAGES).statistics("x")
    chw = jl.Dataset(x=IMAGES).map("x", jl.channels_first()).statistics("x")

    np.testing.assert_allclose(hwc.mean, IMAGES.reshape(-1, 3).astype(float).mean(0), rtol=1e-13)
    assert hwc.mean.tolist() == chw.mean.tolist()


def test_statistics_tell_of_nan():
    """A NaN in a column is in its statistics, and in no other's."""
    x = X.copy()
    x[7, 2] = np.nan
    found = jl.Dataset(x=x).statistics("x")

    assert np.isnan([s[2] for s in found[:4]]).all() and not np.isnan(np.delete(found.mean, 2)).any()


def test_save_and_open(tmp_path):
    """What is saved opens as the batch that was: fields, dtypes, values after stages."""
    data = jl.Dataset(x=IMAGES, y=np.arange(23)).map("x", jl.normalize(100.0, 50.0), jl.channels_first())
    data.save(tmp_path / "folder")
    back = jl.open(tmp_path / "folder")

    assert back.fields == ("x", "y") and back.spec == data.spec
    assert (back[:].x == data[:].x).all() and (np.load(tmp_path / "folder" / "y.npy") == np.arange(23)).all()


def test_a_field_of_several_makes_another():
    """A stage over two fields reads both after their own stages, and writes the fields named by to=."""

    @jl.stage(inputs=2, out=lambda a, b: (("float64", ()), ("float32", a.shape)))
    def dot(a, b, total, product, key):
        total[0] = 0.0
        for i in range(a.size):
            product[i] = a[i] * b[i]
            total[0] += a[i] * b[i]

    data = jl.Dataset(a=X, b=X).map("b", jl.normalize(1.0, 2.0)).map(("a", "b"), dot, to=("total", "product")).drop("b")
    batch = data[:]
    b = ((X.astype(np.float64) - 1.0) * 0.5).astype(np.float32)

    assert data.fields == ("a", "total", "product")
    assert (batch.a == X).all() and (batch.product == X * b).all()
    np.testing.assert_allclose(batch.total, (X.astype(np.float64) * b).sum(1), rtol=1e-5)


def test_trace_shows_each_step():
    """trace gives the sample after every stage, the last being data[i]."""
    data = jl.Dataset(x=IMAGES).map("x", jl.random_crop(4, padding=1), jl.normalize(1.0, 2.0))
    found = data.trace(5)

    assert [name for name, _ in found] == ["source", "random_crop(4)", "normalize"]
    assert (found[0][1].x == IMAGES[5]).all() and (found[-1][1].x == data[5].x).all()
    assert (found[1][1].x.astype(np.float64) / 2 - 0.5 == found[2][1].x).all()


def test_compiled_and_plain_give_the_same_bits():
    """A batch holds, row for row, what plain Python gives for each row: all kinds of stage in one chain."""

    @jl.elementwise
    def gamma(v):
        return v * v * 0.001 + 1.0

    @jl.stage
    def shade(src, dst, key):
        scale = 0.5 + jl.uniform(key, 0)
        for i in range(src.shape[0]):
            for j in range(src.shape[1]):
                for k in range(src.shape[2]):
                    dst[i, j, k] = np.float32(np.float64(src[i, j, k]) * scale)

    data = jl.Dataset(x=IMAGES).map(
        "x",
        jl.random_flip(),
        gamma,
        jl.random_crop(5, padding=2, fill=9),
        shade,
        jl.normalize([1, 2, 3], 2),
        jl.channels_first(),
    )
    batch = data[:]

    assert batch.x.dtype == np.float32 and batch.x.shape == (23, 3, 5, 5)
    for row in range(0, 23, 4):
        assert (data[row].x == batch.x[row]).all()


def test_apply_runs_python_on_batches_and_rows():
    """apply gets whole batches; apply_rows gets rows and draws that depend on seed, epoch and row alone."""
    data = jl.Dataset(x=X).apply(lambda batch: {"total": batch.x.sum(1)})
    assert (data[[1, 2]].total == X[[1, 2]].sum(1)).all()

    noisy = jl.Dataset(i=np.arange(30)).apply_rows(lambda row, rng: {"u": rng.random()})
    whole = np.concatenate([b.u for b in jl.Loader(noisy, 7, threads=2)])
    assert len(set(whole)) == 30
    assert (np.concatenate([b.u for b in jl.Loader(noisy, 11, prefetch=0)]) == whole).all()
    assert noisy[4].u == whole[4]


def test_deepcopy_keeps_a_data_set():
    """A deep copy gives the same rows."""
    data = jl.Dataset(x=X).map("x", jl.normalize(1, 2))

    assert (copy.deepcopy(data)[:].x == data[:].x).all()


def test_stages_of_one_name_and_other_numbers_do_not_concatenate():
    """Two normalisations by different means would have been run as the first for both."""
    one, other = jl.Dataset(x=np.zeros((3, 2))), jl.Dataset(x=np.ones((4, 2)))
    alike = one.map("x", jl.normalize(1.0, 2.0)).concat(other.map("x", jl.normalize(1.0, 2.0)))
    assert alike[:].x.tolist() == [[-0.5, -0.5]] * 3 + [[0.0, 0.0]] * 4
    with pytest.raises(ValueError, match="^concat: the stages of the two differ: concat first, then map$"):
        one.map("x", jl.normalize(1.0, 2.0)).concat(other.map("x", jl.normalize(0.0, 2.0)))


@pytest.mark.parametrize("count", [2, 300])
def test_many_shards_are_one_data_set(count):
    """Rows of hundreds of arrays of uneven lengths, empty ones too, are found in the array they lie in."""
    sizes = np.random.default_rng(count).integers(0, 9, count)
    whole = np.arange(sizes.sum() * 2).reshape(-1, 2)
    shards = [jl.Dataset(x=part) for part in np.split(whole, np.cumsum(sizes)[:-1]) if len(part)]
    holes = [shard.select(np.zeros(0, "int64")) for shard in shards[:1]]

    data = shards[0].concat(*holes, *shards[1:])

    assert (data[:].x == whole).all() and (data[::-1].x == whole[::-1]).all()
    assert all((data[i].x == whole[i]).all() for i in range(0, len(whole), 97))
    bag = jl.Dataset(jl.windows([shard[:].x for shard in shards], w=slice(0, 2)))
    assert (bag[0].w == whole[:2]).all() and (bag[:].w[:, 1] - bag[:].w[:, 0] == 2).all()


def test_text_passes_stages_that_do_not_fuse():
    """Items of odd size travel as bytes, through scratch rows too."""
    words = np.array([f"w{k}" for k in range(24)], "<U3").reshape(6, 2, 2)
    data = jl.Dataset(x=words).map("x", jl.random_flip(1.0), jl.flatten())

    assert (data[:].x == words[:, :, ::-1].reshape(6, 4)).all() and (data[5].x == data[:].x[5]).all()
    with pytest.raises(jl.PipelineError, match="^padding <U3 with 0 is not possible: cast it first$"):
        jl.Dataset(x=words).map("x", jl.pad(1))[:]


def double(src, dst, key):
    for i in range(src.shape[0]):
        dst[i] = src[i] * 2


def test_stages_compute_with_numbers_at_odd_places(tmp_path):
    """Members of a .npz begin at any byte, and columns of packed records lie at odd distances."""
    x = np.arange(60, dtype="f4").reshape(10, 6)
    np.savez(tmp_path / "d.npz", x=x)
    member = jl.open(tmp_path / "d.npz")
    assert not member.sources["x"].parts[0].array.flags.aligned
    records = np.zeros(10, [("a", ">i2"), ("b", "f4", (2, 3)), ("h", "f2"), ("c", "S3"), ("d", "f8")])
    records["a"], records["h"], records["d"] = np.arange(10), np.arange(10), np.arange(10) / 2
    records["b"] = x.reshape(10, 2, 3)
    packed = jl.Dataset(records).map("a", jl.cast("int64")).map("h", jl.cast("float32")).map("d", jl.clip(1, 3))
    packed = packed.map("b", jl.random_flip(1.0, axis=1), jl.normalize(1.0, 2.0), jl.flatten(), double)

    for data in (member, jl.Dataset(x=x).concat(member)):
        last = data.map("x", jl.normalize(1.0, 2.0), double)
        assert (last[-10:].x == x - 1).all() and (last[len(data) - 1].x == x[-1] - 1).all()
    whole, one = packed[:], packed[7]
    assert (whole.a == np.arange(10)).all() and (whole.h == np.arange(10)).all() and one.a == one.h == 7
    assert (whole.d == np.clip(np.arange(10) / 2, 1, 3)).all() and (whole.c == records["c"]).all()
    assert (whole.b == x.reshape(10, 2, 3)[:, :, ::-1].reshape(10, 6) - 1).all() and (one.b == whole.b[7]).all()


def test_a_ragged_batch_can_be_replaced():
    """The number of rows is not taken for the number of fields."""
    batch = jl.Dataset(x=jl.ragged(np.arange(6), [0, 2, 2, 6]))[:].x

    assert batch._replace(values=batch.values + 1).values.tolist() == [1, 2, 3, 4, 5, 6] and len(batch) == 3


@pytest.mark.parametrize("order", ["<", ">"])
def test_every_number_of_a_half_is_seen(order, monkeypatch):
    """All 65,536 bit patterns of float16 reach a stage as the float32 that NumPy makes of them, in either byte order."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    halves = np.arange(1 << 16, dtype=np.uint16).view("f2")[np.r_[0:1100, 31000:34000, 63000:65536]]
    data = jl.Dataset(x=halves.astype(f"{order}f2").reshape(-1, 4)).map("x", jl.cast("float32"))
    found = data[:].x.reshape(-1)
    assert found.dtype == np.float32 and np.array_equal(found, halves.astype("f4"), equal_nan=True)
    wide = np.array([1.5, -0.0, np.inf, np.nan, 5e-324, 1e300])
    for dtype in ("f4", "f8"):
        with np.errstate(over="ignore"):
            given = wide.astype(f"{order}{dtype}")
        found = jl.Dataset(x=given).map("x", jl.cast("float64"))[:].x
        assert np.array_equal(found, given.astype("f8"), equal_nan=True) and np.array_equal(
            np.signbit(found), np.signbit(given)
        )
    for dtype in ("i2", "u2", "i4", "u4", "i8", "u8"):
        limits = np.iinfo(dtype)
        given = np.array([limits.min, 0, 1, 258, limits.max], f"{order}{dtype}")
        assert jl.Dataset(x=given).map("x", lambda v: v)[:].x.tolist() == given.tolist()


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda row, rng: [1], "a function of a row gives a dict, got list"),
        (lambda row, rng: {"x": 1} if row["i"] else {}, "field 'x' came for 3 of 4 rows"),
        (
            lambda row, rng: {"x": np.zeros(int(row["i"]) % 2 + 1)},
            "field 'x' differs between rows: float64 (1,) and float64 (2,)",
        ),
        (lambda row, rng: {"x": [[1], [1, 2]]}, "field 'x' is no array"),
        (lambda row, rng: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_functions_of_rows_that_do_not_fit(function, text):
    """What such a function gives is a dict of the same fields, alike for all rows; otherwise the stage is named."""
    with pytest.raises(jl.PipelineError) as caught:
        jl.Dataset(i=np.arange(4)).apply_rows(function)[:]
    assert text in str(caught.value)
