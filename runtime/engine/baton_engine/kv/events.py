"""
Changes of the prefix cache since the last step, recorded by the engine's thread.

The engine's thread only records hashes. At the end of a step it passes them to the recipient, which creates
messages on another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from baton_api.hashing import HASH_BYTES, root_hash
from baton_api.kv_events import IN_USE, BlockRemoved, BlockStored, Event, block_number


@dataclass(frozen=True, slots=True)
class Stored:
    """A block was published under its hash."""

    name: bytes
    parent: bytes
    tokens: Sequence[int]
    adapter: str = ""
    """Name of the adapter; empty: the base model."""
    medium: str = IN_USE
    """Where it was stored: in the pool, or in a tier."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A block was evicted."""

    name: bytes
    medium: str = IN_USE


Change = Stored | Removed


class Recipient(Protocol):
    """Receives changes on the engine's thread. Must not block."""

    def publish(self, changes: Sequence[Change]) -> None: ...

    @property
    def last(self) -> int:
        """Number of the last published batch; -1 before the first."""
        ...


class KvEvents:
    """Buffer of changes. Belongs to the engine's thread."""

    def __init__(self, recipient: Recipient) -> None:
        self._recipient = recipient
        self._changes: list[Change] = []

    def stored(
        self, name: bytes, parent: bytes, tokens: Sequence[int], adapter: str = "", medium: str = IN_USE
    ) -> None:
        self._changes.append(Stored(name, parent, tokens, adapter, medium))

    def removed(self, name: bytes, medium: str = IN_USE) -> None:
        self._changes.append(Removed(name, medium))

    def flush(self) -> int:
        """Pass all changes to the recipient. Returns the number of the last batch."""
        if self._changes:
            changes, self._changes = self._changes, []
            self._recipient.publish(changes)
        return self._recipient.last


class KvSnapshot:
    """All published blocks at one moment. Copied on the engine's thread, read on any thread."""

    def __init__(self, seq: int, by_hash: dict[bytes, int], parents: list[bytes]) -> None:
        self.seq = seq
        """Number of the last batch whose changes the snapshot contains."""
        self._by_hash = by_hash
        self._parents = parents
        self._names: list[bytes] = []

    def __len__(self) -> int:
        return len(self._by_hash)

    def part(self, start: int, stop: int) -> list[tuple[int, int | None]]:
        """Return (hash, parent's hash) of blocks `start` to `stop`."""
        self._names = self._names or list(self._by_hash)
        names = self._names[start:stop]
        above = _numbers([self._parents[self._by_hash[name]] for name in names])
        root = block_number(_ROOT)
        return [
            (block, None if parent == root else parent)
            for block, parent in zip(_numbers(names), above, strict=True)
        ]


def parent_number(name: bytes) -> int | None:
    """Return the number of a parent; None for the root of prompts without salt."""
    return None if name == _ROOT else block_number(name)


def events_of(changes: Iterable[Change], block_size: int, *, tokens: bool) -> Iterator[Event]:
    """Convert changes to events in their order. Adjacent changes of one chain and medium are merged."""
    last: Event | None = None
    end = b""
    for change in changes:
        number = block_number(change.name)
        if isinstance(change, Removed):
            if isinstance(last, BlockRemoved) and last.medium == change.medium:
                last.block_hashes.append(number)
                continue
            event: Event = BlockRemoved([number], change.medium)
        elif isinstance(last, BlockStored) and change.parent == end and last.medium == change.medium:
            last.block_hashes.append(number)
            last.token_ids += change.tokens if tokens else ()
            end = change.name
            continue
        else:
            parent = parent_number(change.parent)
            token_ids = list(change.tokens) if tokens else []
            adapter = change.adapter or None
            event = BlockStored(
                [number], parent, token_ids, block_size, medium=change.medium, lora_name=adapter
            )
            end = change.name
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _numbers(names: Sequence[bytes]) -> list[int]:
    """Return `block_number` of each hash, vectorized."""
    words = np.frombuffer(b"".join(names), dtype=">u8").reshape(-1, HASH_BYTES // 8)
    numbers: list[int] = words[:, -1].tolist()
    return numbers


_ROOT = root_hash()
