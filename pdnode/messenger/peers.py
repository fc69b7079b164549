"""The peer manager: owns the links to all peers, makes them, replaces them, and tells their state.

A decode node runs one connector per `[[prefill]]` table, for ever. A prefill node takes links that
are brought to `accept`. A node has one live link to a peer: on a prefill node a second hello of the
same node id fences the old session and takes the new one; on a decode node, where it means that two
tables name one node, the second is refused.
"""

import asyncio
import dataclasses
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from itertools import count

from pdnode.config import Config, PrefillConfig
from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.cooldown import Cooldowns
from pdnode.core.heartbeat import Counters
from pdnode.core.link import Link
from pdnode.core.link_state import LinkSettings
from pdnode.messenger.peer_link import FabricEvent, Identity, PeerLink, SessionFabric, Transport
from pdnode.messenger.peer_records import (
    GROUP_OUT,
    NIC_OUT,
    UNFENCED,
    PeerRecord,
    PeerStatus,
    Records,
)
from pdnode.messenger.session import PeerSession, SessionListener
from pdnode.obs.faults import report
from pdnode.types import Role, SessionId

FIRST_DELAY_S = 0.2
LAST_WORD_S = 0.25  # between the last frame and the end of the connections
SESSION_EVENTS = frozenset({"opened", "carried", "connected", "probed", "lost", "fenced"})

_session_numbers = count(1)  # of the process: a SessionId is never used twice in one

Dial = Callable[[str, int], Awaitable[Transport]]
"""Opens a link to host and port; OSError says in words why it could not."""


class PeerManager:
    """Call `start` once, `fabric_event` for every event of SESSION_EVENTS, `close` at the end.

    `counters` is called for every heartbeat. `jitter` returns 0..1, `entropy(n)` n random bytes.
    """

    def __init__(
        self,
        config: Config,
        identity: Identity,
        fabric: SessionFabric,
        listener: SessionListener,
        *,
        dial: Dial,
        counters: Callable[[], Counters],
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._config = config
        self._peer_config = config.peer
        self._identity = identity
        self._fabric = fabric
        self._listener = listener
        self._dial = dial
        self._counters = counters
        self._clock = clock
        self._jitter = jitter
        self._entropy = entropy
        self._records = Records(config.peer.max_peers, clock)
        self._links: dict[SessionId, PeerLink] = {}
        self._connectors: dict[PrefillConfig, asyncio.Task[None]] = {}
        self._draining = False
        self.carried = 0  # registrations of a rank's memory with another device group, since start
        self._closing = False
        self._settings = LinkSettings(
            token=config.peer.token,
            heartbeat_s=config.peer.heartbeat_s,
            link_lost_s=config.peer.link_lost_s,
            step_timeout_s=config.peer.connect_timeout_s,
            stall_s=config.peer.request_stall_s,
            both_connect=fabric.limits["endpoint"] == "rdm",
        )

    def start(self) -> None:
        """Begin to connect (decode). The event loop must be running."""
        for table in self._config.prefill:
            self._connect(table)

    def reload(self, config: Config) -> None:
        """Token and limits hold for links that are made from now on; a peer that is not configured
        any more is dropped and fenced, one that is new is connected to.
        """
        self._config, self._peer_config = config, config.peer
        self._settings = dataclasses.replace(
            self._settings, token=config.peer.token, stall_s=config.peer.request_stall_s
        )
        self._records.limit(config.peer.max_peers)
        for table in self._connectors.keys() - set(config.prefill):
            self._connectors.pop(table).cancel()
            link = self._records.link_of(table.name)
            if link is not None:
                link.close("no longer configured")  # its loss goes to the record: so that first
            self._records.remove(table.name)
        for table in config.prefill:
            if table not in self._connectors:
                self._connect(table)

    def _connect(self, table: PrefillConfig) -> None:
        if self._config.node.role is not Role.DECODE:
            return
        record = self._records.add(table.name)
        connector = self._connect_for_ever(table, record)
        self._connectors[table] = asyncio.create_task(connector)

    async def accept(self, transport: Transport) -> None:
        """Serve a link that a decode node opened (prefill); returns at its end."""
        if self._closing:
            transport.close("shutting down")
            await transport.wait_closed()
            return
        try:
            await self._new_link(transport).run()
        except Exception as error:  # noqa: BLE001 - the listener would take it for a bad request
            report(error, "a peer link failed")

    def fabric_event(self, event: FabricEvent) -> None:
        """One of SESSION_EVENTS. Those of sessions that are over are dropped."""
        self.carried += event.kind == "carried" and not event.text
        link = self._links.get(SessionId(event.session))
        if link is not None:
            link.fabric_event(event)

    async def close(self, timeout_s: float = 5.0) -> list[str]:
        """Say bye and fence all peers. Returns the nodes whose fence was not confirmed in time."""
        self._closing = True
        if self._links:
            # Link and fabric have no common order: a peer that saw its connections close before it
            # read why (a `failed` said a moment ago) would name the wrong cause.
            await asyncio.sleep(LAST_WORD_S)
        for link in list(self._links.values()):
            link.close("shutting down")
        waits = [asyncio.create_task(link.wait_finished()) for link in self._links.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
        connectors = list(self._connectors.values())
        for connector in connectors:
            connector.cancel()
        await asyncio.gather(*connectors, return_exceptions=True)
        return [link.core.peer_node or link.address for link in self._links.values()]

    # what the daemon and the messenger ask and say

    def usable_prefills(self) -> list[PeerSession]:
        """Prefill peers that take new work now, in the order of the configuration."""
        return [
            link.peer
            for link in self._records.links()
            if link.usable and link.peer is not None and link.peer.role is Role.PREFILL
        ]

    def sessions(self) -> list[PeerSession]:
        """All that are up."""
        return [
            link.peer for link in self._links.values() if link.peer is not None and link.peer.up
        ]

    def offered(self, name: str) -> PeerLink | None:
        """Of a peer by the name of its table: the link that knows its NICs. KeyError if unknown."""
        return self._records.offered(name)

    def drop(self, session: PeerSession, text: str) -> None:
        """Lose this session on purpose: fence, then session_lost. Idempotent."""
        link = self._links.get(session.session)
        if link is not None:
            link.close(text)

    def drain(self, wanted: bool) -> None:
        """Tell all peers, and those to come, whether they may dispatch to this node."""
        self._draining = wanted
        for link in self._links.values():
            link.drain(wanted)

    def status(self) -> list[PeerStatus]:
        return self._records.status()

    def warnings(self) -> list[tuple[str, str]]:
        """(code, text) of every peer that an operator should look at."""
        found = self._records.warnings()
        names = {nic.nic: nic.name for nic in self._identity.nics}
        for link in self._links.values():
            peer = link.core.peer_node or link.address
            if link.core.fence_late:
                found.append((UNFENCED, f"{peer}: {link.warning}"))
            if gone := link.core.gone_pairs:
                text = ", ".join(f"{names[here]} with its NIC {there}" for here, there in gone)
                found.append((NIC_OUT, f"{peer}: {text}"))
            for group in link.bare_groups():
                nics = ", ".join(sorted(names[nic] for nic in self._identity.devices.nics[group]))
                text = f"{peer}: device group {group} ({nics}): others carry its memory"
                found.append((GROUP_OUT, text))
        return found

    # links

    async def _connect_for_ever(self, table: PrefillConfig, record: PeerRecord) -> None:
        longest_s = self._peer_config.reconnect_max_s
        cooldowns = Cooldowns(self._peer_config.nic_retry_s, self._peer_config.nic_retry_max_s)
        delay_s = min(FIRST_DELAY_S, longest_s)
        while not self._closing:
            begun_at = self._clock()
            try:
                link = await self._connect_once(table, record, cooldowns)
                # A session that lasted shows that all was well; one that dies at once does not.
                if link and link.peer is not None and self._clock() - begun_at >= longest_s:
                    delay_s = min(FIRST_DELAY_S, longest_s)
            except Exception as error:  # noqa: BLE001 - nobody awaits this task
                report(error, "a peer connector failed")
            await asyncio.sleep(delay_s * (0.5 + 0.5 * self._jitter()))
            delay_s = min(2 * delay_s, longest_s)

    async def _connect_once(
        self, table: PrefillConfig, record: PeerRecord, cooldowns: Cooldowns
    ) -> PeerLink | None:
        """The link, which is over; None if the peer could not be reached."""
        try:
            transport = await self._dial(table.host, table.port)
        except OSError as error:
            self._records.failed(record, wire.clip(str(error)))
            return None
        record.link = link = self._new_link(transport, cooldowns)
        await link.run()
        return link

    def _new_link(self, transport: Transport, cooldowns: Cooldowns | None = None) -> PeerLink:
        core = Link(
            self._identity.hello,
            self._settings,
            nonce=self._entropy(wire.NONCE_BYTES),
            session_token=self._entropy(wire.SESSION_TOKEN_BYTES),
            cooldowns=cooldowns,
        )
        link = PeerLink(
            core,
            session=SessionId(next(_session_numbers)),
            identity=self._identity,
            connect_timeout_s=self._peer_config.connect_timeout_s,
            transport=transport,
            fabric=self._fabric,
            listener=self._listener,
            owner=self,
            counters=self._counters,
            clock=self._clock,
        )
        link.drain(self._draining)
        self._links[link.session] = link
        return link

    # LinkOwner

    def link_admit(self, link: PeerLink, node: str) -> list[str]:
        if self._peer_config.tls_node_names and node not in link.names:
            named = ", ".join(sorted(link.names)) or "nothing"
            return [f"tls_node_names: the certificate of {node} names {named}"]
        others = [
            other
            for other in self._links.values()
            if other is not link and not other.over and other.core.peer_node is not None
        ]
        same = [other for other in others if other.core.peer_node == node]
        if self._config.node.role is Role.DECODE:
            return (
                [f"node: {node} is already connected through another [[prefill]]"] if same else []
            )
        if len(others) - len(same) >= self._peer_config.max_peers:
            most = self._peer_config.max_peers
            return [f"max_peers: {most} here, {len(others)} nodes are connected"]
        for other in same:
            other.close("superseded by a new session of the same node")
        self._records.taken(node, link)
        return []

    def link_up(self, link: PeerLink) -> None:
        self._records.up(link)

    def link_lost(self, link: PeerLink, lost: effects.SessionLost) -> None:
        self._records.lost(link, lost)

    def link_finished(self, link: PeerLink) -> None:
        del self._links[link.session]
