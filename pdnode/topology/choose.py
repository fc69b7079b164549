"""Which NICs a node takes when its configuration names none: the ones near to its GPUs, or to all
of the host; each with its reason. Joined with what libfabric lists, by PCI address."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdnode.topology.host import UNKNOWN_NODE, Host, Nic, Place
from pdnode.topology.place import place
from pdnode.topology.sysfs import Sysfs, read_text
from pdnode.topology.usable import Policy

_DEFAULT_ROUTE = "00000000"


@dataclass(frozen=True, slots=True)
class FabricDevice:
    """A device as libfabric lists it (fi_getinfo). "" and 0: it does not say."""

    name: str
    pci: str = ""
    state: str = ""  # up | down
    rate_gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class Chosen:
    nic: Nic
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """`refused`: why the others were not taken, by name."""

    chosen: tuple[Chosen, ...]
    refused: tuple[Chosen, ...]


def choose(
    host: Host,
    policy: Policy,
    devices: Sequence[FabricDevice],
    *,
    for_gpus: bool,
    address_of: Callable[[str], str | None],
    default_route: str,
) -> Choice:
    """`for_gpus`: the NICs that placement gives to the host's GPUs, as far as there are any; else
    all usable ones. `address_of(name)`: a NIC's IP address; `default_route`: the interface of the
    default route, which tcp falls back to where the host shows no network hardware.
    """
    placed = place(host, policy)
    refused = [Chosen(v.nic, v.reason) for v in placed.nics if not v.usable]
    found: dict[str, Chosen] = {}
    for at in placed.gpus if for_gpus else ():
        for rail in at.rails:
            if rail.assigned:
                reason = f"GPU {at.gpu.place.pci}: {rail.reason}"
                found.setdefault(rail.nic.name, Chosen(rail.nic, reason))
    if not found:
        found = {v.nic.name: Chosen(v.nic, v.reason) for v in placed.nics if v.usable}
    chosen = []
    for one in found.values():
        objection = _objection(one.nic, policy.provider, devices, address_of)
        if objection:
            refused.append(Chosen(one.nic, objection))
        else:
            chosen.append(one)
    if not chosen and policy.provider.startswith("tcp") and address_of(default_route):
        nic = Nic(default_route, Place(None, "", (), UNKNOWN_NODE, UNKNOWN_NODE), "tcp")
        reason = "no other interface can be used here, and it has the default route"
        chosen = [Chosen(nic, reason)]
    return Choice(tuple(chosen), tuple(refused))


def _objection(
    nic: Nic,
    provider: str,
    devices: Sequence[FabricDevice],
    address_of: Callable[[str], str | None],
) -> str:
    """What speaks against a usable NIC beside the host's own view of it; "" for nothing."""
    if provider != "efa" and address_of(nic.name) is None:
        return "it has no IP address"
    if nic.provider == "tcp" or provider.startswith("tcp"):
        return ""
    same = [device for device in devices if device.pci and device.pci == nic.place.pci]
    same = same or [device for device in devices if device.name.startswith(nic.name)]
    if not same:
        return f"libfabric's {provider} does not list it"
    if all(device.state == "down" for device in same):
        return "libfabric says that its link is down"
    return ""


def default_route(sysfs: Sysfs) -> str:
    """The interface of the IPv4 default route, "" without one."""
    for line in (read_text(sysfs.proc / "net" / "route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == _DEFAULT_ROUTE:
            return fields[0]
    return ""
