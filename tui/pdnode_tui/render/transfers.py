"""The KV transfers in flight, and the layers of the chosen one."""

from pdnode.obs.snapshot import LayerMark, SlowTransfer, Snapshot, Transfer
from pdnode_tui import units
from pdnode_tui.lines import Line, Span, clean, fit, sides, width_of
from pdnode_tui.meter import bar, share
from pdnode_tui.render.common import found, marked, sends, title
from pdnode_tui.table import Column, Panel, Rows, chosen, table
from pdnode_tui.view import View


def ordered(snapshot: Snapshot, view: View) -> list[Transfer]:
    """The transfers in the operator's order."""
    rows = found(snapshot.transfers, view, lambda t: (t.request_id, t.peer, t.state))
    orders = {
        "age": lambda t: -t.age_s,
        "rate": lambda t: -(t.bytes_per_s or 0.0),
        "progress": lambda t: -_done(t),
        "peer": lambda t: t.peer,
    }
    return sorted(rows, key=orders.get(view.order, orders["age"]))


def selection(snapshot: Snapshot, view: View) -> Transfer | None:
    rows = ordered(snapshot, view)
    index = chosen([row.request_id for row in rows], view.selected)
    return rows[index] if index >= 0 else None


def _done(transfer: Transfer) -> float:
    return share(transfer.pages_done, transfer.pages)


def _layer(transfer: Transfer) -> str:
    if transfer.state in ("queue", "prefill") or transfer.layer is None:
        return clean(transfer.state, 8)
    return f"{transfer.layer}/{transfer.layers if transfer.layers is not None else '-'}"


def _columns(snapshot: Snapshot, view: View) -> list[Column[Transfer]]:
    stale = view.stale is not None
    peer = "TO" if sends(snapshot) else "FROM"

    def pages(transfer: Transfer) -> Span:
        return bar(_done(transfer), 8), "bar"

    return [
        Column("REQUEST", 8, lambda t: clean(t.request_id, 40), rank=0, most=20),
        Column(peer, 6, lambda t: clean(t.peer, 24), rank=2, most=14),
        Column("TOKENS", 7, lambda t: units.count(t.tokens), right=True, rank=5),
        Column("PAGES", 8, pages, rank=4),
        Column("", 4, lambda t: units.percent(None if t.pages_done is None else _done(t)),
               right=True, rank=1),
        Column("LAYER", 7, _layer, right=True, rank=3),
        Column("Gb/s", 5, lambda t: units.gbits(None if stale else t.bytes_per_s), right=True,
               rank=1),
        Column("AGE", 6, lambda t: units.duration(t.age_s), right=True, rank=1),
    ]  # fmt: skip


def transfers_panel(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    """`height` inner lines: the table, the summary of the last minute, the layers of one."""
    rows = ordered(snapshot, view)
    total = snapshot.transfers_inflight
    left = sum((t.bytes or 0) - (t.bytes_done or 0) for t in snapshot.transfers)
    oldest = max((t.age_s for t in snapshot.transfers), default=None)
    count = len(snapshot.transfers) if total is None else total
    detail = f"{count} xfers"
    if snapshot.transfers:
        detail += f"  {units.volume(left)} left  oldest {units.duration(oldest)}"
    tail = [_summary(snapshot, width)] if height >= 5 else []
    if height >= 8:
        tail += _layers(snapshot, view, width)
    lines = table(
        _columns(snapshot, view),
        Rows(rows, lambda t: t.request_id, view.selected,
             _marks(snapshot), "no KV transfer at this instant"),
        width=width, height=height - len(tail),
    )  # fmt: skip
    return Panel(title(view, "KV IN FLIGHT", detail, sorts=True), width, lines + tail)


def _marks(snapshot: Snapshot) -> frozenset[str]:
    names = marked(snapshot)
    return frozenset(t.request_id for t in snapshot.transfers if {t.request_id, t.peer} & names)


def _summary(snapshot: Snapshot, width: int) -> Line:
    summary = snapshot.summary
    if summary is None:
        return fit(((" last 60 s: -", "dim"),), width)
    done = summary.transfers
    failed = summary.transfers_failed
    return sides(
        [
            (0, ((f"last {summary.window_s:.0f} s: {units.count(done.count)} done", ""),)),
            (2, ((f"p50 {units.duration(done.p50_s)}", ""),)),
            (3, ((f"p99 {units.duration(done.p99_s)}", ""),)),
            (1, ((f"{units.count(failed)} failed", "bad" if failed else "dim"),)),
        ],
        [],
        width,
    )


def _layers(snapshot: Snapshot, view: View, width: int) -> list[Line]:
    """Two lines: the layers of the chosen transfer, or of the last slow one."""
    transfer = selection(snapshot, view)
    if transfer is None:
        return _slow(snapshot.last_slow, "to" if sends(snapshot) else "from", width)
    name = clean(transfer.request_id, 16)
    moved = f"{units.volume(transfer.bytes_done)} of {units.volume(transfer.bytes)}"
    if transfer.layer is None or not transfer.layers:
        first = _meter(f" {name} ▕", [(_done(transfer), "█", "good")], "▏", width)
        rest = f"{clean(transfer.state, 12)}; layers are known at the prefill node"
    else:
        layers = transfer.layers
        done = max(0, min(transfer.layer, layers))
        wire = max(done, min(transfer.layer_posted or 0, layers)) - done
        parts = [(done / layers, "█", "good"), (wire / layers, "▓", "warn")]
        first = _meter(f" {name} layer 0▕", parts, f"▏{layers - 1} ", width)
        rest = f"on wire {wire}  to do {layers - done - wire}"
    return [
        first,
        sides([(0, ((f"  {rest}", ""),)), (1, ((moved, ""),))],
              [(2, (("enter: detail", "dim"),))], width),
    ]  # fmt: skip


def _meter(head: str, parts: list[tuple[float, str, str]], end: str, width: int) -> Line:
    """`parts` are (share of the whole, glyph, style); a share that is not 0 has a cell at least."""
    room = width - width_of(((head + end, ""),))
    left = room
    spans: list[Span] = [(head, "")]
    for ratio, glyph, style in parts:
        cells = min(left, max(ratio > 0, round(room * ratio)))
        spans.append((glyph * cells, style))
        left -= cells
    return fit((*spans, ("░" * left, "dim"), (end, "")), width)


def _slow(slow: SlowTransfer | None, way: str, width: int) -> list[Line]:
    if slow is None:
        return [fit(((" no slow transfer yet", "dim"),), width), fit((), width)]
    worst, name = worst_layer(slow), clean(slow.request_id, 16)
    text = f"layer {worst.layer} took longest: {_us(worst)}" if worst else "no layers recorded"
    return [
        sides([(0, ((f"last slow: {name} {way} {clean(slow.peer, 16)}", ""),)),
               (1, ((units.duration(slow.total_s), "warn"),)),
               (2, ((f"{units.duration(slow.ended_s)} ago", "dim"),))], [], width),
        sides([(0, ((f"  {text}", ""),))], [(1, (("enter: detail", "dim"),))], width),
    ]  # fmt: skip


def _us(mark: LayerMark) -> str:
    return units.duration(((mark.done_us or 0) - (mark.posted_us or 0)) / 1e6) + " on the wire"


def worst_layer(slow: SlowTransfer) -> LayerMark | None:
    """The layer with the longest time from posting to the last completion."""
    known = [m for m in slow.layers if m.done_us is not None and m.posted_us is not None]
    return max(known, key=lambda m: (m.done_us or 0) - (m.posted_us or 0), default=None)
