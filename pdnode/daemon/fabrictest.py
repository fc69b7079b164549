"""`pdnode fabric-test`: measures every NIC pair of a peer, in turn, while the node works.

A pair that is connected is measured by writes of the peer (messenger/fabrictest.py). For one that
is not, plain TCP tells a firewall from a wrong address. Runs on the event loop of a decode node.
"""

import asyncio
import errno
import ipaddress
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psutil
from msgspec.structs import replace

from pdnode.config import Config
from pdnode.core.link_effects import Pair
from pdnode.daemon.transfer import Transfer
from pdnode.messenger.fabrictest import TestReceiver, Written
from pdnode.messenger.peer_link import PeerLink
from pdnode.messenger.session import PeerSession
from pdnode.obs.fabric_report import FabricReport, Figures, PairReport, Reach, Step, judged
from pdnode.topology.nicfacts import first_gid, mtu_of
from pdnode.topology.sysfs import Sysfs

SMALL_BYTES = 4096
SMALL_WRITES = 64
PAGES = 16
FIRST_BYTES = 4 << 20
MEASURE_S = 0.5
MOST_BYTES = 256 << 20
WRITE_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 4.0
_OTHER_PORT = 9  # discard: closed on almost every host, which then says so
_STEPS = 2  # a pair
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class FabricTest:
    """One run at a time: the prefill node refuses a second one."""

    config: Config
    transfer: Transfer
    receiver: TestReceiver
    page_bytes: int

    async def run(self, name: str, link: PeerLink) -> AsyncIterator[Step]:
        """Progress, and at the end the report."""
        pairs = link.core.known_pairs
        total = _STEPS * len(pairs)
        found: list[PairReport] = []
        for number, pair in enumerate(pairs):
            report = self._describe(link, pair)
            yield Step(_STEPS * number, total, f"{report.name}: reach and latency")
            session = link.peer
            if not report.connected or session is None:
                if report.peer_endpoint and report.address:
                    there = await reach(report.address, report.peer_endpoint)
                    report = replace(report, reach=there)
            else:
                report, small = await self._small(session, pair, report)
                if small is not None:
                    yield Step(_STEPS * number + 1, total, f"{report.name}: rate")
                    report = await self._rate(session, pair, report, small)
            found.append(report)
        fabric = self.transfer.fabric
        whole = FabricReport(
            peer=name,
            provider=self.config.fabric.provider,
            libfabric=fabric.library_version,
            limits=dict(fabric.limits),
            rtt_s=link.core.rtt_s or None,
            pairs=tuple(found),
            words=() if pairs else ("it has not offered its NICs yet: the link is not that far",),
        )
        yield Step(total, total, "done", judged(whole))

    def _describe(self, link: PeerLink, pair: Pair) -> PairReport:
        names = {nic.nic: nic.name for nic in self.transfer.nics}
        peer = {nic.nic: nic for nic in link.core.offered}
        name = names[pair[0]]
        address = next((n.address for n in self.config.fabric.nics if n.name == name), "")
        rdm = self.transfer.fabric.limits["endpoint"] == "rdm"
        sysfs = Sysfs()
        return PairReport(
            nic=name,
            address=address,
            subnet=_subnet(address),
            mtu=mtu_of(sysfs, name),
            gid=first_gid(sysfs, name),
            peer_nic=peer[pair[1]].name,
            peer_endpoint="" if rdm else peer[pair[1]].endpoint.decode(errors="replace"),
            peer_mtu=0,
            connected=pair in link.core.live_pairs,
            cause=link.core.causes.get(pair, ""),
        )

    async def _small(
        self, session: PeerSession, pair: Pair, report: PairReport
    ) -> tuple[PairReport, list[float] | None]:
        """The latency of small writes; no times where they did not pass."""
        written = await self.receiver.write(
            session, pair, pages=1, passes=SMALL_WRITES, length=min(SMALL_BYTES, self.page_bytes),
            serial=True, timeout_s=WRITE_TIMEOUT_S,
        )  # fmt: skip
        report = _counted(report, written)
        return report, sorted(written.seconds) if report.completions else None

    async def _rate(
        self, session: PeerSession, pair: Pair, report: PairReport, small: list[float]
    ) -> PairReport:
        """First a little, then as much as takes about MEASURE_S."""
        size, rate = FIRST_BYTES, 0.0
        for _ in range(2):
            passes = max(1, size // (PAGES * self.page_bytes))
            written = await self.receiver.write(
                session, pair, pages=PAGES, passes=passes, length=self.page_bytes, serial=False,
                timeout_s=WRITE_TIMEOUT_S,
            )  # fmt: skip
            report = _counted(report, written)
            if not report.completions:
                return report
            rate = passes * PAGES * self.page_bytes / max(written.seconds[0], 1e-9)
            size = int(min(rate * MEASURE_S, MOST_BYTES))
        figures = Figures(
            rate_bytes_per_s=rate,
            latency_p50_s=statistics.median(small),
            latency_p99_s=small[int(0.99 * (len(small) - 1))],
        )
        return replace(report, figures=figures)


def _counted(report: PairReport, written: Written) -> PairReport:
    counted, sent = report.immediates
    return replace(
        report,
        immediates=(counted + written.counted, sent + written.expected),
        completions=not written.cause,
        cause=written.cause,
        peer_mtu=written.mtu or report.peer_mtu,
    )


def _subnet(address: str) -> str:
    """Of one of this host's addresses, "" for another."""
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.address == address and one.netmask:
                network = ipaddress.ip_network(f"{address}/{one.netmask}", strict=False)
                return str(network)
    return ""


async def reach(source: str, endpoint: str) -> Reach:
    """What a TCP connection from `source` to `endpoint` comes to; it is closed at once."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    found = await _connect(source, host, int(port))
    if found == "silent" and await _connect(source, host, _OTHER_PORT) in ("refused", "open"):
        return "filtered"
    return found


async def _connect(source: str, host: str, port: int) -> Reach:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
    except TimeoutError:
        return "silent"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return "no_route" if error.errno in _NO_WAY else "silent"
    writer.close()
    return "open"
