"""
A worker without a model, as a process of its own, that fails on demand.

It answers as a decode worker does, with its load, its report of each prompt, and the comments that a stream
is resumed from. Its text is a function of the prompt and the position, so that another worker that resumes
an answer must give the very next word. One line of JSON on standard input sets its `Fault`; it answers each
with one of its `MockCounts`.

    python -m tests.faults.mock_worker --role decode
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import zlib
from typing import Any

import msgspec

from baton_api import headers
from baton_api.errors import InternalError
from baton_api.prompt_report import PromptReport
from baton_api.stream_comments import BODY, Beginning, Resumption, begin_line, tokens_line
from baton_api.workers import Load, Role
from baton_router.workers.costs import WorkerKind

TOKENS = 20
"""Of an answer that does not say how many."""

BLOCK = 16
BLOCKS_EACH = 4
"""That a request holds while it is here."""

TOTAL_BLOCKS = 4096
BYTES_PER_TOKEN = 4


class Fault(msgspec.Struct, frozen=True):
    """How it goes wrong with the next requests to generate; one without a name does not."""

    name: str = ""
    status: int = 500
    after: int = 3
    """Events that go out before."""
    times: int = 0
    """Requests that meet it; 0 is all of them."""
    step_s: float = 0.005
    """From one token to the next, fault or not."""
    fallback: str = ""
    """Reason for computing a prompt itself, if the router named `fallback_of`."""
    fallback_of: str = ""
    """A prefill worker's control address."""
    forget: bool = False
    """Whether it forgets the prefill workers of earlier requests."""
    path: str = ""
    """Only requests to this path meet it, if one is named."""
    anew: bool = False
    """Whether it takes itself for another process from now on."""


class MockCounts(msgspec.Struct):
    """Outcomes of the requests so far."""

    port: int = 0
    epoch: str = ""
    requests: int = 0
    running: int = 0
    met: int = 0
    """That met the fault."""
    resumed: int = 0
    wrong: int = 0
    """Resumed from tokens that no worker had drawn."""
    left: int = 0
    """Connections with an unfinished answer that were closed from the other side."""
    computed: list[str] = msgspec.field(default_factory=list)
    """Control addresses of the prefill workers of its requests, the last hundred."""


def word(prompt: bytes, position: int) -> tuple[int, str]:
    """The token at a position of the answer, and its text."""
    token = zlib.crc32(b"%d" % position, zlib.crc32(prompt)) % 50_000
    return token, f" w{token}"


def text(prompt: bytes, tokens: int) -> str:
    """A whole answer."""
    return "".join(word(prompt, position)[1] for position in range(tokens))


class Died(Exception):
    """It breaks off here."""


class MockRequest:
    """One request as it arrived."""

    def __init__(self, path: str, given: dict[str, str], body: bytes) -> None:
        self.path = path
        self.headers = given
        fields: dict[str, Any] = msgspec.json.decode(body)
        self.stream = bool(fields.get("stream"))
        self.choices = int(fields.get("n") or 1)
        self.tokens = int(fields.get("max_tokens") or TOKENS)
        self.resumption: Resumption | None = None
        if BODY in fields:
            self.resumption = msgspec.convert(fields[BODY], Resumption)
        prompt = fields.get("messages") or fields.get("prompt") or fields.get("input")
        self.prompt = msgspec.json.encode([prompt, fields.get("seed")])
        self.follows = headers.RESUMABLE in given and self.choices == 1


class MockWorker:
    """The process's one worker."""

    def __init__(self, role: Role, epoch: str) -> None:
        self.role = role
        self.fault = Fault()
        self.counts = MockCounts(epoch=epoch)
        self._held: set[bytes] = set()
        """Prompts whose blocks it has."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024)
        self.counts.port = self._server.sockets[0].getsockname()[1]

    async def become(self, fault: Fault) -> None:
        """Fail like this from now on."""
        self.fault = fault
        self.counts.met = 0
        if fault.anew:
            self.counts.epoch += "+"
        if fault.name == "refuse" and self._server is not None:
            self._server.close()
            self._server = None
            for writer in list(self._writers):
                writer.transport.abort()
        elif fault.name != "refuse" and self._server is None:
            await self.listen(self.counts.port)
        if fault.name == "drop_kv":
            self._held.clear()
        if fault.forget:
            self.counts.computed = []

    @property
    def load(self) -> Load:
        running = self.counts.running
        return Load(
            role=self.role,
            model="tiny",
            running=running,
            step_s=self.fault.step_s,
            free_blocks=TOTAL_BLOCKS - BLOCKS_EACH * running,
            total_blocks=TOTAL_BLOCKS,
            block_size=BLOCK,
            draining=self.fault.name == "drain",
            control=f"127.0.0.1:{self.counts.port}" if self.role is Role.PREFILL else "",
            epoch=self.counts.epoch,
            compatibility="mock",
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                given = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])
                }
                body = await reader.readexactly(int(given.get("content-length", 0)))
                if method == "GET":
                    await self._tell(path, reader, writer)
                else:
                    await self._generate(MockRequest(path, given, body), reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, Died):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)

    async def _tell(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fault.name == "silent":
            await reader.read(1)
            raise Died
        if path == "/load":
            writer.write(plain(200, msgspec.json.encode(self.load)))
        else:
            writer.write(plain(503 if self.fault.name == "not_ready" else 200, b"{}"))

    async def _generate(
        self, request: MockRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer, unless the asker leaves before."""
        self.counts.requests += 1
        self.counts.running += 1
        fault = self._met(request)
        answering = asyncio.ensure_future(self._answer(request, fault, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.counts.left += 1
                raise Died
            answering.result()
        finally:
            self.counts.running -= 1
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _met(self, request: MockRequest) -> Fault:
        fault = self.fault
        elsewhere = fault.path and fault.path != request.path
        if elsewhere or (fault.times and self.counts.met >= fault.times):
            return Fault(step_s=fault.step_s)
        self.counts.met += 1
        return fault

    async def _answer(self, request: MockRequest, fault: Fault, writer: asyncio.StreamWriter) -> None:
        match fault.name:
            case "status":
                error = {"message": "so it is", "type": "server_error", "param": None, "code": "told"}
                writer.write(plain(fault.status, json.dumps({"error": error}).encode()))
                return
            case "reset":
                raise Died
            case "hang" | "silent":
                await asyncio.Event().wait()
            case "reset_in_head":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-ty")
                await writer.drain()
                raise Died
            case "malformed":
                writer.write(b"HTTP/1.1 2OO yes\r\n: \x00\r\n\r\n")
                return
        if request.stream:
            await self._stream(request, fault, writer)
        else:
            await self._whole(request, fault, writer)

    async def _whole(self, request: MockRequest, fault: Fault, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(request.tokens * fault.step_s)
        answer_text = text(request.prompt, request.tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= (
            {"message": {"role": "assistant", "content": answer_text}}
            if "chat" in request.path
            else {"text": answer_text}
        )
        answer = plain(
            200, json.dumps({"id": "whole", "choices": [choice]}).encode(), self._report(request, fault)
        )
        if fault.name in ("die", "half_line", "no_done"):
            writer.write(answer[:-20])
            await writer.drain()
            raise Died
        if fault.name in ("hang_after_head", "hang_in_stream"):
            writer.write(answer[: answer.index(b"\r\n\r\n") + 4])
            await asyncio.Event().wait()
        writer.write(answer)

    async def _stream(self, request: MockRequest, fault: Fault, writer: asyncio.StreamWriter) -> None:
        before = request.resumption
        begun = before.beginning if before else Beginning(f"mock-{os.getpid()}", int(time.time()), 0, 0)
        drawn = before.tokens if before else []
        if before is not None:
            self.counts.resumed += 1
            right = [word(request.prompt, position)[0] for position in range(len(drawn))]
            self.counts.wrong += drawn != right
        report = self._report(request, fault)
        head = ("HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", report)
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n")
        if fault.name == "hang_after_head":
            await writer.drain()
            await asyncio.Event().wait()
        if request.follows:
            writer.write(chunk(begin_line(begun)))
        events = Events(request, begun)
        for number, position in enumerate(range(len(drawn), request.tokens)):
            await asyncio.sleep(fault.step_s)
            if number == fault.after:
                await self._go_wrong(fault, events, writer)
                if fault.name == "no_done":
                    return
            token, word_text = word(request.prompt, position)
            event = events.word(word_text)
            if request.follows:
                event += tokens_line([token], ended=False)
            writer.write(chunk(event))
            await writer.drain()
        writer.write(chunk(events.end()) + b"0\r\n\r\n")

    async def _go_wrong(self, fault: Fault, events: Events, writer: asyncio.StreamWriter) -> None:
        match fault.name:
            case "die":
                raise Died
            case "exit":
                os._exit(9)
            case "half_line":
                writer.write(chunk(events.word(" half")[:20]))
                await writer.drain()
                raise Died
            case "hang_in_stream":
                while True:  # the process lives, and says so
                    writer.write(chunk(b": keep-alive\n\n"))
                    await asyncio.sleep(0.2)
            case "freeze":
                await asyncio.Event().wait()
            case "no_done":
                writer.write(b"0\r\n\r\n")
            case "fail_in_stream":
                error = {
                    "message": "so it is",
                    "type": "server_error",
                    "param": None,
                    "code": InternalError.code,
                }
                writer.write(chunk(b"data: " + json.dumps({"error": error}).encode() + b"\n\n"))
                await writer.drain()
                raise Died

    def _report(self, request: MockRequest, fault: Fault) -> str:
        control = request.headers.get(headers.PREFILL, "")
        tokens = max(1, len(request.prompt) // BYTES_PER_TOKEN)
        cached = tokens - 1 if request.prompt in self._held and fault.name != "drop_kv" else 0
        if fault.name != "drop_kv":
            self._held.add(request.prompt)
        fallback = fault.fallback if control and control == fault.fallback_of else ""
        if control:
            self.counts.computed = [*self.counts.computed, control][-100:]
        report = PromptReport(
            tokens=tokens,
            cached=cached,
            held=cached,
            queue_s=0.0,
            compute_s=compute_s(tokens - cached, tokens),
            transfer_s=0.001 if control else 0.0,
            remote=bool(control) and not fallback,
            fallback=fallback,
        )
        return f"{headers.PROMPT}: {report.encode()}"


class Events:
    """The events of one stream, as its path writes them."""

    def __init__(self, request: MockRequest, begun: Beginning) -> None:
        self._request = request
        self._begun = begun
        self._number = 0

    def word(self, word_text: str) -> bytes:
        if self._request.path == "/v1/responses":
            return self._typed("response.output_text.delta", {"delta": word_text})
        return b"".join(self._chunk(index, word_text, None) for index in range(self._request.choices))

    def end(self) -> bytes:
        if self._request.path == "/v1/responses":
            return self._typed("response.completed", {"response": {"id": "r", "status": "completed"}})
        last = b"".join(self._chunk(index, "", "stop") for index in range(self._request.choices))
        return last + b"data: [DONE]\n\n"

    def _chunk(self, index: int, word_text: str, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        choice |= {"delta": {"content": word_text}} if "chat" in self._request.path else {"text": word_text}
        event = {"id": self._begun.id, "created": self._begun.created, "choices": [choice]}
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def _typed(self, name: str, fields: dict[str, Any]) -> bytes:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()


def compute_s(uncached: int, context: int) -> float:
    """Reported time of a prompt, as a router expects it of an unknown worker."""
    return WorkerKind().new_worker().seconds(uncached, context)


def plain(status: int, body: bytes, *lines: str) -> bytes:
    """An answer with its length."""
    head = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--role", type=Role, default=Role.DECODE)
    arguments.add_argument("--port", type=int, default=0)
    given = arguments.parse_args()
    worker = MockWorker(given.role, f"{os.getpid()}-{time.time_ns()}")
    await worker.listen(given.port)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    print(json.dumps({"port": worker.counts.port}), flush=True)
    while line := await orders.readline():
        if line.strip():
            await worker.become(msgspec.json.decode(line, type=Fault))
        print(msgspec.json.encode(worker.counts).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
