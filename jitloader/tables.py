"""Tables and sizes as people read them, in text and in HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def size_of(nbytes: float) -> str:
    """Give a number of bytes as people read it.

    >>> size_of(1000), size_of(14376), size_of(602_112_000)
    ('1,000 B', '14.4 kB', '602.1 MB')
    """
    if nbytes < 10_000:
        return f"{nbytes:,.0f} B"
    value, units = float(nbytes), iter(("kB", "MB", "GB", "TB", "PB"))
    unit = "B"
    while value >= 1000:
        value, unit = value / 1000, next(units)
    return f"{value:.1f} {unit}"


def seconds_of(seconds: float) -> str:
    """Give a number of seconds as people read it.

    >>> seconds_of(83.21), seconds_of(1.5), seconds_of(0.0123), seconds_of(4e-5)
    ('83 s', '1.50 s', '12.3 ms', '40 us')
    """
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def number_of(value: float) -> str:
    """Give a number with four significant digits; whole ones below a million with all of theirs.

    >>> number_of(123456.0), number_of(0.5), number_of(-1.23456), number_of(6.02e23)
    ('123,456', '0.5', '-1.235', '6.02e+23')
    """
    return f"{value:,.0f}" if value == int_or_nan(value) and abs(value) < 1e6 else f"{value:.4g}"


def int_or_nan(value: float) -> float:
    """Give a finite number without its fraction, and NaN for others."""
    return float(int(value)) if abs(value) < float("inf") else float("nan")


def sparkline(counts: Sequence[int]) -> str:
    """Give counts as a line of bars; none is blank.

    >>> sparkline([0, 1, 4, 8])
    ' ▁▄█'
    """
    most = max(counts, default=0)
    return "".join(BLOCKS[-(-8 * int(n) // int(most)) - 1] if n else " " for n in counts)


def text_table(lines: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Give lines of cells as columns of text, the first line their heads.

    >>> print(text_table([("field", "rows"), ("x", "1,000")], indent="| "))
    | field  rows
    | x      1,000
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(lines: Sequence[Sequence[str]], raw: Sequence[int] = ()) -> str:
    """Give lines of cells as an HTML table, the first line its heads; columns in `raw` hold HTML below their head."""
    heads = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in lines[0])
    rows = "".join(
        "<tr>" + "".join(f"<td>{cell if k in raw else html.escape(cell)}</td>" for k, cell in enumerate(line)) + "</tr>"
        for line in lines[1:]
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def html_bars(counts: Sequence[int], told: str, width: int = 160, height: int = 28) -> str:
    """Give counts as a small bar chart in SVG, `told` its title for who points at it or cannot see it."""
    most, step = max(counts, default=0) or 1, width / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{k * step:.1f}" y="{height * (1 - n / most):.1f}" width="{step * 0.9:.1f}" height="{height * n / most:.1f}"/>'
        for k, n in enumerate(map(int, counts))
        if n
    )
    title = html.escape(told)
    return f'<svg role="img" width="{width}" height="{height}" fill="#0072b2"><title>{title}</title>{bars}</svg>'
