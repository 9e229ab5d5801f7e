"""One pass over all rows in parallel: a program fills a chunk that stays in cache, and something is done with it."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from . import jit
from .compose import Failure, Program, Ragged, Worker, collect, shape_output
from .spec import Spec

CHUNK = 256 << 10  # bytes of output a thread works on at a time: half of a second-level cache
VARIED = 256  # rows at a time where their lengths vary

Consume = Callable[[int, list[np.ndarray]], None]
Tell = Callable[[int], None]  # hears of so many rows more that are done, from any thread
Bar = Callable[[], AbstractContextManager[Tell]]  # begins when all is compiled


class Stopped(Exception):
    """A row on which the program stopped."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def sweep(
    program: Program,
    count: int,
    key: int,
    make_consumer: Callable[[], Consume],
    threads: int | None = None,
    bar: Bar = lambda: contextlib.nullcontext(lambda rows: None),
) -> None:
    """Run `program` over rows 0 .. count - 1 in chunks, on several threads; each has a consumer of its own.

    `consume(start, arrays)` gets the first row of a chunk and its arrays, valid until it returns; chunks come in any
    order. Raises Stopped where a row fails, and what a consumer raises.
    """
    varied = program.measure is not None
    size = max(1, min(VARIED if varied else CHUNK // max(program.nbytes, 1), count))
    program.load()
    numbers = itertools.count()  # next() on it is one step under the GIL
    failed: list[BaseException] = []

    def chunks() -> Iterator[tuple[int, int]]:
        while not failed:
            start = next(numbers) * size
            if start >= count:
                return
            yield start, min(size, count - start)

    def work() -> None:
        try:
            consume = make_consumer()
            worker = Worker(program, key)
            if varied:
                for start, rows in chunks():
                    found, stopped = collect(program, worker, start, 1, rows)
                    if stopped is not None:
                        raise Stopped(stopped)
                    consume(start, found)
                    tell(rows)
                return
            buffers = [np.zeros(size * o.size, o.carrier) for o in program.outputs]
            arrays = [shape_output(o, b, size) for o, b in zip(program.outputs, buffers, strict=True)]
            for at, buffer in zip(program.places(), buffers, strict=True):
                worker.call.set(at, buffer)
            for start, rows in chunks():
                stopped = worker.fill(start, 1, rows, 0)
                if stopped is not None:
                    raise Stopped(stopped)
                consume(start, [a[:rows] for a in arrays])
                tell(rows)
        except BaseException as problem:
            failed.append(problem)

    wanted = min(threads or jit.available_cpus(), -(-count // size))
    others = [threading.Thread(target=work, name="jitloader-pass", daemon=True) for _ in range(wanted - 1)]
    with bar() as tell:
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
    if failed:
        raise failed[0]


def lengths(program: Program, count: int, key: int) -> dict[int, np.ndarray]:
    """Give the length of each row of the outputs that vary, by their place."""
    found = {k: np.zeros(count, np.int64) for k, output in enumerate(program.outputs) if output.form == "ragged"}

    def consume(start: int, chunk: list[np.ndarray]) -> None:
        for k, table in found.items():
            table[start : start + len(chunk[k])] = np.diff(chunk[k].offsets)  # type: ignore[attr-defined]

    sweep(program, count, key, lambda: consume)
    return found


def store(program: Program, count: int, key: int, targets: Sequence[Any], tell: Tell = lambda rows: None) -> None:
    """Run `program` over rows 0 .. count - 1 into an array of all rows for each output, or a Ragged whose offsets are
    there."""

    def consume(start: int, chunk: list[np.ndarray]) -> None:
        for target, found in zip(targets, chunk, strict=True):
            if isinstance(target, Ragged) and isinstance(found, Ragged):
                target.values[target.offsets[start] : target.offsets[start + len(found)]] = found.values
            else:
                target[start : start + len(found)] = found

    sweep(program, count, key, lambda: consume, bar=lambda: contextlib.nullcontext(tell))


class Statistics(NamedTuple):
    """Statistics of a field over its rows, float64: one number for each channel (or column), or 0-d for scalars."""

    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray
    count: int  # type: ignore[assignment]


def statistics_from(note: Any) -> Statistics | None:
    """Give statistics that were noted as JSON; None for what is none."""
    try:
        mean, std, low, high = (np.array(note[name], np.float64) for name in ("mean", "std", "min", "max"))
        return Statistics(mean, std, low, high, int(note["count"]))
    except (TypeError, KeyError, ValueError):
        return None


def moments(x, outer, channels, inner, mean, square, low, high):  # type: ignore[no-untyped-def]
    """Give mean, sum of squared differences from it, minimum and maximum of each channel, in two passes over a chunk."""
    n = float(outer * inner)
    for c in range(channels):
        mean[c] = 0.0
        square[c] = 0.0
        first = float(x[c * inner])
        low[c] = first
        high[c] = first
    # Differences from the first value: a column of one value sums to exactly zero.
    if inner == 1:
        for o in range(outer):
            row = x[o * channels : (o + 1) * channels]
            for c in range(channels):
                mean[c] += np.float64(row[c]) - np.float64(x[c])
    else:
        for o in range(outer):
            for c in range(channels):
                total = 0.0
                run = x[(o * channels + c) * inner : (o * channels + c + 1) * inner]
                for i in range(inner):
                    total += np.float64(run[i]) - np.float64(x[c * inner])
                mean[c] += total
    for c in range(channels):
        mean[c] = np.float64(x[c * inner]) + mean[c] / n
    for o in range(outer):
        for c in range(channels):
            run = x[(o * channels + c) * inner : (o * channels + c + 1) * inner]
            centre = mean[c]
            for i in range(inner):
                v = np.float64(run[i])
                square[c] += (v - centre) * (v - centre)
                if v < low[c] or v != v:
                    low[c] = v
                if v > high[c] or v != v:
                    high[c] = v


def layout(spec: Spec) -> tuple[int, int, int, tuple[int, ...]]:
    """Give (outer, channels, inner, shape of the result) of one sample: channels are the last axis, or the first of a
    (C, H, W) image."""
    shape = tuple(int(n or 0) for n in spec.shape)
    if not shape:
        return 1, 1, 1, ()
    if len(shape) == 3 and shape[0] in (1, 2, 3, 4) and shape[2] not in (1, 2, 3, 4):
        return 1, shape[0], shape[1] * shape[2], (shape[0],)
    return math.prod(shape[:-1]), shape[-1], 1, (shape[-1],)


def statistics(program: Program, count: int, key: int, bar: Bar) -> Statistics:
    """Give the statistics of a program's one output over its rows, merged from chunks (Chan, Golub, LeVeque 1979)."""
    output = program.outputs[0]
    outer, channels, inner, shape = layout(output.spec)
    parts: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    kinds: list[jit.Type] = [
        jit.Array(output.spec.dtype.name, 1),
        jit.INT,
        jit.INT,
        jit.INT,
        *[jit.Array("float64", 1)] * 4,
    ]
    kernel = jit.load(moments, kinds)

    def make_consumer() -> Consume:
        def consume(start: int, arrays: list[np.ndarray]) -> None:
            found = [np.empty(channels) for _ in range(4)]
            x = arrays[0]
            if x.size:
                with np.errstate(all="ignore"):
                    kernel(x.reshape(-1), len(x) * outer, channels, inner, *found)
                parts.append((start, found[0], found[1], found[2], found[3]))

        return consume

    sweep(program, count, key, make_consumer, bar=bar)
    parts.sort(key=lambda part: part[0])  # so that the sum does not depend on which thread was first
    if not parts:
        empty = np.full(shape, np.nan)
        return Statistics(empty, empty.copy(), empty.copy(), empty.copy(), 0)
    starts = [part[0] for part in parts]
    weights = np.diff([*starts, count]).astype(np.float64)[:, None] * (outer * inner)
    mean, square, low, high = (np.stack([part[k] for part in parts]) for k in (1, 2, 3, 4))
    total = float(count * outer * inner)
    with np.errstate(all="ignore"):
        base = mean[0]
        centre = base + np.array([exact_sum(column) for column in ((mean - base) * weights).T]) / total
        spread = square + weights * (mean - centre) ** 2
        deviation = np.sqrt(np.array([exact_sum(column) for column in spread.T]) / total)
    least, most = low.min(axis=0), high.max(axis=0)
    constant = least == most
    centre, deviation = np.where(constant, least, centre), np.where(constant, 0.0, deviation)
    made = [a.reshape(shape) for a in (centre, deviation, least, most)]
    return Statistics(made[0], made[1], made[2], made[3], count)


def exact_sum(numbers: np.ndarray) -> float:
    """Give the sum, rounded once; NaN where it is no finite number, or one on the way to it was not."""
    try:
        found = math.fsum(numbers)
    except (OverflowError, ValueError):  # more than 1.8e308; inf - inf
        return math.nan
    return found if math.isfinite(found) else math.nan
