"""A decode node in a process of its own, for tests that kill it.

Usage: target_process.py provider pages page_bytes. Reads one line of JSON, {"token", "endpoint",
"remote"}, says {"endpoint", "region"}, joins, arms slot 5; then answers every line with: units
received, pages that are not empty, the first of these.
"""

import json
import sys

from tests.fabric.fabric_node import Node

SESSION = 1


def main() -> None:
    provider, pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    node = Node(provider, pages=pages, page_bytes=page_bytes)
    order = json.loads(sys.stdin.readline())
    region = node.open(SESSION, order["token"].encode())
    endpoint = b"" if provider == "tcp" else node.address(SESSION)
    node.fabric.connect(SESSION, (0, 0), bytes.fromhex(order["endpoint"]), 5.0)
    node.fabric.set_remote(
        SESSION, [(rank, [tuple(piece) for piece in pieces]) for rank, pieces in order["remote"]]
    )
    sys.stdout.write(json.dumps({"endpoint": endpoint.hex(), "region": region}) + "\n")
    sys.stdout.flush()
    node.wait("connected")
    node.fabric.probe(SESSION)
    node.wait("probed")
    node.fabric.arm(5, 0, SESSION, 1 << 30)
    empty = bytes(page_bytes)
    for _ in sys.stdin:
        filled = [page for page in range(pages) if node.page(page) != empty]
        units = node.fabric.statistics()["received_units"]
        sys.stdout.write(f"{units} {len(filled)} {filled[0] if filled else -1}\n")
        sys.stdout.flush()
    node.close()


if __name__ == "__main__":
    main()
