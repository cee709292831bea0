"""
The clients of a replay: they start by the clock and record the outcome of each request.

Their connections are those of `baton bench`, which acknowledge data immediately. Otherwise a router that
waits for acknowledgments would be charged for them as many times as the replay is faster than modeled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from baton_cli.bench.connection import Connection
from benchmarks.model_cluster import MODEL
from benchmarks.workloads import Arrival, Asking, Message

TIMEOUT_S = 90.0
"""Seconds from the last arrival to the last answer."""


@dataclass(slots=True)
class ReplayedRequest:
    """Outcome of one request, in real seconds."""

    wait: float = 0.0
    """To the first event."""
    tokens: int = 0
    cached: int = 0
    ok: bool = False
    token_s: float = 0.0
    """From one token of the answer to the next, on average; 0 if it was not measured."""


class Crowd:
    """All clients of one run: `workloads.Asking` for every session."""

    def __init__(self, port: int, speed: float) -> None:
        """`speed`: how much faster than meant the time between requests passes."""
        self.requests: list[ReplayedRequest] = []
        self._port = port
        self.speed = speed
        self._idle: list[Connection] = []

    async def ask(self, messages: list[Message], tokens: int) -> str:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
        body = json.dumps({"model": MODEL, "messages": messages, **options}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        client = await self._connected()
        one = ReplayedRequest()
        self.requests.append(one)
        answer = await client.ask(request)
        whole = answer.body.rstrip().endswith(b"[DONE]")
        one.ok = answer.status == 200 and not answer.failure and whole
        one.wait = answer.first - answer.sent
        if not one.ok:
            client.close()
            return ""
        self._idle.append(client)
        text, usage = _read(answer.body)
        one.tokens = usage["prompt_tokens"]
        one.cached = usage["prompt_tokens_details"]["cached_tokens"]
        return text

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)

    async def _connected(self) -> Connection:
        while self._idle:
            client = self._idle.pop()
            if client.usable:
                return client
        _, client = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return client


async def play(
    arrivals: Iterator[Arrival],
    asking: Asking,
    speed: float,
    clock: Callable[[], float],
    timeout_s: float = TIMEOUT_S,
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
        limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
    return lags


async def _whole(arrival: Arrival, asking: Asking) -> None:
    await arrival.session(asking)


def _read(body: bytes) -> tuple[str, dict[str, Any]]:
    text: list[str] = []
    usage: dict[str, Any] = {}
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return "".join(text), usage
