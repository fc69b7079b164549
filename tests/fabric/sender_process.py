"""A prefill node in a process of its own, for tests that freeze or kill it.

Usage: sender_process.py provider pages page_bytes. Lines of JSON: it says {"endpoint"}, reads
{"token", "remote", "endpoint"}, says {"scratch"} first and {"up"} once probed; then it pushes page
i of its region to page i of the peer, in rounds without end, until its connection fails:
{"failed"}. Ends when its standard input does.
"""

import itertools
import json
import sys

from tests.fabric.fabric_node import Node, by_rank, immediate

SESSION = 1
SLOT, GENERATION = 9, 1


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    provider, pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    node = Node(provider, pages=pages, page_bytes=page_bytes)
    node.fill(7)
    order = json.loads(sys.stdin.readline())
    node.fabric.open_session(SESSION, [0], [], order["token"].encode())
    node.wait("opened")
    scratch = by_rank(node.fabric.descriptors(SESSION))
    say(endpoint=node.address(SESSION).hex(), scratch=scratch)
    order = json.loads(sys.stdin.readline())
    if provider != "tcp":
        node.fabric.connect(SESSION, (0, 0), bytes.fromhex(order["endpoint"]), 5.0)
    node.wait("connected")
    node.fabric.set_remote(
        SESSION, [(rank, [tuple(p) for p in ps]) for rank, ps in order["remote"]]
    )
    node.fabric.probe(SESSION)
    node.wait("probed")
    say(up=True)
    json.loads(sys.stdin.readline())
    for transfer in itertools.count(1):
        node.fabric.open_transfer(transfer, SESSION, immediate(SLOT, GENERATION))
        # One page a write: the more writes, the more can be on the way.
        node.submit(transfer, [(i, i, 1) for i in range(pages)], whole_page=False)
        node.fabric.finish(transfer)
        while True:
            node.gather(1.0)
            if any(event.kind == "failed" for event in node.events):
                say(failed=True)
                sys.stdin.readline()
                node.close()
                return
            if any(event.kind == "drained" for event in node.events):
                node.events.clear()
                node.fabric.close_transfer(transfer)
                break


if __name__ == "__main__":
    main()
