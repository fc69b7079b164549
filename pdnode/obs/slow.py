"""The record of one transfer that an operator should look at, from what it left behind. Pure."""

from pdnode.obs.records import RequestRecord, TransferRecord
from pdnode.obs.snapshot import MAX_LAYERS, LayerMark, Phases, SlowTransfer


def phases_of(record: RequestRecord) -> Phases:
    return Phases(
        admit_s=record.admit_s,
        prefill_queue_s=record.prefill_queue_s,
        prefill_s=record.prefill_s,
        transfer_wait_s=record.transfer_wait_s,
        first_step_s=record.first_step_s,
        ttft_s=record.ttft_s,
    )


def slow_request(record: RequestRecord, took_s: float) -> SlowTransfer:
    """As the node saw it that took the request; the prefill node has the layers."""
    return SlowTransfer(
        request_id=record.request_id,
        peer=record.prefill,
        outcome="done",
        tokens=record.prompt_tokens - 1,
        pages=record.pages,
        total_s=took_s,
        ended_s=0.0,
        phases=phases_of(record),
    )


def slow_transfer(record: TransferRecord, took_s: float | None) -> SlowTransfer:
    """As the prefill node saw it, with what each layer did."""
    return SlowTransfer(
        request_id=record.request_id,
        peer=record.peer,
        outcome="done" if record.outcome == "drained" else record.outcome,
        tokens=record.tokens,
        pages=record.pages,
        total_s=record.total_s if took_s is None else took_s,
        ended_s=0.0,
        bytes=record.bytes,
        phases=Phases(prefill_queue_s=record.queue_s, prefill_s=record.prefill_s),
        layers=layer_marks(record),
    )


def layer_marks(record: TransferRecord) -> tuple[LayerMark, ...]:
    """The last chunk, one row per layer in order; of several routes the first post and last end."""
    if not record.layers:
        return ()
    last = max(row.chunk for row in record.layers)
    rows = [row for row in record.layers if row.chunk == last]
    start = min((at for row in rows for at in (row.raised_ns, row.posted_ns) if at), default=0)
    marks = []
    for layer in sorted({row.layer for row in rows})[:MAX_LAYERS]:
        of_layer = [row for row in rows if row.layer == layer]
        raised = [row.raised_ns for row in of_layer if row.raised_ns]
        posted = [row.posted_ns for row in of_layer if row.posted_ns]
        complete = all(row.done_ns for row in of_layer)
        marks.append(
            LayerMark(
                layer=layer,
                raised_us=(min(raised) - start) // 1000 if raised else None,
                posted_us=(min(posted) - start) // 1000 if posted else None,
                done_us=(max(r.done_ns for r in of_layer) - start) // 1000 if complete else None,
            )
        )
    return tuple(marks)
