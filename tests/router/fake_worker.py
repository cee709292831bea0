"""
A fake worker: a small real HTTP server that answers like a worker, or fails on command.

Its `behaviour` handles requests to generate: an async function that writes the answer. The functions below
are the ways in which workers fail. The fake records all requests.
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
class WorkerRequest:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given == name), None)


Behaviour = Callable[["FakeWorker", WorkerRequest, asyncio.StreamWriter], Awaitable[None]]

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


async def answer(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    if not json.loads(request.body).get("stream"):
        writer.write(plain(200, whole_answer()))
        return
    writer.write(STREAM_HEAD)
    for part in whole_stream().split(b"\n\n")[:-1]:
        writer.write(chunk(part + b"\n\n"))
        await asyncio.sleep(0)
    writer.write(STREAM_END)


def saying(status: int, body: bytes, *headers: tuple[str, str]) -> Behaviour:
    """Always the same answer."""

    async def say(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(status, body, *headers))

    return say


def streaming(*parts: bytes, end: bool = True) -> Behaviour:
    """These bytes as a stream, each in a chunk of its own; without an end the worker then dies."""

    async def stream(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
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


async def die_at_once(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def crash(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    """The whole process dies, with all that it had."""
    worker.crashing = asyncio.ensure_future(worker.die())
    await asyncio.Event().wait()


async def die_after_the_head(
    worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter
) -> None:
    writer.write(STREAM_HEAD)
    await writer.drain()
    writer.close()


async def die_in_the_body(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(plain(200, whole_answer())[:-20])
    await writer.drain()
    writer.close()


async def hang(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def hang_in_the_stream(
    worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter
) -> None:
    writer.write(STREAM_HEAD + chunk(event("The")))
    await asyncio.Event().wait()


async def gated(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    """A stream whose first event comes at once and whose rest waits for `release`."""
    writer.write(STREAM_HEAD + chunk(event("The")))
    await worker.release.wait()
    writer.write(chunk(event(None, "stop") + b"data: [DONE]\n\n") + STREAM_END)


async def flood(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
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
        name: str = "",
    ) -> None:
        self.behaviour = behaviour
        self.load = Load(
            role=role,
            model=model,
            name=name,
            control=control,
            compatibility=compatibility,
            epoch="1",
            total_blocks=100,
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
        """Answers of other paths to GET."""
        self.probed: list[WorkerRequest] = []
        self.requests: list[WorkerRequest] = []
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
        """Act like a killed process: reset all connections and stop listening."""
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
                request = await _read(reader)
                if not await self._answer(request, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(
        self, request: WorkerRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the answer went out; False if the asker left before."""
        if (
            self.key
            and request.target != "/ready"
            and request.header("authorization") != f"Bearer {self.key}"
        ):
            writer.write(plain(401, b'{"error": {"code": "invalid_api_key"}}'))
            return True
        if request.method == "GET":
            if self.silent:
                await reader.read(1)
            elif self.nonsense:
                writer.write(plain(200, self.nonsense))
            elif request.target == "/health_generate":
                self.probed.append(request)
                writer.write(self.probe)
            elif request.target in self.pages:
                writer.write(plain(200, self.pages[request.target]()))
            elif request.target == "/load":
                writer.write(plain(200, msgspec.json.encode(self.load)))
            else:
                writer.write(plain(200 if self.ready else 503, b"{}"))
            return True
        self.requests.append(request)
        self.arrived.set()
        answering = asyncio.ensure_future(self.behaviour(self, request, writer))
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


async def _read(reader: asyncio.StreamReader) -> WorkerRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    length = next((int(value) for name, value in headers if name == "content-length"), 0)
    return WorkerRequest(method, target, headers, await reader.readexactly(length))
