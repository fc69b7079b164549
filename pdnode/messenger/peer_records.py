"""What is known of each peer, for the snapshot, the warnings and the log.

A decode node has one record per `[[prefill]]` table; a prefill node one per decode node that has
authenticated, at most `max_peers`, the oldest that is gone making room.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdnode.core.link_effects import SessionLost
from pdnode.messenger.peer_link import PeerLink
from pdnode.obs.log import event

_log = logging.getLogger(__name__)

REFUSED = "W201"
LOST = "W202"
STALLED = "W203"
UNFENCED = "W205"
NIC_OUT = "W206"
GROUP_OUT = "W207"
GONE_SHOWN_S = 600.0  # a peer that nobody configured here is not missed for ever


@dataclass(frozen=True, slots=True)
class PeerStatus:
    name: str
    node: str  # "" until known
    role: str
    state: str  # connecting | refused | up | drain | lost
    last_error: str
    rtt_s: float
    since_s: float  # for how long in this state
    seen_s: float | None  # since the last frame; None: never in this process


@dataclass(slots=True, eq=False)
class PeerRecord:
    name: str
    configured: bool
    since: float
    node: str = ""
    role: str = ""
    state: str = "connecting"
    last_error: str = ""
    link: PeerLink | None = None
    offered: PeerLink | None = None  # the last link on which the peer told its NICs


class Records:
    """All of a node's peers. `clock` is the manager's."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._records: dict[str, PeerRecord] = {}

    def add(self, name: str) -> PeerRecord:
        """The record of a `[[prefill]]` table."""
        record = PeerRecord(name, configured=True, since=self._clock())
        self._records[name] = record
        return record

    def link_of(self, name: str) -> PeerLink | None:
        return self._records[name].link

    def offered(self, name: str) -> PeerLink | None:
        """The present link of this peer, or the last one that came as far as its NICs; None if
        none did. KeyError for an unknown peer."""
        record = self._records[name]
        if record.link is not None and record.link.core.offered:
            record.offered = record.link
        return record.offered or record.link

    def remove(self, name: str) -> None:
        """A table that is not configured any more."""
        del self._records[name]

    def limit(self, most: int) -> None:
        """For peers that come from now on."""
        self._most = most

    def taken(self, node: str, link: PeerLink) -> None:
        """A decode node has been admitted."""
        record = self._of_node(node)
        if record is not None:
            record.link = link

    def failed(self, record: PeerRecord, cause: str) -> None:
        """The peer could not be reached."""
        self._enter(record, "lost" if record.state in ("up", "lost") else "connecting", cause)

    def up(self, link: PeerLink) -> None:
        record = self._of_link(link)
        if record is not None:
            self._enter(record, "up", "")
            event(_log, logging.INFO, "peer.up", "session is up", peer=record.name)

    def lost(self, link: PeerLink, lost: SessionLost) -> None:
        record = self._of_link(link)
        if record is None and link.core.peer_node is not None:
            record = self._of_node(link.core.peer_node)
            if record is not None and record.link is not None and not record.link.over:
                record = None  # it is there through another link: this attempt was one too many
            elif record is not None:
                record.link = link
        if record is None:
            code = "peer.rejected"
            event(_log, logging.WARNING, code, "link", peer=link.address, cause=lost.cause)
            return
        if link.core.offered:
            record.offered = link
        was_up = record.state in ("up", "lost")
        state = "refused" if lost.refused else "lost" if was_up else "connecting"
        self._enter(record, state, lost.cause)

    def links(self) -> Iterator[PeerLink]:
        """The link of every peer that has one, in the order of the configuration."""
        return (record.link for record in self._records.values() if record.link is not None)

    def status(self) -> list[PeerStatus]:
        return [self._status(record) for record in self._records.values()]

    def warnings(self) -> list[tuple[str, str]]:
        found = []
        for record in self._records.values():
            forgotten = not record.configured and self._clock() - record.since > GONE_SHOWN_S
            text = f"{record.name}: {record.state}: {record.last_error}"
            if record.state == "up":
                if record.link is not None and record.link.core.stalled:
                    found.append((STALLED, f"{record.name}: {record.link.warning}"))
            elif record.last_error and not forgotten:
                found.append((REFUSED if record.state == "refused" else LOST, text))
        return found

    def _enter(self, record: PeerRecord, state: str, cause: str) -> None:
        if cause and (state, cause) != (record.state, record.last_error):
            code = f"peer.{state}"
            event(_log, logging.WARNING, code, "no session", peer=record.name, cause=cause)
        if state != record.state:
            record.state = state
            record.since = self._clock()
        record.last_error = cause
        if record.link is not None and record.link.core.peer_node is not None:
            record.node = record.link.core.peer_node
            record.role = record.link.core.peer_role or ""

    def _of_link(self, link: PeerLink) -> PeerRecord | None:
        return next((record for record in self._records.values() if record.link is link), None)

    def _of_node(self, node: str) -> PeerRecord | None:
        """Find or make; None if all records are of peers that are there."""
        if node in self._records:
            return self._records[node]
        if len(self._records) >= self._most:
            gone = [
                record
                for record in self._records.values()
                if record.link is None or record.link.over
            ]
            if not gone:
                return None
            del self._records[min(gone, key=lambda record: record.since).name]
        record = PeerRecord(node, configured=False, since=self._clock())
        self._records[node] = record
        return record

    def _status(self, record: PeerRecord) -> PeerStatus:
        link, now = record.link, self._clock()
        heard_at = link.core.heard_at if link is not None else None
        drain = record.state == "up" and link is not None and link.core.draining
        return PeerStatus(
            name=record.name,
            node=record.node,
            role=record.role,
            state="drain" if drain else record.state,
            last_error=record.last_error,
            rtt_s=link.core.rtt_s if link is not None and record.state == "up" else 0.0,
            since_s=now - record.since,
            seen_s=now - heard_at if heard_at is not None else None,
        )
