"""The hello step: every difference is named with both values, on both sides."""

import msgspec
import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.hello import Agreement, agree, common_protocol, wire_geometry
from pdnode.core.link_state import State
from pdnode.types import Role
from tests.support.link_duo import Duo
from tests.support.link_nodes import GEOMETRY, hello

HERE = hello(Role.DECODE)


def geometry(**changes: object) -> wire.Geometry:
    return msgspec.structs.replace(wire_geometry(GEOMETRY), **changes)


MISMATCHES = [
    ({"geometry": geometry(page_tokens=32)}, "page_tokens: 16 here, 32 there"),
    ({"geometry": geometry(layers=3)}, "layers: 2 here, 3 there"),
    ({"geometry": geometry(kv_heads=8)}, "kv_heads: 4 here, 8 there"),
    ({"geometry": geometry(head_dim=64)}, "head_dim: 8 here, 64 there"),
    ({"geometry": geometry(dtype="bfloat16")}, "dtype: float32 here, bfloat16 there"),
    (
        {"geometry": geometry(kind="mamba")},
        "kind: gqa here, mamba there, must be one of gqa, mla",
    ),
    (
        {"geometry": geometry(dtype="int3")},
        "dtype: float32 here, int3 there, must be one of float32, bfloat16, float16",
    ),
    ({"geometry": geometry(layers=0)}, "layers: 2 here, 0 there, must be at least 1"),
    ({"geometry": geometry(head_dim=-8)}, "head_dim: 8 here, -8 there, must be at least 1"),
    ({"geometry": geometry(tp=3)}, "tp: 1 here, 3 there: 3 ranks cannot slice 4 KV heads"),
    ({"geometry": geometry(tp=5000)}, "tp: 1 here, 5000 there, must be 1 to 1024"),
    (
        {"geometry": geometry(kind="mla")},
        "kv_heads: 4 here, 4 there, must be 1 for mla",
    ),
    (
        {"fingerprint": "0123456789abcdef" + "0" * 48, "model": "other"},
        "fingerprint: ffffffffffffffff (tiny) here, 0123456789abcdef (other) there",
    ),
    ({"provider": "verbs"}, "provider: tcp here, verbs there"),
    ({"byte_order": "big"}, "byte_order: little here, big there"),
    ({"protocol_min": 2, "protocol_max": 4}, "protocol: 1 to 1 here, 2 to 4 there"),
    ({"node": "decode-1"}, "node: decode-1 here, decode-1 there; [node] id must be unique"),
    (
        {"role": "decode"},
        "role: decode here, decode there; a link joins a decode and a prefill node",
    ),
    (
        {"role": "colocated"},
        "role: decode here, colocated there; a link joins a decode and a prefill node",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), MISMATCHES)
def test_each_difference_alone_is_the_reason(changes: dict[str, object], reason: str) -> None:
    assert agree(HERE, msgspec.structs.replace(hello(Role.PREFILL), **changes)) == [reason]


def test_all_differences_are_told_at_once() -> None:
    there = hello(
        Role.PREFILL, geometry=geometry(page_tokens=32, layers=4), provider="efa", fingerprint="0"
    )
    result = agree(HERE, there)
    assert isinstance(result, list)
    assert [reason.partition(":")[0] for reason in result] == [
        "fingerprint",
        "layers",
        "page_tokens",
        "provider",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"geometry": geometry(pages=99999)},
        {"geometry": geometry(tp=2)},
        {"geometry": geometry(tp=8)},  # more ranks than heads hold copies
        {"libfabric": "1.20"},
        {"pdnode_version": "9.9"},
        {"model": "served under another name"},
        {"context_tokens": 64},
    ],
)
def test_what_may_differ(changes: dict[str, object]) -> None:
    there = hello(Role.PREFILL, **changes)
    result = agree(HERE, there)
    assert isinstance(result, Agreement)
    assert result.context_tokens == min(128, there.context_tokens)
    assert wire_geometry(result.geometry) == there.geometry
    assert isinstance(result.geometry, KvGeometry)


@pytest.mark.parametrize(
    ("here", "there", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((1, 3), (1, 3), 3),
        ((2, 3), (1, 2), 2),
        ((1, 1), (2, 2), None),
        ((3, 4), (1, 2), None),
        ((1, 2), (2, 1), None),  # upside down: nothing is in it
    ],
)
def test_the_highest_common_protocol_wins(
    here: tuple[int, int], there: tuple[int, int], common: int | None
) -> None:
    hellos = [
        msgspec.structs.replace(HERE, protocol_min=low, protocol_max=high)
        for low, high in (here, there)
    ]
    assert common_protocol(*hellos) == common


@pytest.mark.parametrize(("changes", "reason"), MISMATCHES[:11])
def test_both_sides_of_a_link_name_both_values(changes: dict[str, object], reason: str) -> None:
    duo = Duo(hellos={Role.PREFILL: hello(Role.PREFILL)})
    decode, prefill = duo.ends[Role.DECODE], duo.ends[Role.PREFILL]
    # The odd one speaks for itself with a plain geometry; what it sends is changed on the way.
    odd = msgspec.structs.replace(hello(Role.DECODE), **changes)
    duo.to(Role.PREFILL, State.HELLO)
    prefill.log += prefill.link.receive(wire.encode(odd), duo.now)
    assert prefill.lost() == effects.SessionLost(reason, True)
    sent = prefill.sent()
    assert sent[-2:] == [hello(Role.PREFILL), wire.Refuse([reason])]
    decode.log += decode.link.receive(wire.encode(sent[-1]), duo.now)
    assert decode.lost().cause == f"refused by the peer: {reason}"


def test_a_decode_node_tells_the_difference_in_its_own_words() -> None:
    other = hello(Role.PREFILL, geometry=geometry(page_tokens=64))
    duo = Duo(hellos={Role.PREFILL: other})
    duo.advance()
    assert duo.ends[Role.DECODE].lost().cause == "page_tokens: 16 here, 64 there"
    assert duo.ends[Role.PREFILL].lost().cause == "page_tokens: 64 here, 16 there"
    assert {end.link.state for end in duo.ends.values()} == {State.CLOSED}


def test_a_reason_of_the_node_itself_is_told_to_the_peer() -> None:
    duo = Duo()
    prefill = duo.to(Role.PREFILL, State.ADMIT)
    duo.queue.clear()
    duo.carry_out(Role.PREFILL, prefill.link.refuse(["max_peers: 1 here"], duo.now))
    duo.advance()
    assert prefill.lost().cause == "max_peers: 1 here"
    cause = duo.ends[Role.DECODE].lost().cause
    assert cause == "refused by the peer: max_peers: 1 here"
