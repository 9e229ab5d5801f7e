"""Arrow IPC files, streams and Feather through pyarrow: columns of plain numbers, mapped."""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

from jitloader.errors import DataError

from .mapped import Array, DType, Fields, Map, check_shape, need, view

SUFFIXES = (".arrow", ".feather", ".ipc")
_FILE = b"ARROW1\0\0"
_STREAM = b"\xff\xff\xff\xff"
_ONE_BATCH = "write one record batch: write_feather(table, path, compression='uncompressed', chunksize=len(table))"


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like an Arrow IPC file, or like a stream that is named so."""
    return head.startswith(_FILE) or (head.startswith(_STREAM) and path.endswith(SUFFIXES))


def fields(mapped: Map) -> Fields:
    """The columns of the one record batch of a file: (rows,), or (rows, size, ...) for fixed-size lists.

    Raises ImportError without pyarrow, DataError for a broken file, several record batches and compressed ones; asking
    for a column with nulls, of strings, booleans (bits) or lists of free length raises DataError.
    """
    pa = need("pyarrow", "arrow", f"{mapped.path}: reading Arrow")
    path = mapped.path
    is_file = mapped[:8] == _FILE
    source = pa.py_buffer(mapped)
    base = source.address
    try:
        # Ask before reading: reading a compressed batch would unpack it, to a size that the file names.
        with pa.BufferReader(source.slice(8) if is_file else source) as stream:
            compressed = _compressed(pa, stream)
        if compressed:
            raise DataError(f"{path}: compressed, so it cannot be mapped; {_ONE_BATCH}")
        if is_file:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(min(reader.num_record_batches, 2))]
            count = reader.num_record_batches
        else:
            stream_reader = pa.ipc.open_stream(source)
            reader, batches = stream_reader, [batch for batch, _ in zip(stream_reader, range(2), strict=False)]
            count = len(batches)
        if count > 1:
            raise DataError(f"{path}: {count if is_file else 'several'} record batches found, 1 expected; {_ONE_BATCH}")
        if not batches:
            batches = [pa.RecordBatch.from_arrays([pa.array([], f.type) for f in reader.schema], schema=reader.schema)]
        found: Fields = {}
        for name, column in zip(batches[0].schema.names, batches[0].columns, strict=True):
            where = f"{path}, column {name}"
            if name in found:
                raise DataError(f"{where}: found twice, once expected")
            try:
                dtype, shape, offset = _place(pa, column, where, base)
                found[name] = (
                    functools.partial(np.empty, shape, dtype)
                    if shape[0] == 0
                    else functools.partial(view, mapped, dtype, shape, offset, where)
                )
            except DataError as error:
                found[name] = functools.partial(_refuse, str(error))
    except DataError:
        raise
    except Exception as error:  # pyarrow has its own family, and lets UnicodeDecodeError and others through
        raise DataError(f"{path}: a broken Arrow file of {len(mapped)} bytes: {error!s:.160}") from None
    if not found:
        raise DataError(f"{path}: an Arrow file without columns: at least one expected, none found")
    return found


def _place(pa: Any, column: Any, where: str, base: int) -> tuple[DType, tuple[int, ...], int]:
    """Dtype, shape and byte in the file of a column, through its nested fixed-size lists."""
    shape: list[int] = [len(column)]
    tensor: tuple[int, ...] | None = None
    first, count = column.offset, len(column)
    while True:
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation is None:
                tensor = (len(column), *kind.shape)
            column = column.storage
            continue
        if column.null_count:
            raise DataError(f"{where}: {column.null_count} nulls found, none expected; fill them (fill_null) and save")
        if not pa.types.is_fixed_size_list(kind):
            break
        first, count = first * kind.list_size, count * kind.list_size
        shape.append(kind.list_size)
        column = column.values
        first += column.offset
    dtype = _dtype(pa, kind)
    if dtype is None:
        raise DataError(f"{where}: Arrow {kind} cannot be mapped; numbers or fixed-size lists of them expected")
    data = column.buffers()[-1]
    if count and (data is None or data.size < (first + count) * dtype.itemsize):
        raise DataError(
            f"{where}: {(first + count) * dtype.itemsize} bytes expected, {0 if data is None else data.size} found"
        )
    offset = data.address - base + first * dtype.itemsize if count else 0
    return dtype, check_shape(tensor or shape, where), offset


def _dtype(pa: Any, kind: Any) -> DType | None:
    """The NumPy dtype with the same bytes, None where there is none."""
    is_ = pa.types
    if is_.is_integer(kind) or is_.is_floating(kind) or is_.is_timestamp(kind) or is_.is_duration(kind):
        return np.dtype(kind.to_pandas_dtype()) if not is_.is_timestamp(kind) else np.dtype(f"M8[{kind.unit}]")
    if is_.is_date32(kind):
        return np.dtype("<i4")
    if is_.is_fixed_size_binary(kind) and kind.byte_width:
        return np.dtype(f"V{kind.byte_width}")
    return None


def _compressed(pa: Any, stream: Any) -> bool:
    """Whether the first record batch names a compression: slot 3 of its flatbuffer table RecordBatch."""
    while True:
        try:
            message = pa.ipc.read_message(stream)
        except (EOFError, pa.ArrowInvalid):
            return False  # no batch, or broken: the reader says which
        if message.type == "record batch":
            break
    raw = message.metadata.to_pybytes()
    root = struct.unpack_from("<I", raw, 0)[0]
    header = _slot(raw, root, 2)
    if header is None:
        return False
    return _slot(raw, header + struct.unpack_from("<I", raw, header)[0], 3) is not None


def _slot(raw: bytes, table: int, slot: int) -> int | None:
    """Where a flatbuffer table keeps its field number `slot`, None where it has none."""
    vtable = table - struct.unpack_from("<i", raw, table)[0]
    size = struct.unpack_from("<H", raw, vtable)[0]
    if 4 + 2 * slot >= size:
        return None
    at = struct.unpack_from("<H", raw, vtable + 4 + 2 * slot)[0]
    return table + at if at else None


def _refuse(message: str) -> Array:
    raise DataError(message)
