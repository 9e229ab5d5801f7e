"""Where bytes live: the formats people already have, mapped where they lie, and folders of arrays saved as a whole.

Opening costs O(fields) at any size. Arrays are plain, read-only np.ndarray views over the map; their bytes are read
when they are used, and the file stays open for as long as a view lives. What lies in chunks (HDF5, Zarr) is decoded into
memory that stands for a map of it (`chunked`). What can be neither is refused, with the remedy.
A format is a module with `SUFFIXES`, `sniff(head, path)` and `fields(map)`, and its name in `FORMATS`; it is imported
when a file is opened that may be of it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from collections.abc import Mapping as _Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jitloader.errors import DataError

from . import chunked, mapped, npy, remote
from .folder import as_listed, with_parts
from .folder import blocks as blocks
from .folder import create_fields as create_fields
from .folder import open_folder as open_folder
from .folder import recall as recall
from .folder import remember as remember
from .folder import save_fields as save_fields
from .folder import target_path as target_path
from .folder import tidy as tidy
from .grow import begun as begun
from .grow import grow_fields as grow_fields
from .mapped import Array, Fields, listing, map_file, pick
from .mapped import Column as Column
from .mapped import Location as Location
from .mapped import Map as Map
from .mapped import Mapping as Mapping
from .mapped import Path as Path
from .mapped import Watch as Watch
from .mapped import full_path as full_path
from .mapped import locate as locate
from .mapped import map_below as map_below
from .mapped import mapping as mapping
from .mapped import need as need
from .mapped import watch as watch

if TYPE_CHECKING:
    from .unpacked import Unpack as Unpack

# Asked by content in this order, then by suffix; cifar last, its content has no mark.
FORMATS = ("npy", "npz", "hdf5", "arrow", "parquet", "safetensors", "idx", "cifar")
_UNPACKED = ("npz", "parquet")  # these may have to be decoded into a folder first

_FOREIGN = {
    b"\x1f\x8b": "gzip: a compressed file cannot be mapped; gunzip it first",
    b"BZh": "bzip2: a compressed file cannot be mapped; bunzip2 it first",
    b"\xfd7zXZ\0": "xz: a compressed file cannot be mapped; unxz it first",
    b"\x28\xb5\x2f\xfd": "zstd: a compressed file cannot be mapped; unzstd it first",
    b"PARE": "Parquet with an encrypted footer, never decrypted; write it plain",
    b"FEA1": "Feather version 1; write it again with pyarrow.feather.write_feather(..., compression='uncompressed')",
    b"\x80\x02": "a pickle, never loaded; save its arrays with np.save",
    b"\x80\x03": "a pickle, never loaded; save its arrays with np.save",
    b"\x80\x04": "a pickle, never loaded; save its arrays with np.save",
    b"\x80\x05": "a pickle, never loaded; save its arrays with np.save",
}


_LARGE = 1 << 20  # bytes that are read whole without a word


def open_array(
    path: Path, *, dtype: npt.DTypeLike | None = None, shape: tuple[int, ...] | None = None, offset: int = 0
) -> Array | Column:
    """Map a file that holds one array, at a path or a URL; with `dtype`, a raw one: the rows of `shape` after `offset` bytes.

    A raw file of n rows gives (n, *shape), `shape` being that of one row, () if left out.

    Raises the system's OSError (missing, a folder, no permission) or DataError (not what it says it is), both with the
    full path; DataError also for a file of several fields.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.arange(6, dtype="uint16").tofile(folder + "/tokens.bin")
    ...     open_array(folder + "/tokens.bin", dtype="uint16", shape=(3,)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if remote.scheme(path):
        with _near(path, None, True) as near:
            return open_array(near, dtype=dtype, shape=shape, offset=offset)
    if dtype is not None:
        from . import raw

        return raw.open_raw(path, dtype, shape, offset)
    if shape is not None or offset:
        raise DataError(f"{full_path(path)}: shape and offset are for raw files; give dtype too")
    if os.path.isdir(path) and not _format("zarr").is_store(full_path(path)):
        raise IsADirectoryError(
            errno.EISDIR, "a folder, one file expected (open_fields takes folders)", full_path(path)
        )
    found = _fields(path)
    if len(found) != 1:
        raise DataError(
            f"{full_path(path)}: one array expected, {len(found)} found ({listing(found)}); jl.open takes them all"
        )
    return next(iter(found.values()))()


def open_fields(
    path: Path,
    *more: Path,
    fields: Collection[str] | None = None,
    unpack: Unpack = None,
    options: _Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Array | Column]:
    """Map the named arrays of a folder of .npy or of a file; of several files together, the pair of an IDX, say.

    Also a folder that Hugging Face `datasets` saved. What lies in several arrays, or in lists of free length, is a
    `Column`. Names are those inside the file (.npz, .safetensors, .h5, .arrow), `image` and `label` for IDX and CIFAR-10
    (`image`, `coarse` and `fine` for CIFAR-100), else the file's name without its suffix. `fields` keeps these alone,
    so that others that cannot be mapped do no harm. What a URL holds is downloaded first, with `options` of fsspec.

    Parquet, and with `unpack=True` the compressed members of .npz, are decoded once into a folder of .npy in the cache
    folder, or into the folder that `unpack` names; a file that has not changed since is not decoded again.

    Raises as `open_array`; ImportError, with the extra to install, where a format needs a package that is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(folder + "/data.npz", x=np.eye(3), y=np.arange(3))
    ...     {name: a.shape for name, a in open_fields(folder + "/data.npz").items()}
    {'x': (3, 3), 'y': (3,)}
    """
    return open_with_meta(path, *more, fields=fields, unpack=unpack, options=options, progress=progress)[0]


def open_with_meta(
    path: Path,
    *more: Path,
    fields: Collection[str] | None = None,
    unpack: Unpack = None,
    options: _Mapping[str, Any] | None = None,
    progress: bool = True,
) -> tuple[dict[str, Array | Column], dict[str, Any]]:
    """Map as `open_fields`, and give the meta that was saved with a folder ({} for what is none)."""
    if not more and remote.scheme(path):
        try:
            with _near(path, options, progress) as near:
                return open_with_meta(near, fields=fields, unpack=unpack, progress=progress)
        except IsADirectoryError:
            return _far_folder(os.fsdecode(path), fields, options, progress)
        except FileNotFoundError as missing:  # http knows no folders: a file in it tells
            if remote.local_path(os.fsdecode(path)) is not None:
                raise
            try:
                return _far_folder(os.fsdecode(path), fields, options, progress)
            except OSError:
                raise missing from None
    if not more and os.path.isdir(full_path(path)) and not _is_store(full_path(path)):
        arrays, meta = open_folder(path, fields)
        return {**arrays}, meta
    if more and unpack is not None and not isinstance(unpack, bool):
        raise ValueError(f"unpack={os.fsdecode(unpack)!r} is for one file; give unpack=True for several")
    found: Fields = {}
    for one in (path, *more):
        with _near(one, options, progress) as near:
            for name, get in _fields(near, unpack, fields, progress).items():
                if name in found:
                    raise DataError(f"{full_path(near)}: field {name!r} again; each name once expected")
                found[name] = get
    return pick(found, fields, full_path(path)), {}


@contextlib.contextmanager
def _near(path: Path, options: _Mapping[str, Any] | None, progress: bool) -> Iterator[Path]:
    """Give a path as it is, and for a URL that of a local copy, whose errors then name the URL."""
    if not remote.scheme(path):
        yield path
        return
    url = os.fsdecode(path)
    near = remote.local_path(url)
    if near is not None:
        yield near
        return
    from . import download  # it takes 8 ms with all that it needs, which local files need not wait for

    near = download.fetch(url, options, progress)
    try:
        yield near
    except DataError as error:
        raise DataError(str(error).replace(near, remote.shown(url))) from None


def _far_folder(
    url: str, fields: Collection[str] | None, options: _Mapping[str, Any] | None, progress: bool
) -> tuple[dict[str, Array | Column], dict[str, Any]]:
    """Map the local copies of a folder's files, compared with its manifest where there is one."""
    from . import download

    paths, manifest = download.fetch_folder(url, fields, options, progress)
    found: Fields = {}
    for name, near in paths.items():
        where = f"{remote.shown(url).rstrip('/')}/{name}.npy"
        if manifest is None:
            found[name] = functools.partial(open_array, near)
        else:
            entry = manifest["fields"][name]
            found[name] = functools.partial(
                lambda near, entry, where: as_listed(_plain(near), entry, where), near, entry, where
            )
    if not found and fields is None:
        raise DataError(f"{remote.shown(url)}: a folder without .npy files: at least one expected, none found")
    return pick(found, with_parts(fields, manifest), remote.shown(url)), {} if manifest is None else manifest["meta"]


def _plain(path: Path) -> Array:
    """Map a .npy of a folder that was saved."""
    whole = map_file(path)
    return npy.read(whole, 0, len(whole), whole.path)


def reopen(
    path: Path,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    size: int | None = None,
    dataset: str | None = None,
) -> Array:
    """Open what `locate` named: a read-only array of the same dtype, shape and strides, of the file or dataset at `path`.

    Raises OSError where the file is gone, DataError where it is not `size` bytes long or too short for the array.
    """
    path = full_path(path)
    whole_file = mapped.remap(path) if dataset is None else None
    now = os.stat(path).st_size if whole_file is None else len(whole_file)
    if size is not None and size != now:
        raise DataError(f"{path}: not the file it was: {size} bytes expected, {now} found")
    if whole_file is not None:
        return mapped.see(whole_file, dtype, shape, strides, offset)
    from . import hdf5, zarr

    whole = pick(hdf5.fields(map_file(path)), [dataset], path)[dataset] if dataset else zarr.read(path)
    below = mapping(whole)
    if below is None or not isinstance(below.map, Map):
        raise DataError(f"{path}: not the file it was: a chunked dataset expected")
    return mapped.see(below.map, dtype, shape, strides, offset)


def placed(value: Any, field: str) -> Any:
    """Give an h5py dataset or a zarr array as opening its file does, mapped or decoded when it is read; anything else as it
    is. What lies in no file of its own is read whole, of which a UserWarning says so from 1 MB on. Raises TypeError for a file or a group of arrays."""
    for package in ("h5py", "zarr"):
        known = getattr(sys.modules.get(package), "Group", None)
        if isinstance(known, type) and isinstance(value, known):
            what = f"{'an' if package == 'h5py' else 'a'} {package} {type(value).__name__}"
            raise TypeError(f"field {field!r} is {what}, which holds several arrays: give one of them, as file['name']")
    for package, kind, form in (("h5py", "Dataset", "hdf5"), ("zarr", "Array", "zarr")):
        known = getattr(sys.modules.get(package), kind, None)
        if isinstance(known, type) and isinstance(value, known):
            found = _format(form).placed(value)
            if found is not None:
                return found
            handle: Any = value
            nbytes = handle.dtype.itemsize * math.prod(handle.shape or ())
            if nbytes >= _LARGE:
                told = 'of a local file opened with mode="r" it is read when needed'
                warnings.warn(
                    f"field {field!r}: this {package} {kind} is read whole, {nbytes:,} bytes; {told}", stacklevel=4
                )
    return value


def is_chunked(array: Array) -> bool:
    """Whether an array stands for a chunked dataset, of which no more is in memory than was brought in."""
    below = mapping(array)
    return below is not None and isinstance(below.map, chunked.Chunked)


def _is_store(path: str) -> bool:
    """Whether a folder is one that another library keeps arrays in."""
    from . import huggingface, zarr

    return zarr.is_store(path) or huggingface.sniff(path)


def _format(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__)


def _fields(path: Path, unpack: Unpack = None, wanted: Collection[str] | None = None, progress: bool = True) -> Fields:
    """Find a file's format, by content first and name second, and what it holds."""
    path = full_path(path)
    if os.path.isdir(path):
        from . import huggingface, zarr

        if zarr.is_store(path):
            return zarr.fields(path)
        if huggingface.sniff(path):
            return huggingface.fields(path)
        arrays, _ = open_folder(path)
        return {name: functools.partial(np.asarray, array) for name, array in arrays.items()}
    whole = map_file(path)
    head = whole[:65536]

    def read(name: str) -> Fields:
        found: Callable[..., Fields] = _format(name).fields
        return found(whole, unpack, wanted, progress) if name in _UNPACKED else found(whole)

    for name in FORMATS:
        if _format(name).sniff(head, path):
            return read(name)
    for magic, message in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path}: {message}")
    for name in FORMATS:
        if path.endswith(_format(name).SUFFIXES):
            return read(name)
    raise DataError(
        f"{path}: a known format expected, {head[:8]!r} found ({len(whole)} bytes); "
        "a raw file is np.memmap(path, dtype), a table of text pandas.read_csv(path), given to jl.Dataset"
    )
