"""The first three lines: who and in what state; the figures a pager asks for; what is wrong."""

from pdnode.obs.snapshot import PROTOCOL, Quantiles, Snapshot, Warning
from pdnode_tui import units
from pdnode_tui.lines import Item, Line, clean, fit, sides
from pdnode_tui.meter import bar
from pdnode_tui.view import View

STATE_STYLES = {
    "serving": "good",
    "loading": "warn",
    "draining": "warn",
    "failed": "bad",
    "up": "good",
    "slow": "warn",
    "drain": "warn",
    "connecting": "warn",
    "refused": "bad",
    "lost": "bad",
    "down": "bad",
}
SEVERITIES = {"error": 0, "warning": 1, "info": 2}
SEVERITY_STYLES = {"error": "bad", "warning": "warn", "info": "dim"}
UP_STATES = ("up", "slow", "drain")


def header(snapshot: Snapshot, view: View, width: int) -> list[Line]:
    """Three lines."""
    return [identity(snapshot, view, width), _figures(snapshot, view, width),
            _wrong(snapshot, width)]  # fmt: skip


def identity(snapshot: Snapshot, view: View, width: int) -> Line:
    node, model = snapshot.node, snapshot.model
    state = clean(node.state, 12)
    style = STATE_STYLES.get(state, "")
    left: list[Item] = [
        (4, (("pdnode", "title"),)),
        (0, ((clean(node.id, 24), "bold"),)),
        (3, ((clean(node.role, 12).upper(), ""),)),
        (6, ((f"{clean(model.name, 32)} {clean(model.dtype or '', 8)}".rstrip(), ""),)),
    ]
    if snapshot.protocol != PROTOCOL:  # what the other does not know is not there or not shown
        versions = f"snapshot v{snapshot.protocol}, console v{PROTOCOL}"
        left.insert(1, (1, ((versions, "warn"),)))
    up = sum(peer.state in UP_STATES for peer in snapshot.peers)
    right: list[Item] = [
        (0, (("● ", style), (state, style))),
        (7, ((clean(node.detail, 40), "dim"),) if node.detail else ()),
        (5, ((f"peers {up}/{len(snapshot.peers)}", ""),) if snapshot.peers else ()),
        (8, ((f"up {units.duration(node.uptime_s)}", ""),)),
        (9, ((f"{view.interval_s:g}s", "dim"),)),
        (2, ((units.clock(snapshot.time_s) + "Z", ""),)),
    ]
    if view.stale is not None:
        right[:5] = [(0, ((stale_words(view), "bad"),))]
    if view.paused:
        right.insert(0, (1, (("PAUSED", "warn"),)))
    if view.recording:
        right.insert(0, (1, (("REC", "bad"),)))
    return sides(left, right, width)


def stale_words(view: View) -> str:
    stale = view.stale
    assert stale is not None
    return (
        f"STALE {units.duration(stale.for_s)}  "
        f"reconnecting in {max(0.0, stale.retry_s):.0f} s ({stale.tries})"
    )


def _pair(name: str, quantiles: Quantiles | None) -> Line:
    if quantiles is None:
        return ((f"{name} -", "dim"),)
    return (
        (f"{name} ", "dim"),
        (f"p50 {units.duration(quantiles.p50_s)} p99 {units.duration(quantiles.p99_s)}", ""),
    )


def _figures(snapshot: Snapshot, view: View, width: int) -> Line:
    queues = {queue.name: queue.now for queue in snapshot.queues}
    running = queues.get("running")
    waiting = queues.get("waiting", queues.get("prefill"))
    summary, latency = snapshot.summary, snapshot.latency
    rate = None
    if summary is not None and view.stale is None:
        prefill = snapshot.node.role == "prefill"
        rate = summary.prompt_tokens_per_s if prefill else summary.output_tokens_per_s
    left: list[Item] = [
        (0, (("run ", "dim"), (units.count(running), "bold"))),
        (1, (("wait ", "dim"), (units.count(waiting), "bold"))),
        (4, ((f"{units.count(rate)} tok/s", ""),)),
        (3, _pair("TTFT", latency.ttft if latency else None)),
        (5, _pair("ITL", latency.itl if latency else None)),
    ]
    pages = snapshot.pages
    if pages is None:
        return sides(left, [(2, (("KV -", "dim"),))], width)
    style = "bad" if pages.used_ratio >= 0.95 else "bar"
    right: list[Item] = [
        (2, (("KV ", "dim"), (units.percent(pages.used_ratio), "bold"))),
        (6, (("▕", "dim"), (bar(pages.used_ratio, 8), style), ("▏", "dim"))),
    ]
    return sides(left, right, width, gap=" " if width < 100 else "  ")


def by_severity(snapshot: Snapshot) -> list[Warning]:
    """The worst first, then the youngest."""
    return sorted(snapshot.warnings, key=lambda w: (SEVERITIES.get(w.severity, 1), w.since_s))


def _wrong(snapshot: Snapshot, width: int) -> Line:
    if not snapshot.warnings:
        return fit(((" no warnings", "dim"),), width)
    items: list[Item] = []
    for number, warning in enumerate(by_severity(snapshot)):
        since = units.clock(snapshot.time_s - warning.since_s, seconds=False)
        style = SEVERITY_STYLES.get(warning.severity, "warn")
        code, text = clean(warning.code, 8), clean(warning.text, 120)
        items.append((number, ((f"{code} ", style), (f"{text} since {since}", ""))))
    shown = len(items)
    while shown > 1:
        rest = len(items) - shown
        more: list[Item] = [(0, ((f"+{rest}", "warn"),))] if rest else []
        size = 4 + sum(2 + sum(len(t) for t, _ in line) for _, line in items[:shown])
        if size + (4 if rest else 0) <= width:
            return sides([(0, (("!", "bad"),)), *items[:shown]], more, width)
        shown -= 1
    more_of_them = f"  +{len(items) - 1} " if len(items) > 1 else ""
    first = fit(((" ! ", "bad"), *items[0][1]), width - len(more_of_them))
    return (*first, (more_of_them, "warn"))
