"""What arguments and specs must be: the checks that stages share, and how an image lies in its sample."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..spec import Spec
from .stage import Misfit


def spatial(spec: Spec, name: str, axes: tuple[int, int] | None = None) -> tuple[int, int]:
    """Give the axes of height and width: those named, else the two that are not channels (1 to 4 of them)."""
    rank = len(spec.shape)
    if axes is not None:
        if len(axes) != 2 or any(not -rank <= a < rank for a in axes):
            raise Misfit(f"{name} has axes={axes}: two axes of the sample")
        return axes[0] % rank, axes[1] % rank
    if rank == 2:
        return 0, 1
    if rank == 3 and spec.shape[2] in (1, 2, 3, 4):
        return 0, 1
    if rank == 3 and spec.shape[0] in (1, 2, 3, 4):
        return 1, 2
    what = "images (H, W), (H, W, C) or (C, H, W) with 1 to 4 channels"
    raise Misfit(f"{name} takes {what}; else name axes=(height, width)")


def fit(values: Any, spec: Spec, name: str, what: str) -> np.ndarray:
    """Give numbers as float64, shaped to broadcast against a sample; a 1-D one may also be one for each channel."""
    array = np.asarray(values, np.float64)
    rank = len(spec.shape)
    if array.ndim <= rank:
        shape = (1,) * (rank - array.ndim) + array.shape
        if all(a in (1, n) for a, n in zip(shape, spec.shape, strict=True)):
            return array.reshape(shape)
    if array.ndim == 1 and rank == 3 and spec.shape[0] == array.size:
        return array.reshape(-1, 1, 1)
    raise Misfit(f"{name} has {what} of shape {array.shape}, which does not broadcast against it")


def planes(spec: Spec, name: str, axes: tuple[int, int] | None = None) -> tuple[int, int, int, int]:
    """Give an image as (planes, height, width, inner): how often (H, W) is repeated outside and inside of it."""
    settled(spec, name)
    y, x = spatial(spec, name, axes)
    if x != y + 1:
        raise Misfit(f"{name} takes images whose height and width are neighbouring axes; transpose first")
    shape = [int(n or 0) for n in spec.shape]
    return math.prod(shape[:y]), shape[y], shape[x], math.prod(shape[x + 1 :])


def settled(spec: Spec, name: str) -> None:
    """Refuse rows that differ in shape."""
    if spec.ragged:
        raise Misfit(f"{name} takes samples of one fixed shape; close ragged rows by pad_rows(length) before it")


def pictured(spec: Spec, name: str) -> None:
    """Refuse a dtype whose values float64 cannot tell apart, and bools."""
    if spec.dtype.kind not in "iuf" or (spec.dtype.kind in "iu" and spec.dtype.itemsize > 4):
        raise Misfit(f"{name} takes floats, or integers of at most 32 bits")


def place(spec: Spec, axis: int, name: str) -> int:
    """Give an axis counted from the front."""
    if not -len(spec.shape) <= axis < len(spec.shape):
        raise Misfit(f"{name} has axis={axis}, which is not an axis of the sample")
    return axis % len(spec.shape)


def held(value: Any, spec: Spec, name: str) -> float:
    """Give a value to fill up with as it came, a number that a dtype can hold."""
    if not isinstance(value, (bool, np.bool_)):
        number(value, name, "value", finite=False)
    holds(spec, value, name)
    return value


def holds(spec: Spec, value: float, name: str) -> None:
    """Refuse a value that a dtype of bools or integers cannot hold."""
    kind = spec.dtype.kind
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise Misfit(f"{name} puts in a number of {len(str(value))} digits, which {spec.dtype} cannot hold")
    if kind not in "biu":
        return
    low, high = (0, 1) if kind == "b" else (int(np.iinfo(spec.dtype).min), int(np.iinfo(spec.dtype).max))
    if not math.isfinite(value) or value != int(value) or not low <= int(value) <= high:
        raise Misfit(f"{name} puts in {value}, which {spec.dtype} cannot hold")


def filled(value: Any, spec: Spec, count: int = 1) -> np.ndarray:
    """Give `count` values in the dtype of a spec, from one or as many numbers that it can hold."""
    return np.array(np.broadcast_to(np.asarray(value).astype(spec.dtype), (count,)))


MOST = 1 << 40  # of a length or a number of times: sums and products of two fit 64 bits


def whole(value: Any, name: str, what: str, least: int = 0, most: int = MOST) -> int:
    """Give an integer of at least `least`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}: {what} must be a whole number of at least {least}, got {value!r}")
    if value > most:
        raise ValueError(f"{name}: {what} must be at most {most}, got {value}")
    return int(value)


def number(value: Any, name: str, what: str, finite: bool = True) -> float:
    """Give a real number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: {what} must be a number, got {value!r}")
    try:
        wide = float(value)
    except OverflowError:
        raise ValueError(f"{name}: {what} must be a number that float64 holds, got one of {len(str(value))} digits") from None
    if finite and not math.isfinite(wide):
        raise ValueError(f"{name}: {what} must be finite, got {value}")
    return wide


def chance(value: Any, name: str, what: str = "p") -> float:
    """Give a probability."""
    p = number(value, name, what)
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: {what} must be in [0, 1], got {value}")
    return p


def span(value: Any, name: str, what: str, most: float = math.inf, zero: bool = False) -> tuple[float, float]:
    """Give a pair low <= high, above 0 (or at least 0) and at most `most`."""
    try:
        low, high = (number(v, name, what) for v in value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {what} must be two numbers (low, high), got {value!r}") from None
    if not (low >= 0 if zero else low > 0) or not low <= high <= most:
        bounds = ("at least 0" if zero else "above 0") + ("" if most == math.inf else f" and at most {most:g}")
        raise ValueError(f"{name}: {what} must be (low, high), {bounds}, got {value!r}")
    return low, high


def sizes(size: Any, name: str) -> tuple[int, int]:
    """Give a height and a width, from two numbers or from one for both."""
    try:
        pair = (size, size) if isinstance(size, (int, np.integer)) else tuple(size)
        height, width = (whole(n, name, "size", 1) for n in pair)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: size must be one or two whole numbers of at least 1, got {size!r}") from None
    return height, width


def numbers(values: Any, name: str, what: str) -> np.ndarray:
    """Give finite numbers as float64."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: {what} must be numbers in rows of one length") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: {what} must be numbers, got {array.dtype}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: {what} must be finite, got {array[~np.isfinite(array)][0]}")
    return array
