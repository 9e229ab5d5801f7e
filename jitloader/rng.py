"""Stateless draws: a key in, a number out, the same bits in plain Python and in a kernel.

A key is an unsigned 64-bit number mixed from (seed, epoch, row, stage). Nothing here keeps state, so what is drawn
depends on the key alone: not on threads, batch size or ranks. The mixer is the finaliser of SplitMix64
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import math

MASK = 0xFFFFFFFFFFFFFFFF
LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15
NORMAL = 0xD1B54A32D192ED03  # keeps normal(key, k) apart from uniform(key, k)
TO_UNIT = 1.0 / 9007199254740992.0  # 2 ** -53


def u64(x):
    """Give x modulo 2**64 as an unsigned number (in a kernel: a cast)."""
    return int(x) & MASK


def i64(x):
    """Give x as a signed 64-bit number (in a kernel: a cast)."""
    return (int(x) & MASK) - ((int(x) & (1 << 63)) << 1)


def mix(z):
    """Map a 64-bit key to a 64-bit key, one to one, each output bit depending on each input bit."""
    z = u64(z)
    z = u64((z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9))
    z = u64((z ^ (z >> u64(27))) * u64(0x94D049BB133111EB))
    return z ^ (z >> u64(31))


def subkey(key, salt):
    """Give the key of part `salt` (a row, a stage) below `key`; other salts give unrelated keys."""
    return mix(u64(key) ^ mix(u64(u64(salt) * u64(GOLDEN) + u64(GOLDEN))))


def mulhi(a, b):
    """Give the upper 64 bits of the 128-bit product of two unsigned numbers."""
    a, b = u64(a), u64(b)
    a0, a1, b0, b1 = a & u64(LOW), a >> u64(32), b & u64(LOW), b >> u64(32)
    middle = a1 * b0 + ((a0 * b0) >> u64(32))
    low = (middle & u64(LOW)) + a0 * b1
    return u64(a1 * b1 + (middle >> u64(32)) + (low >> u64(32)))


def bits(key, k):
    """Give the k-th 64 random bits of a key."""
    return mix(u64(u64(key) + u64(u64(k) + u64(1)) * u64(GOLDEN)))


def uniform(key, k):
    """Give the k-th uniform number of a key, float64 in [0, 1)."""
    return float(bits(key, k) >> u64(11)) * TO_UNIT


def randint(key, k, n):
    """Give the k-th uniform integer of a key, int64 in [0, n); n is at least 1."""
    return i64(mulhi(bits(key, k), n))


def bernoulli(key, k, p):
    """Give True with probability p: the k-th such draw of a key."""
    return uniform(key, k) < p


def normal(key, k):
    """Give the k-th standard normal number of a key, float64 (Box and Muller 1958)."""
    z = bits(u64(key) ^ u64(NORMAL), k)
    radius = math.sqrt(-2.0 * math.log((float(z >> u64(11)) + 1.0) * TO_UNIT))
    return radius * math.cos(2.0 * math.pi * (float(mix(z) >> u64(11)) * TO_UNIT))


def permutation(key, k, out):
    """Fill the 1-D integer array `out` with a uniform permutation of 0 .. out.size - 1 (Fisher and Yates): the k-th of a key."""
    inner = subkey(key, k)
    for i in range(out.size):
        j = randint(inner, i, i + 1)
        out[i] = out[j]
        out[j] = i


def epoch_key(seed, epoch):
    """Give the key from which all order and draws of an epoch come: mixed, so that no two pairs that are near share it."""
    return subkey(mix(seed), epoch)
