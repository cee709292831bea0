"""
A worker that behaves: a small real HTTP server that answers as one would, or fails as it is told to.

What it does with a request to generate is its `behaviour`, an async function that writes the answer;
the ones below are the ways in which workers go wrong. It remembers everything it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

import msgspec

from baton_api.workers import Load, Role


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given == name), None)


Behaviour = Callable[["FakeWorker", Asked, asyncio.StreamWriter], Awaitable[None]]

WORDS = ("The", " capital", " of", " France", " is", " Paris", ".")


def event(word: str | None, finish: str | None = None) -> bytes:
    """One chunk of a chat completion as an event."""
    delta = {"content": word} if word is not None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"


def whole_stream() -> bytes:
    return b"".join(event(word) for word in WORDS) + event(None, "stop") + b"data: [DONE]\n\n"


def whole_answer() -> bytes:
    message = {"role": "assistant", "content": "".join(WORDS)}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({**answer, "choices": [choice], "usage": usage}).encode()


def plain(status: int, body: bytes, *headers: tuple[str, str]) -> bytes:
    """An answer with its length."""
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    if not json.loads(asked.body).get("stream"):
        writer.write(plain(200, whole_answer()))
        return
    writer.write(STREAM_HEAD)
    for part in whole_stream().split(b"\n\n")[:-1]:
        writer.write(chunk(part + b"\n\n"))
        await asyncio.sleep(0)
    writer.write(STREAM_END)


def saying(status: int, body: bytes, *headers: tuple[str, str]) -> Behaviour:
    """Always the same answer."""

    async def say(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(status, body, *headers))

    return say


def streaming(*parts: bytes, end: bool = True) -> Behaviour:
    """These bytes as a stream, each in a chunk of its own; without an end the worker then dies."""

    async def stream(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for part in parts:
            writer.write(chunk(part))
            await writer.drain()
        if end:
            writer.write(STREAM_END)
        else:
            await worker.release.wait()
            writer.transport.abort()

    return stream


async def die_at_once(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def crash(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """The whole process dies, with all that it had."""
    worker.crashing = asyncio.ensure_future(worker.die())
    await asyncio.Event().wait()


async def die_after_the_head(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    await writer.drain()
    writer.close()


async def die_in_the_body(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(plain(200, whole_answer())[:-20])
    await writer.drain()
    writer.close()


async def hang(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def hang_in_the_stream(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(event("The")))
    await asyncio.Event().wait()


async def gated(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A stream whose first event comes at once and whose rest waits for `release`."""
    writer.write(STREAM_HEAD + chunk(event("The")))
    await worker.release.wait()
    writer.write(chunk(event(None, "stop") + b"data: [DONE]\n\n") + STREAM_END)


async def flood(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A stream without an end, written as fast as it is taken."""
    writer.write(STREAM_HEAD)
    part = chunk(event("x" * 16_000))
    while True:
        writer.write(part)
        await writer.drain()
        worker.flooded += len(part)


class FakeWorker:
    """`async with FakeWorker() as worker`: it listens at `worker.url` until the end."""

    def __init__(
        self,
        behaviour: Behaviour = answer,
        *,
        role: Role = Role.DECODE,
        model: str = "tiny",
        control: str = "",
        compatibility: str = "same",
    ) -> None:
        self.behaviour = behaviour
        self.load = Load(
            role=role, model=model, control=control, compatibility=compatibility, epoch="1", total_blocks=100
        )
        self.ready = True
        self.silent = False
        """With it, questions about health are not answered any more."""
        self.key = ""
        """With it, all but /ready wants it."""
        self.nonsense = b""
        """With it, they are answered with this."""
        self.probe = plain(200, b"")
        """The answer to /health_generate."""
        self.pages: dict[str, Callable[[], bytes]] = {}
        """What other paths answer to GET, when they are asked."""
        self.probed: list[Asked] = []
        self.asked: list[Asked] = []
        """Requests to generate, in the order of their arrival."""
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        """Set when a request's connection was closed before its answer was complete."""
        self.release = asyncio.Event()
        self.crashing: asyncio.Future[None] | None = None
        self.flooded = 0
        self.connections = 0

    async def __aenter__(self) -> FakeWorker:
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """As a killed process: all connections are reset and nobody listens."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if not self._server.is_serving():  # it was on its way while the worker died
            writer.transport.abort()
            return
        self._writers.add(writer)  # here: a task that is ended before its first step closes nothing
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                asked = await _read(reader)
                if not await self._answer(asked, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the answer went out; False if the asker left before."""
        if self.key and asked.target != "/ready" and asked.header("authorization") != f"Bearer {self.key}":
            writer.write(plain(401, b'{"error": {"code": "invalid_api_key"}}'))
            return True
        if asked.method == "GET":
            if self.silent:
                await reader.read(1)
            elif self.nonsense:
                writer.write(plain(200, self.nonsense))
            elif asked.target == "/health_generate":
                self.probed.append(asked)
                writer.write(self.probe)
            elif asked.target in self.pages:
                writer.write(plain(200, self.pages[asked.target]()))
            elif asked.target == "/load":
                writer.write(plain(200, msgspec.json.encode(self.load)))
            else:
                writer.write(plain(200 if self.ready else 503, b"{}"))
            return True
        self.asked.append(asked)
        self.arrived.set()
        answering = asyncio.ensure_future(self.behaviour(self, asked, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            done, _ = await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
        results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if answering in done and not isinstance(results[0], ConnectionError):
            return True
        self.left.set()
        return False


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    length = next((int(value) for name, value in headers if name == "content-length"), 0)
    return Asked(method, target, headers, await reader.readexactly(length))
