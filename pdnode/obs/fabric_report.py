"""What `pdnode fabric-test` found out, and what it means in words. Pure: figures in, text out."""

import ipaddress
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

SLOW_RATIO = 0.7
"""A pair with less than this share of the median of the others is a slow rail."""

Reach = Literal["", "open", "refused", "silent", "filtered", "no_route"]
"""What a plain TCP connection to the peer's fabric port came to. "": not tried; filtered: this port
is silent and another one of the same address answers."""


class Figures(msgspec.Struct, frozen=True):
    """Of one direction, prefill to decode. Latency: from post to completion, 4 KiB."""

    rate_bytes_per_s: float
    latency_p50_s: float
    latency_p99_s: float


class PairReport(msgspec.Struct, frozen=True):
    """One connection between two NICs."""

    nic: str
    address: str
    subnet: str  # of the address; "": not known
    mtu: int  # 0: not known
    gid: str  # of an RDMA NIC; "": none
    peer_nic: str
    peer_endpoint: str
    peer_mtu: int
    connected: bool
    figures: Figures | None = None
    immediates: tuple[int, int] = (0, 0)  # counted here, sent there
    completions: bool = False  # every write came back with success
    cause: str = ""  # why not
    reach: Reach = ""
    words: tuple[str, ...] = ()  # what is wrong; empty: nothing

    @property
    def name(self) -> str:
        return f"{self.nic} – {self.peer_nic}"


class FabricReport(msgspec.Struct, frozen=True):
    """`ok`: nothing is wrong."""

    peer: str
    provider: str
    libfabric: str
    limits: dict[str, int | str | bool]
    rtt_s: float | None  # of the peer link
    pairs: tuple[PairReport, ...]
    words: tuple[str, ...] = ()  # about the peer as a whole
    ok: bool = True


class Step(msgspec.Struct, frozen=True):
    """A line of the answer: how far it is, and at the end the report."""

    done: int
    total: int
    text: str
    report: FabricReport | None = None


def judged(report: FabricReport) -> FabricReport:
    """The report with its words."""
    rates = {p.name: p.figures.rate_bytes_per_s for p in report.pairs if p.figures is not None}
    pairs = tuple(
        msgspec.structs.replace(pair, words=tuple(_words(pair, rates))) for pair in report.pairs
    )
    ok = not report.words and not any(pair.words for pair in pairs)
    return msgspec.structs.replace(report, pairs=pairs, ok=ok)


def _words(pair: PairReport, rates: dict[str, float]) -> list[str]:
    found = []
    if pair.reach not in ("", "open"):
        found.append(_unreached(pair))
    elif not pair.connected:
        found.append(f"carries nothing now: {pair.cause or 'it was lost and is tried again later'}")
    elif not pair.completions:
        found.append(_incomplete(pair))
    elif pair.immediates[0] != pair.immediates[1]:
        counted, sent = pair.immediates
        found.append(f"{sent} immediates were sent and {counted} counted: the provider loses them")
    if pair.mtu and pair.peer_mtu and pair.mtu != pair.peer_mtu:
        found.append(f"MTU {pair.mtu} of {pair.nic} here, {pair.peer_mtu} of {pair.peer_nic} there")
    if (slow := _slow(pair, rates)) is not None:
        found.append(slow)
    return found


def _unreached(pair: PairReport) -> str:
    host, _, port = pair.peer_endpoint.rpartition(":")
    host = host.strip("[]")
    reach = pair.reach
    if reach == "silent" and pair.subnet and not _inside(host, pair.subnet):
        reach = "no_route"  # its packets go by some default route, to nowhere
    match reach:
        case "refused":
            return (
                f"{host} refuses connections to port {port}: the address is that of another host, "
                "or the prefill node does not listen on it"
            )
        case "filtered":
            return (
                f"blocked port: {host} answers, but not on port {port}: a firewall between "
                f"{pair.address} and it drops TCP to this port"
            )
        case "no_route":
            inside = f", which is in {pair.subnet}," if pair.subnet else ""
            return (
                f"wrong address: no way from {pair.address}{inside} to {host}: the prefill node "
                "advertises an address that is not its own, or one in another subnet"
            )
        case _:
            return (
                f"{host} does not answer at all: the address is wrong, the link is down, or a "
                "firewall drops everything"
            )


def _inside(host: str, subnet: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(subnet)
    except ValueError:
        return False


def _incomplete(pair: PairReport) -> str:
    if pair.figures is not None or pair.immediates[0]:
        return (
            f"small writes pass and large ones do not ({pair.cause}): look at the MTU of every "
            f"hop, {pair.mtu or 'unknown'} here"
        )
    return f"writes do not come back: {pair.cause}"


def _slow(pair: PairReport, rates: dict[str, float]) -> str | None:
    others = [rate for name, rate in rates.items() if name != pair.name]
    if pair.figures is None or not others:
        return None
    usual, own = statistics.median(others), pair.figures.rate_bytes_per_s
    if own >= SLOW_RATIO * usual:
        return None
    return f"slow rail: {_mbit(own)}, where the others reach {_mbit(usual)}"


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:.0f} Mbit/s"


def as_lines(report: FabricReport) -> Sequence[str]:
    """For people: one line a pair, then what is wrong."""
    rtt = "" if report.rtt_s is None else f", link round trip {report.rtt_s * 1e3:.2f} ms"
    lines = [f"{report.peer}: {report.provider}, libfabric {report.libfabric}{rtt}"]
    lines.append(", ".join(f"{name} {value}" for name, value in sorted(report.limits.items())))
    for pair in report.pairs:
        gid = f", GID {pair.gid}" if pair.gid else ""
        lines.append(
            f"{pair.name}: {pair.address or 'no address'}{gid} – {pair.peer_endpoint or 'no port'}"
            f", MTU {pair.mtu or '?'}/{pair.peer_mtu or '?'}"
        )
        if (figures := pair.figures) is not None:
            counted, sent = pair.immediates
            p50_us, p99_us = figures.latency_p50_s * 1e6, figures.latency_p99_s * 1e6
            lines.append(
                f"  {_mbit(figures.rate_bytes_per_s)}, 4 KiB in {p50_us:.0f} µs "
                f"(p99 {p99_us:.0f}), immediates {counted} of {sent}"
            )
        lines += [f"  WRONG: {word}" for word in pair.words] or ["  good"]
    lines += [f"WRONG: {word}" for word in report.words]
    return lines
