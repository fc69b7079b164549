"""What several screens share: which way bytes flow, which rows a warning marks, find, tags."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pdnode.obs.snapshot import Nic, Snapshot
from pdnode_tui.lines import Line, clean
from pdnode_tui.view import View

Row = TypeVar("Row")


def sends(snapshot: Snapshot) -> bool:
    """Whether tx is the direction of interest: a prefill node pushes, a decode node receives."""
    return snapshot.node.role == "prefill"


def rate_of(nic: Nic, view: View, *, tx: bool) -> float | None:
    """Bytes/s now; not known while there is no connection."""
    if view.stale is not None:
        return None
    return nic.tx_bytes_per_s if tx else nic.rx_bytes_per_s


def peak_of(nic: Nic, view: View, *, tx: bool) -> float | None:
    """Highest bytes/s since start, or since the operator reset the peaks."""
    if view.peaks is None:
        return nic.tx_peak_bytes_per_s if tx else nic.rx_peak_bytes_per_s
    seen = view.peaks.get(nic.name)
    return None if seen is None else seen[tx]


def scale_of(nic: Nic, view: View, *, tx: bool) -> float | None:
    """What a meter's full length means: the link speed; the peak where the link has none."""
    return nic.line_bytes_per_s or peak_of(nic, view, tx=tx)


def marked(snapshot: Snapshot) -> frozenset[str]:
    """Names of what the warnings are about."""
    return frozenset(name for warning in snapshot.warnings for name in warning.subjects)


def found(
    rows: Iterable[Row], view: View, words: Callable[[Row], Sequence[str | None]]
) -> list[Row]:
    """The rows in which the operator's word occurs, whatever its case; all where there is none."""
    if not view.find:
        return list(rows)
    wanted = view.find.casefold()
    return [
        row for row in rows if any(wanted in clean(word).casefold() for word in words(row) if word)
    ]


def title(view: View, text: str, detail: str = "", *, sorts: bool = False) -> Line:
    """A panel's title: its name, what is looked for, the order, then figures."""
    spans = [(text, "title")]
    if sorts and view.find:
        spans.append((f"  find “{clean(view.find, 20)}”", "warn"))
    if sorts and view.sort:
        spans.append((f"  by {view.sort}", "dim"))
    if detail:
        spans.append((f"  {detail}", ""))
    return tuple(spans)
