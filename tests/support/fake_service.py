"""A scripted service and a byte-level codec: what the API routes are tested over."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from pdnode.api.app import build_app
from pdnode.api.limits import Timeouts
from pdnode.api.listener import ApiListener
from pdnode.config import ApiConfig
from pdnode.core.request import Request, TokenEvent
from pdnode.errors import BadRequest
from pdnode.obs.metrics import Metrics
from pdnode.obs.node_figures import NodeFigures
from pdnode.obs.snapshot import Warning

END = 256
VOCABULARY = 300
CONTEXT = 128
CAPACITY = 512

Scripted = TokenEvent | Exception | asyncio.Event


def tokens(text: str | bytes, finish: str | None = "length") -> list[Scripted]:
    """One event per byte of `text`, the last with `finish`."""
    data = text.encode() if isinstance(text, str) else text
    last = len(data) - 1
    return [TokenEvent(byte, -0.5, finish if at == last else None) for at, byte in enumerate(data)]


class BytesCodec:
    """Ids 0 to 255 are bytes, 256 is the end token, those of `pieces` stand for more bytes."""

    end_tokens = frozenset({END})

    def __init__(self, pieces: Mapping[int, bytes] | None = None) -> None:
        self._pieces = dict(pieces or {})
        self.chats: list[list[Mapping[str, object]]] = []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        self.chats.append(list(messages))
        if messages[0]["content"] == "refuse me":
            raise BadRequest("the template refuses", "messages")
        return self.encode("".join(f"{one['role']}:{one['content']}\n" for one in messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else self._pieces.get(token, b"")

    def control_name(self, token: int) -> str:
        return "<|end|>" if token == END else ""

    def decoder(self) -> "BytesDecoder":
        return BytesDecoder(self)


class BytesDecoder:
    def __init__(self, codec: BytesCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._codec.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(eq=False)
class FakeGeneration:
    """Plays a script: events come out, exceptions are raised, asyncio.Events are waited for."""

    script: list[Scripted]
    prefill: str = "pf-1"
    cancels: list[str] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: int = 0

    async def events(self) -> AsyncIterator[TokenEvent]:
        for step in self.script:
            if isinstance(step, asyncio.Event):
                waits = [asyncio.ensure_future(each.wait()) for each in (step, self.cancelled)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in waits:
                        each.cancel()
            if self.cancelled.is_set():
                return
            if isinstance(step, Exception):
                raise step
            if isinstance(step, TokenEvent):
                self.delivered += 1
                yield step

    def cancel(self, reason: str) -> None:
        self.cancels.append(reason)
        self.cancelled.set()


class FakeService:
    """Answers every request with `script`, or refuses with `refusal`."""

    model_name = "tiny"
    vocabulary = VOCABULARY

    def __init__(self) -> None:
        self.script: list[Scripted] = tokens("hi")
        self.refusal: Exception | None = None
        self.hold: asyncio.Event | None = None  # submit waits for it
        self.submitting = asyncio.Event()
        self.submit_cancelled = asyncio.Event()
        self.requests: list[Request] = []
        self.generations: list[FakeGeneration] = []
        self.reasons: list[str] = []
        self.minor: list[Warning] = []  # that do not affect readiness
        self.is_alive = True
        self.generates = True
        self.context_tokens = CONTEXT
        self.capacity_tokens = CAPACITY

    def not_ready(self) -> list[str]:
        return self.reasons

    def warnings(self) -> list[Warning]:
        return [
            Warning(code="W101", severity="warning", text=text, since_s=1.0, affects_readiness=True)
            for text in self.reasons
        ] + self.minor

    def alive(self) -> bool:
        return self.is_alive

    def role(self) -> str:
        return "decode" if self.generates else "prefill"

    def may_generate(self) -> bool:
        return self.generates

    async def submit(self, request: Request) -> FakeGeneration:
        self.requests.append(request)
        self.submitting.set()
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.submit_cancelled.set()
                raise
        if self.refusal is not None:
            raise self.refusal
        generation = FakeGeneration(list(self.script))
        self.generations.append(generation)
        return generation


@dataclass
class Bench:
    """A served application, and a client for it."""

    service: FakeService
    codec: BytesCodec
    metrics: Metrics
    listener: ApiListener
    host: str
    port: int
    client: aiohttp.ClientSession
    app: web.Application

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def post(self, path: str, body: object) -> tuple[int, Mapping[str, str], object]:
        """(status, headers, decoded JSON) of one POST."""
        async with self.client.post(self.url + path, json=body) as response:
            return response.status, response.headers, await response.json()

    async def get(self, path: str) -> tuple[int, Mapping[str, str], str]:
        async with self.client.get(self.url + path) as response:
            return response.status, response.headers, await response.text()


@asynccontextmanager
async def serve(
    *,
    pieces: Mapping[int, bytes] | None = None,
    max_body_bytes: int = 1 << 20,
    max_connections: int = 4096,
    timeouts: Timeouts | None = None,
    figures: NodeFigures | None = None,
    vllm_names: bool = True,
    keys: tuple[bytes, ...] = (),
) -> AsyncIterator[Bench]:
    service, codec = FakeService(), BytesCodec(pieces)
    shown = figures or NodeFigures(role="decode")
    metrics = Metrics(lambda: shown, model="tiny", version="0.0", vllm_names=vllm_names)
    config = ApiConfig(
        port=0, max_body_bytes=max_body_bytes, max_connections=max_connections, keys=keys
    )
    limits = timeouts or Timeouts(refused_s=0.5)
    app = build_app(service, codec, config, metrics, limits, warnings=service.warnings)
    listener = ApiListener(app, config, limits)
    host, port = await listener.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield Bench(service, codec, metrics, listener, host, port, client, app)
    finally:
        await listener.stop()
