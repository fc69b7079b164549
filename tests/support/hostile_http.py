"""HTTP requests that a client might send by mistake or on purpose, drawn from a seed."""

import json
import random
from typing import NamedTuple

STRANGE: tuple[object, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, -0.5, float("nan"), float("inf"),
    "", "x", "\x00\x1b[31m", "ü" * 300, "x" * 70_000, "\ud800", [], [[]], [0] * 3000, [None], {},
    {"a": {}}, [{"role": "user"}], [5, 6, 7], ["a", "b"], {"type": "json_object"},
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n",
    "best_of", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs",
    "top_logprobs", "echo", "stream", "stream_options", "return_token_ids", "tools", "suffix",
    "response_format", "priority", "unheard_of",
)  # fmt: skip
EDGES: dict[str, tuple[object, ...]] = {
    "prompt": ([5], [5] * 300, [6, 5] * 40, "x" * 400, "\u0000\u20ac" * 20),
    "temperature": (0, 5e-324, 1e-300, 1e-38, 1e-7, 2),
    "top_p": (5e-324, 1e-38, 1e-7, 1 - 2**-53, 1),
    "top_k": (-1, 0, 1, 2**31),
    "seed": (-(2**63), 0, 2**63 - 1),
    "repetition_penalty": (5e-324, 1e-300, 1e-38, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logit_bias": ({"5": 100, "6": -100}, {str(token): -100 for token in range(1024)}),
    "n": (1, 8),
    "max_tokens": (1, 40),
    "min_tokens": (0, 1),
    "logprobs": (0, 20),
    "echo": (False, True),
    "stop": ("\u0000", ["a", "b", "c", "d"], "\U0001f600" * 256),
    "stop_token_ids": ([], list(range(64))),
    "ignore_eos": (True,),
    "stream": (True,),
    "return_token_ids": (True,),
}
"""What /v1/completions takes, up to the ends of what is allowed."""
PATHS = (
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/readyz", "/metrics",
    "/version", "/peer/v1/link", "/admin/v1/snapshot", "/admin/v1/transfers", "/admin/v1/requests",
    "/admin/v1/config", "/admin/v1/log-level", "/admin/v1/cancel", "/admin/v1/nothing", "/", "*",
    "//", "/v1/../admin/v1/drain", "/%00", "/%ff%fe", "/" + "a" * 9000, "http://other/health",
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "BREW", "get", "")
HEADERS = (
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5\r\nContent-"
    "Length: 6", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked, identity",
    "Content-Encoding: gzip", "Content-Encoding: br", "Content-Type: text/plain",
    "Content-Type: application/json; charset=utf-16", "Content-Type: \x00", "Expect: 100-continue",
    "Expect: more", "Upgrade: websocket\r\nConnection: Upgrade", "Sec-WebSocket-Key: x",
    "x-request-id: " + "i" * 500, "x-request-id: \x1b[31m", "traceparent: 00-0-0-0",
    "Idempotency-Key: " + "k" * 300, "Idempotency-Key: \xe4", "Last-Event-ID: nothing",
    "Range: bytes=0-", "X-Long: " + "y" * 9000, "no colon", ": no name", "Host: [::1",
)  # fmt: skip
ACTIONS = ("drain", "undrain", "cancel", "reload", "log-level")


class HostileRequest(NamedTuple):
    data: bytes
    whole: bool  # it asks for an answer, so there must be one


class HostileRequests:
    """`generation`: for a listener with the OpenAI routes. `actions`: for an admin socket."""

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)

    def generation(self) -> HostileRequest:
        chance = self._draw.random()
        if chance < 0.2:
            return self._json("/v1/completions", self._at_the_edges(self._generation_body()))
        if chance < 0.55:
            return self._json(self._route(), self._bent(self._generation_body()))
        if chance < 0.7:
            return self._raw_body()
        return self._odd() if chance < 0.85 else self._damaged()

    def actions(self) -> HostileRequest:
        """Nothing that the node would do: it is not to drain."""
        draw = self._draw
        if draw.random() < 0.4:
            body = draw.choice(
                (
                    {"unknown": draw.choice(STRANGE)}, {"request_id": draw.choice(STRANGE), "x": 1},
                    {"level": draw.choice(STRANGE), "level2": 1}, [], 5, "drain",
                )
            )  # fmt: skip
            return self._json(f"/admin/v1/{draw.choice(ACTIONS)}", body)
        if draw.random() < 0.3:
            return self._json("/admin/v1/cancel", {"request_id": "no such request"})
        return self._odd() if draw.random() < 0.5 else self._damaged()

    def _route(self) -> str:
        return self._draw.choice(("/v1/completions", "/v1/chat/completions"))

    def _generation_body(self) -> dict[str, object]:
        return {
            "model": "test-model",
            "prompt": [5, 6, 7],
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 2,
            "temperature": 0,
        }

    def _bent(self, body: dict[str, object]) -> dict[str, object]:
        for _ in range(self._draw.randrange(1, 4)):
            body[self._draw.choice(FIELDS)] = self._draw.choice(STRANGE)
        return body

    def _at_the_edges(self, body: dict[str, object]) -> dict[str, object]:
        del body["messages"]
        for name in self._draw.sample(list(EDGES), self._draw.randrange(1, 9)):
            body[name] = self._draw.choice(EDGES[name])
        return body

    def _json(self, path: str, body: object) -> HostileRequest:
        data = json.dumps(body, ensure_ascii=True).encode()
        return HostileRequest(_request("POST", path, data), whole=True)

    def _raw_body(self) -> HostileRequest:
        """A body that is no JSON object, or has another length than it says."""
        draw = self._draw
        good = json.dumps(self._generation_body()).encode()
        body = draw.choice(
            (
                b"", b"{", b"[" * 100_000, b'{"a":' * 20_000, b"\xff\xfe{}", b"null", b"{}" * 2,
                draw.randbytes(300), good[: draw.randrange(len(good))], good + b"}",
                good.replace(b"2", b"2" * 5000), b"\xef\xbb\xbf" + good,
            )
        )  # fmt: skip
        length = len(body) + draw.choice((0, 0, 0, -1, 7))
        data = _request("POST", self._route(), body, length=max(0, length))
        return HostileRequest(data, whole=length <= len(body))

    def _odd(self) -> HostileRequest:
        """Any method, path and header."""
        draw = self._draw
        headers = "".join(f"{draw.choice(HEADERS)}\r\n" for _ in range(draw.randrange(3)))
        method, path = draw.choice(METHODS), draw.choice(PATHS)
        query = draw.choice(("", "?cursor=-1", "?cursor=" + "9" * 300, "?%", "?a=b&a=c"))
        head = f"{method} {path}{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"
        return HostileRequest(head.encode("latin-1"), whole=False)

    def _damaged(self) -> HostileRequest:
        """Bytes of a request: some changed, lost, or of no request at all."""
        draw = self._draw
        data = bytearray(_request("POST", self._route(), b'{"model": "test-model"}'))
        match draw.randrange(4):
            case 0:
                for _ in range(draw.randrange(1, 8)):
                    data[draw.randrange(len(data))] = draw.randrange(256)
            case 1:
                del data[draw.randrange(len(data)) :]
            case 2:
                place = draw.randrange(len(data))
                data[place:place] = draw.randbytes(draw.randrange(1, 64))
            case _:
                data = bytearray(draw.randbytes(draw.randrange(1, 300)))
        return HostileRequest(bytes(data), whole=False)


def _request(method: str, path: str, body: bytes, *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
