"""Value stages: one element in, one out; computed in float64 or int64 and stored once in the dtype of the arrow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import jit
from ..spec import Spec
from . import levels
from .checks import fit, number, numbers
from .stage import Bound, Misfit, Stage, floating, numeric, writable


def _normalize(x, mean, inverse):  # type: ignore[no-untyped-def]
    return (x - mean) * inverse


def normalize(mean: Any, std: Any) -> Stage:
    """Map x to (x - mean) * (1 / std): (...) of any number to (...) float32 (float64 stays float64).

    `mean` and `std` are numbers or arrays that broadcast against the sample, as in NumPy; a 1-D one of length C also
    fits images with channels first. Computed in float64 and rounded to float32 once; float64 is within two ulps of the
    division. A std of 0 (a constant column) divides by 1. Raises PipelineError where they do not broadcast, ValueError
    for a std that is negative or so small that 1 / std is infinite, and for what is not finite.

    >>> import jitloader as jl
    >>> jl.normalize([1.0, 2.0], [1.0, 4.0])([3, 4])
    array([2. , 0.5], dtype=float32)
    """
    centre, spread = numbers(mean, "normalize", "mean"), numbers(std, "normalize", "std")
    if (spread < 0).any():
        raise ValueError(f"normalize: std must not be negative, got {spread[spread < 0][0]}")
    with np.errstate(over="ignore"):
        inverse = 1.0 / np.where(spread == 0, 1.0, spread)
    if np.isinf(inverse).any():
        raise ValueError(f"normalize: 1 / std must be finite, got a std of {spread[np.isinf(inverse)][0]}")

    def bind(spec: Spec) -> Bound:
        numeric(spec, "normalize")
        made = Spec(floating(spec.dtype), spec.shape)
        elements = fit(centre, spec, "normalize", "mean"), fit(inverse, spec, "normalize", "std")
        zero, slope = np.broadcast_arrays(*elements)
        maps = levels.single(spec.dtype, lambda x: _normalize(x, zero, slope), slope, zero)
        if maps is not None:
            return Bound("value", made, levels.affine, elements=maps)
        return Bound("value", made, _normalize, elements=elements)

    return Stage("normalize", bind)


def _scale(x, factor):  # type: ignore[no-untyped-def]
    return x / factor


def scale(low: float = 0.0, high: float = 1.0) -> Stage:
    """Map the range of an unsigned integer dtype onto [low, high]: uint8 (...) to float32 (...), 255 to high exactly.

    Raises ValueError where `low` is not below `high`, and PipelineError for a field of another dtype.

    >>> import numpy as np, jitloader as jl
    >>> jl.scale()(np.array([0, 51, 255], "uint8"))
    array([0. , 0.2, 1. ], dtype=float32)
    """
    number(low, "scale", "low"), number(high, "scale", "high")
    if not low < high:
        raise ValueError(f"scale: low must be below high, got {low} and {high}")

    def bind(spec: Spec) -> Bound:
        if spec.dtype.kind != "u":
            raise Misfit("scale takes an unsigned integer dtype, as uint8")
        top = float(np.iinfo(spec.dtype).max)
        made = Spec(np.dtype(np.float32), spec.shape)
        a, b = float(low), float(high)  # of a NumPy integer a difference could wrap
        kernel, params = (_scale, (top,)) if (a, b) == (0, 1) else (_scale_to, (top, a, b))
        slope, zero = np.float64((b - a) / top), np.float64(-a * top / (b - a))
        maps = levels.single(spec.dtype, lambda x: kernel(x, *params), slope, zero)
        if maps is not None:
            return Bound("value", made, levels.affine, tuple(float(a) for a in maps))
        return Bound("value", made, kernel, params)

    return Stage("scale" if (low, high) == (0, 1) else f"scale({low}, {high})", bind)


def _scale_to(x, factor, low, high):  # type: ignore[no-untyped-def]
    part = x / factor
    return low * (1.0 - part) + high * part


def _same(x):  # type: ignore[no-untyped-def]
    return x


def _truncate(x, low, high):  # type: ignore[no-untyped-def]
    return int(x)


def _inside(x, low, high):  # type: ignore[no-untyped-def]
    return low <= x <= high


def _between(x, low, high):  # type: ignore[no-untyped-def]
    return low < x < high


def _is_true(x):  # type: ignore[no-untyped-def]
    return x != 0


def cast(dtype: Any) -> Stage:
    """Map x to the same number in another dtype: (...) to (...) of `dtype`; a float to an integer drops the fraction.

    A number that does not fit (300 or NaN into uint8) is a PipelineError naming the row, never another number.

    >>> import jitloader as jl
    >>> jl.cast("int32")([1.7, -1.7])
    array([ 1, -1], dtype=int32)
    """
    target = np.dtype(dtype)
    name = f"cast({target})"
    writable(target, "cast")

    def bind(spec: Spec) -> Bound:
        numeric(spec, name)
        made = Spec(target, spec.shape)
        if target.kind == "b":
            return Bound("value", made, _is_true)
        if target.kind == "f" or np.can_cast(spec.dtype, target):
            return Bound("value", made, _same)
        info = np.iinfo(target)
        if spec.dtype.kind in "iu":
            return Bound("value", made, _truncate, (int(info.min), min(int(info.max), 2**63 - 1)), valid=_inside)
        # Strictly between these, what is left without its fraction fits; 64-bit bounds have no float64 next door.
        low = float(info.min) - 1 if info.bits < 64 else np.nextafter(float(info.min), -np.inf)
        return Bound("value", made, _truncate, (float(min(low, -1.0)), float(int(info.max) + 1)), valid=_between)

    return Stage(name, bind)


def _clip(x, low, high):  # type: ignore[no-untyped-def]
    return low if x < low else high if x > high else x


def clip(low: float, high: float) -> Stage:
    """Map x to the nearest number in [low, high]: (...) to (...) of the same dtype; NaN stays NaN.

    >>> import jitloader as jl
    >>> jl.clip(0, 1)([-0.5, 0.5, 2.0])
    array([0. , 0.5, 1. ])
    """
    number(low, "clip", "low", finite=False), number(high, "clip", "high", finite=False)
    if not low <= high:
        raise ValueError(f"clip: low must not be above high, got {low} and {high}")

    whole = float(low).is_integer() and float(high).is_integer()

    def bind(spec: Spec) -> Bound:
        numeric(spec, "clip")
        if spec.dtype.kind == "f":
            return Bound("value", spec, _clip, (float(low), float(high)))
        info = np.iinfo(spec.dtype) if spec.dtype.kind in "iu" else np.iinfo(np.uint8)
        if not whole or low < info.min or high > info.max:
            raise Misfit(
                f"clip({low}, {high}) takes floats; whole bounds within {info.min} .. {info.max} fit this dtype"
            )
        return Bound("value", spec, _clip, (int(low), int(high)))

    return Stage(f"clip({low}, {high})", bind)


def _lookup(x, table):  # type: ignore[no-untyped-def]
    return table[min(max(int(x), 0), table.size - 1)]


def _in_table(x, table):  # type: ignore[no-untyped-def]
    return 0 <= x < table.size


def lookup(table: Any) -> Stage:
    """Map x to table[x]: integers (...) to (...) of the table's dtype.

    `table` is a 1-D array of numbers. An index outside it is a PipelineError naming the row; floats (and so NaN) are
    refused when linked.

    >>> import numpy as np, jitloader as jl
    >>> jl.lookup(np.array([10.0, 20.0, 30.0], "float32"))([2, 0])
    array([30., 10.], dtype=float32)
    """
    values = np.ascontiguousarray(table)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"lookup: table must be a 1-D array of numbers with an entry, got {values.dtype} {values.shape}"
        )
    if values.dtype == np.float16 or not values.dtype.isnative:
        values = values.astype(np.float32 if values.dtype == np.float16 else values.dtype.newbyteorder("="))

    def bind(spec: Spec) -> Bound:
        if spec.dtype.kind not in "iu":
            raise Misfit(f"lookup takes integers, 0 to {values.size - 1}")
        return Bound("value", Spec(values.dtype, spec.shape), _lookup, (values,), valid=_in_table)

    return Stage(f"lookup({values.size})", bind)


HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of sqrt(1 / 2)
MANTISSA = 0xFFFFFFFFFFFFF
LN2 = math.log(2.0)
LN2_HIGH = float.fromhex("0x1.62e42fefa38p-1")  # 42 bits of ln 2: a whole number of them is exact
LN2_LOW = float.fromhex("0x1.ef35793c7673p-45")  # the rest


def _log1p_single(x):  # type: ignore[no-untyped-def]
    """Give log(1 + x) to 2 ** -33 of itself, enough to round to float32: k ln 2 + 2 atanh(f / (2 + f)).

    1 + x = 2 ** k * (1 + f) with 1 + f within a factor sqrt(2) of 1; f is x itself where k is 0. Neither branches nor
    libm, so that loops of it are vectorised.
    """
    y = x if x > -1.0 else 0.0
    shifted = jit.bits_of(1.0 + y) - HALF_ROOT
    k = shifted >> 52
    f = jit.float64_of((shifted & MANTISSA) + HALF_ROOT) - 1.0
    f = y if k == 0 else f
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    value = s * ((2.0 + z * (2 / 3)) + w * ((2 / 5 + z * (2 / 7)) + w * (2 / 9 + z * (2 / 11)))) - -k * LN2
    value = value if x < math.inf else x
    low = -math.inf if x == -1.0 else math.nan
    return low if x <= -1.0 else value


def _log1p_double(x):  # type: ignore[no-untyped-def]
    """Give log(1 + x) to two ulps of float64: as above, with what 1 + x was rounded by and ten terms, which leave 2 ** -58."""
    y = x if x > -1.0 else 0.0
    u = 1.0 + y
    shifted = jit.bits_of(u) - HALF_ROOT
    k = shifted >> 52
    f = jit.float64_of((shifted & MANTISSA) + HALF_ROOT) - 1.0
    lost = y - (u - 1.0) if k < 1 else 1.0 - (u - y)
    lost = lost / u
    f = y if k == 0 else f
    lost = 0.0 if k == 0 else lost
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (2 / 5 + w * (2 / 9 + w * (2 / 13 + w * (2 / 17 + w * (2 / 21)))))
    odd = z * (2 / 3 + w * (2 / 7 + w * (2 / 11 + w * (2 / 15 + w * (2 / 19)))))
    half = 0.5 * f * f
    n = np.float64(k)
    value = n * LN2_HIGH + (f - (half - (s * (half + (even + odd)) + (n * LN2_LOW + lost))))
    value = x if abs(x) < 1e-17 else value
    value = value if x < math.inf else x
    value = value if x > -1.0 else -math.inf
    return value if x >= -1.0 else math.nan


def log1p() -> Stage:
    """Map x to log(1 + x): (...) of any number to (...) float32 (float64 stays float64).

    As numpy.log1p: -1 gives -inf, numbers below it and NaN give NaN. Within an ulp in float32, two in float64.

    >>> from jitloader import stages as st
    >>> st.log1p()([0, 1])
    array([0.       , 0.6931472], dtype=float32)
    """

    def bind(spec: Spec) -> Bound:
        numeric(spec, "log1p")
        made = floating(spec.dtype)
        return Bound("value", Spec(made, spec.shape), _log1p_double if made == np.float64 else _log1p_single)

    return Stage("log1p", bind)


def _fill_nan(x, value):  # type: ignore[no-untyped-def]
    return value if x != x else x


def fill_nan(value: Any) -> Stage:
    """Map NaN to `value` and all else to itself: (...) to the same; integers and bools pass as they are.

    `value` is a finite number, or an array that broadcasts against the sample (a mean for each column, say).

    >>> import numpy as np
    >>> from jitloader import stages as st
    >>> st.fill_nan([0.0, 5.0])(np.array([[np.nan, 1.0], [2.0, np.nan]])).tolist()
    [[0.0, 1.0], [2.0, 5.0]]
    """
    values = numbers(value, "fill_nan", "value")

    def bind(spec: Spec) -> Bound:
        numeric(spec, "fill_nan")
        if spec.dtype.kind != "f":
            return Bound("value", spec, _same)
        return Bound("value", spec, _fill_nan, elements=(fit(values, spec, "fill_nan", "value"),))

    return Stage("fill_nan", bind)
