"""check_dispatch: names the field and what is allowed; borders of every bound."""

import pytest

from pdnode.core import wire
from pdnode.core.slots import Slot
from pdnode.messenger.dispatch import DispatchLimits, check_dispatch, check_immediate
from pdnode.types import Role
from tests.support.messenger_parts import geometry, session

HERE = geometry(pages=8)  # 32 tokens
THERE = geometry(pages=16)
END, _ = session(1, peer=Role.DECODE, peer_geometry=THERE, pairs=(), boot="d")


def check(context_tokens: int = 100, **changes: object) -> str | None:
    values: dict[str, object] = {
        "key": "d:1",
        "request_id": "r",
        "tokens": [0, 99, 1, 2, 3],
        "pages": [wire.PageRun(15, 1), wire.PageRun(0, 1)],
        "first_page": 0,
        "immediate": Slot(4095, 255).immediate,
        "context_slot": -1,
        "deadline_s": 30.0,
        "priority": 0,
    }
    frame = wire.Dispatch(**(values | changes))  # type: ignore[arg-type]
    limits = DispatchLimits(vocabulary=100, context_tokens=context_tokens, max_waiting=1)
    return check_dispatch(frame, END, HERE, limits)


def runs(*pairs: tuple[int, int]) -> list[wire.PageRun]:
    return [wire.PageRun(start, count) for start, count in pairs]


def test_the_borders_are_allowed() -> None:
    assert check() is None
    assert check(tokens=[1], pages=runs((15, 1))) is None
    assert check(tokens=[1] * 32, pages=runs((4, 4), (0, 4))) is None
    assert check(immediate=Slot(1, 0).immediate) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": []}, "tokens: 0, this node takes 1 to 32"),
        ({"tokens": [1] * 33}, "tokens: 33, this node takes 1 to 32"),
        ({"tokens": [1] * 21, "context_tokens": 20}, "tokens: 21, this node takes 1 to 20"),
        ({"tokens": [100]}, "tokens: ids must be 0 to 99"),
        ({"tokens": [-1]}, "tokens: ids must be 0 to 99"),
        ({"pages": []}, "pages: 0 given, 2 needed"),
        ({"pages": runs((0, 3))}, "pages: 3 given, 2 needed"),
        ({"pages": runs((16, 1), (0, 1))}, "pages: run 16+1 is outside 0 to 15"),
        ({"pages": runs((-1, 1), (0, 1))}, "pages: run -1+1 is outside 0 to 15"),
        ({"pages": runs((0, 0), (0, 2))}, "pages: run 0+0 is outside 0 to 15"),
        ({"pages": runs((0, 1 << 62))}, f"pages: run 0+{1 << 62} is outside 0 to 15"),
        ({"tokens": [1] * 12, "pages": runs((2, 2), (3, 1))}, "pages: page 3 is named twice"),
        ({"pages": runs((7, 1), (7, 1))}, "pages: page 7 is named twice"),
        ({"key": "e:1"}, "key: must begin with the boot id d"),
        ({"key": "d"}, "key: must begin with the boot id d"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], text: str) -> None:
    assert check(**changes) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("immediate", [0, 0xFFF, 0xFF000, 1 << 20 | 1, 1 << 32])
def test_immediates_that_no_decode_node_gives_out(immediate: int) -> None:
    assert check_immediate(immediate) == "immediate: slot must be 1 to 4095 and weight 0"
