"""Tables of fixed columns, and the frame of panels around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdnode_tui.lines import CHOSEN, Line, Span, fit, pad, width_of

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """`cell` gives clean text, or (text, style). Columns with the highest rank go first where the
    table is too narrow; room that is left goes to those that grow, up to `most`."""

    title: str
    width: int
    cell: Callable[[Row], str | Span]
    right: bool = False
    rank: int = 0
    most: int = 0  # grows up to this


@dataclass(frozen=True, slots=True)
class Rows(Generic[Row]):
    """What a table shows: rows with their keys, the chosen one, and those with a `!`."""

    rows: Sequence[Row]
    key: Callable[[Row], str]
    selected: str | None = None
    marked: frozenset[str] = frozenset()
    empty: str = "none"
    choose: bool = True  # off: a list in which no row is chosen


def chosen(keys: Sequence[str], selected: str | None) -> int:
    """Index of `selected`; 0 where it is not (or no longer) there; -1 where there is nothing."""
    if not keys:
        return -1
    return keys.index(selected) if selected in keys else 0


def window(count: int, index: int, height: int) -> int:
    """First of `height` rows to show, so that row `index` is among them."""
    return max(0, min(index - height // 2, count - height))


def table(
    columns: Sequence[Column[Row]], shown: Rows[Row], *, width: int, height: int
) -> list[Line]:
    """`height` lines of `width` cells: titles, then rows around the chosen one.

    The first cell is `>` in the chosen row, the last `!` in a marked one.
    """
    if height <= 0:
        return []
    fitting, widths = _widths(columns, width - 2)
    titles = " ".join(pad(c.title, w, right=c.right) for c, w in zip(fitting, widths, strict=True))
    lines = [fit(((" " + titles, "dim"),), width)]
    if not shown.rows:
        lines.append(fit(((" " + shown.empty, "dim"),), width))
    keys = [shown.key(row) for row in shown.rows]
    index = chosen(keys, shown.selected)
    first = window(len(keys), index, height - 1)
    for number in range(first, min(first + height - 1, len(keys))):
        line = _row(fitting, widths, shown.rows[number], width, marked=keys[number] in shown.marked)
        lines.append(_select(line) if number == index and shown.choose else line)
    lines += [fit((), width)] * (height - len(lines))
    return lines[:height]


def _select(line: Line) -> Line:
    head, *rest = line
    return tuple((text, style + CHOSEN) for text, style in ((">" + head[0][1:], ""), *rest))


def _row(
    columns: Sequence[Column[Row]], widths: Sequence[int], row: Row, width: int, *, marked: bool
) -> Line:
    spans: list[Span] = [(" ", "")]
    for number, (column, size) in enumerate(zip(columns, widths, strict=True)):
        value = column.cell(row)
        text, style = value if isinstance(value, tuple) else (value, "")
        if number:
            spans.append((" ", ""))
        spans.append((pad(text, size, right=column.right), style))
    body = fit(tuple(spans), width - 1)
    return (*body, ("!", "bad") if marked else (" ", ""))


def _widths(columns: Sequence[Column[Row]], width: int) -> tuple[list[Column[Row]], list[int]]:
    kept = list(columns)
    while len(kept) > 1 and sum(c.width + 1 for c in kept) - 1 > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    widths = [min(c.width, max(1, width)) for c in kept]
    spare = width - sum(widths) - len(widths) + 1
    growing = [i for i, c in enumerate(kept) if c.most > c.width]
    while spare > 0 and growing:
        for i in list(growing):
            if spare == 0:
                break
            widths[i] += 1
            spare -= 1
            if widths[i] >= kept[i].most:
                growing.remove(i)
    return kept, widths


@dataclass(frozen=True, slots=True)
class Panel:
    """A titled box; `lines` are exactly as wide as its inside."""

    title: Line
    width: int  # of the inside
    lines: Sequence[Line]


def frame(rows: Sequence[Sequence[Panel]]) -> list[Line]:
    """Rows of panels with shared borders.

    The panels of one row have equally many lines, and every row has the same total width.
    """
    out: list[Line] = []
    above: set[int] = set()
    total = sum(panel.width + 1 for panel in rows[0]) + 1
    for panels in rows:
        starts = _starts(panels)
        out.append(_border(total, above, starts))
        for lines in zip(*(panel.lines for panel in panels), strict=True):
            line: list[Span] = [("│", "dim")]
            for inner in lines:
                line += [*inner, ("│", "dim")]
            out.append(tuple(line))
        above = set(starts)
    out.append(_border(total, above, {}))
    return out


def _starts(panels: Sequence[Panel]) -> dict[int, Panel]:
    """Column of each panel's left border."""
    at, found = 0, {}
    for panel in panels:
        found[at] = panel
        at += panel.width + 1
    return found


_CROSSINGS = {
    # (line above, line below) of the left edge, in between, of the right edge
    0: {(True, True): "├", (True, False): "└", (False, True): "┌"},
    1: {(True, True): "┼", (True, False): "┴", (False, True): "┬", (False, False): "─"},
    2: {(True, True): "┤", (True, False): "┘", (False, True): "┐"},
}


def _border(total: int, above: set[int], below: dict[int, Panel]) -> Line:
    has_above, has_below = bool(above), bool(below)
    glyphs = [_CROSSINGS[1][x in above, x in below] for x in range(total)]
    glyphs[0] = _CROSSINGS[0][has_above, has_below]
    glyphs[-1] = _CROSSINGS[2][has_above, has_below]
    spans: list[Span] = []
    at = 0
    for start, panel in below.items():
        room = panel.width - 4  # a dash and a space on both sides
        if not panel.title or room < 3:
            continue
        title = panel.title if width_of(panel.title) <= room else fit(panel.title, room)
        spans += [("".join(glyphs[at : start + 2]), "dim"), (" ", ""), *title, (" ", "")]
        at = start + 4 + width_of(title)
    return (*spans, ("".join(glyphs[at:]), "dim"))
