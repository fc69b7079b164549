"""Once a second: rates of NICs and peers, peaks of queues; and what ended in the last minute.

Feeds the snapshot, and says how busy the node is every 10 s in the log, if it is.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdnode.daemon.figures import Figures
from pdnode.obs.faults import report
from pdnode.obs.log import event
from pdnode.obs.metrics import Metrics
from pdnode.obs.metrics_table import PHASES
from pdnode.obs.records import Records, RequestRecord, TransferRecord, wire_s
from pdnode.obs.slow import slow_request, slow_transfer
from pdnode.obs.snapshot import SlowTransfer
from pdnode.obs.windows import Rates, WindowQuantiles, WindowSums

_log = logging.getLogger(__name__)

SAMPLE_S = 1.0
SUMMARY_S = 10.0
SLOW_FACTOR = 2.0
"""A transfer is slow that took so many times the median of the last minute."""

_MOVED = ("drained", "cancelled")
_ANSWERED = ("stop", "length")
_ABORTED = ("abort", "cancelled")


@dataclass(slots=True)
class Flow:
    """Both directions of a NIC, or of one peer over it."""

    rx: Rates = field(default_factory=Rates)
    tx: Rates = field(default_factory=Rates)


class Watch:
    """Runs on the event loop. `clock` is the one of `metrics`."""

    def __init__(self, parts: Figures, records: Records, metrics: Metrics) -> None:
        self._parts = parts
        self._metrics = metrics
        self.clock: Callable[[], float] = metrics.clock
        self.started_at = self.clock()
        self.transfers = WindowQuantiles()
        self.ttft = WindowQuantiles()
        self.total = WindowQuantiles()
        self.phases = {phase: WindowQuantiles() for phase in PHASES[1:]}
        self.ended = WindowSums()
        self.nics: dict[str, Flow] = {}
        self.peers: dict[tuple[str, str], Flow] = {}  # by NIC and peer's node id
        self.tokens_out = Rates()
        self.tokens_in = Rates()
        self.peaks: Counter[str] = Counter()  # by queue
        self.last_slow: tuple[SlowTransfer, float] | None = None  # and when it ended
        self._totals: Counter[str] = Counter()
        self._told_at = self.started_at
        self._told = (0, 0)
        records.on_request.append(self._request_ended)
        records.on_transfer.append(self._transfer_ended)

    async def run(self) -> None:
        while True:
            try:
                if self._parts.host is not None:  # reads files, which may block
                    self._parts.readings = await asyncio.to_thread(self._parts.host.read)
                self.sample()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task
                report(error, "a sample failed")
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> None:
        now = self.clock()
        self._parts.warnings.current()  # raises and clears them when nobody looks
        self._sample_nics(now)
        self._sample_peers(now)
        self.tokens_out.sample(self._metrics.tokens_out, now=now)
        self.tokens_in.sample(self._prompt_tokens(), now=now)
        for queue in self._parts.read_queues():
            self._peak(queue.name, queue.depth)
        self._peak("waiting", self._parts.service.most_waiting)
        self._count("rejected", self._parts.service.rejected, now)
        self._count("recomputed", self._parts.service.recomputed, now)
        if self._parts.pull is not None:
            failed = sum(self._parts.pull.figures.failures.values())
            self._count("transfers_failed", failed, now)
        if now - self._told_at >= SUMMARY_S:
            self._summarize(now)

    def _peak(self, queue: str, depth: int) -> None:
        self.peaks[queue] = max(self.peaks[queue], depth)

    def _count(self, name: str, total: int, now: float) -> None:
        """What a counter of another part has grown by; it begins at 0 again with another engine."""
        before = self._totals[name] if total >= self._totals[name] else 0
        self.ended.add(name, total - before, now=now)
        self._totals[name] = total

    def _prompt_tokens(self) -> int:
        """Admitted here, or computed for others."""
        if self._parts.push is not None and self._parts.engine is not None:
            return self._parts.engine.figures.prefill_tokens
        return self._metrics.tokens_in

    def _sample_nics(self, now: float) -> None:
        for nic in self._parts.nics():
            flow = self.nics.setdefault(nic.name, Flow())
            flow.rx.sample(nic.wire.get("received", nic.bytes_received), now=now)
            flow.tx.sample(nic.wire.get("sent", nic.bytes_sent), now=now)

    def _sample_peers(self, now: float) -> None:
        moved = self._parts.moved_by_peer()
        for key in self.peers.keys() - moved.keys():
            del self.peers[key]
        for key, (received, sent) in moved.items():
            flow = self.peers.setdefault(key, Flow())
            flow.rx.sample(received, now=now)
            flow.tx.sample(sent, now=now)

    def _summarize(self, now: float) -> None:
        lasted_s, self._told_at = now - self._told_at, now
        tokens = (self._metrics.tokens_out, self._prompt_tokens())
        before, self._told = self._told, tokens
        service, transfers = self._parts.service, self._parts.open_transfers
        if tokens == before and not service.open_requests and not transfers:
            return
        event(
            _log, logging.INFO, "node.busy", "busy",
            running=service.running, waiting=service.waiting, transfers=transfers,
            output_tokens_per_s=round((tokens[0] - before[0]) / lasted_s, 1),
            prompt_tokens_per_s=round((tokens[1] - before[1]) / lasted_s, 1),
            kv_used_ratio=round(self._parts.used_ratio, 3),
        )  # fmt: skip

    # what ended

    def _request_ended(self, record: RequestRecord) -> None:
        now = self.clock()
        self._metrics.request_done(record)
        if record.finish in _ANSWERED:
            self.ended.add("requests_done", now=now)
        else:
            aborted = record.finish in _ABORTED
            self.ended.add("requests_aborted" if aborted else "requests_failed", now=now)
        if not record.output_tokens:
            return
        self._peak("running", self._parts.service.running + 1)  # it was one of them until now
        self.ttft.add(record.ttft_s, now=now)
        self.total.add(record.total_s, now=now)
        for phase, window in self.phases.items():
            window.add(getattr(record, f"{phase}_s"), now=now)
        if record.prefill != "local":
            took_s = record.prefill_s + record.transfer_wait_s
            if self._is_slow(took_s, now):
                self.last_slow = (slow_request(record, took_s), now)
            self.transfers.add(took_s, now=now)

    def _transfer_ended(self, record: TransferRecord) -> None:
        now = self.clock()
        self._metrics.transfer_done(record)
        if self._parts.push is not None:
            self._peak("prefill", self._parts.push.open_pushes + 1)
        failed = record.outcome not in _MOVED
        took_s = wire_s(record)
        if failed:
            self.ended.add("transfers_failed", now=now)
        if failed or (took_s is not None and self._is_slow(took_s, now)):
            self.last_slow = (slow_transfer(record, took_s), now)
        if not failed and took_s is not None:
            self.transfers.add(took_s, now=now)

    def _is_slow(self, took_s: float, now: float) -> bool:
        """The first one is, so that there is one to look at."""
        median_s = self.transfers.quantile_s(0.5, now)
        return self.last_slow is None or (median_s is not None and took_s >= SLOW_FACTOR * median_s)
