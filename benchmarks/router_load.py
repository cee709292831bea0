"""Clients for measuring routers: they ask again as soon as they have an answer, or keep a stream open."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

from benchmarks import mock_worker

RESPONSES = "/v1/responses"


@dataclass(slots=True)
class Client(asyncio.Protocol):
    """Asks again as soon as it has an answer."""

    requests: Iterator[bytes]
    until: float
    tokens: int = 0
    """Tokens of each answer; 0 for a whole one, which is not looked into."""
    quick: bool = False
    """Whether it acknowledges data immediately (TCP_QUICKACK), so that the router does not wait for it."""
    sent: float = 0.0
    first: float = 0.0
    came: int = 0
    """Tokens of the answer so far."""
    waits: list[float] = field(default_factory=list)
    errors: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    parser: httptools.HttpResponseParser | None = None
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        assert self.transport is not None
        self.parser = httptools.HttpResponseParser(self)
        self._acknowledge()
        self.sent, self.first, self.came = time.perf_counter(), 0.0, 0
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        self._acknowledge()
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.first = self.first or time.perf_counter()
        self.came += body.count(mock_worker.WORD)

    def on_message_complete(self) -> None:
        assert self.parser is not None and self.transport is not None
        self.waits.append((self.first or time.perf_counter()) - self.sent)
        self.errors += self.parser.get_status_code() != 200 or self.came < self.tokens
        if time.perf_counter() < self.until and self.parser.should_keep_alive():
            asyncio.get_running_loop().call_soon(self.ask)
        else:
            self.done.set()
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.errors += not self.done.is_set()
        self.done.set()

    def _acknowledge(self) -> None:
        if self.quick:  # the kernel forgets it now and then
            assert self.transport is not None
            connected: socket.socket = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def request(messages: list[dict[str, str]], tokens: int = 16, **fields: object) -> bytes:
    return _post("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, **fields})


def _post(path: str, fields: dict[str, object]) -> bytes:
    body = json.dumps({"model": "m", **fields}).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % path.encode()
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def requests(kind: str, tokens: int, count: int = 400) -> list[bytes]:
    """
    Prompts, `short` or `long` (33 KB), that begin alike in sixteen ways and end each in its own.

    Answers are streams of so many tokens, or whole with 0.

    `kept` and `stateless` are short ones to /v1/responses, whose responses the router keeps or not.
    """
    rng = random.Random(1)

    def words(number: int) -> str:
        return " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(number)
        )

    if kind in ("kept", "stateless"):
        return [
            _post(
                RESPONSES, {"input": f"q{number} {words(30)}", "store": kind == "kept", "stream": tokens > 0}
            )
            for number in range(count)
        ]
    beginnings = [words(4700 if kind == "long" else 20) for _ in range(16)]
    return [
        request(
            [
                {"role": "system", "content": beginnings[number % 16]},
                {"role": "user", "content": f"q{number} {words(12)}"},
            ],
            tokens or 16,
            stream=tokens > 0,
        )
        for number in range(count)
    ]


async def load(
    ports: Sequence[int],
    clients: int,
    seconds: float,
    messages: Sequence[bytes],
    tokens: int = 0,
    quick: bool = False,
) -> tuple[list[float], int]:
    """
    Return the seconds to the first byte of each answer, and the number of failures.

    Each answer must have so many tokens.
    """
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + seconds

    def endless(start: int) -> Iterator[bytes]:
        while True:
            yield messages[start % len(messages)]
            start += 7

    crowd = [Client(endless(number), until, tokens, quick) for number in range(clients)]
    for number, client in enumerate(crowd):
        await loop.create_connection(lambda one=client: one, "127.0.0.1", ports[number % len(ports)])  # type: ignore[misc]
    await asyncio.wait_for(asyncio.gather(*(client.done.wait() for client in crowd)), seconds + 30)
    return [wait for client in crowd for wait in client.waits], sum(client.errors for client in crowd)


class Listener(asyncio.Protocol):
    """One open stream: whether it has begun, and whether it came to its end."""

    def __init__(self, request: bytes) -> None:
        self._message = request
        self._heard = b""
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    @property
    def whole(self) -> bool:
        return b"data: [DONE]\n\n" in self._heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._heard = (self._heard + data)[-2000:]
        if b"data: " in self._heard:
            self.begun.set()
        if self.whole:
            self.ended.set()
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.begun.set()
        self.ended.set()
