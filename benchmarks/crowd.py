"""
The clients of a replay: they come when they come, and note what became of each request.

They acknowledge what arrives at once (TCP_QUICKACK): a router that waits for that would otherwise be charged
for it as many times as the replay is faster than meant.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from benchmarks.model_cluster import MODEL
from benchmarks.workloads import Arrival, Asking, Message

PATIENCE_S = 90.0
"""Seconds after the last arrival's until the last answer."""


@dataclass(slots=True)
class Asked:
    """What became of one request, in seconds as they passed."""

    wait: float = 0.0
    """To the first event."""
    tokens: int = 0
    cached: int = 0
    ok: bool = False


@dataclass(slots=True)
class Client(asyncio.Protocol):
    """One connection, for one request after the other."""

    transport: asyncio.Transport | None = None
    parser: httptools.HttpResponseParser | None = None
    first: float = 0.0
    body: bytearray = field(default_factory=bytearray)
    done: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by class

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(False)

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        self._acknowledge()
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.first = self.first or time.perf_counter()
        self.body += body

    def on_message_complete(self) -> None:
        assert self.parser is not None and self.done is not None
        if not self.done.done():
            self.done.set_result(self.parser.get_status_code() == 200)

    async def ask(self, request: bytes) -> bool:
        """Whether the answer is whole and good; it is in `body`."""
        assert self.transport is not None
        self.parser = httptools.HttpResponseParser(self)
        self.first = 0.0
        self.body.clear()
        self.done = asyncio.get_running_loop().create_future()
        self._acknowledge()
        self.transport.write(request)
        return await self.done and bytes(self.body).rstrip().endswith(b"[DONE]")

    def _acknowledge(self) -> None:
        assert self.transport is not None
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class Crowd:
    """All clients of one run: `workloads.Asking` for every session."""

    def __init__(self, port: int, speed: float) -> None:
        """`speed`: how much faster than meant the time between requests passes."""
        self.asked: list[Asked] = []
        self._port = port
        self.speed = speed
        self._idle: list[Client] = []

    async def ask(self, messages: list[Message], tokens: int) -> str:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
        body = json.dumps({"model": MODEL, "messages": messages, **options}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        client = await self._connected()
        one = Asked()
        self.asked.append(one)
        sent = time.perf_counter()
        one.ok = await client.ask(request)
        one.wait = client.first - sent
        if not one.ok:
            assert client.transport is not None
            client.transport.close()
            return ""
        self._idle.append(client)
        said, usage = _read(bytes(client.body))
        one.tokens = usage["prompt_tokens"]
        one.cached = usage["prompt_tokens_details"]["cached_tokens"]
        return said

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)

    async def _connected(self) -> Client:
        while self._idle:
            client = self._idle.pop()
            if client.transport is not None and not client.transport.is_closing():
                return client
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self._port)
        return client


async def play(
    arrivals: Iterator[Arrival],
    asking: Asking,
    speed: float,
    clock: Callable[[], float],
    patience_s: float = PATIENCE_S,
) -> list[float]:
    """All sessions to their end. Gives how late each began."""
    start = clock()
    lags = []
    async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
        for arrival in arrivals:
            due = start + arrival.at_s / speed
            await asyncio.sleep(max(0.0, due - clock()))
            lags.append(clock() - due)
            group.create_task(_whole(arrival, asking))
        limit.reschedule(asyncio.get_running_loop().time() + patience_s)
    return lags


async def _whole(arrival: Arrival, asking: Asking) -> None:
    await arrival.session(asking)


def _read(body: bytes) -> tuple[str, dict[str, Any]]:
    said: list[str] = []
    usage: dict[str, Any] = {}
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            said += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return "".join(said), usage
