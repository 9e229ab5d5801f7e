"""Rows drawn by weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import jit, rng
from .base import Order, Positions, column, compiled, epoch_key, index_dtype, same_length, table_rows, whole

FULL = 1 << 53  # a probability of 1, as a whole number


def alias_table(
    weights: np.ndarray, scale: float, heaviest: int, left: np.ndarray, stack: np.ndarray, table: np.ndarray
) -> None:
    """Fill table[2 i], table[2 i + 1] with the chance (in 2**-53) that a draw of column i stays i, and its other row.

    Walker's alias method as built by Vose (1991). Scratch: `left` (what a column still needs) and `stack` (columns
    below the mean from the front, the others from the back).
    """
    count = weights.size
    low, high = 0, count
    for i in range(count):
        left[i] = weights[i] * scale
        if left[i] < 1.0:
            stack[low] = i
            low += 1
        else:
            high -= 1
            stack[high] = i
    while low > 0 and high < count:
        low -= 1
        i, k = stack[low], stack[high]
        table[2 * i] = int(left[i] * FULL)
        table[2 * i + 1] = k
        left[k] = left[k] + left[i] - 1.0
        if left[k] < 1.0:
            high += 1
            stack[low] = k
            low += 1
    while low > 0:  # full, but for rounding; a row of weight 0 must stay out all the same
        low -= 1
        i = stack[low]
        table[2 * i] = FULL if weights[i] > 0.0 else 0
        table[2 * i + 1] = heaviest
    while high < count:
        table[2 * stack[high]] = FULL
        table[2 * stack[high] + 1] = stack[high]
        high += 1


def weighted_rows(first: int, step: int, rows: np.ndarray, key: int, table: np.ndarray) -> None:
    """Position p is a draw of its own: a column of the alias table, then its row or its other row."""
    count = table.size // 2
    coins = rng.i64(rng.subkey(key, 1))
    for j in range(rows.size):
        p = first + j * step
        i = rng.randint(key, p, count)
        coin = rng.i64(rng.bits(coins, p) >> rng.u64(11))
        rows[j] = i if coin < table[2 * i] else table[2 * i + 1]


def arrivals(key: int, rows: np.ndarray, weights: np.ndarray, times: np.ndarray) -> None:
    """Give each row an exponential time of arrival at a rate of its weight."""
    for i in range(rows.size):
        times[i] = -math.log(1.0 - rng.uniform(key, rows[i])) / weights[rows[i]]


def weighted(weights: Any, replacement: bool = True) -> Order:
    """Draw rows in proportion to their weights: one weight a row, at least 0, in any unit.

    With replacement, an epoch is as many independent draws as there are rows; each is a function of its position
    (alias method, Walker 1977 and Vose 1991): O(1) per draw and no start-up per epoch, with a table of 16 bytes a row.
    Without, each row of positive weight comes once, heavy ones early (Efraimidis and Spirakis 2006): an O(n log n)
    table per epoch. Raises ValueError for weights that are negative, NaN, infinite, all zero, or not one a row.

    >>> order = weighted([0, 3, 1], replacement=False)
    >>> order.plan(3, 0, 0).length
    2
    """
    array = column(weights, "weighted")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"weighted takes numbers, got {array.dtype}")
    array = np.ascontiguousarray(array, np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"weighted takes finite weights of at least 0, got {array[row]} at row {row}")
    if not array.any():
        raise ValueError(f"weighted takes at least one weight above 0, got {array.size} zeros")
    array = array / array.max()
    state: list[np.ndarray] = []

    def drawn(count: int, seed: int, epoch: int) -> Positions:
        same_length("weighted", array.size, count)
        if not state:
            table, left, stack = np.empty(2 * count, np.int64), np.empty(count), np.empty(count, np.int64)
            compiled(alias_table, array, count / float(array.sum()), int(array.argmax()), left, stack, table)
            state.append(table)
        return Positions(weighted_rows, count, (epoch_key(seed, epoch), state[0]))

    def sorted_out(count: int, seed: int, epoch: int) -> Positions:
        same_length("weighted", array.size, count)
        rows = np.flatnonzero(array)
        times = np.empty(rows.size)
        compiled(arrivals, epoch_key(seed, epoch), rows, array, times)
        table = rows[np.argsort(times, kind="stable")].astype(index_dtype(count))
        return Positions(table_rows, rows.size, (table,))

    name = f"weighted({array.size} weights{'' if replacement else ', replacement=False'})"
    return Order(name, drawn if replacement else sorted_out, f"weighted({bool(replacement)}, {jit.fingerprint(array)})")


def sampled_rows(first: int, step: int, rows: np.ndarray, key: int, count: int) -> None:
    """Row of each position: a uniform draw of the position's own."""
    for j in range(rows.size):
        rows[j] = rng.randint(rng.u64(key), first + j * step, count)


def sampled(n: int) -> Order:
    """Map position i to a uniform draw of one of the rows, with replacement; an epoch has `n` positions.

    Each draw depends on (seed, epoch, position) alone, so it needs no memory, resumes and parts between ranks. As
    torch's RandomSampler(replacement=True, num_samples=n); with windows it is the way of random offsets.

    >>> import numpy as np, jitloader as jl
    >>> len(jl.Loader(jl.Dataset(x=np.arange(10)), 4, order=jl.sampled(100)))
    25
    """
    number = whole(n, "sampled: n")

    def plan(count: int, seed: int, epoch: int) -> Positions:
        return Positions(sampled_rows, number if count else 0, (rng.i64(epoch_key(seed, epoch)), max(count, 1)))

    return Order(f"sampled({number})", plan, f"sampled({number})")
