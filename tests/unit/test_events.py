"""The event ring: what it keeps, cursors, waiting."""

import asyncio
import logging
import threading

import pytest

from pdnode.obs.events import MAX_TEXT, RING, EventRing
from pdnode.obs.log import event


@pytest.fixture
def log() -> logging.Logger:
    logger = logging.getLogger("tests.events")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers = [EventRing()]
    return logger


def ring_of(log: logging.Logger) -> EventRing:
    [ring] = log.handlers
    assert isinstance(ring, EventRing)
    return ring


def test_events_have_severity_code_and_fields(log: logging.Logger) -> None:
    event(log, logging.INFO, "a.b", "all is well", peer="pf 1", count=3, nothing=None)
    event(log, logging.ERROR, "c.d", "not well")
    event(log, logging.DEBUG, "quiet", "nobody asked")
    log.warning("no code")
    first, second = ring_of(log).last(9)
    assert (first.cursor, first.severity, first.code) == (1, "info", "a.b")
    assert first.text == 'all is well peer="pf 1" count=3'
    assert (second.cursor, second.severity, second.code) == (2, "error", "c.d")
    assert ring_of(log).last(1) == (second,)
    assert ring_of(log).last(0) == ()


def test_texts_are_bounded(log: logging.Logger) -> None:
    event(log, logging.INFO, "long", "x", cause="y" * 5000)
    assert len(ring_of(log).last(1)[0].text) == MAX_TEXT


def test_what_has_left_the_ring_is_a_gap_in_the_cursors(log: logging.Logger) -> None:
    ring = ring_of(log)
    for number in range(RING + 5):
        event(log, logging.INFO, "n", "n", number=number)
    assert [one.cursor for one in ring.after(2)][:2] == [6, 7]
    assert [one.cursor for one in ring.after(RING + 3)] == [RING + 4, RING + 5]
    assert ring.after(RING + 5) == []
    assert len(ring.after(RING + 6)) == RING  # a cursor of another boot
    assert len(ring.after(-1)) == RING


async def test_a_wait_ends_with_an_event_of_any_thread(log: logging.Logger) -> None:
    ring = ring_of(log)
    waiting = asyncio.create_task(ring.wait(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    thread = threading.Thread(target=event, args=(log, logging.INFO, "t", "from a thread"))
    thread.start()
    async with asyncio.timeout(30):
        await waiting
    thread.join()
    await ring.wait(0)  # there is one already
