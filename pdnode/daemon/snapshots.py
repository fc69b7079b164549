"""Builds the snapshot of this node (obs/snapshot.py). Cheap: it reads, and divides a little."""

import time
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from pdnode import __version__
from pdnode.configrules import dtypes
from pdnode.core.wire import PROTOCOL_MAX, PROTOCOL_MIN
from pdnode.daemon.figures import Figures
from pdnode.daemon.snapshot_peers import build_nics, build_peers
from pdnode.daemon.snapshot_work import build_requests, build_transfers, oldest_s
from pdnode.daemon.watch import Watch
from pdnode.obs import snapshot as form
from pdnode.obs.events import EventRing
from pdnode.obs.metrics import Metrics
from pdnode.obs.windows import WINDOW_S, WindowQuantiles
from pdnode.types import Role

MAX_BYTES = 64 << 10


class Snapshots:
    """Call `build` as often as somebody looks. Runs on the event loop."""

    def __init__(
        self,
        parts: Figures,
        watch: Watch,
        metrics: Metrics,
        events: EventRing,
        *,
        actions: Callable[[], Sequence[form.Action]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._parts = parts
        self._watch = watch
        self._metrics = metrics
        self._events = events
        self._actions = actions
        self._wall_clock = wall_clock
        self._clock = metrics.clock

    def encode(self) -> bytes:
        """The document as JSON, at most MAX_BYTES: long ids and texts make the lists shorter."""
        snapshot = self.build()
        body = form.encode(snapshot)
        while len(body) > MAX_BYTES and (snapshot.requests or snapshot.transfers):
            snapshot = msgspec.structs.replace(
                snapshot,
                requests=snapshot.requests[: len(snapshot.requests) * 3 // 4],
                transfers=snapshot.transfers[: len(snapshot.transfers) * 3 // 4],
            )
            body = form.encode(snapshot)
        return body

    def build(self) -> form.Snapshot:
        parts, now = self._parts, self._clock()
        warnings = parts.warnings.current()
        flights = parts.service.flights()
        return form.Snapshot(
            protocol=form.PROTOCOL,
            time_s=self._wall_clock(),
            node=self._node(now),
            model=self._model(),
            ready=not any(one.affects_readiness for one in warnings),
            pages=self._pages(),
            groups=self._groups(),
            queues=self._queues(),
            pending=form.Pending(
                requests=len(flights),
                transfers=parts.open_transfers,
                oldest_s=oldest_s(parts, flights, now),
            ),
            transfers_inflight=parts.open_transfers,
            transfers=tuple(islice(build_transfers(parts, now), form.MAX_TRANSFERS)),
            requests_open=len(flights),
            requests=tuple(islice(build_requests(flights, now), form.MAX_REQUESTS)),
            summary=self._summary(now),
            last_slow=self._last_slow(now),
            latency=self._latency(now) if parts.service.may_generate() else None,
            nics=build_nics(parts, self._watch),
            topology=None if parts.host is None else parts.host.topology,
            peers=build_peers(parts, self._watch, warnings),
            warnings=warnings[: form.MAX_WARNINGS],
            events=self._events.last(form.MAX_EVENTS),
            actions=tuple(self._actions()),
        )

    def _node(self, now: float) -> form.Node:
        parts, service = self._parts, self._parts.service
        state, detail = "serving", ""
        if not service.alive():
            state, detail = "failed", "; ".join(service.not_ready())
        elif service.loading:
            state, detail = "loading", service.loading
        elif service.draining:
            state = "draining"
        fabric = parts.config.fabric
        return form.Node(
            id=parts.config.node.id,
            boot=parts.boot,
            role=parts.config.node.role,
            state=state,
            version=__version__,
            uptime_s=now - self._watch.started_at,
            detail=detail,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            provider=None if parts.config.node.role is Role.COLOCATED else fabric.provider,
            libfabric=None if parts.transfer is None else parts.transfer.fabric.library_version,
        )

    def _model(self) -> form.Model:
        parts = self._parts
        name, context_tokens = parts.config.model.name, parts.service.context_tokens
        if parts.engine is None:
            return form.Model(name=name, context_tokens=context_tokens)
        geometry = parts.engine.geometry
        page_bytes = geometry.page_bytes * geometry.layers * geometry.tp
        return form.Model(
            name=name,
            dtype=dtypes(parts.config)[0],
            layers=geometry.layers,
            context_tokens=context_tokens,
            page_tokens=geometry.page_tokens,
            kv_bytes_per_token=page_bytes // geometry.page_tokens,
            device=parts.config.engine.device,
            device_reason=parts.config.engine.device_reason,
        )

    def _pages(self) -> form.Pages | None:
        if self._parts.engine is None:
            return None
        counts = self._parts.engine.page_counts
        return form.Pages(
            total=sum(counts),
            used_ratio=self._parts.used_ratio,
            quarantined_limit=self._parts.engine.max_quarantined,
            **counts._asdict(),
        )

    def _groups(self) -> tuple[form.Group, ...]:
        engine = self._parts.engine
        if engine is None or len(engine.groups) < 2:
            return ()
        return tuple(
            form.Group(
                pages=engine.geometry.pages,
                pages_free=group.gate.pool.counts.free,
                waiting=group.steps.scheduler.waiting,
                running=group.steps.scheduler.running,
            )
            for group in engine.groups
        )

    def _queues(self) -> tuple[form.Queue, ...]:
        peaks = self._watch.peaks
        return tuple(
            form.Queue(
                name=queue.name,
                now=queue.depth,
                peak=max(peaks[queue.name], queue.depth),
                limit=queue.limit,
            )
            for queue in self._parts.read_queues()
        )

    def _summary(self, now: float) -> form.Summary:
        watch, service = self._watch, self._parts.service
        ended = watch.ended
        window_s = min(float(WINDOW_S), now - watch.started_at)
        return form.Summary(
            window_s=window_s,
            transfers=_quantiles(watch.transfers, now),
            transfers_failed=ended.get("transfers_failed", now),
            requests_done=ended.get("requests_done", now),
            requests_failed=ended.get("requests_failed", now),
            requests_aborted=ended.get("requests_aborted", now),
            rejected=ended.get("rejected", now),
            recomputed=ended.get("recomputed", now),
            output_tokens_per_s=watch.tokens_out.mean if service.may_generate() else None,
            prompt_tokens_per_s=watch.tokens_in.mean,
        )

    def _last_slow(self, now: float) -> form.SlowTransfer | None:
        if self._watch.last_slow is None:
            return None
        slow, ended_at = self._watch.last_slow
        return msgspec.structs.replace(slow, ended_s=now - ended_at)

    def _latency(self, now: float) -> form.Latency:
        watch = self._watch
        phases = {name: _quantiles(window, now) for name, window in watch.phases.items()}
        return form.Latency(
            ttft=_quantiles(watch.ttft, now),
            itl=_quantiles(self._metrics.itl_window, now),
            total=_quantiles(watch.total, now),
            **phases,
        )


def _quantiles(window: WindowQuantiles, now: float) -> form.Quantiles:
    return form.Quantiles(
        count=window.count(now),
        p50_s=window.quantile_s(0.5, now),
        p99_s=window.quantile_s(0.99, now),
    )
