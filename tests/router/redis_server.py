"""A real Redis, started and ended by the tests that need one, and an unkind server in its place."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from types import TracebackType

import pytest

from tests.ports import steady_port

START_S = 60.0


class RedisServer:
    """One server on 127.0.0.1, which keeps nothing when it stops."""

    def __init__(self) -> None:
        """Skips the test, naming what is missing."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self._program = program
        self.port = steady_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns once it accepts connections."""
        options = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=2).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self._process.poll() is None, "redis does not start"
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(START_S)


class UnkindRedis:
    """
    Passes commands to a Redis, or to none, and spoils what comes back.

    Without a Redis, a script gets `reply`, or none, and other commands get +OK. After a part of a line the
    connection is closed. With a Redis, replies wait until `released`, and after `cut` bytes of them the
    connection is closed.
    """

    def __init__(self, port: int = 0, reply: bytes | None = None) -> None:
        """`port` of the Redis."""
        self._redis = port
        self.reply = reply
        self.cut: int | None = None
        self.released = asyncio.Event()
        self.released.set()
        self.scripts = 0
        """How many scripts have been called."""

    async def __aenter__(self) -> UnkindRedis:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://user:secret@127.0.0.1:{self.port}/0"
        self._tasks: set[asyncio.Task[object]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.released.set()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self._redis:
                await self._relay(reader, writer)
            else:
                await self._answer(reader, writer)
        except (OSError, EOFError):
            pass  # the client has left
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            count = int((await reader.readuntil())[1:])
            words = [await reader.readexactly(int((await reader.readuntil())[1:]) + 2) for _ in range(count)]
            if words[0].strip() not in (b"EVALSHA", b"SCRIPT"):
                writer.write(b"+OK\r\n")
            elif self.reply is not None:
                writer.write(self.reply)
                if not self.reply.endswith(b"\r\n"):
                    return

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._redis)

        async def replies() -> None:
            while piece := await back.read(65_536):
                await self.released.wait()
                writer.write(piece[: self.cut])
                if self.cut is not None:
                    writer.close()
                    return

        answering = asyncio.create_task(replies())
        try:
            while piece := await reader.read(65_536):
                self.scripts += piece.count(b"EVALSHA")
                forth.write(piece)
        finally:
            forth.close()
            await answering
