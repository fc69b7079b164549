"""What happened, one line per event."""

from pdnode.obs.snapshot import Event, Snapshot
from pdnode_tui import units
from pdnode_tui.lines import Line, Span, clean, fit, split
from pdnode_tui.render.common import found, title
from pdnode_tui.render.header import SEVERITIES, SEVERITY_STYLES
from pdnode_tui.table import Column, Panel, Rows, chosen, frame, table
from pdnode_tui.view import View

MAX_TEXT = 400


def known(snapshot: Snapshot, view: View) -> tuple[Event, ...]:
    """What was collected over time, else what this snapshot has; oldest first."""
    return view.events or snapshot.events


def ordered(snapshot: Snapshot, view: View) -> list[Event]:
    rows = found(known(snapshot, view), view, lambda e: (e.code, e.severity, e.text))
    if view.order == "oldest":
        return rows
    if view.order == "severity":
        return sorted(rows, key=lambda e: (SEVERITIES.get(e.severity, 1), -e.cursor))
    return rows[::-1]


def event_line(event: Event, width: int) -> Line:
    style = SEVERITY_STYLES.get(event.severity, "")
    line = fit(
        ((f" {units.clock(event.time_s)} ", "dim"), (clean(event.code, 24), style),
         (f" {clean(event.text, MAX_TEXT)}", "")), width - 1)  # fmt: skip
    return (*line, (" ", ""))


def last_events(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """The youngest `height` events, youngest first."""
    lines = [event_line(event, width) for event in known(snapshot, view)[::-1][:height]]
    return lines + [fit((), width)] * (height - len(lines))


def _level(event: Event) -> Span:
    return clean(event.severity, 7), SEVERITY_STYLES.get(event.severity, "")


def events_screen(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    rows = ordered(snapshot, view)
    inner = width - 2
    below = 3 if height >= 12 else 0
    columns: list[Column[Event]] = [
        Column("TIME", 8, lambda e: units.clock(e.time_s), rank=2),
        Column("LEVEL", 7, _level,
                      rank=3),
        Column("CODE", 12, lambda e: clean(e.code, 24), rank=1, most=20),
        Column("WHAT", 20, lambda e: clean(e.text, MAX_TEXT), most=MAX_TEXT),
    ]  # fmt: skip
    shown = Rows(rows, lambda e: str(e.cursor), view.selected, empty="no event yet")
    lines = table(columns, shown, width=inner, height=height - 2 - (below + 1 if below else 0))
    panels = [[Panel(title(view, "EVENTS", f"{len(rows)}", sorts=True), inner, lines)]]
    if below:
        index = chosen([str(event.cursor) for event in rows], view.selected)
        text = clean(rows[index].text, MAX_TEXT) if index >= 0 else ""
        panels.append([Panel((("EVENT", "title"),), inner, _wrapped(text, inner, below))])
    return frame(panels)


def _wrapped(text: str, width: int, height: int) -> list[Line]:
    lines: list[Line] = []
    while text and len(lines) < height - 1:
        piece, text = split(text, width - 2)
        lines.append(fit(((f" {piece}", ""),), width))
    if text:
        lines.append(fit(((f" {text}", ""),), width))
    return lines + [fit((), width)] * (height - len(lines))
