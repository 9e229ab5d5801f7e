"""Transitions of replay logs: sample i is a step, what it earned over the next n, and what was seen then.

Nothing is stored twice: the next observation is read from the observations, at the row where the return ends.
"""

# mypy: allow-untyped-calls
# (kernels are typed by their callers: Python integers here, 64-bit words when compiled)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import numpy as np

from .dataset import Dataset
from .live import Live
from .replay import Ring
from .replay.ring import CUT, LOST, ON, TERMINATED
from .samples import Part, Rows, Samples, join, records
from .spec import Spec
from .stages import Bound, Stage
from .windows import bounds_of

# What is after a row, in the array `end`: the same episode goes on, it was cut (the state after it has a value) or it
# terminated (nothing follows). LOST is a cut whose last observation can only be the row's own.


# Kernels: `row` is the row of the arrays; the row after the last is row 0, but that the last row of time is no ON.


def _after(row, end):  # type: ignore[no-untyped-def]
    return row + 1 if row + 1 < end.size else 0


def _steps(row, end, n):  # type: ignore[no-untyped-def]
    """How many rewards the return of a row sums: n, or those to the end of the episode."""
    steps = 1
    while steps < n and end[row] == 0:
        row = _after(row, end)
        steps += 1
    return steps


def _last(row, end, n):  # type: ignore[no-untyped-def]
    """The row of the last reward in the return of a row."""
    steps = 1
    while steps < n and end[row] == 0:
        row = _after(row, end)
        steps += 1
    return row


def _next(row, end, n):  # type: ignore[no-untyped-def]
    """The row of the observation after the return: the last row's own where there is none."""
    row = _last(row, end, n)
    return _after(row, end) if end[row] == 0 else row


def _next_or_final(row, end, n, finals):  # type: ignore[no-untyped-def]
    """The same where final observations lie behind the others, one for each row of `finals`."""
    row = _last(row, end, n)
    if end[row] == 0:
        return _after(row, end)
    if end[row] == 3:
        return row
    low, high = 0, finals.size
    while low < high:
        middle = (low + high) // 2
        if finals[middle] < row:
            low = middle + 1
        else:
            high = middle
    return end.size + low


def _bootstrap(row, end, n):  # type: ignore[no-untyped-def]
    """The row of the discount in the table 0, gamma, gamma ** 2, ...: 0 where the return ends in a termination."""
    steps = 1
    while steps < n and end[row] == 0:
        row = _after(row, end)
        steps += 1
    return 0 if end[row] == 2 else steps


def _since(row, end, n, seam):  # type: ignore[no-untyped-def]
    """The row of time: the oldest is row 0."""
    return row - seam if row >= seam else row - seam + end.size


def _steps_since(row, end, n, seam):  # type: ignore[no-untyped-def]
    return _steps(row, end, n)


def _missing(row, end, stack):  # type: ignore[no-untyped-def]
    """How many of the frames before a row are not of its episode."""
    missing = stack - 1
    before = row - 1 if row > 0 else end.size - 1
    while missing > 0 and end[before] == 0:
        missing -= 1
        before = before - 1 if before > 0 else end.size - 1
    return missing


def _stack(row, end, n, stack):  # type: ignore[no-untyped-def]
    return row - (stack - 1)


def _stack_low(row, end, n, stack):  # type: ignore[no-untyped-def]
    return _missing(row, end, stack)


def _next_stack(row, end, n, stack):  # type: ignore[no-untyped-def]
    return _next(row, end, n) - (stack - 1)


def _next_stack_low(row, end, n, stack):  # type: ignore[no-untyped-def]
    return _missing(_next(row, end, n), end, stack)


def _discounted(src, dst, key, powers):  # type: ignore[no-untyped-def]
    total = 0.0
    for k in range(powers.size):
        total += np.float64(src[k]) * powers[k]
    dst[0] = total


@overload
def transitions(ring: Ring, /, *, n: int = 1, gamma: float = 0.99, stack: int = 1, steps: bool = False) -> Live: ...


@overload
def transitions(
    *,
    obs: Any,
    action: Any,
    reward: Any,
    terminated: Any,
    truncated: Any = None,
    n: int = 1,
    gamma: float = 0.99,
    groups: Any = None,
    seam: int | None = None,
    next_obs: Any = None,
    stack: int = 1,
    steps: bool = False,
    **fields: Any,
) -> Dataset: ...


def transitions(
    ring: Ring | None = None,
    /,
    *,
    obs: Any = None,
    action: Any = None,
    reward: Any = None,
    terminated: Any = None,
    truncated: Any = None,
    n: int = 1,
    gamma: float = 0.99,
    groups: Any = None,
    seam: int | None = None,
    next_obs: Any = None,
    stack: int = 1,
    steps: bool = False,
    **fields: Any,
) -> Dataset | Live:
    """Map logs of steps, arrays of one length, to transitions: sample i is step i with its return over n steps.

    Given a ring that is still written (`jl.ring`), with fields of the names below, the transitions are those of the rows
    that are there whenever they are read, and no return or stack goes over its seam: for `jl.Replay` and `jl.Loader`.

    Fields: `obs`, `action`; `reward`, float32, the sum of gamma**k * reward[i + k] over k < m, kept in float64;
    `discount`, float32, gamma**m, or 0 where the return ends in a termination; `next_obs`, the observation after the m
    steps; those given as further `fields`; and with `steps` also m itself, int64. m is n, or fewer where the episode
    ends first. A target is reward + discount * value(next_obs).

    Parameters
    ----------
    obs : (rows, *shape), or several by name: fields obs_name and next_obs_name.
    terminated, truncated : flags a row: the episode ended with this step, and nothing, or something, was still to come.
    groups : series that do not follow each other, as in `jl.windows`: offsets, or a mark a row.
    seam : the row of the oldest step in a full ring (`jl.ring(...).seam`): row 0 then follows the last row.
    next_obs : the observations after each step (rows, *shape); or those after the last steps of episodes alone, a row
        for each row that is terminated or truncated, in their order.
    stack : observations are the last so many, (stack, *shape), the first of an episode repeated before its start.

    After a truncation, the end of a group, the newest row of a ring and the last row, the observation that followed is
    not among `obs`. A return that ends there reads it from `next_obs`; without, it bootstraps from the last observation
    there is, that of its own last step, which is one step stale: leave such rows out by `select` where that matters.
    What `next_obs` holds after a termination has no weight.

    Raises ValueError for arrays of other lengths, flags that are not 0 or 1, `n` below 1, `gamma` outside 0 .. 1.

    >>> import numpy as np, jitloader as jl
    >>> over = np.array([0, 0, 1, 0, 0], bool)
    >>> data = jl.transitions(obs=np.arange(5), action=np.zeros(5), reward=np.ones(5), terminated=over, n=2, gamma=0.5)
    >>> batch = data[:]
    >>> batch.reward.tolist(), batch.discount.tolist(), batch.next_obs.tolist()
    ([1.5, 1.5, 1.0, 1.5, 1.0], [0.25, 0.0, 0.0, 0.25, 0.5], [2, 2, 2, 4, 4])
    """
    n, stack = _whole("n", n), _whole("stack", stack)
    if ring is not None:
        if any(v is not None for v in (obs, action, reward, terminated, truncated, groups, seam, next_obs)) or fields:
            raise TypeError("transitions: a ring brings its fields: give n, gamma, stack and steps alone")
        return _live(ring, n, _gamma(gamma), stack, steps)
    for name, value in (("obs", obs), ("action", action), ("reward", reward), ("terminated", terminated)):
        if value is None:
            raise TypeError(f"transitions: {name} is missing")
    gamma = _gamma(gamma)
    seen = {f"obs_{k}": v for k, v in obs.items()} if isinstance(obs, Mapping) else {"obs": obs}
    sources = {name: _plain(array, name) for name, array in {**seen, "action": action, **fields}.items()}
    rewards = np.ascontiguousarray(reward)
    rows = len(rewards) if rewards.ndim else 0
    if rewards.ndim != 1 or rewards.dtype.kind not in "biuf" or not rows:
        raise ValueError(f"transitions: reward must be one number a row, got {rewards.dtype} {rewards.shape}")
    counts = {name: s.rows.count for name, s in sources.items()}
    wrong = {name: count for name, count in counts.items() if count != rows}
    if wrong:
        told = ", ".join(f"{k!r} has {c} rows" for k, c in wrong.items())
        raise ValueError(f"transitions: arrays differ in length: 'reward' has {rows} rows, {told}")
    over = _flags("terminated", terminated, rows)
    cut = np.zeros(rows, bool) if truncated is None else _flags("truncated", truncated, rows)
    oldest = _seam(seam, rows)
    end = _ends(over, cut, groups, oldest, rows)
    found = {name: _stacked(sources[name], end, n, stack) for name in seen}
    found["action"] = sources["action"]
    found["reward"] = _rewards(rewards, end, n, oldest)
    found["discount"] = _discounts(gamma, rows, end, n)
    for name, array in _given(next_obs, obs, seen).items():
        found[f"next_{name}"] = _following(name, sources[name], array, end, n, stack, over | cut)
    found.update({name: sources[name] for name in fields})
    if steps:
        found["steps"] = _looked_up(np.arange(n + 1, dtype=np.int64), rows, _steps, (end, n))
    return Dataset(found).map("reward", _return(gamma, n))


def _live(ring: Ring, n: int, gamma: float, stack: int, steps: bool) -> Live:
    """Give the transitions of a ring, by what it keeps beside its rows: what is after each, and rewards in one piece."""
    if not isinstance(ring, Ring):
        raise TypeError(f"transitions takes a ring (jl.ring) or arrays by name, got {type(ring).__name__}")
    given, rows = dict(ring.fields), ring.capacity
    seen = [name for name in given if name == "obs" or name.startswith("obs_")]
    missing = [name for name in ("action", "reward", "terminated") if name not in given]
    if missing or not seen:
        raise ValueError(f"transitions: the ring has no field {(missing or ['obs'])[0]!r}: there are {', '.join(given)}")
    for name in ("reward", "terminated", "truncated"):
        if name in given and (given[name].ndim != 1 or given[name].dtype.kind not in "biuf"):
            raise ValueError(f"transitions: {name} must be one number a row, got {given[name].dtype} {given[name].shape}")
    end = ring.ends("terminated", "truncated" if "truncated" in given else None)
    found = {name: _stacked(records(given[name], field=name), end, n, stack) for name in seen}
    found["action"] = records(given["action"], field="action")
    longer = _rewards(ring.longer("reward", n - 1), end, n, 0)
    found["reward"] = longer._replace(rows=Rows(rows))
    found["discount"] = _discounts(gamma, rows, end, n)
    for name in seen:
        base = records(given[name], field=name)
        found[f"next_{name}"] = _following(name, base, given.get(f"next_{name}"), end, n, stack, np.zeros(rows, bool))
    own = {*found, "terminated", "truncated"}
    found.update({name: records(array, field=name) for name, array in given.items() if name not in own})
    if steps:
        found["steps"] = _looked_up(np.arange(n + 1, dtype=np.int64), rows, _steps, (end, n))
    return Live(Dataset(found).map("reward", _return(gamma, n)), ring)


def episodes(*flags: Any, seam: int | None = None) -> np.ndarray:
    """Give the offsets of episodes, int64 from 0 to the number of rows, from flags that mark their last rows.

    `jl.windows(..., groups=jl.episodes(terminated, truncated))`; with `seam`, the row of the oldest step of a ring, no
    episode goes on there. Raises ValueError for flags of other lengths or that are not 0 or 1.

    >>> import jitloader as jl
    >>> jl.episodes([0, 0, 1, 0, 0], [0, 0, 0, 1, 0])
    array([0, 3, 4, 5])
    """
    if not flags:
        raise ValueError("episodes takes at least one array of flags")
    n = len(flags[0])
    last = np.zeros(n, bool)
    for k, values in enumerate(flags):
        last |= _flags(f"flags {k}", values, n)
    if seam is not None and n:
        last[_seam(seam, n) - 1] = True
    if n:
        last[-1] = True
    return np.concatenate([[0], np.flatnonzero(last) + 1]).astype(np.int64)


# -- what is given ----------------------------------------------------------------------------------------------------


def _whole(what: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"transitions: {what} must be a whole number of at least 1, got {value!r}")
    return int(value)


def _gamma(gamma: Any) -> float:
    if isinstance(gamma, (bool, np.bool_)) or not isinstance(gamma, (int, float, np.number)) or not 0 <= gamma <= 1:
        raise ValueError(f"transitions: gamma must be a number from 0 to 1, got {gamma!r}")
    return float(gamma)


def _seam(seam: Any, n: int) -> int:
    if seam is None:
        return 0
    if isinstance(seam, (bool, np.bool_)) or not isinstance(seam, (int, np.integer)) or not 0 <= seam <= n:
        raise ValueError(f"seam must be a row, 0 to {n}, got {seam!r}")
    return int(seam) % n


def _flags(name: str, values: Any, n: int) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (n,):
        raise ValueError(f"{name} has shape {array.shape}: give a flag for each of {n} rows")
    if array.dtype != bool:
        wrong = array[(array != 0) & (array != 1)]
        if wrong.size:
            raise ValueError(f"{name} must be flags, 0 or 1, got {wrong[0]}")
    return array.astype(bool)


def _plain(array: Any, name: str) -> Samples:
    found = array if isinstance(array, Samples) else records(array, field=name)
    if len(found.parts) != 1 or found.locate is not None or found.rows != Rows(found.parts[0].count):
        raise ValueError(f"transitions: {name!r} must be one plain array")
    return found


def _ends(over: np.ndarray, cut: np.ndarray, groups: Any, oldest: int, n: int) -> np.ndarray:
    """Give what is after each row."""
    end = np.zeros(n, np.uint8)
    if groups is not None:
        bounds = bounds_of(groups, n)
        last = bounds[1:][np.diff(bounds) > 0] - 1
        marks = np.asarray(groups)
        if oldest and marks.size == n and marks[0] == marks[-1]:
            last = last[last != n - 1]  # in a ring the group goes on at row 0
        end[last] = LOST
    end[cut] = CUT
    end[over] = TERMINATED
    if end[oldest - 1] == ON:  # the newest row
        end[oldest - 1] = LOST
    return end


def _given(next_obs: Any, obs: Any, seen: Mapping[str, Any]) -> dict[str, Any]:
    """Give the array of next observations of each field of observations, None where there is none."""
    if next_obs is None:
        return dict.fromkeys(seen)
    if isinstance(obs, Mapping) != isinstance(next_obs, Mapping) or (
        isinstance(obs, Mapping) and set(obs) != set(next_obs)
    ):
        raise ValueError("transitions: next_obs must be given as obs is: an array, or arrays by the same names")
    return {f"obs_{k}": next_obs[k] for k in obs} if isinstance(obs, Mapping) else {"obs": next_obs}


# -- fields -----------------------------------------------------------------------------------------------------------


def _stacked(base: Samples, end: np.ndarray, n: int, stack: int, following: bool = False) -> Samples:
    """Give the observations of rows, or of the rows that follow, each with those before it in its episode."""
    if stack == 1:
        return base._replace(locate=_next, params=(end, n)) if following else base
    part = base.parts[0]
    return base._replace(
        name="frames",
        shape=(stack, *base.shape),
        strides=(part.stride, *base.strides),
        locate=_next_stack if following else _stack,
        low=_next_stack_low if following else _stack_low,
        params=(end, n, stack),
        ring=True,
    )


def _following(
    name: str, base: Samples, given: Any, end: np.ndarray, n: int, stack: int, flagged: np.ndarray
) -> Samples:
    """Give the observations after the returns."""
    if given is None:
        return _stacked(base, end, n, stack, following=True)
    if stack > 1:
        raise ValueError("transitions: stack reads frames that lie one after the other: leave next_obs out")
    other = records(given, field=f"next_{name}")
    if other.spec != base.spec:
        raise ValueError(f"transitions: next_{name} has rows {other.spec}, {name} {base.spec}")
    rows, finals = len(end), np.flatnonzero(flagged)
    if other.rows.count == rows:
        return other._replace(locate=_last, params=(end, n))
    if other.rows.count != len(finals):
        raise ValueError(
            f"transitions: next_{name} has {other.rows.count} rows: give {rows}, one a step, or {len(finals)}, one "
            "for each row that is terminated or truncated"
        )
    joined = join([base, other], f"next_{name}")
    return joined._replace(rows=Rows(rows), locate=_next_or_final, params=(end, n, finals))


def _rewards(rewards: np.ndarray, end: np.ndarray, n: int, oldest: int) -> Samples:
    """Give the rewards that the return of each row sums: (n,), 0 after the end of its episode."""
    if oldest and n > 1:
        rewards = np.concatenate([rewards[oldest:], rewards[:oldest]])
    base = records(rewards, field="reward")
    return base._replace(
        name="rewards",
        shape=(n,),
        strides=(base.parts[0].stride,),
        locate=_since if oldest and n > 1 else None,
        high=_steps_since if n > 1 else None,
        params=(end, n, oldest) if n > 1 else (),
        fill=0.0,
    )


def _looked_up(table: np.ndarray, rows: int, locate: Any, params: tuple[Any, ...]) -> Samples:
    """Give numbers of a table, `locate` being the place in it."""
    part = Part(table, table, 0, 1, len(table))
    return Samples("table", (part,), table.dtype, table.dtype, (), (), Rows(rows), locate, params=params)


def _discounts(gamma: float, rows: int, end: np.ndarray, n: int) -> Samples:
    """Give gamma ** steps, or 0 after a termination: values kept beside the rows, a table and the place in it."""
    table = np.concatenate([[0.0], np.power(gamma, np.arange(1, n + 1))]).astype(np.float32)
    return _looked_up(table, rows, _bootstrap, (end, n))


def _return(gamma: float, n: int) -> Stage:
    powers = np.power(gamma, np.arange(n))

    def bind(spec: Spec) -> Bound:
        return Bound("sample", Spec(np.dtype(np.float32), ()), _discounted, (powers,))

    return Stage(f"return({n})", bind)
