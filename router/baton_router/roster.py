"""All workers as a frontend process knows them: which are ready, down, or have had their time."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One worker."""

    name: str
    ready: bool
    down_since: float
    """Loop time from which on nothing came of it, if it is down; else 0."""
    expired: bool = False
    """Whether it was to end what it had, and has had its time."""
    secure: bool = False
    """Whether it is spoken to by TLS."""
