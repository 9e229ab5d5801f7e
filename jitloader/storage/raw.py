"""Raw files: numbers without a header, so the dtype and the shape of a row come from the user."""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from jitloader.errors import DataError

from .mapped import Array, Path, check_dtype, check_shape, full_path, map_file, view

_MAGICS = {b"\x93NUMPY": ".npy", b"\x89HDF\r\n\x1a\n": "HDF5", b"ARROW1": "Arrow"}


def open_raw(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None, offset: int = 0) -> Array:
    """Map the rows of `dtype` and `shape` that follow byte `offset`: (rows, *shape).

    Raises DataError where what follows is not a whole number of rows, and for a file that carries its own dtype.
    """
    path = full_path(path)
    row = check_shape(() if shape is None else shape, path)
    kind = check_dtype(np.dtype(dtype), path)
    step = math.prod(row) * kind.itemsize
    if step == 0 or type(offset) is not int or offset < 0:
        raise DataError(f"{path}: rows of at least one byte from a byte >= 0 on expected, got {row} from {offset!r}")
    if os.path.isfile(path) and os.path.getsize(path) == 0 == offset:
        empty = np.empty((0, *row), kind)  # no bytes, no map
        empty.flags.writeable = False
        return empty
    mapped = map_file(path)
    for magic, name in _MAGICS.items():
        if offset == 0 and mapped[: len(magic)] == magic:
            raise DataError(f"{path}: {name}, not a raw file: it carries its own dtype; leave dtype out")
    if offset > len(mapped):
        raise DataError(f"{path}: offset {offset} is beyond the file: {len(mapped)} bytes found")
    rows, rest = divmod(len(mapped) - offset, step)
    if rest:
        raise DataError(
            f"{path}: whole rows of {step} bytes ({kind} {row}) from byte {offset} on expected, "
            f"{len(mapped)} bytes found: {rest} too many"
        )
    return view(mapped, kind, (rows, *row), offset, path)
