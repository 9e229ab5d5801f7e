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
    else RANK and WORLD_SIZE of the environment, else 0 and 1. Imports nothing.

    Raises ValueError where two of these say different things: each process would read other rows than it should.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size together, got rank={rank} and world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _detect_rank()
    rank, world_size = whole_number("rank", rank, 0), whole_number("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(f"rank {rank} is not below world_size {world_size}")
    return rank, world_size


def _detect_rank() -> tuple[int, int]:
    told = {who: found for who, ask in SOURCES.items() if (found := ask()) is not None}
    if not told:
        return 0, 1
    (first, found), *others = told.items()
    for other, says in others:
        if says != found:
            raise ValueError(
                f"{first} says rank {found[0]} of {found[1]}, {other} rank {says[0]} of {says[1]}: "
                "give rank= and world_size="
            )
    return found


def _torch_rank() -> tuple[int, int] | None:
    torch = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return None
    return torch.get_rank(), torch.get_world_size()


def _ray_rank() -> tuple[int, int] | None:
    ray = sys.modules.get("ray.train")
    if ray is None:
        return None
    try:
        context = ray.get_context()
        return int(context.get_world_rank()), int(context.get_world_size())
    except Exception:  # outside of a worker; which error depends on the version
        return None


def _jax_rank() -> tuple[int, int] | None:
    jax = sys.modules.get("jax")
    distributed = getattr(jax, "distributed", None)
    if jax is None or not getattr(distributed, "is_initialized", lambda: False)():
        return None
    return int(jax.process_index()), int(jax.process_count())


def _environment_rank() -> tuple[int, int] | None:
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if given[0] is None or given[1] is None:
        return None
    try:
        return int(given[0]), int(given[1])
    except ValueError:
        raise ValueError(
            f"RANK={given[0]!r} and WORLD_SIZE={given[1]!r} in the environment must be whole numbers"
        ) from None


SOURCES = {
    "torch.distributed": _torch_rank,
    "Ray Train": _ray_rank,
    "JAX": _jax_rank,
    "the environment (RANK, WORLD_SIZE)": _environment_rank,
}
