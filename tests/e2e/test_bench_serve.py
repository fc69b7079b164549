"""`pdnode bench serve` as a process, against two real nodes."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from pdnode.errors import Exit
from pdnode.localnodes import free_ports
from tests.support.nodes import NodeSpec, clients, nodes


async def bench(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdnode", "bench", "serve", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.timeout(400)
async def test_two_nodes_are_measured_in_turns(tiny_model: Path, tmp_path: Path) -> None:
    engine, peer = {"chunk_tokens": 64}, {"link_lost_s": 60.0, "stall_s": 60.0}
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, engine=engine, peer=peer)
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,), engine=engine, peer=peer)
    colocated = NodeSpec("co", "colocated", tiny_model, tmp_path, engine=engine)
    specs = (prefill, decode, colocated)
    with nodes(*specs) as running:
        async with clients(*specs) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
            code, out, err = await bench(
                "--url", decode.url, "--compare", colocated.url, "--streams", "2",
                "--requests", "6", "--rounds", "2", "--prompt-tokens", "200",
                "--output-tokens", "8", "--background-streams", "2", "--idle", "1",
                "--background-output-tokens", "256", "--json",
            )  # fmt: skip
            assert code == 0, err
            report = json.loads(out)
            for target, spec in zip(report["targets"], (decode, colocated), strict=True):
                check_target(target, spec)
            wanted = {"ttft_s", "itl_s", "tpot_s", "e2e_s", "output_tokens_per_s"}
            assert report["ratios"].keys() == wanted
            assert all(0 < ratio < 1000 for ratio in report["ratios"].values())
            metrics = await found[1].metrics()
            prompts = metrics['vllm:prompt_tokens_total{engine="0",model_name="test-model"}']
            assert (prompts - 6 * 200) % 32 == 0  # the rest is the background streams'
            code, out, err = await bench(
                "--url", decode.url, "--rate", "50", "--requests", "5", "--output-tokens", "2",
                "--prompt-tokens", "20",
            )  # fmt: skip
            assert code == 0, err
            assert "requests 5, completed 5, errors: none" in out
            assert "open loop, 50 requests/s" in out
            for client in found:
                await client.wait_no_pages()


def check_target(target: dict, spec: NodeSpec) -> None:
    assert (target["url"], target["model"]) == (spec.url, "test-model")
    assert (target["requests"], target["completed"], target["errors"]) == (6, 6, {})
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        found = target[name]
        assert 0 <= found["p50"] <= found["p90"] <= found["p99"] <= found["max"]
    assert target["e2e_s"]["p50"] > target["ttft_s"]["p50"] > 0
    rate = 6 * 8 / target["active_s"]
    assert target["output_tokens_per_s"] == pytest.approx(rate)
    background = target["background"]
    assert background["streams"] == 2
    assert background["idle_gaps"] > 0
    assert background["loaded_gaps"] > 0


async def test_nobody_there_is_unavailable() -> None:
    (port,) = free_ports(1)
    code, out, err = await bench("--url", f"http://127.0.0.1:{port}")
    assert (code, out) == (Exit.UNAVAILABLE, "")
    assert "not reachable" in err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.timeout(300)
async def test_compare_alone_starts_its_own_nodes(tiny_model: Path) -> None:
    code, out, err = await bench(
        "--compare", "--model-path", str(tiny_model), "--cores", "2", "--rounds", "2",
        "--prompt-tokens", "300", "--requests", "1", "--background-streams", "2", "--idle", "0.5",
        "--chunk-tokens", "64", "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert (report["prompt_tokens"], report["rounds"], report["background_streams"]) == (300, 2, 2)
    whole, chunked, half, split = report["variants"]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert [one["cores"] for one in (whole, chunked, half, split)] == [
        f"{first},{second}", f"{first},{second}", f"{first}", f"{first} + {second}"
    ]  # fmt: skip
    assert report["ttft_minus_s"].keys() == {one["name"] for one in (whole, chunked, half)}
    for one in (whole, chunked, split):
        assert one["errors"] == {}
        assert one["slowdown"] == one["loaded_itl_s"]["p99"] / one["idle_itl_s"]["p99"]
        assert one["loaded_ttft_s"]["p50"] > 0
    assert half["idle_itl_s"] is None
    assert all(one["ttft_s"]["p50"] > 0 for one in report["variants"])
