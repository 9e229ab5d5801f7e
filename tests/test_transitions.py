"""Transitions against a plain twin: n-step returns, both kinds of end, rings, groups, final observations, frames."""

import re

import naive_access as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_access import interpreted

import jitloader as jl

many = settings(deadline=None, max_examples=200)


@st.composite
def logs(draw):
    """A log of steps with ends of both kinds, in a ring or not, in series or not."""
    rows = draw(st.integers(1, 14))
    flag = st.lists(st.sampled_from([False, False, True]), min_size=rows, max_size=rows)
    reward = draw(st.lists(st.integers(-8, 8), min_size=rows, max_size=rows))
    log = {
        "reward": (np.array(reward) / 4).astype(draw(st.sampled_from(["float32", "float64"]))),
        "terminated": np.array(draw(flag)),
        "truncated": np.array(draw(flag)),
    }
    if draw(st.booleans()):
        log["reward"] = np.array(reward, draw(st.sampled_from(["int8", "int64"])))
    seam = draw(st.one_of(st.none(), st.integers(0, rows)))
    groups = draw(st.sampled_from([None, "marks", "offsets"]))
    if groups == "marks":
        groups = np.array(draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))) + rows + 1
    elif groups == "offsets":
        groups = np.unique([0, *draw(st.lists(st.integers(0, rows), max_size=3)), rows])
    return log, seam, groups


def in_time(rows, seam, groups):
    """For each row the row after it in time and in its series, or None."""
    if groups is None:
        marks = [0] * rows
    elif len(groups) == rows and groups[0] > rows:
        marks = list(groups)
    else:
        # Offsets: the last row begins no series that goes on at row 0.
        marks = [int(np.searchsorted(groups, t, "right")) for t in range(rows)]
    oldest = (seam or 0) % rows
    follows = [None] * rows
    for t in range(rows):
        after = (t + 1) % rows
        joined = marks[t] == marks[after] and not (after == 0 and groups is not None and not groups[0] > rows)
        if after != oldest and joined:
            follows[t] = after
    return follows


@many
@given(logs(), st.integers(1, 5), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from(["none", "every", "final"]))
def test_transitions_equal_the_plain_twin(problem, n, gamma, kind):
    """Return, discount, steps and the next observation are those of the definition at every row."""
    log, seam, groups = problem
    rows = len(log["reward"])
    obs = np.stack([np.arange(rows), -np.arange(rows)], 1)
    flagged = np.flatnonzero(log["terminated"] | log["truncated"])
    every = obs + 1000
    given_next = {"none": None, "every": every, "final": every[flagged]}[kind]
    if kind == "final" and (not len(flagged) or len(flagged) == rows):
        given_next, kind = None, "none"
    data = jl.transitions(
        obs=obs, action=np.arange(rows), **log, n=n, gamma=gamma, groups=groups, seam=seam, next_obs=given_next,
        steps=True, extra=np.arange(rows) * 2,
    )  # fmt: skip
    assert data.fields == ("obs", "action", "reward", "discount", "next_obs", "extra", "steps")

    with interpreted():
        batch = data[:]

    follows = in_time(rows, seam, groups)
    for t in range(rows):
        total, discount, steps, last, goes_on = naive.transition(t, n, gamma, *log.values(), follows)
        assert batch.reward[t] == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert batch.discount[t] == np.float32(discount)
        assert batch.steps[t] == steps
        if kind == "every":
            row = every[last]
        elif goes_on:
            row = obs[follows[last]]
        elif kind == "final" and last in flagged:
            row = every[last]
        else:
            row = obs[last]
        np.testing.assert_array_equal(batch.next_obs[t], row)
    np.testing.assert_array_equal(batch.obs, obs)
    np.testing.assert_array_equal(batch.extra, batch.action * 2)
    assert batch.reward.dtype == batch.discount.dtype == np.float32


@many
@given(logs(), st.integers(1, 4), st.integers(2, 4), st.sampled_from([(), (2,)]))
def test_stacks_equal_the_plain_twin(problem, n, size, shape):
    """Frames come with those before them in their episode, the first repeated, round the ring too."""
    log, seam, groups = problem
    rows = len(log["reward"])
    obs = np.broadcast_to(np.arange(rows).reshape(rows, *(1 for _ in shape)), (rows, *shape)).copy()
    data = jl.transitions(obs=obs, action=obs, **log, n=n, groups=groups, seam=seam, stack=size)

    with interpreted():
        batch = data[:]

    follows = in_time(rows, seam, groups)
    over = log["terminated"] | log["truncated"]
    before = [None] * rows
    for t, after in enumerate(follows):
        if after is not None and not over[t]:
            before[after] = t
    for t in range(rows):
        *_, last, goes_on = naive.transition(t, n, 0.9, *log.values(), follows)
        np.testing.assert_array_equal(batch.obs[t], naive.stack(obs, t, size, before))
        row = follows[last] if goes_on else last
        np.testing.assert_array_equal(batch.next_obs[t], naive.stack(obs, row, size, before))


def a_log(rows, seed=0):
    """Steps of episodes of some twenty rows, ended one way or the other."""
    source = np.random.default_rng(seed)
    ends = source.random(rows) < 0.05
    over = ends & (source.random(rows) < 0.6)
    return {
        "obs": source.normal(size=(rows, 6)).astype("float32"),
        "action": source.integers(0, 4, rows),
        "reward": source.normal(size=rows).astype("float32"),
        "terminated": over,
        "truncated": ends & ~over,
    }


@pytest.mark.parametrize("n, seam", [(1, None), (5, 37)])
def test_compiled_batches_equal_the_plain_twin(n, seam):
    """Shuffled, in batches kept in a list, each row comes once and is the twin's; data[i] is the same sample."""
    log = a_log(200)
    data = jl.transitions(**log, n=n, seam=seam, i=np.arange(200))
    follows = in_time(200, seam, None)

    batches = list(jl.Loader(data, 32, shuffle=True))

    seen = np.concatenate([b.i for b in batches])
    assert sorted(seen.tolist()) == list(range(200))
    for batch in batches:
        for k, t in enumerate(batch.i.tolist()):
            total, discount, _, last, goes_on = naive.transition(
                t, n, 0.99, log["reward"], log["terminated"], log["truncated"], follows
            )
            assert batch.reward[k] == pytest.approx(total, rel=1e-5, abs=1e-6)
            assert batch.discount[k] == np.float32(discount)
            np.testing.assert_array_equal(batch.next_obs[k], log["obs"][follows[last] if goes_on else last])
    for name, value in data[36]._asdict().items():
        np.testing.assert_array_equal(value, getattr(data[:], name)[36])


def test_compiled_stacks_equal_interpreted_ones():
    """Frames compiled, through later stages, are those of plain Python."""
    log = a_log(60) | {"obs": np.arange(60 * 12).reshape(60, 4, 3).astype("uint8")}
    data = jl.transitions(**log, n=3, seam=11, stack=4).map(("obs", "next_obs"), jl.scale())

    compiled = data[:]
    with interpreted():
        plain = data[:]

    for a, b in zip(compiled, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    assert compiled.obs.shape == (60, 4, 4, 3)


def test_termination_and_truncation_differ():
    """After a termination nothing follows; after a truncation the final observation is worth gamma times its value."""
    given = {"obs": np.arange(3), "action": np.zeros(3), "reward": np.ones(3), "gamma": 0.5}
    flag = np.array([0, 1, 0])

    ended = jl.transitions(**given, terminated=flag)[1]
    cut = jl.transitions(**given, terminated=np.zeros(3), truncated=flag, next_obs=np.array([99]))[1]
    both = jl.transitions(**given, terminated=flag, truncated=flag)[1]

    assert (ended.reward, ended.discount) == (1.0, 0.0)
    assert (cut.reward, cut.discount, cut.next_obs) == (1.0, 0.5, 99)
    assert both.discount == 0.0


def test_returns_are_summed_in_float64():
    """A small reward among large ones that cancel is not lost."""
    reward = np.array([1e8, 0.125, -1e8], "float32")
    data = jl.transitions(obs=reward, action=reward, reward=reward, terminated=[0, 0, 1], n=3, gamma=1.0)

    assert data[0].reward == 0.125


def test_observations_by_name():
    """Several observations are as many fields, next ones too."""
    image, state = np.arange(8).reshape(4, 2), np.arange(4.0)
    data = jl.transitions(
        obs={"image": image, "state": state}, action=state, reward=state, terminated=[0, 0, 0, 1],
        next_obs={"state": state + 10, "image": image + 10},
    )  # fmt: skip

    assert data.fields == ("obs_image", "obs_state", "action", "reward", "discount", "next_obs_image", "next_obs_state")
    assert data[2].next_obs_image.tolist() == [14, 15]
    assert data[2].next_obs_state == 12


def test_a_ring_as_it_is_written():
    """The seam of a full ring parts the newest step from the oldest; of one that is filling, its rows end there."""
    ring = jl.ring(5, obs="int64", reward="float64", done="bool")
    for t in range(3):
        ring.append(obs=t, reward=1.0, done=False)
    filling = {k: v[: len(ring)] for k, v in ring.fields.items()}
    part = jl.transitions(
        obs=filling["obs"],
        action=filling["obs"],
        reward=filling["reward"],
        terminated=filling["done"],
        seam=ring.seam,
        n=2,
    )
    assert [part[t].next_obs for t in range(3)] == [2, 2, 2]
    for t in range(3, 8):
        ring.append(obs=t, reward=1.0, done=False)
    f = ring.fields
    full = jl.transitions(obs=f["obs"], action=f["obs"], reward=f["reward"], terminated=f["done"], seam=ring.seam, n=2)

    assert f["obs"].tolist() == [5, 6, 7, 3, 4]
    assert [full[t].next_obs for t in range(5)] == [7, 7, 7, 5, 6]


def test_transitions_are_rows_like_any_other():
    """Select, split by episode, ranks and resume act on them."""
    log = a_log(100)
    bounds = jl.episodes(log["terminated"], log["truncated"])
    number = np.searchsorted(bounds, np.arange(100), "right")
    data = jl.transitions(**log, n=3, i=np.arange(100))
    with interpreted():
        train, valid = data.split(0.7, 0.3, groups=number)
        assert not set(number[train[:].i]) & set(number[valid[:].i])
        assert len(train) + len(valid) == 100
        np.testing.assert_array_equal(data.select(~log["truncated"])[:].reward, data[:].reward[~log["truncated"]])
    shares = [[i for b in jl.Loader(data, 8, shuffle=True, rank=r, world_size=3) for i in b.i] for r in range(3)]
    assert sorted(sum(shares, [])) == list(range(100))

    whole = list(jl.Loader(data, 8, shuffle=True))
    loader = jl.Loader(data, 8, shuffle=True)
    batches = iter(loader)
    begun = [next(batches) for _ in range(5)]
    other = jl.Loader(data, 8, shuffle=True)
    other.load_state_dict(loader.state_dict())
    for a, b in zip(whole, [*begun, *other], strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_observations_are_not_stored_twice():
    """Next observations are read where observations lie: what is held beside the log is a byte a row."""
    log = a_log(10_000) | {"terminated": np.zeros(10_000, bool), "truncated": np.arange(10_000) % 50 == 49}
    data = jl.transitions(**log, n=3)
    own = {id(a): a for a in log.values()}
    held = {}
    for samples in data.sources.values():
        for array in [*(p.array for p in samples.parts), *(p for p in samples.params if isinstance(p, np.ndarray))]:
            if not any(np.shares_memory(array, a) for a in own.values()):
                held[id(array)] = array.nbytes

    assert sum(held.values()) < 10_100
    log["obs"][5] = 7
    assert (data[2].next_obs == 7).all()
    assert (data[5].obs == 7).all()


def test_episodes_end_with_their_flags():
    """Offsets of episodes from flags of any kind; the last episode may be open, and the seam of a ring ends one."""
    assert jl.episodes(np.array([0, 1, 0, 0])).tolist() == [0, 2, 4]
    assert jl.episodes([False, True, False, True], np.array([1.0, 0, 0, 0])).tolist() == [0, 1, 2, 4]
    assert jl.episodes(np.zeros(4, bool), seam=3).tolist() == [0, 3, 4]
    assert jl.episodes(np.zeros(0, bool)).tolist() == [0]


GOOD = {"obs": np.zeros((4, 2)), "action": np.zeros(4), "reward": np.zeros(4), "terminated": np.zeros(4, bool)}


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"reward": np.zeros(5)}, "'reward' has 5 rows, 'obs' has 4 rows, 'action' has 4 rows"),
        ({"action": np.zeros(3)}, "arrays differ in length: 'reward' has 4 rows, 'action' has 3 rows"),
        ({"obs": np.zeros((3, 2)), "x": np.zeros(2)}, "'obs' has 3 rows, 'x' has 2 rows"),
        ({"reward": np.zeros((4, 1))}, "reward must be one number a row, got float64 (4, 1)"),
        ({"reward": np.array(["a"] * 4)}, "reward must be one number a row"),
        ({"truncated": np.zeros(3)}, "truncated has shape (3,): give a flag for each of 4 rows"),
        ({"terminated": [0, 1, 2, 0]}, "terminated must be flags, 0 or 1, got 2"),
        ({"terminated": [0, 1, np.nan, 0]}, "terminated must be flags, 0 or 1, got nan"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"n": 1.5}, "n must be a whole number of at least 1, got 1.5"),
        ({"stack": 0}, "stack must be a whole number of at least 1, got 0"),
        ({"gamma": 1.01}, "gamma must be a number from 0 to 1, got 1.01"),
        ({"gamma": np.nan}, "gamma must be a number from 0 to 1, got nan"),
        ({"seam": 5}, "seam must be a row, 0 to 4, got 5"),
        ({"groups": [0, 5]}, "groups has 2 entries: give a mark for each of 4 rows"),
        ({"next_obs": np.zeros((2, 2))}, "next_obs has 2 rows: give 4, one a step, or 0, one for each row that is"),
        ({"next_obs": np.zeros((4, 3))}, "next_obs has rows float64 (3,), obs float64 (2,)"),
        ({"next_obs": np.zeros((4, 2)), "stack": 2}, "stack reads frames that lie one after the other"),
        ({"next_obs": {"a": np.zeros((4, 2))}}, "next_obs must be given as obs is"),
        ({"obs": jl.ragged(np.arange(4), [0, 1, 2, 3, 4])}, "'obs' must be one plain array"),
    ],
)
def test_bad_input_of_transitions(changed, words):
    """Each mistake is one short ValueError that says what came and what is taken."""
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        jl.transitions(**(GOOD | changed))
    assert "\n" not in str(caught.value)


def test_episodes_want_flags():
    """No flags, or flags of other lengths, are refused."""
    with pytest.raises(ValueError, match="at least one"):
        jl.episodes()
    with pytest.raises(ValueError, match=re.escape("flags 1 has shape (3,): give a flag for each of 4 rows")):
        jl.episodes(np.zeros(4), np.zeros(3))
