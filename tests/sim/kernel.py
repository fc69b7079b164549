"""Virtual time, and one small event loop per node, so that any node can be stopped or slowed.

The daemon's own parts (peer manager, messengers, step loop, service) run unchanged on `NodeLoop`;
nothing runs by itself, the kernel calls whatever is due next. One thread, one order, one seed.
"""

import asyncio
import contextlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any

from pdnode.errors import PdnodeError


class Failure(BaseException):
    """The seed is bad; the text says what promise was broken. No `except Exception` may hide it."""


def promise(kept: bool, text: str) -> None:
    if not kept:
        raise Failure(text)


class Kernel:
    """What happens next. `at` is the only way to make something happen."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.fault: BaseException | None = None
        self.happened = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), act, arguments))

    def run(self, done: Callable[[], bool], *, until: float, most: int) -> None:
        """Until `done`, or time `until`; `most` things may happen before that is a failure."""
        heap = self._heap
        while heap and not done():
            if heap[0][0] > until:
                self.now = until
                return
            self.now, _, act, arguments = heapq.heappop(heap)
            act(*arguments)
            self.happened += 1
            if self.fault is not None:
                raise self.fault
            if self.happened > most:
                raise Failure(f"no end after {most} events")


class NodeLoop(asyncio.AbstractEventLoop):
    """The event loop of one process. `lag` draws how long a ready callback waits for its turn."""

    def __init__(self, kernel: Kernel, *, offset_s: float, lag: Callable[[], float]) -> None:
        self.alive = True
        self.frozen = False
        self._kernel = kernel
        self._offset_s = offset_s  # clocks of two nodes are never equal
        self._lag = lag
        self._ready: deque[asyncio.Handle] = deque()
        self._due = False
        self._tasks: list[asyncio.Task[Any]] = []

    # asyncio.AbstractEventLoop, as far as the daemon's parts use it

    def time(self) -> float:
        return self._kernel.now + self._offset_s

    def call_soon(
        self,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self.alive:
            self._ready.append(handle)
            self._wake()
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self.alive:
            self._kernel.at(max(0.0, when - self.time()), self._timer, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Who awaits it may never come, and the collector does not run."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PdnodeError):
            self.call_exception_handler({"message": "a task failed", "exception": error})

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.alive and self._kernel.fault is None:
            error = context.get("exception")
            self._kernel.fault = error or Failure(context["message"])

    # the kernel's side

    @property
    def has_work(self) -> bool:
        return bool(self._ready)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self._wake()

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs any more, not even a `finally`."""
        self.alive = False
        self._ready.clear()

    def bury(self) -> None:
        """Take the dead apart without a word, so that the collector does not run their ends."""
        self.kill()
        asyncio._set_running_loop(self)
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(
                    Exception, Failure
                ):  # of a `finally` in what is broken anyway
                    task.get_coro().close()  # type: ignore[union-attr]
            elif not task.cancelled():
                task.exception()
        asyncio._set_running_loop(None)

    def _timer(self, handle: asyncio.TimerHandle) -> None:
        if self.alive and not handle.cancelled():
            self._ready.append(handle)
            self._wake()

    def _wake(self) -> None:
        if self._ready and not self._due and self.alive and not self.frozen:
            self._due = True
            self._kernel.at(self._lag(), self._turn)

    def _turn(self) -> None:
        self._due = False
        if not self.alive or self.frozen:
            return
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if not self.alive:  # killed from inside its own turn
                    return
        finally:
            asyncio._set_running_loop(None)
        self._wake()
