"""Cells of the table that no seed can reach, each with the reason; `*` stands for any.

A cell that is reached although it stands here, and one that is hardly ever reached although it does
not, are both faults of the simulator or of the machines.
"""

from collections import Counter

from tests.sim.table import EVENTS, MACHINES, Cell

FEWEST_HITS = 20

_SAME_TURN = "begin() reserves and dispatches in one turn of the loop"
_FORGOTTEN = "the messenger forgets it with the effect Free"
_READER = "only a sequence in the schedule ends"
_LAST_WORD = "the link keeps order, and the peer's `failed` comes after it"
_NO_FRAME = "no frame is delivered after the loss of the link"
_OUT = "out of the schedule"
_NO_PASS = "no pass runs it"
_NO_TRANSFER = "its first transfer opens when its first chunk is planned"
_FIRST_FAILS = "`settled` follows `failed`, which leaves this state"
_ONCE = "said once"
_LIAR = "only a peer that lies makes the core or a check refuse (tests/unit/test_push.py)"
_GONE = "a link that is lost is not lost again"
_UNWANTED = "the decode node regrants only what it still waits for"

UNREACHABLE: dict[Cell, str] = {
    ("grant", "reserved", "*"): _SAME_TURN,
    ("grant", "free", "*"): _FORGOTTEN,
    ("grant", "dispatched", "dispatched"): _ONCE,
    ("grant", "complete", "dispatched"): _ONCE,
    ("grant", "failed", "dispatched"): _ONCE,
    ("grant", "cancelling", "dispatched"): _ONCE,
    ("grant", "*", "landed"): "only what is waited for is looked at",
    ("grant", "dispatched", "end"): _READER,
    ("grant", "failed", "end"): _READER,
    ("grant", "cancelling", "end"): _READER,
    ("grant", "dispatched", "session_fenced"): "`session_lost` comes first",
    ("grant", "failed", "accepted"): _LAST_WORD,
    ("grant", "failed", "progress"): _LAST_WORD,
    ("grant", "complete", "reached"): "the core says it once for each slot",
    ("push", "done", "*"): _FORGOTTEN,
    ("push", "*", "refused"): _LIAR,
    ("push", "*", "not_opened"): _LIAR,
    ("push", "computed", "planned"): "no chunk is left",
    ("push", "cancelling", "planned"): _OUT,
    ("push", "failed", "planned"): _OUT,
    ("push", "lost", "planned"): _OUT,
    ("push", "queued", "pass_done"): _NO_PASS,
    ("push", "computed", "pass_done"): _NO_PASS,
    ("push", "queued", "transfer_drained"): _NO_TRANSFER,
    ("push", "queued", "transfer_failed"): _NO_TRANSFER,
    ("push", "queued", "transfer_settled"): _NO_TRANSFER,
    ("push", "running", "transfer_settled"): _FIRST_FAILS,
    ("push", "computed", "transfer_settled"): _FIRST_FAILS,
    ("push", "lost", "cancel"): _NO_FRAME,
    ("push", "lost", "regrant"): _NO_FRAME,
    ("push", "lost", "nic_fenced"): _NO_FRAME,
    ("push", "lost", "session_lost"): _GONE,
    ("push", "cancelling", "regrant"): _UNWANTED,
}

_REACHABLE = {
    ("grant", "reserved", "dispatched"),
    ("grant", "dispatched", "landed"),
    ("grant", "free", "cancel"),  # a client leaves in the very turn in which its attempt is over
    ("push", "done", "tick"),  # the tick of another request has dropped the link
}


def reason(cell: Cell) -> str | None:
    """Why this cell cannot be reached; None: it can."""
    machine, state, event = cell
    if cell in _REACHABLE:
        return None
    for known in (cell, (machine, state, "*"), (machine, "*", event)):
        if known in UNREACHABLE:
            return UNREACHABLE[known]
    return None


def contradictions(found: Counter[Cell]) -> list[str]:
    """Cells that were reached although they cannot be."""
    return [
        f"{' × '.join(cell)}: {hits} hits, but: {why}"
        for cell, hits in sorted(found.items())
        if (why := reason(cell)) is not None
    ]


def thin(found: Counter[Cell]) -> list[str]:
    """Reachable cells with fewer than `FEWEST_HITS` hits."""
    cells = [
        (machine, state.value, event)
        for machine, (_, states) in MACHINES.items()
        for state in states
        for event in EVENTS[machine]
    ]
    return [
        f"{' × '.join(cell)}: {found[cell]} hits"
        for cell in cells
        if reason(cell) is None and found[cell] < FEWEST_HITS
    ]
