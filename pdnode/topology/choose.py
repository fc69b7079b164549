"""Which NICs a node takes when its configuration names none: those of the GPUs that its ranks run
on, in device groups, or all of the host in one; each with its reason. Joined with what libfabric
lists, by PCI address."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdnode.topology.groups import form_groups
from pdnode.topology.host import UNKNOWN_NODE, Host, Nic, Place
from pdnode.topology.place import Placement, place
from pdnode.topology.sysfs import Sysfs, read_text
from pdnode.topology.usable import Policy, judge

_NOWHERE = Place(None, "", (), UNKNOWN_NODE, UNKNOWN_NODE)
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
    """`group`: the device group of a NIC that is taken."""

    nic: Nic
    reason: str
    group: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """`refused`: why the others were not taken. `homes`: device group of each rank; empty: all
    NICs are in one."""

    chosen: tuple[Chosen, ...]
    refused: tuple[Chosen, ...]
    homes: tuple[int, ...] = ()


def choose(
    host: Host,
    policy: Policy,
    devices: Sequence[FabricDevice],
    *,
    gpus: Sequence[str],
    address_of: Callable[[str], str | None],
    default_route: str,
) -> Choice:
    """`gpus`: PCI addresses of the ranks' GPUs, whose NICs are those that placement over the whole
    host gives them; empty, or none of them with a NIC: all usable ones. `address_of(name)`: a NIC's
    IP address; `default_route`: the interface of the default route, which tcp falls back to where
    the host shows no network hardware.
    """
    objections = {
        verdict.nic.name: text
        for verdict in judge(host, policy)
        if verdict.usable
        and (text := _objection(verdict.nic, policy.provider, devices, address_of))
    }
    placed = place(host, policy, objections)
    refused = tuple(Chosen(v.nic, v.reason) for v in placed.nics if not v.usable)
    usable = tuple(Chosen(v.nic, v.reason) for v in placed.nics if v.usable)
    if not usable and policy.provider.startswith("tcp") and address_of(default_route):
        nic = Nic(default_route, _NOWHERE, "tcp")
        reason = "no other interface can be used here, and it has the default route"
        usable = (Chosen(nic, reason),)
    return _in_groups(placed, gpus, refused) or Choice(usable, refused)


def _in_groups(
    placed: Placement, gpus: Sequence[str], refused: tuple[Chosen, ...]
) -> Choice | None:
    """The NICs of these GPUs; None if they have none."""
    at = {one.gpu.place.pci: one for one in placed.gpus}
    own = [{nic.name for nic in at[pci].nics} if pci in at else set() for pci in gpus]
    if not any(own):
        return None
    usable = [verdict.nic for verdict in placed.nics if verdict.usable]
    places = [at[pci].gpu.place if pci in at else _NOWHERE for pci in gpus]
    groups = form_groups(places, own, usable)
    chosen, left = [], []
    for nic in usable:
        rails = [(p, rail) for p, one in at.items() for rail in one.rails if rail.nic == nic]
        owners = [(pci, rail) for pci, rail in rails if rail.assigned]
        if nic.name not in groups.nics:
            others = ", ".join(str(pci) for pci, _ in owners)
            text = (
                f"it is for GPU {others}, which no rank runs on" if others else "no GPU's nearest"
            )
            left.append(Chosen(nic, text))
            continue
        number = groups.nics[nic.name]
        pci, rail = next((pci, rail) for pci, rail in owners if pci in gpus)
        ranks = ", ".join(str(r) for r, home in enumerate(groups.ranks) if home == number)
        text = f"GPU {pci}: {rail.reason}; device group {number}, for rank {ranks}"
        chosen.append(Chosen(nic, text, number))
    chosen.sort(key=lambda one: one.group)
    return Choice(tuple(chosen), (*refused, *left), groups.ranks)


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
