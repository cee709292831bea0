"""How fast a client connection must move bytes (`Pace`), and when it may read on (`ReadTurns`)."""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

MINIMUM_RATE = 4096
"""Bytes per second."""

READ_AT_ONCE = 8
"""Connections that begin to read on in one turn of the event loop. Each reads up to 256 KB in it, which takes
up to 1 ms, and all others wait."""


class Pace:
    """
    The time that a client has left to send a body or to read a response, in seconds of one clock.

    It may stop for a while, but must move some bytes per second on average. So every transfer ends, and a
    client with a poor connection is still served.
    """

    __slots__ = ("_grace_s", "_until")

    def __init__(self, now: float, grace_s: float) -> None:
        """`grace_s`: the longest time without a byte."""
        self._grace_s = grace_s
        self._until = now + grace_s

    def moved(self, size: int, now: float) -> None:
        """`size` bytes were sent or read: they earn the time that they take at the minimum rate."""
        self._until = min(self._until + size / MINIMUM_RATE, now + self._grace_s)

    def wait(self, seconds: float) -> None:
        """The client had to wait for us."""
        self._until += seconds

    def late(self, now: float) -> bool:
        return now >= self._until


class ReadTurns:
    """Connections whose reading was paused, in the order in which they may read on."""

    def __init__(self) -> None:
        self._waiting: deque[PacedFlow] = deque()

    def add(self, flow: PacedFlow, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting.append(flow)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(READ_AT_ONCE, len(self._waiting))):
            self._waiting.popleft().read_on()
        if self._waiting:
            loop.call_soon(self._next, loop)


class PacedFlow(FlowControl):
    """One connection's flow control. It reads on when its turn comes."""

    def __init__(
        self, transport: asyncio.Transport, turns: ReadTurns, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(transport)
        self._turns = turns
        self._loop = loop
        self._waits = False

    def pause_reading(self) -> None:
        self._waits = False
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self._waits:
            self._waits = True
            self._turns.add(self, self._loop)

    def read_on(self) -> None:
        if self._waits and not self._transport.is_closing():
            super().resume_reading()
        self._waits = False
