"""CIFAR-10 and CIFAR-100, binary version: records of one or two label bytes and a (3, 32, 32) image."""

from __future__ import annotations

import functools
import os
import re

import numpy as np

from jitloader.errors import DataError

from .mapped import Fields, Map

SUFFIXES = ()
_IMAGE = 3 * 32 * 32
_LIMITS = {3073: (10,), 3074: (20, 100)}  # bytes of a record: its labels are below these
_NAMES = {r"(data_batch_\d+|test_batch)\.bin": 3073, r"(train|test)\.bin": 3074}


def sniff(head: bytes, path: str) -> bool:
    """Whether a file has a name of the data set and labels in range; the format has no mark of its own.

    The labels matter: train.bin is also what token files are called.
    """
    return _record(head, path) is not None


def fields(mapped: Map) -> Fields:
    """`label`, or `coarse` and `fine`: (n,) uint8; `image`: (n, 3, 32, 32) uint8. Strided views of the records."""
    record = _record(mapped[:65536], mapped.path)
    if record is None:
        raise DataError(f"{mapped.path}: CIFAR records of 3073 or 3074 bytes expected, {len(mapped)} bytes found")
    rows, rest = divmod(len(mapped), record)
    if rest:
        raise DataError(f"{mapped.path}: whole records of {record} bytes expected, {len(mapped)} bytes found")
    labels = ["label"] if record == 3073 else ["coarse", "fine"]
    layout = np.dtype([*((name, "u1") for name in labels), ("image", "u1", (3, 32, 32))])
    records = np.ndarray((rows,), layout, buffer=mapped)
    return {name: functools.partial(records.__getitem__, name) for name in [*labels, "image"]}


def _record(head: bytes, path: str) -> int | None:
    """Bytes of a record, by name and by labels in range."""
    name = os.path.basename(path)
    for pattern, record in _NAMES.items():
        if re.fullmatch(pattern, name):
            labels = zip(*(head[i::record] for i in range(len(_LIMITS[record]))), strict=False)
            if all(value < limit for row in labels for value, limit in zip(row, _LIMITS[record], strict=True)):
                return record
    return None
