"""What a scrape shows of this node, gathered from the parts that own the numbers."""

from dataclasses import dataclass, field

from pdnode.config import Config
from pdnode.core.pages import PagePool
from pdnode.daemon.service import NodeService
from pdnode.messenger.peers import PeerManager
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.obs.metrics import NodeFigures, PeerFigures, QueueFigures


@dataclass(slots=True)
class Figures:
    """Parts are set as they come up; `read` works from the start."""

    config: Config
    service: NodeService
    pool: PagePool | None = None
    peers: PeerManager | None = None
    pull: PullMessenger | None = None
    push: PushMessenger | None = None
    fences: dict[str, int] = field(default_factory=dict)

    def read(self) -> NodeFigures:
        push, pull = self.push, self.pull
        failures: dict[str, int] = {}
        inflight = 0
        if push is not None:
            failures = dict(push.figures.failures)
            inflight = push.open_pushes
        if pull is not None:
            failures = dict(pull.figures.failures)
            inflight = pull.open_pulls
        return NodeFigures(
            role=self.config.node.role,
            running=self.service.running,
            waiting=self.service.waiting,
            pages={} if self.pool is None else self.pool.counts._asdict(),
            transfers_inflight=inflight,
            peers=tuple(self._peers()),
            queues=tuple(self._queues()),
            transfer_failures=failures,
            fences=self.fences,
            local_prefills=self.service.local_prefills,
        )

    def _peers(self) -> list[PeerFigures]:
        if self.peers is None:
            return []
        sent = {} if self.push is None else self.push.figures.bytes
        received = {} if self.pull is None else self.pull.figures.bytes
        return [
            PeerFigures(
                name=peer.node or peer.name,
                role=peer.role,
                up=peer.state in ("up", "drain"),
                bytes_sent=sent.get(peer.node, 0),
                bytes_received=received.get(peer.node, 0),
            )
            for peer in self.peers.status()
        ]

    def _queues(self) -> list[QueueFigures]:
        limit = self.config.engine.max_waiting
        if self.push is not None:
            return [QueueFigures("prefill", self.push.open_pushes, limit)]
        return [QueueFigures("waiting", self.service.waiting, limit)]
