"""The target process of `pdnode bench transfer`: receives, counts and checks every byte.

`python -m pdnode.bench.target ORDERS`. Standard input and output carry one JSON object a line: an
`op` and its fields, then an answer. It ends when its standard input does.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from pdnode.bench.node import SESSION, BenchNode, Order, as_descriptors, encode
from pdnode.bench.raw import RawEnd
from pdnode.errors import PdnodeError

CHECK_BYTES = 1 << 20
"""Compared at a time: what fits the cache."""

Message = dict[str, Any]


@dataclass(slots=True)
class Target:
    node: BenchNode
    raws: list[RawEnd]  # by NIC
    out: TextIO
    source: npt.NDArray[np.uint8]  # what the sender's memory holds
    units: int = field(default=0)  # received before the armed transfer

    def answer(self, **fields: object) -> None:
        self.out.write(encode(**fields))
        self.out.flush()

    def join(self, message: Message) -> None:
        region = self.node.open(message["token"], writable=True)
        self.node.connect(message["endpoints"])
        self.answer(endpoints=self.node.endpoints(), region=region)
        self.node.join(as_descriptors(message["remote"]))

    def raw_join(self, message: Message) -> None:
        raw = self.raws[message["nic"]]
        self.answer(address=raw.address().hex())
        if message["peer"]:
            raw.connect(bytes.fromhex(message["peer"]))
        else:
            raw.accept()
        self.answer(joined=True)

    def raw_receive(self, message: Message) -> None:
        self.node.memory[:] = 0
        self.answer(ready=True)
        if len(self.raws) == 1:
            self.raws[0].receive(message["units"][0])
        else:
            with ThreadPoolExecutor(len(self.raws)) as pool:
                list(pool.map(RawEnd.receive, self.raws, message["units"]))
        self.answer(received=message["units"])

    def arm(self, message: Message) -> None:
        if message["scrub"]:
            self.node.memory[:] = 0
        self.units = self.node.fabric.statistics()["received_units"]
        self.node.fabric.arm(message["slot"], message["generation"], SESSION, message["units"])
        self.answer(ready=True)

    def reached(self, message: Message) -> None:
        event = self.node.wait("reached", slot=message["slot"])
        self.node.fabric.disarm(message["slot"])
        self.answer(count=event.count)

    def check(self, message: Message) -> None:
        """The first page that differs, or −1."""
        order = Order(**message["order"])
        source, target = order.pages()
        here = self.node.memory.reshape(-1, order.page_bytes)
        there = self.source.reshape(-1, order.page_bytes)
        step = max(1, CHECK_BYTES // order.page_bytes)
        wrong = -1
        for at in range(0, len(source), step):
            part = slice(at, at + step)
            if not np.array_equal(here[target[part]], there[source[part]]):
                rows = (here[target[part]] != there[source[part]]).any(axis=1)
                wrong = int(target[part][rows.argmax()])
                break
        units = self.node.fabric.statistics()["received_units"] - self.units
        self.answer(wrong=wrong, units=units)


def run(orders: Message, source: TextIO, out: TextIO) -> None:
    os.sched_setaffinity(0, {orders["cpu"]})
    node = BenchNode(
        library=orders["library"],
        provider=orders["provider"],
        size_bytes=orders["size_bytes"],
        poll="adaptive",
        cpu=orders["cpu"],
        listens=False,
        nics=[(name, address) for name, address in orders["nics"]],
    )
    raws = [
        RawEnd(
            library=orders["library"],
            rdm=orders["provider"] == "tcp-rdm",
            host=address,
            memory=node.memory,
            key=orders["raw_key"],
        )
        for _, address in node.nics
    ]
    for raw in raws if len(raws) > 1 else ():
        raw.share_core()
    node.fill(orders["seed"])
    target = Target(node=node, raws=raws, out=out, source=node.memory.copy())
    operations = {
        "join": target.join,
        "raw_join": target.raw_join,
        "raw_receive": target.raw_receive,
        "arm": target.arm,
        "reached": target.reached,
        "check": target.check,
    }
    for line in source:
        message = json.loads(line)
        operations[message["op"]](message)
    for raw in raws:
        raw.close()
    node.close()


def main() -> int:
    try:
        run(json.loads(sys.argv[1]), sys.stdin, sys.stdout)
    except PdnodeError as error:
        sys.stderr.write(f"target: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
