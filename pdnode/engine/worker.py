"""The worker process of one rank: `python -m pdnode.engine.worker --fd N --parent PID`.

Holds weights and KV memory, and runs one step at a time for the daemon at the other end of the
socket N. It ends with the socket, and with its parent.
"""

import argparse
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from pdnode.core.geometry import DTYPE_BYTES, KvGeometry
from pdnode.engine.attention import AttentionBackend
from pdnode.engine.backend import Backend, CpuBackend
from pdnode.engine.cuda import CudaBackend
from pdnode.engine.protocol import (
    COUNTER_PAGE_BYTES,
    MAX_FRAME_BYTES,
    Frame,
    Init,
    Loading,
    Ready,
    Sampling,
    SequenceStep,
    Shutdown,
    Step,
    StepDone,
    ToWorker,
    WorkerError,
)
from pdnode.engine.ranks import join
from pdnode.engine.runner import Runner, nothing
from pdnode.engine.staged import StagedAttention
from pdnode.errors import ConfigError, PdnodeError, Problem
from pdnode.memory.cumem import CumemRegion, NicWrites
from pdnode.memory.handover import FrameError, close_fds, receive_frame, send_frame
from pdnode.memory.kinds import KvRegion, create_region
from pdnode.memory.layout import TORCH_DTYPES, LayerViews, region_views
from pdnode.memory.region import MemfdRegion
from pdnode.memory.staged import StagedRegion, Staging
from pdnode.models.config import ModelConfig, load_config
from pdnode.models.decoder import Decoder
from pdnode.models.loader import load_model
from pdnode.models.ranks import Alone, Ranks
from pdnode.types import RegionKind

_WARM_UP_TOKENS = 32
_PR_SET_PDEATHSIG = 1


class Channel:
    """Typed frames over the daemon's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(self, frame: Frame, fds: tuple[int, ...] = ()) -> None:
        payload = msgspec.msgpack.encode(frame)
        send_frame(self._sock, payload, fds, max_bytes=MAX_FRAME_BYTES)

    def receive(self) -> tuple[Init | Step | Shutdown, list[int]] | None:
        received = receive_frame(self._sock, max_bytes=MAX_FRAME_BYTES)
        if received is None:
            return None
        return self._decoder.decode(received.payload), received.fds


@dataclass(frozen=True, slots=True)
class Engine:
    """What `set_up` made. The region and the counter page live as long as the process."""

    runner: Runner
    region: KvRegion
    staging: Staging | NicWrites | None  # of a region on a GPU
    counter_page: MemfdRegion
    ready: Ready

    def run(self, step: Step) -> StepDone:
        if self.staging is not None:
            self.staging.begin(fetch=step.fetch, store=step.store)
        return self.runner.run(step)


def choose_pages(init: Init, one_page: KvGeometry, auto_bytes: Callable[[], int]) -> int:
    """Pages of the pool: as many as `init` says, or fit into the bytes it says or leaves to us,
    which are `auto_bytes`."""
    if init.pages:
        return init.pages
    pool_bytes = init.pool_bytes or auto_bytes()
    pages = pool_bytes // one_page.region_bytes
    if pages == 0:
        text = f"{pool_bytes} bytes hold no page; one takes {one_page.region_bytes}"
        raise ConfigError([Problem("[kv] pool_bytes", text)])
    return pages


def set_up(channel: Channel, init: Init, wake_fds: list[int]) -> Engine:
    """Meet the other ranks, load the model, run a warm-up pass, allocate region and counter page.

    `wake_fds`: as Init says; they stay open.
    """
    began = time.perf_counter()
    if init.cpus:  # before the first parallel section: its threads inherit this
        os.sched_setaffinity(0, init.cpus)
    torch.set_num_threads(max(1, init.threads))
    torch.set_num_interop_threads(1)
    path = Path(init.model_path)
    config = load_config(path)
    dtype_name = init.dtype or init.kv_dtype
    for key, name in (("[engine] dtype", dtype_name), ("[kv] dtype", init.kv_dtype)):
        if name not in DTYPE_BYTES:
            raise ConfigError([Problem(key, f"{name!r}; allowed: {', '.join(DTYPE_BYTES)}")])
    dtype = TORCH_DTYPES[dtype_name]

    def progress(ratio: float) -> None:
        channel.send(Loading(0.9 * ratio, "weights"))

    if problems := config.tp_problems(init.tp):
        raise ConfigError(problems)
    backend = make_backend(init, config, dtype)
    if problems := backend.problems():
        raise ConfigError(problems)
    ranks: Ranks = Alone()
    if init.tp > 1:
        store_fd = wake_fds.pop()
        ranks = join(rank=init.rank, tp=init.tp, store_fd=store_fd, device=backend.device)
        close_fds([store_fd])
    channel.send(Loading(0.0, "weights"))
    model = load_model(
        path, config, dtype, device=backend.device, ranks=ranks, progress=_thinned(progress)
    )
    channel.send(Loading(0.9, "warm-up"))
    one_page = config.kv_geometry(
        tp=init.tp, page_tokens=init.page_tokens, dtype=init.kv_dtype, pages=1
    )
    warm_up(model, backend, one_page, tokens=min(_WARM_UP_TOKENS, init.max_batch_tokens))
    channel.send(Loading(0.95, "memory"))
    pages = choose_pages(init, one_page, backend.auto_pool_bytes)
    geometry = replace(one_page, pages=ranks.least(pages))
    region = _make_region(init, geometry)
    counter_page = MemfdRegion.create("pdnode-counter", COUNTER_PAGE_BYTES)
    raise_layer = backend.counter(counter_page, wake_fds) if init.rank == 0 else nothing
    views = region_views(backend.region_bytes(region), geometry)
    attention, staging = _staged(backend, views, region, geometry)
    runner = Runner(
        model,
        attention,
        geometry,
        raise_layer,
        sampler=backend.sampler,
        graphs=backend.graphs(model, views, geometry, raise_layer),
        finish=backend.finish,
    )
    ready = _ready(geometry, config, region, time.perf_counter() - began)
    return Engine(runner, region, staging, counter_page, ready)


def _make_region(init: Init, geometry: KvGeometry) -> KvRegion:
    return create_region(
        RegionKind(init.region_kind),
        geometry.region_bytes,
        gpu=init.gpus[init.rank] if init.gpus else "",
        huge_pages=init.huge_pages,
    )


def _ready(geometry: KvGeometry, config: ModelConfig, region: KvRegion, load_s: float) -> Ready:
    return Ready(
        kind=geometry.kind,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        page_tokens=geometry.page_tokens,
        dtype=geometry.dtype,
        pages=geometry.pages,
        vocabulary=config.vocabulary,
        context_tokens=config.context_tokens,
        load_s=load_s,
        memory_page_bytes=region.memory_page_bytes,
        tp=geometry.tp,
    )


def make_backend(init: Init, config: ModelConfig, dtype: torch.dtype) -> Backend:
    """DeviceMissing where the GPU cannot be used."""
    return CudaBackend(init, config) if init.device == "cuda" else CpuBackend(init, dtype)


def _staged(
    backend: Backend, views: Sequence[LayerViews], region: KvRegion, geometry: KvGeometry
) -> tuple[AttentionBackend, Staging | NicWrites | None]:
    """Attention, which keeps the mirror where the region has one; and what goes before a pass."""
    attention = backend.attention(views, geometry)
    if isinstance(region, CumemRegion):
        return attention, NicWrites(region)
    if not isinstance(region, StagedRegion):
        return attention, None
    staging = Staging(region, geometry, backend.stream, waits=backend.waits)
    return StagedAttention(attention, staging), staging


def warm_up(model: Decoder, backend: Backend, one_page: KvGeometry, tokens: int) -> None:
    """A prefill and a decode step in memory of their own: the first request finds all paged in."""
    tokens = min(tokens, model.config.context_tokens - 1)
    pages = one_page.pages_for(tokens + 1)
    geometry = replace(one_page, pages=pages)
    scratch = torch.zeros(geometry.region_bytes, dtype=torch.uint8, device=backend.device)
    attention = backend.attention(region_views(scratch, geometry), geometry)
    runner = Runner(
        model, attention, geometry, nothing, sampler=backend.sampler, finish=backend.finish
    )
    draw = Sampling(temperature=1.0, top_k=1, top_p=1.0, seed=0, draw=0, banned=[])
    prompt = SequenceStep(0, 0, [0] * tokens, list(range(pages)), draw)
    runner.run(Step(0, 0, [prompt], []))
    runner.run(Step(1, geometry.layers, [SequenceStep(0, tokens, [0], [], draw)], []))


def _thinned(progress: Callable[[float], None]) -> Callable[[float], None]:
    """`progress`, called once per percent at most."""
    last = -1

    def thinned(ratio: float) -> None:
        nonlocal last
        if int(ratio * 100) > last:
            last = int(ratio * 100)
            progress(ratio)

    return thinned


def serve(channel: Channel) -> None:
    """Init, then steps until Shutdown or the end of the stream."""
    first = channel.receive()
    if first is None:
        return
    init, wake_fds = first
    assert isinstance(init, Init), f"expected init, got {type(init).__name__}"
    with torch.inference_mode():
        engine = set_up(channel, init, wake_fds)
        # Weights live as long as the process: keep the collector's scans off them.
        gc.freeze()
        channel.send(engine.ready, (engine.region.fd, engine.counter_page.fd))
        while (received := channel.receive()) is not None:
            frame, fds = received
            close_fds(fds)
            if isinstance(frame, Shutdown):
                return
            assert isinstance(frame, Step), f"unexpected {type(frame).__name__}"
            channel.send(engine.run(frame))


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the parent's thread ends; leave now if the parent is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the daemon is gone")


def main() -> int:
    parser = argparse.ArgumentParser(prog="pdnode.engine.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    # A terminal or an init system signals the whole group; the daemon drains first and then closes
    # the socket, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=arguments.fd))
    try:
        serve(channel)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except PdnodeError as error:
        return _report(channel, str(error))
    except Exception as error:  # noqa: BLE001 - the last words of this process
        traceback.print_exc()
        return _report(channel, f"{type(error).__name__}: {error}")
    return 0


def _report(channel: Channel, text: str) -> int:
    try:
        channel.send(WorkerError(text))
    except (OSError, FrameError):
        sys.stderr.write(f"pdnode worker: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
