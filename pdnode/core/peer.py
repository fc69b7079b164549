"""The other end of a link, as far as the steps have made it known; its claims are checked."""

from pdnode.core import wire
from pdnode.core.auth import Party, Step, objection, sign
from pdnode.core.hello import Agreement, agree
from pdnode.types import Role


class Broken(Exception):
    """The peer did what it may not. Unwinds a handler of the link, never leaves the link."""


class Peer:
    """Who the peer says it is (`party`), whether that is proved, its hello, what was agreed."""

    def __init__(self, hello: wire.Hello, token: bytes | None, *, nonce: bytes) -> None:
        self.me = Party(hello.node, hello.role, nonce)
        self.party: Party | None = None
        self.authenticated = False
        self._here = hello
        self._token = token
        self._there: wire.Hello | None = None
        self._agreement: Agreement | None = None

    def take_auth(self, frame: wire.Auth | wire.AuthReply) -> None:
        self.party = Party(frame.node, frame.role, frame.nonce)

    def sign(self, step: Step) -> bytes:
        dialer, acceptor = self._parties()
        return sign(self._token, step, dialer=dialer, acceptor=acceptor)

    def authenticate(self, step: Step, mac: bytes) -> str | None:
        """What is wrong with its proof, or None: then its node id and role are its own."""
        dialer, acceptor = self._parties()
        wrong = objection(self._token, mac, step, dialer=dialer, acceptor=acceptor)
        self.authenticated = wrong is None
        return wrong

    def take_hello(self, frame: wire.Hello) -> list[str]:
        """Reasons against this peer; if there are none, `agreed` tells the rest."""
        assert self.party is not None
        if (frame.node, frame.role) != (self.party.node, self.party.role):
            raise Broken(
                f"hello of {frame.role} {frame.node}, authenticated was "
                f"{self.party.role} {self.party.node}"
            )
        self._there = frame
        result = agree(self._here, frame)
        if isinstance(result, list):
            return result
        self._agreement = result
        return []

    def agreed(self) -> tuple[wire.Hello, Agreement]:
        """The peer's hello and what follows from it; only after a hello that fits."""
        assert self._there is not None
        assert self._agreement is not None
        return self._there, self._agreement

    def check_boot(self, boot: str) -> None:
        """Every message of a session step carries the boot id of the hello, or is a ghost's."""
        assert self._there is not None
        if boot != self._there.boot:
            raise Broken(f"boot id {boot}, the hello said {self._there.boot}")

    def check_key(self, key: str) -> None:
        """Keys are `<decode boot id>:<number>`: no other incarnation's request is answered here."""
        assert self._there is not None
        decode = self._here if self._here.role == Role.DECODE else self._there
        if key.rpartition(":")[0] != decode.boot:
            raise Broken(f"request {key} is not one of boot id {decode.boot}")

    def _parties(self) -> tuple[Party, Party]:
        """(dialer, acceptor): the decode node dials."""
        assert self.party is not None
        here, there = self.me, self.party
        return (here, there) if self._here.role == Role.DECODE else (there, here)
