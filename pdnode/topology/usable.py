"""Which NICs carry KV pages: those of one fabric, up, allowed, and no management ports."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pdnode.topology.host import Host, Nic

MANAGEMENT_RATIO = 0.25
"""A NIC with at most this share of the fabric's rate is taken for a management port. The fabric's
rate is the one with the most bandwidth in sum, so one fast uplink does not put eight NICs out."""

_RDMA = ("efa", "verbs")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator wants. `allow` and `deny` hold names, PCI addresses or patterns with `*`;
    `provider` "" takes the RDMA provider with the most bandwidth, tcp only where there is none."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    provider: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    nic: Nic
    usable: bool
    reason: str


def rate_text(nic: Nic) -> str:
    rate = nic.effective_gbps
    if not rate:
        return "rate unknown"
    by_slot = nic.rate_gbps is None or rate < nic.rate_gbps
    return f"{rate:.4g} Gb/s" + (" by its PCIe slot" if by_slot else "")


def judge(host: Host, policy: Policy) -> tuple[Verdict, ...]:
    """A verdict for every NIC, in the order of `host.nics`."""
    refused: dict[int, str] = {}

    def left() -> list[Nic]:
        return [nic for number, nic in enumerate(host.nics) if number not in refused]

    def refuse(reason: Callable[[Nic], str]) -> None:
        for number, nic in enumerate(host.nics):
            if number not in refused and (text := reason(nic)):
                refused[number] = text

    refuse(lambda nic: _unwanted(nic, policy))
    refuse(lambda nic: f"its port is {nic.state}" if nic.state not in ("", "ACTIVE") else "")
    provider = policy.provider.removesuffix("-rdm") or _provider(left())
    refuse(lambda nic: _other_provider(nic, provider))
    names = _virtual(left())
    refuse(lambda nic: names.get(nic.name, ""))
    if not policy.allow:  # what an operator names is no management port
        known = (nic for nic in left() if nic.link_layer and nic.provider == "verbs")
        layer = _heaviest(known, lambda nic: nic.link_layer)
        refuse(lambda nic: _other_layer(nic, layer))
        rate = _main_rate(left())
        refuse(lambda nic: _too_slow(nic, rate))
    return tuple(
        Verdict(nic, number not in refused, refused.get(number) or _praise(nic))
        for number, nic in enumerate(host.nics)
    )


def unmatched(host: Host, policy: Policy) -> list[str]:
    """Entries of the lists that match no NIC."""
    return [
        f'"{pattern}" of topology.{name} matches no NIC of this host'
        for name, patterns in (("allow", policy.allow), ("deny", policy.deny))
        for pattern in patterns
        if not any(matches(nic, (pattern,)) for nic in host.nics)
    ]


def matches(nic: Nic, patterns: Sequence[str]) -> bool:
    names = [nic.name, *nic.interfaces] + ([nic.place.pci] if nic.place.pci else [])
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _praise(nic: Nic) -> str:
    state = "port is ACTIVE" if nic.state else "state of its port unknown"
    return f"{nic.provider}, {state}, {rate_text(nic)}"


def _unwanted(nic: Nic, policy: Policy) -> str:
    if matches(nic, policy.deny):
        return "denied by topology.deny"
    if policy.allow and not matches(nic, policy.allow):
        return "not in topology.allow"
    return ""


def _provider(nics: list[Nic]) -> str:
    rdma = _heaviest((nic for nic in nics if nic.provider in _RDMA), lambda nic: nic.provider)
    return rdma or "tcp"


def _heaviest(nics: Iterable[Nic], key: Callable[[Nic], str]) -> str:
    """The key with the most bandwidth in sum; "" without NICs. Unknown rates count a little."""
    sums: dict[str, float] = defaultdict(float)
    for nic in nics:
        sums[key(nic)] += nic.effective_gbps or 1e-3
    return max(sums, key=lambda name: sums[name], default="")


def _other_provider(nic: Nic, provider: str) -> str:
    if nic.provider == provider or (provider == "tcp" and nic.interfaces):
        return ""
    if nic.provider == "tcp":
        return f"a network interface; the fabric here is {provider}"
    return f"of provider {nic.provider}; the fabric here is {provider}"


def _virtual(nics: list[Nic]) -> dict[str, str]:
    """Functions that share a physical port with a better one: only one of them is of use."""
    reasons = {}
    physical = {nic.place.pci for nic in nics if nic.place.pci is not None}
    first: dict[str, str] = {}
    for nic in nics:
        if nic.parent is None:
            continue
        if nic.parent in physical:
            reasons[nic.name] = f"a virtual function of {nic.parent}, which is used itself"
        elif first.setdefault(nic.parent, nic.name) != nic.name:
            reasons[nic.name] = f"a virtual function of {nic.parent}, as is {first[nic.parent]}"
    return reasons


def _other_layer(nic: Nic, layer: str) -> str:
    if not layer or nic.link_layer in ("", layer):
        return ""
    return f"{nic.link_layer}; the fabric here is {layer} (name it in topology.allow to use it)"


def _main_rate(nics: list[Nic]) -> float:
    sums: dict[float, float] = defaultdict(float)
    for nic in nics:
        sums[nic.effective_gbps] += nic.effective_gbps
    return max(sums, key=lambda rate: (sums[rate], rate), default=0.0)


def _too_slow(nic: Nic, rate: float) -> str:
    if not 0 < nic.effective_gbps <= rate * MANAGEMENT_RATIO:
        return ""
    return (
        f"{rate_text(nic)} beside {rate:.4g} Gb/s: taken for a management port "
        "(name it in topology.allow to use it)"
    )
