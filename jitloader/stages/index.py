"""Index stages: which source element lands where, as an offset and a direction for each axis, drawn for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import jit, rng
from ..spec import Spec
from .checks import chance, holds, place, planes, settled, sizes, spatial, whole
from .stage import Bound, Misfit, Stage


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
    around = whole(padding, "random_crop", "padding")
    return _placed("random_crop", sizes(size, "random_crop"), around, fill, axes, _random_crop, True)


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
    return _placed("center_crop", sizes(size, "center_crop"), 0, None, axes, _center_crop, False)


def _placed(
    name: str, sizes: tuple[int, int], padding: int, fill: float | None, axes: Any, kernel: Any, random: bool
) -> Stage:
    title = f"{name}({sizes[0]})" if sizes[0] == sizes[1] else f"{name}({sizes[0]}, {sizes[1]})"

    def bind(spec: Spec) -> Bound:
        places = spatial(spec, title, axes)
        for axis, n in zip(places, sizes, strict=True):
            have = spec.shape[axis]
            if have is None:
                settled(spec, title)
            if have is not None and have + 2 * padding < n:
                raise Misfit(f"{title} takes images of at least {sizes[0] - 2 * padding} x {sizes[1] - 2 * padding}")
        if padding and fill is not None:
            holds(spec, fill, title)
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

    Raises PipelineError where no axis is named and the sample is not an image.

    >>> import numpy as np, jitloader as jl
    >>> jl.random_flip(p=1.0)(np.arange(4).reshape(2, 2)).tolist()
    [[1, 0], [3, 2]]
    """
    return _flip("random_flip", p, axis, 1)


def random_vertical_flip(p: float = 0.5) -> Stage:
    """Map an image to its upside-down image with probability p: (H, W, C), (C, H, W) or (H, W) to the same.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.random_vertical_flip(p=1.0)(np.arange(4).reshape(2, 2)).tolist()
    [[2, 3], [0, 1]]
    """
    return _flip("random_vertical_flip", p, None, 0)


def _flip(name: str, p: float, axis: int | None, which: int) -> Stage:
    likely = chance(p, name)

    def at(spec: Spec) -> int:
        if axis is not None:
            return place(spec, axis, name)
        try:
            return spatial(spec, name)[which]
        except Misfit:
            what = "images of 1 to 4 channels; for other samples give random_flip(axis=...)"
            raise Misfit(f"{name} takes {what}") from None

    def bind(spec: Spec) -> Bound:
        where = at(spec)
        return Bound("index", spec, _random_flip, (where, likely), random=True, touches=(where,))

    return Stage(name, bind)


def _pad(key, size, limit, offset, sign, before):  # type: ignore[no-untyped-def]
    for k in range(before.size):
        offset[k] = -before[k]


def pad(padding: Any, value: float = 0) -> Stage:
    """Map a sample to itself with `value` around it: (..., n, ...) to (..., before + n + after, ...).

    `padding` is a number for all four sides of an image (for both ends of a sample of one axis), or a pair
    (before, after) for each axis, as in numpy.pad. Raises ValueError for negative padding, PipelineError where the
    dtype cannot hold `value`.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.pad(((1, 0), (0, 2)), value=9)(np.zeros((1, 1), int)).tolist()
    [[9, 9, 9], [0, 9, 9]]
    """
    title = f"pad({padding})"
    if isinstance(padding, (int, np.integer)):
        around, pairs = whole(padding, "pad", "padding"), None
    else:
        try:
            around, pairs = 0, tuple((whole(a, "pad", "padding"), whole(b, "pad", "padding")) for a, b in padding)
        except TypeError:
            what = "a number, or (before, after) for each axis"
            raise ValueError(f"pad: padding must be {what}, got {padding!r}") from None

    def bind(spec: Spec) -> Bound:
        settled(spec, title)
        holds(spec, value, title)
        rank = len(spec.shape)
        if pairs is None:
            touched = (0,) if rank == 1 else spatial(spec, title)
            sides = tuple((around, around) if k in touched else (0, 0) for k in range(rank))
        else:
            sides = pairs
        if len(sides) != rank:
            raise Misfit(f"{title} takes samples of {len(sides)} axes")
        made = tuple(int(n or 0) + a + b for n, (a, b) in zip(spec.shape, sides, strict=True))
        before = np.array([a for a, _ in sides], np.int64)
        touches = tuple(k for k, pair in enumerate(sides) if pair != (0, 0))
        return Bound("index", Spec(spec.dtype, made), _pad, (before,), fill=value if touches else None, touches=touches)

    return Stage(title, bind)


def _rotate90(key, size, limit, offset, sign, y, x, k):  # type: ignore[no-untyped-def]
    if k == 1 or k == 2:
        offset[y] = size[y] - 1
        sign[y] = -1
    if k == 2 or k == 3:
        offset[x] = size[x] - 1
        sign[x] = -1


def _turned(src, dst, key, planes, n, inner):  # type: ignore[no-untyped-def]
    s, d = jit.flat(src), jit.flat(dst)
    down, right = n * inner, inner
    k = rng.randint(key, 0, 4)
    start, i_step, j_step = 0, down, right
    if k == 1:
        start, i_step, j_step = (n - 1) * right, -right, down
    elif k == 2:
        start, i_step, j_step = (n - 1) * (down + right), -down, -right
    elif k == 3:
        start, i_step, j_step = (n - 1) * down, right, -down
    at = 0
    for p in range(planes):
        for i in range(n):
            for j in range(n):
                place = p * n * n * inner + start + i * i_step + j * j_step
                for c in range(inner):
                    d[at] = s[place + c]
                    at += 1


def rotate90(k: int | None = None) -> Stage:
    """Map an image to itself turned counterclockwise by k quarter turns, as numpy.rot90: (H, W, C) to (W, H, C).

    Without `k` it is drawn for each row, 0 to 3 equally likely; the image must then be square. Takes (H, W),
    (H, W, C) and (C, H, W).

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.rotate90(1)(np.array([[1, 2], [3, 4]])).tolist()
    [[2, 4], [1, 3]]
    """
    if k is not None and (isinstance(k, bool) or not isinstance(k, (int, np.integer))):
        raise TypeError(f"rotate90: k must be a whole number or None, got {k!r}")
    title = "rotate90" if k is None else f"rotate90({k})"

    def drawn(spec: Spec) -> Bound:
        outside, height, width, inner = planes(spec, title)
        if height != width:
            raise Misfit("rotate90 by a random number of turns takes square images")
        return Bound("sample", spec, _turned, (outside, height, inner), random=True)

    def bind(spec: Spec) -> Bound:
        if k is None:
            return drawn(spec)
        settled(spec, title)
        y, x = spatial(spec, title)
        order = list(range(len(spec.shape)))
        if k % 2:
            order[y], order[x] = x, y
        made = Spec(spec.dtype, tuple(spec.shape[a] for a in order))
        touches = ((), (y,), (y, x), (x,))[k % 4]
        return Bound("index", made, _rotate90, (y, x, k % 4), order=tuple(order), touches=touches)

    return Stage(title, bind)


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
