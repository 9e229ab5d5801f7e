"""jitloader behind the names that the public-report cases are written in; plain calls of the public API."""

import os
import subprocess
import sys
import tempfile
import textwrap

import numpy as np

import jitloader as jl

SELF = os.path.dirname(os.path.abspath(__file__))


class _Dicts:
    """A loader whose batches come as dicts."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return _Iterator(iter(self.loader), self.loader.data.fields)

    def __len__(self):
        return len(self.loader)


class _Iterator:
    def __init__(self, batches, fields):
        self.batches, self.fields = batches, fields

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.batches)
        names = (
            self.fields if len(self.fields) == len(batch) else batch._fields
        )  # a name that is no identifier is `_k` there
        return dict(zip(names, batch, strict=True))

    def __deepcopy__(self, memo):
        raise TypeError("a live iterator cannot be copied: save the loader's state_dict() instead")


def make(
    fields, batch, *, shuffle=False, seed=0, drop_last=False, rank=0, world=1, even=False, subset=None, norm=None, out=None,
    transform=None, window=None, episodes=None, threads=None, weights=None, prefetch=0,
):  # fmt: skip
    if window is not None:
        size, stride, shift = window
        name, array = next(iter(fields.items()))
        cuts = {name: slice(0, size)}
        if shift:
            cuts["y"] = slice(shift, shift + size)
        fields = jl.windows(array, stride=stride, groups=episodes, **cuts)
    data = jl.Dataset(fields)
    if subset is not None:
        data = data.select(subset)
    for name, how in (norm or {}).items():
        mean, std = data.statistics(name)[:2] if isinstance(how, str) else how
        data = data.map(name, jl.normalize(mean, std))
    for name, dtype in (out or {}).items():
        data = data.map(name, jl.cast(dtype))
    if transform is not None:
        data = data.apply_rows(transform)
    order = jl.weighted(weights) if weights is not None else None
    tail = "drop" if even else "keep"
    return _Dicts(
        jl.Loader(
            data, batch, shuffle=shuffle, order=order, seed=seed, drop_last=drop_last, rank=rank, world_size=world, tail=tail,
            threads=threads, prefetch=prefetch,
        )
    )  # fmt: skip


def save(L):
    return L.loader.state_dict()


def restore(L, state):
    L.loader.load_state_dict(state)


def close(L):
    L.loader.close()


def copies(L):
    return [{k: v.copy() for k, v in b.items()} for b in L]


def cat(bs, k):
    return np.concatenate([b[k] for b in bs])


def raises(exc, f, *words):
    try:
        f()
    except exc as e:
        text = str(e)
        assert all(str(w) in text for w in words), (words, text)
        return e
    raise AssertionError("no error raised")


def sub(src, timeout=60, env=None, pre=()):
    r = subprocess.run(
        [*pre, sys.executable, "-c", "from adapter import *\nimport numpy as np, os, sys\n" + textwrap.dedent(src)],
        capture_output=True, text=True, timeout=timeout, cwd=SELF, env={**os.environ, **(env or {})},
    )  # fmt: skip
    return r.returncode, r.stdout.strip(), r.stderr.strip()


def tmp(name="a.npy"):
    return os.path.join(tempfile.mkdtemp(), name)


def npy(a, name="a.npy", **k):
    p = tmp(name)
    np.save(p, a, **k)
    return p


def anon():
    with open("/proc/self/status") as f:
        return int(next(line for line in f if line.startswith("RssAnon")).split()[1]) / 1024
