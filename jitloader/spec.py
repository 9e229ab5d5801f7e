"""The type of a value on its way through a pipeline: a dtype and a shape."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Spec(NamedTuple):
    """What one sample of a field is: its dtype and its shape, `None` where an axis varies from row to row.

    >>> Spec(np.dtype("uint8"), (32, 32, 3))
    uint8 (32, 32, 3)
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]

    def __repr__(self) -> str:
        axes = ["?" if n is None else str(n) for n in self.shape]
        return f"{self.dtype} ({axes[0]},)" if len(axes) == 1 else f"{self.dtype} ({', '.join(axes)})"

    @property
    def ragged(self) -> bool:
        """Whether some axis varies from row to row."""
        return None in self.shape

    @property
    def size(self) -> int:
        """Elements in one sample (0 for a ragged one, which has no fixed size)."""
        size = 1
        for n in self.shape:
            size *= n or 0
        return size

    @property
    def nbytes(self) -> int:
        """Bytes in one sample."""
        return self.size * self.dtype.itemsize
