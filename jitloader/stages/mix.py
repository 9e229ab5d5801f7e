"""Stages over a row and a partner: another row of the data, drawn by the row's key, that is mixed into it."""

from __future__ import annotations

import math

import numpy as np

from .. import jit, rng
from ..spec import Spec
from .checks import number, planes, settled
from .stage import Bound, Misfit, Stage, numeric

TRIES = 100  # of which each is taken with a chance of 1/2 or more


def _beta(key, alpha):  # type: ignore[no-untyped-def]
    """Draw from Beta(alpha, alpha): Joehnk 1964 up to 1, two gamma variates (Marsaglia and Tsang 2000) above."""
    if alpha <= 1.0:
        for k in range(1, 2 * TRIES, 2):
            # As logarithms: for a small alpha both powers would be 0.
            a = math.log(1.0 - rng.uniform(key, k)) / alpha
            b = math.log(1.0 - rng.uniform(key, k + 1)) / alpha
            top = max(a, b)
            total = top + math.log(math.exp(a - top) + math.exp(b - top))
            if total <= 0.0:
                return math.exp(a - total)
        return 0.5
    d = alpha - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    first = 0.0
    for side in range(2):
        gamma = d
        for k in range(1 + side * TRIES, 1 + (side + 1) * TRIES):
            x = rng.normal(key, k)
            v = 1.0 + c * x
            v = v * v * v
            if v > 0.0 and math.log(1.0 - rng.uniform(key, k)) < 0.5 * x * x + d - d * v + d * math.log(v):
                gamma = d * v
                break
        if side == 0:
            first = gamma
    return first / (first + gamma)


def _mixed(src, other, dst, key, alpha):  # type: ignore[no-untyped-def]
    part = _beta(key, alpha)
    s, o, d = jit.flat(src), jit.flat(other), jit.flat(dst)
    for i in range(d.size):
        d[i] = part * np.float64(s[i]) + (1.0 - part) * np.float64(o[i])


def mixup(alpha: float) -> Stage:
    """Mix a row and a partner: fields (...) of floats to the same, x to lam * x + (1 - lam) * x of the partner.

    `data.map(("image", "label"), jl.mixup(0.2))`: all fields named share partner and lam. The partner is drawn by the
    row's key, uniformly from all rows of the data set (with replacement, whatever the order of the loader), and comes
    through all stages before this one with the draws of its own row; lam is a draw of Beta(alpha, alpha) for each row.
    So a mixed row depends on (seed, epoch, row, stage) and the data alone: not on batch size, ranks or where a run was
    resumed; `data[i]` gives it too. It costs reading and augmenting two rows for one. Any stage may follow. Labels are
    weights of classes: `one_hot` them first, and float32 (classes,) comes out, summing to 1. Computed in float64,
    rounded once. Raises PipelineError for a field that is not of floats. Source: Zhang et al., "mixup: Beyond
    Empirical Risk Minimization", ICLR 2018.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(x=np.array([[0.0, 8.0], [8.0, 0.0]]), y=np.arange(2)).map("y", jl.one_hot(2))
    >>> mixed = data.map(("x", "y"), jl.mixup(1.0))[:]
    >>> np.allclose(mixed.x[:, ::-1], 8 * mixed.y), np.allclose(mixed.y.sum(1), 1)
    (True, True)
    """
    spread = number(alpha, "mixup", "alpha")
    if spread <= 0:
        raise ValueError(f"mixup: alpha must be above 0, got {alpha}")
    name = f"mixup({spread:g})"

    def join(specs: tuple[Spec, ...]) -> tuple[Bound, ...]:
        for spec in specs:
            _floats(spec, name)
        return tuple(Bound("pair", spec, _mixed, (spread,), random=True) for spec in specs)

    return Stage(name, lambda spec: join((spec,))[0], join=join)


def _floats(spec: Spec, name: str) -> None:
    settled(spec, name)
    if spec.dtype.kind != "f":
        raise Misfit(f"{name} mixes floats: one_hot labels, and scale or cast numbers before it")


def _box(key, alpha, height, width):  # type: ignore[no-untyped-def]
    """Draw the box of the partner: top, bottom, left, right; its area is 1 - lam of the image, cut at the edges."""
    ratio = math.sqrt(1.0 - _beta(key, alpha))
    h, w = int(height * ratio), int(width * ratio)
    y, x = rng.randint(key, 2 * TRIES + 1, height), rng.randint(key, 2 * TRIES + 2, width)
    return max(y - h // 2, 0), min(y - h // 2 + h, height), max(x - w // 2, 0), min(x - w // 2 + w, width)


def _pasted(src, other, dst, key, alpha, outer, height, width, inner):  # type: ignore[no-untyped-def]
    top, bottom, left, right = _box(key, alpha, height, width)
    s, o, d = jit.flat(src), jit.flat(other), jit.flat(dst)
    for i in range(d.size):
        d[i] = s[i]
    for p in range(outer):
        for y in range(top, bottom):
            begin = (p * height + y) * width
            for i in range((begin + left) * inner, (begin + right) * inner):
                d[i] = o[i]


def _weighed(src, other, dst, key, alpha, height, width):  # type: ignore[no-untyped-def]
    top, bottom, left, right = _box(key, alpha, height, width)
    part = 1.0 - max(bottom - top, 0) * max(right - left, 0) / (height * width)
    s, o, d = jit.flat(src), jit.flat(other), jit.flat(dst)
    for i in range(d.size):
        d[i] = part * np.float64(s[i]) + (1.0 - part) * np.float64(o[i])


def cutmix(alpha: float = 1.0, axes: tuple[int, int] | None = None) -> Stage:
    """Put a box of a partner's image into a row's: images of any dtype to the same, labels mixed by the area kept.

    `data.map(("image", "label"), jl.cutmix(1.0))`: fields of two or more axes are images (H, W), (H, W, C) or
    (C, H, W), or have height and width on `axes`, and all get the same box; fields of none or one are weights of
    classes, float32 from `one_hot`, and become part * x + (1 - part) * x of the partner with the part of the image
    that was kept. Partner and draws as in `mixup`. The box has the image's proportions, 1 - Beta(alpha, alpha) of its
    area, a uniform centre, and is cut at the edges. Raises PipelineError where no field is an image, images differ in
    size, or a label is not of floats. Source: Yun et al., "CutMix", ICCV 2019; torchvision's rule.

    >>> import numpy as np, jitloader as jl
    >>> data = jl.Dataset(x=np.repeat([[[0.0]], [[1.0]]], 4, 1).repeat(4, 2), y=np.arange(2)).map("y", jl.one_hot(2))
    >>> mixed = data.map(("x", "y"), jl.cutmix())[:]
    >>> np.allclose(mixed.x.mean((1, 2)), mixed.y[:, 1])
    True
    """
    spread = number(alpha, "cutmix", "alpha")
    if spread <= 0:
        raise ValueError(f"cutmix: alpha must be above 0, got {alpha}")
    name = f"cutmix({spread:g})"

    def join(specs: tuple[Spec, ...]) -> tuple[Bound, ...]:
        sizes = {}
        for spec in specs:
            numeric(spec, name)
            if len(spec.shape) > 1:
                sizes[spec] = planes(spec, name, axes)
            else:
                _floats(spec, name)
        found = {laid[1:3] for laid in sizes.values()}
        if len(found) != 1:
            what = "images of one height and width" if found else "an image among its fields"
            raise Misfit(f'{name} takes {what}, as map(("image", "label"), {name})')
        (height, width), made = found.pop(), []
        if not height * width:
            raise Misfit(f"{name} takes images of at least one pixel")
        for spec in specs:
            if spec in sizes:
                made.append(Bound("pair", spec, _pasted, (spread, *sizes[spec]), random=True))
            else:
                made.append(Bound("pair", spec, _weighed, (spread, height, width), random=True))
        return tuple(made)

    return Stage(name, lambda spec: join((spec,))[0], join=join)
