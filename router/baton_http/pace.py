"""
The pace that a client owes: bytes of a body that it sends, or of a response that it reads.

It may do nothing for a time, and has to move some bytes per second on average. So a transfer ends, however
slow the client makes it, and a client with a poor connection is served.
"""

from __future__ import annotations

MINIMUM_RATE = 4096
"""Bytes per second."""


class Pace:
    """The time that a client has left for one transfer. All times are of one clock, in seconds."""

    __slots__ = ("_grace_s", "_until")

    def __init__(self, now: float, grace_s: float) -> None:
        """`grace_s`: the longest time without a byte."""
        self._grace_s = grace_s
        self._until = now + grace_s

    def moved(self, size: int, now: float) -> None:
        """`size` bytes have been sent or read: that is worth their time at the minimum rate."""
        self._until = min(self._until + size / MINIMUM_RATE, now + self._grace_s)

    def wait(self, seconds: float) -> None:
        """The client had to wait for us."""
        self._until += seconds

    def late(self, now: float) -> bool:
        return now >= self._until
