"""Slow, plain twins of the access patterns: the definitions, with lists and one row at a time."""

import contextlib

import numpy as np
import pytest


@contextlib.contextmanager
def interpreted():
    """Run kernels in plain Python, from the same source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_DISABLE_JIT", "1")
        yield


def group_slices(groups, n):
    """Give (first, end) of each group: offsets, or None for one group."""
    bounds = [0, n] if groups is None else list(groups)
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def windows(array, slices, *, stride=1, step=1, groups=None, pad_start=0, pad_end=0, pad_value=0):
    """Give, for each window, its fields, their masks, the number of its group, and the rows it covers."""
    low = min([0, *(s.start for s in slices.values())])
    span = 1 + step * (max(range(s.start, s.stop, s.step or 1)[-1] for s in slices.values()) - low)
    found = []
    for number, (first, end) in enumerate(group_slices(groups, len(array))):
        start = first - pad_start
        while end > first and start + span <= end + pad_end:
            fields, masks = {}, {}
            for name, s in slices.items():
                rows = [start + (e - low) * step for e in range(s.start, s.stop, s.step or 1)]
                masks[name] = [first <= r < end for r in rows]
                blank = np.full(array.shape[1:], 0 if pad_value is None else pad_value, array.dtype)
                near = [min(max(r, first), end - 1) for r in rows]
                fields[name] = np.array(
                    [
                        array[k] if there or pad_value is None else blank
                        for k, there in zip(near, masks[name], strict=True)
                    ]
                )
            found.append((fields, masks, number, range(max(start, first), min(start + span, end))))
            start += stride
    return found


def standardize(first, *others):
    """Give arrays less the mean of the first and over its std, channel by channel, in float64."""
    flat = first.reshape(len(first), -1).astype(np.float64)
    mean = np.array([sum(c - c[0]) / len(c) + c[0] for c in flat.T])
    std = np.array([np.sqrt(sum((c - m) ** 2) / len(c)) for c, m in zip(flat.T, mean, strict=True)])
    std[std == 0] = 1
    return [((x.reshape(len(x), -1) - mean) / std).reshape(x.shape) for x in (first, *others)]


def pad(rows, length, value, front=False):
    """Give rows at one length as (batch, mask)."""
    shape = (len(rows), length, *rows[0].shape[1:])
    batch, mask = np.full(shape, value, rows[0].dtype), np.zeros(shape[:2], bool)
    for i, row in enumerate(rows):
        place = slice(length - len(row), length) if front else slice(0, len(row))
        batch[i, place], mask[i, place] = row, True
    return batch, mask


def transition(t, n, gamma, reward, terminated, truncated, follows):
    """Give (return, discount, steps, row of the last reward, whether it is followed in its episode) of step t.

    `follows[t]` is the row after t in time, or None.
    """
    total, k = 0.0, 0
    while True:
        total += gamma**k * float(reward[t])
        k += 1
        if terminated[t]:
            return total, 0.0, k, t, False
        if truncated[t] or follows[t] is None:
            return total, gamma**k, k, t, False
        if k == n:
            return total, gamma**k, k, t, True
        t = follows[t]


def stack(obs, t, size, before):
    """Give the last `size` observations at t; `before[t]` is the row before t in its episode, or None."""
    rows = [t]
    while len(rows) < size:
        rows.append(before[rows[-1]] if before[rows[-1]] is not None else rows[-1])
    return obs[rows[::-1]]
