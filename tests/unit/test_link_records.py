"""What a node remembers of its peers: bounded, and strangers are not missed for ever."""

from types import SimpleNamespace
from typing import cast

from pdnode.core.link_effects import SessionLost
from pdnode.messenger.peer_link import PeerLink
from pdnode.messenger.peer_records import GONE_SHOWN_S, Records


def link_of(node: str | None) -> PeerLink:
    core = SimpleNamespace(
        peer_node=node,
        peer_role="decode",
        draining=False,
        stalled=False,
        rtt_s=0.5,
        heard_at=None,
        offered=(),
    )
    return cast(PeerLink, SimpleNamespace(core=core, over=False, address="10.0.0.1", peer=None))


def end(records: Records, link: PeerLink, cause: str, *, refused: bool = False) -> None:
    cast(SimpleNamespace, link).over = True
    records.lost(link, SessionLost(cause, refused))


def test_the_oldest_that_is_gone_makes_room() -> None:
    now = 0.0
    records = Records(2, lambda: now)
    links = {node: link_of(node) for node in ("a", "b", "c")}
    for number, node in enumerate(("a", "b")):
        now = float(number)
        records.taken(node, links[node])
        records.up(links[node])
    end(records, links["a"], "reset")
    end(records, links["b"], "reset")
    now = 5.0
    records.taken("c", links["c"])
    assert [status.name for status in records.status()] == ["b", "c"]


def test_a_refusal_does_not_touch_the_record_of_a_live_peer() -> None:
    records = Records(1, lambda: 0.0)
    live = link_of("a")
    records.taken("a", live)
    records.up(live)
    end(records, link_of("a"), "page_tokens: 16 here, 32 there", refused=True)
    end(records, link_of("b"), "page_tokens: 16 here, 32 there", refused=True)  # no room
    end(records, link_of(None), "token: …", refused=True)
    (status,) = records.status()
    assert (status.name, status.state, status.last_error) == ("a", "up", "")
    assert records.warnings() == []


def test_only_configured_peers_are_missed_for_ever() -> None:
    now = 0.0
    records = Records(4, lambda: now)
    table = records.add("p0")
    guest = link_of("guest")
    records.taken("guest", guest)
    records.up(guest)
    end(records, guest, "reset")
    records.failed(table, "Connection refused")
    both = [("W202", "p0: connecting: Connection refused"), ("W202", "guest: lost: reset")]
    assert records.warnings() == both
    now = GONE_SHOWN_S + 1
    assert records.warnings() == both[:1]
    assert [status.state for status in records.status()] == ["connecting", "lost"]


def test_words_of_a_configured_peer() -> None:
    records = Records(4, lambda: 0.0)
    record = records.add("p0")

    def state() -> str:
        return records.status()[0].state

    assert state() == "connecting"
    assert records.warnings() == []  # nothing is wrong yet
    record.link = link_of("prefill-1")
    records.up(record.link)
    assert state() == "up"
    end(records, record.link, "reset")
    assert state() == "lost"
    records.failed(record, "Connection refused")
    assert state() == "lost"
    record.link = link_of("prefill-1")
    end(records, record.link, "page_tokens", refused=True)
    assert state() == "refused"
    assert records.warnings() == [("W201", "p0: refused: page_tokens")]
    records.failed(record, "Connection refused")
    assert state() == "connecting"
    assert records.status()[0].node == "prefill-1"
