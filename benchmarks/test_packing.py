"""Packing a million rows, and batches of packs, beside plain Python, NumPy and a copy of the same bytes."""

import bisect

import numpy as np
import pytest

from jitloader.packing import emit, pack

CAPACITY, BATCH = 2048, 8
LENGTHS = np.random.default_rng(0).lognormal(np.log(180) - 0.5, 1.0, 1_000_000).astype(np.int64).clip(1, CAPACITY)
FEW = LENGTHS[:20_000]
OFFSETS = np.concatenate([[0], np.cumsum(FEW)])
VALUES = np.random.default_rng(1).integers(0, 50_000, OFFSETS[-1]).astype(np.uint16)


def jitloader(lengths):
    """Best fit decreasing, shuffled: the sizes in each pack."""
    packs = pack(lengths, CAPACITY)
    return packs.sizes, packs.starts


def numpy_next_fit(lengths):
    """Rows one after the other, a new pack where the next row does not fit: a binary search a pack."""
    ends = np.cumsum(lengths)
    starts, at, done = [0], 0, 0
    while at < len(lengths):
        at = int(ends.searchsorted(done + CAPACITY, "right"))
        starts.append(at)
        done = ends[at - 1]
    return lengths, np.array(starts)


def python_best_fit(lengths):
    """Best fit decreasing over a sorted list of free spaces, in Python."""
    spaces, packs = [], []
    for length in np.sort(lengths)[::-1].tolist():
        k = bisect.bisect_left(spaces, (length, -1))
        if k < len(spaces):
            space, where = spaces.pop(k)
        else:
            space, where = CAPACITY, len(packs)
            packs.append([])
        packs[where].append(length)
        bisect.insort(spaces, (space - length, where))
    return np.concatenate(packs), np.cumsum([0, *map(len, packs)])


@pytest.mark.parametrize(
    "way, lengths, fill",
    [
        pytest.param(jitloader, LENGTHS, 0.995, id="jitloader-1M"),
        pytest.param(numpy_next_fit, LENGTHS, 0.85, id="numpy_next_fit-1M"),
        pytest.param(jitloader, FEW, 0.995, id="jitloader-20k"),
        pytest.param(numpy_next_fit, FEW, 0.85, id="numpy_next_fit-20k"),
        pytest.param(python_best_fit, FEW, 0.995, id="python_best_fit-20k"),
    ],
)
def test_pack(benchmark, way, lengths, fill):
    """Lognormal lengths, mean 178, into packs of 2048 elements; `fill` is what the way reaches at least."""
    way(FEW)  # compile

    sizes, starts = benchmark.pedantic(way, (lengths,), rounds=5)

    full = np.add.reduceat(sizes, starts[:-1])
    benchmark.extra_info.update(rows=len(lengths), fill=full.sum() / CAPACITY / len(full))
    assert len(sizes) == len(lengths) and full.sum() == lengths.sum()
    assert full.max() <= CAPACITY
    assert full.mean() / CAPACITY >= fill


PACKS = pack(FEW, CAPACITY)
WHICH = np.arange(BATCH)
FIRST = emit(PACKS, VALUES, OFFSETS, WHICH, dtype=np.int64)


def compiled():
    """One kernel over preallocated arrays."""
    return lambda: emit(PACKS, VALUES, OFFSETS, WHICH, dtype=np.int64, out=FIRST)


def row_loop():
    """A slice assignment a row and field, over preallocated arrays."""
    values, segments, positions = (np.empty_like(a) for a in FIRST[:3])
    count = np.arange(CAPACITY, dtype=np.int32)

    def run():
        boundaries = [0]
        for i, k in enumerate(WHICH.tolist()):
            at = 0
            for number, j in enumerate(range(PACKS.starts[k], PACKS.starts[k + 1]), 1):
                size, begin = int(PACKS.sizes[j]), int(OFFSETS[PACKS.rows[j]] + PACKS.begins[j])
                values[i, at : at + size] = VALUES[begin : begin + size]
                segments[i, at : at + size] = number
                positions[i, at : at + size] = count[:size]
                at += size
                boundaries.append(i * CAPACITY + at)
            if at < CAPACITY:
                values[i, at:] = segments[i, at:] = positions[i, at:] = 0
                boundaries.append((i + 1) * CAPACITY)
        return values, segments, positions, np.array(boundaries, np.int32), len(boundaries)

    return run


def vectorised():
    """Indices by repeat and arange, one take for the values."""
    every = np.arange(BATCH * CAPACITY)

    def run():
        out = np.zeros((3, BATCH * CAPACITY), np.int64)
        entries = slice(PACKS.starts[0], PACKS.starts[BATCH])  # packs 0 to 7 lie side by side
        counts = np.diff(PACKS.starts[: BATCH + 1])
        sizes, begins = PACKS.sizes[entries], OFFSETS[PACKS.rows[entries]] + PACKS.begins[entries]
        pack_of = np.repeat(np.arange(BATCH), counts)
        before = np.cumsum(sizes) - sizes
        heads = PACKS.starts[:BATCH] - PACKS.starts[0]
        at = before - np.repeat(before[heads], counts) + pack_of * CAPACITY
        inside = every[: sizes.sum()] - np.repeat(before, sizes)
        target = np.repeat(at, sizes) + inside
        out[0, target] = VALUES[np.repeat(begins, sizes) + inside]
        out[1, target] = np.repeat(np.arange(1, len(sizes) + 1) - np.repeat(heads, counts), sizes)
        out[2, target] = inside
        boundaries = np.union1d(at + sizes, np.arange(BATCH + 1) * CAPACITY).astype(np.int32)
        values, segments, positions = out.reshape(3, BATCH, CAPACITY)
        return values, segments.astype(np.int32), positions.astype(np.int32), boundaries, len(boundaries)

    return run


@pytest.mark.parametrize("way", [compiled, row_loop, vectorised], ids=["jitloader", "numpy_rows", "numpy_take"])
def test_emit(benchmark, way):
    """Eight packs of 2048 uint16 tokens to int64, with segments, positions and boundaries."""
    run = way()
    run()  # compile
    benchmark.extra_info.update(tokens=BATCH * CAPACITY, bytes=sum(a.nbytes for a in FIRST[:3]))

    values, segments, positions, boundaries, used = benchmark(run)

    for ours, theirs in zip(emit(PACKS, VALUES, OFFSETS, WHICH), (values, segments, positions), strict=False):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(FIRST.cu_seqlens[: FIRST.used], boundaries[:used])


def test_emit_memcpy(benchmark):
    """A copy of the bytes such a batch is made of: what memory allows."""
    source = np.concatenate([a.reshape(-1).view(np.uint8) for a in FIRST[:3]])
    target = np.empty_like(source)

    benchmark(np.copyto, target, source)

    assert np.array_equal(source, target)
