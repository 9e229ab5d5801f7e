"""Folders that Hugging Face `datasets` saved (`save_to_disk`): Arrow shards mapped one after the other, by pyarrow alone."""

from __future__ import annotations

import functools
import json
import os
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jitloader.errors import DataError

from . import arrow
from .mapped import Array, Column, Fields, full_path, map_file

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_MAX_JSON = 1 << 26


def sniff(folder: Any) -> bool:
    """Whether a folder is one of these, a data set or a dict of its splits."""
    return any(os.path.isfile(os.path.join(os.fsdecode(folder), name)) for name in (_STATE, _SPLITS))


def fields(folder: Any) -> Fields:
    """The columns of all shards; an indices mapping, where the folder has one, picks the rows.

    Raises ImportError without pyarrow, and DataError for a folder of splits, for shards that differ, and as Arrow does.
    """
    path = full_path(folder)
    if not os.path.isfile(os.path.join(path, _STATE)):
        splits = _json(os.path.join(path, _SPLITS)).get("splits")
        found = ", ".join(map(repr, splits)) if isinstance(splits, list) else "none"
        raise DataError(f"{path}: a folder of splits, one data set expected: open one of {found}, as {path}/train")
    state = _json(os.path.join(path, _STATE))
    shards = _shards(path, state.get("_data_files"), "_data_files")
    features = _json(os.path.join(path, _INFO)).get("features") if os.path.isfile(os.path.join(path, _INFO)) else None
    joined: dict[str, list[Any]] = {}
    for number, (file, columns) in enumerate(shards):
        if number and list(columns) != list(joined):
            raise DataError(
                f"{file}: columns {', '.join(joined)} expected, as in the other shards, {', '.join(columns)} found"
            )
        for name, arrays in columns.items():
            joined.setdefault(name, []).extend(arrays)
    if not joined:
        raise DataError(f"{path}: a data set without columns: at least one expected, none found")
    indices = state.get("_indices_files") or state.get("_indices_data_files")
    rows: Array | None = None
    if indices:
        count = sum(len(array) for array, _ in next(iter(joined.values())))
        picked = [pair for _, columns in _shards(path, indices, "indices") for pair in columns.get("indices", [])]
        rows = row_table(picked, count, f"{path}, indices")
    return {
        name: functools.partial(_read, arrays, f"{path}, column {name}", _shape(features, name), rows)
        for name, arrays in joined.items()
    }


def _read(arrays: Sequence[Any], where: str, shape: Any, rows: Array | None) -> Array | Column:
    return picked(arrow.read(arrays, where, shape), rows)


def picked(found: Array | Column, rows: Array | None) -> Array | Column:
    """Give a column of which these rows are the samples."""
    if rows is None:
        return found
    return found._replace(rows=rows) if isinstance(found, Column) else Column((found,), None, rows)


def row_table(arrays: Sequence[Any], count: int, where: str) -> Array:
    """Give an indices mapping as checked row numbers, int64."""
    if not arrays:
        raise DataError(f"{where}: a column 'indices' expected, none found")
    found = arrow.read(arrays, where)
    table = np.concatenate(found.arrays) if isinstance(found, Column) else found
    if table.dtype.kind not in "iu" or table.ndim != 1 or (table.size and not 0 <= table.min() <= table.max() < count):
        raise DataError(f"{where}: row numbers below {count} expected, {table.dtype} {reprlib.repr(table)} found")
    return np.ascontiguousarray(table, np.int64)


def _shards(path: str, given: Any, what: str) -> list[tuple[str, dict[str, Any]]]:
    """Map the files that a list in the state names; they lie in the folder."""
    entries = given if isinstance(given, list) else []
    names: list[Any] = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(map(_plain, names)):
        raise DataError(f"{path}/{_STATE}: {what} with file names of this folder expected, {reprlib.repr(given)} found")
    files = [os.path.join(path, name) for name in names]
    return [(file, arrow.chunks(map_file(file))) for file in files]


def _plain(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _shape(features: Any, name: str) -> Any:
    """Give the shape of a row that a feature of the kind Array2D to Array5D has, None for others."""
    feature = features.get(name) if isinstance(features, dict) else None
    if not isinstance(feature, dict) or str(feature.get("_type")) not in ("Array2D", "Array3D", "Array4D", "Array5D"):
        return None
    shape: Any = feature.get("shape")
    whole = isinstance(shape, list) and shape and all(type(n) is int and n >= 0 for n in shape[1:])
    return shape if whole and (shape[0] is None or (type(shape[0]) is int and shape[0] >= 0)) else None


def _json(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        raw = file.read(min(os.fstat(file.fileno()).st_size, _MAX_JSON) + 1)
    try:
        found = json.loads(raw) if len(raw) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path}: a broken file of {len(raw)} bytes: a JSON object expected, {raw[:40]!r} found")
    return found
