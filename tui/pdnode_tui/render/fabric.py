"""The NICs: rates on a fixed scale, peaks, share of line, errors, plots, and who uses them."""

from pdnode.obs.snapshot import Nic, Snapshot
from pdnode_tui import units
from pdnode_tui.lines import Item, Line, Span, clean, fit, joined, sides, width_of
from pdnode_tui.meter import bar, plot, share, spark
from pdnode_tui.render.common import (
    found,
    marked,
    peak_of,
    rate_of,
    scale_of,
    sends,
    title,
)
from pdnode_tui.table import Column, Panel, Rows, chosen, frame, table
from pdnode_tui.view import View


def _history(nic: Nic, *, tx: bool) -> tuple[int, ...]:
    return nic.tx_history if tx else nic.rx_history


def _line(nic: Nic, view: View, *, tx: bool) -> Span:
    if nic.state == "down":
        return "down", "bad"
    if not nic.line_bytes_per_s:
        return units.NOTHING, "dim"
    rate = rate_of(nic, view, tx=tx)
    return units.percent(None if rate is None else share(rate, nic.line_bytes_per_s)), ""


def nic_marks(snapshot: Snapshot) -> frozenset[str]:
    return marked(snapshot) | {nic.name for nic in snapshot.nics if nic.state == "down"}


def fabric_panel(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    """The small panel of the flow screen."""
    tx = sends(snapshot)
    heading = title(view, "FABRIC", f"{'tx' if tx else 'rx'} Gb/s")
    if not snapshot.nics:
        why = "no fabric: colocated" if snapshot.node.role == "colocated" else "no NIC is open yet"
        lines = [fit(((f" {why}", "dim"),), width)]
        return Panel(heading, width, lines + [fit((), width)] * (height - 1))
    columns: list[Column[Nic]] = [
        Column("NIC", 6, lambda n: clean(n.name, 24), most=12),
        Column("GPU", 3, lambda n: "-" if n.gpu is None else f"g{n.gpu}", rank=4),
        Column("now", 4, lambda n: units.gbits(rate_of(n, view, tx=tx)), right=True),
        Column("peak", 4, lambda n: units.gbits(peak_of(n, view, tx=tx)), right=True, rank=2),
        Column("line", 4, lambda n: _line(n, view, tx=tx), right=True, rank=1),
        Column("60 s", 8, lambda n: (_spark(n, view, 8, tx=tx), "bar"), rank=3),
    ]
    # The selection of the flow screen is a transfer, so no row is chosen here.
    lines = table(
        columns,
        Rows(snapshot.nics, lambda n: n.name, marked=nic_marks(snapshot), choose=False),
        width=width,
        height=height - 1,
    )
    return Panel(heading, width, [*lines, _total(snapshot, view, width, tx=tx)])


def _spark(nic: Nic, view: View, width: int, *, tx: bool) -> str:
    history = _history(nic, tx=tx)
    # Each cell stands for several seconds: their highest, so that no burst is lost.
    step = max(1, 60 // width)
    ends = range(len(history), 0, -step)
    buckets = [max(history[max(0, end - step) : end]) for end in ends][::-1]
    return spark(buckets, scale_of(nic, view, tx=tx), width)


def _total(snapshot: Snapshot, view: View, width: int, *, tx: bool) -> Line:
    rates = [r for nic in snapshot.nics if (r := rate_of(nic, view, tx=tx)) is not None]
    up = [n for n in snapshot.nics if n.state != "down"]
    line = sum(n.line_bytes_per_s or 0.0 for n in up)
    known = sum(rates) if rates else None
    left: list[Item] = [(0, ((f"total {units.gbits(known)}", "bold"),))]
    if line:
        left.append((2, ((f"{units.percent(share(known, line)) if rates else '-'}", ""),)))
    right: list[Item] = [(1, ((f"of {units.gbits(line)}", ""),))] if line else [
        (1, (("line rate not known", "dim"),))]  # fmt: skip
    return sides(left, right, width)


def nic_strip(snapshot: Snapshot, view: View, width: int) -> Line:
    """All NICs in one line, for small terminals."""
    tx = sends(snapshot)
    lead: Item = (0, (("tx" if tx else "rx", "dim"),))
    if not snapshot.nics:
        return sides([lead, (0, (("no NIC", "dim"),))], [], width)
    prefix = _common([clean(nic.name, 12) for nic in snapshot.nics])
    cells = [_strip_cell(nic, view, 4, tx=tx, cut=0) for nic in snapshot.nics]
    if width_of(joined([lead[1], *cells])) > width - 2:
        lead = (0, ((f"{'tx' if tx else 'rx'} {prefix}", "dim"),))
        cut = len(prefix) if len(snapshot.nics) > 1 else 0
        cells = [_strip_cell(nic, view, 1, tx=tx, cut=cut) for nic in snapshot.nics]
    return sides([lead, *((n, cell) for n, cell in enumerate(cells, start=1))], [], width)


def _common(names: list[str]) -> str:
    """What all names begin with."""
    first, last = min(names), max(names)
    same = next((i for i, char in enumerate(first) if char != last[i : i + 1]), len(first))
    return first[:same]


def _strip_cell(nic: Nic, view: View, meter: int, *, tx: bool, cut: int) -> Line:
    """Name without its first `cut` characters, a meter, the rate."""
    name = clean(nic.name, 12)[cut:]
    if nic.state == "down":
        return ((name, "dim"), (" down", "bad"))
    rate = rate_of(nic, view, tx=tx)
    ratio = share(rate, scale_of(nic, view, tx=tx))
    drawn = f" {bar(ratio, meter)}" if meter > 1 else spark([ratio], 1.0, 1)
    return ((name, "dim"), (drawn, "bar"), (f"{units.gbits(rate):>4}", ""))


def ordered(snapshot: Snapshot, view: View) -> list[Nic]:
    tx = sends(snapshot)
    rows = found(snapshot.nics, view, lambda n: (n.name, n.address, n.state, n.provider))
    orders = {
        "rate": lambda n: -(rate_of(n, view, tx=tx) or 0.0),
        "peak": lambda n: -(peak_of(n, view, tx=tx) or 0.0),
    }
    return sorted(rows, key=orders[view.order]) if view.order in orders else rows


def fabric_screen(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """Table of all NICs; plots and the peers of the chosen one."""
    rows = ordered(snapshot, view)
    inner = width - 2
    below = max(0, min(16, height - 3 - min(len(rows) + 1, height // 2) - 1))
    if below < 5:
        below = 0
    lines = table(
        _columns(view), Rows(rows, lambda n: n.name, view.selected, nic_marks(snapshot),
                             "no NIC is open"),
        width=inner, height=height - 2 - (below + 1 if below else 0),
    )  # fmt: skip
    panels = [[Panel(title(view, "FABRIC", "Gb/s", sorts=True), inner, lines)]]
    index = chosen([nic.name for nic in rows], view.selected)
    if below:
        nic = rows[index] if index >= 0 else None
        panels.append(_nic_panels(nic, view, width, below))
    return frame(panels)


def _columns(view: View) -> list[Column[Nic]]:
    def errors(nic: Nic) -> Span:
        total = sum(error.total for error in nic.errors)
        return (units.count(total) if nic.errors else units.NOTHING), "bad" if total else ""

    def meter(nic: Nic, *, tx: bool) -> Span:
        rate = rate_of(nic, view, tx=tx)
        return bar(share(rate, scale_of(nic, view, tx=tx)), 10), "bar"

    return [
        Column("NIC", 8, lambda n: clean(n.name, 24), most=16),
        Column("STATE", 5, lambda n: (clean(n.state, 5), "bad" if n.state == "down" else ""),
               rank=5),
        Column("PROV", 5, lambda n: clean(n.provider or "-", 5), rank=10),
        Column("GPU", 3, lambda n: "-" if n.gpu is None else f"g{n.gpu}", rank=9),
        Column("NUMA", 4, lambda n: "-" if n.numa is None else f"{n.numa}", rank=11),
        Column("rx", 5, lambda n: units.gbits(rate_of(n, view, tx=False)), right=True),
        Column("peak", 5, lambda n: units.gbits(peak_of(n, view, tx=False)), right=True, rank=3),
        Column("", 10, lambda n: meter(n, tx=False), rank=7),
        Column("tx", 5, lambda n: units.gbits(rate_of(n, view, tx=True)), right=True),
        Column("peak", 5, lambda n: units.gbits(peak_of(n, view, tx=True)), right=True, rank=4),
        Column("", 10, lambda n: meter(n, tx=True), rank=8),
        Column("line", 5, lambda n: units.gbits(n.line_bytes_per_s), right=True, rank=2),
        Column("ERR", 7, errors, right=True, rank=1),
    ]  # fmt: skip


def _nic_panels(nic: Nic | None, view: View, width: int, height: int) -> list[Panel]:
    side = min(40, width // 3)
    main = width - side - 3
    if nic is None:
        return [Panel((("60 s", "title"),), width - 2, [fit((), width - 2)] * height)]
    each = (height - 2) // 2
    lines: list[Line] = []
    for tx in (False, True):
        scale = scale_of(nic, view, tx=tx)
        what = "line rate" if nic.line_bytes_per_s else "the peak: the line rate is not known"
        text = f" {'tx' if tx else 'rx'} 60 s, top is {units.gbits(scale)} Gb/s, {what}"
        lines.append(fit(((text, "dim"),), main))
        rows = plot(_history(nic, tx=tx), scale, min(60, main - 2), each)
        lines += [fit(((" ", ""), (row, "bar")), main) for row in rows]
    lines += [fit((), main)] * (height - len(lines))
    facts = [f" {clean(nic.address or 'no address')}", f" counters: {clean(nic.counters or '-')}"]
    facts += [
        f" {clean(error.kind, 14)} {units.count(error.total)}"
        + (f" ({error.per_s:.1f}/s)" if error.per_s is not None else "")
        for error in nic.errors
    ]
    facts.append(" by peer        rx    tx")
    facts += [
        f" {clean(peer.peer, 12):<12} {units.gbits(peer.rx_bytes_per_s):>5}"
        f" {units.gbits(peer.tx_bytes_per_s):>5}"
        for peer in nic.peers
    ] or [" -"]
    text_lines = [fit(((fact, ""),), side) for fact in facts[:height]]
    text_lines += [fit((), side)] * (height - len(text_lines))
    name = clean(nic.name, 24)
    return [Panel(((name, "title"),), main, lines[:height]),
            Panel(((f"{name} now", "title"),), side, text_lines)]  # fmt: skip
