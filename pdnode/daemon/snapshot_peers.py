"""The snapshot's view of NICs and peers."""

import heapq
from collections import Counter
from collections.abc import Iterable

from pdnode.core.wire import PROTOCOL_MAX, clip
from pdnode.daemon.figures import Figures
from pdnode.daemon.watch import Watch
from pdnode.obs.snapshot import Nic, NicErrors, NicPeer, Peer, Warning
from pdnode.types import NodeId, count_pages

_SLOW = "W203"
MAX_SHARES = 8
"""Peers shown of one NIC: the busiest."""


def build_nics(parts: Figures, watch: Watch) -> tuple[Nic, ...]:
    if parts.transfer is None:
        return ()
    addresses = {nic.name: nic.address for nic in parts.config.fabric.nics}
    found = []
    for nic in parts.nics():
        flow = watch.nics.get(nic.name)
        reading = parts.readings.get(nic.name)
        busiest = heapq.nlargest(
            MAX_SHARES,
            (
                (part.rx.now or 0, part.tx.now or 0, peer)
                for (name, peer), part in watch.peers.items()
                if name == nic.name
            ),
            key=lambda share: share[0] + share[1],
        )
        shares = [
            NicPeer(peer=peer, rx_bytes_per_s=rx, tx_bytes_per_s=tx) for rx, tx, peer in busiest
        ]
        found.append(
            Nic(
                name=nic.name,
                state="down" if reading is not None and reading.state == "down" else "up",
                provider=parts.config.fabric.provider,
                address=addresses.get(nic.name),
                line_bytes_per_s=nic.line_bytes_per_s,
                rx_bytes_per_s=flow.rx.now if flow else None,
                tx_bytes_per_s=flow.tx.now if flow else None,
                rx_peak_bytes_per_s=flow.rx.peak if flow else None,
                tx_peak_bytes_per_s=flow.tx.peak if flow else None,
                rx_history=tuple(flow.rx.history) if flow else (),
                tx_history=tuple(flow.tx.history) if flow else (),
                numa=None if parts.host is None else parts.host.numa(nic.name),
                errors=(
                    NicErrors(kind="write", total=nic.writes_failed),
                    *(NicErrors(kind=kind, total=n) for kind, n in nic.wire_errors.items()),
                ),
                peers=tuple(shares),
                counters="kernel" if nic.wire else "fabric",
            )
        )
    return tuple(found)


def build_peers(parts: Figures, watch: Watch, warnings: Iterable[Warning]) -> tuple[Peer, ...]:
    if parts.peers is None:
        return ()
    slow = {name for one in warnings if one.code == _SLOW for name in one.subjects}
    sessions = {session.node: session for session in parts.peers.sessions()}
    inflight, quarantined = _held(parts)
    found = []
    for status in parts.peers.status():
        session = sessions.get(NodeId(status.node))
        up = session is not None
        rx = [flow.rx.now for (_, peer), flow in watch.peers.items() if peer == status.node]
        tx = [flow.tx.now for (_, peer), flow in watch.peers.items() if peer == status.node]
        state = "slow" if status.state == "up" and status.name in slow else status.state
        found.append(
            Peer(
                name=status.name,
                role=status.role,
                state=state,
                node=status.node,
                since_s=status.since_s,
                seen_s=status.seen_s,
                rtt_s=status.rtt_s if up and status.rtt_s else None,
                rx_bytes_per_s=_sum(rx),
                tx_bytes_per_s=_sum(tx),
                inflight=inflight[status.node],
                protocol=min(PROTOCOL_MAX, session.hello.protocol_max) if session else None,
                version=clip(session.hello.pdnode_version) if session else None,
                pages_quarantined=quarantined[status.node] if parts.pull is not None else None,
                last_error=status.last_error,
            )
        )
    return tuple(found)


def _held(parts: Figures) -> tuple[Counter[str], Counter[str]]:
    """(transfers in flight, quarantined pages) by node id."""
    inflight: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    if parts.pull is not None:
        for pull in parts.pull.open():
            node = pull.session.node
            inflight[node] += not pull.over
            if pull.quarantined:
                quarantined[node] += count_pages(pull.pages)
    if parts.push is not None:
        for push in parts.push.open():
            inflight[push.peer] += 1
    return inflight, quarantined


def _sum(rates: list[int | None]) -> int | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
