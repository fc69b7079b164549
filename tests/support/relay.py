"""A TCP relay between two nodes that can be cut or frozen: loss of a link, and half-open links."""

import asyncio
import contextlib


class Relay:
    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0
        self.connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def cut(self) -> None:
        """Reset all connections."""
        self._flowing.set()
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Carry nothing more, close nothing."""
        self._flowing.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends = {writer, other_writer}
            self._writers |= ends
            try:
                await asyncio.gather(
                    self._copy(reader, other_writer), self._copy(other_reader, writer)
                )
            finally:
                self._writers -= ends
                for end in ends:
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
