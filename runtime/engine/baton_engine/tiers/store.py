"""Where a tier keeps the bytes of its blocks. A tier has one, and calls it from its two threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton_engine.tiers.index import Place
from baton_engine.tiers.slab import Bytes

Read = Callable[[int, Bytes], int]
"""Copies the bytes of a block of the pool, or of a slot of the tier above. Returns the copy's sum."""


class Copy(NamedTuple):
    """A block to be copied to a slot."""

    name: bytes
    parent: bytes
    block: int
    """Where it is in the pool, or in the tier above."""
    slot: int
    sum: int | None = None
    """xxh3-64 of its bytes. None: not known, because the pool has them."""


class Store(Protocol):
    """Memory or a disk with slots for blocks."""

    @property
    def name(self) -> str:
        """In metrics and in `usage`."""
        ...

    @property
    def medium(self) -> str:
        """In KV events."""
        ...

    @property
    def first_bytes_per_s(self) -> float:
        """Assumed speed of the first restore."""
        ...

    @property
    def free(self) -> Sequence[int]:
        """Slots without one of the blocks in `found`, in the order in which they are used."""
        ...

    @property
    def found(self) -> Sequence[tuple[bytes, Place]]:
        """Blocks of an earlier process, by their chain hashes, the one to be dropped first before others."""
        ...

    def write(self, copies: Sequence[Copy], read: Read) -> list[int | None]:
        """
        Copy blocks, and return their sums; None for one that has other bytes than `Copy.sum` says.

        Raises OSError if that failed: no slot is valid then.
        """
        ...

    def expect(self, slots: Sequence[int]) -> None:
        """These slots are read next. Raises OSError."""
        ...

    def read(self, slot: int) -> Bytes:
        """Return the bytes of a slot, valid until the next call. May take long. Raises OSError."""
        ...

    def prepare(self) -> bool:
        """Do a part of what makes later writes faster, for some milliseconds. False: nothing is left."""
        ...

    def clear(self) -> None:
        """Forget all blocks: a later process does not find them. Raises OSError."""
        ...

    def close(self) -> None:
        """Release everything. No thread uses it any more."""
        ...
