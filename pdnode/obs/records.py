"""What finished transfers and requests leave behind: bounded rings, read by admin API and demo."""

from collections import deque
from collections.abc import Callable

import msgspec

RING = 1024


class LayerTimes(msgspec.Struct, frozen=True):
    """One layer of one chunk on one route. Times in ns of CLOCK_MONOTONIC of the prefill node."""

    chunk: int
    layer: int
    raised_ns: int
    posted_ns: int
    done_ns: int
    bytes: int
    writes: int


class TransferRecord(msgspec.Struct, frozen=True):
    """One finished transfer, as the prefill node's core saw it."""

    key: str
    request_id: str
    peer: str
    outcome: str
    tokens: int
    pages: int
    bytes: int
    writes: int
    queue_s: float
    prefill_s: float
    total_s: float
    layers: tuple[LayerTimes, ...]


def wire_s(record: TransferRecord) -> float | None:
    """From the first write of a transfer to its last completion; None where nothing was posted."""
    rows = [row for row in record.layers if row.posted_ns and row.done_ns]
    if not rows:
        return None
    return 1e-9 * (max(row.done_ns for row in rows) - min(row.posted_ns for row in rows))


class RequestRecord(msgspec.Struct, frozen=True):
    """One finished request, as the decode (or colocated) node saw it; all durations on its clock.

    `ttft_s` = admit_s + prefill_queue_s + prefill_s + transfer_wait_s + first_step_s, none of them
    negative. `transfer_wait_s`: from the prefill's last pass to the last page here; where the
    request ended before the prefill node said `drained`, this wait is part of `prefill_s`. Local
    prefill: `prefill_queue_s` and `transfer_wait_s` are 0, `prefill_s` ends with the first token.
    """

    request_id: str
    prefill: str
    finish: str
    prompt_tokens: int
    output_tokens: int
    admit_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_wait_s: float
    first_step_s: float
    ttft_s: float
    decode_s: float
    total_s: float
    pages: int = 0  # that a prefill peer filled; 0 where the prompt ran here


class Records:
    """The last `RING` of each kind, oldest first. What is added goes to the listeners as well."""

    def __init__(self) -> None:
        self.transfers: deque[TransferRecord] = deque(maxlen=RING)
        self.requests: deque[RequestRecord] = deque(maxlen=RING)
        self.on_transfer: list[Callable[[TransferRecord], None]] = []
        self.on_request: list[Callable[[RequestRecord], None]] = []

    def add_transfer(self, record: TransferRecord) -> None:
        self.transfers.append(record)
        for listener in self.on_transfer:
            listener(record)

    def add_request(self, record: RequestRecord) -> None:
        self.requests.append(record)
        for listener in self.on_request:
            listener(record)
