"""How well the batches of a loader are mixed, beside what a true shuffle gives."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import jit
from .orders import Positions

POSITIONS = 1 << 16  # looked at, in whole batches: 10 ms, and figures to about a percent
SHARES = 1 << 20  # rows whose labels are read for the shares of classes
FEWEST = 8  # batches, however large
STRETCHES = 32  # of the data in storage order, that stand for classes


class Part(NamedTuple):
    """Whose batches: a rank of so many, rows a batch, batches an epoch."""

    rank: int
    world: int
    size: int
    batches: int


class Quality(NamedTuple):
    """How well batches are mixed: each figure, and `true_` what it would be on average after a full shuffle.

    spread : the mean, over batches, of the total variation between a batch's histogram of classes and that of all rows:
        0 where every batch is like the whole, near 1 where each has one class alone. A full shuffle has some, by chance.
    adjacency : the share of consecutive rows that lie within `near` rows of each other in storage.
    overlap : the share of a batch's rows that the same batch of the next epoch has as well.
    error : the standard error of `spread`, from the batches looked at.
    batches, rows : how many were looked at.

    `excess` is spread - true_spread: the price of an order that mixes less; below 0 it is more even than by chance.
    """

    spread: float
    true_spread: float
    error: float
    adjacency: float
    true_adjacency: float
    overlap: float
    true_overlap: float
    near: int
    classes: int
    batches: int
    rows: int
    labelled: bool

    @property
    def excess(self) -> float:
        """The class spread beyond that of a true shuffle, as total variation."""
        return self.spread - self.true_spread

    def __repr__(self) -> str:
        what = f"{self.classes} classes" if self.labelled else f"{self.classes} stretches of the data"
        return "\n".join(
            [
                f"Shuffle quality, from {self.batches:,} batches ({self.rows:,} rows), beside a true shuffle:",
                f"  spread of {what} in a batch: {self.spread:.4f}, true {self.true_spread:.4f}, "
                f"excess {self.excess:+.4f} (standard error {self.error:.4f})",
                f"  neighbours within {self.near:,} rows of storage: {self.adjacency:.3%}, true {self.true_adjacency:.3%}",
                f"  rows again in the same batch of the next epoch: {self.overlap:.3%}, true {self.true_overlap:.3%}",
            ]
        )


def measure(data: Any, now: Positions, after: Positions, part: Part, labels: Any) -> Quality:
    """Look at batches spread evenly over an epoch, and at the same batches of the epoch after it."""
    count = len(data)
    if count < 2 or not part.batches:
        raise ValueError(f"shuffle_quality takes at least two rows and a batch, got {count} rows, {part.batches} batches")
    wanted = min(part.batches, max(FEWEST, POSITIONS // part.size))
    chosen = np.unique(np.arange(wanted) * part.batches // wanted)
    batches, again = (_batches(positions, part, chosen) for positions in (now, after))
    rows = np.concatenate(batches)
    marks, shares = _classes(data, rows, labels)
    ends = np.cumsum([len(b) for b in batches])
    whole = [k for k, b in enumerate(batches) if len(b) == len(batches[0])]
    size = len(batches[0])
    spreads = [
        float(np.abs(np.bincount(marks[ends[k] - size : ends[k]], minlength=len(shares)) / size - shares).sum() / 2)
        for k in whole
    ]
    near = max(1, count // 1000)
    steps = np.concatenate([np.abs(np.diff(b)) for b in batches])
    common = sum(np.intersect1d(a, b).size for a, b in zip(batches, again, strict=False))
    error = float(np.std(spreads, ddof=1) / math.sqrt(len(spreads))) if len(spreads) > 1 else math.nan
    return Quality(
        spread=float(np.mean(spreads)),
        true_spread=true_spread(shares, size, count),
        error=error,
        adjacency=float((steps <= near).mean()) if steps.size else 0.0,
        true_adjacency=near * (2 * count - near - 1) / (count * (count - 1)),
        overlap=common / len(rows),
        true_overlap=size / count,
        near=near,
        classes=len(shares),
        batches=len(batches),
        rows=len(rows),
        labelled=labels is not None,
    )


def _batches(positions: Positions, part: Part, chosen: np.ndarray) -> list[np.ndarray]:
    """Give the rows of some batches of a rank."""
    found = []
    kernel = jit.load(positions.kernel, tuple(map(jit.typeof, (0, 1, np.empty(0, np.int64), *positions.params))))
    for b in chosen.tolist():
        first = part.rank + b * part.size * part.world
        rows = np.empty(min(part.size, -(-(positions.length - first) // part.world)), np.int64)
        kernel(first, part.world, rows, *positions.params)
        found.append(rows)
    return found


def _classes(data: Any, rows: np.ndarray, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Give the class of each of some rows, and the share of each class among all rows."""
    count = len(data)
    if labels is None:
        classes = min(count, STRETCHES)
        bounds = -(-np.arange(classes + 1) * count // classes)
        return rows * classes // count, np.diff(bounds) / count
    if isinstance(labels, str):
        if labels not in data.fields:
            raise KeyError(f"no field {labels!r}: there are {', '.join(data.fields)}")
        read = data.keep(labels)
    else:
        labels = np.asarray(labels)
        if labels.shape != (count,):
            raise ValueError(f"shuffle_quality takes a label a row, got shape {labels.shape} for {count} rows")
    some = np.arange(count) if count <= SHARES else np.random.default_rng(0).integers(0, count, SHARES)
    seen = read[np.concatenate([rows, some])][0] if isinstance(labels, str) else labels[np.concatenate([rows, some])]
    if not isinstance(seen, np.ndarray) or seen.ndim != 1:
        raise ValueError("shuffle_quality takes labels of one number or string a row")
    _, marks = np.unique(seen, return_inverse=True)
    marks = marks.reshape(-1)
    shares = np.bincount(marks[len(rows) :], minlength=int(marks.max()) + 1) / len(some)
    return marks[: len(rows)], shares


def true_spread(shares: np.ndarray, size: int, count: int) -> float:
    """Give the mean total variation of a batch of `size` out of `count` rows drawn without replacement.

    Half the sum of mean absolute deviations of hypergeometric counts (Diaconis and Zabell, "Closed form summation for
    classical distributions", 1991): E|X - m| = 2 k (N - K - n + k) P(X = k) / N, k = floor(m) + 1, m = n K / N.
    """
    if size >= count:
        return 0.0
    total = 0.0
    for members, times in zip(*np.unique(np.rint(shares * count), return_counts=True), strict=True):
        k = math.floor(size * members / count) + 1
        if k > min(size, members):
            continue
        chance = _choose(members, k) + _choose(count - members, size - k) - _choose(count, size)
        total += times * 2 * k * (count - members - size + k) / count * math.exp(chance)
    return total / size / 2


def _choose(n: float, k: float) -> float:
    """Give the logarithm of a binomial coefficient."""
    if k < 0 or k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
