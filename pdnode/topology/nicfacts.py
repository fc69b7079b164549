"""What an operator wants to know of a NIC's port beside its place: MTU and GID."""

from pdnode.topology.detect import INFINIBAND, NET
from pdnode.topology.sysfs import Sysfs

_MAX_GIDS = 256
ROCE_V2 = "RoCE v2"


def interfaces_of(sysfs: Sysfs, name: str) -> list[str]:
    """Network interfaces behind an RDMA device, or the interface itself."""
    return sysfs.names(*INFINIBAND, name, "device", "net") or [name]


def mtu_of(sysfs: Sysfs, name: str) -> int:
    """The smallest MTU of the interfaces behind a NIC; 0 where none is known."""
    found = [sysfs.integer(*NET, each, "mtu") for each in interfaces_of(sysfs, name)]
    return min((mtu for mtu in found if mtu), default=0)


def first_gid(sysfs: Sysfs, name: str) -> str:
    """The first GID of an RDMA device that is not zero, a RoCE v2 one before others; "" without."""
    found: list[tuple[bool, int, str]] = []
    for port in sysfs.names(*INFINIBAND, name, "ports"):
        base = (*INFINIBAND, name, "ports", port)
        for index in sysfs.names(*base, "gids")[:_MAX_GIDS]:
            gid = sysfs.text(*base, "gids", index) or ""
            if gid.replace(":", "").strip("0"):
                kind = sysfs.text(*base, "gid_attrs", "types", index)
                found.append((kind != ROCE_V2, len(found), gid))
    return min(found, default=(False, 0, ""))[2]
