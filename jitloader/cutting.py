"""Where batches end that are cut by their padded size, not after so many rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import compose, jit

ROOM = 1 << 16  # positions whose lengths are looked at together
MANY = 1 << 62


class TooLong(Exception):
    """A row that no batch may hold: its position in the epoch and its length."""

    def __init__(self, position: int, length: int) -> None:
        super().__init__(position, length)
        self.position, self.length = position, length


def cut_rows(
    lengths: np.ndarray,
    count: int,
    world: int,
    multiples: np.ndarray,
    tokens: int,
    most: int,
    longest: np.ndarray,
    ends: np.ndarray,
) -> int:
    """Cut positions into batches, greedily: of every `world` positions each rank has one row, and a batch ends before
    the rows of one rank could pass `tokens`.

    Position p has lengths[f * (lengths.size // multiples.size) + p] in field f, 0 counting as 1. Rows cost their number
    times the longest of them, rounded up to multiples[f], or where that is 0 (not padded) the sum of the longest of
    every `world`; of several fields the dearest counts. `ends` gets the rows before which batches end, but for the last,
    which later positions may still join. Gives their number, or -1 - p where position p alone costs too much. `longest`
    is room for two numbers a field.
    """
    fields = multiples.size
    room = lengths.size // fields
    cuts, low, at = 0, 0, 0
    for f in range(fields):
        longest[f] = 0
    while at < count:
        high = min(at + world, count)
        rows = (at - low) // world + 1
        cost = rows
        for f in range(fields):
            here = 1
            for p in range(f * room + at, f * room + high):
                here = max(here, lengths[p])
            if multiples[f] == 0:
                here += longest[f]
                cost = max(cost, here)
            else:
                here = max(longest[f], (here + multiples[f] - 1) // multiples[f] * multiples[f])
                cost = max(cost, rows * here)
            longest[fields + f] = here
        if cost <= tokens and rows <= most:
            for f in range(fields):
                longest[f] = longest[fields + f]
            at = high
        elif at == low:
            return -1 - at
        else:
            ends[cuts] = at // world
            cuts += 1
            low = at
            for f in range(fields):
                longest[f] = 0
    return cuts


_FLAT = jit.Array("int64", 1)
_CUT: tuple[jit.Type, ...] = (_FLAT, jit.INT, jit.INT, _FLAT, jit.INT, jit.INT, _FLAT, _FLAT)


def cut(plan: Any, start: int, rows: int, wrap: bool, tokens: int, most: int | None) -> np.ndarray:
    """Cut the rest of an epoch, from position `start` on, in which no rank has more than `rows` rows: batch b of a rank
    ends before its row ends[b], the last at `rows`.

    `most` rows a batch at most. All ranks cut alike. What came before a batch does not matter to where it ends: who
    begins at an end finds the later ends where they were. It takes about 10 ns a position, and 8 bytes a batch. Raises
    TooLong, and what a batch of a row that fails raises.
    """
    program, worker, length, world = plan.program, plan.worker(), plan.length, plan.step
    varied = (o for o in program.outputs if o.form != "fixed")
    kinds = list(dict.fromkeys((o.lengths, o.multiple if o.form == "longest" else 0) for o in varied))
    multiples = np.array([multiple for _, multiple in kinds], np.int64)
    longest = np.empty(2 * len(kinds), np.int64)
    kernel = _kernel(jit.disabled())
    room, done = -(-ROOM // world) * world, 0
    made = [np.empty(0, np.int64)]
    while done < rows:
        begin = start + done * world
        count = min(room, (rows - done) * world)
        if not wrap:
            count = min(count, length - begin)
        spans, place = compose.Spans(program, count), 0
        while place < count:
            first = (begin + place) % length
            piece = min(count - place, length - first)
            failed = worker.lengths(first, 1, piece, place, spans)
            if failed is not None:
                raise plan.data.failed(failed, plan.seed, plan.epoch)
            place += piece
        lengths = np.concatenate([spans.lengths[name][0] for name, _ in kinds])
        ends = np.empty(count // world + 1, np.int64)
        found = kernel(lengths, count, world, multiples, min(tokens, MANY), min(most or MANY, MANY), longest, ends)
        if found < 0:
            here = lengths.reshape(len(kinds), count)[:, -1 - found : -1 - found + world].max(0)
            raise TooLong((begin - 1 - found + int(here.argmax())) % length, int(here.max()))
        if found:
            made.append(done + ends[:found])
        if done + -(-count // world) == rows:
            made.append(np.array([rows], np.int64))
            break
        if found:
            done = int(made[-1][-1])
        else:  # a batch larger than all that was looked at
            room *= 2
    return np.concatenate(made)


@functools.cache
def _kernel(plain: bool) -> jit.Kernel:
    return jit.load(cut_rows, _CUT)
