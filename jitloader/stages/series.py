"""Stages for time series and spectrograms: move them along time, and mask spans of it."""

from __future__ import annotations

import math

from .. import jit, rng
from ..spec import Spec
from .checks import chance, filled, holds, number, place, settled, whole
from .stage import Bound, Misfit, Stage


def _random_shift(key, size, limit, offset, sign, axis, most):  # type: ignore[no-untyped-def]
    offset[axis] = rng.randint(key, 0, 2 * most + 1) - most


def random_shift(max_shift: int, axis: int = 0, fill: float = 0) -> Stage:
    """Map a sample to itself moved by -max_shift .. max_shift steps along an axis: (T, ...) to the same.

    Every shift is equally likely; what moves in from outside is `fill`. Raises PipelineError where the sample has no
    such axis, or its dtype cannot hold `fill`.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> sorted({tuple(st.random_shift(1)(np.array([1, 2, 3]), key=k).tolist()) for k in range(20)})
    [(0, 1, 2), (1, 2, 3), (2, 3, 0)]
    """
    most = whole(max_shift, "random_shift", "max_shift")
    value = number(fill, "random_shift", "fill", finite=False)

    def bind(spec: Spec) -> Bound:
        settled(spec, "random_shift")
        holds(spec, value, "random_shift")
        at = place(spec, axis, "random_shift")
        return Bound("index", spec, _random_shift, (at, most), random=True, fill=fill, touches=(at,))

    return Stage(f"random_shift({most})", bind)


def _time_mask(src, dst, key, fill, outer, n, inner, most, count, p):  # type: ignore[no-untyped-def]
    s, d = jit.flat(src), jit.flat(dst)
    for i in range(d.size):
        d[i] = s[i]
    for m in range(count):
        if rng.uniform(key, 3 * m) < p:
            length = rng.randint(key, 3 * m + 1, most + 1)
            start = rng.randint(key, 3 * m + 2, n - length + 1)
            for o in range(outer):
                begin = (o * n + start) * inner
                for i in range(begin, begin + length * inner):
                    d[i] = fill[0]


def time_mask(max_length: int, count: int = 1, axis: int = 0, fill: float = 0, p: float = 1.0) -> Stage:
    """Map a spectrogram or series to itself with `count` spans of time set to `fill`: (T, ...) to the same.

    Each span is 0 .. max_length steps long and lies within the sample, all lengths, then all places, equally likely;
    each is drawn with probability p. With `axis` of the frequencies it is the paper's frequency mask. Raises
    PipelineError where the axis is shorter than `max_length`. Source: Park et al., "SpecAugment", Interspeech 2019.

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> sorted({tuple(st.time_mask(1)(np.ones(2), key=k).tolist()) for k in range(20)})
    [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    """
    most, many = whole(max_length, "time_mask", "max_length"), whole(count, "time_mask", "count", 1, 1 << 16)
    likely, value = chance(p, "time_mask"), number(fill, "time_mask", "fill", finite=False)

    def bind(spec: Spec) -> Bound:
        settled(spec, "time_mask")
        holds(spec, value, "time_mask")
        at = place(spec, axis, "time_mask")
        shape = [int(n or 0) for n in spec.shape]
        if shape[at] < most:
            raise Misfit(f"time_mask({most}) takes an axis of at least {most} steps")
        outer, inner = math.prod(shape[:at]), math.prod(shape[at + 1 :])
        params = (filled(fill, spec), outer, shape[at], inner, most, many, likely)
        return Bound("sample", spec, _time_mask, params, random=True)

    return Stage(f"time_mask({most})", bind)
