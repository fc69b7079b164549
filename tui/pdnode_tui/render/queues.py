"""Queues with their limits, where the time to first token goes, and the open requests."""

from pdnode.obs.snapshot import Latency, Quantiles, Queue, Request, Snapshot
from pdnode_tui import units
from pdnode_tui.lines import Item, Line, Span, clean, fit, sides
from pdnode_tui.meter import bar, share
from pdnode_tui.render.common import found, marked, title
from pdnode_tui.table import Column, Panel, Rows, chosen, frame, table
from pdnode_tui.view import View

PHASES = (
    ("admit", "admit"),
    ("queue at prefill", "prefill_queue"),
    ("prefill", "prefill"),
    ("transfer wait", "transfer_wait"),
    ("first step", "first_step"),
)


def ordered(snapshot: Snapshot, view: View) -> list[Request]:
    rows = found(snapshot.requests, view, lambda r: (r.request_id, r.state, r.peer))
    orders = {
        "age": lambda r: (-r.age_s,),
        "state": lambda r: (r.state, -r.age_s),
        "tokens": lambda r: (-r.prompt_tokens,),
        "peer": lambda r: (r.peer or "", -r.age_s),
    }
    return sorted(rows, key=orders.get(view.order, orders["age"]))


def request_selection(snapshot: Snapshot, view: View) -> Request | None:
    rows = ordered(snapshot, view)
    index = chosen([row.request_id for row in rows], view.selected)
    return rows[index] if index >= 0 else None


def _now(queue: Queue) -> Span:
    full = queue.limit is not None and queue.now >= queue.limit
    return units.count(queue.now), "bad" if full else ""


_QUEUE_COLUMNS: list[Column[Queue]] = [
    Column("", 8, lambda q: clean(q.name, 20), most=14),
    Column("now", 4, _now, right=True),
    Column("max", 4, lambda q: units.count(q.peak), right=True, rank=2),
    Column("limit", 5, lambda q: units.count(q.limit), right=True, rank=1),
    Column("", 8, lambda q: (bar(share(q.now, q.limit), 8), "bar"), rank=3),
]


def _facts(snapshot: Snapshot) -> list[Line]:
    pages, summary = snapshot.pages, snapshot.summary
    lines: list[Line] = []
    if pages is not None:
        limit = f"  max {units.count(pages.quarantined_limit)}" if pages.quarantined_limit else ""
        bad = "bad" if pages.quarantined else ""
        lines += [
            ((f" reserved    {units.count(pages.reserved)} pages", ""),),
            ((f" quarantined {units.count(pages.quarantined)}{limit}", bad),),
            ((f" free {units.count(pages.free)} of {units.count(pages.total)}", ""),),
        ]
    if summary is not None:
        lines += [
            ((f" 429 sent    {units.count(summary.rejected)}", ""),),
            ((f" recomputed  {units.count(summary.recomputed)}", ""),),
            ((f" aborted {units.count(summary.requests_aborted)}", ""),
             (f" failed {units.count(summary.requests_failed)}",
              "bad" if summary.requests_failed else "")),
            ((f" preempted   {units.count(summary.preempted)}", ""),),
        ]  # fmt: skip
    return lines


def queues_panel(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    """The small panel of the flow screen."""
    size = min(height, len(snapshot.queues) + 1)
    rows = Rows(snapshot.queues, lambda q: q.name, choose=False, empty="no queue yet")
    lines = table(_QUEUE_COLUMNS, rows, width=width, height=max(2, size))
    lines += [fit(line, width) for line in _facts(snapshot)]
    lines += [fit((), width)] * (height - len(lines))
    return Panel(title(view, "QUEUES"), width, lines[:height])


def queues_line(snapshot: Snapshot, width: int) -> Line:
    """In one line, for small terminals."""
    items: list[Item] = [
        (number, ((f"{clean(queue.name, 12)} ", "dim"), _now(queue),
                  (f"/{units.count(queue.limit)}", "dim")))
        for number, queue in enumerate(snapshot.queues)
    ]  # fmt: skip
    if snapshot.pages is not None and snapshot.pages.quarantined:
        items.append((1, ((f"quarantined {units.count(snapshot.pages.quarantined)}", "bad"),)))
    return sides(items or [(0, (("no queue yet", "dim"),))], [], width)


def _phase(name: str, quantiles: Quantiles | None, scale: float | None, width: int) -> Line:
    if quantiles is None:
        return fit(((f" {name:<19}     -      -", "dim"),), width)
    text = f" {name:<19}{units.duration(quantiles.p50_s):>6} {units.duration(quantiles.p99_s):>6} "
    room = max(0, min(30, width - len(text) - 1))
    return fit(((text, ""), (bar(share(quantiles.p50_s, scale), room), "bar")), width)


def _latency(latency: Latency | None, width: int, height: int) -> list[Line]:
    """Bars are the share of the median TTFT."""
    lines: list[Line] = [fit(((f" {'last 60 s':<19}{'p50':>6} {'p99':>6}", "dim"),), width)]
    if latency is None:
        lines.append(fit(((" nothing measured yet", "dim"),), width))
    else:
        scale = latency.ttft.p50_s
        lines.append(_phase("TTFT", latency.ttft, scale, width))
        lines += [_phase(f"  {n}", getattr(latency, field), scale, width) for n, field in PHASES]
        lines.append(_phase("ITL", latency.itl, None, width))
        lines.append(_phase("whole request", latency.total, None, width))
        counts = f" of {units.count(latency.ttft.count)} requests"
        lines.append(fit(((counts, "dim"),), width))
    lines += [fit((), width)] * (height - len(lines))
    return lines[:height]


_REQUEST_COLUMNS: list[Column[Request]] = [
    Column("REQUEST", 8, lambda r: clean(r.request_id, 40), most=24),
    Column("STATE", 8, lambda r: clean(r.state, 8), rank=2),
    Column("PREFILL", 7, lambda r: clean(r.peer or "-", 24), rank=3, most=16),
    Column("PROMPT", 7, lambda r: units.count(r.prompt_tokens), right=True, rank=4),
    Column("OUTPUT", 7, lambda r: units.count(r.output_tokens), right=True, rank=5),
    Column("AGE", 6, lambda r: units.duration(r.age_s), right=True, rank=1),
]


def requests_panel(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    count = snapshot.requests_open
    detail = f"{units.count(count)} open"
    if count is not None and count > len(snapshot.requests):
        detail += f", the oldest {len(snapshot.requests)} shown"
    rows = Rows(ordered(snapshot, view), lambda r: r.request_id, view.selected,
                marked(snapshot), "no open request")  # fmt: skip
    lines = table(_REQUEST_COLUMNS, rows, width=width, height=height)
    return Panel(title(view, "REQUESTS", detail, sorts=True), width, lines)


def queues_screen(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    inner = width - 2
    upper = min(10, max(3, (height - 3) // 2)) if height >= 9 else 0
    panels = []
    if upper:
        left = min(36, (width - 3) // 2)
        panels.append([
            queues_panel(snapshot, view, left, upper),
            Panel(title(view, "LATENCY"), width - 3 - left,
                  _latency(snapshot.latency, width - 3 - left, upper)),
        ])  # fmt: skip
    lower = height - 2 - (upper + 1 if upper else 0)
    panels.append([requests_panel(snapshot, view, inner, lower)])
    return frame(panels)
