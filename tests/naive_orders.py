"""Slow, plain twins of the orders: what they must give, said again from first principles and with exact fractions."""

import math
from collections import Counter, deque
from fractions import Fraction

import numpy as np

from jitloader.rng import subkey


def one_by_one(positions, where):
    """Ask the kernel itself, in plain Python, for one position at a time."""
    rows, row = [], np.empty(1, np.int64)
    for p in where:
        row[0] = -1
        positions.kernel(p, 1, row, *positions.params)
        rows.append(int(row[0]))
    return rows


def feistel(x, count, key, rounds):
    """The keyed permutation of 0 .. count - 1, in the notation of a textbook: halves, rounds, cycle walking."""
    a = math.isqrt(count - 1) + 1 if count > 1 else 1
    b = max(-(-count // a), 1)
    keys = []
    for _ in range(rounds):
        key = (key * 6364136223846793005 + 1442695040888963407) % 2**64
        keys.append(key)
    while True:
        left, right = divmod(x, b)
        sides = deque([a, b])
        for k in keys:
            h = (right ^ (k % 2**32)) * 0x9E3779B1
            h = (h // 2**32) ^ (h % 2**32)
            h *= (k // 2**32) | 1
            h = (h // 2**32) ^ (h % 2**32)
            left, right = right, (left + h * sides[0] // 2**32) % sides[0]
            sides.rotate()
        x = left * b + right
        if x < count:
            return x


def rounds_of(count):
    return 8 if count >= 1024 else 12 if count >= 64 else 24


def block_row(p, count, size, window, odd, key):
    """The row at position p of a blockwise shuffle, in whole numbers: `odd` is the window that the short block is in."""
    whole, short = divmod(count, size)
    total = whole + (short > 0)
    for w in (p // (size * window), (p + size - short) // (size * window)):  # behind the short block all lies further on
        before = w * window * size - (size - short if short and 0 <= odd < w else 0)
        slots = min(window, total - w * window)
        length = slots * size - (size - short if short and w == odd else 0)
        if before <= p < before + length:
            break
    slot, inner = divmod(feistel(p - before, length, subkey(key, w) % 2**64, rounds_of(length)), size)
    if short and w == odd and slot == slots - 1:
        return whole * size + inner
    block = w * window + slot - (short > 0 and 0 <= odd < w)
    return feistel(block, whole, key % 2**64, rounds_of(whole)) * size + inner


def is_permutation(rows, count):
    return sorted(rows) == list(range(count))


def prefix_error(sequence, shares):
    """The largest distance of any class's count in any prefix from its share of the prefix's length."""
    seen, worst = Counter(), Fraction(0)
    for t, c in enumerate(sequence, 1):
        seen[c] += 1
        for k, share in shares.items():
            worst = max(worst, abs(seen[k] - share * t))
    return worst


def window_error(sequence, shares, size):
    """The largest distance of any class's count in any window of `size` neighbours from its share of the size."""
    worst = Fraction(0)
    for start in range(len(sequence) - size + 1):
        seen = Counter(sequence[start : start + size])
        worst = max(worst, *(abs(seen[k] - share * size) for k, share in shares.items()))
    return worst


def batch_error(sequence, shares, size):
    """The largest distance of any class's count in any batch, the short last one included, from its share of it."""
    worst = Fraction(0)
    for start in range(0, len(sequence), size):
        batch = sequence[start : start + size]
        seen = Counter(batch)
        worst = max(worst, *(abs(seen[k] - share * len(batch)) for k, share in shares.items()))
    return worst


def shares_of(labels):
    return {k: Fraction(n, len(labels)) for k, n in Counter(labels).items()}


def chances(table):
    """The exact chance of each row in an alias table of pairs (chance to stay in 2**-53, other row)."""
    count = len(table) // 2
    chance = [Fraction(0)] * count
    for i in range(count):
        stay = Fraction(int(table[2 * i]), 2**53)
        assert 0 <= stay <= 1
        chance[i] += stay / count
        if stay < 1:
            chance[int(table[2 * i + 1])] += (1 - stay) / count
    return chance


def mixed_length(sequence, sizes, stop):
    """The length of an epoch over an endless sequence of sources, found by counting rows out one by one."""
    left = list(sizes)
    for t, c in enumerate(sequence):
        if stop == "first" and left[c] == 0:
            return t
        left[c] -= 1
        if stop == "last" and max(left) <= 0:
            return t + 1
    raise AssertionError("the sequence is too short")


def z_score(observed, expected):
    """How many standard deviations a chi-square statistic lies above its mean (Wilson and Hilferty's cube root)."""
    observed, expected = np.asarray(observed, float).ravel(), np.asarray(expected, float).ravel()
    free = observed.size - 1
    chi2 = ((observed - expected) ** 2 / expected).sum()
    return ((chi2 / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
