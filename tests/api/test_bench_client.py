"""The load generator against the real listener: what it counts as an answer, and what as none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from pdnode.bench.options import Options
from pdnode.bench.serve import BenchError, LoadRun
from pdnode.errors import PrefillLost, QueueFull
from tests.support.fake_service import VOCABULARY, Bench, serve, tokens

TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def options(url: str, **fields: object) -> Options:
    plain: dict[str, object] = {
        "url": url, "compare": None, "streams": 2, "rate": 0.0, "requests": 5, "duration_s": 60.0,
        "timeout_s": 30.0, "prompt_tokens": 7, "output_tokens": 2, "background_streams": 0,
        "background_prompt_tokens": 3, "background_output_tokens": 2, "idle_s": 0.0, "rounds": 1,
        "seed": 5, "model": None, "vocabulary": None,
    }  # fmt: skip
    return Options(**(plain | fields))  # type: ignore[arg-type]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serve() as served:
        yield served


async def test_prompts_have_the_length_asked_for_and_repeat_with_the_seed(bench: Bench) -> None:
    for seed in (5, 5, 6):
        (figures,) = await LoadRun(options(bench.url, seed=seed)).run()
        assert (figures.completed, figures.errors, figures.model) == (5, {}, "tiny")
    prompts = [request.prompt for request in bench.service.requests]
    assert {len(prompt) for prompt in prompts} == {7}
    assert all(0 <= token < VOCABULARY for prompt in prompts for token in prompt)
    assert sorted(prompts[:5]) == sorted(prompts[5:10])
    assert len(set(prompts)) == 10
    first = bench.service.requests[0]
    assert (first.max_tokens, first.stop_tokens, first.temperature) == (2, frozenset(), 0.0)


async def test_never_more_streams_than_asked_for(bench: Bench) -> None:
    held = asyncio.Event()
    bench.service.script = [held, *tokens("hi")]
    run = asyncio.ensure_future(LoadRun(options(bench.url, streams=3)).run())
    async with asyncio.timeout(10):
        while len(bench.service.generations) < 3:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    assert len(bench.service.generations) == 3
    held.set()
    (figures,) = await run
    assert figures.completed == 5


async def test_an_open_loop_sends_without_waiting_for_answers(bench: Bench) -> None:
    """All five are under way at once; beyond `streams` an arrival is counted and not sent."""
    held = asyncio.Event()
    bench.service.script = [held, *tokens("hi")]
    for streams, sent in ((256, 5), (3, 3)):
        held.clear()
        before = len(bench.service.generations)
        done: list[int] = []
        asked = options(bench.url, rate=1000.0, streams=streams)
        run = asyncio.ensure_future(LoadRun(asked, done.append).run())
        async with asyncio.timeout(10):
            while len(bench.service.generations) - before < sent or len(done) < 5 - sent:
                await asyncio.sleep(0.001)
        held.set()
        (figures,) = await run
        assert figures.completed == sent
        assert figures.errors == ({} if sent == 5 else {"not_sent": 2})
        assert done[-1] == 5


async def test_refusals_and_broken_streams_are_counted_by_kind(bench: Bench) -> None:
    bench.service.refusal = QueueFull("full")
    (figures,) = await LoadRun(options(bench.url)).run()
    assert (figures.completed, figures.errors) == (0, {"http_429": 5})
    assert figures.ttft_s is None
    bench.service.refusal = None
    bench.service.script = [*tokens("a", None), PrefillLost("gone")]
    (figures,) = await LoadRun(options(bench.url)).run()
    assert figures.errors == {"stream_prefill_lost": 5}
    bench.service.script = tokens("abc")
    (figures,) = await LoadRun(options(bench.url)).run()
    assert figures.errors == {"wrong_length": 5}


async def test_it_stops_by_itself(bench: Bench) -> None:
    bench.service.script = [asyncio.Event()]
    (figures,) = await LoadRun(options(bench.url, requests=2, timeout_s=0.2)).run()
    assert figures.errors == {"timeout": 2}
    bench.service.script = tokens("hi")
    run = LoadRun(options(bench.url, requests=100_000, duration_s=1.0))
    (figures,) = await asyncio.wait_for(run.run(), 30)
    assert 0 < figures.completed == figures.requests < 100_000


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (TOKEN + LAST + USAGE + DONE, None),
        (b": comment\n\n" + TOKEN + LAST + USAGE + DONE, None),
        (TOKEN + LAST + USAGE, "stream_cut"),
        (TOKEN + LAST[:-1], "stream_cut"),
        (b"", "stream_cut"),
        (TOKEN + TOKEN + USAGE + DONE, "wrong_length"),
        (LAST + USAGE + DONE, "wrong_length"),
        (TOKEN + LAST + DONE, "wrong_usage"),
        (TOKEN + LAST + USAGE.replace(b"2", b"3") + DONE, "wrong_usage"),
        (TOKEN + LAST + TOKEN + DONE, "malformed"),
        (b"event: x\n\n" + TOKEN + LAST + USAGE + DONE, "malformed"),
        (b"data: {\n\n", "malformed"),
        (b"data: " + b"x" * (1 << 20), "malformed"),
        (b'data: {"error":{"message":"m","code":null}}\n\n', "stream_error"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
async def test_streams_are_read_strictly(answer: bytes, kind: str | None) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "vocabulary": 9}]})

    async def completions(_: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        (figures,) = await LoadRun(options(f"http://{host}:{port}", requests=1)).run()
        assert figures.errors == ({} if kind is None else {kind: 1})
    finally:
        await runner.cleanup()


async def test_what_cannot_start_says_why(bench: Bench) -> None:
    for fields, words in (
        ({"prompt_tokens": 127}, "129 tokens of prompt and output, and tiny takes 128"),
        ({"model": "gpt"}, r"--model: 'gpt' is not served; allowed: \['tiny'\]"),
        ({"background_streams": 1, "background_output_tokens": 126}, "129 tokens"),
    ):
        with pytest.raises(BenchError, match=words):
            await LoadRun(options(bench.url, **fields)).run()
    bench.service.reasons = ["loading"]
    with pytest.raises(BenchError, match="/v1/models answers 503"):
        await LoadRun(options(bench.url)).run()
    await bench.listener.stop()
    with pytest.raises(BenchError, match="not reachable"):
        await LoadRun(options(bench.url)).run()


async def test_background_streams_that_fail_end_the_run(bench: Bench) -> None:
    bench.service.script = [*tokens("a", None), PrefillLost("gone")]
    with pytest.raises(BenchError, match="background stream ended: stream_prefill_lost"):
        await LoadRun(options(bench.url, background_streams=2, idle_s=0.05)).run()


async def test_two_targets_take_turns() -> None:
    order: list[str] = []
    async with serve() as first, serve() as second:
        for name, one in (("a", first), ("b", second)):
            plain = one.service.submit

            async def submit(request, name=name, plain=plain):  # noqa: ANN001, ANN202
                order.append(name)
                return await plain(request)

            one.service.submit = submit  # type: ignore[method-assign]
        asked = options(first.url, compare=second.url, requests=6, rounds=3, streams=1)
        figures = await LoadRun(asked).run()
        assert "".join(order) == "aabb" + "bbaa" + "aabb"
        assert [one.completed for one in figures] == [6, 6]
        prompts = [[request.prompt for request in one.service.requests] for one in (first, second)]
        assert prompts[0] == prompts[1]


async def test_the_key_of_a_file_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of this test\nsk-0123456789abcdef\n")
    path.chmod(0o600)
    async with serve(keys=(b"sk-0123456789abcdef",)) as guarded:
        (figures,) = await LoadRun(options(guarded.url, api_key_file=str(path))).run()
        assert (figures.completed, figures.errors) == (5, {})
        with pytest.raises(BenchError, match="answers 401"):
            await LoadRun(options(guarded.url)).run()
