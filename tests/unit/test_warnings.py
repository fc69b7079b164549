"""The registry: what is shown when, and in which order."""

import logging
from pathlib import Path

import pytest

from pdnode.obs.warnings import MAX_ACTIVE, REGISTRY, Condition, Warnings
from tests.support.messenger_parts import Clock

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.found: list[Condition] = []
        self.warnings = Warnings(self.clock)
        self.warnings.add_source(lambda: self.found)

    def codes(self) -> list[str]:
        return [one.code for one in self.warnings.current()]


def test_a_condition_is_shown_once_it_has_lasted() -> None:
    world = World()
    world.found = [Condition("W202", "pf-1: lost", "pf-1")]
    assert world.codes() == []
    world.clock.now += REGISTRY["W202"].visible_after_s
    [shown] = world.warnings.current()
    assert (shown.code, shown.severity, shown.text) == ("W202", "warning", "pf-1: lost")
    assert (shown.subjects, shown.since_s, shown.affects_readiness) == (("pf-1",), 1.0, False)
    world.found = []
    assert world.codes() == []
    world.found = [Condition("W202", "pf-1: lost", "pf-1")]
    assert world.codes() == []  # it starts anew


def test_a_changed_text_does_not_make_it_new() -> None:
    world = World()
    world.found = [Condition("W202", "pf-1: refused", "pf-1")]
    world.codes()
    world.clock.now += 5
    world.found = [Condition("W202", "pf-1: timed out", "pf-1")]
    [shown] = world.warnings.current()
    assert (shown.text, shown.since_s) == ("pf-1: timed out", 5.0)


def test_what_another_one_explains_is_not_shown() -> None:
    world = World()
    world.found = [Condition("W101", "loading"), Condition("W103", "no prefill")]
    assert world.codes() == ["W101"]
    world.found = world.found[1:]
    assert world.codes() == ["W103"]


def test_readiness_is_affected_at_once() -> None:
    """Else work is sent to a node that drains, for as long as the warning is not visible."""
    world = World()
    for code, kind in REGISTRY.items():
        if kind.affects_readiness:
            world.found = [Condition(code, "x")]
            assert [one.affects_readiness for one in world.warnings.current()] == [True]


def test_errors_come_first() -> None:
    world = World()
    world.found = [
        Condition("W102", "draining"),
        Condition("W205", "pf-2: unfenced", "pf-2"),
        Condition("W201", "pf-1: refused", "pf-1"),
    ]
    assert world.codes() == ["W201", "W205", "W102"]


def test_their_number_is_bounded() -> None:
    world = World()
    world.found = [Condition("W205", "x", str(number)) for number in range(MAX_ACTIVE + 9)]
    assert len(world.codes()) == MAX_ACTIVE


def test_coming_and_going_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.found = [Condition("W102", "draining")]
    world.codes()
    world.codes()
    world.found = []
    world.codes()
    world.codes()
    said = [(record.code, record.fields["warning"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [("warning.raised", "W102"), ("warning.cleared", "W102")]


def test_an_unknown_code_is_a_fault_of_this_program() -> None:
    world = World()
    world.found = [Condition("W999", "x")]
    with pytest.raises(AssertionError, match="W999"):
        world.codes()


def test_every_code_is_explained() -> None:
    text = OPERATIONS.read_text()
    for code, kind in REGISTRY.items():
        [line] = [row for row in text.splitlines() if row.startswith(f"| `{code}` |")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1:4] == [kind.severity, "no" if kind.affects_readiness else "yes", kind.title]
        assert len(cells[4]) > 20  # what to do
