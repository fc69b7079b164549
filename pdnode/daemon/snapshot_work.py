"""The snapshot's view of what is under way: transfers and requests, oldest first."""

from collections.abc import Iterator, Sequence

from pdnode.core.geometry import KvGeometry
from pdnode.core.grant import GrantState
from pdnode.core.push import PushState
from pdnode.core.wire import clip
from pdnode.daemon.figures import Figures
from pdnode.daemon.flight import Flight
from pdnode.messenger.pull import Pull, PullMessenger
from pdnode.messenger.push_figures import OpenPush
from pdnode.obs.snapshot import Request, Transfer

_PUSH_STATES = {
    PushState.QUEUED: "queue",
    PushState.RUNNING: "prefill",
    PushState.COMPUTED: "wire",
    PushState.REPLAY: "wire",
}


def build_transfers(parts: Figures, now: float) -> Iterator[Transfer]:
    if parts.engine is None:
        return
    geometry = parts.engine.geometry
    if parts.pull is not None:
        for pull in parts.pull.open():
            if not pull.over:
                yield _of_pull(parts.pull, pull, geometry, now)
    if parts.push is not None:
        for push in parts.push.open():
            yield _of_push(push, geometry, now)


def _of_pull(pulls: PullMessenger, pull: Pull, geometry: KvGeometry, now: float) -> Transfer:
    """On the decode node: exact, from the core's counter of what has landed."""
    grant = pull.grant
    if grant.state is not GrantState.DISPATCHED:
        state, done, units = "drain", pull.units, pull.units
    else:
        done, units = pulls.units(pull)
        computed = grant.computed_tokens
        state = "queue" if not (done or computed) else "prefill"
        if computed == pull.tokens:
            state = "wire"
    size = pull.sent_pages * geometry.layers * geometry.page_bytes * geometry.tp
    share = done / units if units else 1.0
    age_s = now - pull.begun_at
    lasted_s = (pull.complete_at or now) - pull.begun_at - pull.queue_s
    return Transfer(
        request_id=pull.request_id,
        peer=pull.session.node,
        state=state,
        tokens=pull.tokens,
        pages=pull.sent_pages,
        age_s=round(age_s, 4),
        pages_done=round(share * pull.sent_pages, 2),
        layers=geometry.layers,
        bytes=size,
        bytes_done=round(share * size),
        bytes_per_s=round(share * size / lasted_s) if lasted_s > 0 else None,
    )


def _of_push(push: OpenPush, geometry: KvGeometry, now: float) -> Transfer:
    """On the prefill node: pages that are computed, so posted; what has landed the peer knows."""
    pages = geometry.pages_for(push.push.total_tokens)
    computed = push.push.computed_tokens // geometry.page_tokens
    return Transfer(
        request_id=clip(push.dispatch.request_id),
        peer=push.peer,
        state=_PUSH_STATES.get(push.push.state, "drain"),
        tokens=push.push.total_tokens,
        pages=pages,
        age_s=round(now - push.begun_at, 4),
        pages_done=float(pages if push.push.computed_all else computed),
        layers=geometry.layers,
        bytes=pages * geometry.layers * geometry.page_bytes * geometry.tp,
    )


def build_requests(flights: Sequence[Flight], now: float) -> Iterator[Request]:
    for flight in flights:
        yield Request(
            request_id=flight.request.request_id,
            state=request_state(flight),
            age_s=round(now - flight.times.submitted, 4),
            prompt_tokens=len(flight.request.prompt),
            output_tokens=flight.generated,
            peer=None if flight.prefill == "local" else flight.prefill,
        )


def request_state(flight: Flight) -> str:
    """waiting (for pages, for its turn), kv-wait (for a peer), running (has a token)."""
    if flight.generated:
        return "running"
    waits = flight.times.begun and not flight.times.complete and flight.prefill != "local"
    return "kv-wait" if waits else "waiting"


def oldest_s(parts: Figures, flights: Sequence[Flight], now: float) -> float | None:
    """Age of the oldest of what a drain would wait for."""
    begun = [flight.times.submitted for flight in flights[:1]]
    if parts.pull is not None:
        begun += [pull.begun_at for pull in parts.pull.open() if not pull.over]
    if parts.push is not None:
        begun += [push.begun_at for push in parts.push.open()]
    return now - min(begun) if begun else None
