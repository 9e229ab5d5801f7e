"""Packing: ragged rows into bins of one length, by best-fit-decreasing, and the bins into padded batches.

The assignment is exact best-fit-decreasing (Johnson: "Near-optimal bin packing algorithms", 1973) in O(rows +
capacity): rows sorted by counting, open packs kept in one stack per free space, the spaces in use kept in a bitmap
with a bit a space and, above it, a bit a word, so that the smallest space that still takes a row is a few shifts away.
"""

# mypy: allow-untyped-calls
# (the draws of rng.py are typed by their callers: Python integers here, 64-bit words in a kernel)

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from . import jit, rng
from .jit import INT, Array

PACKING = 0x5061636B  # keeps these draws apart from those of other rooms with the same seed
LIMIT = 2**31 - 1  # segments, positions and cu_seqlens are int32
OVERFLOWS = ("error", "split", "truncate", "drop")


class Packs(NamedTuple):
    """Which rows lie in which pack: pack k holds entries `starts[k]` to `starts[k + 1]` of the first three arrays.

    `rows` (int64) are row numbers, `begins` (int64) the element of the row an entry begins with (0 but for the later
    pieces of a split row), `sizes` (int64) its elements, `starts` (int64) is one longer than there are packs.
    `capacity` is the elements a pack can hold, `most` the entries of the pack that has most, `empty` the rows without
    elements (they are in no pack), `dropped` the rows left out because they are longer than a pack.
    """

    rows: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    capacity: int
    most: int
    empty: int
    dropped: int

    @property
    def number(self) -> int:
        """How many packs there are."""
        return len(self.starts) - 1

    @property
    def elements(self) -> int:
        """How many elements lie in all packs together."""
        return int(self.sizes.sum())

    @property
    def fill(self) -> float:
        """The share of all packs that is no padding, 0 to 1 (1 where there is no pack)."""
        return self.elements / (self.number * self.capacity) if self.number else 1.0


class Packed(NamedTuple):
    """A batch of b packs of `capacity` elements: what attention over packed rows takes.

    `values` (b, capacity, ...), `segments` (b, capacity) int32: 1, 2, ... for the rows of a pack and 0 for padding,
    `positions` (b, capacity) int32: 0, 1, ... within each row and 0 for padding, `cu_seqlens` int32: where segments
    begin and end in the flattened (b * capacity) batch, the padding of a pack being a segment of its own; the first
    `used` are boundaries from 0 to b * capacity, those after repeat the last, so that the shape is the same each time.
    """

    values: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    used: int


# ---------------------------------------------------------------------------------------------------------------------
# Which row goes where


def pack(
    lengths: Any, capacity: int, *, seed: int = 0, epoch: int = 0, group: int = 1 << 16, overflow: str = "error"
) -> Packs:
    """Put rows of these lengths into as few packs of `capacity` elements as best-fit-decreasing finds.

    `lengths` (n,) integers, elements a row. Rows are shuffled, cut into equal groups of at most `group` rows, each
    group is packed on its own, entries within a pack keep the shuffled order, and all packs are shuffled: so packs of
    one epoch do not run from long rows to short ones, and the next epoch packs other rows together. Best fit: the
    longest row first, each into the pack with the least space that still takes it, of several the one filled last.
    The result depends on the arguments alone. Rows without elements are in no pack. A row longer than a pack is cut
    into full packs and a rest ("split"), cut to the capacity ("truncate"), left out and counted ("drop"), or
    refused ("error").

    Raises ValueError on a negative length, a capacity that is not 1 to 2**31 - 1, and on a row longer than a pack.

    >>> packs = pack([3, 5, 2, 4, 0, 1], capacity=5)
    >>> packs.number, packs.fill, packs.empty
    (3, 1.0, 1)
    >>> sorted(sorted(packs.rows[a:b].tolist()) for a, b in zip(packs.starts, packs.starts[1:]))
    [[0, 2], [1], [3, 5]]
    """
    capacity, group, seed, epoch = (operator.index(n) for n in (capacity, group, seed, epoch))
    if not 1 <= capacity <= LIMIT:
        raise ValueError(f"a pack of {capacity} elements: capacity must be 1 to {LIMIT}")
    if group < 1:
        raise ValueError(f"groups of {group} rows: group must be at least 1")
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow={overflow!r}: must be one of {', '.join(map(repr, OVERFLOWS))}")
    lengths = _integers(lengths, "lengths")
    if lengths.size and lengths.min() < 0:
        row = int(np.argmax(lengths < 0))
        raise ValueError(f"row {row} has length {lengths[row]}: lengths must not be negative")
    long = int(np.count_nonzero(lengths > capacity))
    if long and overflow == "error":
        row = int(np.argmax(lengths > capacity))
        raise ValueError(
            f"row {row} has {lengths[row]} elements and a pack holds {capacity}"
            " (pass overflow='split', 'truncate' or 'drop')"
        )
    empty = lengths.size - int(np.count_nonzero(lengths))
    count = lengths.size - empty
    if overflow == "split" and long:
        count = int((-(-lengths // capacity)).sum())
    elif overflow == "drop":
        count -= long
    row_of, begin_of, size_of = (np.empty(count, np.int64) for _ in range(3))
    _kernel(_pieces, 1, INT, INT, 1, 1, 1)(lengths, capacity, OVERFLOWS.index(overflow), row_of, begin_of, size_of)

    groups = -(-count // group)
    # Two packs of a group together hold more than a capacity, else best fit had joined them.
    bound = min(count, 2 * int(size_of.sum()) // capacity + groups)
    widest = -(-count // groups) if groups else 0
    bases, words = _levels(capacity)
    key = rng.subkey(rng.subkey(seed, PACKING), epoch)
    order, bins = np.empty(count, np.int64), np.empty(count, np.int64)
    used, after = np.empty(bound, np.int64), np.empty(bound, np.int64)
    ranked, local = np.empty(widest, np.int64), np.empty(widest, np.int64)
    ends, heads = np.empty(capacity + 1, np.int64), np.empty(capacity + 1, np.int64)
    bits = np.zeros(words, np.int64)
    assign = _kernel(_assign, 1, INT, INT, INT, *[1] * 10)
    number = assign(size_of, capacity, groups, key, order, bins, used, after, ranked, local, ends, heads, bits, bases)
    most = int(used[:number].max()) if number else 0

    rows, begins, sizes = (np.empty(count, np.int64) for _ in range(3))
    starts = np.empty(number + 1, np.int64)
    place = _kernel(_place, INT, *[1] * 11)
    place(key, order, bins, used[:number], after[:number], row_of, begin_of, size_of, rows, begins, sizes, starts)
    return Packs(rows, begins, sizes, starts, capacity, most, empty, long if overflow == "drop" else 0)


def _pieces(
    lengths: np.ndarray,
    capacity: int,
    overflow: int,
    row_of: np.ndarray,
    begin_of: np.ndarray,
    size_of: np.ndarray,
) -> int:
    """List what is to be packed: each row that has elements, or its pieces; overflow is an index into OVERFLOWS."""
    n = 0
    for row in range(lengths.size):
        length = lengths[row]
        if length > capacity and overflow == 3:
            continue
        if length > capacity and overflow == 2:
            length = capacity
        begin = 0
        while begin < length:
            row_of[n] = row
            begin_of[n] = begin
            size_of[n] = min(capacity, length - begin)
            begin += capacity
            n += 1
    return n


def _assign(
    sizes: np.ndarray,
    capacity: int,
    groups: int,
    key: int,
    order: np.ndarray,
    bins: np.ndarray,
    used: np.ndarray,
    after: np.ndarray,
    ranked: np.ndarray,
    local: np.ndarray,
    ends: np.ndarray,
    heads: np.ndarray,
    bits: np.ndarray,
    bases: np.ndarray,
) -> int:
    """Shuffle pieces into `order`, set `bins[i]` to the pack of piece `order[i]`, and give the number of packs.

    `used[b]` are the pieces of pack b. Packs with the same free space are a stack: `heads[space]` is its top and
    `after[b]` the pack below b, -1 at the end. A bit in `bits` says that the stack of a space is not empty.
    """
    n = sizes.size
    rng.permutation(key, 0, order)
    packs = 0
    for space in range(capacity + 1):
        heads[space] = -1
    for g in range(groups):
        first = g * n // groups
        count = (g + 1) * n // groups - first
        for size in range(capacity + 1):
            ends[size] = 0
        for i in range(count):
            size = sizes[order[first + i]]
            local[i] = size
            ends[size] += 1
        at = 0
        for size in range(capacity, -1, -1):
            at += ends[size]
            ends[size] = at - ends[size]
        for i in range(count):
            size = local[i]
            ranked[ends[size]] = i
            ends[size] += 1
        for j in range(count):
            i = ranked[j]
            size = local[i]
            space = _smallest(bits, bases, size)
            if space < 0:
                pack = packs
                packs += 1
                used[pack] = 0
                space = capacity
            else:
                pack = heads[space]
                heads[space] = after[pack]
                if after[pack] < 0:
                    _clear(bits, bases, space)
            bins[first + i] = pack
            used[pack] += 1
            space -= size
            after[pack] = heads[space]
            if heads[space] < 0:
                _set(bits, bases, space)
            heads[space] = pack
        for space in range(capacity + 1):
            heads[space] = -1
        for word in range(bits.size):
            bits[word] = 0
    return packs


def _place(
    key: int,
    order: np.ndarray,
    bins: np.ndarray,
    used: np.ndarray,
    deal: np.ndarray,
    row_of: np.ndarray,
    begin_of: np.ndarray,
    size_of: np.ndarray,
    rows: np.ndarray,
    begins: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Shuffle the packs and write their pieces side by side; `used` ends up as the end of each pack."""
    rng.permutation(key, 1, deal)
    at = 0
    for k in range(deal.size):
        starts[k] = at
        at += used[deal[k]]
        used[deal[k]] = starts[k]
    starts[deal.size] = at
    for i in range(order.size):
        j = used[bins[i]]
        used[bins[i]] = j + 1
        rows[j] = row_of[order[i]]
        begins[j] = begin_of[order[i]]
        sizes[j] = size_of[order[i]]


# ---------------------------------------------------------------------------------------------------------------------
# A set of integers that finds its next member in O(log32): 32 bits a word (so that signed arithmetic will do)


def _levels(limit: int) -> tuple[np.ndarray, int]:
    """Give where each level of the set over 0 .. limit begins, and how many words it takes in all."""
    bases, words, size = [], 0, limit
    while True:
        bases.append(words)
        size = (size >> 5) + 1
        words += size
        if size == 1:
            return np.array(bases, np.int64), words


def _set(bits: np.ndarray, bases: np.ndarray, member: int) -> None:
    """Add a member."""
    for level in range(bases.size):
        word = bases[level] + (member >> 5)
        bits[word] |= 1 << (member & 31)
        member >>= 5


def _clear(bits: np.ndarray, bases: np.ndarray, member: int) -> None:
    """Remove a member."""
    for level in range(bases.size):
        word = bases[level] + (member >> 5)
        bits[word] &= ~(1 << (member & 31))
        if bits[word] != 0:
            return
        member >>= 5


def _smallest(bits: np.ndarray, bases: np.ndarray, least: int) -> int:
    """Give the smallest member that is `least` or more, or -1."""
    for level in range(bases.size):
        rest = bits[bases[level] + (least >> 5)] >> (least & 31)
        if rest != 0:
            least += _lowest(rest)
            for below in range(level - 1, -1, -1):
                least = (least << 5) + _lowest(bits[bases[below] + least])
            return least
        least = (least >> 5) + 1  # each level has a word to spare for this one past the end
    return -1


def _lowest(word: int) -> int:
    """Give the place of the lowest 1 of a word in 1 .. 2**32 - 1: the number of ones below it."""
    x = (word & -word) - 1
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


# ---------------------------------------------------------------------------------------------------------------------
# Packs into batches


def emit(
    packs: Packs,
    values: np.ndarray,
    offsets: np.ndarray,
    which: Any,
    *,
    dtype: Any = None,
    padding: Any = 0,
    out: Packed | None = None,
) -> Packed:
    """Write the packs numbered `which` (b,) as a padded batch: row r is `values[offsets[r]:offsets[r + 1]]`.

    `values` (elements, ...) of any fixed-size dtype, `offsets` (rows + 1,) integers, `dtype` of the batch (as `values`
    by default), `padding` the value behind the last row of a pack. With `out`, a batch of the same b from here, its
    arrays are written over and handed back. `np.arange(rank, packs.number, world)` is the share of one rank.

    Raises IndexError on a pack that is not there, and ValueError where the packs are not of these offsets, or where a
    value does not fit an integer dtype.

    >>> values, offsets = np.array([7, 7, 7, 8, 8, 9]), np.array([0, 3, 5, 6])
    >>> batch = emit(pack(np.diff(offsets), 6), values, offsets, [0])
    >>> sorted(zip(batch.values[0].tolist(), batch.positions[0].tolist()))
    [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (9, 0)]
    >>> batch.cu_seqlens[: batch.used].shape, np.unique(batch.segments).tolist()
    ((4,), [1, 2, 3])
    """
    values, which, offsets = np.asarray(values), _integers(which, "which"), _integers(offsets, "offsets")
    if values.ndim < 1 or values.dtype.hasobject:
        raise ValueError(f"values must be an array of fixed-size elements, not {values.dtype} {values.shape}")
    if len(which) * packs.capacity > LIMIT:
        raise ValueError(f"{len(which)} packs of {packs.capacity}: a batch holds at most {LIMIT} elements")
    inner, shape = values.shape[1:], (len(which), packs.capacity)
    if out is None:
        out = Packed(
            np.empty(shape + inner, dtype if dtype is not None else values.dtype),
            np.empty(shape, np.int32),
            np.empty(shape, np.int32),
            np.empty(len(which) * (packs.most + 1) + 1, np.int32),
            0,
        )
    if out.values.shape != shape + inner or out.segments.shape != shape or out.positions.shape != shape:
        raise ValueError(f"out holds {out.values.shape}, and these packs take {shape + inner}")
    if dtype is not None and out.values.dtype != np.dtype(dtype):
        raise ValueError(f"out holds {out.values.dtype}, not {np.dtype(dtype)}")
    source, target, fill = _bits(values, out.values, np.asarray(padding, out.values.dtype))
    width = int(np.prod(inner, dtype=np.int64))
    source = np.ascontiguousarray(source).reshape(-1)
    target = target.reshape(len(which), packs.capacity * width)
    exact = source.dtype.kind in "iu" and target.dtype.kind in "iu" and not np.can_cast(source.dtype, target.dtype)
    error = np.zeros(2, np.int64)
    first, last = Array(source.dtype.name, 1), Array(target.dtype.name, 1)
    kinds = last, Array(last.dtype, 2), Array("int32", 2), Array("int32", 2), Array("int32", 1)
    kernel = _kernel(_emit, first, *[1] * 6, INT, INT, *kinds, 1)
    used = kernel(
        *(source, offsets, packs.rows, packs.begins, packs.sizes, packs.starts, which, width, int(exact)),
        *(fill.reshape(1), target, out.segments, out.positions, out.cu_seqlens, error),
    )
    if used > 0:
        return out._replace(used=used)
    place, row = error.tolist()
    if used == -1:
        raise IndexError(f"there is no pack {which[place]}: packs are numbered 0 to {packs.number - 1}")
    if used == -2:
        raise ValueError(f"pack {which[place]} names row {row}, which does not lie so in these offsets and values")
    if used == -3:
        raise ValueError(f"pack {which[place]} holds more than out can take")
    raise ValueError(f"a value of row {row} does not fit {out.values.dtype}")


def _emit(
    values: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    begins: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
    which: np.ndarray,
    width: int,
    exact: int,
    padding: np.ndarray,
    out: np.ndarray,
    segments: np.ndarray,
    positions: np.ndarray,
    boundaries: np.ndarray,
    error: np.ndarray,
) -> int:
    """Fill a batch and give the number of boundaries, or an error: -1 pack, -2 row, -3 room, -4 value.

    `values` flat, `width` of them an element; `out` (b, capacity * width); `padding` (1,) of the dtype of `out`;
    `error` (2,) is set to the place in `which` and the row. With `exact`, values must come through the cast unchanged.
    """
    capacity = segments.shape[1]
    boundaries[0] = 0
    used = 1
    for i in range(which.size):
        pack = which[i]
        error[0] = i
        if pack < 0 or pack >= starts.size - 1 or starts[pack] < 0 or starts[pack + 1] > rows.size:
            return -1
        at = 0
        for j in range(starts[pack], starts[pack + 1]):
            row, begin, size = rows[j], begins[j], sizes[j]
            error[1] = row
            if row < 0 or row >= offsets.size - 1:
                return -2
            first, last = offsets[row] + begin, offsets[row + 1]
            if offsets[row] < 0 or begin < 0 or size < 1 or first + size > last or last * width > values.size:
                return -2
            if at + size > capacity or used >= boundaries.size:
                return -3
            # Slices first: a computed index in the inner loop keeps LLVM from vectorising it.
            source = values[first * width : (first + size) * width]
            target = out[i, at * width : (at + size) * width]
            for t in range(size * width):
                target[t] = source[t]
            if exact != 0:
                wrong = 0
                for t in range(size * width):
                    if target[t] != source[t]:
                        wrong = 1
                if wrong != 0:
                    return -4
            numbers, places = segments[i, at : at + size], positions[i, at : at + size]
            for t in range(size):
                numbers[t] = j - starts[pack] + 1
                places[t] = t
            at += size
            boundaries[used] = i * capacity + at
            used += 1
        if at < capacity:
            if used >= boundaries.size:
                return -3
            target = out[i, at * width :]
            for t in range(target.size):
                target[t] = padding[0]
            for t in range(at, capacity):
                segments[i, t] = 0
                positions[i, t] = 0
            boundaries[used] = (i + 1) * capacity
            used += 1
    for j in range(used, boundaries.size):
        boundaries[j] = which.size * capacity
    return used


@functools.cache  # a load hashes all that the function depends on, 2 ms
def _kernel(function: Any, *kinds: Any) -> jit.Kernel:
    """Load a kernel; 1 stands for a flat int64 array."""
    return jit.load(function, [Array("int64", 1) if kind == 1 else kind for kind in kinds])


def _bits(values: np.ndarray, out: np.ndarray, padding: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """View arrays of one dtype as plain bits: it serves dtypes no kernel computes with, and fewer kernels compile."""
    size = values.dtype.itemsize
    if values.dtype == out.dtype and size in (1, 2, 4, 8):
        plain = np.dtype(f"u{size}")
        return np.ascontiguousarray(values).view(plain), out.view(plain), padding.view(plain)
    for dtype in (values.dtype, out.dtype):
        if dtype.kind not in "biuf" or dtype.itemsize not in (1, 2, 4, 8) or dtype == np.float16:
            raise ValueError(f"{values.dtype} values cannot be packed as {out.dtype}: no kernel casts {dtype}")
    return values.astype(values.dtype.newbyteorder("="), copy=False), out, padding


def _integers(values: Any, name: str) -> np.ndarray:
    """Give a flat int64 array of these integers."""
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a flat array of integers, not {array.dtype} {array.shape}")
    return np.ascontiguousarray(array, np.int64)
