"""What is in a batch, to look at: images as a grid, series as curves, tokens as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import canvas
from .compose import Ragged
from .dataset import Dataset
from .loader import Loader

KINDS = ("image", "series", "text")
COLOURS = (canvas.BLUE, canvas.ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MISSING = (204, 0, 204)  # NaN in an image
SMALLEST = 5  # pixels of an image's side, from which rows of numbers are one without being asked
LINE = 56  # characters of a line of text
LINES = 4  # of one sample


class Shown(NamedTuple):
    """A field to be drawn: its rows, one array each, and as what."""

    name: str
    kind: str
    rows: list[np.ndarray]


def show(
    batch: Any,
    n: int = 16,
    *,
    fields: Sequence[str] | str | None = None,
    kind: str | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> Any:
    """Draw the first n rows of a batch or a data set; labels and other numbers of a row stand above it.

    `batch` is a batch, a Dataset, a Loader (its next epoch's first batch, which stays to come), a dict of arrays or one
    array (n, ...), of NumPy's or torch's. What has rows (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels is an
    image: uint8 as it is, other numbers from their least to their greatest where they leave [0, 1], NaN in magenta.
    Rows (time,) or (time, columns) are curves; rows (time,) of integers are tokens, as text through
    `decode(numbers)`, as bytes where they are printable, else as numbers. `fields` chooses, `kind` ("image", "series" or
    "text") overrules. Gives a matplotlib Figure, which notebooks show; in a script `jl.show(batch).savefig(path)`.

    Raises ImportError without matplotlib (`pip install 'jitloader[plot]'`), ValueError where nothing can be drawn.
    """
    count = n if isinstance(n, int) and not isinstance(n, bool) else 0
    if count < 1:
        raise ValueError(f"show takes a number of rows of at least 1, got n={n!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is 'image', 'series' or 'text', got {kind!r}")
    found = {name: rows_of(value, count) for name, value in columns(batch, count).items()}
    if fields is not None:
        wanted = (fields,) if isinstance(fields, str) else tuple(fields)
        for name in wanted:
            if name not in found:
                raise KeyError(f"no field {name!r}: there are {', '.join(found)}")
    else:
        wanted = tuple(found)
    drawn, told = [], {}
    for name in wanted:
        rows = found[name]
        if rows and all(row.size == 1 and row.ndim < 2 for row in rows) and kind is None:
            told[name] = [row.reshape(-1)[0] for row in rows]
            continue
        seen = kind_of(rows) if kind is None else kind if fits(rows, kind) else None
        if seen is not None:
            drawn.append(Shown(name, seen, rows))
    if not any(found.values()):
        raise ValueError("there is no row to show")
    place = "position"
    if not drawn and told and kind is None:
        drawn, told, place = [Shown(name, "series", [np.array(values)]) for name, values in told.items()], {}, "row"
    if not drawn:
        shapes = ", ".join(f"{name!r} has rows {found[name][0].dtype} {found[name][0].shape}" for name in wanted)
        raise ValueError(f"nothing to draw as {kind or 'image, series or text'}: {shapes}")
    if all(field.kind == "text" for field in drawn):
        return page(drawn, told, decode)
    return grid(drawn, told, decode, place)


def columns(batch: Any, count: int) -> dict[str, Any]:
    """Give the fields of what there is to show by name."""
    if isinstance(batch, Dataset):
        batch = batch[:count]
    elif isinstance(batch, Loader):
        batch = batch[0]
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, Ragged):
        return {"x": batch}
    if hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    if isinstance(batch, (tuple, list)) and all(hasattr(value, "shape") and len(value.shape) for value in batch):
        return {str(k): value for k, value in enumerate(batch)}
    return {"x": batch}


def rows_of(value: Any, count: int) -> list[np.ndarray]:
    """Give the first rows of a field as arrays."""
    if isinstance(value, Ragged):
        ends = value.offsets[1 : count + 1]
        return [np.asarray(value.values[a:b]) for a, b in zip(value.offsets, ends, strict=False)]
    if hasattr(value, "detach"):  # a torch tensor, which may lie on another device or carry gradients
        value = value[:count].detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    array = np.asarray(value)
    if array.dtype.kind not in "biufV" or array.ndim == 0:
        raise TypeError(f"show takes arrays of numbers with a row axis, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16 and other small floats
    return list(array[:count])


def kind_of(rows: Sequence[np.ndarray]) -> str | None:
    """Give what rows are drawn as where nobody said; None where they cannot be."""
    row = max(rows, key=lambda r: r.size, default=np.zeros(0))
    if row.ndim == 3:
        return "image" if fits(rows, "image") else None
    if row.ndim == 2:
        short, long = sorted(row.shape)
        return "image" if short >= SMALLEST and long <= 4 * short else "series"
    if row.ndim == 1:
        return "text" if row.dtype.kind in "iu" and row.size > 1 else "series"
    return None


def fits(rows: Sequence[np.ndarray], kind: str) -> bool:
    """Whether rows can be drawn as that."""
    row = max(rows, key=lambda r: r.size, default=np.zeros(0))
    if kind == "image":
        return row.ndim == 2 or (row.ndim == 3 and (row.shape[2] in (1, 3, 4) or row.shape[0] in (1, 3, 4)))
    return row.ndim in (1, 2) if kind == "series" else row.ndim == 1 and row.dtype.kind in "iu"


def pixels(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Give images (H, W), (H, W, C) or (C, H, W) of any dtype as uint8 (H, W, 3 or 4), all on one scale."""
    placed = []
    for row in rows:
        if row.ndim == 2:
            row = row[..., None]
        elif row.shape[2] not in (1, 3, 4):
            row = row.transpose(1, 2, 0)
        placed.append(np.repeat(row, 3, axis=2) if row.shape[2] == 1 else row)
    if all(row.dtype == np.uint8 for row in placed):
        return placed
    floats = [row.astype(np.float64) for row in placed]
    low, high = extent(floats)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    made = []
    for row in floats:
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.clip((row - low) / ((high - low) or 1.0), 0, 1)
        bytes_ = np.rint(np.nan_to_num(scaled) * 255).astype(np.uint8)
        bytes_[np.isnan(row).any(axis=2), :3] = MISSING
        made.append(bytes_)
    return made


def extent(rows: Sequence[np.ndarray]) -> tuple[float, float]:
    """Give the least and the greatest finite number of some arrays, (0, 1) where there is none."""
    finite = [row[np.isfinite(row)] for row in rows]
    lows, highs = [r.min() for r in finite if r.size], [r.max() for r in finite if r.size]
    return (float(min(lows)), float(max(highs))) if lows else (0.0, 1.0)


def words(row: np.ndarray, decode: Callable[[list[int]], str] | None) -> str:
    """Give tokens as text: decoded, else as bytes where all are printable, else as numbers."""
    numbers = [int(value) for value in row]
    if decode is not None:
        return str(decode(numbers))
    if row.dtype.itemsize == 1 and numbers and all(32 <= n < 127 or n in (9, 10, 13) for n in numbers):
        return bytes(numbers).decode()
    return " ".join(map(str, numbers))


def lines(text: str, width: int = LINE, most: int = LINES) -> list[str]:
    """Cut text into lines of so many characters, between words where it can; what is left out is an ellipsis.

    >>> lines("one two three four five", width=9, most=2)
    ['one two', 'three …']
    """
    made: list[str] = []
    for word in text.split():
        while len(word) > width:
            made.append(word[:width])
            word = word[width:]
        if made and len(made[-1]) + 1 + len(word) <= width:
            made[-1] += " " + word
        else:
            made.append(word)
    if len(made) > most:
        made = made[:most]
        while len(made[-1]) + 2 > width and " " in made[-1]:
            made[-1] = made[-1].rpartition(" ")[0]
        made[-1] = made[-1][: width - 2] + " …"
    return made


def title(told: Mapping[str, Sequence[Any]], k: int) -> str:
    """Give what stands above row k: the one number it has, or several with their names."""
    values = {name: values[k] for name, values in told.items() if k < len(values)}
    texts = {name: f"{v:.4g}" if v.dtype.kind == "f" else str(v) for name, v in values.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def columns_for(count: int, ideal: float) -> int:
    """Give a number of columns near the ideal that leaves few cells empty.

    >>> columns_for(16, 4.7), columns_for(20, 5.3), columns_for(7, 3.1), columns_for(1, 1.2)
    (4, 5, 4, 1)
    """
    choices = range(max(1, math.ceil(0.7 * ideal)), max(1, math.floor(1.4 * ideal)) + 1)
    return min(min(choices, key=lambda a: (-count % a, abs(a - ideal))), count)


def grid(drawn: Sequence[Shown], told: Mapping[str, Sequence[Any]], decode: Any, place: str) -> Any:
    """Draw rows in cells, the fields of a row side by side."""
    count, several = max(len(field.rows) for field in drawn), len(drawn)
    wide = any(field.kind != "image" for field in drawn)
    across = columns_for(count, math.sqrt(count * (0.8 if wide else 1.4) / several))
    down = -(-count // across)
    width, height = (3.0, 1.9) if wide else (1.35, 1.55)
    made = canvas.figure(max(across * several * width, 3.2), down * height + 0.3)
    cells = np.asarray(made.subplots(down, across * several, squeeze=False))
    ranges = {field.name: extent([np.asarray(r, np.float64) for r in field.rows]) for field in drawn}
    ready = [pixels(field.rows) if field.kind == "image" else field.rows for field in drawn]
    for cell in cells.flat:
        cell.set_axis_off()
    for k in range(count):
        for f, field in enumerate(drawn):
            if k >= len(field.rows):
                continue
            cell = cells[k // across, (k % across) * several + f]
            head = title(told, k) if f == 0 else ""
            name = field.name if several > 1 and k < across else ""
            cell.set_title("\n".join(filter(None, [head, name])), fontsize=8, pad=3)
            if field.kind == "image":
                cell.imshow(ready[f][k], interpolation="nearest")
                cell.set_axis_on()  # a thin frame: white images end somewhere too
                cell.set(xticks=[], yticks=[])
                cell.spines[:].set(color="#bbbbbb", linewidth=0.5)
            elif field.kind == "text":
                text = "\n".join(lines(words(field.rows[k], decode), 30, 7))
                cell.text(0, 1, text, family="monospace", fontsize=7, va="top", transform=cell.transAxes)
            else:
                curves(cell, field.rows[k], ranges[field.name])
                if k + across >= count:
                    cell.set_xlabel(place, fontsize=7)
                if several == 1 and k % across == 0:
                    cell.set_ylabel(field.name, fontsize=8)
    notes = [
        f"{field.name}: {low:.4g} black to {high:.4g} white"
        for field in drawn
        for low, high in [ranges[field.name]]
        if field.kind == "image" and field.rows[0].dtype != np.uint8 and not (low >= 0 and high <= 1)
    ]
    if notes:
        made.supxlabel("; ".join(notes), fontsize=8)
    return made


def curves(cell: Any, row: np.ndarray, span: tuple[float, float]) -> None:
    """Draw one row as a curve a column, all rows of the field on one scale."""
    columns_ = np.asarray(row, np.float64).reshape(len(row), -1)
    cell.set_axis_on()
    for c in range(min(columns_.shape[1], len(COLOURS))):
        marker = "o" if len(row) < 20 else ""
        cell.plot(columns_[:, c], color=COLOURS[c], linewidth=1.2, marker=marker, markersize=3)
    margin = 0.05 * ((span[1] - span[0]) or 1.0)
    cell.set_ylim(span[0] - margin, span[1] + margin)
    cell.tick_params(labelsize=7, length=2)
    cell.spines[["top", "right"]].set_visible(False)
    if columns_.shape[1] > len(COLOURS):
        cell.annotate(f"first {len(COLOURS)} of {columns_.shape[1]} columns", (1, 1), xycoords="axes fraction", fontsize=6,
                      ha="right", va="top")  # fmt: skip


def page(drawn: Sequence[Shown], told: Mapping[str, Sequence[Any]], decode: Any) -> Any:
    """Write rows of tokens one below the other, the fields of a row side by side."""
    count, several = max(len(field.rows) for field in drawn), len(drawn)
    blocks = [
        [lines(words(row, decode)) for row in (field.rows[k : k + 1] or [np.zeros(0, int)])]
        for k in range(count)
        for field in drawn
    ]
    heights = [max(len(blocks[k * several + f][0]) for f in range(several)) or 1 for k in range(count)]
    total = sum(heights) + 0.6 * count + 1
    made = canvas.figure(0.6 + 4.9 * several, 0.17 * total + 0.2)
    cell = made.subplots()
    cell.set_axis_off()
    cell.set(xlim=(0, several), ylim=(total, 0))
    for f, field in enumerate(drawn):
        cell.text(f, 0, field.name, fontsize=9, weight="bold", va="top")
    at = 1.3
    for k, height in enumerate(heights):
        head = title(told, k) or str(k)
        cell.text(-0.01, at, head, fontsize=8, color="#666666", va="top", ha="right")
        for f in range(several):
            for j, text in enumerate(blocks[k * several + f][0]):
                cell.text(f, at + j, text, family="monospace", fontsize=8, va="top")
        at += height + 0.6
    return made
