"""Where a tier keeps the bytes of its blocks. A tier has one, and calls it from its two threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton_engine.tiers.blocks import Bytes, PoolBytes


class Copy(NamedTuple):
    """A block of the pool to be copied to a slot."""

    name: bytes
    parent: bytes
    block: int
    slot: int


class Store(Protocol):
    """Memory or a disk with `slots` blocks."""

    @property
    def name(self) -> str:
        """In metrics and in `usage`."""
        ...

    @property
    def medium(self) -> str:
        """In KV events."""
        ...

    @property
    def slots(self) -> int: ...

    def write(self, copies: Sequence[Copy], pool: PoolBytes) -> list[int]:
        """Copy blocks, and return their sums. Raises OSError if that failed: no slot is valid then."""
        ...

    def read(self, slot: int) -> Bytes:
        """Return the bytes of a slot, valid until the next call. May take long. Raises OSError."""
        ...

    def prepare(self) -> bool:
        """Do a part of what makes later writes faster, for some milliseconds. False: nothing is left."""
        ...

    def close(self) -> None:
        """Release everything. No thread uses it any more."""
        ...
