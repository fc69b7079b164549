"""One frame of every kind."""

from typing import get_args

from pdnode.core import wire
from pdnode.types import Role
from tests.support.link_duo import SESSION_TOKEN, addresses, memory, scratch
from tests.support.link_nodes import hello

KINDS: tuple[type[wire.Message], ...] = get_args(wire.Frame)


def frames_of(peer: Role) -> dict[type[wire.Message], wire.Frame]:
    """One frame of each kind, as a peer of this role would send it if it might."""
    greeting = hello(peer)
    boot = greeting.boot
    key = f"{hello(Role.DECODE).boot}:1"
    nonce = b"n" * wire.NONCE_BYTES
    session_token = SESSION_TOKEN
    samples: list[wire.Frame] = [
        wire.Auth(greeting.node, greeting.role, nonce),
        wire.AuthReply(greeting.node, greeting.role, nonce, b""),
        wire.AuthProof(b""),
        greeting,
        wire.Refuse(["page_tokens: 1 here, 2 there"]),
        wire.SessionOffer(boot, session_token, addresses(0)),
        wire.SessionAnswer(boot, addresses(0), [(0, 0)], [scratch(0), memory(0)]),
        wire.SessionReady(boot, [scratch(0)]),
        wire.Probed(boot),
        wire.Dispatch(key, "r", [1], [wire.PageRun(0, 1)], 0, 1 << 20, -1, 1.0, 0),
        wire.Accepted(key, 0),
        wire.Progress(key, 1, 0.0, 0.0),
        wire.Sent(key, 0, b"12345678"),
        wire.Failed(key, "stalled", "", []),
        wire.Cancel(key),
        wire.Drained(key, 0.0, 0.0),
        wire.NicDown((0, 0), "x"),
        wire.NicFenced((0, 0)),
        wire.NicUp(
            (0, 0),
            addresses(0)[0],
            session_token,
            [scratch(0), memory(0)] if peer is Role.DECODE else [scratch(0)],
        ),
        wire.Regrant(key, 1 << 20),
        wire.TestWrites(key, (0, 0), 1 << 20, [wire.PageRun(0, 1)], 1, 64, True),
        wire.TestWritten(key, [0.1], "", True, 1500),
        wire.Drain(),
        wire.Undrain(),
        wire.Heartbeat(boot, 1, 0, 0.0, 1, False, 1, 0, 0),
        wire.Bye("enough"),
    ]
    return {type(frame): frame for frame in samples}


SAMPLES = {
    Role.DECODE: frames_of(Role.PREFILL),
    Role.PREFILL: frames_of(Role.DECODE),
}
