"""`pdnode bench serve`: offers load to one node, or to two in turns, and measures what comes back.

Two targets never run at the same time: on one host they would measure each other. They take turns
in rounds, and who begins alternates, so that what drifts on the host hits both.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import msgspec
import numpy as np

from pdnode.bench.client import complete
from pdnode.bench.figures import (
    Background,
    Figures,
    Trace,
    gaps,
    quantiles,
    split_gaps,
    summarize,
)
from pdnode.bench.options import Options
from pdnode.errors import PdnodeError

_BACKGROUND_NUMBER = 1 << 32  # above the number of any request: prompts of its own


_Stream = list[list[float]]
"""Token times of each request of a background stream, filled as they come."""


class BenchError(PdnodeError):
    """The run cannot start or go on; the text says why."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocabulary: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(slots=True, eq=False)
class Target:
    """One node under load, and what has been measured of it."""

    url: str
    model: str
    vocabulary: int
    traces: list[Trace] = field(default_factory=list)
    active_s: float = 0.0
    idle: list[float] = field(default_factory=list)  # ITL of background streams
    loaded: list[float] = field(default_factory=list)


class LoadRun:
    """One run. `on_done` is called with the number of requests that are over, of both targets."""

    def __init__(
        self,
        options: Options,
        on_done: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options = options
        self._on_done = on_done
        self._clock = clock
        self._done = 0

    async def run(self) -> list[Figures]:
        """Figures of each target, in the order of `Options.urls`. BenchError."""
        return [self._figures(target) for target in await self.measure()]

    async def measure(self) -> list[Target]:
        """As `run`, but every single time. BenchError."""
        options = self._options
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=options.headers()
        ) as session:
            self._session = session
            targets = [await self._target(url) for url in options.urls]
            blocks = options.rounds * len(targets)
            for number, part in enumerate(_parts(options.requests, options.rounds)):
                for target in targets if number % 2 == 0 else reversed(targets):
                    await self._block(target, part, options.duration_s / blocks)
        return targets

    async def _target(self, url: str) -> Target:
        try:
            async with (
                asyncio.timeout(self._options.timeout_s),
                self._session.get(f"{url}/v1/models") as response,
            ):
                if response.status != 200:
                    raise BenchError(f"{url}: /v1/models answers {response.status}")
                models = msgspec.json.decode(await response.read(), type=_Models).data
        except (aiohttp.ClientError, OSError) as error:
            raise BenchError(
                f"{url}: not reachable: {str(error) or type(error).__name__}"
            ) from error
        except msgspec.DecodeError as error:
            raise BenchError(f"{url}: /v1/models is no list of models: {error}") from error
        return self._checked(url, models)

    def _checked(self, url: str, models: Sequence[_Model]) -> Target:
        options = self._options
        names = [model.id for model in models]
        if not names or (options.model is not None and options.model not in names):
            raise BenchError(f"--model: {options.model!r} is not served; allowed: {names}")
        model = models[0 if options.model is None else names.index(options.model)]
        vocabulary = options.vocabulary or model.vocabulary
        if vocabulary is None:
            raise BenchError(f"--vocabulary is needed: {url}/v1/models does not say it")
        needed = options.prompt_tokens + options.output_tokens
        if options.background_streams:
            background = options.background_prompt_tokens + options.background_output_tokens
            needed = max(needed, background)
        if model.max_model_len is not None and needed > model.max_model_len:
            raise BenchError(
                f"{needed} tokens of prompt and output, and {model.id} takes {model.max_model_len}"
            )
        return Target(url, model.id, vocabulary)

    async def _block(self, target: Target, numbers: range, budget_s: float) -> None:
        """One turn of one target."""
        options = self._options
        first = len(target.traces)
        async with self._background(target) as (runs, idle):
            began = self._clock()
            offer = self._open if options.rate else self._closed
            await offer(target, iter(numbers), began + budget_s)
            target.active_s += self._clock() - began
        prompts = [
            (trace.start_s, trace.token_s[0] if trace.token_s else trace.end_s)
            for trace in target.traces[first:]
        ]
        found = (gap for stream in runs for token_s in stream for gap in gaps(token_s))
        quiet, loaded = split_gaps(found, idle=idle, prompts=prompts)
        target.idle += quiet
        target.loaded += loaded

    async def _closed(self, target: Target, numbers: Iterator[int], until: float) -> None:
        async def stream() -> None:
            for number in numbers:
                if self._clock() >= until:
                    return
                await self._request(target, number)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.streams):
                group.create_task(stream())

    async def _open(self, target: Target, numbers: Iterator[int], until: float) -> None:
        options = self._options
        due = self._clock()
        tasks: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                due += np.random.default_rng([options.seed, 1, number]).exponential(
                    1 / options.rate
                )
                if due >= until:
                    return
                await asyncio.sleep(max(0.0, due - self._clock()))
                if len(tasks) >= options.streams:
                    self._ended(target, Trace(due, (), due, "not_sent"))
                    continue
                task = group.create_task(self._request(target, number, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _request(self, target: Target, number: int, due: float | None = None) -> None:
        options = self._options
        body = self._body(target, number, options.prompt_tokens, options.output_tokens)
        trace = await complete(
            self._session,
            target.url,
            body,
            expected=options.output_tokens,
            start_s=self._clock() if due is None else due,
            clock=self._clock,
            timeout_s=options.timeout_s,
            token_s=[],
        )
        self._ended(target, trace)

    def _ended(self, target: Target, trace: Trace) -> None:
        target.traces.append(trace)
        self._done += 1
        self._on_done(self._done)

    def _body(self, target: Target, number: int, prompt: int, output: int) -> bytes:
        """The same prompt for the same number, whatever the target."""
        random = np.random.default_rng([self._options.seed, 0, number])
        return msgspec.json.encode(
            {
                "model": target.model,
                "prompt": random.integers(target.vocabulary, size=prompt).tolist(),
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    @asynccontextmanager
    async def _background(
        self, target: Target
    ) -> AsyncIterator[tuple[list[_Stream], tuple[float, float]]]:
        """Runs the background streams. Gives what they fill, and the window in which all of them
        ran and nothing else did."""
        options = self._options
        runs: list[_Stream] = [[] for _ in range(options.background_streams)]
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._background_stream(target, number, run))
            for number, run in enumerate(runs)
        ]
        try:
            if not tasks:
                yield runs, (0.0, 0.0)
                return
            while not all(run and run[0] for run in runs):
                _raise_ended(tasks)
                await asyncio.sleep(0.01)
            began = self._clock()
            await asyncio.sleep(options.idle_s)
            yield runs, (began, self._clock())
            _raise_ended(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _background_stream(self, target: Target, number: int, requests: _Stream) -> None:
        options = self._options
        output = options.background_output_tokens
        body = self._body(
            target, _BACKGROUND_NUMBER + number, options.background_prompt_tokens, output
        )
        while True:
            token_s: list[float] = []
            requests.append(token_s)
            trace = await complete(
                self._session,
                target.url,
                body,
                expected=output,
                start_s=self._clock(),
                clock=self._clock,
                timeout_s=options.timeout_s + options.duration_s,
                token_s=token_s,
            )
            if trace.error is not None:
                raise BenchError(f"{target.url}: a background stream ended: {trace.error}")

    def _figures(self, target: Target) -> Figures:
        streams = self._options.background_streams
        background = Background(
            streams=streams,
            idle_gaps=len(target.idle),
            idle_itl_s=quantiles(target.idle),
            loaded_gaps=len(target.loaded),
            loaded_itl_s=quantiles(target.loaded),
        )
        return summarize(
            target.traces,
            url=target.url,
            model=target.model,
            active_s=target.active_s,
            background=background if streams else None,
        )


def _parts(count: int, rounds: int) -> list[range]:
    """0..count in `rounds` neighbouring parts, as equal as can be."""
    edges = [count * number // rounds for number in range(rounds + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def _raise_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """A background stream never ends by itself but by an error."""
    for task in tasks:
        if task.done():
            task.result()
