"""What the hardware counted: bytes and trouble per NIC, from sysfs, never faster than it refreshes.

A figure that a driver does not give is None, never 0: a rail that shows nothing is not idle.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from pdnode.topology.detect import INFINIBAND, NET
from pdnode.topology.host import Nic
from pdnode.topology.sysfs import LIVE, Sysfs

DEFAULT_LIFESPAN_MS = 10
MAX_LIFESPAN_MS = 10_000
_STUCK = (1 << 32) - 1
"""Counters of 32 bits stop at their largest value; from then on they say nothing."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Since the driver was loaded. None: not available."""

    sent_bytes: int | None = None
    received_bytes: int | None = None
    sent_packets: int | None = None
    received_packets: int | None = None
    retransmits: int | None = None  # packets or timeouts, as the driver counts
    drops: int | None = None
    errors: int | None = None
    congestion: int | None = None  # ticks with data to send and no credit
    link_downs: int | None = None


@dataclass(frozen=True, slots=True)
class _Alias:
    """Files that together are one figure, each times `factor`; all of them must be readable."""

    files: tuple[str, ...]
    factor: int = 1


# Per figure, first what is right where it exists. IB's data counters are in units of four octets;
# EFA and bnxt_re count bytes themselves, irdma (Intel) octets by IP version, erdma (Alibaba) bytes.
# mlx5 has no bytes of its own beside IB's. Kernel: drivers/infiniband/hw/*/, Documentation/ABI.
_RDMA: dict[str, tuple[_Alias, ...]] = {
    "sent_bytes": (
        _Alias(("counters/port_xmit_data",), 4),
        _Alias(("hw_counters/tx_bytes",)),
        _Alias(("hw_counters/hw_tx_bytes_cnt",)),
        _Alias(("hw_counters/ip4OutOctets", "hw_counters/ip6OutOctets")),
    ),
    "received_bytes": (
        _Alias(("counters/port_rcv_data",), 4),
        _Alias(("hw_counters/rx_bytes",)),
        _Alias(("hw_counters/hw_rx_bytes_cnt",)),
        _Alias(("hw_counters/ip4InOctets", "hw_counters/ip6InOctets")),
    ),
    "sent_packets": (
        _Alias(("counters/port_xmit_packets",)),
        _Alias(("hw_counters/tx_pkts",)),
        _Alias(("hw_counters/hw_tx_packets_cnt",)),
        _Alias(("hw_counters/ip4OutPkts", "hw_counters/ip6OutPkts")),
    ),
    "received_packets": (
        _Alias(("counters/port_rcv_packets",)),
        _Alias(("hw_counters/rx_pkts",)),
        _Alias(("hw_counters/hw_rx_packets_cnt",)),
        _Alias(("hw_counters/ip4InPkts", "hw_counters/ip6InPkts")),
    ),
    "retransmits": (
        _Alias(("hw_counters/retrans_pkts",)),
        _Alias(("hw_counters/local_ack_timeout_err", "hw_counters/packet_seq_err")),
        _Alias(("hw_counters/to_retransmits", "hw_counters/seq_err_naks_rcvd")),
        _Alias(("hw_counters/RetransSegs",)),
    ),
    "drops": (
        _Alias(("counters/port_xmit_discards",)),
        _Alias(("hw_counters/rx_drops",)),
    ),
    "errors": (_Alias(("counters/port_rcv_errors",)),),
    "congestion": (_Alias(("counters/port_xmit_wait",)),),
    "link_downs": (_Alias(("counters/link_downed",)),),
}

_NET: dict[str, tuple[_Alias, ...]] = {
    "sent_bytes": (_Alias(("statistics/tx_bytes",)),),
    "received_bytes": (_Alias(("statistics/rx_bytes",)),),
    "sent_packets": (_Alias(("statistics/tx_packets",)),),
    "received_packets": (_Alias(("statistics/rx_packets",)),),
    "drops": (_Alias(("statistics/tx_dropped", "statistics/rx_dropped")),),
    "errors": (_Alias(("statistics/tx_errors", "statistics/rx_errors")),),
    "link_downs": (_Alias(("carrier_down_count",)),),
}


class NicCounters:
    """Reads the counters of some NICs. Blocks for a few file reads a NIC: not for the event loop.

    `clock` gives seconds that never go back.
    """

    def __init__(
        self, nics: Sequence[Nic], *, sysfs: Sysfs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._sysfs = sysfs if sysfs is not None else Sysfs(LIVE)
        self._clock = clock
        self._sources = {nic.name: _sources(self._sysfs, nic) for nic in nics}
        self._last: dict[str, tuple[float, Traffic]] = {}

    def read(self, name: str) -> Traffic:
        """Figures of the NIC, at most one lifespan of its counters old. KeyError for another."""
        sources = self._sources[name]
        now = self._clock()
        known = self._last.get(name)
        if known is not None and now - known[0] < sources.lifespan_s:
            return known[1]
        traffic = Traffic(**{f.name: self._figure(sources, f.name) for f in fields(Traffic)})
        self._last[name] = (now, traffic)
        return traffic

    def _figure(self, sources: "_Sources", figure: str) -> int | None:
        """The sum over the ports; the first alias that all of them have counts."""
        for alias in sources.table.get(figure, ()):
            values = [self._value(base, file) for base in sources.bases for file in alias.files]
            if values and None not in values:
                return sum(value for value in values if value is not None) * alias.factor
        return None

    def _value(self, base: tuple[str, ...], file: str) -> int | None:
        value = self._sysfs.integer(*base, *file.split("/"))
        return None if value is None or value < 0 or value == _STUCK else value


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where a NIC's counters are: an interface, or the ports of an RDMA device."""

    table: dict[str, tuple[_Alias, ...]]
    bases: tuple[tuple[str, ...], ...]
    lifespan_s: float


def _sources(sysfs: Sysfs, nic: Nic) -> _Sources:
    if nic.provider == "tcp":
        return _Sources(_NET, ((*NET, nic.name),), 0.0)
    ports = (*INFINIBAND, nic.name, "ports")
    bases = tuple((*ports, port) for port in sysfs.names(*ports))
    spans = [sysfs.integer(*base, "hw_counters", "lifespan") for base in bases]
    known = [span for span in spans if span is not None and 0 <= span <= MAX_LIFESPAN_MS]
    return _Sources(_RDMA, bases, max(known, default=DEFAULT_LIFESPAN_MS) / 1000)
