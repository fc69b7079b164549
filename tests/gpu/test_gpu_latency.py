"""From a raise on the GPU to the layer's first write on the wire."""

import os
import statistics
import time

import torch

from pdnode.engine.counter_kernel import KernelCounter, architecture_of, compile_kernel
from pdnode.engine.protocol import COUNTER_PAGE_BYTES
from pdnode.memory.region import MemfdRegion
from tests.fabric.fabric_node import Node, immediate, join
from tests.gpu.conftest import Report

RAISES, WARM = 400, 50


def test_raise_to_post(report: Report) -> None:
    """Begins with the launch from Python, which a graph would not have. No latency is asked for."""
    torch.cuda.set_device(0)
    count = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    for poll in ("adaptive", "busy"):
        count.zero_()
        sender, target = (Node("tcp", pages=1, layers=RAISES, poll=poll) for _ in range(2))
        number, _, fd = sender.counter()
        counter = KernelCounter(
            MemfdRegion(fd, COUNTER_PAGE_BYTES),
            0,
            count_address=count.data_ptr(),
            stream=lambda: torch.cuda.current_stream().cuda_stream,
            code=compile_kernel(architecture_of(0)),
        )
        join(sender, target)
        sender.fabric.open_transfer(1, 1, immediate(1, 0))
        target.fabric.arm(1, 0, 1, RAISES)
        sender.submit(1, [(0, 0, 1)], counter=number)
        sender.fabric.finish(1)
        launched = []
        for raised in range(1, RAISES + 1):
            torch.cuda.synchronize()
            launched.append(time.monotonic_ns())
            counter.raise_layer()
            while target.fabric.statistics()["received_units"] < raised:
                pass
        sender.wait("drained", transfer=1)
        record = sender.fabric.close_transfer(1)
        delays = [(row[3] - before) / 1000 for row, before in zip(record, launched, strict=True)][
            WARM:
        ]
        cuts = statistics.quantiles(delays, n=100)
        report(f"raise on the GPU to post, {poll}, p50", cuts[49], "µs")
        report(f"raise on the GPU to post, {poll}, p99", cuts[98], "µs")
        sender.close()
        target.close()
        os.close(fd)
