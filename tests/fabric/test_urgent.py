"""A layer that was just raised goes before bulk: it waits neither for room nor for a turn."""

import os
import signal
import subprocess
import sys
import time

from tests.fabric.fabric_node import TOKEN, WAIT_S, Node, connect_process, immediate

PAGES = 2048
PAGE_BYTES = 4096


def writes(node: Node, expected: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while (found := node.fabric.statistics()["writes"]) != expected:
        assert time.monotonic() < deadline, f"{found} writes in flight, not {expected}"
        time.sleep(0.001)


def test_a_raised_layer_has_room_when_bulk_has_filled_the_window() -> None:
    sender = Node(pages=PAGES, page_bytes=PAGE_BYTES)
    number, counter, page_fd = sender.counter()
    window = int(sender.fabric.limits["window"])
    assert window < PAGES // 4  # four gathered pages a write: more than the window holds
    command = [
        sys.executable, "-m", "tests.fabric.target_process", "tcp", str(PAGES), str(PAGE_BYTES),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        connect_process(sender, peer, 1, TOKEN)
        peer.send_signal(signal.SIGSTOP)
        try:
            # A stopped peer completes nothing, so what bulk may have in flight stays there.
            sender.fabric.open_transfer(1, 1, immediate(5, 0))
            sender.submit(1, [(page, page, 1) for page in range(PAGES)])
            sender.fabric.finish(1)
            writes(sender, window)
            sender.fabric.open_transfer(2, 1, immediate(5, 0))
            sender.submit(2, [(0, 1, 1)], counter=number, layers=2, source_layer_stride=0,
                          remote_layer_stride=0)  # fmt: skip
            sender.fabric.finish(2)
            writes(sender, window)
            for raised in (1, 2):
                counter.raise_layer()
                writes(sender, window + raised)
        finally:
            peer.send_signal(signal.SIGCONT)
        for transfer in (1, 2):
            sender.wait("drained", transfer=transfer)
        record = sender.fabric.close_transfer(2)
        assert [(row[5], row[6]) for row in record] == [(PAGE_BYTES, 1)] * 2
        units = peer.communicate("\n", timeout=20)[0].split()[0]
        assert int(units) == PAGES + 2
    os.close(page_fd)
    sender.close()
