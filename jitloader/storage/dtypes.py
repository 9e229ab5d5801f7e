"""Dtypes that NumPy has no name for: bfloat16 and the eight-bit floats, from ml_dtypes where it is installed."""

from __future__ import annotations

import importlib
import warnings

import numpy as np

from .mapped import DType

# The bits of each, for files and for machines without ml_dtypes.
BITS: dict[str, DType] = {
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "float8_e4m3fnuz": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
    "float8_e5m2fnuz": np.dtype("u1"),
}


def extra_dtype(name: str, where: str) -> DType:
    """The dtype called `name` in ml_dtypes; where that is missing, unsigned integers of its bits and a UserWarning."""
    try:
        found: DType = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        return found
    except (ImportError, AttributeError):
        message = f"{where}: {name} needs ml_dtypes (pip install ml_dtypes); its bits are given as {BITS[name]}"
        warnings.warn(message, UserWarning, stacklevel=3)
        return BITS[name]


def extra_name(dtype: DType) -> str | None:
    """The name of an ml_dtypes dtype that files can hold, else None."""
    return dtype.name if dtype.type.__module__.startswith("ml_dtypes") and dtype.name in BITS else None
