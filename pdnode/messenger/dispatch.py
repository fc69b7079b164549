"""Checks on a `dispatch` before anything is queued: what a peer says is not trusted."""

from dataclasses import dataclass
from itertools import pairwise

from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.messenger.session import PeerSession
from pdnode.types import Verify

MAX_REPLAYS = wire.MAX_NICS
"""Of one request: a decode node asks for one when it has fenced a connection. Each costs memory."""


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of this prefill node."""

    vocabulary: int
    context_tokens: int
    max_waiting: int
    verify: bool = False  # whether this node can send digests


def check_dispatch(
    frame: wire.Dispatch, session: PeerSession, geometry: KvGeometry, limits: DispatchLimits
) -> str | None:
    """What is wrong with `frame`, naming field and allowed values; None if nothing is."""
    if not frame.key.startswith(f"{session.boot}:"):
        return f"key: must begin with the boot id {session.boot}"
    tokens = len(frame.tokens)
    fits = min(limits.context_tokens, geometry.pages * geometry.page_tokens)
    if not 1 <= tokens <= fits:
        return f"tokens: {tokens}, this node takes 1 to {fits}"
    if min(frame.tokens) < 0 or max(frame.tokens) >= limits.vocabulary:
        return f"tokens: ids must be 0 to {limits.vocabulary - 1}"
    if frame.first_page != 0:
        return f"first_page: {frame.first_page}, only 0 is supported"
    if frame.context_slot != -1:
        return f"context_slot: {frame.context_slot}, only -1 is supported"
    if frame.group >= session.groups:
        return f"group: {frame.group}, this peer has 0 to {session.groups - 1}"
    allowed = tuple(Verify) if limits.verify else (Verify.OFF,)
    if frame.verify not in allowed:
        return f"verify: {frame.verify!r}; allowed: {', '.join(allowed)}"
    problem = check_immediate(frame.immediate)
    return problem or _check_pages(frame, session.geometry.pages, geometry.pages_for(tokens))


def check_regrant(frame: wire.Regrant, *, replays: int) -> str | None:
    """What is wrong with asking for one replay more than the `replays` that were made."""
    if replays >= MAX_REPLAYS:
        return f"regrant: {replays} replays, at most so many are made"
    return check_immediate(frame.immediate)


def check_immediate(immediate: int) -> str | None:
    """What is wrong with an immediate of a dispatch or regrant: `slot << 20 | generation << 12`."""
    if not 1 <= immediate >> 20 <= 4095 or immediate & 0xFFF:
        return "immediate: slot must be 1 to 4095 and weight 0"
    return None


def _check_pages(frame: wire.Dispatch, pages: int, needed: int) -> str | None:
    given = 0
    for run in frame.pages:
        if run.start < 0 or run.count < 1 or run.start + run.count > pages:
            return f"pages: run {run.start}+{run.count} is outside 0 to {pages - 1}"
        given += run.count
    if given != needed:
        return f"pages: {given} given, {needed} needed"
    ordered = sorted((run.start, run.count) for run in frame.pages)
    for (start, count), (after, _) in pairwise(ordered):
        if start + count > after:
            return f"pages: page {after} is named twice"
    return None
