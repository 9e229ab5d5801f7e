"""Packs as rows: ragged rows laid side by side in samples of one length, as the fields of a data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import jit, linking, storage
from .dataset import Dataset
from .packing import Packs, pack
from .ragged import ragged
from .samples import records
from .spec import Spec
from .stages import Bound, Misfit, Stage
from .stages.stage import caller, writable

AHEAD = 2  # pieces: the first lines of the piece after the next are asked for while one is copied


def assemble(src, dst, key, values, width, firsts, sizes, starts, padding):  # type: ignore[no-untyped-def]
    """Write pack src[0]: its pieces one after the other, `width` items an element, and padding behind."""
    out, at, pack = jit.flat(dst), 0, src[0]
    for j in range(starts[pack], starts[pack + 1]):
        ahead = j + AHEAD
        if ahead < starts[pack + 1]:
            jit.prefetch(values, firsts[ahead] * width)
        jit.copy_items(out, at, values, firsts[j] * width, sizes[j] * width)
        at += sizes[j] * width
    rest = out[at:]
    for k in range(rest.size):
        rest[k] = padding


def number_segments(src, dst, key, sizes, starts):  # type: ignore[no-untyped-def]
    """Write the segments of pack src[0]: 1 for each element of its first piece, 2 for the second, ..., 0 behind."""
    at, pack = 0, src[0]
    for j in range(starts[pack], starts[pack + 1]):
        piece = dst[at : at + sizes[j]]
        for k in range(piece.size):
            piece[k] = j - starts[pack] + 1
        at += sizes[j]
    rest = dst[at:]
    for k in range(rest.size):
        rest[k] = 0


def number_positions(src, dst, key, sizes, starts):  # type: ignore[no-untyped-def]
    """Write the positions of pack src[0]: 0, 1, ... in each piece, 0 behind."""
    at, pack = 0, src[0]
    for j in range(starts[pack], starts[pack + 1]):
        piece = dst[at : at + sizes[j]]
        for k in range(piece.size):
            piece[k] = k
        at += sizes[j]
    rest = dst[at:]
    for k in range(rest.size):
        rest[k] = 0


def packed(
    values: Any,
    offsets: Any,
    capacity: int | Packs,
    *,
    padding: Any = 0,
    field: str = "values",
    seed: int = 0,
    epoch: int = 0,
    group: int = 1 << 16,
    overflow: str = "error",
) -> Dataset:
    """Map flat values and offsets to packs: sample i holds whole ragged rows side by side, `capacity` elements with padding.

    values : (total, *shape), of numbers that kernels compute with; or several such by name, as many fields. Referred to,
        never copied, where C-contiguous.
    offsets : n + 1 rising integers: row r is values[offsets[r] : offsets[r + 1]].
    capacity : elements of a pack; or packs that `jl.pack` made of these lengths, to look at them first. `seed`, `epoch`,
        `group` and `overflow` are those of `jl.pack`: with another epoch, other rows share a pack.

    Beside the values (named `field` where one array comes) there are `segments`, (capacity,) int32: 1, 2, ... for the
    rows of a pack and 0 for padding; `positions`, (capacity,) int32: 0, 1, ... within each row and 0 for padding; and
    `segment_lengths`, ragged int32: the elements of each row in the pack and, where there is some, of the padding, so that
    `np.cumsum` of a batch's `segment_lengths.values` are the `cu_seqlens` of its flattened values, but for the 0 in front.
    Fields not kept are not made. Packs are rows as any: `map`, `split`, orders, ranks, resume.

    Raises ValueError for offsets that are not such, or end past the values, packs of other offsets, values of several
    lengths; TypeError for values no kernel computes with; and what `jl.pack` raises.

    >>> import numpy as np, jitloader as jl
    >>> sample = jl.packed(np.array([7, 7, 7, 8, 8, 9]), [0, 3, 5, 6], 6)[0]
    >>> sorted(zip(sample.values.tolist(), sample.positions.tolist()))
    [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (9, 0)]
    >>> sorted(sample.segment_lengths.tolist()), sorted({*sample.segments.tolist()})
    ([1, 2, 3], [1, 2, 3])
    """
    arrays = dict(values) if isinstance(values, Mapping) else {field: values}
    if not arrays:
        raise ValueError("packed takes at least one array of values")
    for name in arrays:
        linking.check_name(name)
        if name in ("segments", "positions", "segment_lengths"):
            raise ValueError(f"packed makes a field {name!r} itself: give the values another name")
    table = ragged(arrays, offsets)  # which checks both
    first = next(iter(table.values()))
    offsets = first.params[0]
    lengths = np.diff(offsets)
    if not isinstance(capacity, Packs):
        packs = pack(lengths, capacity, seed=seed, epoch=epoch, group=group, overflow=overflow)
    else:
        packs = capacity
        if packs.rows.size:
            inside = (packs.rows >= 0) & (packs.rows < lengths.size)
            inside[inside] = (packs.begins + packs.sizes)[inside] <= lengths[packs.rows[inside]]
            if not inside.all():
                raise ValueError(
                    f"packed: the packs are of other offsets: row {packs.rows[~inside][0]} does not lie so in these"
                )
    size, count = packs.capacity, packs.number
    where = caller()
    mark = jit.fingerprint(packs.rows[:: 1 + packs.rows.size // 4096], size)[
        :6
    ]  # a state of other packs is not of these
    firsts = offsets[packs.rows] + packs.begins
    numbers = np.arange(count, dtype=np.int64)

    def stage(name: str, kernel: Any, out: Spec, params: tuple[Any, ...]) -> Stage:
        def bind(spec: Spec) -> Bound:
            if spec != Spec(np.dtype(np.int64), ()):
                raise Misfit(f"{name} takes the number of a pack")
            return Bound("sample", out, kernel, params)

        return Stage(name, bind, where=where)

    sources: dict[str, Any] = {}
    stages: dict[str, Stage] = {}
    for name, samples in table.items():
        dtype, shape = writable(samples.dtype, f"packed: field {name!r}"), samples.shape[1:]
        if storage.is_chunked(samples.parts[0].array):
            raise ValueError(f"packed: {name!r} lies in chunks, which are decoded row by row: give a mapped array of it")
        flat = np.ascontiguousarray(samples.parts[0].array).reshape(-1)
        width = math.prod(int(n or 0) for n in shape)
        fill = _fitting(padding, dtype)
        sources[name] = records(numbers, field=name)
        out = Spec(dtype, (size, *shape))
        stages[name] = stage(
            f"packed({size}, {mark})", assemble, out, (flat, width, firsts, packs.sizes, packs.starts, fill)
        )
    for name, kernel in (("segments", number_segments), ("positions", number_positions)):
        sources[name] = records(numbers, field=name)
        out = Spec(np.dtype(np.int32), (size,))
        stages[name] = stage(name, kernel, out, (packs.sizes, packs.starts))
    sources["segment_lengths"] = ragged(*_with_padding(packs), field="segment_lengths")
    data = Dataset(sources)
    for name, made in stages.items():
        data = data.map(name, made)
    return data


def _fitting(padding: Any, dtype: np.dtype) -> Any:
    """Give the padding as a number of the values' dtype, or refuse it."""
    try:
        fill = np.asarray(padding).astype(dtype)
    except OverflowError:
        raise ValueError(f"packed: padding {padding!r} does not fit {dtype}") from None
    except (TypeError, ValueError):
        raise TypeError(f"packed: padding takes a number, got {padding!r}") from None
    if fill.ndim or not (fill == padding or padding != padding):
        raise ValueError(f"packed: padding {padding!r} does not fit {dtype}")
    return fill.item()


def _with_padding(packs: Packs) -> tuple[np.ndarray, np.ndarray]:
    """Give the sizes of each pack, its padding last where there is some, and where each pack's begin."""
    used = np.add.reduceat(np.append(packs.sizes, 0), packs.starts[:-1]) if packs.number else np.zeros(0, np.int64)
    rest = packs.capacity - used
    offsets = packs.starts + np.concatenate([[0], np.cumsum(rest > 0)])
    sizes = np.empty(int(offsets[-1]), np.int32)
    last = offsets[1:][rest > 0] - 1
    inner = np.ones(sizes.size, bool)
    inner[last] = False
    sizes[inner], sizes[last] = packs.sizes, rest[rest > 0]
    return sizes, offsets
