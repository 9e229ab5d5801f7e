"""Packs as a data set: against the slow twin, through loaders, ranks, resume and the methods of a data set."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitloader as jl
from tests import naive_packing as naive

SIZE = 12
LENGTHS = np.random.default_rng(0).integers(0, SIZE + 1, 300)
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
VALUES = np.arange(1, OFFSETS[-1] + 1, dtype=np.uint16)


def by_hand(packs: jl.Packs, values: np.ndarray, offsets: np.ndarray, k: int, padding: int = 0) -> Any:
    """Give one pack as the slow twin writes it, its ends as lengths."""
    here = slice(packs.starts[k], packs.starts[k + 1])
    entries = list(zip(packs.rows[here], packs.begins[here], packs.sizes[here], strict=True))
    made, segments, positions, ends = naive.emit(entries, values, offsets, packs.capacity, padding, values.dtype)
    return made.tolist(), segments, positions, np.diff([0, *ends]).tolist()


def told(sample: Any) -> Any:
    return tuple(np.asarray(field).tolist() for field in sample)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=25), st.sampled_from(["split", "truncate", "drop"]), st.integers(0, 3))
def test_a_pack_is_what_the_slow_twin_writes(lengths: list[int], overflow: str, seed: int) -> None:
    offsets = np.concatenate([[2], 2 + np.cumsum(np.array(lengths, np.int64))])
    values = np.arange(offsets[-1] + 3, dtype=np.uint16)
    packs = jl.pack(lengths, SIZE, seed=seed, overflow=overflow, group=9)
    data = jl.packed(values, offsets, SIZE, seed=seed, overflow=overflow, group=9, padding=7)
    assert len(data) == packs.number
    batch = data[:]
    lengths_of = np.split(batch.segment_lengths.values, batch.segment_lengths.offsets[1:-1])
    for k in range(packs.number):
        wanted = by_hand(packs, values, offsets, k, 7)
        assert told(data[k]) == wanted
        assert told((*(column[k] for column in batch[:3]), lengths_of[k])) == wanted


def test_lengths_of_segments_are_the_cumulative_ends_that_attention_takes() -> None:
    data = jl.packed(VALUES, OFFSETS, SIZE)
    for batch in jl.Loader(data, 4, shuffle=True):
        ends = np.concatenate([[0], np.cumsum(batch.segment_lengths.values)])
        assert ends[-1] == batch.values.size and (np.diff(ends) > 0).all()
        flat, segments = batch.values.reshape(-1), batch.segments.reshape(-1)
        for a, b in zip(ends[:-1], ends[1:], strict=True):
            assert len(set(segments[a:b].tolist())) == 1
            assert flat[a:b].tolist() == (list(range(flat[a], flat[a] + b - a)) if segments[a] else [0] * (b - a))


def test_every_element_comes_once_an_epoch_over_all_ranks_and_after_a_resume() -> None:
    data = jl.packed({"token": VALUES}, OFFSETS, SIZE).keep("token", "segments")
    found = []
    for rank in range(2):
        loader = jl.Loader(data, 3, shuffle=True, seed=5, rank=rank, world_size=2, tail="drop")
        batches = iter(loader)
        first = [next(batches) for _ in range(2)]
        again = jl.Loader(data, 3, shuffle=True, seed=5, rank=rank, world_size=2, tail="drop")
        again.load_state_dict(loader.state_dict())
        rest = list(again)
        assert [b.token.tolist() for b in rest] == [b.token.tolist() for b in batches]
        found += [b.token[b.segments > 0] for b in first + rest]
    values = np.concatenate(found)
    assert len(set(values.tolist())) == len(values)
    left = len(data) % 2  # a pack that has no partner
    assert len(VALUES) - SIZE * left <= len(values) <= len(VALUES)


def test_packs_are_rows_as_any(tmp_path: Path) -> None:
    rows = np.stack([VALUES, VALUES * 2], 1).astype("float32")
    data = jl.packed({"x": rows, "id": VALUES}, OFFSETS, SIZE).keep("x", "id", "segments").map("x", jl.normalize(0, 2))
    assert data.spec["x"].shape == (SIZE, 2)
    train, valid = data.split(0.75, 0.25, seed=1)
    assert len(train) + len(valid) == len(data)
    for part in (train, valid, data.select([3, 1]), pickle.loads(pickle.dumps(data))):
        batch = next(iter(jl.Loader(part, 2)))
        used = batch.segments > 0
        assert np.array_equal(batch.x[used][:, 0], batch.id[used] / 2) and not batch.x[~used].any()
    kept = data.cache(tmp_path / "cache", progress=False)
    assert np.array_equal(kept[:].x, data[:].x)


def test_a_state_of_other_packs_is_refused() -> None:
    data, other = (jl.packed(VALUES, OFFSETS, SIZE, epoch=epoch) for epoch in (0, 1))
    assert not np.array_equal(data[0].values, other[0].values)
    state = jl.Loader(data, 4).state_dict()
    with pytest.raises(jl.StateError):
        jl.Loader(other.take(len(other)), 4).load_state_dict(state)


def test_a_file_that_is_cut_under_its_packs_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", VALUES)
    mapped = np.load(tmp_path / "t.npy", mmap_mode="r")
    data = jl.packed(mapped, OFFSETS, SIZE)
    loader = jl.Loader(data, 4)
    assert next(iter(loader)).values.shape == (4, SIZE)
    assert len(pickle.dumps(data.keep("values"))) < 30_000  # by path
    os.truncate(tmp_path / "t.npy", 200)
    with pytest.raises(jl.DataError, match=r"t\.npy: truncated under its map"):
        next(iter(loader))


FLOAT16 = "packed: field 'values': a kernel cannot write float16; it can write bool, int8 to int64, uint8 to uint64, float32, float64"
DIFFER = f"ragged: values differ in length: 'a' has {OFFSETS[-1]} rows, 'b' has {OFFSETS[-1] - 1} rows"


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: jl.packed({}, [0], 4), ValueError, "packed takes at least one array of values"),
        (lambda: jl.packed({"segments": VALUES}, OFFSETS, 4), ValueError, "packed makes a field 'segments' itself: give the values another name"),
        (lambda: jl.packed(VALUES, OFFSETS + 1, SIZE), ValueError, f"ragged: offsets run from 1 to {OFFSETS[-1] + 1}, 'values' has {OFFSETS[-1]} rows"),
        (lambda: jl.packed(VALUES, [0, 3, 2], 4), ValueError, "ragged: offsets must not fall: offsets[1] = 3, offsets[2] = 2"),
        (lambda: jl.packed(VALUES.astype("float16"), OFFSETS, SIZE), TypeError, FLOAT16),
        (lambda: jl.packed(VALUES, [0, 5], 4), ValueError, "row 0 has 5 elements and a pack holds 4 (pass overflow='split', 'truncate' or 'drop')"),
        (lambda: jl.packed(VALUES, [0, 5, 6], jl.pack([4, 4], 4)), ValueError, "packed: the packs are of other offsets: row 1 does not lie so in these"),
        (lambda: jl.packed(VALUES, OFFSETS, SIZE, padding=70_000), ValueError, "packed: padding 70000 does not fit uint16"),
        (lambda: jl.packed({"a": VALUES, "b": VALUES[1:]}, OFFSETS, SIZE), ValueError, DIFFER),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as found:
        make()
    assert str(found.value) == message
