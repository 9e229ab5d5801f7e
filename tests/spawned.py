"""What runs in another process: stages and orders of a user's module, and a loader that came by pickle."""

import pickle

import numpy as np

import jitloader as jl

HALF = 0.5


def halve(x):
    return x * HALF


def shifted(by):
    """A stage that no module holds: its closure travels."""
    table = np.arange(4.0)

    @jl.stage
    def shift(src, dst, key):
        for i in range(src.size):
            dst[i] = src[i] + by + table[1] + jl.uniform(key, i)

    return shift


def backwards(position, count, seed, epoch):
    return (count - 1 - position + epoch) % count


def tag(batch):
    return {"i": batch.i * 10}


def rest_of(text):
    """Give what is left of the epoch and the next one."""
    loader = pickle.loads(text)
    return [[(b.x.tolist(), b.i.tolist()) for b in loader] for _ in range(2)]
