"""Draws by priority from a tree of sums."""

# mypy: allow-untyped-calls
# (the draws of rng.py are typed by their callers: Python integers here, 64-bit words in a kernel)

from __future__ import annotations

import base64
import math
import operator
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import jit, rng
from ..errors import StateError
from ..jit import FLOAT, INT, Array

REPLAY = 0x5265706C  # keeps these draws apart from those of other rooms with the same seed
VERSION = 1  # of the state
STATE = {"version", "capacity", "alpha", "beta", "seed", "step", "stratified", "highest", "shares"}
INF = math.inf
HUGE = 1e290  # of one share: the sum of any number of rows stays finite
INDICES, REALS = Array("int64", 1), Array("float64", 1)


# ---------------------------------------------------------------------------------------------------------------------
# The tree: eight children a node, which is one cache line, so a path in a million rows is 7 lines and not 20
#
# Level 0 are the shares of the rows (priority ** alpha), level k + 1 the sums of eight of level k; `levels[k]` is where
# level k begins in `sums`, its last entry the root. `least` is laid out alike and holds the least share above 0
# (its level 0 is not used).


def _levels(capacity: int) -> np.ndarray:
    """Give where each level of a tree over this many rows begins."""
    bases, base, size = [], 0, capacity
    while True:
        bases.append(base)
        if size == 1 and len(bases) > 1:
            return np.array(bases, np.int64)
        size = -(-size // 8)
        base += size * 8


def _sum_up(sums: np.ndarray, least: np.ndarray, child: int, node: int, level: int) -> None:
    """Set a node of this level from its eight children, always in the same order: equal shares give an equal tree."""
    # Unsigned, so that no index is tried for being negative.
    a, b, c, d = rng.u64(child), rng.u64(child + 1), rng.u64(child + 2), rng.u64(child + 3)
    e, f, g, h = rng.u64(child + 4), rng.u64(child + 5), rng.u64(child + 6), rng.u64(child + 7)
    sums[rng.u64(node)] = ((sums[a] + sums[e]) + (sums[c] + sums[g])) + ((sums[b] + sums[f]) + (sums[d] + sums[h]))
    if level > 1:
        left = _lower(_lower(least[a], least[e]), _lower(least[c], least[g]))
        right = _lower(_lower(least[b], least[f]), _lower(least[d], least[h]))
        least[rng.u64(node)] = _lower(left, right)
    else:
        low = INF
        for k in range(8):
            share = sums[rng.u64(child + k)]
            low = _lower(low, share if share > 0.0 else INF)
        least[rng.u64(node)] = low


def _lower(a: float, b: float) -> float:
    """Give the lower of two numbers that are not NaN (`min` minds NaN, which takes longer)."""
    return a if a < b else b


def _update(
    sums: np.ndarray,
    least: np.ndarray,
    levels: np.ndarray,
    rows: np.ndarray,
    priorities: np.ndarray,
    n: int,
    capacity: int,
    alpha: float,
    limit: float,
    highest: np.ndarray,
) -> int:
    """Set the first n rows to their priorities, which become shares in place, and give 0.

    Where row k is bad give k + 1, where priority k is not 0 to `limit` -k - 1, and set nothing. `highest` (1,) is the
    highest priority so far.
    """
    top = highest[0]
    for k in range(n):
        priority = priorities[k]
        if rows[k] < 0 or rows[k] >= capacity:
            return k + 1
        # On their way while the power is taken: a quarter of the time of an update in a million rows.
        jit.prefetch(sums, rows[k])
        jit.prefetch(sums, levels[1] + (rows[k] >> 3))
        jit.prefetch(least, levels[1] + (rows[k] >> 3))
        # Written so that NaN is bad too. Priority 0 is share 0 whatever alpha is.
        if not (priority >= 0.0 and priority <= limit):
            return -k - 1
        priorities[k] = math.pow(priority, alpha) if priority > 0.0 else 0.0
        if priority > top:
            top = priority
    highest[0] = top
    for k in range(n):
        sums[rows[k]] = priorities[k]
    # Level by level, not row by row: the reads of one level do not wait for each other. High levels have fewer nodes
    # than there are rows.
    for k in range(n):
        _sum_up(sums, least, 8 * (rows[k] >> 3), levels[1] + (rows[k] >> 3), 1)
    for level in range(2, levels.size):
        below, here = levels[level - 1], levels[level]
        if (here - below) >> 3 <= n:
            for index in range((here - below) >> 3):
                _sum_up(sums, least, below + 8 * index, here + index, 2)
        else:
            for k in range(n):
                index = rows[k] >> (3 * level)
                _sum_up(sums, least, below + 8 * index, here + index, 2)
    return 0


def _rebuild(sums: np.ndarray, least: np.ndarray, levels: np.ndarray) -> None:
    """Set all above the shares."""
    for level in range(1, levels.size):
        below, here = levels[level - 1], levels[level]
        for index in range((here - below) >> 3):
            _sum_up(sums, least, below + 8 * index, here + index, level)


def _sample(
    sums: np.ndarray,
    least: np.ndarray,
    levels: np.ndarray,
    seed: int,
    step: int,
    stratified: int,
    beta: float,
    draws: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray,
) -> int:
    """Draw `rows` and their `weights`; give 0, or 1 where all priorities are 0. `draws` is scratch of the same size."""
    root = levels[levels.size - 1]
    if not sums[root] > 0.0:
        return 1
    n = rows.size
    key = rng.subkey(rng.subkey(seed, REPLAY), step)
    for i in range(n):
        u = rng.uniform(key, i)
        draws[i] = ((i + u) / n if stratified != 0 else u) * sums[root]
        rows[i] = 0
    for level in range(levels.size - 2, -1, -1):
        for i in range(n):
            child = levels[level] + 8 * rows[i]
            pick = 0
            end = 0.0
            passed = 0.0
            # No early end: the branch would be guessed wrong once a level. A share of 0 is passed with the one before.
            for c in range(8):
                end += sums[child + c]
                if draws[i] >= end:
                    pick += 1
                    passed = end
            draws[i] -= passed
            if pick == 8:  # rounding carried the draw past the end: take the last that can be drawn
                pick = 7
                while pick > 0 and sums[child + pick] == 0.0:
                    pick -= 1
                draws[i] = 0.0
            rows[i] = 8 * rows[i] + pick
    for i in range(n):
        weights[i] = math.pow(sums[rows[i]] / least[root], -beta)
    return 0


class Prioritized:
    """Draw rows of a replay memory by priority: row i with probability p_i ** alpha / sum of p_j ** alpha.

    `capacity` rows, numbered from 0 (those of a `Ring`); none can be drawn before it is added. `alpha` 0 draws all
    rows alike, `beta` 1 corrects that bias in full; set the attribute `beta` as training goes on. `stratified` draws
    one row from each of batch_size equal parts of the sum, otherwise draws are independent. The k-th call of `sample`
    depends on (seed, k, priorities) alone. All methods may be called from several threads.

    Source: Schaul, Quan, Antonoglou, Silver: "Prioritized experience replay", ICLR 2016, proportional variant.

    >>> memory = Prioritized(1000, alpha=0.5, beta=1.0)
    >>> memory.add([3, 4])
    >>> memory.update([3, 4], [9.0, 0.0])
    >>> rows, weights = memory.sample(3)
    >>> rows.tolist(), weights.tolist(), memory.total
    ([3, 3, 3], [1.0, 1.0, 1.0], 3.0)
    """

    __slots__ = (
        *("_alpha", "_beta", "_capacity", "_draw", "_highest", "_least", "_levels", "_limit", "_lock", "_priorities"),
        *("_rows", "_sampler", "_seed", "_step", "_stratified", "_sums", "_updater"),
    )

    def __init__(
        self, capacity: int, alpha: float = 0.6, beta: float = 0.4, seed: int = 0, *, stratified: bool = True
    ) -> None:
        self._capacity = operator.index(capacity)
        if self._capacity < 1:
            raise ValueError(f"a memory of {capacity} rows: capacity must be at least 1")
        if self._capacity > 1 << 48:
            raise ValueError(f"a memory of {capacity} rows: capacity must be at most 2**48")
        self._alpha = _exponent(alpha, "alpha")
        self._limit = HUGE ** (1.0 / max(self._alpha, 1.0))  # of a priority
        self.beta = beta
        self._seed, self._step, self._stratified = operator.index(seed), 0, bool(stratified)
        self._levels = _levels(self._capacity)
        self._sums, self._least = (_lines(int(self._levels[-1]) + 1) for _ in range(2))
        self._least[:] = INF
        self._highest = np.ones(1)  # the first rows have priority 1
        self._lock = threading.Lock()
        self._resize(256)
        kinds = INT, INT, INT, FLOAT, REALS, INDICES, Array("float32", 1)
        self._draw = jit.load(_sample, [REALS, REALS, INDICES, *kinds])
        self._sampler: tuple[jit.Call, np.ndarray, np.ndarray] | None = None

    def _resize(self, size: int) -> None:
        """Make room for updates of this many rows."""
        self._rows, self._priorities = np.zeros(size, np.int64), np.zeros(size)
        kernel = jit.load(_update, [REALS, REALS, INDICES, INDICES, REALS, INT, INT, FLOAT, FLOAT, REALS])
        tree = self._sums, self._least, self._levels
        self._updater = kernel.bind(
            *tree, self._rows, self._priorities, 0, self._capacity, self._alpha, self._limit, self._highest
        )

    def __repr__(self) -> str:
        return f"Prioritized({self._capacity}, alpha={self._alpha}, beta={self.beta}, seed={self._seed})"

    @property
    def capacity(self) -> int:
        """How many rows there can be."""
        return self._capacity

    @property
    def alpha(self) -> float:
        """How much priorities count: 0 not at all, 1 in proportion."""
        return self._alpha

    @property
    def beta(self) -> float:
        """How much of the bias the weights correct: 0 nothing, 1 all."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _exponent(value, "beta")

    @property
    def step(self) -> int:
        """How many batches were drawn."""
        return self._step

    @property
    def total(self) -> float:
        """The sum of priority ** alpha over all rows."""
        return float(self._sums[-1])

    def add(self, rows: Any) -> None:
        """Give new rows, one or many, the highest priority any row has had so far (1 at first).

        Raises IndexError on a row outside 0 .. capacity - 1; nothing is changed then.
        """
        self._set(rows, None)

    def update(self, rows: Any, priorities: Any) -> None:
        """Set the priorities of these rows: (n,) integers and (n,) numbers; of a row named twice the last counts.

        A row of priority 0 is not drawn. Raises IndexError on a row outside 0 .. capacity - 1, ValueError on a
        priority that is negative, NaN, infinite or above 1e290 (itself or raised to alpha); nothing is changed then.
        """
        self._set(rows, priorities)

    def _set(self, rows: Any, priorities: Any) -> None:
        rows = np.asarray(rows)
        n = rows.size
        if rows.dtype.kind not in "iu" and n:
            raise TypeError(f"rows must be integers, not {rows.dtype}")
        if priorities is not None:
            priorities = np.asarray(priorities)
            if priorities.dtype.kind not in "fiu" and n:
                raise TypeError(f"priorities must be numbers, not {priorities.dtype}")
            if priorities.shape != rows.shape or rows.ndim > 1:
                raise ValueError(f"{rows.shape} rows and {priorities.shape} priorities: both must be (n,)")
        elif rows.ndim > 1:
            raise ValueError(f"{rows.shape} rows: must be one number or (n,)")
        with self._lock:
            if n > self._rows.size:
                self._resize(2 * n)
            self._rows[:n] = rows
            self._priorities[:n] = self._highest[0] if priorities is None else priorities
            self._updater.set(5, n)
            status = self._updater()
        if status > 0:
            raise IndexError(f"row {rows.flat[status - 1]} is outside 0 .. {self._capacity - 1}")
        if status < 0:
            raise ValueError(
                f"row {rows.flat[-status - 1]} has priority {priorities.flat[-status - 1]}:"
                f" it must be a number from 0 to {self._limit:.3g}"
            )

    def sample(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows (batch_size,) int64, with replacement, and their weights (batch_size,) float32.

        The weight of row i is (N * P(i)) ** -beta over the largest such weight of all rows that can be drawn, so it is
        in (0, 1]. Raises ValueError where no row has a priority above 0.
        """
        batch_size = operator.index(batch_size)
        if batch_size < 1:
            raise ValueError(f"a batch of {batch_size} rows: batch_size must be at least 1")
        with self._lock:
            if self._sampler is None or self._sampler[1].size != batch_size:
                self._sampler = self._bind(batch_size)
            call, rows, weights = self._sampler
            call.set(4, self._step)
            call.set(6, self._beta)
            if call() != 0:
                raise ValueError("nothing to sample: no row has a priority above 0 (add rows first)")
            self._step += 1
            return rows.copy(), weights.copy()

    def _bind(self, batch_size: int) -> tuple[jit.Call, np.ndarray, np.ndarray]:
        rows, weights = np.empty(batch_size, np.int64), np.empty(batch_size, np.float32)
        tree = self._sums, self._least, self._levels
        draw = self._seed, 0, self._stratified, 0.0
        return self._draw.bind(*tree, *draw, np.empty(batch_size), rows, weights), rows, weights

    def state_dict(self) -> dict[str, Any]:
        """Give all that the next draws depend on, as plain values for JSON: "shares", (capacity,) little-endian float64, are
        their bytes in base64."""
        with self._lock:
            return {
                "version": VERSION,
                "capacity": self._capacity,
                "alpha": self._alpha,
                "beta": self._beta,
                "seed": self._seed,
                "step": self._step,
                "stratified": self._stratified,
                "highest": float(self._highest[0]),
                "shares": base64.b64encode(self._sums[: self._capacity].astype("<f8").tobytes()).decode(),
            }

    def load_state_dict(self, state: Mapping[str, Any], rows: int | None = None) -> None:
        """Go on where `state` was taken: the next draw is the one that would have come; "shares" may be an array or a list.

        `rows`: how many rows there are, where that is known. Raises StateError, and changes nothing, where the state is of
        another capacity or alpha, has a share for a row beyond these, or is damaged.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"a state is what state_dict() gives, got {type(state).__name__}")
        missing = STATE - state.keys()
        if missing:
            raise StateError(f"the state lacks {', '.join(sorted(missing))}")
        for name, own in (("version", VERSION), ("capacity", self._capacity), ("alpha", self._alpha)):
            if not isinstance(state[name], (int, float)) or state[name] != own:
                raise StateError(f"the state has {name} {state[name]}, and this memory {own}")
        try:
            shares = state["shares"]
            if isinstance(shares, str):
                shares = np.frombuffer(base64.b64decode(shares, validate=True), "<f8")
            shares = np.asarray(shares, np.float64)
            beta, highest = _exponent(state["beta"], "beta"), _exponent(state["highest"], "highest")
            seed, step, stratified = operator.index(state["seed"]), operator.index(state["step"]), state["stratified"]
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(f"the state is damaged: {error}") from None
        if shares.shape != (self._capacity,) or not np.all((shares >= 0) & (shares <= HUGE)):
            raise StateError(f"the state is damaged: shares must be {self._capacity} numbers of 0 to {HUGE}")
        if not 0 <= step < 1 << 63 or not isinstance(stratified, bool) or highest > self._limit:
            told = f"step {step}, stratified {stratified!r}, highest {highest:g}"
            raise StateError(
                f"the state is damaged: {told}: a whole number, True or False, at most {self._limit:.3g} expected"
            )
        if rows is not None and shares[rows:].any():
            row = rows + int(np.flatnonzero(shares[rows:])[0])
            raise StateError(f"the state has a priority for row {row}, and {rows} rows were written: load these first")
        with self._lock:
            self._seed, self._step, self._stratified = seed, step, stratified
            self._beta, self._highest[0] = beta, highest
            self._sums[: self._capacity] = shares
            jit.load(_rebuild, [REALS, REALS, INDICES])(self._sums, self._least, self._levels)
            self._sampler = None  # it holds the old seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.state_dict(),)


def _lines(size: int) -> np.ndarray:
    """Give float64 zeros that begin at a cache line."""
    array = np.zeros(size + 7)
    first = -array.ctypes.data % 64 // 8
    return array[first : first + size]


def _restore(state: Mapping[str, Any]) -> Prioritized:
    memory = Prioritized(state["capacity"], state["alpha"])
    memory.load_state_dict(state)
    return memory


def _exponent(value: Any, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = INF
    if not 0.0 <= number < INF:
        raise ValueError(f"{name}={value}: must be a finite number, 0 or more")
    return number
