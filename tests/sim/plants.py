"""Planted faults: one rule of the design left out at a time, at the seam that keeps it.

Each must be found by the promises of the cluster within a few hundred seeds, or the simulator would
not see the same mistake in the real code either.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from pdnode.core import push, transfer
from pdnode.core.grant import Grant, GrantState
from pdnode.core.push import Push, PushState
from pdnode.messenger.peer_link import PeerLink
from pdnode.messenger.peers import PeerManager
from pdnode.messenger.pull import Pull, PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from tests.sim import process
from tests.sim.device_plants import DEVICE_PLANTS, Change, Plant
from tests.sim.fabric import Core
from tests.sim.parts import Part, Session, Transfer
from tests.sim.wires import WHOLE, Event
from tests.sim.worker import Worker

Effects = list[transfer.Effect]


def free_on_timeout() -> list[Change]:
    """`drained` is overdue: free the pages instead of dropping the link."""
    real = Grant.tick

    def tick(self: Grant, now: float) -> Effects:
        effects = real(self, now)
        if any(isinstance(effect, transfer.DropLink) for effect in effects):
            self.drained = True
            return [] if self.reading else self._free()
        return effects

    return [(Grant, "tick", tick)]


def completion_before_delivery() -> list[Change]:
    """A write counts as done when it is posted: without delivery completion."""
    real = Core._post_one

    def post(self: Core, found: Transfer, due: Any) -> bool:  # noqa: ANN401
        posted = real(self, found, due)
        for connection in found.session.connections.values():
            for write in list(connection.writes):
                if write.transfer is found:
                    self.later(0.0, lambda write=write: self.back(write))
        return posted

    return [(Core, "_post_one", post)]


def drained_after_error() -> list[Change]:
    """A write that came back with an error counts as over."""
    return [(push._Attempt, "unfenced", property(lambda self: set()))]


def close_taken_for_fence() -> list[Change]:
    """The sender closes its own end and takes the pair for fenced."""
    real = PushMessenger._pair_down

    def pair_down(
        self: PushMessenger,
        session: PeerSession,
        pair: transfer.Pair,
        text: str,
    ) -> None:
        real(self, session, pair, text)
        for work in self._of(session):
            if work.push.attempt is not None:
                work.push.attempt.fenced.add(pair)

    return [(PushMessenger, "_pair_down", pair_down)]


def drained_of_one_connection() -> list[Change]:
    """The first connection is idle: `drained`, whatever the others still do."""

    def quiet(self: Core, found: Transfer) -> bool:
        connections = list(found.session.connections.values())[:1]
        return not any(
            write.transfer is found and not write.back
            for connection in connections
            for write in connection.writes
        )

    return [(Core, "quiet", quiet)]


def count_by_equality() -> list[Change]:
    """A counter that steps over the expected number never gets there."""

    def count(self: Core, immediate: int, weight: int) -> None:
        counter = self.slots.get(immediate >> 20)
        if counter is None or counter.generation != immediate >> 12 & 0xFF:
            return
        counter.count += weight + (weight > 1 and counter.count + weight == counter.expected)
        if counter.count == counter.expected:
            counter.told = True
            self.say(Event("reached", slot=immediate >> 20, generation=counter.generation))

    return [(Core, "count", count)]


def generation_ignored() -> list[Change]:
    """Late immediates count for whoever has the slot now."""
    real = Core.count

    def count(self: Core, immediate: int, weight: int) -> None:
        counter = self.slots.get(immediate >> 20)
        now = 0 if counter is None else counter.generation
        real(self, immediate & ~0xFF000 | now << 12, weight)

    return [(Core, "count", count)]


def boot_id_ignored() -> list[Change]:
    """Every incarnation of every node has the same one, so keys and sessions can meet."""
    real = process.Process._make_peers

    def make(self: process.Process) -> PeerManager:
        self.boot = process.BootId("0")
        return real(self)

    return [(process.Process, "_make_peers", make)]


def fence_skipped() -> list[Change]:
    """The whole-session fence is confirmed without closing anything."""
    real = Core._close

    def close(self: Core, found: Session, part: Part, pair: transfer.Pair, group: int) -> None:
        if pair != WHOLE or not self.writable:
            real(self, found, part, pair, group)

    return [(Core, "_close", close)]


def pair_fence_skipped() -> list[Change]:
    """`nic_fenced` is said without a fence."""
    real = Core._close

    def close(self: Core, found: Session, part: Part, pair: transfer.Pair, group: int) -> None:
        if pair == WHOLE or not self.writable:
            real(self, found, part, pair, group)

    return [(Core, "_close", close)]


def retry_into_same_pages() -> list[Change]:
    """A failed attempt gives its pages to the next one at once."""
    real = Grant._wait

    def wait(self: Grant, state: GrantState, now: float) -> Effects:
        if state is GrantState.FAILED:
            self.drained = True
        return real(self, state, now)

    return [(Grant, "_wait", wait)]


def free_on_cancel() -> list[Change]:
    """A cancelled request gives its pages back before the peer has said `drained`."""
    real = Grant._wait

    def wait(self: Grant, state: GrantState, now: float) -> Effects:
        if state is GrantState.CANCELLING:
            self.drained = True
        return real(self, state, now)

    return [(Grant, "_wait", wait)]


def completion_taken_for_drained() -> list[Change]:
    """The count is there, so nothing can land any more."""
    real = Grant._complete

    def complete(self: Grant, now: float) -> Effects:
        self.drained = True
        return real(self, now)

    return [(Grant, "_complete", complete)]


def replay_before_quiet() -> list[Change]:
    """A replay begins while writes of the old transfer may land."""

    def settle(self: Push, now: float) -> Effects:
        if self.state is PushState.REPLAY and not self.regrant_due:
            return self._replay()
        return real(self, now)

    real = Push._settle
    return [(Push, "_settle", settle), (push._Attempt, "quiet", property(lambda self: True))]


def slot_returned_early() -> list[Change]:
    """The immediate of a failed attempt goes back before its writes are over."""
    real = PullMessenger._lost

    def lost(self: PullMessenger, pull: Pull, effect: transfer.Lost) -> None:
        real(self, pull, effect)
        self._slots.give_back(pull.grant.slot)

    return [(PullMessenger, "_lost", lost)]


def old_count_lets_in() -> list[Change]:
    """All writes under an old immediate are here: read, although a replay writes them again."""
    real = Grant.reached

    def reached(self: Grant, slot: Any, now: float) -> Effects:  # noqa: ANN401
        if self.state is GrantState.DISPATCHED and slot in self.old_slots:
            return self._complete(now)
        return real(self, slot, now)

    return [(Grant, "reached", reached)]


def link_loss_frees() -> list[Change]:
    """The link is lost: pages are free before the fence."""
    real = Grant.session_lost

    def session_lost(self: Grant, text: str, now: float, *, silent: bool = False) -> Effects:
        if self.state is GrantState.DISPATCHED:
            self.drained = True
        return real(self, text, now, silent=silent)

    return [(Grant, "session_lost", session_lost)]


def freed_under_a_reader() -> list[Change]:
    """`drained` frees the pages although the sequence reads them."""
    real = Grant.drain_done

    def drain_done(self: Grant, now: float) -> Effects:
        self.reading = False
        return real(self, now)

    return [(Grant, "drain_done", drain_done)]


def source_freed_under_writes() -> list[Change]:
    """A lost link frees the source pages at once."""
    return [(push._Attempt, "local_quiet", property(lambda self: True))]


def source_freed_under_a_pass() -> list[Change]:
    """The pass that computes into the source pages is forgotten."""
    real = Push._settle

    def settle(self: Push, now: float) -> Effects:
        self.in_pass = False
        return real(self, now)

    return [(Push, "_settle", settle)]


def regrant_under_old_immediate() -> list[Change]:
    """A replay counts on the immediate that the old writes may still carry."""
    real = Push.regrant

    def regrant(self: Push, immediate: int, now: float) -> Effects:
        before = self.immediate
        effects = real(self, immediate, now)
        self.immediate = before
        return effects

    return [(Push, "regrant", regrant)]


def read_before_the_count() -> list[Change]:
    """`progress` up to the last token is taken for all pages being here."""
    real = Grant.progress

    def progress(self: Grant, computed_tokens: int, now: float) -> Effects:
        effects = real(self, computed_tokens, now)
        if self.state is GrantState.DISPATCHED and not effects:
            return self._complete(now)
        return effects

    return [(Grant, "progress", progress)]


def loss_told_before_the_fence() -> list[Change]:
    """The fence of a lost link is never asked for."""
    return [(PeerLink, "_fence", lambda self: None)]


def group_ignored() -> list[Change]:
    """The pages of a dispatch are taken for those of the first group."""
    real = PushMessenger._submit

    def submit(self: PushMessenger, work: Any, effect: transfer.Submit) -> None:  # noqa: ANN401
        work.dispatch = msgspec.structs.replace(work.dispatch, group=0)
        real(self, work, effect)

    return [(PushMessenger, "_submit", submit)]


def raised_before_the_sum() -> list[Change]:
    """The leader raises its counter before the all-reduce: other ranks' pages may be unwritten."""
    return [(Worker, "raises_early", True)]


PLANTS: dict[str, Plant] = {
    "free on timeout": free_on_timeout,
    "drained before delivery completion": completion_before_delivery,
    "drained after an error completion": drained_after_error,
    "sender's close taken for a fence": close_taken_for_fence,
    "drained while one connection still writes": drained_of_one_connection,
    "counter compared by equality": count_by_equality,
    "generation ignored": generation_ignored,
    "boot id ignored": boot_id_ignored,
    "fence skipped": fence_skipped,
    "fence of one NIC pair skipped": pair_fence_skipped,
    "retry into the same pages": retry_into_same_pages,
    "pages free on cancel": free_on_cancel,
    "completion taken for drained": completion_taken_for_drained,
    "replay begun before the old writes are quiet": replay_before_quiet,
    "slot returned early": slot_returned_early,
    "count of an old immediate lets in": old_count_lets_in,
    "pages free on loss of the link": link_loss_frees,
    "pages freed under their reader": freed_under_a_reader,
    "source pages freed under writes": source_freed_under_writes,
    "source pages freed under a pass": source_freed_under_a_pass,
    "replay under the old immediate": regrant_under_old_immediate,
    "read before the count": read_before_the_count,
    "fence never asked for": loss_told_before_the_fence,
    "group of a dispatch ignored": group_ignored,
    "counter raised before the all-reduce": raised_before_the_sum,
    **DEVICE_PLANTS,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, value in PLANTS[name]():
            stack.enter_context(patch.object(owner, attribute, value))
        yield
