"""Keeps the transfer attentive while a peer may be reading, and for a while after."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from baton_engine.transfer import Transfer

LINGER_S = 10.0
"""A decode worker that aborts may have reads under way, which wait in its quarantine if nobody attends."""


class Presence:
    """Holds `Transfer.serve` from the first `begin` until some seconds after the last `end`."""

    def __init__(self, transfer: Transfer, linger_s: float = LINGER_S) -> None:
        self._transfer = transfer
        self._linger_s = linger_s
        self._wanted = 0
        self._held: AbstractContextManager[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def attentive(self) -> bool:
        return self._held is not None

    def begin(self) -> None:
        self._wanted += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held is None:
            self._held = self._transfer.serve()
            self._held.__enter__()

    def end(self) -> None:
        self._wanted -= 1
        if not self._wanted:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self.close)

    def close(self) -> None:
        """At once, whoever wants it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None
