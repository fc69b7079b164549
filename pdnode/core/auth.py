"""The first step of a peer link: both ends prove that they hold the peer token.

HMAC-SHA256 over a label, the step, and node id, role and nonce of both ends, each with its length.
So a proof cannot be replayed (both nonces are fresh), reflected (the step is named) or turned round
(dialer and acceptor stand in fixed places). It does not protect what follows: a relay in the middle
sees the frames. That is left to mutual TLS (THREAT_MODEL.md).
"""

import hmac
from enum import StrEnum
from typing import NamedTuple

_LABEL = b"pdnode peer link 1"


class Step(StrEnum):
    REPLY = "reply"  # by the acceptor (prefill node)
    PROOF = "proof"  # by the dialer (decode node)


class Party(NamedTuple):
    node: str
    role: str
    nonce: bytes


def sign(token: bytes | None, step: Step, *, dialer: Party, acceptor: Party) -> bytes:
    """32 bytes, or none where no token is configured."""
    if token is None:
        return b""
    digest = hmac.new(token, digestmod="sha256")
    fields = [_LABEL, step.encode()]
    for party in (dialer, acceptor):
        fields += [party.node.encode(), party.role.encode(), party.nonce]
    for field in fields:
        digest.update(len(field).to_bytes(4, "little"))
        digest.update(field)
    return digest.digest()


def objection(
    token: bytes | None, given: bytes, step: Step, *, dialer: Party, acceptor: Party
) -> str | None:
    """What is wrong with the peer's mac, or None. Compares in constant time."""
    if hmac.compare_digest(sign(token, step, dialer=dialer, acceptor=acceptor), given):
        return None
    if token is None:
        return "token: none is configured here, the peer uses one"
    if not given:
        return "token: one is required here, the peer has none configured"
    return "token: the peer's differs from the one configured here"
