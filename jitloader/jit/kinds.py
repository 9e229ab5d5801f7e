"""The types of kernel arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

INT = "int64"


FLOAT = "float64"


class Array(NamedTuple):
    """The type of an array argument: C-contiguous, of this dtype and number of dimensions; one that is not `aligned` may
    begin at any byte."""

    dtype: str
    ndim: int
    aligned: bool = True


Type = str | Array  # INT, FLOAT, or an Array


def typeof(value: Any) -> Type:
    """Give the kernel type of an argument: int64 for bools and integers, float64 for floats, Array for arrays."""
    if isinstance(value, np.ndarray):
        return Array(value.dtype.name, value.ndim, bool(value.flags.aligned))
    return FLOAT if isinstance(value, (float, np.floating)) else INT
