"""Arrow IPC files, streams and Feather through pyarrow: columns of plain numbers, mapped, and lists of them."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jitloader.errors import DataError

from .mapped import Array, Column, DType, Fields, Map, check_shape, need, view

SUFFIXES = (".arrow", ".feather", ".ipc")
_FILE = b"ARROW1\0\0"
_STREAM = b"\xff\xff\xff\xff"
_REMEDY = "write it plain: write_feather(table, path, compression='uncompressed')"
# Gives elements of a dtype and shape from a byte of a buffer on, as an array over it.
See = Callable[[Any, DType, "tuple[int, ...]", int], Array]


def sniff(head: bytes, path: str) -> bool:
    """Whether a file starts like an Arrow IPC file, or like a stream that is named so."""
    return head.startswith(_FILE) or (head.startswith(_STREAM) and path.endswith(SUFFIXES))


def fields(mapped: Map) -> Fields:
    """The columns of a file: (rows,), or (rows, size, ...) for fixed-size lists; a `Column` for lists of free length, and
    where there are several record batches.

    Raises ImportError without pyarrow, DataError for a broken file and a compressed one; asking for a column with
    nulls, of strings or booleans (bits) raises DataError.
    """
    found: Fields = {}
    for name, arrays in chunks(mapped).items():
        found[name] = functools.partial(read, arrays, f"{mapped.path}, column {name}")
    if not found:
        raise DataError(f"{mapped.path}: an Arrow file without columns: at least one expected, none found")
    return found


def chunks(mapped: Map) -> dict[str, list[tuple[Any, See]]]:
    """The arrays of each column of a file, one a record batch, and how their buffers are seen in the map."""
    pa = need("pyarrow", "arrow", f"{mapped.path}: reading Arrow")
    path = mapped.path
    is_file = mapped[:8] == _FILE
    source = pa.py_buffer(mapped)
    base = source.address

    def see(buffer: Any, dtype: DType, shape: tuple[int, ...], offset: int) -> Array:
        return view(mapped, dtype, shape, buffer.address - base + offset, path)

    try:
        # Ask before reading: reading a compressed batch would unpack it, to a size that the file names.
        with pa.BufferReader(source.slice(8) if is_file else source) as stream:
            if any(_compressed(pa, stream)):
                raise DataError(f"{path}: compressed, so it cannot be mapped; {_REMEDY}")
        if is_file:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        else:
            reader = pa.ipc.open_stream(source)
            batches = list(reader)
        names = reader.schema.names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{path}, column {name}: found twice, once expected")
        if not batches:
            batches = [pa.RecordBatch.from_arrays([pa.array([], f.type) for f in reader.schema], schema=reader.schema)]
        return {name: [(batch.column(k), see) for batch in batches] for k, name in enumerate(names)}
    except DataError:
        raise
    except Exception as error:  # pyarrow has its own family, and lets UnicodeDecodeError and others through
        raise DataError(f"{path}: a broken Arrow file of {len(mapped)} bytes: {error!s:.160}") from None


def in_memory(buffer: Any, dtype: DType, shape: tuple[int, ...], offset: int) -> Array:
    """See elements of a buffer of pyarrow, which stays alive as long as they are in use."""
    array: Array = np.frombuffer(buffer, dtype, math.prod(shape), offset).reshape(shape)
    return array


class _Piece(NamedTuple):
    """Where one array of a column lies: its dtype, the shape of all of it, and the offsets of its lists."""

    dtype: DType
    shape: tuple[int, ...]
    buffer: Any
    start: int
    offsets: Array | None


def read(
    arrays: Sequence[tuple[Any, See]], where: str, shape: Sequence[int | None] | None = None, copies: bool = False
) -> Array | Column:
    """Give a column from its arrays: one np.ndarray where it can be, else a Column.

    `shape` is that of a row where nested lists are known to have one. With `copies`, booleans are unpacked, and days come
    as datetime64.
    Raises DataError for what has not the bytes of numbers.
    """
    pa = need("pyarrow", "arrow", where)
    try:
        given = [(array, see) for array, see in arrays if len(array)] or list(arrays[:1])
        plain = given[0][0].type
        if copies and pa.types.is_boolean(plain):
            given = [(_unpacked(pa, array, where), see) for array, see in given]
        pieces = [_piece(pa, array, see, where, shape) for array, see in given]
        for array, _ in given:
            array.validate()  # of its buffers' sizes, in time that no length counts in
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where}: broken: {error!s:.160}") from None
    kind = {(piece.dtype, piece.shape[1:], piece.offsets is None) for piece in pieces}
    if len(kind) > 1:
        told = " and ".join(sorted({f"{dtype} {inner}" for dtype, inner, _ in kind}))
        raise DataError(f"{where}: one type and shape of a row expected, {told} found")
    seen = tuple(
        see(piece.buffer, piece.dtype, piece.shape, piece.start)
        if piece.shape[0]
        else np.empty(piece.shape, piece.dtype)
        for piece, (_, see) in zip(pieces, given, strict=True)
    )
    if copies and pa.types.is_boolean(plain):
        seen = tuple(array.view(np.bool_) for array in seen)
    if copies and pa.types.is_date32(plain):
        seen = tuple(array.astype("M8[D]") for array in seen)
    if pieces[0].offsets is None:
        return seen[0] if len(seen) == 1 else Column(seen)
    ends = [piece.offsets for piece in pieces if piece.offsets is not None]
    if len(ends) == 1:
        return Column(seen, ends[0])
    before = np.cumsum([0, *(len(array) for array in seen)])
    joined = [end[:-1] + start for end, start in zip(ends, before, strict=False)]
    return Column(seen, np.concatenate([*joined, before[-1:]]))


def _unpacked(pa: Any, array: Any, where: str) -> Any:
    """Give booleans as bytes."""
    _refuse_nulls(array, where)
    return array.cast(pa.uint8())


def _refuse_nulls(array: Any, where: str) -> None:
    if array.null_count:
        raise DataError(f"{where}: {array.null_count} nulls found, none expected; fill them first (fill_null)")


def _piece(pa: Any, array: Any, see: See, where: str, known: Sequence[int | None] | None) -> _Piece:
    """Find where an array's numbers lie, through its lists."""
    sizes: list[int] = []
    offsets: Array | None = None
    tensor: tuple[int, ...] | None = None
    rows, outer = len(array), True
    while True:
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation is None:
                tensor = tuple(kind.shape)
            elif known is None and isinstance(getattr(kind, "shape", None), tuple):  # of Hugging Face
                known = kind.shape
            array = array.storage
            continue
        _refuse_nulls(array, where)
        if pa.types.is_fixed_size_list(kind):
            wanted = len(array) * kind.list_size
            child = array.values.slice(array.offset * kind.list_size, wanted)
            sizes.append(kind.list_size)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            ends = _ends(pa, array, see, where)
            wanted = int(ends[-1] - ends[0])
            child = array.values.slice(int(ends[0]), wanted)
            if outer and (known is None or known[0] is None):
                offsets = ends - ends[0] if ends[0] else ends
            else:
                inner = int(ends[1] - ends[0]) if len(array) else 0
                if (np.diff(ends) != inner).any():
                    raise DataError(f"{where}: lists within lists differ in length: one length expected")
                sizes.append(inner)
        else:
            break
        if len(child) != wanted:
            raise DataError(f"{where}: {wanted} elements expected, {len(child)} found")
        array, outer = child, False
    inner_shape = list(tensor or [n for n in known or () if n is not None] or sizes)
    if len(array) and (math.prod(inner_shape) != math.prod(sizes) or (known is not None and inner_shape != sizes)):
        raise DataError(f"{where}: rows of shape {tuple(inner_shape)} expected, {tuple(sizes)} found")
    dtype = _dtype(pa, kind)
    if dtype is None:
        raise DataError(f"{where}: Arrow {kind} cannot be mapped; {_remedy(pa, kind)}")
    data, first, count = array.buffers()[-1], array.offset, len(array)
    if count and (data is None or data.size < (first + count) * dtype.itemsize):
        raise DataError(
            f"{where}: {(first + count) * dtype.itemsize} bytes expected, {0 if data is None else data.size} found"
        )
    total = rows if offsets is None else int(offsets[-1])
    return _Piece(dtype, check_shape((total, *inner_shape), where), data, first * dtype.itemsize, offsets)


def _ends(pa: Any, array: Any, see: See, where: str) -> Array:
    """Give the checked offsets of an array of lists."""
    dtype = np.dtype("<i8" if pa.types.is_large_list(array.type) else "<i4")
    table, count = array.buffers()[1], len(array) + 1
    wanted = (array.offset + count) * dtype.itemsize
    if len(array) == 0:
        return np.zeros(1, np.int64)
    if table is None or table.size < wanted:
        raise DataError(f"{where}: {wanted} bytes of offsets expected, {0 if table is None else table.size} found")
    ends = see(table, dtype, (count,), array.offset * dtype.itemsize)
    if ends[0] < 0 or (ends[1:] < ends[:-1]).any():
        raise DataError(f"{where}: offsets that rise from 0 expected, broken ones found")
    return ends if ends.dtype == np.int64 else ends.astype(np.int64)


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


def _remedy(pa: Any, kind: Any) -> str:
    """What to do with a column that is none of numbers."""
    is_ = pa.types
    if is_.is_boolean(kind):
        return "its booleans are bits: cast them to uint8 and save"
    if is_.is_dictionary(kind):
        return "save its codes (.indices), or leave it out"
    if is_.is_decimal(kind) or is_.is_date64(kind) or is_.is_null(kind):
        return "cast it to a number type and save, or leave it out"
    if is_.is_struct(kind):
        return "flatten it, so that each part is a column, or leave it out"
    return "numbers or lists of them expected: save codes (dictionary_encode().indices), or leave it out"


def _compressed(pa: Any, stream: Any) -> Iterator[bool]:
    """For each record batch whether it names a compression: slot 3 of its flatbuffer table RecordBatch."""
    while True:
        try:
            message = pa.ipc.read_message(stream)
        except (EOFError, pa.ArrowInvalid):
            return  # no more, or broken: the reader says which
        if message.type == "record batch":
            raw = message.metadata.to_pybytes()
            root = struct.unpack_from("<I", raw, 0)[0]
            header = _slot(raw, root, 2)
            yield header is not None and _slot(raw, header + struct.unpack_from("<I", raw, header)[0], 3) is not None


def _slot(raw: bytes, table: int, slot: int) -> int | None:
    """Where a flatbuffer table keeps its field number `slot`, None where it has none."""
    vtable = table - struct.unpack_from("<i", raw, table)[0]
    size = struct.unpack_from("<H", raw, vtable)[0]
    if 4 + 2 * slot >= size:
        return None
    at = struct.unpack_from("<H", raw, vtable + 4 + 2 * slot)[0]
    return table + at if at else None
