"""Orders that look at a label, group or length of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import jit, rng
from .base import (
    SALT,
    Order,
    Positions,
    codes,
    column,
    compiled,
    epoch_key,
    permutation,
    same_length,
    table_rows,
    whole,
)
from .schedule import drawn_out, drawn_rows, interleave, source_table


def member_rows(
    first: int,
    step: int,
    rows: np.ndarray,
    shift: int,
    key: int,
    slots: np.ndarray,
    sources: np.ndarray,
    members: np.ndarray,
) -> None:
    """Position p is a row of the class whose turn it is, in that class's own permutation."""
    drawn_rows(first, step, rows, shift, key, slots, sources)
    for j in range(rows.size):
        rows[j] = members[rows[j]]


def deal(
    base: np.ndarray,
    extra: np.ndarray,
    tail: np.ndarray,
    batch: int,
    full: int,
    key: int,
    slots: np.ndarray,
    seen: np.ndarray,
) -> None:
    """Fill slots with `full` batches of base[c] rows of class c, one more in extra[c] of them, then a rest of tail[c] rows.

    The extra rows are dealt class by class round the batches, so none gets two of a class and all get as many.
    """
    used = 0
    for c in range(base.size):
        for b in range(full):
            for i in range(base[c]):
                slots[b * batch + used + i] = c
        used += base[c]
    dealt = 0
    for c in range(base.size):
        for _ in range(extra[c]):
            slots[dealt % full * batch + used + dealt // full] = c
            dealt += 1
    at = full * batch
    for c in range(base.size):
        seen[c] = 0
        for _ in range(tail[c]):
            slots[at] = c
            at += 1
    for p in range(slots.size):  # mixed within each batch
        start = p // batch * batch
        q = start + rng.randint(key, p, p - start + 1)
        slots[p], slots[q] = slots[q], slots[p]
    for p in range(slots.size):
        c = slots[p]
        slots[p] = (c << 32) | seen[c]
        seen[c] += 1


def _dealt(sizes: np.ndarray, batch: int, world: int = 1) -> np.ndarray:
    """Give a schedule whose every batch has each class's share, rounded down or up, and so has the short rest.

    With several ranks, batches are those of a rank: of every `world` positions one is its own. What does not fill a
    batch for each rank is dealt out in shorter ones.
    """
    count = int(sizes.sum())
    full = count // (batch * world) * world
    rest = count - full * batch
    least, most = batch * sizes // count, -(-batch * sizes // count)
    low = np.maximum(rest * sizes // count, sizes - full * most)
    high = np.minimum(-(-rest * sizes // count), sizes - full * least)
    tail = low.copy()
    wanted = np.where(high > low, rest * sizes % count, -1)
    tail[np.argsort(-wanted, kind="stable")[: rest - int(low.sum())]] += 1
    base, extra = (sizes - tail) // max(full, 1), (sizes - tail) % max(full, 1)
    slots, seen = np.empty(count, np.int64), np.empty(sizes.size, np.int64)
    compiled(deal, base, extra, tail, batch, full, SALT, slots, seen)
    if world > 1:
        parts, cut, size = [slots], full * batch, batch
        if full:
            parts = [slots[:cut].reshape(-1, world, batch).transpose(0, 2, 1).reshape(-1)]
            if rest:
                parts.append(_dealt(tail, max(rest // world, 1), world if rest >= world else 1))
        elif rest >= world and rest // world < size:
            parts = [_dealt(sizes, rest // world, world)]
        slots = np.concatenate(parts) >> 32
        compiled(number_draws, slots, seen)
    return slots


def number_draws(slots: np.ndarray, seen: np.ndarray) -> None:
    """Turn the class of each slot into class << 32 | its draw."""
    for c in range(seen.size):
        seen[c] = 0
    for p in range(slots.size):
        c = slots[p]
        slots[p] = (c << 32) | seen[c]
        seen[c] += 1


def stratified(labels: Any, batch_size: int | None = None) -> Order:
    """Shuffle so that the classes keep their shares all along: each row once, each class in its own permutation.

    labels : one a row, numbers or strings.
    batch_size : rows in a batch over all ranks. Each of those batches, the short last one included, has every class's
        share rounded down or up: within one row. Left out, a Loader lays the order out for its own batches, those of
        each rank; a short last batch of one of several ranks may then be off by two. Without a loader, all runs of any
        length keep the shares to less than two rows (and to less than one with two classes): no order can keep every
        run of every length within one.

    Which class comes where is computed once, O(n log classes), and takes 8 bytes a row; the row numbers by class 4.
    Rows of a class are found by position, so an epoch starts and resumes in O(1). Raises ValueError where there are not
    as many labels as rows. (Earliest deadline first, as in Tijdeman's chairman assignment, 1980.)

    >>> positions = stratified([0, 0, 0, 1], batch_size=4).plan(4, 0, 0)
    >>> rows = np.empty(4, np.int64)
    >>> positions.kernel(0, 1, rows, *positions.params)
    >>> sorted(rows.tolist())
    [0, 1, 2, 3]
    """
    inverse, members, sizes = codes(labels, "stratified")
    batch = 0 if batch_size is None else whole(batch_size, "stratified(batch_size=)")
    same = jit.fingerprint(inverse)
    counted = source_table(sizes, np.zeros_like(sizes))

    def laid(batch: int, world: int, sized: Any = None) -> Order:
        state: list[Any] = []

        def plan(count: int, seed: int, epoch: int) -> Positions:
            same_length("stratified", members.size, count)
            if not state:
                state.append(_dealt(sizes, batch, world) if batch and count else interleave(sizes))
            key = epoch_key(seed, epoch)
            # Turned by another amount each epoch, so that no class keeps its places; batches that are laid out stay.
            shift = 0 if batch else int(rng.randint(rng.subkey(key, -1), 0, max(count, 1)))
            return Positions(member_rows, count, (shift, key, state[0], counted, members))

        name = f"stratified({sizes.size} classes{f', batch_size={batch * world}' if batch else ''})"
        return Order(name, plan, f"stratified({batch}, {same})", sized)

    return laid(batch, 1, None if batch else lambda rows, world, _: laid(rows, world))


def balanced(labels: Any) -> Order:
    """Let all classes come equally often, whatever their sizes: an epoch is as many positions as there are rows.

    labels : one a row, numbers or strings. Each prefix of the endless order holds as many rows of each class, to within
        one; every run of as many rows as there are classes, counted from its start, has each class once.

    A class is gone through in its own permutation and then again in another one; the next epoch goes on where this one
    stopped, so no row of a large class is left out for good. O(1) per position and epoch; 4 bytes a row for the row
    numbers by class. Raises ValueError where there are not as many labels as rows.

    >>> positions = balanced(["a", "a", "a", "b"]).plan(4, 0, 0)
    >>> rows = np.empty(4, np.int64)
    >>> positions.kernel(0, 1, rows, *positions.params)
    >>> rows.tolist().count(3)
    2
    """
    inverse, members, sizes = codes(labels, "balanced")
    token = f"balanced({jit.fingerprint(inverse)})"
    state: list[Any] = []

    def plan(count: int, seed: int, epoch: int) -> Positions:
        same_length("balanced", members.size, count)
        if not state:
            quotas = drawn_out(np.ones_like(sizes)) if count else sizes
            state.append((interleave(quotas), source_table(sizes, quotas)))
        return Positions(member_rows, count, (epoch * count, epoch_key(seed, 0), *state[0], members))

    return Order(f"balanced({sizes.size} classes)", plan, token)


def lay_groups(order: np.ndarray, starts: np.ndarray, members: np.ndarray, table: np.ndarray) -> None:
    """Fill table with the members of one group after the other, in the given order of groups."""
    at = 0
    for g in range(order.size):
        for i in range(starts[order[g]], starts[order[g] + 1]):
            table[at] = members[i]
            at += 1


def grouped(groups: Any) -> Order:
    """Shuffle whole groups: the rows of one come one after the other, in the order they have in the data.

    groups : the group of each row, numbers or strings; a group's rows need not be neighbours in the data. A table of
    4 bytes a row per epoch. Raises ValueError where there are not as many as rows.

    >>> positions = grouped([7, 7, 5, 7]).plan(4, 0, 0)
    >>> rows = np.empty(4, np.int64)
    >>> positions.kernel(0, 1, rows, *positions.params)
    >>> "0, 1, 3" in str(rows.tolist())
    True
    """
    inverse, members, sizes = codes(groups, "grouped")
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def plan(count: int, seed: int, epoch: int) -> Positions:
        same_length("grouped", members.size, count)
        table = np.empty(count, members.dtype)
        compiled(lay_groups, permutation(sizes.size, epoch_key(seed, epoch)), starts, members, table)
        return Positions(table_rows, count, (table,))

    return Order(f"grouped({sizes.size} groups)", plan, f"grouped({jit.fingerprint(inverse)})")


def bucketed(lengths: Any, batch_size: int | None = None, window: int = 100) -> Order:
    """Bring rows of about one length together: shuffle, sort within windows, shuffle the batches.

    lengths : the length of each row, in any unit.
    batch_size : rows in a batch over all ranks; they are cut from sorted windows and shuffled over the epoch. Left out, a
        Loader lays the order out for its own batches: those of its `batch_size`, or of `max_tokens`, where a window is
        sorted longest first and cut as the loader will cut it, and what fills no batch goes on into the next window.
        Without a loader, batches of 64.
    window : batches sorted together; more of them waste less padding and mix less.

    The rows that do not fill a batch come last: drawn at random, with `max_tokens` those that were left. A table of 4
    bytes a row per epoch, O(n log n). Raises ValueError for lengths that are negative or NaN, or not one a row.

    >>> positions = bucketed([9, 1, 8, 2], batch_size=2).plan(4, 0, 0)
    >>> rows = np.empty(4, np.int64)
    >>> positions.kernel(0, 1, rows, *positions.params)
    >>> sorted(sorted(pair) for pair in rows.reshape(2, 2).tolist())
    [[0, 2], [1, 3]]
    """
    array = column(lengths, "bucketed")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"bucketed takes lengths as numbers, got {array.dtype}")
    wrong = ~(array >= 0)
    if wrong.any():
        raise ValueError(f"bucketed takes lengths of at least 0, got {array[wrong][0]} at row {int(wrong.argmax())}")
    window = whole(window, "bucketed(window=)")
    given = None if batch_size is None else whole(batch_size, "bucketed(batch_size=)")
    same = jit.fingerprint(array)

    def laid(rows: int, world: int, tokens: int, sized: Any = None) -> Order:
        def plan(count: int, seed: int, epoch: int) -> Positions:
            same_length("bucketed", array.size, count)
            key = epoch_key(seed, epoch)
            table = permutation(count, key)
            mix = int(rng.i64(rng.subkey(key, 1)))
            if tokens:
                return Positions(table_rows, count, (_by_tokens(array, table, window, tokens, rows, world, mix),))
            batch = rows * world
            full = count // batch
            cut = full * batch
            for part, size in ((table[:cut], min(batch * window, count + 1)), (table[cut:], batch)):
                part[:] = part[np.lexsort((array[part], np.arange(part.size) // size))]
            table[:cut] = table[:cut].reshape(full, batch)[permutation(full, mix)].reshape(-1)
            return Positions(table_rows, count, (table,))

        told = f"batch_size={rows * world}, " if rows and sized is None else ""
        told += f"max_tokens={tokens}, " if tokens else ""
        token = f"bucketed({'' if given is None else f'batch_size={given}, '}window={window}, {same})"
        return Order(f"bucketed({told}window={window})", plan, token, sized)

    return laid(64, 1, 0, laid) if given is None else laid(given, 1, 0)


def _by_tokens(
    lengths: np.ndarray, table: np.ndarray, window: int, tokens: int, most: int, world: int, key: int
) -> np.ndarray:
    """Cut shuffled rows into batches of at most `tokens` (and `most` rows) of each of `world` ranks, longest first in
    each, and shuffle those.

    Longest first, a batch that takes no further row takes none of any length: so the greedy cuts of a loader fall where
    these do, in whatever order batches come.
    """
    mean = max(float(lengths.mean()), 1.0) if table.size else 1.0
    room = max(1, min(int(tokens / mean), most or table.size)) * world * window
    batches, left, low = [], table[:0], 0
    while low < table.size:
        rows = np.concatenate([left, table[low : low + room]])
        rows = rows[np.argsort(-lengths[rows].astype(np.float64), kind="stable")]
        low += room
        at = 0
        while at < rows.size:
            size = max(1, int(tokens / max(float(lengths[rows[at]]), 1.0)))
            size = min(size, most or size) * world
            if at + size > rows.size:
                break
            batches.append(rows[at : at + size])
            at += size
        left = rows[at:]
    mixed = permutation(len(batches), key)
    return np.concatenate([*(batches[k] for k in mixed), left])
