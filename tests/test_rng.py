"""Draws are what they are called, for many keys and for many draws of one, and the same compiled and in plain Python.

Bounds are 4 to 5 standard deviations of what is counted, keys are fixed: a test that fails has found a bias.
"""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from jitloader import jit, rng

N = 200_000


def draws(function, *args, keys=False, n=N, key=12345, dtype="float64"):
    """n draws of a function, compiled: the first n of one key, or the first of each of n keys in a row."""

    if keys:

        def fill(out, key):
            for k in range(out.size):
                out[k] = function(rng.subkey(key, k), 0, *args)

    else:

        def fill(out, key):
            for k in range(out.size):
                out[k] = function(key, k, *args)

    out = np.zeros(n, dtype)
    jit.load(fill, (jit.Array(dtype, 1), jit.INT), name="draws")(out, rng.i64(key))
    return out


def chi(counts, shares):
    """How many standard deviations the chi-square of some counts is off."""
    wanted = counts.sum() * np.asarray(shares) / np.sum(shares)
    free = len(counts) - 1
    return (((counts - wanted) ** 2 / wanted).sum() - free) / math.sqrt(2 * free)


BOTH = pytest.mark.parametrize("keys", [False, True], ids=["of one key", "of keys in a row"])


@BOTH
def test_uniform(keys):
    """Uniform draws fill [0, 1) evenly, in ones, in pairs and in triples of neighbours, and do not follow each other."""
    u = draws(rng.uniform, keys=keys)

    assert u.min() >= 0 and u.max() < 1
    for n in (10, 1000):
        assert abs(chi(np.bincount((u * n).astype(int), minlength=n), np.ones(n))) < 5
    cells = (u[: N // 3 * 3] * 8).astype(int).reshape(-1, 3)
    assert abs(chi(np.bincount(cells @ [64, 8, 1], minlength=512), np.ones(512))) < 5
    for lag in (1, 2, 3, 7, 64, 256):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / math.sqrt(N)


@BOTH
@pytest.mark.parametrize("n", [2, 3, 10, 257])
def test_randint(keys, n):
    """Integer draws take each of 0 .. n - 1 equally often, after any other one too."""
    found = draws(rng.randint, n, keys=keys, dtype="int64")

    assert found.min() == 0 and found.max() == n - 1
    assert abs(chi(np.bincount(found, minlength=n), np.ones(n))) < 5
    if n <= 10:
        pairs = found[:-1:2] * n + found[1::2]
        assert abs(chi(np.bincount(pairs, minlength=n * n), np.ones(n * n))) < 5


def test_randint_of_huge_ranges():
    """Integers of a range near 2**63 spread over all of it."""
    n = 3 << 61
    found = draws(rng.randint, n, dtype="int64", n=30_000)

    assert abs(chi(np.bincount((found / n * 30).astype(int), minlength=30), np.ones(30))) < 5


@BOTH
def test_normal(keys):
    """Normal draws have the moments, the quantiles and the tails of a normal distribution."""
    z = draws(rng.normal, keys=keys)

    assert abs(z.mean()) < 5 / math.sqrt(N) and abs(z.var() - 1) < 5 * math.sqrt(2 / N)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / N) and abs((z**4).mean() - 3) < 5 * math.sqrt(96 / N)
    edges = [NormalDist().inv_cdf(k / 100) for k in range(1, 100)]
    assert abs(chi(np.bincount(np.searchsorted(edges, z), minlength=100), np.ones(100))) < 5
    for edge in (3, 4):
        wanted = N * NormalDist().cdf(-edge)
        for tail in ((z > edge).sum(), (z < -edge).sum()):
            assert abs(tail - wanted) < 5 * math.sqrt(wanted)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 5 / math.sqrt(N)


@BOTH
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli(keys, p):
    """A bernoulli draw is True in the share p of cases: never for 0, always for 1."""
    hits = draws(rng.bernoulli, p, keys=keys, dtype="bool").sum()

    assert abs(hits - N * p) <= 5 * math.sqrt(N * p * (1 - p))


def test_streams_are_apart():
    """uniform, normal, neighbouring keys and subkeys do not know of each other."""
    u = draws(rng.uniform)
    others = {
        "normal": draws(rng.normal),
        "next key": draws(rng.uniform, key=12346),
        "top bit": draws(rng.uniform, key=12345 | 1 << 63),
        "subkey 0": draws(rng.uniform, key=rng.subkey(12345, 0)),
        "subkey 1": draws(rng.uniform, key=rng.subkey(12345, 1)),
        "keys in a row": draws(rng.uniform, keys=True),
    }

    for name, other in others.items():
        assert abs(np.corrcoef(u, other)[0, 1]) < 5 / math.sqrt(N), name
        assert not (u == other).any() or name == "normal"


def test_mix_avalanche():
    """Each bit of a key turns over each bit of its mix in half of the cases."""
    state = np.random.default_rng(0).integers(0, 2**64, 1500, dtype=np.uint64)
    flips = np.zeros((64, 64))
    for z in map(int, state):
        first = rng.mix(z)
        for bit in range(64):
            turned = np.array([first ^ rng.mix(z ^ (1 << bit))], np.uint64).view(np.uint8)
            flips[bit] += np.unpackbits(turned, bitorder="little")

    assert (abs(flips - 750) < 5.5 * math.sqrt(1500) / 2).all()


def test_mix_is_one_to_one():
    """mix maps keys to keys one to one: its steps can be turned back."""

    def shifted_back(z, by):
        x = z
        for _ in range(64 // by + 1):
            x = z ^ (x >> by)
        return x

    for z in (0, 1, 12345, 2**63, 2**64 - 1, *np.random.default_rng(1).integers(0, 2**63, 100).tolist()):
        y = shifted_back(rng.mix(z), 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
        y = shifted_back(y, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
        assert shifted_back(y, 30) == z


def test_seeds_are_mixed_not_added():
    """No epoch of one seed is an epoch of another: (42, 1) is not (43, 0), nor any of 300 x 300 another."""
    keys = {rng.subkey(rng.mix(seed), epoch) for seed in range(300) for epoch in range(300)}

    assert len(keys) == 300 * 300
    rows = {rng.subkey(rng.subkey(rng.mix(s), e), r) for s in (42, 43) for e in range(3) for r in range(10_000)}
    assert len(rows) == 60_000


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_permutation(n):
    """Each permutation of up to five things comes equally often."""
    count = 200 * math.factorial(n)

    def fill(codes, work, key):
        for row in range(codes.size):
            rng.permutation(rng.subkey(key, row), 0, work)
            code = 0
            for k in range(work.size):
                code = code * 10 + work[k]
            codes[row] = code

    codes, work = np.zeros(count, np.int64), np.zeros(n, np.int64)
    jit.load(fill, (jit.Array("int64", 1), jit.Array("int64", 1), jit.INT))(codes, work, 7)

    every = sorted(int("".join(map(str, p))) for p in itertools.permutations(range(n)))
    found, counts = np.unique(codes, return_counts=True)
    assert found.tolist() == every
    assert n == 1 or abs(chi(counts, np.ones(len(every)))) < 5


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_compiled_is_plain(key):
    """Every draw has the same bits compiled and in plain Python, for keys and places at the ends of their ranges."""
    if "every" not in _made:
        places = (jit.Array("float64", 1), jit.Array("int64", 1), jit.Array("int64", 1), jit.Array("int64", 1), jit.INT)
        _made["every"] = jit.load(every_draw, places, name="every")
    places = np.array([0, 1, 2, 1000, 2**40, 2**63 - 1, -1])

    def run(function):
        found = np.zeros(4 * len(places)), np.zeros(4 * len(places), np.int64), np.zeros(9, np.int64)
        function(*found[:2], found[2], places, rng.i64(key))
        return [array.tobytes() for array in found]

    assert run(_made["every"]) == run(every_draw)


_made: dict[str, jit.Kernel] = {}


def every_draw(real, whole, order, places, key):
    for i in range(places.size):
        k = places[i]
        real[4 * i] = rng.uniform(key, k)
        real[4 * i + 1] = rng.normal(key, k)
        real[4 * i + 2] = rng.bernoulli(key, k, 0.3)
        whole[4 * i] = rng.i64(rng.bits(key, k))
        whole[4 * i + 1] = rng.i64(rng.subkey(key, k))
        whole[4 * i + 2] = rng.randint(key, k, 9_000_000_000_000_000_000)
        whole[4 * i + 3] = rng.i64(rng.mix(key))
    rng.permutation(key, 5, order)
