"""Which bits a kernel moves for a dtype, and how bits it cannot compute with become numbers.

Kernels compute with bools, integers of 8 to 64 bits, float32 and float64 in native byte order, at any address. All else
travels as unsigned integers of the same size, or as bytes (items of odd size, or at odd distances), bit for bit; float16,
bfloat16 and numbers in the other byte order are decoded in the loop that first computes with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import jit, rng
from .spec import Spec

NATIVE = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
)
CARRIERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def carry(array: np.ndarray) -> tuple[np.dtype, np.ndarray]:
    """Give the dtype that carries an array's bits through a kernel, and the array seen as that dtype."""
    dtype = array.dtype
    if dtype.name in NATIVE and dtype.isnative:
        carrier, view = dtype, array
    elif dtype.itemsize in CARRIERS:
        carrier = np.dtype(CARRIERS[dtype.itemsize])
        view = np.lib.stride_tricks.as_strided(_retype(array, carrier), array.shape, array.strides, writeable=False)
    else:
        carrier, view = np.dtype(np.uint8), _as_bytes(array)
    if any(s % carrier.itemsize for s in view.strides):
        carrier, view = np.dtype(np.uint8), _as_bytes(array)
    return carrier, view


def _retype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Give an array of one dtype at the address of another's first item."""
    return np.ndarray((), dtype, buffer=_memory(array, dtype.itemsize))


def _as_bytes(array: np.ndarray) -> np.ndarray:
    size = array.dtype.itemsize
    first = np.ndarray((), np.uint8, buffer=_memory(array, max(size, 1)))
    return np.lib.stride_tricks.as_strided(first, (*array.shape, size), (*array.strides, 1), writeable=False)


class _Memory:
    """Lends memory at an address through the array interface, keeping its owner alive: what lies below, as a view's `base`."""

    def __init__(self, owner: np.ndarray, address: int, nbytes: int) -> None:
        self.base = owner
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, True)}


def _memory(array: np.ndarray, nbytes: int) -> np.ndarray:
    """Give the bytes at an array's first item, as a read-only array that keeps the array alive."""
    if array.size == 0:
        return np.zeros(nbytes, np.uint8)
    return lend(array, array.ctypes.data, nbytes)


def lend(owner: np.ndarray, address: int, nbytes: int) -> np.ndarray:
    """Give memory at an address as a read-only array of bytes that keeps its owner alive."""
    return np.asarray(_Memory(owner, address, nbytes))


def carrier_of(dtype: np.dtype) -> np.dtype:
    """Give the dtype that carries another's bits."""
    return carry(np.empty(1, dtype))[0]


def half_of(bits):  # type: ignore[no-untyped-def]
    """Give the float64 whose value is that of a float16 with these bits (IEEE 754 binary16)."""
    exponent, fraction = (bits >> 10) & 31, float(bits & 1023)
    if exponent == 31:
        value = np.inf if fraction == 0.0 else np.nan
    elif exponent == 0:
        value = fraction * 5.9604644775390625e-08  # 2 ** -24
    else:
        value = (fraction + 1024.0) * math.ldexp(1.0, exponent - 25)
    return -value if bits & 32768 else value


def brain_of(bits):  # type: ignore[no-untyped-def]
    """Give the float whose value is that of a bfloat16 with these bits: the upper half of a float32."""
    return np.float64(jit.float32_of(bits << 16))


def swapped(bits, size):  # type: ignore[no-untyped-def]
    """Give an unsigned number of `size` bytes with its bytes in the other order."""
    rest, result = rng.u64(bits), rng.u64(0)
    for _ in range(size):
        result = rng.u64(result << rng.u64(8)) | (rest & rng.u64(255))
        rest = rest >> rng.u64(8)
    return result


def swapped_signed(bits, size):  # type: ignore[no-untyped-def]
    """Give a signed number of `size` bytes with its bytes in the other order."""
    shift = rng.u64(64 - 8 * size)
    return rng.i64(rng.u64(swapped(bits, size) << shift)) >> rng.i64(shift)


def swapped_unsigned(bits, size):  # type: ignore[no-untyped-def]
    """Give an unsigned number below 2**32 with its bytes in the other order, as a signed one."""
    return rng.i64(swapped(bits, size))


def swapped_single(bits, size):  # type: ignore[no-untyped-def]
    """Give the float32 with these bits in the other byte order."""
    return np.float64(jit.float32_of(rng.i64(swapped(bits, size))))


def swapped_double(bits, size):  # type: ignore[no-untyped-def]
    """Give the float64 with these bits in the other byte order."""
    return jit.float64_of(rng.i64(swapped(bits, size)))


def swapped_half(bits, size):  # type: ignore[no-untyped-def]
    """Give the float16 with these bits in the other byte order, as float64."""
    return half_of(rng.i64(swapped(bits, size)))


def decoded(spec: Spec) -> Spec:
    """Give the spec that computing stages see: float16 and bfloat16 as float32, the other byte order as the native one."""
    if spec.dtype.name in ("float16", "bfloat16"):
        return Spec(np.dtype(np.float32), spec.shape)
    if spec.dtype.kind in "iuf" and not spec.dtype.isnative:
        return Spec(spec.dtype.newbyteorder("="), spec.shape)
    return spec


def decoder(dtype: np.dtype) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Give the function, and its parameters, from the carried bits of a dtype to a number."""
    size = dtype.itemsize
    if dtype.name == "bfloat16":
        return brain_of, ()
    if dtype.name == "float16":
        return (half_of, ()) if dtype.isnative else (swapped_half, (2,))
    if dtype.kind == "f":
        return (swapped_single if size == 4 else swapped_double), (size,)
    if dtype.kind == "i":
        return swapped_signed, (size,)
    return (swapped if size == 8 else swapped_unsigned), (size,)
