"""What `save` wrote, `open` reads: access patterns by their rules, and what was noted of a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jitloader as jl
from jitloader import passes, storage
from jitloader.errors import DataError, PipelineError

SERIES = np.arange(400.0, dtype="float32").reshape(200, 2)
GROUPS = np.array([0, 30, 30, 37, 120, 200])


def same(a: jl.Dataset, b: jl.Dataset) -> bool:
    """Whether two data sets have the same fields, types and bits, by samples in plain Python: no kernel is compiled."""
    if a.fields != b.fields or a.spec != b.spec or len(a) != len(b):
        return False
    rows = sorted({0, 1, len(a) // 3, len(a) // 2, len(a) - 2, len(a) - 1})
    return all(np.array_equal(x, y) for i in rows for x, y in zip(a[i], b[i], strict=True))


def windowed(**options: Any) -> jl.Dataset:
    given = {"past": slice(0, 12), "next": slice(12, 15), **options}
    return jl.Dataset(jl.windows(SERIES, **given))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 3, "past": slice(-2, 9, 2)},
        {"groups": GROUPS, "group_field": "g", "mask": True},
        {"groups": GROUPS, "pad_start": 4, "pad_end": 2, "mask": True, "group_field": "g"},
        {"step": 2, "group_field": "g"},
        {"pad_start": 5, "pad_value": None},
    ],
)
def test_windows_are_kept_by_their_rule(tmp_path: Path, options: Any) -> None:
    """The folder holds the series once, and opens as the same windows: all, some, in another order, one field."""
    data = windowed(**options)
    order = np.random.default_rng(0).permutation(len(data))
    for k, some in enumerate([data, data.select(order), data.take(-90), data.select(np.arange(len(data))[::-1])]):
        some.save(tmp_path / str(k))
        assert same(jl.open(tmp_path / str(k)), some)
    data.save(tmp_path / "a")

    again = jl.open(tmp_path / "a")
    assert np.array_equal(np.load(tmp_path / "a" / "past.series.npy"), SERIES)
    assert sorted(os.listdir(tmp_path / "a")) == sorted(
        ["manifest.json", "past.series.npy", *(["past.groups.npy"] if "groups" in options else [])]
    )
    assert repr(again) == repr(data) and again[5].past.tolist() == data[5].past.tolist()
    assert jl.open(tmp_path / "a", fields=["next"]).fields == ("next",)
    again.save(tmp_path / "a")  # over what it maps
    assert same(jl.open(tmp_path / "a"), data)
    with pytest.raises(DataError, match="field 'nothing' expected"):
        jl.open(tmp_path / "a", fields=["nothing"])


def test_windows_of_several_arrays(tmp_path: Path) -> None:
    """Several arrays by name, a list of arrays as one series, and sequences with their mask."""
    several = jl.Dataset(jl.windows({"a": SERIES, "b": np.arange(200)}, x=slice(0, 9), y=slice(9, 19)))
    listed = jl.Dataset(jl.windows([SERIES[:50], SERIES[50:120]], x=slice(0, 8)))
    steps = jl.Dataset(jl.sequences({"obs": SERIES}, 16, groups=GROUPS, stride=2))
    for k, data in enumerate([several, listed, steps]):
        data.save(tmp_path / str(k))
        assert same(jl.open(tmp_path / str(k)), data)
    assert np.array_equal(np.load(tmp_path / "1" / "x.series.npy"), SERIES[:120])


def test_windows_that_are_fewer_than_the_series(tmp_path: Path) -> None:
    """A few windows, and windows with stages, are kept as what they are."""
    few = windowed().take(5).keep("past")
    few.save(tmp_path / "few")
    mapped = windowed().map("past", jl.clip(0, 100)).drop("next")
    mapped.save(tmp_path / "mapped")

    assert np.load(tmp_path / "few" / "past.npy").shape == (5, 12, 2)
    assert np.load(tmp_path / "mapped" / "past.npy").shape == (186, 12, 2)
    assert same(jl.open(tmp_path / "few"), few)
    assert same(jl.open(tmp_path / "mapped"), mapped)


def test_ragged_rows_are_kept(tmp_path: Path) -> None:
    """Values and offsets, of all rows or some, before and after stages; what a batch would pad is refused."""
    lengths = np.arange(300) % 11
    offsets = np.cumsum([0, *lengths])
    words = np.random.default_rng(0).integers(0, 99, (offsets[-1], 2)).astype("int32")
    data = jl.Dataset(y=np.arange(300), t=jl.ragged(words, offsets))
    for k, some in enumerate([data, data.select([5, 5, 299, 0]).map("t", jl.cast("float32"))]):
        some.save(tmp_path / str(k))
        assert same(jl.open(tmp_path / str(k)), some)

    assert np.array_equal(np.load(tmp_path / "0" / "t.npy"), words)
    assert np.array_equal(np.load(tmp_path / "0" / "t.offsets.npy"), offsets)
    with pytest.raises(PipelineError, match=r"save takes fields of one shape, or ragged; 't' is int32 \(\?, 2\)"):
        data.map("t", jl.pad_to_longest()).save(tmp_path / "x")
    clash = jl.Dataset({"t": jl.ragged(words, offsets), "t.offsets": np.arange(300)})
    with pytest.raises(DataError, match="'t': is kept with an array 't.offsets', and a field is called that"):
        clash.save(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [
        {"n": 201},
        {"n": 199},
        {"span": 10},
        {"stride": 0},
        {"step": -1},
        {"elements": [0, 16, 1]},
        {"elements": [-1, 12, 1]},
        {"elements": "abc"},
        {"pads": [40, 0]},
        {"chosen": [0, 1, 10**9]},
        {"chosen": [-5, 1, 7]},
        {"what": "nothing"},
        {"unknown": 1},
    ],
)
def test_a_rule_that_does_not_fit(tmp_path: Path, change: Any) -> None:
    """A manifest that asks for what is not there is a DataError; kernels are never given it."""
    windowed().save(tmp_path)
    file = tmp_path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["meta"]["samples"]["past"]["rule"].update(change)
    file.write_text(json.dumps(manifest))

    with pytest.raises(DataError, match="field 'past': its rule in the manifest does not fit"):
        jl.open(tmp_path)


@pytest.mark.parametrize(
    "rules", [3, {"x": 3}, {"x": {"arrays": "x"}}, {"x": {"arrays": ["nothing"]}}, {"x": {"arrays": [[]]}}]
)
def test_a_broken_manifest(tmp_path: Path, rules: Any) -> None:
    """So is one whose rules are none."""
    jl.Dataset(x=np.arange(3)).save(tmp_path)
    file = tmp_path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["meta"]["samples"] = rules
    file.write_text(json.dumps(manifest))

    with pytest.raises(DataError, match="a broken manifest"):
        jl.open(tmp_path)


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    jl.Dataset(x=SERIES, y=SERIES[::-1].copy()).save(tmp_path / "d")
    return tmp_path / "d"


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a pass over the data")


def test_statistics_are_read_the_second_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an unchanged folder they come from its manifest, bit for bit; of rows chosen or a stage they are computed."""
    first = jl.open(folder).statistics("x")
    assert first.mean.tolist() == SERIES.astype("float64").mean(0).tolist() and first.count == 200
    token = json.loads((folder / "manifest.json").read_text())["token"]
    with monkeypatch.context() as patch:
        patch.setattr(passes, "sweep", refuse)
        for data in (jl.open(folder), jl.open(folder, fields=["x"]), jl.Dataset(image=folder / "x.npy")):
            again = data.statistics(data.fields[0])
            assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        for other in (
            jl.open(folder).take(100),
            jl.open(folder).map("x", jl.clip(0, 9)),
            jl.open(folder).select([*range(200)]),
        ):
            with pytest.raises(AssertionError, match="a pass over the data"):
                other.statistics("x")
        with pytest.raises(AssertionError, match="a pass over the data"):
            jl.open(folder).statistics("y")

    assert json.loads((folder / "manifest.json").read_text())["token"] == token
    jl.open(folder).statistics("y")
    monkeypatch.setattr(passes, "sweep", refuse)
    assert jl.open(folder).statistics("x").count == jl.open(folder).statistics("y").count == 200


def test_statistics_of_a_changed_folder(folder: Path) -> None:
    """A file that was written anew, in place or by a save, has statistics of its own."""
    opened = jl.open(folder)
    before = opened.statistics("x").mean.tolist()
    opened.statistics("x")
    np.save(folder / "x.npy", SERIES + np.float32(1))
    changed = jl.open(folder)
    assert changed.statistics("x").mean.tolist() == [m + 1 for m in before]
    assert jl.open(folder).statistics("x").mean.tolist() == [m + 1 for m in before]
    jl.Dataset(x=SERIES * np.float32(2)).save(folder)
    assert jl.open(folder).statistics("x").mean.tolist() == [m * 2 for m in before]


def test_statistics_where_nothing_can_be_noted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain folder, a folder in which another one writes, a disk that is full: right, and nothing changes."""
    np.save(tmp_path / "x.npy", SERIES)
    plain = jl.Dataset(x=tmp_path / "x.npy").statistics("x")
    assert os.listdir(tmp_path) == ["x.npy", "d"] or sorted(os.listdir(tmp_path)) == ["d", "x.npy"]
    before = (folder / "manifest.json").read_bytes()
    with storage.create_fields(folder, {"z": ("int8", (1,))}):
        assert jl.open(folder).statistics("x").mean.tolist() == plain.mean.tolist()
        assert (folder / "manifest.json").read_bytes() == before
    jl.Dataset(x=SERIES).save(folder)
    before = (folder / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert jl.open(folder).statistics("x").mean.tolist() == plain.mean.tolist()
    assert (folder / "manifest.json").read_bytes() == before
    assert jl.open(folder).fields == ("x",)
    assert storage.recall(np.arange(3), "statistics") is None


def test_infinite_statistics_come_back(tmp_path: Path) -> None:
    """NaN and infinity go through the manifest."""
    jl.Dataset(x=np.array([[1.0, np.inf], [np.nan, 2.0]], "float32")).save(tmp_path)
    first = jl.open(tmp_path).statistics("x")
    again = jl.open(tmp_path).statistics("x")
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first[:4], again[:4], strict=True))
