"""The peers: state, round trip, rate, and what went wrong last."""

from pdnode.obs.snapshot import Peer, Snapshot
from pdnode_tui import units
from pdnode_tui.lines import Item, Line, Span, clean, fit, sides
from pdnode_tui.render.common import found, marked, sends, title
from pdnode_tui.render.header import STATE_STYLES, UP_STATES
from pdnode_tui.table import Column, Panel, Rows, chosen, frame, table
from pdnode_tui.view import View

_ROLES = {"prefill": "P", "decode": "D", "colocated": "C"}


def _rate(peer: Peer, view: View, *, tx: bool) -> float | None:
    if view.stale is not None:
        return None
    return peer.tx_bytes_per_s if tx else peer.rx_bytes_per_s


def _state(peer: Peer, width: int) -> Span:
    return clean(peer.state, width), STATE_STYLES.get(peer.state, "")


def peer_marks(snapshot: Snapshot) -> frozenset[str]:
    bad = {peer.name for peer in snapshot.peers if peer.state in ("lost", "refused", "slow")}
    return marked(snapshot) | bad


def _notes(snapshot: Snapshot) -> list[Line]:
    """What is the same for all, and the last errors."""
    spoken = {peer.protocol for peer in snapshot.peers if peer.protocol is not None}
    lines: list[Line] = []
    if len(spoken) == 1:
        lines.append(((f" protocol v{spoken.pop()} on all", "dim"),))
    elif spoken:
        text = ", ".join(f"v{version}" for version in sorted(spoken))
        lines.append(((f" protocols {text}", "warn"),))
    for peer in snapshot.peers:
        if peer.last_error and peer.state not in UP_STATES:
            lines.append(((f" {clean(peer.name, 16)}: {clean(peer.last_error)}", "warn"),))
    return lines


def peers_panel(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    """The small panel of the flow screen."""
    tx = sends(snapshot)
    columns: list[Column[Peer]] = [
        Column("NAME", 6, lambda p: clean(p.name, 24), most=14),
        Column("ROLE", 4, lambda p: _ROLES.get(p.role, "-"), rank=4),
        Column("STATE", 5, lambda p: _state(p, 10), most=10),
        Column("RTT", 6, lambda p: units.duration(p.rtt_s), right=True, rank=3),
        Column("Gb/s", 4, lambda p: units.gbits(_rate(p, view, tx=tx)), right=True, rank=1),
        Column("SEEN", 5, lambda p: units.duration(p.seen_s), right=True, rank=2),
    ]
    notes = _notes(snapshot)
    size = max(2, min(height, max(height - len(notes), len(snapshot.peers) + 1)))
    marks, peers = peer_marks(snapshot), list(snapshot.peers)
    if len(peers) >= height:  # not all fit: those to look at come first
        peers.sort(key=lambda peer: peer.name not in marks)
    rows = Rows(peers, lambda p: p.name, marked=marks, choose=False,
                empty="no peer")  # fmt: skip
    lines = table(columns, rows, width=width, height=min(size, len(snapshot.peers) + 1 or 2))
    lines += [fit(note, width) for note in notes]
    lines += [fit((), width)] * (height - len(lines))
    return Panel(title(view, "PEERS"), width, lines[:height])


def peers_line(snapshot: Snapshot, width: int) -> Line:
    """In one line, for small terminals."""
    items: list[Item] = [
        (number, ((f"{clean(peer.name, 12)} ", "dim"), _state(peer, 10)))
        for number, peer in enumerate(sorted(snapshot.peers, key=lambda p: p.state in ("up",)))
    ]
    return sides(items or [(0, (("no peer", "dim"),))], [], width)


def ordered(snapshot: Snapshot, view: View) -> list[Peer]:
    rows = found(snapshot.peers, view, lambda p: (p.name, p.node, p.role, p.state, p.last_error))
    orders = {
        "name": lambda p: (p.name,),
        "state": lambda p: (p.state in UP_STATES, p.state, p.name),
        "rate": lambda p: (-(p.rx_bytes_per_s or 0.0) - (p.tx_bytes_per_s or 0.0), p.name),
        "rtt": lambda p: (-(p.rtt_s or 0.0), p.name),
    }
    return sorted(rows, key=orders[view.sort]) if view.sort in orders else rows


def peers_screen(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    rows = ordered(snapshot, view)
    inner = width - 2
    below = 5 if height >= 12 else 0
    columns: list[Column[Peer]] = [
        Column("NAME", 8, lambda p: clean(p.name, 24), most=20),
        Column("ROLE", 9, lambda p: clean(p.role or "-", 9), rank=7),
        Column("STATE", 10, lambda p: _state(p, 10)),
        Column("FOR", 6, lambda p: units.duration(p.since_s), right=True, rank=6),
        Column("SEEN", 6, lambda p: units.duration(p.seen_s), right=True, rank=3),
        Column("RTT", 6, lambda p: units.duration(p.rtt_s), right=True, rank=4),
        Column("rx", 5, lambda p: units.gbits(_rate(p, view, tx=False)), right=True, rank=1),
        Column("tx", 5, lambda p: units.gbits(_rate(p, view, tx=True)), right=True, rank=2),
        Column("XFERS", 5, lambda p: units.count(p.inflight), right=True, rank=5),
        Column("PROTO", 5, lambda p: units.count(p.protocol), right=True, rank=9),
        Column("VERSION", 8, lambda p: clean(p.version or "-", 12), rank=10),
        Column("QUARANT", 7, lambda p: units.count(p.pages_quarantined), right=True, rank=8),
    ]
    lines = table(
        columns, Rows(rows, lambda p: p.name, view.selected, peer_marks(snapshot), "no peer"),
        width=inner, height=height - 2 - (below + 1 if below else 0),
    )  # fmt: skip
    panels = [[Panel(title(view, "PEERS", "Gb/s", sorts=True), inner, lines)]]
    if below:
        index = chosen([peer.name for peer in rows], view.selected)
        about = _about(rows[index]) if index >= 0 else []
        facts = [fit(line, inner) for line in about]
        facts += [fit((), inner)] * (below - len(facts))
        panels.append([Panel((("PEER", "title"),), inner, facts[:below])])
    return frame(panels)


def _about(peer: Peer) -> list[Line]:
    quarantined = f"pages quarantined for it {units.count(peer.pages_quarantined)}"
    return [
        ((f" {clean(peer.name, 24)}  node {clean(peer.node or '-', 64)}", "bold"),),
        ((f" role {clean(peer.role or '-', 12)}  state ", ""), _state(peer, 10),
         (f" for {units.duration(peer.since_s)}, last frame {units.duration(peer.seen_s)} ago",
          "")),
        ((f" pdnode {clean(peer.version or '-', 24)}, protocol {units.count(peer.protocol)}", ""),),
        ((f" {quarantined}", "bad" if peer.pages_quarantined else ""),),
        ((f" last error: {clean(peer.last_error or 'none')}", "warn" if peer.last_error else ""),),
    ]  # fmt: skip
