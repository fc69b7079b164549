"""The first screen: KV in flight, the NICs, and who waits for whom."""

from pdnode.obs.snapshot import Snapshot
from pdnode_tui.lines import Line
from pdnode_tui.render.events import last_events
from pdnode_tui.render.fabric import fabric_panel, nic_strip
from pdnode_tui.render.peers import peers_line, peers_panel
from pdnode_tui.render.queues import queues_line, queues_panel, requests_panel
from pdnode_tui.render.topology import topology_line, topology_panel
from pdnode_tui.render.transfers import transfers_panel
from pdnode_tui.table import Panel, frame
from pdnode_tui.view import View

FULL = (100, 30)
REDUCED = (80, 24)
"""Smallest terminals for all panels, and for the peers as a panel."""

EVENT_LINES = 2
LOWER_LINES = 10  # of the three lower panels at the full size


def shows_requests(snapshot: Snapshot) -> bool:
    """A colocated node moves no KV: its requests stand where the transfers would."""
    return snapshot.node.role == "colocated"


def flow_screen(
    snapshot: Snapshot, view: View, width: int, height: int, *, terminal: tuple[int, int]
) -> list[Line]:
    """`height` lines; `terminal` (width, height) decides what there is room for."""
    if _fits(FULL, terminal):
        return _full(snapshot, view, width, height)
    return _reduced(snapshot, view, width, height, peers=_fits(REDUCED, terminal))


def _fits(size: tuple[int, int], terminal: tuple[int, int]) -> bool:
    return terminal[0] >= size[0] and terminal[1] >= size[1]


def _main(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    if shows_requests(snapshot):
        return requests_panel(snapshot, view, width, height)
    return transfers_panel(snapshot, view, width, height)


def _full(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    body = height - EVENT_LINES - 3  # three borders
    # Both grow with the terminal, but the transfers are what one came for.
    lower = LOWER_LINES + (body - 2 * LOWER_LINES) // 3
    upper = body - lower
    fabric = 36 + min(12, (width - 100) // 4)
    queues = 26 + min(8, (width - 100) // 8)
    topology = 33 + (width - 100) // 4
    panels = [
        [_main(snapshot, view, width - 3 - fabric, upper),
         fabric_panel(snapshot, view, fabric, upper)],
        [queues_panel(snapshot, view, queues, lower),
         peers_panel(snapshot, view, width - 4 - queues - topology, lower),
         topology_panel(snapshot, view, topology, lower)],
    ]  # fmt: skip
    return [*frame(panels), *last_events(snapshot, view, width, EVENT_LINES)]


def _reduced(snapshot: Snapshot, view: View, width: int, height: int, *, peers: bool) -> list[Line]:
    """KV in flight, one line each for NICs, queues and topology, peers as a panel or a line."""
    strips = [nic_strip(snapshot, view, width), queues_line(snapshot, width)]
    if not peers:
        strips.append(peers_line(snapshot, width))
        upper = height - 2 - len(strips)
        return [*frame([[_main(snapshot, view, width - 2, upper)]]), *strips]
    strips.append(topology_line(snapshot, width))
    body = height - 3 - len(strips)  # three borders
    lower = min(body * 2 // 5, max(2, len(snapshot.peers) + 1))
    upper = body - lower
    panels = [[_main(snapshot, view, width - 2, upper)],
              [peers_panel(snapshot, view, width - 2, lower)]]  # fmt: skip
    return [*frame(panels), *strips]
