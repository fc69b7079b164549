"""The last two lines: the keys, or a question, and what the daemon answered."""

from pdnode.obs.snapshot import Snapshot
from pdnode_tui.lines import Item, Line, clean, sides
from pdnode_tui.view import View

ACTION_KEYS = (
    ("drain", "D", "drain"),
    ("undrain", "D", "undrain"),
    ("cancel", "X", "cancel"),
    ("role", "R", "role"),
)
"""(action of the snapshot, key, word). Drain and undrain share a key: only one is offered."""


def offered(snapshot: Snapshot | None, view: View) -> dict[str, str]:
    """Key → action that may be asked for now: listed, not refused, connected, not read-only."""
    if snapshot is None or view.readonly or view.stale is not None:
        return {}
    usable = {action.name for action in snapshot.actions if action.refused is None}
    found: dict[str, str] = {}
    for name, key, _ in ACTION_KEYS:
        if name in usable:
            found.setdefault(key, name)
    return found


def footer(snapshot: Snapshot | None, view: View, width: int) -> list[Line]:
    """Two lines."""
    if view.prompt is not None:
        return _question(view, width)
    screens = ("1 flow", "2 fabric", "3 topo", "4 queues", "5 peers", "6 evts")
    names = ("flow", "fabric", "topology", "queues", "peers", "events")
    first: list[Item] = [
        (10 + n, ((text, "title" if names[n] == view.screen else ""),))
        for n, text in enumerate(screens)
    ]
    rest = ("enter open", "/ find", "s sort", "p pause", "< > rate", "z peaks", "r rec")
    first += [(20 + n, ((text, "dim"),)) for n, text in enumerate(rest)]
    ends: list[Item] = [(0, (("? help", ""),)), (1, (("q quit", ""),))]
    return [sides(first, ends, width, gap=" "), _actions(snapshot, view, width)]


def _actions(snapshot: Snapshot | None, view: View, width: int) -> Line:
    if view.result:
        return sides(
            [(0, ((clean(view.result), "bad" if view.result_bad else "good"),))], [], width
        )
    keys = offered(snapshot, view)
    left: list[Item] = []
    for name, key, word in ACTION_KEYS:
        if keys.get(key) == name:
            left.append((1, ((f"{key} {word}", ""),)))
    if left:
        left.append((3, (("(ask first)", "dim"),)))
    elif view.readonly:
        left.append((1, (("read-only", "dim"),)))
    elif view.stale is not None:
        left.append((0, ((clean(view.stale.cause, 120), "bad"),)))
    return sides(left, [(2, ((clean(view.source, 80), "dim"),))], width)


def _question(view: View, width: int) -> list[Line]:
    prompt = view.prompt
    assert prompt is not None
    question: Line = ((clean(prompt.question, 300), "warn"),)
    if prompt.kind == "cancel":
        return [sides([(0, question)], [], width),
                sides([(0, (("y: yes   n or esc: no", "bold"),))], [], width)]  # fmt: skip
    hint = "enter: keep   esc: clear" if prompt.kind == "find" else "enter: do it   esc: no"
    wants = "find" if prompt.kind == "find" else "node's name"  # also where the question is cut
    typed: Line = ((f"{wants}> {clean(prompt.typed, 80)}_", "bold"),)
    return [sides([(0, question)], [], width), sides([(0, typed)], [(1, ((hint, "dim"),))], width)]
