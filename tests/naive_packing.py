"""Slow, plain twins of packing and replay: the textbook definitions, with lists and sums."""

import math
from collections import deque

import numpy as np


def best_fit_decreasing(lengths, capacity):
    """Put lengths, longest first, into the pack with the least space that takes it, of several the one filled last."""
    packs, filled = [], []  # the lengths in each pack, and when it was last filled
    for now, length in enumerate(sorted(lengths, reverse=True)):
        fits = [k for k in range(len(packs)) if sum(packs[k]) + length <= capacity]
        if fits:
            best = min(fits, key=lambda k: (capacity - sum(packs[k]), -filled[k]))
            packs[best].append(length)
            filled[best] = now
        else:
            packs.append([length])
            filled.append(now)
    return packs


def emit(entries, values, offsets, capacity, padding, dtype):
    """Write one pack of (row, begin, size) entries: values, segments, positions and the ends of its segments."""
    out, segments, positions, ends = [], [], [], []
    for number, (row, begin, size) in enumerate(entries, 1):
        out += [values[offsets[row] + begin + t] for t in range(size)]
        segments += [number] * size
        positions += range(size)
        ends.append(len(out))
    if len(out) < capacity:
        rest = capacity - len(out)
        out += [np.full(values.shape[1:], padding)] * rest
        segments += [0] * rest
        positions += [0] * rest
        ends.append(capacity)
    return np.array(out).astype(dtype), segments, positions, ends


def draw(shares, u):
    """Give the row at u of the shares laid end to end."""
    at = 0.0
    for row, share in enumerate(shares):
        at += share
        if u < at:
            return row
    return max(row for row, share in enumerate(shares) if share > 0)


def importance(shares, rows, beta):
    """Give (N * P(i)) ** -beta over the largest such weight of any row that can be drawn."""
    total, n = math.fsum(shares), len(shares)
    weights = [(n * share / total) ** -beta if share > 0 else None for share in shares]
    return [weights[row] / max(w for w in weights if w is not None) for row in rows]


def chi_square(counts, expected):
    """Give the statistic, and a bound that a true source passes all but once in about a million times."""
    cells = [(c, e) for c, e in zip(counts, expected, strict=True) if e > 0]
    free = len(cells) - 1
    # Wilson and Hilferty (1931): the cube root of chi-square / free is nearly normal; 4.75 standard deviations.
    bound = free * (1 - 2 / (9 * free) + 4.75 * math.sqrt(2 / (9 * free))) ** 3
    return sum((c - e) ** 2 / e for c, e in cells), bound


class Ring:
    """The last rows in a deque, beside the storage row of each."""

    def __init__(self, capacity):
        self.capacity, self.rows, self.written = capacity, deque(maxlen=capacity), 0

    def append(self, value):
        place = self.written % self.capacity
        self.rows.append((place, value))
        self.written += 1
        return place
