"""The OpenAI routes: /v1/models, /v1/completions, /v1/chat/completions."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import msgspec
from aiohttp import web

from pdnode.api.body import read_object
from pdnode.api.codec import TextCodec
from pdnode.api.errors import request_id
from pdnode.api.forms import ChatForm, CompletionForm, Form, Heading
from pdnode.api.generate import Choice, Work, answer
from pdnode.api.limits import MAX_CHARACTERS_PER_TOKEN, MAX_INLINE_CHARACTERS, Timeouts
from pdnode.api.schema import (
    GenerationFields,
    Sizes,
    check_length,
    check_token_ids,
    fit,
    read_chat,
    read_completion,
)
from pdnode.api.service import Service
from pdnode.api.stream import StreamOptions
from pdnode.api.text import Assembler, Echo
from pdnode.core.request import Request
from pdnode.errors import BadRequest, NotFound, Unavailable
from pdnode.obs.metrics import Metrics
from pdnode.obs.trace import checked_traceparent

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
_SEED_MASK = (1 << 63) - 1


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int  # as vLLM gives it
    vocabulary: int  # token ids of prompts are below it
    object: str = "model"
    owned_by: str = "pdnode"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[Model, ...]
    object: str = "list"


def _random_seed() -> int:
    return secrets.randbits(63)


class OpenAiRoutes:
    """Handlers of the OpenAI routes. They run on the event loop; texts that take long to tokenize
    go to one thread, which also bounds how much is tokenized at once.
    """

    def __init__(
        self,
        service: Service,
        codec: TextCodec,
        metrics: Metrics,
        *,
        max_body_bytes: int,
        timeouts: Timeouts,
        random_seed: Callable[[], int] = _random_seed,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._codec = codec
        self._metrics = metrics
        self.max_body_bytes = max_body_bytes
        self._timeouts = timeouts
        self._random_seed = random_seed
        self._wall_clock = wall_clock
        self._started = int(wall_clock())
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    async def close(self, _app: web.Application) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def models(self, _request: web.Request) -> web.Response:
        self._refuse_unready()
        model = Model(
            self._service.model_name,
            self._started,
            self._service.context_tokens,
            self._service.vocabulary,
        )
        return web.Response(
            body=msgspec.json.encode(ModelList((model,))), content_type="application/json"
        )

    async def completions(self, http: web.Request) -> web.StreamResponse:
        began_s = self._metrics.clock()
        body, sizes = await self._begin(http)
        asked = read_completion(body, sizes)
        self._check_common(asked.common, "completions")
        prompt, text = asked.prompt, None
        if isinstance(prompt, str):
            text = prompt
            encode = partial(self._codec.encode, text)
            prompt = await self._tokenize(encode, len(text), "prompt", sizes)
        max_tokens = fit(len(prompt), asked.common, default=COMPLETION_MAX_TOKENS, sizes=sizes)
        request = self._request(http, asked.common, prompt, max_tokens)
        echo = None
        if asked.echo:
            echo = Echo.of(prompt, self._codec, text=text, alone=max_tokens == 0)
            # Scores come with the first token, so one is generated even where none is shown.
            scored = asked.common.logprobs is not None
            request = replace(request, max_tokens=max(max_tokens, 1), score_prompt=scored)
        form = CompletionForm(self._heading(asked.common), self._codec)
        return await self._answer(http, asked.common, request, form, began_s, echo)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        began_s = self._metrics.clock()
        body, sizes = await self._begin(http)
        asked = read_chat(body, sizes)
        self._check_common(asked.common, "chat")
        encode = partial(self._codec.encode_chat, asked.messages)
        characters = sum(len(message["content"]) for message in asked.messages)
        prompt = await self._tokenize(encode, characters, "messages", sizes)
        max_tokens = fit(len(prompt), asked.common, default=None, sizes=sizes)
        request = self._request(http, asked.common, prompt, max_tokens)
        form = ChatForm(self._heading(asked.common), self._codec)
        return await self._answer(http, asked.common, request, form, began_s)

    async def _begin(self, http: web.Request) -> tuple[dict[str, object], Sizes]:
        """Body, and what the request must fit; refuses what this node cannot do now anyway."""
        service = self._service
        if not service.may_generate():
            raise NotFound(
                f"this node has the role {service.role()} and generates nothing; "
                "send requests to a decode or colocated node",
                code="wrong_role",
            )
        self._refuse_unready()
        body = await read_object(http, max_bytes=self.max_body_bytes, read_s=self._timeouts.body_s)
        return body, Sizes(service.vocabulary, service.context_tokens, service.capacity_tokens)

    def _refuse_unready(self) -> None:
        # Also because the sizes are unknown while the model loads.
        if reasons := self._service.not_ready():
            raise Unavailable("; ".join(reasons))

    def _check_common(self, asked: GenerationFields, route: str) -> None:
        served = self._service.model_name
        if asked.model != served:
            raise NotFound(
                f"model: {asked.model[:128]!r} is not served here; allowed: {served!r}", "model"
            )
        self._metrics.unknown_fields(route, asked.unknown)

    async def _tokenize(
        self,
        encode: Callable[[], Sequence[int]],
        characters: int,
        param: str,
        sizes: Sizes,
    ) -> tuple[int, ...]:
        """Token ids of a text of `characters`, checked. Raises errors.BadRequest."""
        limit = sizes.context_tokens * MAX_CHARACTERS_PER_TOKEN
        if characters > limit:
            raise BadRequest(
                f"{param}: {characters} characters; at most {limit} are read for a context of "
                f"{sizes.context_tokens} tokens",
                param,
                "context_length_exceeded",
            )
        if characters <= MAX_INLINE_CHARACTERS:
            ids = encode()
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._tokenizing, encode)
        if not ids:
            raise BadRequest(f"{param}: it has no token; at least 1 is needed", param)
        check_length(len(ids), param, sizes)
        return check_token_ids(list(ids), param, sizes.vocabulary)

    def _heading(self, asked: GenerationFields) -> Heading:
        return Heading(
            answer_id=secrets.token_hex(12),
            model=self._service.model_name,
            created=int(self._wall_clock()),
            token_ids=asked.return_token_ids,
            logprobs=asked.logprobs is not None,
        )

    def _request(
        self,
        http: web.Request,
        asked: GenerationFields,
        prompt: tuple[int, ...],
        max_tokens: int,
    ) -> Request:
        ends = frozenset() if asked.ignore_eos else self._codec.end_tokens
        seed = self._random_seed() if asked.seed is None else asked.seed
        return Request(
            # Two clients may send one id; what is logged and passed on must be unique.
            request_id=f"{request_id(http)}-{secrets.token_hex(4)}",
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            stop_tokens=ends | asked.stop_token_ids,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=seed & _SEED_MASK,
            logprobs=asked.logprobs or 0,
            logit_bias=asked.sampling.logit_bias,
            presence_penalty=asked.sampling.presence_penalty,
            frequency_penalty=asked.sampling.frequency_penalty,
            repetition_penalty=asked.sampling.repetition_penalty,
            traceparent=checked_traceparent(http.headers.get("traceparent", "")),
        )

    async def _answer(
        self,
        http: web.Request,
        asked: GenerationFields,
        request: Request,
        form: Form,
        began_s: float,
        echo: Echo | None = None,
    ) -> web.StreamResponse:
        """`began_s`: on the clock of the metrics. One generation per choice, seeds in a row."""
        stream = StreamOptions(
            prompt_tokens=len(request.prompt),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
        )
        choices = tuple(
            Choice(
                request=request if number == 0 else _another(request, number),
                assembler=Assembler(
                    self._codec, asked.stop, asked.min_tokens, echo=echo, choice=number
                ),
                meter=self._metrics.request(began_s),
            )
            for number in range(asked.sampling.n)
        )
        work = Work(choices=choices, form=form, stream=stream if asked.stream else None)
        return await answer(http, self._service, work, write_s=self._timeouts.write_s)


def _another(request: Request, number: int) -> Request:
    """The same for another choice: with an id and a seed of its own."""
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        seed=(request.seed + number) & _SEED_MASK,
    )
