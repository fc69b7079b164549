"""PageGate: who gets pages next, and races of grant and cancellation."""

import asyncio

import pytest

from pdnode.core.pages import PagePool
from pdnode.messenger.gate import PageGate
from pdnode.types import Run, count_pages


class Asker:
    """Notes who was granted, in order."""

    def __init__(self, gate: PageGate) -> None:
        self.gate = gate
        self.order: list[str] = []
        self.pages: dict[str, tuple[Run, ...]] = {}
        self.keys: dict[str, str] = {}

    def ask(self, name: str, count: int, key: str = "") -> None:
        def granted(runs: tuple[Run, ...]) -> None:
            self.order.append(name)
            self.pages[name] = runs

        self.keys[name] = key
        self.gate.request(count, granted, key=key)

    def give_back(self, name: str) -> None:
        self.gate.release(self.pages.pop(name), key=self.keys[name])


@pytest.fixture
def gate() -> PageGate:
    return PageGate(PagePool(10), max_quarantined=4)


def test_what_fits_is_granted_at_once(gate: PageGate) -> None:
    asker = Asker(gate)
    asker.ask("a", 6)
    asker.ask("b", 4)
    assert (asker.order, gate.waiting, gate.pool.counts.reserved) == (["a", "b"], 0, 10)


def test_a_large_wish_is_not_overtaken_by_small_ones(gate: PageGate) -> None:
    asker = Asker(gate)
    asker.ask("a", 6)
    asker.ask("large", 8)
    asker.ask("small", 1)
    assert (asker.order, gate.waiting) == (["a"], 2)
    asker.give_back("a")
    assert asker.order == ["a", "large", "small"]


def test_keys_take_turns_and_are_fifo_inside(gate: PageGate) -> None:
    asker = Asker(gate)
    asker.ask("all", 10, "x")
    for name in ("x1", "x2", "x3"):
        asker.ask(name, 10, "x")
    for name in ("y1", "y2"):
        asker.ask(name, 10, "y")
    for _ in range(6):
        asker.give_back(asker.order[-1])
    assert asker.order == ["all", "x1", "y1", "x2", "y2", "x3"]
    assert gate.pool.counts.free == 10


def test_nothing_is_granted_over_the_quarantine_limit(gate: PageGate) -> None:
    asker = Asker(gate)
    asker.ask("a", 5)
    gate.pool.quarantine(asker.pages["a"])
    asker.ask("b", 1)
    assert (asker.order, gate.waiting) == (["a"], 1)
    asker.give_back("a")
    assert asker.order == ["a", "b"]


def test_a_cancelled_ticket_is_passed_over(gate: PageGate) -> None:
    asker = Asker(gate)
    asker.ask("a", 10)
    ticket = gate.request(10, lambda runs: pytest.fail("granted after cancel"))
    asker.ask("b", 1)
    ticket.cancel()
    assert gate.waiting == 1
    asker.give_back("a")
    assert asker.order == ["a", "b"]
    ticket.cancel()


def test_a_grant_may_give_back_and_ask_again_inside(gate: PageGate) -> None:
    asker = Asker(gate)
    asker.ask("a", 10)

    def give_up(runs: tuple[Run, ...]) -> None:
        asker.order.append("gives up")
        gate.release(runs)
        asker.ask("inner", 3)

    gate.request(10, give_up)
    asker.ask("b", 7)
    asker.give_back("a")
    assert asker.order == ["a", "gives up", "b", "inner"]
    assert gate.pool.counts.free == 0


async def test_reserve_waits_for_pages(gate: PageGate) -> None:
    first = await gate.reserve(8)
    waiting = asyncio.create_task(gate.reserve(5))
    await asyncio.sleep(0)
    assert gate.waiting == 1
    gate.release(first)
    assert count_pages(await waiting) == 5


async def test_a_cancelled_wait_lets_the_next_one_through(gate: PageGate) -> None:
    first = await gate.reserve(8)
    large = asyncio.create_task(gate.reserve(9))
    small = asyncio.create_task(gate.reserve(2))
    await asyncio.sleep(0)
    assert gate.waiting == 2
    large.cancel()
    assert count_pages(await small) == 2
    with pytest.raises(asyncio.CancelledError):
        await large
    gate.release(first)
    gate.release(small.result())
    assert gate.pool.counts.free == 10


@pytest.mark.parametrize("order", ["cancel first", "grant first"])
async def test_a_grant_that_crosses_a_cancellation_is_given_back(
    gate: PageGate, order: str
) -> None:
    first = await gate.reserve(10)
    waiting = asyncio.create_task(gate.reserve(5))
    await asyncio.sleep(0)
    if order == "cancel first":
        waiting.cancel()
        gate.release(first)
    else:
        gate.release(first)
        assert gate.pool.counts.reserved == 5
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.pool.counts.free == 10
    assert gate.waiting == 0


async def test_a_storm_of_cancellations_leaves_nothing(gate: PageGate) -> None:
    first = await gate.reserve(10)
    keys = {
        asyncio.create_task(gate.reserve(1 + number % 7, key=key)): key
        for number in range(60)
        if (key := str(number % 3))
    }
    tasks = list(keys)
    await asyncio.sleep(0)
    for number, task in enumerate(tasks):
        if number % 2:
            task.cancel()
    gate.release(first)
    for _ in range(60):
        await asyncio.sleep(0)
        for task in tasks:
            if task.done() and not task.cancelled() and task.result():
                gate.release(task.result(), key=keys[task])
                tasks.remove(task)
                break
    assert (gate.waiting, gate.pool.counts.free) == (0, 10)


def test_a_shared_gate_leaves_pages_for_other_keys(gate: PageGate) -> None:
    """One key holds as many as it leaves free, but a single wish may have any size."""
    asker = Asker(gate)
    gate.shared = True
    for number in range(4):
        asker.ask(f"flood-{number}", 2, key="flood")
    assert asker.order == ["flood-0", "flood-1"]
    asker.ask("small", 2, key="other")
    assert asker.order[2:] == ["small"]
    asker.give_back("flood-0")
    assert asker.order[3:] == ["flood-2"]
    asker.ask("whole", 10, key="third")
    asker.give_back("small")
    assert (asker.order[4:], gate.waiting) == ([], 2)
    asker.give_back("flood-1")
    asker.ask("late", 1, key="other")
    assert asker.order[4:] == ["flood-3"], "its turn came before the large one's"
    asker.give_back("flood-2")
    assert asker.order[5:] == [], "nobody overtakes a large one whose turn it is"
    asker.give_back("flood-3")
    assert asker.order[5:] == ["whole"]


def test_a_gate_that_is_shared_no_more_gives_all(gate: PageGate) -> None:
    asker = Asker(gate)
    gate.shared = True
    for number in range(4):
        asker.ask(f"flood-{number}", 2, key="flood")
    gate.shared = False
    gate.pump()
    assert len(asker.order) == 4
