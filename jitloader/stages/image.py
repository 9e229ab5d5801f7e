"""Stages for images: brightness, contrast, and erasing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import jit, rng
from ..spec import Spec
from .checks import chance, filled, holds, number, pictured, planes, span
from .sample import total
from .stage import Bound, Misfit, Stage

LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue, as in torchvision


def _factors(value: Any, name: str) -> tuple[float, float]:
    """Give the range of a factor: around 1, or as it is named."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        amount = number(value, name, "amount")
        if amount < 0:
            raise ValueError(f"{name}: amount must not be negative, got {value}")
        return max(0.0, 1.0 - amount), 1.0 + amount
    return span(value, name, "amount", zero=True)


def _top(spec: Spec) -> float:
    """Give the brightest value of a dtype."""
    return 1.0 if spec.dtype.kind == "f" else float(np.iinfo(spec.dtype).max)


def _brightness(x, key, place, low, width, top):  # type: ignore[no-untyped-def]
    v = x * (low + width * rng.uniform(key, 0))
    return 0.0 if v < 0.0 else top if v > top else v


def brightness(amount: Any) -> Stage:
    """Map an image to f * x, one factor f for each row: (...) to the same.

    f is uniform in [max(0, 1 - amount), 1 + amount], or in amount = (low, high). The result is kept within 0 and the
    brightest value, which is 1 for floats and the dtype's largest for integers, whose fractions are dropped: all as
    torchvision's ColorJitter. Raises PipelineError for bools and 64-bit integers.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.brightness((2, 2))(np.array([0, 100, 200], "uint8"))
    array([  0, 200, 255], dtype=uint8)
    """
    low, high = _factors(amount, "brightness")

    def bind(spec: Spec) -> Bound:
        pictured(spec, "brightness")
        return Bound("value", spec, _brightness, (low, high - low, _top(spec)), random=True)

    return Stage("brightness", bind)


def _contrast(src, dst, key, weights, pixels, inner, low, width, top):  # type: ignore[no-untyped-def]
    s, d = jit.flat(src), jit.flat(dst)
    factor = low + width * rng.uniform(key, 0)
    grey = 0.0
    for c in range(weights.size):
        start = (c // inner) * pixels * inner + c % inner
        grey += weights[c] * total(s, start, inner, pixels, 0.0)
    shift = (1.0 - factor) * (grey / pixels)
    for i in range(d.size):
        v = factor * np.float64(s[i]) + shift
        d[i] = 0.0 if v < 0.0 else top if v > top else v


def contrast(amount: Any, axes: tuple[int, int] | None = None) -> Stage:
    """Map an image to f * x + (1 - f) * m, m its mean grey and f one factor for each row: (H, W, C) to the same.

    f is uniform in [max(0, 1 - amount), 1 + amount], or in amount = (low, high). Grey is 0.2989 red + 0.587 green +
    0.114 blue of three channels, else their mean. Clipped, and fractions of integers dropped, as by `brightness`; all
    as torchvision's ColorJitter, but that the grey of integers is not rounded. Takes (H, W), (H, W, C), (C, H, W).

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.contrast((0.5, 0.5))(np.array([[0.0, 1.0]])).tolist()
    [[0.25, 0.75]]
    """
    low, high = _factors(amount, "contrast")

    def bind(spec: Spec) -> Bound:
        pictured(spec, "contrast")
        outside, height, wide, inner = planes(spec, "contrast", axes)
        channels = outside * inner
        weights = np.array(LUMA) if channels == 3 else np.full(channels, 1.0 / max(channels, 1))
        params = (weights, height * wide, inner, low, high - low, _top(spec))
        return Bound("sample", spec, _contrast, params, random=True)

    return Stage("contrast", bind)


def _random_erasing(  # type: ignore[no-untyped-def]
    src, dst, key, fill, outer, height, width, inner, p, low, wide, log_low, log_wide
):
    s, d = jit.flat(src), jit.flat(dst)
    for i in range(d.size):
        d[i] = s[i]
    found = not rng.uniform(key, 0) < p
    for k in range(10):
        if found:
            break
        area = height * width * (low + wide * rng.uniform(key, 4 * k + 1))
        aspect = math.exp(log_low + log_wide * rng.uniform(key, 4 * k + 2))
        h = int(math.floor(math.sqrt(area * aspect) + 0.5))
        w = int(math.floor(math.sqrt(area / aspect) + 0.5))
        if 0 < h < height and 0 < w < width:
            found = True
            top = rng.randint(key, 4 * k + 3, height - h + 1)
            left = rng.randint(key, 4 * k + 4, width - w + 1)
            for plane in range(outer):
                for y in range(top, top + h):
                    begin = ((plane * height + y) * width + left) * inner
                    for x in range(w * inner):
                        d[begin + x] = fill[plane * inner + x % inner]


def random_erasing(
    p: float = 0.5,
    scale: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    value: Any = 0,
    axes: tuple[int, int] | None = None,
) -> Stage:
    """Map an image, with probability p, to itself with a rectangle set to `value`: (H, W, C) to the same.

    The rectangle has `scale` of the image's area, uniform, and `ratio` of height to width, uniform in its logarithm;
    ten draws are tried for one that is smaller than the image. `value` is a number, or one for each channel. Takes
    (H, W), (H, W, C) and (C, H, W). Source: Zhong et al., "Random erasing data augmentation", AAAI 2020; the rule is
    torchvision's.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> int((st.random_erasing(p=1, scale=(0.25, 0.25), ratio=(1, 1))(np.ones((8, 8))) == 0).sum())
    16
    """
    likely = chance(p, "random_erasing")
    low, high = span(scale, "random_erasing", "scale", 1.0)
    flat, tall = (math.log(r) for r in span(ratio, "random_erasing", "ratio"))
    fills = np.asarray(value)
    if fills.ndim > 1 or fills.dtype.kind not in "biuf":
        raise ValueError(f"random_erasing: value must be a number, or one for each channel, got {value!r}")

    def bind(spec: Spec) -> Bound:
        outside, height, width, inner = planes(spec, "random_erasing", axes)
        if fills.ndim and fills.size != outside * inner:
            raise Misfit(f"random_erasing has {fills.size} values, one for each channel")
        for one in fills.reshape(-1):
            holds(spec, one, "random_erasing")
        fill = filled(fills, spec, outside * inner)
        drawn = (likely, low, high - low, flat, tall - flat)
        return Bound("sample", spec, _random_erasing, (fill, outside, height, width, inner, *drawn), random=True)

    return Stage("random_erasing", bind)
