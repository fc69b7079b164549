"""Made-up nodes for `--mock`, the tests and the pictures in the documents.

`snapshot(kind, tick)` is a function of its arguments alone: the same tick is the same picture.
"""

import math
from collections.abc import Sequence

from pdnode.obs.snapshot import (
    HISTORY,
    PROTOCOL,
    Action,
    Event,
    Gpu,
    Latency,
    LayerMark,
    Model,
    Nic,
    NicErrors,
    NicPeer,
    Node,
    Numa,
    Pages,
    Peer,
    Pending,
    Phases,
    Quantiles,
    Queue,
    Rail,
    Request,
    SlowTransfer,
    Snapshot,
    Summary,
    Topology,
    Transfer,
    Warning,
)

KINDS = ("healthy", "degraded", "stale", "empty")
NOON_S = 1_790_858_467.0  # some time of day for tick 0
_GBIT = 1e9 / 8
_LINE = 400 * _GBIT
_LAYERS = 80
_TOKEN_BYTES = 327_680  # Llama-3-70B in bf16: 80 layers x 8 heads x 128 x 2 (K, V) x 2 bytes
_PAGE_TOKENS = 64


def snapshot(kind: str, tick: int = 0) -> Snapshot:
    """The node after `tick` seconds. "stale" looks healthy: it is the source that fails."""
    if kind == "empty":
        return _empty(tick)
    bad = kind == "degraded"
    transfers = _transfers(tick, bad=bad)
    return Snapshot(
        protocol=PROTOCOL,
        time_s=NOON_S + tick,
        node=Node(
            id="node-a17", boot="5f0c" * 8, role="decode", state="serving", version="0.1.0",
            uptime_s=273_600.0 + tick, protocol_min=1, protocol_max=1, provider="verbs",
            libfabric="2.5",
        ),
        model=Model(
            name="llama-3.3-70b", dtype="bf16", layers=_LAYERS, context_tokens=131_072,
            page_tokens=_PAGE_TOKENS, kv_bytes_per_token=_TOKEN_BYTES,
        ),
        ready=True,
        pages=Pages(
            total=4096, free=1188, used=2496, cached=0, reserved=412 if not bad else 284,
            quarantined=0 if not bad else 128, used_ratio=0.71, quarantined_limit=512,
        ),
        queues=(
            Queue(name="waiting", now=7, peak=31, limit=256),
            Queue(name="kv-wait", now=6, peak=18, limit=64),
            Queue(name="running", now=48, peak=64, limit=64),
            Queue(name="kv-drain", now=0, peak=3, limit=32),
        ),
        pending=Pending(requests=61, transfers=6, oldest_s=14.2),
        transfers_inflight=len(transfers),
        transfers=transfers,
        requests_open=61,
        requests=_requests(tick),
        summary=Summary(
            window_s=60.0,
            transfers=Quantiles(count=812, p50_s=0.038, p99_s=0.096 if not bad else 0.412),
            transfers_failed=2 if bad else 0, requests_done=806,
            requests_failed=1 if bad else 0, requests_aborted=1, rejected=0,
            recomputed=3 if bad else 0, preempted=None,
            output_tokens_per_s=2914.0, prompt_tokens_per_s=61_400.0,
        ),
        last_slow=_slow(bad=bad),
        latency=_latency(bad=bad),
        nics=tuple(_nic(index, tick, bad=bad) for index in range(8)),
        topology=_topology(bad=bad),
        peers=_peers(transfers, bad=bad),
        warnings=_warnings(bad=bad),
        events=_events(bad=bad),
        actions=(Action(name="drain"), Action(name="cancel")),
    )  # fmt: skip


def _empty(tick: int) -> Snapshot:
    """A node that has just started, without fabric, peers or work."""
    return Snapshot(
        protocol=PROTOCOL,
        time_s=NOON_S + tick,
        node=Node(
            id="node-new", boot="00aa" * 8, role="colocated", state="loading", version="0.1.0",
            uptime_s=2.0 + tick, detail="weights 40%",
        ),
        model=Model(name="smollm2"),
        ready=False,
        actions=(Action(name="drain", refused="the node is loading"),),
    )  # fmt: skip


_FLIGHT = (  # request, peer, tokens, share done, Gb/s, age in s
    ("7f3a91c4", "pf-03", 8192, 0.94, 331, 0.061),
    ("b10c2f7e", "pf-03", 2048, 0.50, 182, 0.009),
    ("03de88a1", "pf-01", 16384, 0.26, 344, 0.084),
    ("9ac417d0", "pf-04", 512, 1.00, 97, 0.002),
    ("e5b2006f", "pf-02", 4096, 0.14, 41, 0.077),
    ("41d9c3aa", "pf-01", 1024, 0.00, 0, 0.012),
)


def _transfers(tick: int, *, bad: bool) -> tuple[Transfer, ...]:
    found = []
    for request, peer, tokens, done, rate, age in _FLIGHT:
        done = (done + 0.17 * tick) % 1.0 if tick else done
        waits = rate == 0
        layer = 0 if waits else int(done * _LAYERS)
        pages = tokens // _PAGE_TOKENS
        slow = bad and peer == "pf-02"
        found.append(Transfer(
            request_id=request, peer=peer,
            state="queue" if waits else "drain" if done == 1.0 else "wire",
            tokens=tokens, pages=pages, age_s=age * (9 if slow else 1),
            pages_done=0.0 if waits else done * pages,
            layers=_LAYERS, layer=layer, layer_posted=min(_LAYERS, layer + (0 if waits else 2)),
            bytes=tokens * _TOKEN_BYTES,
            bytes_done=0 if waits else int(done * tokens * _TOKEN_BYTES),
            bytes_per_s=None if waits else rate * _GBIT * (0.25 if slow else 1),
        ))  # fmt: skip
    return tuple(sorted(found, key=lambda transfer: -transfer.age_s))


def _requests(tick: int) -> tuple[Request, ...]:
    waiting = [
        Request(
            request_id=request, state="kv-wait", age_s=0.2 + age, prompt_tokens=tokens, peer=peer
        )
        for request, peer, tokens, _, _, age in _FLIGHT
    ]
    running = [
        Request(
            request_id=f"{0x51c0ffee + 7919 * number:08x}", state="running",
            age_s=14.2 - 0.29 * number, prompt_tokens=512 + 96 * number,
            output_tokens=5 + 17 * number + tick, peer=f"pf-0{1 + number % 4}",
        )
        for number in range(48)
    ]  # fmt: skip
    queued = [
        Request(request_id=f"{0xdead0000 + number:08x}", state="waiting",
                age_s=0.09 - 0.01 * number, prompt_tokens=700 + 10 * number)
        for number in range(7)
    ]  # fmt: skip
    return tuple(sorted(running + waiting + queued, key=lambda request: -request.age_s))


def _slow(*, bad: bool) -> SlowTransfer:
    step = 1900 if not bad else 5100  # us per layer
    marks = []
    for layer in range(_LAYERS):
        late = 14_000 if bad and layer >= 11 else 0
        raised = layer * step
        marks.append(LayerMark(layer=layer, raised_us=raised, posted_us=raised + 3 + late // 7,
                               done_us=raised + 610 + (layer * 37) % 240 + late))  # fmt: skip
    wait = 0.001 if not bad else 0.0152
    phases = Phases(admit_s=0.0021, prefill_queue_s=0.013, prefill_s=_LAYERS * step / 1e6,
                    transfer_wait_s=wait, first_step_s=0.0094,
                    ttft_s=0.0245 + _LAYERS * step / 1e6 + wait)  # fmt: skip
    return SlowTransfer(
        request_id="c04411ef", peer="pf-02" if bad else "pf-01", outcome="done", tokens=16_384,
        pages=256, total_s=marks[-1].done_us / 1e6 if marks[-1].done_us else 0.0, ended_s=21.0,
        bytes=16_384 * _TOKEN_BYTES, phases=phases, layers=tuple(marks),
    )  # fmt: skip


def _latency(*, bad: bool) -> Latency:
    return Latency(
        ttft=Quantiles(count=806, p50_s=0.212, p99_s=1.31 if bad else 0.66),
        itl=Quantiles(count=174_800, p50_s=0.0098, p99_s=0.021),
        admit=Quantiles(count=806, p50_s=0.002, p99_s=0.009),
        prefill_queue=Quantiles(count=806, p50_s=0.031, p99_s=0.21),
        prefill=Quantiles(count=806, p50_s=0.166, p99_s=0.402),
        transfer_wait=Quantiles(count=806, p50_s=0.0031, p99_s=0.68 if bad else 0.018),
        first_step=Quantiles(count=806, p50_s=0.0097, p99_s=0.02),
        total=Quantiles(count=806, p50_s=3.2, p99_s=14.0),
    )


_RATES = (241, 228, 235, 223, 12, 41, None, 15)
_PEAKS = (392, 390, 391, 388, 201, 377, None, 188)


def _nic(index: int, tick: int, *, bad: bool) -> Nic:
    rate, peak = _RATES[index], _PEAKS[index]
    slow = bad and index == 5
    if rate is None and not bad:
        rate, peak = 18, 240
    if rate is None or peak is None:
        return Nic(name=f"mlx5_{index}", state="down", provider="verbs", gpu=index, numa=index // 4,
                   line_bytes_per_s=_LINE, counters="kernel")  # fmt: skip
    shape = _wave(index, tick)
    history = tuple(int(min(400, rate * level * (3 if slow and at < 30 else 1)) * _GBIT)
                    for at, level in enumerate(shape))  # fmt: skip
    peers = ((NicPeer(peer="pf-03", rx_bytes_per_s=0.6 * rate * _GBIT),
              NicPeer(peer="pf-01", rx_bytes_per_s=0.4 * rate * _GBIT)) if index < 4 else
             (NicPeer(peer="pf-02", rx_bytes_per_s=rate * _GBIT),))  # fmt: skip
    return Nic(
        name=f"mlx5_{index}", state="up", provider="verbs", address=f"192.0.2.{10 + index}",
        gpu=index, numa=index // 4, line_bytes_per_s=_LINE,
        rx_bytes_per_s=float(history[-1]), tx_bytes_per_s=0.002 * rate * _GBIT,
        rx_peak_bytes_per_s=peak * _GBIT, tx_peak_bytes_per_s=1.1 * _GBIT,
        rx_history=history, tx_history=tuple(value // 500 for value in history),
        errors=(NicErrors(kind="rnr", total=1204 if slow else 0, per_s=0.4 if slow else 0.0),),
        peers=peers, counters="kernel",
    )  # fmt: skip


def _wave(index: int, tick: int) -> Sequence[float]:
    """Shares around 1 for the last HISTORY seconds; the last one is 1 at tick 0."""
    wave = [1 + 0.35 * math.sin((at + tick) / 4.3 + index) for at in range(HISTORY)]
    return wave if tick else [*wave[:-1], 1.0]


def _topology(*, bad: bool) -> Topology:
    gpus = []
    for index in range(8):
        far = bad and index == 6
        rail = Rail(
            nic="mlx5_7" if far else f"mlx5_{index}", distance="SYS" if far else "PIX",
            why="mlx5_6 is down; the nearest that is up" if far else "same PCIe switch",
        )  # fmt: skip
        gpus.append(Gpu(index=index, name="H200", numa=index // 4, busy_ratio=0.72 - 0.01 * index,
                        memory_ratio=0.74 - 0.007 * index, rails=(rail,)))  # fmt: skip
    nics = tuple(f"mlx5_{index}" for index in range(8))
    return Topology(
        numa=(Numa(index=0, cpus="0-55", memory_ratio=0.61, nics=nics[:4]),
              Numa(index=1, cpus="56-111", memory_ratio=0.58, nics=nics[4:])),
        gpus=tuple(gpus),
    )  # fmt: skip


def _peers(transfers: Sequence[Transfer], *, bad: bool) -> tuple[Peer, ...]:
    found = []
    for number in range(1, 7):
        name = f"pf-{number:02d}"
        lost, slow, drain = bad and number == 5, bad and number == 2, number == 4
        state = "lost" if lost else "slow" if slow else "drain" if drain else "up"
        own = [t for t in transfers if t.peer == name]
        found.append(Peer(
            name=name, role="prefill", state=state, node=f"host-{number:02d}",
            since_s=94.0 if lost else 7200.0, seen_s=94.0 if lost else 0.1 * number,
            rtt_s=None if lost else 0.0009 if slow else 0.0004,
            rx_bytes_per_s=None if lost else sum(t.bytes_per_s or 0.0 for t in own),
            tx_bytes_per_s=None if lost else 120_000.0, inflight=len(own),
            protocol=None if lost else 1, version="0.1.0", pages_quarantined=128 if lost else 0,
            last_error="no frame for 3.0 s; fenced, 128 pages returned" if lost else "",
        ))  # fmt: skip
    return tuple(found)


def _warnings(*, bad: bool) -> tuple[Warning, ...]:
    if not bad:
        return ()
    return (
        Warning(code="W204", severity="warning", text="pf-02: slow rail (mlx5_5, rnr 0.4/s)",
                since_s=187.0, subjects=("pf-02", "mlx5_5", "e5b2006f")),
        Warning(code="W202", severity="warning", text="pf-05: lost: no frame for 3.0 s",
                since_s=94.0, subjects=("pf-05",)),
        Warning(code="W117", severity="warning", text="mlx5_6 link down", since_s=13_147.0,
                subjects=("mlx5_6",)),
    )  # fmt: skip


def _events(*, bad: bool) -> tuple[Event, ...]:
    found = [
        (-2520.0, "info", "node.serving", "serving role=decode model=llama-3.3-70b"),
        (-36.0, "info", "peer.drain", "peer began to drain peer=pf-04"),
    ]
    if bad:
        found += [
            (-94.0, "error", "peer.lost", "lost, fenced; 128 pages returned peer=pf-05 requests=3"),
            (-9.0, "warning", "nic.slow", "slow rail peer=pf-02 nic=mlx5_5 req=e5b2006f layer=11"),
        ]
    return tuple(
        Event(cursor=cursor, time_s=NOON_S + at, severity=severity, code=code, text=text)
        for cursor, (at, severity, code, text) in enumerate(sorted(found), start=1)
    )
