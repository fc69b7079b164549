"""`pdnode demo`: a prefill and a decode node on loopback, one question through both, its phases."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdnode.errors import Exit, PdnodeError
from pdnode.localnodes import LocalNode, NodeFailed, free_ports, serve_node, wait_ready
from pdnode.obs.records import RequestRecord, TransferRecord

Record = TypeVar("Record", RequestRecord, TransferRecord)
MODEL_NAME = "demo"


class DemoFailed(PdnodeError):
    """The answer did not come."""


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints. Durations in ms, sizes in bytes."""

    prompt: str
    answer: str
    prefill: str
    prompt_tokens: int
    output_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_wait_ms: float
    first_step_ms: float
    token_ms: float
    ttft_ms: float
    kv_bytes: int
    writes: int
    pages_per_write: float


def run(*, model: Path, prompt: str, max_tokens: int, as_json: bool) -> int:
    """Answer `prompt` through both nodes, print the phases. `model`: a Hugging Face directory."""
    talk = Console(stderr=True)
    try:
        report = asyncio.run(_demo(model, prompt, max_tokens, talk, stream=not as_json))
    except (DemoFailed, NodeFailed) as error:
        talk.print(f"pdnode demo: {error}", style="red", markup=False, highlight=False)
        return Exit.UNAVAILABLE
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print(report)
    return Exit.OK


async def _demo(
    model: Path, prompt: str, max_tokens: int, talk: Console, *, stream: bool
) -> Report:
    with tempfile.TemporaryDirectory(prefix="pdnode-demo-") as directory:
        folder = Path(directory)
        async with contextlib.AsyncExitStack() as stack:
            with Progress(console=talk, transient=True) as bar:
                task = bar.add_task("starting a prefill and a decode node", total=1.0)
                nodes, url = await _start(folder, model, stack)
                await wait_ready(
                    url,
                    nodes,
                    lambda ratio, what: bar.update(task, completed=ratio, description=what),
                )
            async with aiohttp.ClientSession() as session:
                answer = await _ask(session, url, prompt, max_tokens, stream=stream)
            request = await _last(folder / "decode.sock", "requests", RequestRecord)
            transfer = await _last(folder / "prefill.sock", "transfers", TransferRecord)
    return _report(prompt, answer, request, transfer)


async def _start(
    folder: Path, model: Path, stack: contextlib.AsyncExitStack
) -> tuple[list[LocalNode], str]:
    api, peer, prefill_api, fabric = free_ports(4)
    common = f"""config_version = 1
[model]
path = "{model}"
name = "{MODEL_NAME}"
[engine]
threads = 1
[kv]
pool_bytes = "512MiB"
"""
    texts = {
        "prefill": f"""{common}
[node]
id = "demo-prefill"
role = "prefill"
admin_socket = "{folder / "prefill.sock"}"
[api]
listen = "127.0.0.1:{prefill_api}"
[peer]
listen = "127.0.0.1:{peer}"
[fabric]
provider = "tcp"
port = {fabric}
""",
        "decode": f"""{common}
[node]
id = "demo-decode"
role = "decode"
when_no_prefill = "refuse"
admin_socket = "{folder / "decode.sock"}"
[api]
listen = "127.0.0.1:{api}"
[fabric]
provider = "tcp"
[[prefill]]
name = "demo-prefill"
address = "127.0.0.1:{peer}"
""",
    }
    nodes = [
        await stack.enter_async_context(serve_node(name, text, folder))
        for name, text in texts.items()
    ]
    return nodes, f"http://127.0.0.1:{api}"


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: str, max_tokens: int, *, stream: bool
) -> str:
    """The answer to one chat request at temperature 0, streamed to stdout if `stream`."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    parts: list[str] = []
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise DemoFailed(f"HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            event = msgspec.json.decode(data)
            if "error" in event:
                raise DemoFailed(event["error"]["message"])
            for choice in event["choices"]:
                parts.append(choice["delta"].get("content") or "")
                if stream:
                    sys.stdout.write(parts[-1])
                    sys.stdout.flush()
    if stream:
        sys.stdout.write("\n")
    return "".join(parts)


async def _last(admin: Path, what: str, kind: type[Record]) -> Record:
    """The newest record of a node; waits for it, since it is written after the last token."""
    connector = aiohttp.UnixConnector(str(admin))
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(100):
            async with session.get(f"http://pdnode/admin/v1/{what}") as answer:
                found = msgspec.json.decode(await answer.read(), type=list[kind])  # type: ignore[valid-type]
            if found:
                return found[-1]
            await asyncio.sleep(0.05)
    raise DemoFailed(f"no record of the request among the {what}")


def _report(prompt: str, answer: str, request: RequestRecord, transfer: TransferRecord) -> Report:
    layers = 1 + max((row.layer for row in transfer.layers), default=0)
    further = max(1, request.output_tokens - 1)
    return Report(
        prompt=prompt,
        answer=answer,
        prefill=request.prefill,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        queue_ms=1e3 * (request.admit_s + request.prefill_queue_s),
        prefill_ms=1e3 * request.prefill_s,
        transfer_wait_ms=1e3 * request.transfer_wait_s,
        first_step_ms=1e3 * request.first_step_s,
        token_ms=1e3 * request.decode_s / further,
        ttft_ms=1e3 * request.ttft_s,
        kv_bytes=transfer.bytes,
        writes=transfer.writes,
        pages_per_write=transfer.pages * layers / transfer.writes if transfer.writes else 0.0,
    )


def _print(report: Report) -> None:
    table = Table(title=f"{report.prompt_tokens} prompt tokens through {report.prefill}")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    for name, value in (
        ("queue", report.queue_ms),
        ("prefill", report.prefill_ms),
        ("transfer not hidden by compute", report.transfer_wait_ms),
        ("first decode step", report.first_step_ms),
        ("time to first token", report.ttft_ms),
        (f"each further token ({report.output_tokens - 1})", report.token_ms),
    ):
        table.add_row(name, f"{value:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"KV moved {report.kv_bytes / 1e6:.2f} MB in {report.writes} writes, "
        f"{report.pages_per_write:.1f} pages a write",
        highlight=False,
    )
