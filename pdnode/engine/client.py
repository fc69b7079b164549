"""The daemon's side of one worker process: start it, run steps, notice its end. No torch.

engine.group joins the workers of a TP group.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from pdnode.engine.protocol import (
    COUNTER_OFFSET,
    MAX_FRAME_BYTES,
    Frame,
    Init,
    Loading,
    Ready,
    Shutdown,
    Step,
    StepDone,
    ToDaemon,
    WorkerError,
)
from pdnode.errors import EngineDied
from pdnode.memory.handover import FrameError, FrameStream, close_fds

_KILL_AFTER_S = 5.0
_SPINNING_OFF = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def default_threads() -> int:
    """Compute threads where the operator names none: this process's CPUs, less one for the rest."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class Worker:
    """One worker process. Made by `start`; all methods belong to the loop that started it.

    `died` resolves, with the reason, as soon as the process is gone for any reason, `close`
    included; every call after that raises EngineDied. `base` is the running total of launched
    layers: a step's `base` must equal it, and `step` adds to it.
    """

    def __init__(self, process: subprocess.Popen[bytes], stream: FrameStream, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._stream = stream
        self._name = name
        self._decoder = msgspec.msgpack.Decoder(ToDaemon)
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._exited)
        self._fds: list[int] = []
        self._ready: Ready | None = None
        self._stepping = False
        self._last_words = ""
        self.base = 0
        self.died: asyncio.Future[EngineDied] = self._loop.create_future()

    @classmethod
    async def start(
        cls,
        init: Init,
        *,
        wake_fds: Sequence[int] = (),
        on_loading: Callable[[Loading], None] = lambda _: None,
        python: str = sys.executable,
        timeout_s: float = 300.0,
    ) -> Self:
        """Start a process and wait until its model is loaded.

        `wake_fds`: eventfds of the transfer core's threads, which raising a layer wakes, and in a
        group what Init says; they stay open here. `init.threads` 0: one per CPU of `init.cpus`,
        else `default_threads`. Must be called on the main thread: the kernel kills the worker when
        the *thread* that started it ends. The start itself blocks the loop for some milliseconds.
        EngineDied if the process ends or `timeout_s` passes first.
        """
        assert threading.current_thread() is threading.main_thread()
        if not init.threads:
            threads = len(init.cpus) or default_threads()
            init = msgspec.structs.replace(init, threads=threads)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            environment = os.environ | _SPINNING_OFF | {"OMP_NUM_THREADS": str(init.threads)}
            arguments = ("--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
            try:
                process = subprocess.Popen(
                    [python, "-m", "pdnode.engine.worker", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                )
            except OSError as error:
                ours.close()
                raise EngineDied(f"worker: {python} cannot be started: {error}") from error
        name = f"worker {process.pid}"
        if init.tp > 1:
            name = f"{name}, rank {init.rank} of {init.tp},"
        worker = cls(process, FrameStream(ours, max_bytes=MAX_FRAME_BYTES), name)
        try:
            async with asyncio.timeout(timeout_s):
                await worker._load(init, wake_fds, on_loading)
        except TimeoutError:
            await worker.close()
            raise EngineDied(f"worker: not ready after {timeout_s} s") from None
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready(self) -> Ready:
        assert self._ready is not None
        return self._ready

    @property
    def region_fd(self) -> int:
        """The KV region's memfd. Belongs to this object; `close` closes it (mappings stay)."""
        return self._fds[0]

    @property
    def counter_fd(self) -> int:
        """The counter page's memfd (layout: protocol.COUNTER_OFFSET …). Belongs to this object."""
        return self._fds[1]

    def layers_done(self) -> int:
        """What the layer counter shows now."""
        return int.from_bytes(os.pread(self.counter_fd, 8, COUNTER_OFFSET), sys.byteorder)

    async def step(self, step: Step) -> StepDone:
        """Run one pass; one at a time. EngineDied if the worker ends before it answers.

        A cancelled wait leaves the pass running: close the worker then.
        """
        if self.died.done():
            raise self.died.result()
        assert not self._stepping, "a step is in flight"
        assert step.base == self.base, f"base {step.base}, launched {self.base}"
        self._stepping = True
        await self._send(step)
        self.base += self.ready.layers
        answer, _ = await self._receive()
        if not isinstance(answer, StepDone) or answer.pass_id != step.pass_id:
            raise await self._refuse(f"answers {type(answer).__name__} to pass {step.pass_id}")
        self._stepping = False
        return answer

    def kill(self, why: str = "") -> None:
        """End the process without asking it; `died` follows and says why. Idempotent."""
        if not self.died.done():
            self._last_words = why or self._last_words
            self._process.kill()

    async def close(self) -> None:
        """Ask the process to end, kill it after a few seconds, reap it, close all. Idempotent."""
        if not self.died.done():
            if self._stepping or self._ready is None:
                # It reads no frames now, and nobody waits for what it computes.
                self._process.kill()
            else:
                try:
                    await self._send(Shutdown())
                except EngineDied:
                    self._process.kill()
            await asyncio.wait([self.died], timeout=_KILL_AFTER_S)
            if not self.died.done():
                self._process.kill()
                await self.died
        self._stream.close()
        close_fds(self._fds)
        self._fds.clear()

    async def _load(
        self, init: Init, wake_fds: Sequence[int], on_loading: Callable[[Loading], None]
    ) -> None:
        await self._send(init, wake_fds)
        while True:
            frame, fds = await self._receive()
            self._fds += fds
            if isinstance(frame, Loading):
                on_loading(frame)
                continue
            if not isinstance(frame, Ready) or len(self._fds) != 2:
                text = f"answers {type(frame).__name__} with {len(self._fds)} descriptors to init"
                raise await self._refuse(text)
            self._ready = frame
            return

    async def _send(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        try:
            await self._stream.send(msgspec.msgpack.encode(frame), fds)
        except OSError:
            raise await self._end() from None

    async def _receive(self) -> tuple[Loading | Ready | StepDone, list[int]]:
        try:
            received = await self._stream.receive()
            frame = None if received is None else self._decoder.decode(received.payload)
        except (FrameError, msgspec.DecodeError) as error:
            raise await self._refuse(str(error)) from error
        if isinstance(frame, WorkerError):
            self._last_words = frame.text
        if received is None or frame is None or isinstance(frame, WorkerError):
            raise await self._end()
        return frame, received.fds

    async def _refuse(self, what: str) -> EngineDied:
        """End a process that says what it must not."""
        self._last_words = what
        self._process.kill()
        return await self.died

    async def _end(self) -> EngineDied:
        """The reason of the process's end, which has begun: its side of the socket is closed."""
        done, _ = await asyncio.wait([self.died], timeout=_KILL_AFTER_S)
        if not done:
            self._process.kill()
        return await self.died

    def _exited(self) -> None:
        """The process is gone (called once, by the loop, when the pidfd becomes readable)."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        for received in self._stream.take_waiting():
            close_fds(received.fds)
            with contextlib.suppress(msgspec.DecodeError):
                frame = self._decoder.decode(received.payload)
                if isinstance(frame, WorkerError):
                    self._last_words = frame.text
        said = f": {self._last_words}" if self._last_words else ""
        self.died.set_result(EngineDied(f"{self._name} {how}{said}"))
