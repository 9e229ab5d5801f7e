"""Columns of frames and tables as fields: pandas, polars, Arrow, Hugging Face `datasets`, structured arrays, by reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import storage
from .errors import DataError
from .ragged import ragged
from .samples import Part, Rows, Samples, join, records


def columns(value: Any) -> dict[str, Any] | None:
    """Give the columns of a frame, a table or a structured array by name, None for what is none of these.

    Nothing is copied where a column is one block of numbers, or Arrow buffers of them; booleans that Arrow holds as bits
    are unpacked. Raises DataError for nulls and TypeError for Python objects, naming the column.
    """
    if isinstance(value, np.ndarray):
        names = value.dtype.names
        return None if names is None else {name: value[name] for name in names}
    if _is(value, "pandas", "DataFrame"):
        names = _unique(list(value.columns))
        return {name: _of_pandas(value.iloc[:, k], name) for k, name in enumerate(names)}
    if _is(value, "datasets", "Dataset"):
        return _of_datasets(value)
    if _is(value, "datasets", "DatasetDict"):
        raise TypeError(f"a dict of splits ({', '.join(value)}): give one of them, as Dataset(splits['train'])")
    if _is(value, "datasets", "IterableDataset"):
        raise TypeError("an IterableDataset has no rows: give a datasets.Dataset")
    if hasattr(value, "collect_schema") and hasattr(value, "collect"):
        raise TypeError("a lazy frame has no rows yet: give frame.collect()")
    if hasattr(value, "columns") and (hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")):
        table = storage.need("pyarrow", "arrow", f"reading a {type(value).__name__}").table(value)
        names = _unique(table.column_names)
        return {name: _of_arrow(table.column(k), name) for k, name in enumerate(names)}
    return None


def samples_of(value: Any, field: str) -> Samples:
    """Give what a field was given as samples: an access pattern as it is, a column, or an array row by row."""
    if isinstance(value, Samples):
        return value
    value = storage.placed(value, field)
    if not isinstance(value, (np.ndarray, storage.Column)):
        if _is(value, "pandas", "Series"):
            value = _of_pandas(value, field)
        elif _is(value, "pandas", "Index") or _is(value, "pandas", "api.extensions.ExtensionArray"):
            value = _of_pandas(sys.modules["pandas"].Series(value, copy=False), field)  # its mask is nulls there too
        elif columns(value) is not None:
            raise TypeError(f"field {field!r} is a frame of several columns: give it alone, as Dataset(frame)")
        elif hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__"):
            pa = storage.need("pyarrow", "arrow", f"field {field!r}: reading a {type(value).__name__}")
            whole = hasattr(value, "__arrow_c_stream__")
            value = _of_arrow(pa.chunked_array(value if whole else [pa.array(value)]), field)
    if not isinstance(value, storage.Column):
        return records(value, field=field)
    found = _joined(value.arrays, field)
    if value.offsets is not None:
        found = ragged(found, value.offsets, field=field)
    if value.rows is not None:
        found = found._replace(rows=found.rows.pick(value.rows))
    return found


def _joined(arrays: Sequence[np.ndarray], field: str) -> Samples:
    """Give arrays as the records of one field. There may be thousands: those like the first cost 2 us each, not 30."""
    first = records(arrays[0], field=field)
    dtype, inner = arrays[0].dtype, arrays[0].shape[1:]
    if first.carrier != dtype or not all(
        a.dtype == dtype and a.shape[1:] == inner and a.flags.c_contiguous for a in arrays
    ):
        return join([records(array, field=field) for array in arrays], field)
    stride = first.parts[0].stride
    parts = tuple(Part(a, a.reshape(-1), 0, stride, len(a)) for a in arrays)
    return first._replace(parts=parts, rows=Rows(sum(map(len, arrays))))


def _is(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a class of a package, which is not imported for that."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _unique(names: list[Any]) -> list[Any]:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"a field name is a string, got the column {name!r}: rename it, as by frame.columns = names"
            )
        if names.count(name) > 1:
            raise ValueError(f"two columns are called {name!r}: rename one")
    return names


def _of_pandas(series: Any, name: str) -> Any:
    """Give a column of pandas: its block, or the buffers of one that Arrow holds."""
    kind = series.dtype
    if isinstance(kind, np.dtype):
        return series.to_numpy(copy=False)
    if hasattr(kind, "pyarrow_dtype"):
        return _of_arrow(series.array.__arrow_array__(), name)
    if isinstance(getattr(kind, "numpy_dtype", None), np.dtype):
        nulls = int(series.isna().sum())
        if nulls:
            raise DataError(f"column {name!r}: {nulls} nulls found, none expected; fill them (fillna)")
        return series.to_numpy(dtype=kind.numpy_dtype, copy=False)
    remedy = "leave it out by frame.drop(columns=...), or give codes (.astype('category').cat.codes)"
    if hasattr(kind, "tz"):
        remedy = "give .dt.tz_convert(None)"
    if hasattr(kind, "fill_value"):
        remedy = "give .sparse.to_dense()"
    raise TypeError(f"column {name!r} is of pandas' {kind}, which is no dtype of NumPy: {remedy}")


def _of_arrow(column: Any, name: str) -> Any:
    """Give a column of Arrow: views of its buffers."""
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    if not chunks:
        chunks = (
            column.combine_chunks().chunks if hasattr(column.combine_chunks(), "chunks") else [column.combine_chunks()]
        )
    from .storage import arrow

    return arrow.read([(chunk, arrow.in_memory) for chunk in chunks], f"column {name!r}", copies=True)


def _of_datasets(value: Any) -> dict[str, Any]:
    """Give the columns of a `datasets.Dataset`, at the rows that were selected."""
    table, indices = value.data.table, value._indices
    found = {name: _of_arrow(table.column(name), name) for name in table.column_names}
    if indices is None:
        return found
    from .storage import arrow, huggingface

    picked = [(chunk, arrow.in_memory) for chunk in indices.table.column(0).chunks]
    rows = huggingface.row_table(picked, table.num_rows, "indices")
    return {name: huggingface.picked(column, rows) for name, column in found.items()}
