"""Streams that run beside what a test does."""

import asyncio

from tests.support.nodes import Client


async def started_stream(
    client: Client, prompt: list[int], max_tokens: int
) -> tuple[list[dict], asyncio.Task[None]]:
    """A stream that has its first token, its events so far, and the task that reads on."""
    events: list[dict] = []
    first = asyncio.Event()

    async def read() -> None:
        async for event in client.events(prompt, max_tokens):
            events.append(event)
            first.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(60):
        await first.wait()
    return events, task


def tokens(events: list[dict]) -> int:
    return sum(len(event["choices"][0]["token_ids"]) for event in events if "choices" in event)
