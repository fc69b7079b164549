"""Connections that accept writes and complete none: what no provider reports for about a minute.

On `tcp` a dead interface gives no error for at least 53 s (libfabric sets no TCP_USER_TIMEOUT), and
the heartbeats go another way. So the sender looks at its own counters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Connection = tuple[int, tuple[int, int]]
"""(session, (local NIC, remote NIC))"""


@dataclass(slots=True)
class StallWatch:
    """`check` takes `Fabric.peer_statistics()` and names each stalled connection once.

    Stalled: writes are in flight, and for `stall_s` none came back.
    """

    stall_s: float
    _seen: dict[Connection, tuple[int, float]] = field(default_factory=dict)
    _told: set[Connection] = field(default_factory=set)

    def check(self, rows: Iterable[Mapping[str, int]], now: float) -> list[Connection]:
        stalled = []
        present = set()
        for row in rows:
            connection = (row["session"], (row["local_nic"], row["remote_nic"]))
            present.add(connection)
            back = row["done_writes"] + row["failed_writes"]
            before, since = self._seen.get(connection, (-1, now))
            if row["writes"] == 0 or back != before:
                self._seen[connection] = (back, now)
                self._told.discard(connection)
            elif now - since >= self.stall_s and connection not in self._told:
                self._told.add(connection)
                stalled.append(connection)
        for gone in self._seen.keys() - present:
            del self._seen[gone]
            self._told.discard(gone)
        return stalled
