"""What an order is, and the checks and small kernels that all families of orders share."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import jit, rng

SALT = 0x6F72646572  # keeps the keys of orders apart from those of stages


class Positions(NamedTuple):
    """An order made ready for one epoch.

    `kernel(first, step, rows, *params)` fills rows[j] for position first + j * step; step is at least 1.
    `length` is the number of positions. Kernel and the types of `params` are the same for every epoch and seed.
    """

    kernel: Callable[..., Any]
    length: int
    params: tuple[Any, ...]


class Order(NamedTuple):
    """Which row comes at which position: `plan(count, seed, epoch)` makes it ready for one epoch over `count` rows.

    `name` is what a plan shows. `token` is equal only for orders that give the same rows. An order that suits one size
    of batches best has `sized(rows, world, tokens)`, which gives it laid out for batches of so many rows and of that padded
    size (0: any), of each of `world` ranks, of the same length.
    """

    name: str
    plan: Callable[[int, int, int], Positions]
    token: str
    sized: Callable[[int, int, int], Any] | None = None  # to an Order

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Order:
        return self


def table_rows(first: int, step: int, rows: np.ndarray, table: np.ndarray) -> None:
    """Position p is row table[p]."""
    for j in range(rows.size):
        rows[j] = table[first + j * step]


def epoch_key(seed: int, epoch: int) -> int:
    """Mix the key of one epoch's order, a signed 64-bit number: seeds and epochs are never added."""
    return int(rng.i64(rng.subkey(rng.subkey(SALT, seed), epoch)))


def index_dtype(count: int) -> str:
    """Give the smallest dtype in which tables hold row numbers below `count`."""
    return "int32" if count < 1 << 31 else "int64"


def compiled(function: Callable[..., Any], *values: Any) -> Any:
    """Run a kernel once on these arguments and give its result."""
    return _loaded(function, tuple(jit.typeof(v) for v in values), jit.disabled())(*values)


@functools.lru_cache(maxsize=64)
def _loaded(function: Callable[..., Any], signature: tuple[jit.Type, ...], plain: bool) -> jit.Kernel:
    return jit.load(function, signature)  # which hashes the function each time: 2 ms, too much for an epoch's start


def permutation(count: int, key: int) -> np.ndarray:
    """Give a uniform permutation of 0 .. count - 1 as a table (Fisher and Yates)."""
    table = np.empty(count, index_dtype(count))
    compiled(rng.permutation, key, 0, table)
    return table


MOST = 1 << 62  # of a number that kernels count with


def whole(value: Any, what: str, least: int = 1) -> int:
    """Check an integer parameter."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} takes an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{what} takes at least {least}, got {number}")
    if number > MOST:
        raise ValueError(f"{what} takes at most 2**62, got {number}")
    return number


def column(values: Any, what: str) -> np.ndarray:
    """Check that values are one per row: a 1-D array."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what} takes one value a row (1-D), got shape {array.shape}")
    return array


def same_length(name: str, have: int, count: int) -> None:
    """Check at plan time that an order's own arrays belong to these data."""
    if have != count:
        raise ValueError(f"{name} holds {have} values, but there are {count} rows")


def codes(values: Any, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number the distinct labels: the class of each row, the rows sorted by class, the size of each class."""
    array = column(values, what)
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError(f"{what} takes labels, got NaN at row {int(np.isnan(array).argmax())}")
    if array.dtype.kind not in "biufSU":
        raise TypeError(f"{what} takes numbers or strings, got {array.dtype}")
    _, inverse, sizes = np.unique(array, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    members = np.argsort(inverse, kind="stable").astype(index_dtype(array.size))
    return inverse, members, sizes.astype(np.int64)


def once(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Remember the last few results of a function of the row count."""
    return functools.lru_cache(maxsize=4)(function)
