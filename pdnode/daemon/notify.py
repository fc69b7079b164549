"""What the daemon tells systemd: one datagram to $NOTIFY_SOCKET for every change (sd_notify(3))."""

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping


class Notifier:
    """Says nothing where no supervisor listens. Takes its variables out of `environ`, so that no
    child process inherits them. Runs on the event loop; a full socket loses the message.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        path = environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self.watchdog_s = _watchdog_s(environ)
        self._status = ""

    def send(self, *assignments: str) -> None:
        """`READY=1` and the like, in one message."""
        if not self._address or not assignments:
            return
        with contextlib.suppress(OSError):  # gone or busy, it must not end what it supervises
            self._socket.sendto("\n".join(assignments).encode(), self._address)

    def status(self, text: str) -> list[str]:
        """The assignment, if the text is a new one: a line of at most 200 characters."""
        line = "".join(letter if letter.isprintable() else " " for letter in text)[:200]
        if line == self._status:
            return []
        self._status = line
        return [f"STATUS={line}"]

    def close(self) -> None:
        self._socket.close()


def reloading() -> list[str]:
    """The begin of a reload; `READY=1` ends it."""
    return ["RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"]


def extend(seconds: float) -> str:
    """Start or stop may take so much longer, from now on."""
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"


def _watchdog_s(environ: MutableMapping[str, str]) -> float | None:
    """How long the supervisor waits for `WATCHDOG=1`; None if it does not, or not for this one."""
    text, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(text) / 1e6
