"""Affine maps of 8-bit numbers in float32, where that gives bit for bit what float64 rounded once gives.

An 8-bit number has 256 values, so both are computed for all of them when a stage is linked. Slope and offset are cut in
two: a coarse part so short that its product and sum are exact in float32, and a fine one, so small that what float32
loses of it seldom reaches the last sum's rounding (1 of 2,000 maps drawn at random stays in float64). A register holds
twice as many float32, and no division is left: `scale` of images takes half the time, `normalize` by one mean three
quarters. Where the map differs from element to element (a mean for each channel, channels last) five numbers to load for
each cost more than that gains: 1.7 times the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

MOST = 1024  # maps tried: a few ms

Maps = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def affine(x, centre, slope, base, fine, rest):  # type: ignore[no-untyped-def]
    y = np.float32(np.int32(x)) - np.float32(centre)
    return y * np.float32(slope) + np.float32(base) + (y * np.float32(fine) + np.float32(rest))


def single(dtype: np.dtype, exact: Callable[[Any], Any], slope: np.ndarray, zero: np.ndarray) -> Maps | None:
    """Give the numbers with which `affine` does slope * (x - zero) of an 8-bit dtype as `exact` does it in float64.

    `slope`, `zero` : (...), the maps over a sample's axes. `exact` maps x, of shape (256, ...) with all values that there
    are, to float64. None where a single value would differ in float32, for other dtypes, and where it would not pay.
    """
    if dtype.kind not in "iu" or dtype.itemsize > 1 or slope.size > MOST or slope.shape[-1:] not in ((), (1,)):
        return None
    info = np.iinfo(dtype)
    x = np.arange(info.min, info.max + 1, dtype=np.float64).reshape(-1, *(1,) * slope.ndim)
    with np.errstate(all="ignore"):
        centre = np.clip(np.rint(zero), info.min, info.max)
        offset = (centre - zero) * slope
        grid = np.ldexp(1.0, np.frexp(np.abs(slope) * 255 + np.abs(offset))[1] - 24)
        coarse, base = np.rint(slope / grid) * grid, np.rint(offset / grid) * grid
        maps = centre, coarse, base, slope - coarse, offset - base
        made, wanted = affine(x, *maps), np.asarray(exact(x), np.float32)
    return maps if np.array_equal(made.view(np.uint32), wanted.view(np.uint32)) else None
