"""What other libraries make of the workloads of test_access: each its own loader or buffer, where it is installed.

`pip install stable-baselines3 torchrl pytorch-forecasting`. They run in this process, without workers, over fewer rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from interleave import Way

BATCHES = 40  # of a buffer that draws with replacement: a round


def quiet(make: Callable[..., Way]) -> Callable[..., Way]:
    """Let a library warn in peace, as it is made and as it runs: its warnings are not ours."""

    @functools.wraps(make)
    def made(*given: Any) -> Way:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            way = make(*given)

        def run() -> Iterator[Any]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield from way.run()

        return Way(run, way.rows)

    return made


@quiet
def sb3(
    obs: np.ndarray, action: np.ndarray, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray,
    steps: int, gamma: float, batch: int,
) -> Way:  # fmt: skip
    """Stable-Baselines3's n-step buffer; its arrays are filled at once, `add` would take a minute."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import NStepReplayBuffer

    n = len(obs)
    box = [spaces.Box(-np.inf, np.inf, a.shape[1:], np.float32) for a in (obs, action)]
    buffer = NStepReplayBuffer(n, *box, n_steps=steps, gamma=gamma)
    buffer.observations[:, 0], buffer.actions[:, 0], buffer.rewards[:, 0] = obs, action, reward
    buffer.next_observations[:-1, 0] = obs[1:]
    buffer.dones[:, 0], buffer.timeouts[:, 0] = terminated | truncated, truncated
    buffer.full = True
    got = buffer._get_samples(np.arange(n - 50))  # those before the end
    plain, discount = np.zeros(n - 50), gamma ** np.arange(steps)
    alive = np.ones(n - 50)
    for k in range(steps):
        plain += discount[k] * alive * reward[k : n - 50 + k]
        alive *= ~(terminated | truncated)[k : n - 50 + k]
    np.testing.assert_allclose(got.rewards.numpy()[:, 0], plain, rtol=1e-3, atol=1e-4)

    def run() -> Iterator[Any]:
        for _ in range(BATCHES):
            yield buffer.sample(batch)

    return Way(run, BATCHES * batch)


@quiet
def torchrl(fields: dict[str, np.ndarray], ends: np.ndarray, length: int, slices: int) -> Way:
    """TorchRL's buffer with a slice sampler, over a TensorDict of the same arrays."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    n = len(ends)
    rows = {name: torch.from_numpy(a) for name, a in fields.items()}
    table = TensorDict({**rows, "number": torch.arange(n), "end": torch.from_numpy(ends)}, [n])
    sampler = SliceSampler(slice_len=length, end_key="end", cache_values=True, strict_length=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler, batch_size=slices * length)
    buffer.extend(table)
    numbers = buffer.sample()["number"].reshape(slices, length).numpy()
    assert (np.diff(numbers, axis=1) == 1).all()

    def run() -> Iterator[Any]:
        for _ in range(BATCHES):
            yield buffer.sample()

    return Way(run, BATCHES * slices)


@quiet
def forecasting(series: np.ndarray, past: int, following: int, batch: int, some: int) -> Way:
    """pytorch-forecasting's TimeSeriesDataSet and its own DataLoader, over the first rows."""
    import pandas
    from pytorch_forecasting import MultiNormalizer, TimeSeriesDataSet
    from pytorch_forecasting.data.encoders import TorchNormalizer

    rows = series[: some + past + following - 1]
    names = [f"c{k}" for k in range(rows.shape[1])]
    frame = pandas.DataFrame(rows, columns=names)
    frame["time"], frame["group"] = np.arange(len(rows)), "all"
    data = TimeSeriesDataSet(
        frame, "time", names, ["group"], max_encoder_length=past, min_encoder_length=past,
        max_prediction_length=following, min_prediction_length=following, time_varying_unknown_reals=names,
        target_normalizer=MultiNormalizer([TorchNormalizer("identity") for _ in names]), 
    )  # fmt: skip
    assert len(data) == some
    x, (y, _) = next(iter(data.to_dataloader(train=False, batch_size=batch)))
    np.testing.assert_allclose(x["encoder_cont"][5].numpy(), rows[5 : 5 + past], rtol=1e-5)
    np.testing.assert_allclose(y[1][5].numpy(), rows[5 + past : 5 + past + following, 1], rtol=1e-5)
    loader = data.to_dataloader(train=True, batch_size=batch)
    return Way(lambda: loader, some // batch * batch)
