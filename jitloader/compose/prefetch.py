"""Ask for the bytes of rows before their turn: memory is slower than the loops that a program runs over it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..samples import Samples
from .rows import Writer

LINES = 64  # cache lines of a row that are asked for: past 4 KB the processor itself has seen where it goes


def wanted_of(sources: Iterable[Samples]) -> tuple[list[tuple[Samples, int]], int]:
    """Give the fields whose rows are asked for, with the items from their first to past their last, and how many rows
    before their turn: worth up to 1.9x on rows of a few cache lines, 1.5x on token windows of 2 KB."""
    wanted: list[tuple[Samples, int]] = []
    for samples in sources:
        size = 1
        for n, s in zip(samples.shape, samples.strides, strict=False):
            size += ((n or 1) - 1) * abs(s)
        if not samples.nbytes:
            continue
        for k, (other, covered) in enumerate(wanted):  # fields over the same bytes: tokens and the next ones
            shift = _shift(other, samples)
            if shift is not None and 0 <= shift <= covered:
                wanted[k] = other, max(covered, shift + size)
                break
        else:
            wanted.append((samples, size))
    total = sum(size * samples.carrier.itemsize for samples, size in wanted)
    if any(samples.length is not None for samples, _ in wanted):
        return wanted, 4  # rows of 360 bytes in the mean: 2 to 16 rows ahead were all alike
    return wanted, 32 if total <= 64 else 16 if total <= 512 else 8 if total <= 2048 else 2


def prefetch(writer: Writer, wanted: list[tuple[Samples, int]], lead: int) -> None:
    """Write what asks for the lines of row `ahead`, and for what tells where the row `lead` rows after it lies."""
    code = writer.code
    tables = {id(t): t for samples, _ in wanted for t in _tables(samples, writer.recipe.total)}
    if tables:
        with code.block(f"if i + {lead} < m and 0 <= rows[i + {lead}] < {writer.count}:"):
            for table in tables.values():
                code.add(f"prefetch({code.argument(table)}, rows[i + {lead}])")
    for k, (samples, size) in enumerate(wanted):
        flat, base = writer.row(samples, "ahead", f"_a{k}", search=False)
        line = max(1, 64 // samples.carrier.itemsize)
        most = LINES * line
        if samples.length is not None:
            with code.block(f"for x in range(0, min(n_a{k} * {abs(samples.strides[0])}, {most}), {line}):"):
                code.add(f"prefetch({flat}, {base} + x)")
            continue
        size = min(size, most)
        lines = range(0, size, line)
        if len(lines) > 8:
            with code.block(f"for x in range(0, {size}, {line}):"):
                code.add(f"prefetch({flat}, {base} + x)")
            lines = range(0)
        for x in sorted({*lines, size - 1}):  # the last: few rows begin with a cache line
            code.add(f"prefetch({flat}, {base} + {x})")


def _shift(one: Samples, other: Samples) -> int | None:
    """Give how many items a second field's samples begin behind a first one's, where that is the same for all rows."""
    same = one.locate is other.locate is None and one.length is other.length is None
    if not same or len(one.parts) != 1 or len(other.parts) != 1:
        return None
    (a,), (b,), (rows, others) = one.parts, other.parts, (one.rows, other.rows)
    alike = rows.table is others.table and (rows.start, rows.step) == (others.start, others.step)
    return b.offset - a.offset if a.flat is b.flat and a.stride == b.stride and alike else None


def _tables(samples: Samples, count: int) -> list[np.ndarray]:
    """Give the tables that say where row r lies, by item r: they are as large as the data set has rows."""
    if samples.rows.table is not None:
        return [samples.rows.table]
    if samples.rows.start or samples.rows.step != 1:
        return []
    return [p for p in samples.params if isinstance(p, np.ndarray) and p.ndim == 1 and count <= p.size <= count + 1]
