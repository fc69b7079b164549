"""Joins peer sessions to the messenger of this node's role, and logs and counts what happens."""

import logging

from pdnode.core.wire import Frame
from pdnode.messenger.fabrictest import TestReceiver, TestSender
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.log import event

_log = logging.getLogger(__name__)
Pair = tuple[int, int]


class Peering:
    """Implements messenger.session.SessionListener. `fences`: by cause, `returns`: NIC pairs
    that came back; since start."""

    def __init__(
        self,
        messenger: PushMessenger | PullMessenger,
        tester: TestSender | TestReceiver | None = None,
    ) -> None:
        self._messenger = messenger
        self._tester = tester
        self.fences = {"peer": 0, "nic": 0}
        self.returns = 0

    def session_up(self, session: PeerSession) -> None:
        event(
            _log, logging.INFO, "session.up", "peer session is up",
            peer=session.node, boot=session.boot, nics=len(session.pairs),
        )  # fmt: skip
        if isinstance(self._messenger, PushMessenger):
            self._messenger.session_up(session)

    def session_frame(self, session: PeerSession, frame: Frame) -> None:
        if self._tester is not None:
            self._tester.frame(session, frame)
        self._messenger.session_frame(session, frame)

    def session_lost(self, session: PeerSession, cause: str, *, silent: bool) -> None:
        event(_log, logging.WARNING, "session.lost", "peer lost", peer=session.node, cause=cause)
        if self._tester is not None:
            self._tester.session_lost(session)
        if isinstance(self._messenger, PullMessenger):
            self._messenger.session_lost(session, cause, silent=silent)
        else:
            self._messenger.session_lost(session)

    def session_fenced(self, session: PeerSession) -> None:
        self.fences["peer"] += 1
        event(_log, logging.INFO, "session.fenced", "peer fenced", peer=session.node)
        if isinstance(self._messenger, PullMessenger):  # only it has granted pages
            self._messenger.session_fenced(session)
        if self._tester is not None:
            self._tester.session_fenced(session)

    def pair_lost(self, session: PeerSession, pair: Pair, cause: str) -> None:
        event(
            _log, logging.WARNING, "nic.lost", "connection lost",
            peer=session.node, nic=pair[0], cause=cause,
        )  # fmt: skip
        self._messenger.pair_lost(session, pair, cause)

    def pair_up(self, session: PeerSession, pair: Pair) -> None:
        self.returns += 1
        event(
            _log, logging.INFO, "nic.returned", "connection is back", peer=session.node, nic=pair[0]
        )
        if isinstance(self._messenger, PushMessenger):
            self._messenger.pair_up(session, pair)

    def pair_fenced(self, session: PeerSession, pair: Pair) -> None:
        self.fences["nic"] += 1
        if isinstance(self._messenger, PullMessenger):
            self._messenger.pair_fenced(session, pair)
        if self._tester is not None:
            self._tester.pair_fenced(session, pair)
