"""The console without its terminal: what it knows, what a key does, what the picture is.

Pure but for the clock that it is given. The application feeds it snapshots, failures, events and
keys, carries out the commands that come back, and draws `picture`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pdnode.obs.snapshot import ActionAnswer, Event, Snapshot
from pdnode_tui import units
from pdnode_tui.lines import Line
from pdnode_tui.render import chosen_request, draw, open_request, row_keys
from pdnode_tui.render.footer import offered
from pdnode_tui.view import INTERVALS_S, SCREENS, SORTS, Prompt, Stale, View

MAX_EVENTS = 1000
MAX_TYPED = 80
PAGE = 10
ROLES = ("prefill", "decode", "colocated")
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0)

_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE}


@dataclass(frozen=True, slots=True)
class Act:
    """Tell the daemon; answer by `answered`."""

    action: str
    body: dict[str, str]


@dataclass(frozen=True, slots=True)
class Quit:
    pass


@dataclass(frozen=True, slots=True)
class Record:
    """Begin to record, or end it; answer by `recording`."""


@dataclass(frozen=True, slots=True)
class Poll:
    """The interval is another one now."""


Command = Act | Quit | Record | Poll


class Console:
    """One operator's view of one node. `clock` gives seconds, monotonic."""

    def __init__(self, view: View, clock: Callable[[], float]) -> None:
        self.view = view
        self.snapshot: Snapshot | None = None
        self._clock = clock
        self._shown: Snapshot | None = None  # frozen while paused
        self._chosen: dict[str, str | None] = {}
        self._sorts: dict[str, str] = {}
        self._received_at = clock()
        self._retry_at = 0.0
        self._began_at = clock()

    # what comes in

    def received(self, snapshot: Snapshot) -> None:
        before = self.snapshot
        self.snapshot = snapshot
        self._received_at = self._clock()
        if self.view.stale is not None:
            self._change(stale=None)
        if before is not None and before.node.boot != snapshot.node.boot:
            text = f"{snapshot.node.id} was restarted: new boot {snapshot.node.boot[:8]}"
            self._change(peaks=None, events=(), result=text, result_bad=True)
        if self.view.peaks is not None:
            self._change(peaks=self._peaks(snapshot))
        self.events(snapshot.events)

    def events(self, events: tuple[Event, ...]) -> None:
        """Events of the present boot; those known already are dropped."""
        last = self.cursor
        new = tuple(event for event in events if event.cursor > last)
        if new:
            self._change(events=(*self.view.events, *new)[-MAX_EVENTS:])

    @property
    def cursor(self) -> int:
        """Of the youngest event known."""
        return self.view.events[-1].cursor if self.view.events else 0

    def failed(self, cause: str) -> float:
        """No answer; how many seconds to wait before the next try."""
        tries = self.view.stale.tries + 1 if self.view.stale else 1
        wait_s = BACKOFF_S[min(tries, len(BACKOFF_S)) - 1]
        self._retry_at = self._clock() + wait_s
        self._change(stale=Stale(0.0, wait_s, tries, cause))
        if self.view.prompt is not None and self.view.prompt.kind != "find":
            self._change(prompt=None)
            self._say("not done: no connection", bad=True)
        return wait_s

    def answered(self, answer: ActionAnswer) -> None:
        self._say(answer.text, bad=not answer.done)

    def recording(self, name: str | None, text: str, *, bad: bool = False) -> None:
        """Snapshots are being written to `name`, or to nothing."""
        self._change(recording=name)
        self._say(text, bad=bad)

    def ended(self, text: str) -> None:
        """No other snapshot will come."""
        self._say(text, bad=False)

    # what goes out

    def picture(self, width: int, height: int) -> list[Line]:
        """`height` lines of `width` cells."""
        view, now = self.view, self._clock()
        if view.stale is not None:
            stale = replace(view.stale, for_s=now - self._received_at, retry_s=self._retry_at - now)
            view = replace(view, stale=stale)
        return draw(self._picture_of, view, width=width, height=height)

    @property
    def _picture_of(self) -> Snapshot | None:
        return self._shown if self.view.paused else self.snapshot

    # keys

    def key(self, key: str) -> Command | None:
        """A printable character, or one of Textual's names (up, enter, escape, …)."""
        if self.view.prompt is not None:
            return self._answer(self.view.prompt, key)
        if self.view.result:
            self._say("", bad=False)
        if key == "q":
            return Quit()
        if key == "r":
            return Record()
        if key in ("D", "X", "R"):
            self._ask(key)
        elif key in ("<", ">"):
            return self._rate(faster=key == ">")
        elif key.isdecimal() and 1 <= int(key) <= len(SCREENS):
            self._open(SCREENS[int(key) - 1])
        else:
            self._look(key)
        return None

    def _look(self, key: str) -> None:
        """Keys that change nothing but the picture."""
        view = self.view
        if key in _STEPS or key in ("home", "end"):
            self._move(key)
        elif key == "enter":
            request = open_request(self._picture_of, view)
            if request is not None and view.screen != "detail":
                self._change(request=request)
                self._open("detail", behind=view.screen)
        elif key == "escape":
            if view.screen in ("detail", "help"):
                self._open(view.behind)
            elif view.find:
                self._change(find="")
        elif key == "?":
            self._open(view.behind if view.screen == "help" else "help", behind=view.screen)
        elif key == "/":
            self._change(prompt=Prompt("find", "find in this list:", view.find))
        elif key == "s":
            self._sort()
        elif key == "p":
            self._shown = self.snapshot
            self._change(paused=not view.paused)
        elif key == "z" and self.snapshot is not None:
            self._change(peaks={})
            self._change(peaks=self._peaks(self.snapshot))
            self._say("peaks are counted from now on, in this console", bad=False)

    def _move(self, key: str) -> None:
        keys = row_keys(self._picture_of, self.view)
        if not keys:
            return
        selected = self.view.selected
        index = keys.index(selected) if selected in keys else 0
        index = {"home": 0, "end": len(keys) - 1}.get(key, index + _STEPS.get(key, 0))
        self._change(selected=keys[max(0, min(index, len(keys) - 1))])

    def _open(self, screen: str, *, behind: str | None = None) -> None:
        view = self.view
        self._chosen[view.screen] = view.selected
        if behind in ("detail", "help"):  # help on top of the detail leads back below both
            behind = view.behind
        self._change(
            screen=screen,
            behind=behind or view.behind,
            selected=self._chosen.get(screen) if screen != "detail" else None,
            sort=self._sorts.get(screen, ""),
        )

    def _sort(self) -> None:
        orders = SORTS.get(self.view.screen)
        if orders is None:
            return
        order = orders[(orders.index(self.view.order) + 1) % len(orders)]
        self._sorts[self.view.screen] = order
        self._change(sort=order)

    def _rate(self, *, faster: bool) -> Command | None:
        now = self.view.interval_s
        if faster:
            better = [interval for interval in INTERVALS_S if interval < now][-1:]
        else:
            better = [interval for interval in INTERVALS_S if interval > now][:1]
        if not better:
            return None
        self._change(interval_s=better[0])
        return Poll()

    # questions

    def _ask(self, key: str) -> None:
        action = offered(self.snapshot, self.view).get(key)
        if action is None or self.snapshot is None:
            self._say(self._why_not(key), bad=True)
            return
        if action == "cancel":
            request = chosen_request(self._picture_of, self.view)
            if request is None:
                self._say("no request is chosen here", bad=True)
                return
            self._change(prompt=Prompt("cancel", f"cancel request {request}?", target=request))
            return
        node, pending = self.snapshot.node.id, self.snapshot.pending
        question = f"{action} {node}?"
        if action == "role":
            question = f"{node} is {self.snapshot.node.role}; another role?"
        if pending is not None and action in ("drain", "role"):
            question += (
                f" {units.count(pending.requests)} requests and {units.count(pending.transfers)}"
                f" transfers are open, the oldest for {units.duration(pending.oldest_s)}."
            )
        if action == "role":
            question = f"{question} They finish first, peers are told. Type ROLE {node}:"
            self._change(prompt=Prompt("role", question, target=node))
            return
        self._change(prompt=Prompt(action, f"{question} Type the node's name:", target=node))

    def _why_not(self, key: str) -> str:
        if self.view.readonly:
            return "this console is read-only"
        if self.view.stale is not None or self.snapshot is None:
            return "no connection"
        names = {"D": ("drain", "undrain"), "R": ("role",)}.get(key, ("cancel",))
        refused = [a.refused for a in self.snapshot.actions if a.name in names and a.refused]
        return refused[0] if refused else f"the daemon does not offer {' or '.join(names)} now"

    def _answer(self, prompt: Prompt, key: str) -> Command | None:
        if prompt.kind == "cancel":
            if key not in ("y", "n", "escape"):
                return None
            return self._close(prompt, agreed=key == "y")
        if key == "escape":
            if prompt.kind == "find":
                self._change(prompt=None, find="")
                return None
            return self._close(prompt, agreed=False)
        if key == "enter":
            if prompt.kind == "find":
                self._change(prompt=None)
                return None
            if prompt.kind == "role":
                return self._enter_role(prompt)
            if prompt.typed != prompt.target:
                self._change(prompt=None)
                self._say(f"not done: the name is {prompt.target}", bad=True)
                return None
            return self._close(prompt, agreed=True)
        typed = prompt.typed[:-1] if key == "backspace" else prompt.typed
        if len(key) == 1 and key.isprintable() and len(typed) < MAX_TYPED:
            typed += key
        self._change(prompt=replace(prompt, typed=typed))
        if prompt.kind == "find":
            self._change(find=typed)
        return None

    def _enter_role(self, prompt: Prompt) -> Command | None:
        role, _, node = prompt.typed.strip().partition(" ")
        if node != prompt.target or role not in ROLES:
            self._change(prompt=None)
            self._say(f"not done: {' | '.join(ROLES)}, then {prompt.target}", bad=True)
            return None
        return self._close(prompt, agreed=True, role=role)

    def _close(self, prompt: Prompt, *, agreed: bool, role: str = "") -> Command | None:
        self._change(prompt=None)
        if not agreed:
            self._say("not done", bad=False)
            return None
        if prompt.kind not in offered(self.snapshot, self.view).values():
            self._say("not done: the daemon does not offer it any more", bad=True)
            return None
        self._say(f"{prompt.kind} …", bad=False)
        fields = {"cancel": {"request_id": prompt.target}, "role": {"role": role}}
        return Act(prompt.kind, fields.get(prompt.kind, {}))

    # helpers

    def _change(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]  # fields of View

    def _say(self, text: str, *, bad: bool) -> None:
        self._change(result=text, result_bad=bad)

    def _peaks(self, snapshot: Snapshot) -> dict[str, tuple[float, float]]:
        seen = self.view.peaks or {}
        found = {}
        for nic in snapshot.nics:
            rx, tx = seen.get(nic.name, (0.0, 0.0))
            found[nic.name] = (
                max(rx, nic.rx_bytes_per_s or 0.0),
                max(tx, nic.tx_bytes_per_s or 0.0),
            )
        return found
