"""The second step of a peer link: may these two nodes exchange pages? Every refusal has a name.

Reasons read "field: value here, value there", where here is the node that writes the text.
"""

from dataclasses import dataclass

from pdnode.core.geometry import DTYPE_BYTES, KvGeometry
from pdnode.core.plan import differences
from pdnode.core.wire import MAX_RANKS, Geometry, Hello
from pdnode.types import Role

KINDS = ("gqa", "mla")
_MOST = 1 << 32  # of any one dimension: products stay far below what msgpack and Python carry
_FINGERPRINT_SHOWN = 16  # hex digits: two models never share them by chance


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both sides derive from the two hellos."""

    protocol: int
    geometry: KvGeometry  # of each of the peer's TP groups
    groups: int  # TP groups that the peer has
    own: KvGeometry  # of each of this node's
    own_groups: int
    context_tokens: int  # longest sequence that both take


def agree(here: Hello, there: Hello) -> Agreement | list[str]:
    """The agreement, or every reason against it."""
    reasons = _identity(here, there)
    protocol = common_protocol(here, there)
    if protocol is None:
        reasons.append(
            f"protocol: {here.protocol_min} to {here.protocol_max} here, "
            f"{there.protocol_min} to {there.protocol_max} there"
        )
    if here.fingerprint != there.fingerprint:
        reasons.append(
            f"fingerprint: {here.fingerprint[:_FINGERPRINT_SHOWN]} ({here.model}) here, "
            f"{there.fingerprint[:_FINGERPRINT_SHOWN]} ({there.model}) there"
        )
    geometry = read_geometry(there.geometry, here.geometry)
    ours = read_geometry(here.geometry, here.geometry)
    assert isinstance(ours, KvGeometry), ours
    reasons += geometry if isinstance(geometry, list) else differences(ours, geometry)
    for field in ("provider", "byte_order"):
        values = getattr(here, field), getattr(there, field)
        if values[0] != values[1]:
            reasons.append(f"{field}: {values[0]} here, {values[1]} there")
    if reasons or protocol is None or isinstance(geometry, list):
        return reasons
    longest = min(here.context_tokens, there.context_tokens)
    groups, own_groups = there.geometry.dp, here.geometry.dp
    return Agreement(protocol, geometry, groups, ours, own_groups, longest)


def common_protocol(here: Hello, there: Hello) -> int | None:
    """The highest version that both speak."""
    highest = min(here.protocol_max, there.protocol_max)
    lowest = max(here.protocol_min, there.protocol_min)
    return highest if highest >= lowest else None


def read_geometry(there: Geometry, here: Geometry) -> KvGeometry | list[str]:
    """The checked geometry, or what makes it impossible; `here` is only for the text."""
    wrong = []
    ranks = min(max(1, there.tp), MAX_RANKS)
    rules = [
        ("kind", there.kind in KINDS, f"one of {', '.join(KINDS)}"),
        ("layers", 0 < there.layers < _MOST, "at least 1"),
        ("kv_heads", 0 < there.kv_heads < _MOST, "at least 1"),
        ("head_dim", 0 < there.head_dim < _MOST, "at least 1"),
        ("page_tokens", 0 < there.page_tokens < _MOST, "at least 1"),
        ("dtype", there.dtype in DTYPE_BYTES, f"one of {', '.join(DTYPE_BYTES)}"),
        ("tp", 0 < there.tp <= MAX_RANKS, f"1 to {MAX_RANKS}"),
        ("pages", 0 <= there.pages < _MOST, f"0 to {_MOST - 1}"),
        ("dp", 0 < there.dp * ranks <= MAX_RANKS, f"at least 1, with at most {MAX_RANKS} ranks"),
    ]
    for field, good, allowed in rules:
        if not good:
            values = getattr(here, field), getattr(there, field)
            wrong.append(f"{field}: {values[0]} here, {values[1]} there, must be {allowed}")
    if wrong:
        return wrong
    if there.kind == "mla" and there.kv_heads != 1:
        return [f"kv_heads: {here.kv_heads} here, {there.kv_heads} there, must be 1 for mla"]
    heads = there.kv_heads
    if there.kind == "gqa" and heads % ranks and ranks % heads:
        return [f"tp: {here.tp} here, {ranks} there: {ranks} ranks cannot slice {heads} KV heads"]
    return KvGeometry(
        kind=there.kind,
        layers=there.layers,
        kv_heads=heads,
        head_dim=there.head_dim,
        page_tokens=there.page_tokens,
        dtype=there.dtype,
        tp=ranks,
        pages=there.pages,
    )


def wire_geometry(geometry: KvGeometry, groups: int = 1) -> Geometry:
    """`geometry` is that of each of the node's `groups` TP groups."""
    return Geometry(
        kind=geometry.kind,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        page_tokens=geometry.page_tokens,
        dtype=geometry.dtype,
        tp=geometry.tp,
        pages=geometry.pages,
        dp=groups,
    )


def _identity(here: Hello, there: Hello) -> list[str]:
    reasons = []
    if {here.role, there.role} != {Role.PREFILL, Role.DECODE}:
        reasons.append(
            f"role: {here.role} here, {there.role} there; a link joins a decode and a prefill node"
        )
    if here.node == there.node:
        reasons.append(f"node: {here.node} here, {there.node} there; [node] id must be unique")
    return reasons
