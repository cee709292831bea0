"""
A worker without a model, for what is measured of batches: what it answers is made of what it was asked.

    python -m tests.batches.mock_worker --port 9200 --seconds 0.02 --slots 64

The same body has the same answer, byte for byte, from every worker and at every attempt. Each takes about
`--seconds`, varied by the body; `--slots` are computed at a time and the others wait.

`GET /hold/100` lets 100 more requests be answered; further ones wait until `GET /release`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import socket
import time
from collections import deque
from typing import cast

import httptools

MODEL = "mock"
WORDS = ("the", "baton", "goes", "from", "hand", "to", "hand", "and", "none", "is", "dropped")


def answer_to(body: bytes) -> bytes:
    """A chat completion."""
    digest = hashlib.sha256(body).digest()
    text = " ".join(WORDS[byte % len(WORDS)] for byte in digest)
    answer = {
        "id": f"chatcmpl-{digest.hex()[:24]}", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": len(body), "completion_tokens": 32, "total_tokens": len(body) + 32},
    }  # fmt: skip
    return json.dumps(answer).encode()


def _http(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class Slots:
    """How many are computed at a time; the others wait in the order of their coming."""

    def __init__(self, slots: int, seconds: float) -> None:
        self._free = slots
        self._seconds = seconds
        self._left = math.inf
        self._waiting: deque[Connection] = deque()

    def enter(self, connection: Connection) -> None:
        if not self._free or not self._left:
            self._waiting.append(connection)
            return
        self._free -= 1
        self._left -= 1
        body = connection.received
        share = 0.5 + hashlib.blake2b(body, digest_size=1).digest()[0] / 256
        asyncio.get_running_loop().call_later(self._seconds * share, self._leave, connection, body)

    def _leave(self, connection: Connection, body: bytes) -> None:
        connection.say(answer_to(body))
        self._free += 1
        self._next()

    def allow(self, more: float) -> None:
        """Begin so many more; the others wait for the next call."""
        self._left = more
        self._next()

    def _next(self) -> None:
        while self._waiting and self._free and self._left:
            next_one = self._waiting.popleft()
            if not next_one.gone:
                self.enter(next_one)


class Connection(asyncio.Protocol):
    """One connection of a router's."""

    def __init__(self, slots: Slots, load: bytes) -> None:
        self.received = b""
        self.gone = False
        self._capacity = slots
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpRequestParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self.received = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self.received += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            self._capacity.enter(self)
        else:
            _, command, *count = self._url.split(b"/")
            if command in (b"hold", b"release"):
                self._capacity.allow(int(count[0]) if count else math.inf)
            self.say(self._load if self._url == b"/load" else b"{}")

    def say(self, body: bytes) -> None:
        if not self.gone:
            self._transport.write(_http(body))


async def serve(port: int, slots: int, seconds: float) -> None:
    """Until it is killed."""
    load = {"role": "decode", "model": MODEL, "total_blocks": 1_000_000, "free_blocks": 1_000_000,
            "compatibility": "c", "epoch": str(time.time_ns())}  # fmt: skip
    shared = Slots(slots, seconds)
    page = json.dumps(load).encode()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(shared, page), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.02)
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.slots, given.seconds))


if __name__ == "__main__":
    main()
