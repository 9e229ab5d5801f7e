"""Resizing: an image, or a random window of it, to another size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import jit, rng
from ..spec import Spec
from .checks import pictured, planes, sizes, span, spatial, whole
from .stage import Bound, Kernel, Misfit, Stage

MODES = ("bilinear", "nearest")


def _whole_image(key, height, width, low, high, flat, tall):  # type: ignore[no-untyped-def]
    return 0, 0, height, width


def _window(key, height, width, low, high, flat, tall):  # type: ignore[no-untyped-def]
    """Draw a window by area and ratio of width to height: ten tries, then the largest allowed one at the centre."""
    for k in range(10):
        area = height * width * (low + (high - low) * rng.uniform(key, 4 * k))
        ratio = math.exp(flat + (tall - flat) * rng.uniform(key, 4 * k + 1))
        w = int(math.floor(math.sqrt(area * ratio) + 0.5))
        h = int(math.floor(math.sqrt(area / ratio) + 0.5))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(key, 4 * k + 2, height - h + 1), rng.randint(key, 4 * k + 3, width - w + 1), h, w
    h, w = height, width
    if width < height * math.exp(flat):
        h = max(int(math.floor(width / math.exp(flat) + 0.5)), 1)
    elif width > height * math.exp(tall):
        w = max(int(math.floor(height * math.exp(tall) + 0.5)), 1)
    return (height - h) // 2, (width - w) // 2, h, w


def _taps(i, scale, support, n):  # type: ignore[no-untyped-def]
    """Give the first and the last source pixel (left out) under the triangle around the centre of target pixel i."""
    centre = (i + 0.5) * scale
    return max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), n)


def _weight(i, k, scale, support):  # type: ignore[no-untyped-def]
    return max(0.0, 1.0 - abs((k + 0.5 - (i + 0.5) * scale) / support))


def _total(i, first, last, scale, support):  # type: ignore[no-untyped-def]
    total = 0.0
    for k in range(first, last):
        total += _weight(i, k, scale, support)
    return total


def _as_is(v):  # type: ignore[no-untyped-def]
    return v


def _nearest_whole(v):  # type: ignore[no-untyped-def]
    return int(math.floor(v + 0.5))


def _bilinear(box: Kernel, stored: Kernel) -> Kernel:
    """Give the kernel: rows are summed down into one row, which is then summed across; weights are triangles."""

    def bilinear(  # type: ignore[no-untyped-def]
        src, dst, key, row, edges, weights, outer, in_h, in_w, inner, out_h, out_w, room, wide, low, high, flat, tall
    ):
        s, d = jit.flat(src), jit.flat(dst)
        top, left, h, w = box(key, in_h, in_w, low, high, flat, tall)
        x_scale, y_scale = w / out_w, h / out_h
        x_support, y_support = max(1.0, x_scale * wide), max(1.0, y_scale * wide)
        for x in range(out_w):
            first, last = _taps(x, x_scale, x_support, w)
            edges[2 * x], edges[2 * x + 1] = first, last
            total = _total(x, first, last, x_scale, x_support)
            for k in range(first, last):
                weights[x * room + k - first] = _weight(x, k, x_scale, x_support) / total
        for p in range(outer):
            for y in range(out_h):
                first, last = _taps(y, y_scale, y_support, h)
                total = _total(y, first, last, y_scale, y_support)
                sums = row[: w * inner]
                for i in range(sums.size):
                    sums[i] = 0.0
                for k in range(first, last):
                    weight = _weight(y, k, y_scale, y_support) / total
                    begin = ((p * in_h + top + k) * in_w + left) * inner
                    line = s[begin : begin + w * inner]
                    for i in range(sums.size):
                        sums[i] += weight * np.float64(line[i])
                begin = (p * out_h + y) * out_w * inner
                for x in range(out_w):
                    for c in range(inner):
                        v = 0.0
                        for k in range(edges[2 * x + 1] - edges[2 * x]):
                            v += weights[x * room + k] * sums[(edges[2 * x] + k) * inner + c]
                        d[begin + x * inner + c] = stored(v)

    return bilinear


def _nearest(box: Kernel) -> Kernel:
    """Give the kernel: each target pixel is the source pixel that its centre falls into."""

    def nearest(src, dst, key, edges, outer, in_h, in_w, inner, out_h, out_w, low, high, flat, tall):  # type: ignore[no-untyped-def]
        s, d = jit.flat(src), jit.flat(dst)
        top, left, h, w = box(key, in_h, in_w, low, high, flat, tall)
        for x in range(out_w):
            edges[x] = min((2 * x + 1) * w // (2 * out_w), w - 1)
        at = 0
        for p in range(outer):
            for y in range(out_h):
                begin = (p * in_h + top + min((2 * y + 1) * h // (2 * out_h), h - 1)) * in_w + left
                for x in range(out_w):
                    place = (begin + edges[x]) * inner
                    for c in range(inner):
                        d[at] = s[place + c]
                        at += 1

    return nearest


def _resized(
    spec: Spec, name: str, target: Any, mode: str, wide: bool, axes: Any, box: Kernel, window: tuple[float, ...]
) -> Bound:
    outer, in_h, in_w, inner = planes(spec, name, axes)
    if not in_h * in_w * outer * inner:
        raise Misfit(f"{name} takes images of at least one pixel")
    out_h, out_w = target(in_h, in_w)
    y, x = spatial(spec, name, axes)
    shape = list(spec.shape)
    shape[y], shape[x] = out_h, out_w
    made = Spec(spec.dtype, tuple(shape))
    random = box is _window
    if mode == "nearest":
        params = (outer, in_h, in_w, inner, out_h, out_w, *window)
        return Bound("sample", made, _nearest(box), params, random=random, scratch=(("int64", out_w),))
    if spec.dtype.kind == "b":
        raise Misfit(f'{name} mixes pixels, which bools cannot; give mode="nearest"')
    pictured(spec, name)
    room = 2 * math.ceil(max(1.0, in_w / out_w)) + 2  # pixels under the widest triangle
    params = (outer, in_h, in_w, inner, out_h, out_w, room, float(wide), *window)
    kernel = _bilinear(box, _as_is if spec.dtype.kind == "f" else _nearest_whole)
    scratch = (("float64", in_w * inner), ("int64", 2 * out_w), ("float64", out_w * room))
    return Bound("sample", made, kernel, params, random=random, scratch=scratch)


def _check(name: str, mode: str, antialias: bool) -> None:
    if mode not in MODES:
        raise ValueError(f"{name}: mode must be bilinear or nearest, got {mode!r}")
    if not isinstance(antialias, (bool, np.bool_)):
        raise TypeError(f"{name}: antialias must be True or False, got {antialias!r}")


def resize(size: Any, mode: str = "bilinear", antialias: bool = True, axes: tuple[int, int] | None = None) -> Stage:
    """Map an image to another size: (H, W, C) to (h, w, C), (C, H, W) to (C, h, w), (H, W) to (h, w); dtype kept.

    `size` is (h, w), or the length of the shorter side, the other in proportion (rounded down). "bilinear" weighs
    pixels by a triangle around each target pixel's centre; with `antialias` it widens where the image shrinks, as in
    Pillow and torchvision, so that every source pixel counts. Computed in float64; integers are rounded to the nearest.
    "nearest" takes the pixel at the centre (torch's nearest-exact) and any dtype. Raises PipelineError where the sample
    is not an image, or has 64-bit integers or bools and is to be mixed.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.resize((1, 2))(np.array([[0.0, 2.0, 4.0, 6.0]])).round(3).tolist()
    [[1.429, 4.571]]
    >>> st.resize((2, 2), mode="nearest")(np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])).tolist()
    [[1, 3], [7, 9]]
    """
    _check("resize", mode, antialias)
    shorter = whole(size, "resize", "size", 1) if isinstance(size, (int, np.integer)) else None
    both = None if shorter is not None else sizes(size, "resize")
    title = f"resize({shorter})" if both is None else f"resize{both}"

    def target(height: int, width: int) -> tuple[int, int]:
        if shorter is None:
            assert both is not None
            return both
        if height <= width:
            return shorter, shorter * width // height
        return shorter * height // width, shorter

    def bind(spec: Spec) -> Bound:
        return _resized(spec, title, target, mode, antialias, axes, _whole_image, (0.0, 0.0, 0.0, 0.0))

    return Stage(title, bind)


def random_resized_crop(
    size: Any,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    mode: str = "bilinear",
    antialias: bool = True,
    axes: tuple[int, int] | None = None,
) -> Stage:
    """Map an image to a random window of it, resized: (H, W, C) to (h, w, C), (C, H, W) to (C, h, w); dtype kept.

    The window has `scale` of the image's area, uniform, and `ratio` of width to height, uniform in its logarithm, at a
    uniform place; where ten draws do not fit, it is the largest at the centre with an allowed ratio. `size` is one
    number for both sides, or (h, w). Resized as by `resize`. Source: Szegedy et al., "Going deeper with convolutions",
    CVPR 2015; torchvision's rule.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.random_resized_crop(4)(np.zeros((9, 7, 3), "uint8")).shape
    (4, 4, 3)
    """
    _check("random_resized_crop", mode, antialias)
    both = sizes(size, "random_resized_crop")
    low, high = span(scale, "random_resized_crop", "scale", 1.0)
    flat, tall = (math.log(r) for r in span(ratio, "random_resized_crop", "ratio"))
    title = f"random_resized_crop({both[0]})" if both[0] == both[1] else f"random_resized_crop{both}"

    def bind(spec: Spec) -> Bound:
        window = (low, high, flat, tall)
        return _resized(spec, title, lambda height, width: both, mode, antialias, axes, _window, window)

    return Stage(title, bind)
