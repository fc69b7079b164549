"""Bars and plots on a fixed scale, 0 to a limit.

Textual's own sparkline scales from the smallest to the largest of its data, which draws a link at
a constant 50 GB/s as idle, and 49.9 to 50.0 as a leap; for a meter that is a lie.
"""

from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"
NO_DATA = "·"


def share(value: float | None, limit: float | None) -> float:
    """`value` of `limit`, 0 to 1; 0 where either is not known."""
    if value is None or not limit or limit <= 0 or value <= 0:
        return 0.0
    return min(1.0, value / limit)


def bar(ratio: float, width: int) -> str:
    """`width` cells, filled from the left in eighths of a cell; full only at 1, empty only at 0."""
    eighths = round(max(0.0, min(1.0, ratio)) * width * 8)
    if ratio > 0:
        eighths = max(1, eighths)
    if ratio < 1:
        eighths = min(eighths, width * 8 - 1)
    full, rest = divmod(max(0, eighths), 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def spark(values: Sequence[float], limit: float | None, width: int) -> str:
    """The last `width` values, one cell each, on 0..limit; what there is no value for is a dot."""
    shown = values[-width:] if width > 0 else ()
    cells = "".join(_LEVELS[_level(share(value, limit), 8)] for value in shown)
    return cells.rjust(width, NO_DATA)


def plot(values: Sequence[float], limit: float | None, width: int, height: int) -> list[str]:
    """`height` rows of `width` cells, the top row first; eight levels a row, on 0..limit."""
    shown = list(values[-width:]) if width > 0 else []
    levels = [_level(share(value, limit), 8 * height) for value in shown]
    rows = []
    for row in range(height - 1, -1, -1):
        text = "".join(_LEVELS[max(0, min(8, level - 8 * row))] for level in levels)
        rows.append(text.rjust(width, NO_DATA if row == 0 else " "))
    return rows


def _level(ratio: float, levels: int) -> int:
    """Something is never drawn as nothing."""
    return max(1, round(ratio * levels)) if ratio > 0 else 0


def stretch(begin: float, middle: float, end: float, scale: float, width: int) -> str:
    """A row of a time line 0..scale: blank, `░` from begin to middle, `█` from middle to end."""
    if scale <= 0 or width <= 0:
        return " " * max(0, width)
    at = [max(0, min(width, int(x / scale * width))) for x in (begin, middle, end)]
    first = min(at[0], width - 1)
    second = max(first, min(at[1], width - 1))
    wait = second - first
    work = max(1, at[2] - second)
    return (" " * first + "░" * wait + "█" * work)[:width].ljust(width)
