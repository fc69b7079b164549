"""One request: where it is, where its time went, and what each layer of its transfer did."""

from pdnode.obs.snapshot import LayerMark, Phases, Request, SlowTransfer, Snapshot, Transfer
from pdnode_tui import units
from pdnode_tui.lines import Line, clean, fit
from pdnode_tui.meter import bar, share, stretch
from pdnode_tui.table import Panel, Rows, chosen, frame, window
from pdnode_tui.view import View

_PHASES = (
    ("admit", "admit_s"),
    ("queue", "prefill_queue_s"),
    ("prefill", "prefill_s"),
    ("transfer wait", "transfer_wait_s"),
    ("first token", "first_step_s"),
)


def detail_screen(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    wanted = view.request or ""
    inner = width - 2
    request = next((r for r in snapshot.requests if r.request_id == wanted), None)
    transfer = next((t for t in snapshot.transfers if t.request_id == wanted), None)
    slow = snapshot.last_slow
    slow = slow if slow is not None and slow.request_id == wanted else None
    facts = [fit(line, inner) for line in _facts(request, transfer, slow)]
    upper = min(len(facts), max(1, (height - 3) // 2))
    lower = height - 3 - upper
    layers = _layers(slow, transfer, view, inner, lower)
    return frame([
        [Panel((("REQUEST ", "title"), (clean(wanted, 40), "bold")), inner, facts[:upper])],
        [Panel((("LAYERS", "title"), ("  ░ raised to posted  █ posted to done", "dim")), inner,
               layers)],
    ])  # fmt: skip


def _facts(
    request: Request | None, transfer: Transfer | None, slow: SlowTransfer | None
) -> list[Line]:
    lines: list[Line] = []
    if request is not None:
        lines.append((
            (f" {clean(request.state, 12)}", "bold"),
            (f" for {units.duration(request.age_s)}  prompt {units.count(request.prompt_tokens)}"
             f"  output {units.count(request.output_tokens)} tokens"
             f"  prefill by {clean(request.peer or '-', 24)}", ""),
        ))  # fmt: skip
    if transfer is not None:
        done = share(transfer.pages_done, transfer.pages)
        lines += [
            ((f" transfer {clean(transfer.state, 12)}  peer {clean(transfer.peer, 24)}"
              f"  age {units.duration(transfer.age_s)}", ""),),
            ((" pages ", ""), (bar(done, 20), "bar"), (f" {units.percent(done)} of "
              f"{units.count(transfer.pages)}  {units.gbits(transfer.bytes_per_s)} Gb/s  "
              f"{units.volume(transfer.bytes_done)} of {units.volume(transfer.bytes)}", "")),
        ]  # fmt: skip
    if slow is not None:
        lines.append((
            (f" last slow transfer: {clean(slow.outcome, 40)}", "warn"),
            (f" in {units.duration(slow.total_s)}, {units.duration(slow.ended_s)} ago  peer "
             f"{clean(slow.peer, 24)}  {units.count(slow.tokens)} tokens  "
             f"{units.count(slow.pages)} pages  {units.volume(slow.bytes)}", ""),
        ))  # fmt: skip
        lines += _timeline(slow.phases)
    if not lines:
        lines = [
            ((" It is over and was not slow enough to be kept in the snapshot.", ""),),
            ((" The last 1,024 are at /admin/v1/requests and /admin/v1/transfers.", "dim"),),
        ]
    return lines


def _timeline(phases: Phases | None) -> list[Line]:
    """One row per phase, each where it lies in the time to first token."""
    if phases is None or not phases.ttft_s:
        return []
    lines: list[Line] = []
    begin = 0.0
    for name, field in _PHASES:
        length = getattr(phases, field)
        row = stretch(begin, begin, begin + (length or 0.0), phases.ttft_s, 40)
        lines.append(((f" {name:<14}{units.duration(length):>6} ", ""), (row, "bar")))
        begin += length or 0.0
    lines.append(((f" {'TTFT':<14}{units.duration(phases.ttft_s):>6}", "bold"),))
    return lines


def _layers(
    slow: SlowTransfer | None, transfer: Transfer | None, view: View, width: int, height: int
) -> list[Line]:
    if height <= 0:
        return []
    lines: list[Line] = []
    if slow is not None and slow.layers:
        lines = _marks(slow.layers, view, width, height)
    elif transfer is not None and transfer.layers and transfer.layer is not None:
        posted = max(transfer.layer, transfer.layer_posted or 0)
        text = f" {transfer.layer} done, {posted - transfer.layer} on the wire, "
        text += f"{transfer.layers - posted} to do; times come when it is over and was slow"
        lines = [fit(((text, ""),), width)]
    else:
        lines = [fit(((" no times of layers are known for it on this node", "dim"),), width)]
    return lines + [fit((), width)] * (height - len(lines))


def _marks(marks: tuple[LayerMark, ...], view: View, width: int, height: int) -> list[Line]:
    """One row per layer on a common scale, from 0 to the last completion."""
    scale = max(m.done_us or m.posted_us or m.raised_us or 0 for m in marks)
    shown = Rows(marks, lambda m: str(m.layer), view.selected)
    index = chosen([shown.key(mark) for mark in marks], view.selected)
    first = window(len(marks), index, height - 1)
    head = f" {'LAYER':>5} {'raised':>7} {'posted':>7} {'done':>7}  0"
    room = max(4, width - len(head) - 8)
    end = units.duration(scale / 1e6)
    lines = [fit((((head + end.rjust(room - 1)), "dim"),), width)]
    for number in range(first, min(len(marks), first + height - 1)):
        mark = marks[number]
        raised = mark.raised_us or 0
        posted = mark.posted_us if mark.posted_us is not None else raised
        done = mark.done_us if mark.done_us is not None else posted
        row = stretch(raised, posted, done, scale, room)
        pointer = ">" if number == index else " "
        text = f"{pointer}{mark.layer:>5} {_at(mark.raised_us)}"
        text += (
            f" {_after(mark.posted_us, mark.raised_us)} {_after(mark.done_us, mark.posted_us)}  "
        )
        lines.append(fit(((text, "bold" if number == index else ""), (row, "bar")), width))
    return lines


def _at(value_us: int | None) -> str:
    return f"{units.duration(None if value_us is None else value_us / 1e6):>7}"


def _after(value_us: int | None, before_us: int | None) -> str:
    """How much later than the step before."""
    if value_us is None or before_us is None:
        return f"{units.NOTHING:>7}"
    return f"{'+' + units.duration((value_us - before_us) / 1e6):>7}"
