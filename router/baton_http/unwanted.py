"""
What clients send that nobody wants: the rest of a body after its answer, and everything after a refusal.

A client that is refused may send on: if it were cut off, it would not read why. What nobody wants is read the
more slowly, and refusals for lack of memory come the later, the more such connections its tenant has. So a
client that ignores refusals, or asks again at once, costs little.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from baton_http.flow import PacedFlow

REFUSAL_LIMIT_S = 2.0
"""Seconds of the longest delay of a refusal."""

REFUSAL_S = 0.02
"""Seconds by which each such connection of a tenant delays its next refusal for lack of memory."""

DISCARD_S = 0.005
"""Seconds by which each such connection delays the next read of what nobody wants."""

DISCARDED_LIMIT = 64 * 1024 * 1024
"""Bytes that a connection may send after its last request was answered or refused."""


class UnwantedInput:
    """What one connection sends that nobody wants."""

    def __init__(
        self,
        connections: Counter[str],
        transport: asyncio.Transport,
        flow: PacedFlow,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`connections`: those that send what nobody wants, by tenant; shared by all connections."""
        self._connections = connections
        self._transport = transport
        self._flow = flow
        self._loop = loop
        self.tenant: str | None = None
        """For whom this connection counts among them; None if it sends nothing of the kind."""
        self.size = 0
        """Bytes since the head of the last request."""
        self._timer: asyncio.TimerHandle | None = None

    def discard(self, size: int, tenant: str) -> None:
        """Ignore the last `size` bytes, and read on after a pause; cut off a client that sends too many."""
        self.size += size
        if self.size > DISCARDED_LIMIT:
            self._transport.abort()
            return
        self.count_for(tenant)
        self._flow.pause_reading()
        if self._timer is None:
            self._timer = self._loop.call_later(DISCARD_S * self._connections[tenant], self._read_on)

    def _read_on(self) -> None:
        self._timer = None
        if self.tenant is not None and not self._transport.is_closing():
            self._flow.resume_reading()

    def count_for(self, tenant: str | None) -> None:
        """Count this connection for this tenant, or no longer."""
        before, self.tenant = self.tenant, tenant
        if before is not None:
            self._connections[before] -= 1
            if not self._connections[before]:
                del self._connections[before]
        if tenant is not None:
            self._connections[tenant] += 1

    def refusal_delay_s(self, tenant: str) -> float:
        """Seconds until the tenant gets its next refusal for lack of memory."""
        return min(REFUSAL_LIMIT_S, REFUSAL_S * self._connections[tenant])

    def close(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self.count_for(None)
