"""The auth step: who gets through, and what cannot be replayed, reflected or turned round."""

import hashlib
import hmac
from dataclasses import replace

import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.auth import Party, Step, objection, sign
from pdnode.core.link_state import State
from pdnode.types import Role
from tests.support.link_duo import SETTINGS, Duo, End

TOKEN = b"the token of this deployment"
WITH = replace(SETTINGS, token=TOKEN)
DECODE = Party("d", "decode", b"1" * 32)
PREFILL = Party("p", "prefill", b"2" * 32)


def test_the_mac_is_hmac_sha256_over_length_prefixed_fields() -> None:
    fields = [b"pdnode peer link 1", b"proof", b"d", b"decode", b"1" * 32, b"p", b"prefill"]
    fields.append(b"2" * 32)
    text = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    expected = hmac.new(TOKEN, text, hashlib.sha256).digest()
    assert sign(TOKEN, Step.PROOF, dialer=DECODE, acceptor=PREFILL) == expected


@pytest.mark.parametrize(
    ("step", "dialer", "acceptor"),
    [
        (Step.REPLY, DECODE, PREFILL),
        (Step.PROOF, PREFILL, DECODE),
        (Step.PROOF, DECODE._replace(nonce=b"3" * 32), PREFILL),
        (Step.PROOF, DECODE, PREFILL._replace(nonce=b"3" * 32)),
        (Step.PROOF, DECODE._replace(role="prefill"), PREFILL),
        (Step.PROOF, DECODE, PREFILL._replace(role="decode")),
        (Step.PROOF, DECODE._replace(node="e"), PREFILL),
        (Step.PROOF, DECODE, PREFILL._replace(node="q")),
        # the same bytes, cut at another place
        (Step.PROOF, DECODE._replace(node="dd", role="ecode"), PREFILL),
    ],
)
def test_a_mac_counts_for_its_own_step_parties_and_nonces_only(
    step: Step, dialer: Party, acceptor: Party
) -> None:
    given = sign(TOKEN, Step.PROOF, dialer=DECODE, acceptor=PREFILL)
    assert objection(TOKEN, given, Step.PROOF, dialer=DECODE, acceptor=PREFILL) is None
    wrong = objection(TOKEN, given, step, dialer=dialer, acceptor=acceptor)
    assert wrong == "token: the peer's differs from the one configured here"


def run(decode: bytes | None, prefill: bytes | None) -> tuple[End, End]:
    duo = Duo(
        settings={
            Role.DECODE: replace(SETTINGS, token=decode),
            Role.PREFILL: replace(SETTINGS, token=prefill),
        }
    )
    duo.advance()
    return duo.ends[Role.DECODE], duo.ends[Role.PREFILL]


@pytest.mark.parametrize("token", [TOKEN, None])
def test_the_same_token_on_both_sides_or_none(token: bytes | None) -> None:
    here, there = run(token, token)
    assert {here.link.state, there.link.state} == {State.UP}
    assert (here.link.peer_node, here.link.peer_role) == ("prefill-1", "prefill")
    assert (there.link.peer_node, there.link.peer_role) == ("decode-1", "decode")
    macs = [frame.mac for frame in here.sent() if isinstance(frame, wire.AuthProof)]
    assert [len(mac) for mac in macs] == [32 if token else 0]


@pytest.mark.parametrize(
    ("decode", "prefill", "text"),
    [
        (TOKEN, b"other", "token: the peer's differs from the one configured here"),
        (TOKEN, None, "token: one is required here, the peer has none configured"),
        (None, TOKEN, "token: none is configured here, the peer uses one"),
    ],
)
def test_tokens_that_differ_are_told_to_both(
    decode: bytes | None, prefill: bytes | None, text: str
) -> None:
    here, there = run(decode, prefill)
    assert here.lost() == effects.SessionLost(text, True)
    assert there.lost() == effects.SessionLost(f"refused by the peer: {text}", True)
    assert here.link.peer_node is None  # nothing that it says of itself is believed
    assert not any(isinstance(frame, wire.Hello) for frame in here.sent() + there.sent())
    assert {here.link.state, there.link.state} == {State.CLOSED}


def reply_to_auth(duo: Duo, frame: wire.Auth) -> End:
    """The prefill end after this Auth."""
    end = duo.to(Role.PREFILL, State.AUTH)
    end.log += end.link.receive(wire.encode(frame), duo.now)
    assert end.link.state is State.PROOF
    return end


def test_a_replayed_proof_is_refused() -> None:
    first = Duo(settings=WITH)
    first.advance()
    auth, proof, *_ = first.ends[Role.DECODE].sent()
    assert isinstance(auth, wire.Auth)
    assert isinstance(proof, wire.AuthProof)
    second = Duo(settings=WITH)
    second.ends[Role.PREFILL].link._peer.me = Party("prefill-1", "prefill", b"fresh".ljust(32))
    end = reply_to_auth(second, auth)
    end.log += end.link.receive(wire.encode(proof), second.now)
    assert end.lost().refused
    assert "differs" in end.lost().cause


def test_a_reflected_proof_is_refused() -> None:
    """A stranger sends the prefill node's own answer back as its proof."""
    duo = Duo(settings=WITH)
    end = reply_to_auth(duo, wire.Auth("decode-1", "decode", b"x" * 32))
    (answer,) = end.sent()
    assert isinstance(answer, wire.AuthReply)
    end.log += end.link.receive(wire.encode(wire.AuthProof(answer.mac)), duo.now)
    assert end.lost().refused
    assert end.link.peer_node is None


@pytest.mark.parametrize(("node", "role"), [("other", "decode"), ("decode-1", "prefill")])
def test_the_hello_must_be_that_of_the_node_that_authenticated(node: str, role: str) -> None:
    duo = Duo()
    end = reply_to_auth(duo, wire.Auth(node, role, b"x" * 32))
    end.log += end.link.receive(wire.encode(wire.AuthProof(b"")), duo.now)
    duo.advance(lambda: len(duo.ends[Role.DECODE].log) > 0)
    greeting = duo.ends[Role.DECODE].link._hello
    end.log += end.link.receive(wire.encode(greeting), duo.now)
    expected = f"protocol: hello of decode decode-1, authenticated was {role} {node}"
    assert end.lost() == effects.SessionLost(expected, False)
