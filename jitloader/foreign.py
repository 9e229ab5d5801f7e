"""Arrays of other libraries as NumPy arrays over the same memory: array interface, DLPack, torch, JAX."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

_HOST = (1, 3)  # kinds of memory in DLPack that the processor reads: its own, and CUDA's pinned


def as_array(value: Any, field: str) -> np.ndarray:
    """Give a list or another library's array as an array, or refuse what is neither.

    What has `__array_interface__`, `__array__` or DLPack, and torch's and JAX's arrays, come without copying where they
    lie in the processor's memory; what lies on a device is refused. Lists are laid out once.
    """
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "requires_grad"):
        return _of_torch(value, field)
    if hasattr(value, "__dlpack_device__") and not isinstance(value, np.ndarray):
        kind = value.__dlpack_device__()[0]
        if int(kind) not in _HOST:
            raise TypeError(f"field {field!r} lies in a device's memory ({kind!r}): copy it to the host first")
    try:
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.hasobject and hasattr(value, "__dlpack__"):
            array = np.from_dlpack(value)
    except (ValueError, TypeError, RuntimeError, BufferError):
        if isinstance(value, (list, tuple)):
            raise ValueError(f"field {field!r}: rows differ in length: give jl.ragged(rows)") from None
        raise TypeError(f"field {field!r} is of type {type(value).__name__}: give an array") from None
    if array.ndim == 0 and array.dtype.hasobject:
        what = "None" if value is None else f"of type {type(value).__name__}"
        raise TypeError(f"field {field!r} is {what}: give an array")
    return array


def _of_torch(value: Any, field: str) -> np.ndarray:
    """Give a tensor's memory; one that gradients flow through is detached, which copies nothing."""
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"field {field!r} is of type {type(value).__name__}: give an array")
    if value.layout != torch.strided:
        raise TypeError(f"field {field!r} is a tensor of layout {value.layout}: give tensor.to_dense()")
    if value.device.type != "cpu":
        raise TypeError(f"field {field!r} is a tensor on {value.device}: give tensor.cpu()")
    if value.is_conj() or value.is_neg():
        raise TypeError(
            f"field {field!r} is a tensor seen conjugated or negated: give tensor.resolve_conj().resolve_neg()"
        )
    value = value.detach()
    try:
        return value.numpy()
    except (TypeError, RuntimeError):
        name = str(value.dtype).removeprefix("torch.")
        bits = {1: torch.uint8, 2: torch.int16}.get(value.element_size())
        if bits is None or not value.dtype.is_floating_point:
            raise TypeError(
                f"field {field!r} is a tensor of {value.dtype}, which NumPy has not: cast it first"
            ) from None
    try:
        kind = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise ImportError(
            f"field {field!r} is a tensor of {name}, which needs ml_dtypes: pip install 'jitloader[bfloat16]'"
        ) from None
    return value.view(bits).numpy().view(kind)
