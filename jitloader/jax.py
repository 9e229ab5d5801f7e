"""The door to JAX: batches as jax.Arrays on one device, or parted over several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

try:
    import jax
except ImportError as problem:
    raise ImportError("jitloader.jax needs JAX: pip install jax") from problem

from .loader import Loader


class Arrays:
    """A Loader whose batches are NamedTuples of jax.Arrays; see `arrays`."""

    def __init__(self, loader: Loader, device: Any, sharding: Any) -> None:
        self.loader, self.device, self.sharding = loader, device, sharding

    def __iter__(self) -> Iterator[Any]:
        return map(self._put, iter(self.loader))

    def _put(self, value: Any, name: str = "batch") -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._put(v, n) for n, v in zip(value._fields, value, strict=True)))
        if isinstance(value, (tuple, list)):
            return type(value)(self._put(v, name) for v in value)
        if isinstance(value, Mapping):
            return {n: self._put(v, n) for n, v in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        _check_range(value, name)
        if self.sharding is None and self.device is None:
            return jax.numpy.asarray(value)  # 40 us an array, device_put 60
        if self.sharding is None:
            return jax.device_put(value, self.device)
        parts = self.sharding.num_devices // jax.process_count()
        if len(value) % parts:
            raise ValueError(
                f"a batch of {len(value)} rows does not part evenly over {parts} devices: use a batch_size that does, "
                "and drop_last=True"
            )
        return jax.make_array_from_process_local_data(self.sharding, value)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Give where the user is, as `Loader.state_dict` does."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, as `Loader.load_state_dict` does."""
        self.loader.load_state_dict(state)


def _check_range(array: np.ndarray, name: str) -> None:
    """Refuse 64-bit integers that JAX, which has 32 bits unless told otherwise, would cut off without a word."""
    if array.dtype.itemsize != 8 or array.dtype.kind not in "iu" or not array.size or jax.config.jax_enable_x64:
        return
    limits = np.iinfo(np.int32 if array.dtype.kind == "i" else np.uint32)
    low, high = int(array.min()), int(array.max())
    if low < limits.min or high > limits.max:
        raise OverflowError(
            f"field {name!r} holds {low if low < limits.min else high}, and JAX keeps 32 bits of it: "
            "jax.config.update('jax_enable_x64', True), or link jl.cast"
        )


def arrays(loader: Loader, device: Any = None, sharding: Any = None) -> Arrays:
    """Give a loader whose batches are NamedTuples of jax.Arrays, (batch, *shape) each, on a device or parted by a sharding.

    With JAX's defaults 64-bit dtypes arrive as 32-bit ones; integers that do not fit are an OverflowError naming the
    field. On the CPU JAX may lie over the batch's own memory: it is not used again while any array over it lives, and
    on other devices not before the copy is over, for JAX refers to it until then. The next batches are filled meanwhile.

    device : where to put them; JAX's default where left out.
    sharding : a `NamedSharding` (or any other) over the first axis, for several devices. Over several processes each
        gives the rows of its own loader, whose rank is the process index, and the arrays are global ones.

    Raises ValueError for a batch that does not part evenly over the devices, TypeError for a field that JAX cannot hold.

    >>> import numpy as np, jitloader as jl, jitloader.jax
    >>> loader = jl.Loader(jl.Dataset(x=np.arange(6.0)), 4)
    >>> [float(batch.x.sum()) for batch in jl.jax.arrays(loader)]
    [6.0, 9.0]
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"arrays takes a jl.Loader, got {type(loader).__name__}")
    if device is not None and sharding is not None:
        raise ValueError("give device or sharding, not both")
    if not loader.data.applies:
        for name, spec in loader.data.spec.items():
            if spec.dtype.kind in "mMSUV" and spec.dtype.name != "bfloat16":
                raise TypeError(
                    f"field {name!r} is {spec.dtype}, which JAX cannot hold: leave it out: data.drop({name!r})"
                )
    return Arrays(loader, device, sharding)
