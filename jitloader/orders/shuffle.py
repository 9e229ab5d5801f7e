"""Full and blockwise shuffles: permutations computed for any position, with no permutation array for large data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import jit, rng
from .base import Order, Positions, epoch_key, permutation, table_rows, whole

TABLE = 65536  # up to this many rows a Fisher-Yates table is cheaper than a cipher, and uniform over all orders
LOW = 0xFFFFFFFF
MOST = 1 << 51  # rows of blocks: below it a product with a float64 inverse is less than one off
ROUNDS = 8  # 6 show in neighbouring rows (5 % too many at 200 rows); 8 do not, above some 64


def side(count: int) -> int:
    """Give the upper side a of a domain a * b that barely exceeds `count`: the square root, rounded up."""
    a = int(math.sqrt(float(count)))
    while a * a < count:
        a += 1
    while a > 1 and (a - 1) * (a - 1) >= count:
        a -= 1
    return max(a, 1)


def other_side(count: int, a: int) -> int:
    """Give the lower side b of that domain."""
    return max((count + a - 1) // a, 1)


def rounds_for(count: int) -> int:
    """Give the rounds after which a chi-square test over 200,000 keys tells no cipher over `count` rows from chance."""
    return ROUNDS if count >= 1024 else 12 if count >= 64 else 24


def sequential_rows(first: int, step: int, rows: np.ndarray) -> None:
    """Position p is row p."""
    for j in range(rows.size):
        rows[j] = first + j * step


def spread(x: Any, key: Any, size: Any) -> Any:
    """Map a number below 2**32 to one below `size`, by a 64-bit key: the round function (all arguments unsigned)."""
    h = ((x ^ key) & rng.u64(LOW)) * rng.u64(0x9E3779B1)  # masks tell LLVM that a 32-bit multiplier will do
    h = ((h >> rng.u64(32)) ^ h) & rng.u64(LOW)
    h = h * ((key >> rng.u64(32)) | rng.u64(1))
    h = ((h >> rng.u64(32)) ^ h) & rng.u64(LOW)
    return (h * (size & rng.u64(LOW))) >> rng.u64(32)


def next_key(key: Any) -> Any:
    """Give the key of the next round: a step of Knuth's MMIX generator, from a key that is already mixed."""
    return rng.u64(key * rng.u64(6364136223846793005) + rng.u64(1442695040888963407))


def turn(word: int, key: Any, size: int) -> int:
    """One round on two halves in one word: (x, y) becomes (y, (x + spread(y)) modulo size)."""
    x, y = rng.u64(word) >> rng.u64(32), rng.u64(word) & rng.u64(LOW)
    z = rng.i64(x + spread(y, key, rng.u64(size)))
    z = z - size if z >= size else z
    return rng.i64(y << rng.u64(32)) | z


def permuted(x: int, count: int, a: int, b: int, key: int, rounds: int) -> int:
    """Map x in [0, count) one to one into [0, count): a keyed Feistel cipher over Z_a x Z_b (Black and Rogaway 2002).

    The cycle is walked until it is back inside; a * b barely exceeds count, so that is rare.
    """
    inside = False
    while not inside:
        word = (x // b << 32) | (x % b)
        k1 = rng.u64(key)
        for _ in range(0, rounds, 2):
            k0 = next_key(k1)
            k1 = next_key(k0)
            word = turn(turn(word, k0, a), k1, b)
        x = (word >> 32) * b + (word & LOW)
        inside = x < count
    return x


def quotient(x: int, size: int, inverse: float) -> int:
    """Give x // size of a number below MOST, by way of 1 / size, which is one off at most: a loop of it vectorises."""
    q = int(x * inverse)
    rest = x - q * size
    return q + (1 if rest >= size else 0) - (1 if rest < 0 else 0)


def permute(first: int, step: int, rows: np.ndarray, count: int, a: int, b: int, key: int, rounds: int) -> None:
    """Fill rows[j] with permuted(first + j * step): short loops that vectorise, one a round, then the few walks.

    One long loop over all rounds waits on its own chain of multiplications: 9 ns a row where this takes 5.
    """
    high, low = first // b, first % b
    up, right = step // b, step % b
    done = 0
    while done < rows.size:  # runs in which the lower half does not wrap: no division per row
        run = min(rows.size - done, (b - 1 - low) // right + 1) if right else rows.size - done
        for j in range(run):
            rows[done + j] = ((high + j * up) << 32) | (low + j * right)
        done += run
        high, low = high + run * up + 1, low + run * right - b
    encipher(rows, count, a, b, key, rounds)


def encipher(rows: np.ndarray, count: int, a: int, b: int, key: int, rounds: int) -> None:
    """Replace words x // b << 32 | x % b by permuted(x), a round at a time."""
    k1 = rng.u64(key)
    for _ in range(0, rounds, 2):
        k0 = next_key(k1)
        k1 = next_key(k0)
        for j in range(rows.size):
            rows[j] = turn(rows[j], k0, a)
        for j in range(rows.size):
            rows[j] = turn(rows[j], k1, b)
    most = 0
    for j in range(rows.size):
        word = rng.u64(rows[j])
        row = rng.i64((word >> rng.u64(32)) * (rng.u64(b) & rng.u64(LOW)) + (word & rng.u64(LOW)))
        rows[j] = row
        most = max(most, row)
    if most >= count:
        for j in range(rows.size):
            if rows[j] >= count:
                rows[j] = permuted(rows[j], count, a, b, key, rounds)


def shuffled_rows(first: int, step: int, rows: np.ndarray, count: int, a: int, b: int, key: int) -> None:
    """Position p is row permuted(p)."""
    permute(first, step, rows, count, a, b, key, ROUNDS)


def _plan_shuffled(count: int, seed: int, epoch: int) -> Positions:
    key = epoch_key(seed, epoch)
    if count <= TABLE:
        return Positions(table_rows, count, (permutation(count, key),))
    a = side(count)
    return Positions(shuffled_rows, count, (count, a, other_side(count, a), key))


sequential = Order("sequential", lambda count, seed, epoch: Positions(sequential_rows, count, ()), "sequential")
"""Position p is row p."""

shuffled = Order("shuffled", _plan_shuffled, "shuffled")
"""A full permutation, another one each epoch: O(1) memory and start above 65536 rows, a small table below.

>>> positions = shuffled.plan(5, 0, 0)
>>> rows = np.empty(5, np.int64)
>>> positions.kernel(0, 1, rows, *positions.params)
>>> sorted(rows.tolist())
[0, 1, 2, 3, 4]
"""


def blocks_rows(
    first: int, step: int, rows: np.ndarray, size: int, window: int, count: int, a: int, b: int, odd: int, key: int
) -> None:
    """Position p is a row of window p // (size * window), whose blocks of `size` rows come from all over.

    `count` rows; `a`, `b`: sides of the cipher over the whole blocks; `odd`: the window of the short block, or -1.
    Both ciphers go over many rows at once: 14 ns a row, where enciphering the block of each row by itself took 50 to 90.
    """
    inners = jit.room()
    whole_blocks = count // size
    domain = max(whole_blocks, 1)
    per_size, per_b = 1.0 / size, 1.0 / b
    short = count - whole_blocks * size
    total = whole_blocks + (1 if short else 0)
    missing = size - short if short else 0
    span = size * window
    done = 0
    while done < rows.size:
        p = first + done * step
        if odd >= 0 and p >= (min((odd + 1) * window, total)) * size - missing:
            p += missing
        w = p // span
        t = p - w * span
        slots = min(window, total - w * window)
        length = slots * size - (missing if w == odd else 0)
        run = min(rows.size - done, (length - 1 - t) // step + 1, jit.ROOM)
        part = rows[done : done + run]
        upper = side(length)
        permute(
            t, step, part, length, upper, other_side(length, upper), rng.i64(rng.subkey(key, w)), rounds_for(length)
        )
        base = w * window - (1 if odd >= 0 and w > odd else 0)
        last = slots - 1 if w == odd else -1  # the slot of the short block, which is not enciphered: its rows go below 0
        for j in range(run):
            slot = quotient(part[j], size, per_size)
            inner = part[j] - slot * size
            inners[j] = inner if slot != last else -1 - inner
            block = base + slot if slot != last else 0
            high = quotient(block, b, per_b)
            part[j] = high << 32 | block - high * b
        encipher(part, domain, a, b, key, rounds_for(domain))
        for j in range(run):
            inner = inners[j]
            part[j] = part[j] * size + inner if inner >= 0 else whole_blocks * size - 1 - inner
        done += run


def blocks(rows: int, window: int) -> Order:
    """Shuffle blocks of `rows` consecutive rows, then mix the rows of every `window` blocks: for data beyond memory.

    Reads stay sequential within a block and rows * window rows are in use at a time. Many small blocks mix far better
    than few big ones. O(1) memory and start. Raises ValueError where a parameter is below 1, and for 2**51 rows and more.

    >>> blocks(rows=64, window=1024)
    blocks(rows=64, window=1024)
    """
    rows, window = whole(rows, "blocks(rows=)"), whole(window, "blocks(window=)")

    def plan(count: int, seed: int, epoch: int) -> Positions:
        if count >= MOST:
            raise ValueError(f"blocks takes less than {MOST:,} rows, got {count:,}")
        key = epoch_key(seed, epoch)
        size = min(rows, max(count, 1))
        full = count // size
        many = min(window, full + 1)  # so that size * many, too, stays below MOST twice over
        odd = -1
        if count % size:  # the short block may be anywhere; within its window it comes last, and is mixed as all are
            odd = int(rng.randint(rng.subkey(key, -1), 0, full + 1)) // many
        a = side(full)
        return Positions(blocks_rows, count, (size, many, count, a, other_side(full, a), odd, key))

    name = f"blocks(rows={rows}, window={window})"
    return Order(name, plan, name)
