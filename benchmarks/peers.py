"""The loader side of the peer comparison: `make(w, d)` gives `epoch(seed)`, an iterator of one shuffled epoch's batches.

Workloads: W1 rows of 64 float32 standardised; W2 32x32x3 images cropped, flipped, normalised, channels first; W3 the
same on 224x224x3 without the crop; W4 token windows; W5 rows of 8 float32; W6 ragged rows padded to the longest.
"""

import numpy as np

import jitloader as jl

MEAN3 = np.array([125.3, 123.0, 113.9])
STD3 = np.array([63.0, 62.1, 66.7])
WINDOW = 1024


def make(w, d):
    """Give a function of the seed that yields the batches of one epoch of workload `w` over the arrays in `d`."""
    if w == "W1":
        data = jl.Dataset(x=d.X, y=d.y).map("x", jl.normalize(d.mean, d.std))
    elif w == "W2":
        data = jl.Dataset(x=d.X, y=d.y).map(
            "x", jl.random_crop(32, padding=4), jl.random_flip(), jl.normalize(MEAN3, STD3), jl.channels_first()
        )
    elif w == "W3":
        data = jl.Dataset(x=d.X, y=d.y).map("x", jl.random_flip(), jl.normalize(MEAN3, STD3), jl.channels_first())
    elif w == "W5":
        data = jl.Dataset(x=d.X)
    elif w == "W4":
        data = jl.Dataset(jl.windows(d.tokens, x=slice(0, WINDOW), y=slice(1, WINDOW + 1))).map(
            ("x", "y"), jl.cast("int64")
        )
    elif w == "W6":
        data = jl.Dataset(x=jl.ragged(d.values, d.offsets)).map("x", jl.cast("int64"), jl.pad_to_longest(mask="mask"))
    else:
        raise KeyError(w)
    # W4 draws its offsets with replacement, as the other loaders there do.
    order = jl.sampled(d.n) if w == "W4" else jl.shuffled
    loader = jl.Loader(data, d.batch, order=order)

    def epoch(seed):
        loader.epoch = seed
        return iter(loader)

    return epoch
