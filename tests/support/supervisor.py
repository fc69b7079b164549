"""A supervisor's side of NOTIFY_SOCKET: who said what, and when."""

import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self


class Heard(NamedTuple):
    at: float  # monotonic
    lines: list[str]


class Listening:
    """Receives on a thread of its own, so that the times are right whatever the test does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[Heard] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _receive(self) -> None:
        while data := self._socket.recv(8192):
            self.heard.append(Heard(time.monotonic(), data.decode().split("\n")))

    def lines(self) -> list[str]:
        """Everything that was said, in order."""
        return [line for one in list(self.heard) for line in one.lines]

    def last(self, line: str) -> float:
        """When it was said last."""
        return max(one.at for one in list(self.heard) if line in one.lines)
