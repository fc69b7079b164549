"""Placement: the NICs and CPUs of every GPU, each choice with its reason in words."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pdnode.topology.balance import balance
from pdnode.topology.host import Distance, Gpu, Host, Nic, distance
from pdnode.topology.sysfs import natural
from pdnode.topology.threads import Threads, place_threads
from pdnode.topology.usable import Policy, Verdict, judge, rate_text, unmatched


@dataclass(frozen=True, slots=True)
class Rail:
    """One NIC as one GPU sees it."""

    nic: Nic
    distance: Distance
    assigned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """`rails`: the NICs of the fabric, nearest first, whether they are assigned or not."""

    gpu: Gpu
    rails: tuple[Rail, ...]
    threads: Threads

    @property
    def nics(self) -> list[Nic]:
        return [rail.nic for rail in self.rails if rail.assigned]


@dataclass(frozen=True, slots=True)
class Placement:
    gpus: tuple[GpuPlacement, ...]
    nics: tuple[Verdict, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The NICs among which a GPU's are chosen: equally near, equally fast."""

    distance: Distance
    rate: float
    nics: tuple[str, ...]


def place(host: Host, policy: Policy, objections: Mapping[str, str] | None = None) -> Placement:
    """NICs are dealt out so that each that is nearest and fastest for some GPU works, and no GPU
    is without one while a usable one exists; GPUs that must share do so evenly.

    `objections`: NICs, by name, that are out of use for what the host's files do not show, and why.
    """
    verdicts = judge(host, policy)
    if objections:
        verdicts = tuple(
            dataclasses.replace(one, usable=False, reason=objections[one.nic.name])
            if one.usable and one.nic.name in objections
            else one
            for one in verdicts
        )
    usable = [verdict.nic for verdict in verdicts if verdict.usable]
    choices = {_key(gpu): _choose(gpu, usable) for gpu in host.gpus} if usable else {}
    pairs = _deal(choices)
    threads = place_threads(host)
    placements = tuple(
        GpuPlacement(gpu, _rails(gpu, verdicts, choices, pairs), threads[number])
        for number, gpu in enumerate(host.gpus)
    )
    problems = [*host.problems, *unmatched(host, policy)]
    if host.gpus and not usable:
        problems.append("no usable NIC")
    problems += [f"GPU {_key(p.gpu)}: {p.threads.problem}" for p in placements if p.threads.problem]
    return Placement(placements, verdicts, tuple(problems))


def _key(gpu: Gpu) -> str:
    return gpu.place.pci or ""


def _choose(gpu: Gpu, usable: list[Nic]) -> _Choice:
    """Distance comes before rate: what is far slower was taken out before."""
    near = min(distance(gpu.place, nic.place) for nic in usable)
    same = [nic for nic in usable if distance(gpu.place, nic.place) == near]
    rate = max(nic.effective_gbps for nic in same)
    return _Choice(near, rate, tuple(nic.name for nic in same if nic.effective_gbps == rate))


def _deal(choices: dict[str, _Choice]) -> set[tuple[str, str]]:
    """(GPU, NIC) pairs: every chosen NIC to one GPU, then a NIC for each GPU that went without."""
    wanting: dict[str, list[str]] = {}
    for gpu, choice in choices.items():
        for nic in choice.nics:
            wanting.setdefault(nic, []).append(gpu)
    owners = balance(wanting)
    without = {gpu: c.nics for gpu, c in choices.items() if gpu not in owners.values()}
    shared = balance(without, base=dict.fromkeys(owners, 1))
    return {(gpu, nic) for nic, gpu in owners.items()} | set(shared.items())


def _rails(
    gpu: Gpu,
    verdicts: tuple[Verdict, ...],
    choices: dict[str, _Choice],
    pairs: set[tuple[str, str]],
) -> tuple[Rail, ...]:
    """Network interfaces of a host with RDMA devices are left out, unless they are used."""
    has_rdma = any(verdict.nic.provider != "tcp" for verdict in verdicts)
    shown = [v for v in verdicts if v.usable or not has_rdma or v.nic.provider != "tcp"]
    rails = [
        Rail(
            verdict.nic,
            distance(gpu.place, verdict.nic.place),
            (_key(gpu), verdict.nic.name) in pairs,
            _reason(gpu, verdict, choices.get(_key(gpu)), pairs),
        )
        for verdict in shown
    ]
    rails.sort(
        key=lambda rail: (
            rail.distance, not rail.assigned, -rail.nic.effective_gbps, natural(rail.nic.name),
        )
    )  # fmt: skip
    return tuple(rails)


def _reason(gpu: Gpu, verdict: Verdict, choice: _Choice | None, pairs: set[tuple[str, str]]) -> str:
    nic = verdict.nic
    if not verdict.usable or choice is None:
        return verdict.reason
    here = distance(gpu.place, nic.place)
    if here != choice.distance:
        return f"{here.name}: farther than the nearest, which is {choice.distance.name}"
    if nic.name not in choice.nics:
        return f"{here.name}: as near as others, but slower: {rate_text(nic)}"
    owners = sorted(owner for owner, name in pairs if name == nic.name)
    if (_key(gpu), nic.name) not in pairs:
        return f"{here.name}: as near as others, dealt to GPU {', '.join(owners)}"
    own = f"{here.name}: nearest, {rate_text(nic)}"
    others = [owner for owner in owners if owner != _key(gpu)]
    if others:
        return f"{own}; shared with GPU {', '.join(others)}"
    mine = Counter(owner for owner, _ in pairs)[_key(gpu)]
    if mine < len(choice.nics):
        return f"{own}; {mine} of {len(choice.nics)} that are equally near are dealt to this GPU"
    return own
