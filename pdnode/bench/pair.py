"""Sender here, target in a process of its own, each on a core: one provider, joined both ways.

Over loopback, or over several NICs to a target in another network namespace.
"""

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import TracebackType
from typing import Any, Self

import numpy as np

from pdnode.bench.node import LOOPBACK, WAIT_S, BenchNode, Order, as_descriptors, encode, immediate
from pdnode.bench.raw import Pages, RawEnd
from pdnode.errors import PdnodeError

SEED = 20
SLOTS, GENERATIONS = 4095, 256


def cores() -> tuple[int, int]:
    """Of sender and target; the same one where there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[min(1, len(allowed) - 1)]


class Pair:
    """A joined sender and target, with the core and with the bare loop, over the same memory.

    `nics` and `there`: (name, address) of each NIC of sender and target; `prefix`: command that
    starts the target where its NICs are.
    """

    def __init__(
        self,
        *,
        library: str,
        provider: str,
        size_bytes: int,
        poll: str,
        cpus: tuple[int, int],
        window: int = 0,
        nics: Sequence[tuple[str, str]] = LOOPBACK,
        there: Sequence[tuple[str, str]] = LOOPBACK,
        prefix: Sequence[str] = (),
    ) -> None:
        self._raw_key = secrets.randbits(63)
        orders: dict[str, object] = {
            "library": library, "provider": provider, "size_bytes": size_bytes, "nics": there,
            "cpu": cpus[1], "raw_key": self._raw_key, "seed": SEED,
        }  # fmt: skip
        self._target = subprocess.Popen(
            [*prefix, sys.executable, "-m", "pdnode.bench.target", json.dumps(orders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # answer() selects: nothing may wait in a buffer of ours
        )
        self._numbers = count(1)
        self.node = BenchNode(
            library=library,
            provider=provider,
            size_bytes=size_bytes,
            poll=poll,
            cpu=cpus[0],
            listens=True,
            window=window,
            nics=nics,
        )
        self.raws = [
            RawEnd(
                library=library,
                rdm=provider == "tcp-rdm",
                host=address,
                memory=self.node.memory,
                key=self._raw_key,
            )
            for _, address in nics
        ]
        for raw in self.raws if len(nics) > 1 else ():
            raw.share_core()
        self.node.fill(SEED)
        self._join(rdm=provider == "tcp-rdm")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._target.stdin is not None
        self._target.stdin.close()
        try:
            self._target.wait(WAIT_S if kind is None else 1.0)
        except subprocess.TimeoutExpired:
            self._target.kill()
            self._target.wait()
        for raw in self.raws:
            raw.close()
        self.node.close()

    def _join(self, *, rdm: bool) -> None:
        token = secrets.token_hex(16)
        scratch = self.node.open(token, writable=False)
        there = self.ask("join", token=token, endpoints=self.node.endpoints(), remote=scratch)
        if rdm:
            self.node.connect(there["endpoints"])
        self.node.join(as_descriptors(there["region"]))
        for nic, raw in enumerate(self.raws):
            peer = raw.address().hex() if rdm else ""
            address = bytes.fromhex(self.ask("raw_join", nic=nic, peer=peer)["address"])
            raw.connect(address)
            self.answer()

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        self.tell(op, **fields)
        return self.answer()

    def tell(self, op: str, **fields: object) -> None:
        assert self._target.stdin is not None
        try:
            self._target.stdin.write(encode(op=op, **fields).encode())
            self._target.stdin.flush()
        except BrokenPipeError:
            raise PdnodeError("the target process of the benchmark has died") from None

    def answer(self) -> dict[str, Any]:
        """One line, read byte by byte."""
        assert self._target.stdout is not None
        ready, _, _ = select.select([self._target.stdout], [], [], WAIT_S)
        line = self._target.stdout.readline() if ready else b""
        if not line:
            raise PdnodeError(
                f"the target process of the benchmark {'has died' if ready else 'is silent'}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def arm(self, units: int, *, scrub: bool) -> tuple[int, int]:
        """A new slot that expects `units` pages: (slot, immediate)."""
        number = next(self._numbers)
        slot, generation = 1 + number % SLOTS, number // SLOTS % GENERATIONS
        self.ask("arm", slot=slot, generation=generation, units=units, scrub=scrub)
        return slot, immediate(slot=slot, generation=generation)

    def core(self, order: Order, passes: int) -> int:
        """Push with the core: nanoseconds from the call to the last completion, bytes checked."""
        spans = order.spans()
        units = len(spans) * order.run_pages * passes
        slot, value = self.arm(units, scrub=True)
        begin_ns = time.monotonic_ns()
        self.node.push(
            transfer=slot,
            immediate=value,
            page_bytes=order.page_bytes,
            passes=passes,
            spans=spans,
        )
        self.node.wait("drained", transfer=slot)
        record = self.node.fabric.close_transfer(slot)
        self.ask("reached", slot=slot)
        self.check(order, units)
        return max(done_ns for _, _, _, _, done_ns, _, _ in record) - begin_ns

    def bare(self, order: Order, passes: int, *, window: int, gather: int) -> int:
        """The same with the bare loop; over several NICs a thread each, with an equal share."""
        shares = [np.array_split(pages, len(self.raws)) for pages in order.pages()]
        sends = list(zip(self.raws, *shares, strict=True))
        self.ask("raw_receive", units=[len(source) * passes for _, source, _ in sends])

        def send(share: tuple[RawEnd, Pages, Pages]) -> int:
            raw, source, target = share
            return raw.send(
                key=self._raw_key,
                source=source,
                target=target,
                passes=passes,
                page_bytes=order.page_bytes,
                window=window,
                gather=gather,
            )

        if len(sends) == 1:
            elapsed_ns = send(sends[0])
        else:
            with ThreadPoolExecutor(len(sends)) as pool:
                begin_ns = time.monotonic_ns()
                list(pool.map(send, sends))
                elapsed_ns = time.monotonic_ns() - begin_ns
        self.answer()
        self.check(order, None)
        return elapsed_ns

    def check(self, order: Order, units: int | None) -> None:
        """Every byte at the target, and the exact number of pages that the core counted there."""
        fields = {name: getattr(order, name) for name in Order.__slots__}
        found = self.ask("check", order=fields)
        if found["wrong"] >= 0:
            raise PdnodeError(
                f"page {found['wrong']} of {order.page_bytes} bytes differs ({order.pattern})"
            )
        if units is not None and found["units"] != units:
            raise PdnodeError(f"{units} pages were sent and {found['units']} counted")
