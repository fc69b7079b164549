"""A command in tmux, as an operator sees it: a real terminal with a size, keys, and a screen."""

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Self

WAIT_S = 60.0
MISSING = shutil.which("tmux") is None
_numbers = itertools.count()


class Tmux:
    """One server of its own with one window; gone at the end, with what runs in it."""

    def __init__(self, command: Sequence[str], *, width: int, height: int) -> None:
        self._server = f"pdnode-test-{os.getpid()}-{next(_numbers)}"
        self._tmux(
            "new-session", "-d", "-x", str(width), "-y", str(height), *command,
            env={"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1", "TERM": "xterm-256color"},
        )  # fmt: skip
        self._tmux("set-option", "-g", "remain-on-exit", "on")
        self._tmux("set-option", "-g", "status", "off")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def press(self, *keys: str) -> None:
        """Names as tmux has them: x, Enter, Escape; a longer text is typed."""
        self._tmux("send-keys", *keys)

    def screen(self) -> list[str]:
        """The lines that are shown, without blanks at their ends."""
        return self._tmux("capture-pane", "-p").splitlines()

    def until(self, holds: Callable[[list[str]], object]) -> list[str]:
        """The first screen for which `holds`."""
        deadline = time.monotonic() + WAIT_S
        while True:
            lines = self.screen()
            if holds(lines):
                return lines
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.02)

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._server, "-f", "/dev/null", *words],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
            env=os.environ | (env or {"LC_ALL": "C.UTF-8"}),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout
