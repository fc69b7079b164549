"""From a snapshot and a view to lines: pure functions, one module per screen or panel.

`draw` gives exactly `height` lines of exactly `width` cells, whatever the snapshot holds.
"""

from collections.abc import Callable, Mapping

from pdnode.obs.snapshot import Snapshot
from pdnode_tui.lines import Line, clean, fit, restyled, sides, to_ascii
from pdnode_tui.render import events, fabric, peers, queues, topology, transfers
from pdnode_tui.render.detail import detail_screen
from pdnode_tui.render.flow import flow_screen, shows_requests
from pdnode_tui.render.footer import footer
from pdnode_tui.render.header import header, stale_words
from pdnode_tui.render.help import help_screen
from pdnode_tui.view import View

MIN_WIDTH, MIN_HEIGHT = 60, 15
_HEADER, _FOOTER = 3, 2

Screen = Callable[[Snapshot, View, int, int], list[Line]]
_SCREENS: Mapping[str, Screen] = {
    "fabric": fabric.fabric_screen,
    "topology": topology.topology_screen,
    "queues": queues.queues_screen,
    "peers": peers.peers_screen,
    "events": events.events_screen,
    "detail": detail_screen,
}


def draw(snapshot: Snapshot | None, view: View, *, width: int, height: int) -> list[Line]:
    """The picture. `snapshot` is None before the first answer."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return _too_small(width, height)
    room = height - _HEADER - _FOOTER
    if view.screen == "help":
        body = help_screen(width, room)
    elif snapshot is None:
        body = _waiting(view, width, room)
    elif view.screen in _SCREENS:
        body = _SCREENS[view.screen](snapshot, view, width, room)
    else:
        body = flow_screen(snapshot, view, width, room, terminal=(width, height))
    if view.stale is not None:
        body = [restyled(line, "dim") for line in body]
    top = _no_header(view, width) if snapshot is None else header(snapshot, view, width)
    lines = [*top, *body, *footer(snapshot, view, width)]
    return [to_ascii(line) for line in lines] if view.ascii else lines


def row_keys(snapshot: Snapshot | None, view: View) -> list[str]:
    """Keys of the rows of the list that the arrows move in, in the order they are shown."""
    if snapshot is None:
        return []
    if view.screen == "fabric":
        return [nic.name for nic in fabric.ordered(snapshot, view)]
    if view.screen == "peers":
        return [peer.name for peer in peers.ordered(snapshot, view)]
    if view.screen == "events":
        return [str(event.cursor) for event in events.ordered(snapshot, view)]
    if view.screen == "queues" or (view.screen == "flow" and shows_requests(snapshot)):
        return [request.request_id for request in queues.ordered(snapshot, view)]
    if view.screen == "flow":
        return [transfer.request_id for transfer in transfers.ordered(snapshot, view)]
    if view.screen == "detail" and (slow := snapshot.last_slow) is not None:
        return [str(m.layer) for m in slow.layers] if slow.request_id == view.request else []
    return []


def open_request(snapshot: Snapshot | None, view: View) -> str | None:
    """Id of the request that Enter opens: the chosen one, or the last slow where none is there."""
    request = chosen_request(snapshot, view)
    if request is None and view.screen == "flow" and snapshot is not None and snapshot.last_slow:
        return snapshot.last_slow.request_id
    return request


def chosen_request(snapshot: Snapshot | None, view: View) -> str | None:
    """Id of the request that X cancels; None where the screen has none."""
    if snapshot is None:
        return None
    if view.screen == "detail":
        return view.request
    if view.screen not in ("flow", "queues"):
        return None
    keys = row_keys(snapshot, view)
    return (view.selected if view.selected in keys else keys[0]) if keys else None


def _too_small(width: int, height: int) -> list[Line]:
    text = f"needs {MIN_WIDTH}x{MIN_HEIGHT}, has {width}x{height}"
    return [fit(((text, ""),) if row == 0 else (), width) for row in range(height)]


def _no_header(view: View, width: int) -> list[Line]:
    words = "connecting" if view.stale is None else stale_words(view)
    first = sides([(0, (("pdnode", "title"),))], [(0, ((words, "bad"),))], width)
    return [first, fit((), width), fit((), width)]


def _waiting(view: View, width: int, height: int) -> list[Line]:
    lines: list[Line] = [((f"  No answer yet from {clean(view.source, 120)}", "bold"),)]
    if view.stale is not None:
        lines += [
            ((f"  {clean(view.stale.cause)}", "bad"),),
            (("  Does `pdnode serve` run here? Is this its admin_socket? May you open it?", ""),),
            (("  The console goes on trying; q quits.", "dim"),),
        ]
    return [fit(line, width) for line in [(), *lines, *([()] * height)][:height]]
