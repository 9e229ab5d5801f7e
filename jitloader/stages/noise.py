"""Noise: a normal number added to each element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import rng
from ..spec import Spec
from .checks import fit, numbers, pictured
from .stage import Bound, Stage

LAYERS = 256
EDGE = 3.6541528853610088  # where the tail begins, and the area of each layer, for 256 of them
AREA = 0.00492867323399
UNIT = 1.0 / 4503599627370496.0  # 2 ** -52


def _edges() -> np.ndarray:
    """Give the right edges of the layers under exp(-x * x / 2), widest first; layer 0 is as wide as its tail needs."""
    edges = [AREA * math.exp(0.5 * EDGE * EDGE), EDGE]
    while len(edges) < LAYERS:
        x = edges[-1]
        edges.append(math.sqrt(-2.0 * math.log(AREA / x + math.exp(-0.5 * x * x))))
    return np.array([*edges, 0.0])


EDGES = _edges()
RATIOS = EDGES[1:] / EDGES[:-1]


def normal(key, k, edges, ratios):  # type: ignore[no-untyped-def]
    """Give the k-th standard normal number of a key: in 98 of 100 cases one mix, one multiplication, two look-ups.

    The ziggurat of Marsaglia and Tsang (2000) in Doornik's form (2005): three times as fast as rng.normal.
    """
    z = rng.bits(key, k)
    layer = z & rng.u64(255)
    u = float(z >> rng.u64(11)) * UNIT - 1.0
    if abs(u) < ratios[layer]:
        return u * edges[layer]
    return _rare(z, u, edges[layer], edges[layer + rng.u64(1)])


def _next(z):  # type: ignore[no-untyped-def]
    return rng.mix(rng.u64(z + rng.u64(rng.GOLDEN)))


def _unit(z):  # type: ignore[no-untyped-def]
    return float(z >> rng.u64(11)) * rng.TO_UNIT


def _rare(z, u, edge, inner):  # type: ignore[no-untyped-def]
    """Give the number for a point outside the core of its layer; no arrays, as each would be counted at each call."""
    z = _next(z)
    if edge > EDGE:
        return _tail(z, u)
    x = u * edge
    low, high = math.exp(0.5 * (x * x - edge * edge)), math.exp(0.5 * (x * x - inner * inner))
    if low + _unit(z) * (high - low) < 1.0:
        return x
    return rng.normal(z, 0)  # above the curve: any other normal number may stand for it


def _tail(z, u):  # type: ignore[no-untyped-def]
    far, near = 0.0, 0.0
    while 2.0 * near <= far * far:
        far = -math.log(_unit(z) + rng.TO_UNIT) / EDGE
        z = _next(z)
        near = -math.log(_unit(z) + rng.TO_UNIT)
        z = _next(z)
    return EDGE + far if u > 0.0 else -EDGE - far


def _noise(x, key, place, std, mean, edges, ratios):  # type: ignore[no-untyped-def]
    return x + (mean + std * normal(key, place, edges, ratios))


def _noise_whole(x, key, place, std, mean, edges, ratios, low, high):  # type: ignore[no-untyped-def]
    v = x + (mean + std * normal(key, place, edges, ratios))
    return int(math.floor(min(max(v, low), high) + 0.5))


def _noisy(name: str, std: Any, mean: Any) -> Stage:
    spread, centre = numbers(std, name, "std"), numbers(mean, name, "mean")
    if (spread < 0).any():
        raise ValueError(f"{name}: std must not be negative, got {spread[spread < 0][0]}")
    title = f"{name}({std})" if spread.ndim == 0 else name

    def bind(spec: Spec) -> Bound:
        pictured(spec, title)
        elements = fit(spread, spec, title, "std"), fit(centre, spec, title, "mean")
        if spec.dtype.kind == "f":
            return Bound("value", spec, _noise, (EDGES, RATIOS), elements, random=True)
        info = np.iinfo(spec.dtype)
        params = (EDGES, RATIOS, float(info.min), float(info.max))
        return Bound("value", spec, _noise_whole, params, elements, random=True)

    return Stage(title, bind)


def gaussian_noise(std: Any, mean: Any = 0.0) -> Stage:
    """Map x to x + mean + std * z, z standard normal and fresh for each element: (...) to the same.

    `std` and `mean` are numbers or arrays that broadcast against the sample, in the units of the field. Floats are not
    clipped (put `clip` behind); integers are rounded and kept within their dtype. Raises ValueError for a negative std,
    PipelineError where they do not broadcast, or for bools and 64-bit integers.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> bool(abs(st.gaussian_noise(2.0)(np.zeros(5000), key=1).std() - 2) < 0.1)
    True
    """
    return _noisy("gaussian_noise", std, mean)


def jitter(std: Any) -> Stage:
    """Map a time series to itself with normal noise on each element: (T, C) or (T,) to the same.

    `std` is a number, or one for each channel. The same draws as `gaussian_noise(std)`. Source: Um et al., "Data
    augmentation of wearable sensor data for Parkinson's disease monitoring", ICMI 2017.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.jitter([0.0, 1.0])(np.zeros((3, 2)))[:, 0].tolist()
    [0.0, 0.0, 0.0]
    """
    return _noisy("jitter", std, 0.0)
