"""Index stages: which source element lands where, as an offset and a direction for each axis, drawn for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import rng
from ..spec import Spec
from .stage import Bound, Misfit, Stage
from .value import spatial


def _sizes(size: Any, name: str) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, (int, np.integer)) and not isinstance(size, bool) else tuple(size)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in pair):
        raise ValueError(f"{name}: size must be one or two whole numbers of at least 1, got {size!r}")
    return int(pair[0]), int(pair[1])


def _resized(spec: Spec, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Spec:
    shape = list(spec.shape)
    for axis, n in zip(axes, sizes, strict=True):
        shape[axis] = n
    return Spec(spec.dtype, tuple(shape))


def _random_crop(key, size, limit, offset, sign, y, x, padding):  # type: ignore[no-untyped-def]
    offset[y] = rng.randint(key, 0, size[y] + 2 * padding - limit[y] + 1) - padding
    offset[x] = rng.randint(key, 1, size[x] + 2 * padding - limit[x] + 1) - padding


def random_crop(size: Any, padding: int = 0, fill: float = 0, axes: tuple[int, int] | None = None) -> Stage:
    """Map an image to a window of it at a random place: (H, W, C) or (C, H, W) to the same with H, W = size.

    The image is first padded by `padding` on all four sides with `fill`. Every place is equally likely. Raises
    PipelineError where the padded image is smaller than `size`.

    >>> import numpy as np, jitloader as jl
    >>> jl.random_crop(4, padding=1)(np.ones((4, 4, 3), "uint8")).shape
    (4, 4, 3)
    """
    height, width = _sizes(size, "random_crop")
    if isinstance(padding, bool) or not isinstance(padding, (int, np.integer)) or padding < 0:
        raise ValueError(f"random_crop: padding must be a whole number of at least 0, got {padding!r}")
    return _placed("random_crop", (height, width), int(padding), fill, axes, _random_crop, True)


def _center_crop(key, size, limit, offset, sign, y, x, padding):  # type: ignore[no-untyped-def]
    offset[y] = (size[y] - limit[y]) // 2
    offset[x] = (size[x] - limit[x]) // 2


def center_crop(size: Any, axes: tuple[int, int] | None = None) -> Stage:
    """Map an image to the window at its centre: (H, W, C) or (C, H, W) to the same with H, W = size.

    Where an odd number of pixels is cut, one more goes at the bottom and at the right. Raises PipelineError where the
    image is smaller than `size`.

    >>> import numpy as np, jitloader as jl
    >>> jl.center_crop(2)(np.arange(16).reshape(4, 4)).tolist()
    [[5, 6], [9, 10]]
    """
    return _placed("center_crop", _sizes(size, "center_crop"), 0, None, axes, _center_crop, False)


def _placed(
    name: str, sizes: tuple[int, int], padding: int, fill: float | None, axes: Any, kernel: Any, random: bool
) -> Stage:
    title = f"{name}({sizes[0]})" if sizes[0] == sizes[1] else f"{name}({sizes[0]}, {sizes[1]})"

    def bind(spec: Spec) -> Bound:
        places = spatial(spec, title, axes)
        for axis, n in zip(places, sizes, strict=True):
            have = spec.shape[axis]
            if have is None or have + 2 * padding < n:
                raise Misfit(f"{title} takes images of at least {sizes[0] - 2 * padding} x {sizes[1] - 2 * padding}")
        made = _resized(spec, places, sizes)
        outside = fill if padding else None
        return Bound("index", made, kernel, (*places, padding), random=random, fill=outside, touches=places)

    return Stage(title, bind)


def _random_flip(key, size, limit, offset, sign, axis, p):  # type: ignore[no-untyped-def]
    if rng.uniform(key, 0) < p:
        offset[axis] = size[axis] - 1
        sign[axis] = -1


def random_flip(p: float = 0.5, axis: int | None = None) -> Stage:
    """Map a sample to its mirror image with probability p: (...) to the same, along `axis` (an image's width).

    >>> import numpy as np, jitloader as jl
    >>> jl.random_flip(p=1.0)(np.arange(4).reshape(2, 2)).tolist()
    [[1, 0], [3, 2]]
    """
    if not 0 <= p <= 1:
        raise ValueError(f"random_flip: p must be in [0, 1], got {p}")

    def place(spec: Spec) -> int:
        if axis is None:
            return spatial(spec, "random_flip")[1]
        if not -len(spec.shape) <= axis < len(spec.shape):
            raise Misfit(f"random_flip has axis={axis}: an axis of the sample")
        return axis % len(spec.shape)

    def bind(spec: Spec) -> Bound:
        at = place(spec)
        return Bound("index", spec, _random_flip, (at, float(p)), random=True, touches=(at,))

    return Stage("random_flip", bind)


def _still(key, size, limit, offset, sign):  # type: ignore[no-untyped-def]
    return


def transpose(axes: tuple[int, ...], name: str = "") -> Stage:
    """Map a sample to itself with its axes in another order, as numpy.transpose does: out.shape[k] = in.shape[axes[k]].

    >>> import numpy as np, jitloader as jl
    >>> jl.transpose((1, 0))(np.zeros((2, 3))).shape
    (3, 2)
    """
    order = tuple(axes)
    title = name or f"transpose{order}"
    if sorted(a % max(len(order), 1) for a in order) != list(range(len(order))):
        raise ValueError(f"transpose: axes must name each axis once, got {axes}")
    order = tuple(a % len(order) for a in order)

    def bind(spec: Spec) -> Bound:
        if len(spec.shape) != len(order):
            raise Misfit(f"{title} takes samples of {len(order)} axes")
        return Bound("index", Spec(spec.dtype, tuple(spec.shape[a] for a in order)), _still, order=order)

    return Stage(title, bind)


def channels_first() -> Stage:
    """Map an image (H, W, C) to (C, H, W).

    >>> import numpy as np, jitloader as jl
    >>> jl.channels_first()(np.zeros((4, 5, 3))).shape
    (3, 4, 5)
    """
    return transpose((2, 0, 1), "channels_first")


def channels_last() -> Stage:
    """Map an image (C, H, W) to (H, W, C).

    >>> import numpy as np, jitloader as jl
    >>> jl.channels_last()(np.zeros((3, 4, 5))).shape
    (4, 5, 3)
    """
    return transpose((1, 2, 0), "channels_last")


def _reshaped(src, dst, key):  # type: ignore[no-untyped-def]
    return


def flatten() -> Stage:
    """Map a sample to one axis, in C order: (a, b, ...) to (a * b * ...,).

    >>> import numpy as np, jitloader as jl
    >>> jl.flatten()(np.zeros((4, 5, 3))).shape
    (60,)
    """

    def bind(spec: Spec) -> Bound:
        if spec.ragged:
            raise Misfit("flatten takes samples of one fixed shape; pad first")
        return Bound("shape", Spec(spec.dtype, (spec.size,)), _reshaped)

    return Stage("flatten", bind)
