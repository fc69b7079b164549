"""A node that others do their worst to: it lives, says nothing of faults, and answers rightly."""

from collections.abc import Callable, Iterable

from tests.support.census import Holding, census, grown_bytes, settled
from tests.support.nodes import Client, RunningNode
from tests.support.prompts import random_prompt

MOST_GROWTH_BYTES = 50 << 20
SIZES = (1, 2, 16, 17, 33, 120)
FAULTS = ("Traceback", "internal_error", "internal error", "AssertionError")


async def while_right(client: Client, done: Callable[[], bool]) -> int:
    """Asks one prompt after the other, each at least once, until `done`; the tokens must stay what
    they were. How many were asked."""
    wanted = {size: await client.tokens(random_prompt(size, seed=3), 6) for size in SIZES}
    asked = 0
    while True:
        for size in SIZES:
            assert await client.tokens(random_prompt(size, seed=3), 6) == wanted[size]
            asked += 1
        if done():
            return asked


def assert_unharmed(nodes: Iterable[RunningNode]) -> None:
    for node in nodes:
        text = node.text()
        assert node.process.poll() is None, text[-4000:]
        for sign in FAULTS:
            assert sign not in text, text[max(0, text.index(sign) - 2000) :][:6000]


async def assert_held(before: dict[str, Holding], *nodes: RunningNode) -> str:
    """Memory and descriptors are about what they were; returns the growth in words."""
    grown = grown_bytes(before, census(*nodes))
    assert max(grown.values()) <= MOST_GROWTH_BYTES, grown
    after = await settled(*nodes)
    for name, found in after.items():
        assert found.descriptors <= before[name].descriptors, name
    return ", ".join(f"{name} {size / (1 << 20):+.1f} MiB" for name, size in grown.items())
