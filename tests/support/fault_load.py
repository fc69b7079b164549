"""A steady load of greedy streams whose tokens are known, and what became of each request."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import msgspec

from tests.support.nodes import Client
from tests.support.reference import Case

PAUSE_S = 0.05  # after a failure, so that a node that refuses is not flooded


@dataclass(slots=True)
class Asked:
    """One request of one stream. Times are monotonic; `error`: the code, or what broke."""

    node: str
    case: Case
    begun: float
    first: float = 0.0  # when the first token came
    ended: float = 0.0
    error: str = ""
    prefill: str = ""
    tokens: list[int] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return bool(self.ended) and not self.error and self.tokens == self.case.tokens

    @property
    def wrong(self) -> bool:
        """Tokens that do not belong there: worse than any error."""
        cut = bool(self.ended) and not self.error and len(self.tokens) < len(self.case.tokens)
        return cut or self.tokens != self.case.tokens[: len(self.tokens)]


async def ask(client: Client, asked: Asked) -> None:
    """Streams one request to its end, whatever that is."""
    case = asked.case
    body = {
        "model": "test-model",
        "prompt": case.prompt,
        "max_tokens": len(case.tokens),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with client.session.post(f"{client.spec.url}/v1/completions", json=body) as answer:
            asked.prefill = answer.headers.get("X-Pdnode-Prefill", "")
            if answer.status != 200:
                asked.error = (await answer.json())["error"]["code"]
            else:
                await _read(answer, asked)
    except (aiohttp.ClientError, ConnectionError) as error:
        asked.error = type(error).__name__
    finally:
        asked.ended = time.monotonic()


async def _read(answer: aiohttp.ClientResponse, asked: Asked) -> None:
    async for line in answer.content:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if not data:
            continue
        event = msgspec.json.decode(data)
        if "error" in event:
            asked.error = event["error"]["code"]
            return
        asked.tokens += event["choices"][0]["token_ids"]
        asked.first = asked.first or time.monotonic()
    asked.error = asked.error or "cut off"


@dataclass(slots=True)
class Load:
    """`streams` of each client ask one case after the other, until `stop`."""

    clients: Sequence[Client]
    cases: Sequence[Case]
    streams: int
    asked: list[Asked] = field(default_factory=list)  # in the order in which they began
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        clients = [client for _ in range(self.streams) for client in self.clients]
        self._tasks = [
            asyncio.create_task(self._stream(client, number))
            for number, client in enumerate(clients)
        ]

    async def stop(self) -> None:
        """Returns once the last answers are there."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def answered(self, more: int) -> None:
        """Until every node has answered so many more requests rightly."""
        wanted = {client.spec.name: self._right(client) + more for client in self.clients}
        while any(self._right(client) < wanted[client.spec.name] for client in self.clients):
            await asyncio.sleep(0.02)

    async def in_the_middle(self) -> None:
        """Until every node has a request that waits for its first token, and one that decodes."""
        while not all(
            any(asked.node == client.spec.name and bool(asked.first) is decoding
                for asked in self.open())
            for client in self.clients
            for decoding in (False, True)
        ):  # fmt: skip
            await asyncio.sleep(0.002)

    def open(self) -> list[Asked]:
        return [asked for asked in self.asked[-100:] if not asked.ended]

    def _right(self, client: Client) -> int:
        return sum(asked.right for asked in self.asked if asked.node == client.spec.name)

    async def _stream(self, client: Client, number: int) -> None:
        for turn in count(number):
            if self._stopping:
                return
            case = self.cases[turn % len(self.cases)]
            asked = Asked(client.spec.name, case, time.monotonic())
            self.asked.append(asked)
            await ask(client, asked)
            if asked.error:
                await asyncio.sleep(PAUSE_S)
