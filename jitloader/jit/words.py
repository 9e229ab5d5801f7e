"""What kernels say that Python cannot: plain twins of prefetch, memory moves, addresses and bit casts."""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import rng


def prefetch(array: np.ndarray, index: int) -> None:
    """Ask the processor to bring `array[index]` into its cache; in plain Python, nothing."""


def find_rows(find: Callable[..., Any], words: np.ndarray, first: int, step: int, rows: np.ndarray) -> int:
    """Let an order write the rows at positions first, first + step, ...; gives 0. In a kernel `find` is the address of the
    order's own kernel and `words` are its arguments, of which these are the first; gives 1 where it raised."""
    find(first, step, rows)
    return 0


def run_kernel(entry: Callable[..., Any], words: np.ndarray) -> int:
    """Run another kernel over its words and give its result; in a kernel `entry` is its address, and 2 tells that it raised."""
    return int(entry(words))


def atomic_get(array: np.ndarray, index: int) -> int:
    """Read an int64 that other threads write: what they wrote before it is seen after it."""
    return int(array[index])


def atomic_set(array: np.ndarray, index: int, value: int) -> None:
    """Write an int64 that other threads read: who sees it sees all that was written before it."""
    array[index] = value


def atomic_add(array: np.ndarray, index: int, value: int) -> int:
    """Add to an int64 that other threads change, at once; gives what it was."""
    before = int(array[index])
    array[index] = before + value
    return before


def atomic_swap(array: np.ndarray, index: int, before: int, after: int) -> int:
    """Make an int64 that other threads change another, at once, where it is `before` still; gives whether it was."""
    if array[index] != before:
        return 0
    array[index] = after
    return 1


def nanoseconds() -> int:
    """Give the time of a clock that never goes back, which the whole machine shares."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def copy_items(target: np.ndarray, at: int, source: np.ndarray, start: int, count: int) -> None:
    """Copy `count` items of one dtype between flat arrays that do not overlap; a constant count becomes plain moves."""
    target[at : at + count] = source[start : start + count]


ROOM = 256  # numbers in a `room`


def room() -> np.ndarray:
    """Give an int64 array of ROOM numbers, of any value, that lives on the stack until the function returns."""
    return np.empty(ROOM, np.int64)


def flat(array: np.ndarray) -> np.ndarray:
    """Give a C-contiguous array as a 1-D one over the same memory: `reshape` in a kernel needs Numba in every process."""
    return array.reshape(-1)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Give a C-contiguous array as the bytes it lies in."""
    return array.reshape(-1).view(np.uint8)


def shaped(array: np.ndarray, at: int, shape: tuple[int, ...]) -> np.ndarray:
    """Give the C-contiguous array of some shape that starts at item `at` of a flat one, over the same memory."""
    return array[at : at + math.prod(shape)].reshape(shape)


def array_at(address: int, size: int, like: np.ndarray) -> np.ndarray:
    """Give the 1-D array of `size` items of like's dtype that starts at a memory address (nothing keeps it alive)."""
    if size == 0:
        return np.empty(0, like.dtype)
    memory = (ctypes.c_char * (int(size) * like.itemsize)).from_address(int(address))
    return np.frombuffer(memory, like.dtype)  # type: ignore[call-overload, no-any-return, unused-ignore]


def float64_of(bits: int) -> float:
    """Give the float64 whose bits are those of a 64-bit integer."""
    return float(struct.unpack("<d", struct.pack("<Q", int(bits) & rng.MASK))[0])


def bits_of(x: float) -> int:
    """Give the bits of a float64 as a signed 64-bit integer."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def float32_of(bits: int) -> float:
    """Give the float32 whose bits are those of a 32-bit integer."""
    return float(struct.unpack("<f", struct.pack("<I", int(bits) & rng.LOW))[0])
