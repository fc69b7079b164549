"""The host as a tree: NUMA nodes, their GPUs, and the rail of each with the reason for it."""

from pdnode.obs.snapshot import Gpu, Rail, Snapshot, Topology
from pdnode_tui import units
from pdnode_tui.lines import Line, clean, fit
from pdnode_tui.render.common import marked, title
from pdnode_tui.table import Panel, frame
from pdnode_tui.view import View

UNKNOWN = "topology is not known here"


def _rails(rails: tuple[Rail, ...], *, why: bool) -> str:
    parts = []
    for rail in rails:
        text = f"─{clean(rail.distance or '?', 6)}─ {clean(rail.nic, 24)}"
        parts.append(f"{text}  ({clean(rail.why, 80)})" if why and rail.why else text)
    return " ".join(parts) if parts else "no rail"


def _gpu(gpu: Gpu, last: bool, names: frozenset[str], *, why: bool) -> Line:
    used = {rail.nic for rail in gpu.rails} & names
    far = any(rail.distance == "SYS" for rail in gpu.rails)
    text = (
        f" {'└' if last else '├'}GPU{gpu.index} {units.percent(gpu.busy_ratio)}"
        f" mem {units.percent(gpu.memory_ratio)} {_rails(gpu.rails, why=why)}"
    )
    return ((text, ""), (" !", "bad")) if used or far else ((text, ""),)


def tree(snapshot: Snapshot, *, why: bool) -> list[Line]:
    """The lines of the tree, of any width; `why` adds the reasons."""
    topology = snapshot.topology
    if topology is None or not (topology.numa or topology.gpus or topology.rails):
        return [((f" {UNKNOWN}", "dim"),)]
    names = marked(snapshot)
    lines: list[Line] = []
    known = {numa.index for numa in topology.numa}
    for numa in topology.numa:
        cpus = f" cpu {clean(numa.cpus, 40)}" if numa.cpus else ""
        head = f" NUMA{numa.index}{cpus} mem {units.percent(numa.memory_ratio)}"
        lines.append(((head, "bold"),))
        gpus = [gpu for gpu in topology.gpus if gpu.numa == numa.index]
        lines += [_gpu(g, g is gpus[-1], names, why=why) for g in gpus]
        if why or not topology.gpus:
            lines += _loose_nics(topology, numa.nics, names)
    elsewhere = [gpu for gpu in topology.gpus if gpu.numa not in known]
    if elsewhere:
        lines.append(((" NUMA node not known", "bold"),))
        lines += [_gpu(g, g is elsewhere[-1], names, why=why) for g in elsewhere]
    if topology.rails:
        lines.append(((f" host memory {_rails(topology.rails, why=why)}", ""),))
    return lines


def _loose_nics(topology: Topology, nics: tuple[str, ...], names: frozenset[str]) -> list[Line]:
    """NICs of a NUMA node that no GPU of the host uses."""
    used = {rail.nic for gpu in topology.gpus for rail in gpu.rails}
    return [
        ((f"  {clean(nic, 24)}: no GPU uses it", ""), (" !" if nic in names else "", "bad"))
        for nic in nics
        if nic not in used and topology.gpus
    ] or [((f"  {clean(nic, 24)}", ""),) for nic in nics if not topology.gpus]


def _filled(lines: list[Line], width: int, height: int) -> list[Line]:
    if len(lines) > height > 0:
        hidden = len(lines) - height + 1
        lines = [*lines[: height - 1], ((f" … {hidden} more", "dim"),)]
    lines = [fit(line, width) for line in lines[: max(0, height)]]
    return lines + [fit((), width)] * (height - len(lines))


def topology_panel(snapshot: Snapshot, view: View, width: int, height: int) -> Panel:
    lines = _filled(tree(snapshot, why=False), width, height)
    return Panel(title(view, "TOPOLOGY"), width, lines)


def topology_screen(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    lines = _filled(tree(snapshot, why=True), width - 2, height - 2)
    return frame([[Panel(title(view, "TOPOLOGY", "distance and why"), width - 2, lines)]])


def topology_line(snapshot: Snapshot, width: int) -> Line:
    """In one line, for small terminals."""
    topology = snapshot.topology
    if topology is None or not (topology.numa or topology.gpus):
        return fit(((f" {UNKNOWN}", "dim"),), width)
    far = sum(any(rail.distance == "SYS" for rail in gpu.rails) for gpu in topology.gpus)
    text = f" {len(topology.numa)} NUMA nodes, {len(topology.gpus)} GPUs, {far} on a far rail"
    return fit(((text, "warn" if far else ""),), width)
