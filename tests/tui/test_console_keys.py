"""What every key does, on the console without its terminal: time stands still, nothing is drawn."""

import msgspec
import pytest
from pdnode_tui import mock
from pdnode_tui.console import MAX_EVENTS, MAX_TYPED, Act, Console, Poll, Quit, Record
from pdnode_tui.lines import plain
from pdnode_tui.view import INTERVALS_S, SCREENS, SORTS, View

from pdnode.obs.snapshot import Action, ActionAnswer, Event, Snapshot


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def started(kind: str = "healthy", view: View | None = None) -> tuple[Console, Clock]:
    clock = Clock()
    console = Console(view or View(), clock)
    console.received(mock.snapshot(kind))
    return console, clock


def press(console: Console, *keys: str) -> list[object]:
    return [command for key in keys if (command := console.key(key)) is not None]


def test_digits_open_the_screens() -> None:
    console, _ = started()
    for number, screen in enumerate(SCREENS, start=1):
        press(console, str(number))
        assert console.view.screen == screen
    press(console, "7", "0", "9")
    assert console.view.screen == SCREENS[-1]


def test_the_choice_moves_and_is_kept_for_each_screen() -> None:
    console, _ = started()
    press(console, "down", "j")
    assert console.view.selected == "7f3a91c4"  # the third oldest
    press(console, "k")
    assert console.view.selected == "e5b2006f"
    press(console, "5", "end")
    assert console.view.selected == "pf-06"
    press(console, "up")
    assert console.view.selected == "pf-05"
    press(console, "1")
    assert console.view.selected == "e5b2006f"
    press(console, "home", "up")
    assert console.view.selected == "03de88a1"
    press(console, "pagedown")
    assert console.view.selected == "9ac417d0"
    press(console, "pageup")
    assert console.view.selected == "03de88a1"


def test_the_choice_stays_on_its_row_when_rows_move() -> None:
    console, _ = started()
    press(console, "down")
    console.received(mock.snapshot("degraded"))  # the same request is the oldest now
    assert console.view.selected == "e5b2006f"


def test_without_a_transfer_enter_opens_the_last_slow_one_and_x_cancels_nothing() -> None:
    console, _ = started()
    gone = msgspec.structs.replace(mock.snapshot("healthy"), transfers=())
    console.received(gone)
    press(console, "down", "X")
    assert (console.view.prompt, console.view.result) == (None, "no request is chosen here")
    press(console, "enter")
    assert (console.view.screen, console.view.request) == ("detail", "c04411ef")
    console.received(msgspec.structs.replace(gone, last_slow=None))
    press(console, "escape", "enter")
    assert console.view.screen == "flow"


def test_enter_opens_a_request_and_escape_leads_back() -> None:
    console, _ = started()
    press(console, "4", "down", "enter")
    assert (console.view.screen, console.view.behind) == ("detail", "queues")
    assert console.view.request == mock.snapshot("healthy").requests[1].request_id
    press(console, "?")
    assert console.view.screen == "help"
    press(console, "escape")
    assert console.view.screen == "queues"
    press(console, "5", "enter")
    assert console.view.screen == "peers"  # a peer is no request


def test_help_opens_and_closes() -> None:
    console, _ = started()
    press(console, "2", "?")
    assert console.view.screen == "help"
    press(console, "?")
    assert console.view.screen == "fabric"
    press(console, "?", "escape")
    assert console.view.screen == "fabric"


@pytest.mark.parametrize("screen", SORTS)
def test_s_goes_round_the_orders_of_a_screen(screen: str) -> None:
    console, _ = started()
    press(console, str(SCREENS.index(screen) + 1))
    seen = [console.view.order]
    for _ in SORTS[screen]:
        press(console, "s")
        seen.append(console.view.order)
    assert seen == [*SORTS[screen], SORTS[screen][0]]
    press(console, "s", "3", str(SCREENS.index(screen) + 1))
    assert console.view.order == SORTS[screen][1]  # kept


def test_find_narrows_while_typing_and_escape_clears() -> None:
    console, _ = started()
    press(console, "/", "p", "f", "x", "backspace", "-", "0", "3")
    assert console.view.find == "pf-03"
    press(console, "enter")
    assert (console.view.prompt, console.view.find) == (None, "pf-03")
    press(console, "end")
    assert console.view.selected == "b10c2f7e"
    press(console, "escape")
    assert console.view.find == ""
    press(console, "/", "q", "escape")  # q is a letter here
    assert (console.view.prompt, console.view.find) == (None, "")
    press(console, "/", *"x" * 200)
    assert len(console.view.find) == MAX_TYPED


def test_pause_freezes_the_picture_and_not_the_sampling() -> None:
    console, _ = started()
    before = console.picture(100, 30)
    press(console, "p")
    console.received(mock.snapshot("healthy", 5))
    assert [plain(line) for line in console.picture(100, 30)][3:] == [
        plain(line) for line in before][3:]  # fmt: skip
    assert "PAUSED" in plain(console.picture(100, 30)[0])
    assert console.snapshot == mock.snapshot("healthy", 5)
    press(console, "p")
    assert "12:41:12Z" in plain(console.picture(100, 30)[0])


def test_rates_between_a_fifth_of_a_second_and_ten() -> None:
    console, _ = started()
    assert press(console, ">", ">", ">", ">") == [Poll(), Poll()]
    assert console.view.interval_s == INTERVALS_S[0] == 0.2
    assert press(console, *"<" * 9) == [Poll()] * 5
    assert console.view.interval_s == INTERVALS_S[-1] == 10.0
    odd, _ = started(view=View(interval_s=3.0))
    press(odd, ">")
    assert odd.view.interval_s == 2.0


def test_z_counts_peaks_from_now_on() -> None:
    console, _ = started()
    press(console, "z")
    first = mock.snapshot("healthy").nics[0].rx_bytes_per_s
    assert console.view.peaks is not None
    assert console.view.peaks["mlx5_0"][0] == first
    rates = [first]
    for tick in (1, 2, 9):
        console.received(mock.snapshot("healthy", tick))
        rates.append(mock.snapshot("healthy", tick).nics[0].rx_bytes_per_s)
    assert console.view.peaks["mlx5_0"][0] == max(r for r in rates if r is not None)


def test_q_and_r_are_commands() -> None:
    console, _ = started()
    assert press(console, "q") == [Quit()]
    assert press(console, "r") == [Record()]
    console.recording("x.jsonl", "recording to x.jsonl")
    assert "REC" in plain(console.picture(100, 30)[0])
    assert "recording to x.jsonl" in plain(console.picture(100, 30)[-1])


def test_cancel_asks_first_and_names_the_request() -> None:
    console, _ = started()
    press(console, "down", "X")
    assert console.view.prompt is not None
    assert console.view.prompt.question == "cancel request e5b2006f?"
    console.received(mock.snapshot("degraded"))  # rows move; the question does not
    assert press(console, "x", "Y", "enter") == []
    assert press(console, "y") == [Act("cancel", {"request_id": "e5b2006f"})]
    assert console.view.prompt is None
    for no in ("n", "escape"):
        assert press(console, "X", no) == []
        assert console.view.result == "not done"


def test_drain_wants_the_name_of_the_node() -> None:
    console, _ = started()
    press(console, "D")
    assert console.view.prompt is not None
    assert (
        "61 requests and 6 transfers are open, the oldest for 14s" in console.view.prompt.question
    )
    assert press(console, *"node-a1", "enter") == []
    assert console.view.result == "not done: the name is node-a17"
    assert press(console, "D", *"node-a17", "enter") == [Act("drain", {})]
    assert press(console, "D", *"node-a17", "escape") == []
    console.answered(ActionAnswer(done=True, text="draining: 61 requests"))
    assert "draining: 61 requests" in plain(console.picture(100, 30)[-1])
    press(console, "j")
    assert console.view.result == ""  # the next key takes it away


def offering(*actions: Action) -> Snapshot:
    return msgspec.structs.replace(mock.snapshot("healthy"), actions=actions)


def test_d_undrains_where_the_snapshot_offers_that() -> None:
    console, _ = started()
    console.received(
        offering(Action(name="drain", refused="draining already"), Action(name="undrain"))
    )
    assert press(console, "D", *"node-a17", "enter") == [Act("undrain", {})]


def test_r_takes_a_role_and_the_nodes_name() -> None:
    console, _ = started()
    console.received(offering(Action(name="role")))
    press(console, "R")
    assert console.view.prompt is not None
    question = console.view.prompt.question
    assert question.startswith("node-a17 is decode; another role? ")
    assert question.endswith("They finish first, peers are told. Type ROLE node-a17:")
    assert press(console, *"prefill node-a17", "enter") == [Act("role", {"role": "prefill"})]
    for typed in ("prefill", "node-a17", "router node-a17", "prefill node-a18"):
        press(console, "R")
        assert press(console, *typed, "enter") == []
        assert console.view.result == "not done: prefill | decode | colocated, then node-a17"


def test_what_is_not_offered_is_not_asked() -> None:
    console, _ = started()
    console.received(offering(Action(name="drain", refused="loading")))
    assert press(console, "D", "X") == []
    assert console.view.result == "the daemon does not offer cancel now"
    press(console, "D")
    assert (console.view.prompt, console.view.result) == (None, "loading")
    readonly, _ = started(view=View(readonly=True))
    press(readonly, "D")
    assert (readonly.view.prompt, readonly.view.result) == (None, "this console is read-only")


def test_an_action_that_is_withdrawn_during_the_question_is_not_done() -> None:
    console, _ = started()
    press(console, "X")
    console.received(offering())
    assert press(console, "y") == []
    assert console.view.result == "not done: the daemon does not offer it any more"


def test_stale_closes_questions_and_backs_off_to_15_s() -> None:
    console, clock = started()
    press(console, "X")
    assert [console.failed("Connection refused") for _ in range(6)] == [1, 2, 4, 8, 15, 15]
    assert (console.view.prompt, console.view.result_bad) == (None, True)
    assert press(console, "D", "X") == []
    assert console.view.result == "no connection"
    clock.now += 12
    assert "STALE 12s  reconnecting in 3 s (6)" in plain(console.picture(100, 30)[0])
    console.received(mock.snapshot("healthy", 1))
    assert console.view.stale is None
    assert "STALE" not in plain(console.picture(100, 30)[0])


def test_a_new_boot_is_noted_and_clears_peaks_and_events() -> None:
    console, _ = started()
    press(console, "z")
    again = mock.snapshot("healthy", 1)
    node = msgspec.structs.replace(again.node, boot="b007" * 8)
    fresh = (Event(cursor=1, time_s=1.0, severity="info", code="node.serving", text="serving"),)
    console.received(msgspec.structs.replace(again, node=node, events=fresh))
    assert console.view.peaks is None
    assert console.view.events == fresh
    assert console.view.result == "node-a17 was restarted: new boot b007b007"


def test_events_are_collected_once_and_bounded() -> None:
    console, _ = started()
    assert console.cursor == 2
    more = tuple(
        Event(cursor=cursor, time_s=0.0, severity="info", code="x", text=str(cursor))
        for cursor in range(1, 2000)
    )
    console.events(more)
    console.events(more)
    assert len(console.view.events) == MAX_EVENTS
    assert [event.cursor for event in console.view.events][-2:] == [1998, 1999]


def test_keys_before_the_first_answer_do_no_harm() -> None:
    console = Console(View(), Clock())
    for key in (
        "down",
        "enter",
        "D",
        "X",
        "s",
        "p",
        "z",
        "/",
        "a",
        "escape",
        "2",
        "?",
        "f1",
        "tab",
    ):
        assert press(console, key) == []
        console.picture(80, 24)
    assert press(console, "q") == [Quit()]
