"""Whether two nodes know the same of their session: while nothing is under way, and at rest."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pdnode.core.nics import joined_ranks
from pdnode.messenger.session import PeerSession
from tests.sim.kernel import promise
from tests.sim.network import Socket

if TYPE_CHECKING:
    from tests.sim.process import Process


def check_reach(processes: "Mapping[str, Process]", decode: "Process") -> None:
    """Where a decode node finds that all of its memory has a NIC, and no word is under way, the
    prefill node knows a NIC for all of it: what it posted without would wait for ever."""
    for link in decode.peers._links.values():
        carriers, live = link.core._carriers, link.core.live_pairs
        prefill = processes.get(str(link.core.peer_node))
        if prefill is None or carriers is None or link.peer is None or not link.peer.up:
            continue
        here = link._transport
        assert isinstance(here, Socket)
        theirs = next(
            (one for one in prefill.peers._links.values() if one._transport is here.other), None
        )
        told = carriers.asked is None and not carriers.fenced and not link.peer.lent
        if theirs is None or theirs.peer is None or not told or not here.silent:
            continue
        covered = not carriers.stranded(nic for nic, _ in live)
        if covered and {(nic, local) for local, nic in theirs.peer.pairs} == live:
            for rank in decode.core.ranks:
                promise(bool(theirs.peer.reaching(rank)), f"the peer knows no way to rank {rank}")


def disagreements(processes: "Mapping[str, Process]") -> Iterator[str]:
    """Of every session of a prefill node whose peer is there."""
    for name, prefill in processes.items():
        for session in prefill.peers.sessions() if prefill.pushes is not None else ():
            decode = processes.get(session.node)
            if decode is not None:
                found = (*_detours(prefill, decode, session), *_strange(prefill, decode, session))
                yield from (f"{name}, {session.node}: {text}" for text in found)


def _detours(prefill: "Process", decode: "Process", session: PeerSession) -> Iterator[str]:
    """Routes whose source's own device group does not reach the NICs of the destination's."""
    for target, source in joined_ranks(
        decode.spec.geometry, prefill.spec.geometry,
        decode_groups=decode.spec.groups, prefill_groups=prefill.spec.groups,
    ):  # fmt: skip
        ours = prefill.spec.devices.nics[prefill.core.homes[source]]
        theirs = decode.spec.devices.nics[decode.core.homes[target]]
        if not any(here in ours and nic in theirs for here, nic in session.pairs):
            yield f"rank {source} does not reach rank {target}"


def _strange(prefill: "Process", decode: "Process", session: PeerSession) -> Iterator[str]:
    """Pairs and descriptors of which one side knows and the other does not."""
    mine = prefill.core.sessions[session.session]
    theirs = next((s for s in decode.core.sessions.values() if s.token == mine.token), None)
    other = next(
        (one for one in decode.peers.sessions() if theirs and one.session == theirs.number), None
    )
    if theirs is None or other is None:
        yield "one side has no session"
        return
    if {(here, there) for there, here in session.pairs} != set(other.pairs):
        yield f"pairs {session.pairs} here, {other.pairs} there"
    registered = {
        (rank, nic, key)
        for part in theirs.parts.values()
        for nic, keys in part.registered.items()
        for rank, key in keys.items()
    }
    for part in mine.parts.values():
        known = {
            (rank, nic, key) for rank, keys in part.remote.items() for nic, key in keys.items()
        }
        if known != registered:
            yield f"(rank, NIC, key) known {known - registered}, unknown {registered - known}"
