"""Lines of text of an exact width: the only thing that the console draws.

A line is a row of spans (text, style name). Text from outside goes through `clean` first, so that
no name can move the cursor, style the screen or shift a column. Widths are in terminal cells.
"""

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.cells import cell_len

Span = tuple[str, str]
Line = tuple[Span, ...]

STYLES = {
    "": "",
    "dim": "dim",
    "bold": "bold",
    "title": "bold cyan",
    "bar": "cyan on grey23",  # the rest of a meter is seen as well: it ends at the line rate
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
}
"""Style names and what they mean to rich."""

CHOSEN = " chosen"
"""Behind the name of a style: the same on the chosen row."""

PLAIN_STYLES = {name: " ".join(set(style.split()) & {"bold", "dim"})
                for name, style in STYLES.items()}  # fmt: skip
"""The same without colour, for NO_COLOR: a filter would turn red into a grey that is near black."""

STYLES |= {
    name + CHOSEN: f"{style.partition(' on ')[0].replace('dim', '')} on #1f4468"
    for name, style in STYLES.items()
}
PLAIN_STYLES |= {name + CHOSEN: "reverse" for name in PLAIN_STYLES}

MAX_MARKS = 2  # combining marks on one letter
_ASCII_GLYPHS = str.maketrans(
    "┌┐└┘├┤┬┴┼─│▕▏▎▍▌▋▊▉█▇▆▅▄▃▂▁▓▒░●·…→↑↓µ×≥≤“”",
    "+++++++++-|||--====#%*+=-:.%=.*.~>^vux><''",
)


@lru_cache(maxsize=8192)
def clean(text: str, most: int = 200) -> str:
    """`text` in characters that take their own cells and nothing else, at most `most` of them.

    Controls, bidirectional and other format characters, lone marks and unassigned code points
    become `?`. Where the characters still do not add up to the width of the whole (joined emoji,
    flags), all but ASCII becomes `?`.
    """
    if text.isascii() and text.isprintable():
        return text if len(text) <= most else text[: most - 1] + "…"
    kept: list[str] = []
    marks = MAX_MARKS  # at the start there is no letter to put one on
    for char in unicodedata.normalize("NFC", text[: 4 * most]):
        category = unicodedata.category(char)
        if category[0] == "M":
            marks += 1
            if marks <= MAX_MARKS and not 0xFE00 <= ord(char) <= 0xFE0F and ord(char) < 0xE0000:
                kept.append(char)
            else:
                kept.append("?")
            continue
        bad = category[0] == "C" or category in ("Zl", "Zp") or cell_len(char) == 0
        kept.append("?" if bad else " " if category == "Zs" else char)
        marks = MAX_MARKS if bad or category == "Zs" else 0
    if len(kept) > most:
        kept[most - 1 :] = ["…"]
    shown = "".join(kept)
    if sum(map(cell_len, shown)) != cell_len(shown):
        return "".join(char if char.isascii() else "?" for char in shown)
    return shown


def split(text: str, width: int) -> tuple[str, str]:
    """Clean `text` as what fits in `width` cells, and the rest."""
    used = 0
    for at, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return text[:at], text[at:]
    return text, ""


def cut(text: str, width: int) -> str:
    """The start of clean `text` that fits in `width` cells, with `…` where something is missing."""
    if cell_len(text) <= width:
        return text
    return split(text, width - 1)[0] + "…" if width > 0 else ""


def pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells; `right` puts it on the right."""
    text = cut(text, width)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def plain(line: Line) -> str:
    return "".join(text for text, _ in line)


def width_of(line: Line) -> int:
    return cell_len(plain(line))


def fit(line: Line, width: int, *, right: bool = False) -> Line:
    """`line` in exactly `width` cells."""
    space = width - width_of(line)
    if space == 0:
        return line
    if space > 0:
        return ((" " * space, ""), *line) if right else (*line, (" " * space, ""))
    out: list[Span] = []
    left = width
    for text, style in line:
        if (size := cell_len(text)) >= left:  # more follows, or this is too long itself
            out.append((pad(cut(text + "…", left), left), style))
            break
        out.append((text, style))
        left -= size
    return tuple(out)


def joined(parts: Iterable[Line], gap: str = "  ") -> Line:
    """`parts` in one line with `gap` between them; empty ones are left out."""
    out: list[Span] = []
    for part in parts:
        if not part:
            continue
        if out:
            out.append((gap, ""))
        out += part
    return tuple(out)


Item = tuple[int, Line]
"""A part of a line with its rank: where room is short, the highest rank goes first."""


def sides(left: list[Item], right: list[Item], width: int, *, gap: str = "  ") -> Line:
    """One line: `left` items, space, `right` items, without what does not fit."""
    left, right = [i for i in left if i[1]], [i for i in right if i[1]]
    while True:
        head, tail = joined((i[1] for i in left), gap), joined((i[1] for i in right), gap)
        space = width - 2 - width_of(head) - width_of(tail)
        if space >= (2 if head and tail else 0):
            return fit(((" ", ""), *head, (" " * space, ""), *tail, (" ", "")), width)
        if len(left) + len(right) <= 1:
            return fit(((" ", ""), *head, *tail), width)
        worst = max(left + right, key=lambda item: item[0])
        (left if worst in left else right).remove(worst)


def restyled(line: Line, style: str) -> Line:
    return ((plain(line), style),)


def to_ascii(line: Line) -> Line:
    """Our glyphs as ASCII; what is left of other alphabets as `?`, cell by cell."""
    return tuple(
        (
            "".join(
                char if char.isascii() else "?" * cell_len(char)
                for char in text.translate(_ASCII_GLYPHS)
            ),
            style,
        )
        for text, style in line
    )
