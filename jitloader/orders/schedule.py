"""Which of several sources comes at which position, in given shares exact to a row, each in its own shuffle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import rng
from .base import SALT, Order, Positions, column, compiled, epoch_key, whole
from .shuffle import LOW, other_side, permuted, rounds_for, side

PERIOD = 1 << 20  # the longest table of a repeated schedule: shares are exact to one part in a million
REPEAT = 1 << 16  # a shorter one is drawn out to this, so that no stride over ranks meets a pattern
COLUMNS = 5  # of the table of sources: first row, rows, the two sides of its cipher, draws in a period


def earliest_deadline(
    quotas: np.ndarray,
    key: int,
    slots: np.ndarray,
    head: np.ndarray,
    after: np.ndarray,
    made: np.ndarray,
    heap: np.ndarray,
) -> None:
    """Fill slots[t] with source << 32 | its draw, so that each prefix t holds quota * t / total of it to within one.

    Draw k of a source may come from floor(k * total / quota) on and must come before ceil((k + 1) * total / quota);
    the earliest deadline goes first, ties at random (Liu and Layland 1973; Tijdeman 1980, the chairman assignment).
    Scratch: `head` (one a slot) and `after` (one a source) list the sources that wake at a slot; `made` counts draws;
    `heap` holds 2 words a source.
    """
    total = slots.size
    for t in range(total):
        head[t] = -1
    for c in range(quotas.size):
        made[c] = 0
        if quotas[c] > 0:
            after[c] = head[0]
            head[0] = c
    filled, pushed = 0, 0
    for t in range(total):
        c = head[t]
        while c >= 0:
            deadline = ((made[c] + 1) * total + quotas[c] - 1) // quotas[c]
            word = (deadline << 20) | rng.i64(rng.bits(key, pushed) >> rng.u64(44))
            pushed += 1
            at = filled
            filled += 1
            while at > 0 and heap[2 * ((at - 1) // 2)] > word:
                up = (at - 1) // 2
                heap[2 * at], heap[2 * at + 1] = heap[2 * up], heap[2 * up + 1]
                at = up
            heap[2 * at], heap[2 * at + 1] = word, c
            c = after[c]
        chosen = heap[1]
        filled -= 1
        word, c = heap[2 * filled], heap[2 * filled + 1]
        at, down = 0, 1
        while down < filled:
            if down + 1 < filled and heap[2 * down + 2] < heap[2 * down]:
                down += 1
            if heap[2 * down] >= word:
                break
            heap[2 * at], heap[2 * at + 1] = heap[2 * down], heap[2 * down + 1]
            at, down = down, 2 * down + 1
        heap[2 * at], heap[2 * at + 1] = word, c
        slots[t] = (chosen << 32) | made[chosen]
        made[chosen] += 1
        if made[chosen] < quotas[chosen]:
            wake = max(made[chosen] * total // quotas[chosen], t + 1)
            after[chosen] = head[wake]
            head[wake] = chosen


def interleave(quotas: np.ndarray) -> np.ndarray:
    """Give a table of sum(quotas) slots, source << 32 | draw, in which each prefix has the shares to within one."""
    total, sources = int(quotas.sum()), quotas.size
    slots, head = np.empty(total, np.int64), np.empty(total, np.int64)
    after, made, heap = (np.empty(k * sources, np.int64) for k in (1, 1, 2))
    if total:
        compiled(earliest_deadline, quotas, SALT, slots, head, after, made, heap)
    return slots


def drawn_rows(
    first: int, step: int, rows: np.ndarray, shift: int, key: int, slots: np.ndarray, sources: np.ndarray
) -> None:
    """Position p is the draw in slot p + shift of `slots` repeated without end, in its source's own permutation."""
    for j in range(rows.size):
        p = first + j * step + shift
        turn = p // slots.size
        word = slots[p - turn * slots.size]
        c = word >> 32
        at = c * COLUMNS
        size = sources[at + 1]
        draw = (word & LOW) + turn * sources[at + 4]
        again = draw // size
        inner = rng.i64(rng.subkey(rng.subkey(key, c), again))
        row = permuted(draw - again * size, size, sources[at + 2], sources[at + 3], inner, rounds_for(size))
        rows[j] = sources[at] + row


def source_table(sizes: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """Describe sources that lie one behind the other, `COLUMNS` numbers each."""
    table = np.empty((sizes.size, COLUMNS), np.int64)
    table[:, 0] = np.cumsum(sizes) - sizes
    table[:, 1] = sizes
    table[:, 2] = [side(int(n)) for n in sizes]
    table[:, 3] = [other_side(int(n), int(a)) for n, a in zip(sizes, table[:, 2], strict=True)]
    table[:, 4] = quotas
    return table.reshape(-1)


def ratio(shares: Sequence[Any]) -> np.ndarray:
    """Give shares as small whole numbers: exact where their common denominator is at most a million or so."""
    values = column(shares, "mixed(shares=)")
    if values.dtype.kind not in "iuf":
        raise TypeError(f"mixed(shares=) takes numbers, got {values.dtype}")
    for k, value in enumerate(values.tolist()):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"mixed(shares=) takes positive, finite shares, got {value} for source {k}")
    from fractions import Fraction

    parts = [Fraction(v).limit_denominator(1_000_000) if isinstance(v, float) else Fraction(v) for v in values.tolist()]
    common = math.lcm(*(f.denominator for f in parts))
    numbers = [int(f * common) for f in parts]
    shared = math.gcd(*numbers)
    if min(numbers) < 1 or sum(numbers) // shared > PERIOD:
        total = sum(Fraction(v) for v in values.tolist())
        return np.array([max(1, round(Fraction(v) / total * PERIOD)) for v in values.tolist()], np.int64)
    return np.array([k // shared for k in numbers], np.int64)


def drawn_out(quotas: np.ndarray) -> np.ndarray:
    """Repeat a short period's quotas until the period is long enough for its ties to look random."""
    return quotas * max(1, -(-REPEAT // int(quotas.sum())))


def mixed(counts: Sequence[int], shares: Sequence[float], stop: str = "first") -> Order:
    """Mix sources that lie one behind the other: position p is the next row of the source whose turn it is.

    counts : rows of each source, in their order in the data.
    shares : how often each comes, relative to the others. Among the first t positions of an epoch a source has its
        share of t to within one row; shares beyond a common denominator of 2**20 are taken to one part in a million.
    stop : the epoch ends before a row would come twice ("first" source used up); when all rows have come ("last": the
        smaller sources start again, shuffled anew); or after sum(counts) rows with every source going on in the next
        epoch where it was left ("never").

    Each source is in a shuffled order of its own. O(1) memory: at most 8 MB of schedule, and no start-up per epoch.
    Raises ValueError for zero, negative or missing shares, sources without rows, or counts that do not sum up to the
    rows at hand.

    >>> positions = mixed([10, 100], [1, 3], stop="first").plan(110, 0, 0)
    >>> positions.length >= 37
    True
    """
    sizes = [whole(n, f"mixed(counts=) for source {k}") for k, n in enumerate(counts)]
    if not sizes or len(sizes) != len(shares):
        raise ValueError(f"mixed takes one share a source, got {len(sizes)} counts and {len(shares)} shares")
    if stop not in ("first", "last", "never"):
        raise ValueError(f'mixed(stop=) takes "first", "last" or "never", got {stop!r}')
    small = ratio(shares)
    quotas = drawn_out(small)
    state: list[Any] = []

    def plan(count: int, seed: int, epoch: int) -> Positions:
        if count != sum(sizes):
            raise ValueError(f"mixed has sources of {sum(sizes)} rows together, but there are {count} rows")
        if not state:
            slots = interleave(quotas)
            state.append((slots, source_table(np.array(sizes), quotas), _length(slots, quotas, sizes, stop)))
        slots, sources, length = state[0]
        if stop == "never":
            return Positions(drawn_rows, length, (epoch * length, epoch_key(seed, 0), slots, sources))
        return Positions(drawn_rows, length, (0, epoch_key(seed, epoch), slots, sources))

    name = f"mixed({', '.join(f'{100 * k / int(small.sum()):.3g}%' for k in small.tolist())}, stop={stop!r})"
    return Order(name, plan, f"mixed({sizes}, {small.tolist()}, {stop})")


def _length(slots: np.ndarray, quotas: np.ndarray, sizes: list[int], stop: str) -> int:
    """Give the positions of an epoch: up to the first draw too many, or to the last row that has not come."""
    if stop == "never":
        return sum(sizes)
    ends = []
    for c, size in enumerate(sizes):
        draw = size if stop == "first" else size - 1
        turn, rest = divmod(draw, int(quotas[c]))
        ends.append(turn * slots.size + int(np.flatnonzero(slots >> 32 == c)[rest]))
    return min(ends) if stop == "first" else max(ends) + 1
