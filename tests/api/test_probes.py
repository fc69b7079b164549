"""Probes: liveness, readiness, models, version."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from pdnode.obs.snapshot import Warning
from tests.support.fake_service import CONTEXT, VOCABULARY, Bench, serve


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serve() as served:
        yield served


async def test_liveness_does_not_depend_on_readiness(bench: Bench) -> None:
    """A draining node is alive, or its supervisor would kill it."""
    bench.service.reasons = ["draining"]
    assert (await bench.get("/health"))[::2] == (200, '{"status":"alive"}')
    bench.service.is_alive = False
    assert (await bench.get("/health"))[0] == 503


async def test_readiness_lists_the_warnings(bench: Bench) -> None:
    assert (await bench.get("/readyz"))[::2] == (200, "[]")
    bench.service.minor = [
        Warning(code="W202", severity="warning", text="pf-2: lost", since_s=2.5, subjects=("pf-2",))
    ]
    minor = {
        "code": "W202",
        "severity": "warning",
        "text": "pf-2: lost",
        "since_s": 2.5,
        "affects_readiness": False,
        "subjects": ["pf-2"],
    }
    status, _, text = await bench.get("/readyz")
    assert status == 200
    assert msgspec.json.decode(text) == [minor]
    bench.service.reasons = ["loading the model"]
    status, headers, text = await bench.get("/readyz")
    assert status == 503
    assert headers["Content-Type"].startswith("application/json")
    assert [one["text"] for one in msgspec.json.decode(text)] == ["loading the model", "pf-2: lost"]


async def test_models_only_when_loaded(bench: Bench) -> None:
    bench.service.reasons = ["loading the model"]
    status, headers, text = await bench.get("/v1/models")
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert msgspec.json.decode(text)["error"]["message"] == "loading the model"
    bench.service.reasons = []
    status, _, text = await bench.get("/v1/models")
    assert status == 200
    answer = msgspec.json.decode(text)
    assert answer["object"] == "list"
    [model] = answer["data"]
    assert model.pop("created") > 1_700_000_000
    assert model == {
        "id": "tiny",
        "object": "model",
        "owned_by": "pdnode",
        "max_model_len": CONTEXT,
        "vocabulary": VOCABULARY,
    }


async def test_generation_is_refused_while_not_ready(bench: Bench) -> None:
    bench.service.reasons = ["loading the model", "draining"]
    status, headers, answer = await bench.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert isinstance(answer, dict)
    assert answer["error"]["message"] == "loading the model; draining"
    assert answer["error"]["code"] == "unavailable"
    assert bench.service.requests == []


async def test_version(bench: Bench) -> None:
    _, headers, text = await bench.get("/version")
    assert msgspec.json.decode(text) == {"version": "0.1.0", "role": "decode", "model": "tiny"}
    assert headers["Server"] == "pdnode"
    assert len(headers["x-request-id"]) == 32


async def test_head_requests(bench: Bench) -> None:
    async with bench.client.head(bench.url + "/health") as response:
        assert response.status == 200
        assert await response.read() == b""
