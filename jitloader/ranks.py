"""Which rank of how many this process is: as given, else as a framework that is running or the environment says."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, low: int | None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return int(value)


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Give rank and world size: as given, else those of torch.distributed, Ray Train or JAX where one is initialised,
    else RANK and WORLD_SIZE of the environment, else 0 and 1. Imports nothing."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size together, got rank={rank} and world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _detect_rank()
    rank, world_size = whole_number("rank", rank, 0), whole_number("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(f"rank {rank} is not below world_size {world_size}")
    return rank, world_size


def _detect_rank() -> tuple[int, int]:
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return torch.get_rank(), torch.get_world_size()
    ray = sys.modules.get("ray.train")
    if ray is not None:
        try:
            context = ray.get_context()
            return int(context.get_world_rank()), int(context.get_world_size())
        except Exception:  # outside of a worker; which error depends on the version
            pass
    jax = sys.modules.get("jax")
    if jax is not None and getattr(getattr(jax, "distributed", None), "is_initialized", lambda: False)():
        return int(jax.process_index()), int(jax.process_count())
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if given[0] is not None and given[1] is not None:
        try:
            return int(given[0]), int(given[1])
        except ValueError:
            raise ValueError(
                f"RANK={given[0]!r} and WORLD_SIZE={given[1]!r} in the environment must be whole numbers"
            ) from None
    return 0, 1
