"""What a prefill node holds of one dispatch, from its acceptance to its end."""

from dataclasses import dataclass, field

from pdnode.core import wire
from pdnode.core.push import Push
from pdnode.messenger.digests import SourceDigests
from pdnode.messenger.gate import Ticket
from pdnode.messenger.groups import SourceGroup
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import LayerTimes, TransferRecord
from pdnode.types import Run, SequenceId, TransferId


@dataclass(slots=True, eq=False)
class PushWork:
    """One dispatch on its way through this node."""

    push: Push
    session: PeerSession
    dispatch: wire.Dispatch
    group: SourceGroup
    destination: list[int]
    begun_at: float
    told_at: float  # when `accepted` or `progress` was said last
    told_chunks: int  # chunks that this node had computed then
    ticket: Ticket | None = None
    pages: tuple[Run, ...] = ()
    source: list[int] = field(default_factory=list)
    sequence: SequenceId | None = None
    chunks: dict[TransferId, list[int]] = field(default_factory=dict)  # chunk of each submit
    # A pair was closed since its transfer was opened, or a rank had no way: a device group may be
    # without, though others are not. The decode node knows of it, and a regrant or cancel follows.
    shaken: bool = False
    layers: list[LayerTimes] = field(default_factory=list)
    outcome: str = "drained"
    digests: SourceDigests | None = None
    held: TransferId | None = None  # drained, but digests of its pages have yet to be sent

    def record(self, now: float) -> TransferRecord:
        """What became of it, once it is over."""
        push = self.push
        cancelled = self.outcome == "drained" and not push.computed_all
        return TransferRecord(
            key=push.key,
            request_id=self.dispatch.request_id,
            peer=self.session.node,
            outcome="cancelled" if cancelled else self.outcome,
            tokens=len(self.dispatch.tokens),
            pages=len(self.destination),
            bytes=sum(row.bytes for row in self.layers),
            writes=sum(row.writes for row in self.layers),
            queue_s=push.queue_s,
            prefill_s=push.prefill_s(now),
            total_s=now - self.begun_at,
            layers=tuple(self.layers),
        )
