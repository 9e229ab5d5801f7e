"""Orders that a user brings: row numbers, a plain function, or another order several times over."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import jit, rng
from .base import Order, Positions, column, once, table_rows, whole


def _plain_function(value: Any, what: str) -> types.FunctionType:
    value = getattr(value, "py_func", value)
    if not isinstance(value, types.FunctionType):
        raise TypeError(f"{what} takes a plain function (def or lambda), got {type(value).__name__}")
    if kind := jit.suspends(value):
        raise TypeError(f"{what} takes a plain function, and {value.__name__} is {kind}")
    return value


def _row_numbers(values: Any, what: str) -> np.ndarray:
    array = column(values, what)
    if array.size == 0 and array.dtype.kind == "f" and not isinstance(values, np.ndarray):
        return np.empty(0, np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        hint = "; select rows by a mask instead" if array.dtype.kind == "b" else ""
        raise TypeError(f"{what} takes integer row numbers, got {array.dtype}{hint}")
    if array.dtype.kind == "u" and array.size and int(array.max()) >= 1 << 63:
        raise IndexError(f"{what} takes row numbers below 2**63, got {array.max()}")
    return np.array(array, np.int64)


def _within(array: np.ndarray, count: int) -> np.ndarray:
    """Count negative numbers from the end, and check that all are inside."""
    rows = np.where(array < 0, array + count, array)
    wrong = (rows < 0) | (rows >= count)
    if wrong.any():
        at = int(wrong.argmax())
        raise IndexError(f"order names row {array[at]} at position {at}, but there are {count} rows")
    return rows


def indices(rows: Any) -> Order:
    """Take row rows[p] at position p: from an integer array or list, or from a function epoch -> such an array.

    Negative numbers count from the end; rows may come more than once or not at all. The array is copied and kept as 8
    bytes a position. Raises TypeError where they are not integers, IndexError at plan time where one is out of range.

    >>> positions = indices([2, 0, -1]).plan(5, 0, 0)
    >>> out = np.empty(3, np.int64)
    >>> positions.kernel(0, 1, out, *positions.params)
    >>> out.tolist()
    [2, 0, 4]
    """
    if callable(rows):
        function = _plain_function(rows, "indices")

        def changing(count: int, seed: int, epoch: int) -> Positions:
            table = _within(_row_numbers(function(epoch), f"{function.__name__}({epoch})"), count)
            return Positions(table_rows, table.size, (table,))

        return Order(f"indices({function.__name__})", changing, f"indices({jit.fingerprint(function)})")

    array = _row_numbers(rows, "indices")
    checked = once(lambda count: _within(array, count))

    def plan(count: int, seed: int, epoch: int) -> Positions:
        return Positions(table_rows, array.size, (checked(count),))

    return Order(f"indices({array.size} rows)", plan, f"indices({jit.fingerprint(array)})")


def custom(function: Callable[[int, int, int, int], int]) -> Order:
    """Take row function(position, count, seed, epoch) at each position: a plain function that Numba can compile.

    An epoch has as many positions as there are rows; whether each row comes once is up to the function. It must depend
    on its arguments alone. Raises TypeError where it takes other arguments or does not give an integer.

    >>> positions = custom(lambda position, count, seed, epoch: count - 1 - position).plan(3, 0, 0)
    >>> rows = np.empty(3, np.int64)
    >>> positions.kernel(0, 1, rows, *positions.params)
    >>> rows.tolist()
    [2, 1, 0]
    """
    plain = jit.captured(_plain_function(function, "custom"))
    if _arity(plain) != 4:
        raise TypeError(
            f"custom takes a function (position, count, seed, epoch) -> row, "
            f"got {plain.__name__}{inspect.signature(plain)}"
        )

    def custom_rows(first: int, step: int, rows: np.ndarray, count: int, seed: int, epoch: int) -> None:
        for j in range(rows.size):
            rows[j] = plain(first + j * step, count, seed, epoch)

    def plan(count: int, seed: int, epoch: int) -> Positions:
        seed = int(rng.i64(seed))
        if count:
            row = plain(0, count, seed, epoch)
            try:
                operator.index(row)
            except TypeError:
                raise TypeError(f"{plain.__name__} must give an integer row, got {row!r} for position 0") from None
        return Positions(custom_rows, count, (count, seed, epoch))

    return Order(f"custom({plain.__name__})", plan, f"custom({jit.fingerprint(plain)})")


def _arity(function: Callable[..., Any]) -> int:
    return sum(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in inspect.signature(function).parameters.values()
    )


@functools.lru_cache(maxsize=256)
def _repeated(inner: Callable[..., Any], params: int) -> Callable[..., Any]:
    """Make the kernel of `params` stacked params that runs `inner` pass by pass."""
    take = _taken(params)

    def repeated_rows(first: int, step: int, rows: np.ndarray, length: int, *stacked: Any) -> None:
        done = 0
        while done < rows.size:
            p = first + done * step
            again = p // length
            start = p - again * length
            run = min(rows.size - done, (length - 1 - start) // step + 1)
            inner(start, step, rows[done : done + run], *take(stacked, again))
            done += run

    return repeated_rows


def _taken(params: int) -> Callable[..., Any]:
    """Make the function that takes item `again` of each of `params` arrays: Numba unrolls no loop over mixed types."""
    if not params:
        return lambda stacked, again: ()
    rest = _taken(params - 1)
    return lambda stacked, again: (stacked[0][again], *rest(stacked[1:], again))


def repeat(order: Order, times: int) -> Order:
    """Make one epoch of `times` passes over an order: pass k of epoch e is its epoch e * times + k.

    Memory and start-up are `times` those of the order. Raises ValueError where its epochs differ in length.

    >>> from jitloader.orders import sequential
    >>> positions = repeat(sequential, 2).plan(3, 0, 0)
    >>> rows = np.empty(6, np.int64)
    >>> positions.kernel(0, 1, rows, *positions.params)
    >>> rows.tolist()
    [0, 1, 2, 0, 1, 2]
    """
    order, times = as_order(order), whole(times, "repeat(times=)")
    if times > 1 << 16:
        raise ValueError(f"repeat(times=) takes at most {1 << 16}, each of which is planned by itself, got {times}")

    def plan(count: int, seed: int, epoch: int) -> Positions:
        passes = [order.plan(count, seed, epoch * times + k) for k in range(times)]
        lengths = {p.length for p in passes}
        if len(lengths) > 1:
            raise ValueError(f"repeat takes an order whose epochs are of one length, got {sorted(lengths)}")
        stacked = tuple(
            np.stack([np.asarray(v) for v in values]) for values in zip(*(p.params for p in passes), strict=True)
        )
        length = passes[0].length
        return Positions(_repeated(passes[0].kernel, len(stacked)), times * length, (length, *stacked))

    return Order(f"repeat({order.name}, {times})", plan, f"repeat({order.token}, {times})")


def as_order(value: Any) -> Order:
    """Make an Order of what a user may pass: an Order, row numbers, or a function of an epoch or of a position.

    A function of one argument is epoch -> array of rows, one of four (position, count, seed, epoch) -> row.
    Raises TypeError for anything else.

    >>> as_order([3, 1, 2])
    indices(3 rows)
    """
    if isinstance(value, Order):
        return value
    if callable(value):
        function = _plain_function(value, "order")
        if _arity(function) == 4:
            return custom(function)
        if _arity(function) == 1:
            return indices(function)
        raise TypeError(
            f"order takes a function (epoch) -> rows or (position, count, seed, epoch) -> row, "
            f"got {function.__name__}{inspect.signature(function)}"
        )
    if isinstance(value, (np.ndarray, list, tuple, range)):
        return indices(value)
    raise TypeError(f"order takes an Order, integer row numbers or a plain function, got {type(value).__name__}")
