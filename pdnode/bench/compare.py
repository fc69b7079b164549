"""`pdnode bench serve --compare`: one model served colocated, and split into prefill and decode.

The nodes are started here, on loopback, each pinned to its cores, and stay up; they take turns, and
the order turns from round to round. A turn is one long prompt alone (TTFT), then short streams:
alone for a while (ITL), then with long prompts beside them.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from pdnode.bench.busy import OthersMeter
from pdnode.bench.figures import Quantiles, quantiles
from pdnode.bench.options import Options
from pdnode.bench.serve import BenchError, LoadRun, Target
from pdnode.localnodes import LocalNode, NodeFailed, free_ports, serve_node, wait_ready

WHOLE_TOKENS = 1 << 20  # no prompt is cut
PREFILL_TOKENS = 512  # as by default: after each chunk the decode node hears that it goes on
REQUEST_STALL_S = 300.0  # a host that is busy otherwise makes it slow, not wrong
SPLIT = "prefill + decode"
WHOLE = "colocated, whole prompt"
CHUNKED = "colocated, chunked"
HALF = "colocated, half the cores"


class Variant(msgspec.Struct, frozen=True):
    """One way to serve. Latencies are None where it was not measured. `slowdown`: ITL p99 beside
    long prompts over that of the streams alone."""

    name: str
    cores: str
    chunk_tokens: int
    ttft_s: Quantiles | None
    idle_itl_s: Quantiles | None
    loaded_itl_s: Quantiles | None
    loaded_ttft_s: Quantiles | None
    slowdown: float | None
    errors: dict[str, int]


class Comparison(msgspec.Struct, frozen=True):
    """`ttft_minus_s`: TTFT of prefill + decode minus that of the other, median of the rounds."""

    prompt_tokens: int
    background_streams: int
    rounds: int
    dtype: str
    variants: list[Variant]
    ttft_minus_s: dict[str, float]
    load_average: float  # before the first turn
    others_ratio: float  # of the cores' time that other processes took meanwhile


@dataclass(frozen=True, slots=True)
class Setting:
    """What is not in Options. `chunk_tokens`: of the chunked colocated node."""

    model_path: Path
    cores: Sequence[int]  # an even number: the first half is prefill's
    chunk_tokens: int
    dtype: str


@dataclass(slots=True)
class _Served:
    """One variant while it is measured."""

    name: str
    cores: str
    chunk_tokens: int
    url: str
    nodes: list[LocalNode]
    itl: bool  # whether that is measured as well
    ttft_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    loaded_ttft_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def variant(self) -> Variant:
        idle, loaded = quantiles(self.idle_s), quantiles(self.loaded_s)
        return Variant(
            name=self.name,
            cores=self.cores,
            chunk_tokens=self.chunk_tokens,
            ttft_s=quantiles(self.ttft_s),
            idle_itl_s=idle,
            loaded_itl_s=loaded,
            loaded_ttft_s=quantiles(self.loaded_ttft_s),
            slowdown=loaded.p99 / idle.p99 if idle and loaded and idle.p99 > 0 else None,
            errors=dict(self.errors),
        )


def cores_for(count: int | None) -> list[int]:
    """`count` cores of this process, else all, or one less if that is odd. ValueError."""
    there = sorted(os.sched_getaffinity(0))
    taken = len(there) // 2 * 2 if count is None else count
    if taken < 2 or taken % 2 or taken > len(there):
        raise ValueError(f"--cores: {taken} of {len(there)}; allowed: an even number from 2 on")
    return there[:taken]


async def compare(
    options: Options, setting: Setting, show: Callable[[float, str], None]
) -> Comparison:
    """At most `options.rounds` rounds; none but the first begins after `options.duration_s`.

    BenchError where a node does not start or a run cannot go on. SIGTERM stops the nodes as well.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        with tempfile.TemporaryDirectory(prefix="pdnode-compare-") as folder:
            async with contextlib.AsyncExitStack() as stack:
                served = await _start(setting, Path(folder), stack, show)
                return await _rounds(options, setting, served, show)
    except NodeFailed as error:
        raise BenchError(str(error)) from error


async def _rounds(
    options: Options,
    setting: Setting,
    served: list[_Served],
    show: Callable[[float, str], None],
) -> Comparison:
    load_average = os.getloadavg()[0]
    pids = [node.process.pid for one in served for node in one.nodes]
    others = OthersMeter(pids, setting.cores)
    until = time.monotonic() + options.duration_s
    for one in served:
        await _prompt(options, one, number=options.rounds)  # the first one touches all memory
        one.ttft_s.clear()
    rounds = 0
    while rounds < options.rounds and (rounds == 0 or time.monotonic() < until):
        number, rounds = rounds, rounds + 1
        turned = served[number % len(served) :] + served[: number % len(served)]
        for place, one in enumerate(turned):
            show((number + place / len(served)) / options.rounds, one.name)
            await _prompt(options, one, number=number)
            if one.itl:
                await _streams(options, one, number=number)
    show(1.0, "done")
    split = next(one for one in served if one.name == SPLIT)
    return Comparison(
        prompt_tokens=options.prompt_tokens,
        background_streams=options.background_streams,
        rounds=rounds,
        dtype=setting.dtype,
        variants=[one.variant() for one in served],
        ttft_minus_s={
            one.name: statistics.median(
                here - there for here, there in zip(split.ttft_s, one.ttft_s, strict=True)
            )
            for one in served
            if one is not split and len(one.ttft_s) == len(split.ttft_s) > 0
        },
        load_average=load_average,
        others_ratio=others.ratio(),
    )


async def _prompt(options: Options, one: _Served, *, number: int) -> None:
    """One prompt, nothing beside it."""
    target = await _run(
        replace(options, url=one.url, requests=1, background_streams=0, rounds=1), number
    )
    one.ttft_s += _ttft_s(target)
    one.errors.update(trace.error for trace in target.traces if trace.error is not None)


async def _streams(options: Options, one: _Served, *, number: int) -> None:
    """The streams alone, then with prompts beside them."""
    target = await _run(replace(options, url=one.url, rounds=1), number)
    one.idle_s += target.idle
    one.loaded_s += target.loaded
    one.loaded_ttft_s += _ttft_s(target)
    one.errors.update(trace.error for trace in target.traces if trace.error is not None)


async def _run(options: Options, number: int) -> Target:
    """The same prompts for every variant in the same round, and others in the next."""
    one_run = replace(options, seed=options.seed + number, duration_s=options.timeout_s)
    [target] = await LoadRun(one_run).measure()
    return target


def _ttft_s(target: Target) -> list[float]:
    return [trace.token_s[0] - trace.start_s for trace in target.traces if trace.error is None]


async def _start(
    setting: Setting,
    folder: Path,
    stack: contextlib.AsyncExitStack,
    show: Callable[[float, str], None],
) -> list[_Served]:
    cores, half = setting.cores, len(setting.cores) // 2
    served = []

    async def start(name: str, parts: Sequence[_Part], chunk_tokens: int, *, itl: bool) -> None:
        """The API of the last part is the one that is asked."""
        nodes = []
        for part in parts:
            text = _config(setting, part, folder, chunk_tokens=chunk_tokens)
            nodes.append(
                await stack.enter_async_context(serve_node(part.node, text, folder, part.cores))
            )
        said = " + ".join(",".join(map(str, part.cores)) for part in parts)
        url = f"http://127.0.0.1:{parts[-1].port}"
        served.append(_Served(name, said, chunk_tokens, url, nodes, itl))

    peer, fabric, *ports = free_ports(7)
    link = f'[[prefill]]\nname = "prefill"\naddress = "127.0.0.1:{peer}"\n'
    for name, node, kept, chunk_tokens in (
        (WHOLE, "whole", cores, WHOLE_TOKENS),
        (CHUNKED, "chunked", cores, setting.chunk_tokens),
        (HALF, "half", cores[:half], WHOLE_TOKENS),
    ):
        part = _Part(node, "colocated", kept, ports.pop())
        await start(name, [part], chunk_tokens, itl=kept is cores)
    parts = [
        _Part("prefill", "prefill", cores[:half], ports.pop(), fabric=fabric, peer=peer),
        _Part("decode", "decode", cores[half:], ports.pop(), link),
    ]
    await start(SPLIT, parts, PREFILL_TOKENS, itl=True)
    for one in served:
        await wait_ready(one.url, one.nodes, partial(_loading, show, one.name))
    return served


@dataclass(frozen=True, slots=True)
class _Part:
    """One node of a variant. `fabric` and `peer` are the ports of a prefill node."""

    node: str
    role: str
    cores: Sequence[int]
    port: int
    link: str = ""
    fabric: int = 7701
    peer: int = 7700


def _config(setting: Setting, part: _Part, folder: Path, *, chunk_tokens: int) -> str:
    return f"""config_version = 1
[node]
id = "{part.node}"
role = "{part.role}"
when_no_prefill = "refuse"
admin_socket = "{folder / part.node}.sock"
[model]
path = "{setting.model_path}"
[engine]
threads = {len(part.cores)}
dtype = "{setting.dtype}"
chunk_tokens = {chunk_tokens}
[kv]
pool_bytes = "1GiB"
[api]
listen = "127.0.0.1:{part.port}"
[peer]
listen = "127.0.0.1:{part.peer}"
request_stall_s = {REQUEST_STALL_S}
[fabric]
provider = "tcp"
port = {part.fabric}
{part.link}"""


def _loading(show: Callable[[float, str], None], name: str, _: float, why: str) -> None:
    show(0.0, f"{name}: {why}")
