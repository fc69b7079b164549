"""The transfer runs while the prefill still computes, as the core's per-layer record shows."""

import sys
from itertools import groupby
from pathlib import Path

import pytest

from pdnode.obs.records import LayerTimes, TransferRecord
from tests.support.model import smollm2_dir
from tests.support.nodes import NodeSpec, clients, nodes, transfers
from tests.support.reference import load_reference

PROMPT_TOKENS = 2000  # 1,999 of them are sent

pytestmark = pytest.mark.timeout(300)


async def moved(folder: Path, chunk_tokens: int) -> TransferRecord:
    """The record of one long prompt that went from a prefill to a decode node."""
    model = smollm2_dir()
    text = load_reference().grid[1541].prompt
    prompt = (text + text)[:PROMPT_TOKENS]
    prefill = NodeSpec("pf", "prefill", model, folder, engine={"chunk_tokens": chunk_tokens})
    decode = NodeSpec("dc", "decode", model, folder, (prefill,))
    with nodes(prefill, decode) as running:
        async with clients(prefill, decode) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
            await found[1].complete(prompt, 1)
            for client in found:
                await client.wait_no_pages()
            (record,) = await transfers(prefill)
    return record


def by_chunk(record: TransferRecord) -> list[list[LayerTimes]]:
    """Layers of every chunk, in order."""
    ordered = sorted(record.layers, key=lambda row: (row.chunk, row.layer))
    return [list(rows) for _, rows in groupby(ordered, key=lambda row: row.chunk)]


def hidden_ratio(layers: list[LayerTimes]) -> float:
    """Share of a chunk's bytes that were acknowledged before its last layer was raised."""
    last_raise_ns = max(row.raised_ns for row in layers)
    done = sum(row.bytes for row in layers if row.done_ns < last_raise_ns)
    return done / sum(row.bytes for row in layers)


def show(record: TransferRecord) -> str:
    """Figures of each chunk, for the report of the run."""
    lines = []
    for layers in by_chunk(record):
        first, last = layers[0], layers[-1]
        span_ms = (last.raised_ns - first.raised_ns) / 1e6
        tail_ms = (max(row.done_ns for row in layers) - last.raised_ns) / 1e6
        delay_us = max(row.posted_ns - row.raised_ns for row in layers) / 1e3
        lines.append(
            f"chunk {first.chunk}: {hidden_ratio(layers):.1%} of "
            f"{sum(row.bytes for row in layers) / 1e6:.1f} MB before the last raise, "
            f"raises over {span_ms:.1f} ms, done {tail_ms:.2f} ms after the last, "
            f"post at most {delay_us:.0f} us after a raise"
        )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("chunk_tokens", "least"), [(2048, 0.90), (512, 0.85)])
async def test_pages_move_while_the_pass_runs(
    tmp_path: Path, chunk_tokens: int, least: float
) -> None:
    record = await moved(tmp_path, chunk_tokens)
    sys.stdout.write(show(record))
    assert record.outcome == "drained"
    chunks = by_chunk(record)
    assert len(chunks) == -(-(PROMPT_TOKENS - 1) // chunk_tokens)
    for layers in chunks:
        assert [row.layer for row in layers] == list(range(30))
        raised = [row.raised_ns for row in layers]
        assert raised == sorted(raised)
        assert layers[0].posted_ns < layers[-1].raised_ns
        assert all(row.raised_ns <= row.posted_ns <= row.done_ns for row in layers)
    assert hidden_ratio(chunks[-1]) >= least
