"""
Changes of the prefix cache since the last step, recorded by the engine's thread.

The thread only notes names; a whole step's notes are handed on at its end. Whoever takes them turns them
into messages on a thread of its own.
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
    """A block became known by its name."""

    name: bytes
    parent: bytes
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Removed:
    """A block was dropped."""

    name: bytes


Change = Stored | Removed


class Recipient(Protocol):
    """Takes changes on the engine's thread, and returns at once."""

    def publish(self, changes: Sequence[Change]) -> None: ...

    @property
    def last(self) -> int:
        """The number of what was published last; -1 before the first."""
        ...


class KvEvents:
    """The changes that were not handed on yet. Belongs to the engine's thread."""

    def __init__(self, recipient: Recipient) -> None:
        self._recipient = recipient
        self._changes: list[Change] = []

    def stored(self, name: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        self._changes.append(Stored(name, parent, tokens))

    def removed(self, name: bytes) -> None:
        self._changes.append(Removed(name))

    def flush(self) -> int:
        """Hand all on. Gives the number under which nothing is missing."""
        if self._changes:
            changes, self._changes = self._changes, []
            self._recipient.publish(changes)
        return self._recipient.last


class KvSnapshot:
    """All known blocks at one moment. Made on the engine's thread by copying, read on any other."""

    def __init__(self, seq: int, by_hash: dict[bytes, int], parents: list[bytes]) -> None:
        self.seq = seq
        """Of the last batch whose changes are in."""
        self._by_hash = by_hash
        self._parents = parents
        self._names: list[bytes] = []

    def __len__(self) -> int:
        return len(self._by_hash)

    def part(self, start: int, stop: int) -> list[tuple[int, int | None]]:
        """(hash, parent's hash) of some of them."""
        self._names = self._names or list(self._by_hash)
        names = self._names[start:stop]
        above = _numbers([self._parents[self._by_hash[name]] for name in names])
        root = block_number(_ROOT)
        return [
            (block, None if parent == root else parent)
            for block, parent in zip(_numbers(names), above, strict=True)
        ]


def parent_number(name: bytes) -> int | None:
    """None for the beginning of a prompt without a salt; a salted one begins with a parent of its own."""
    return None if name == _ROOT else block_number(name)


def events_of(changes: Iterable[Change], block_size: int, *, tokens: bool) -> Iterator[Event]:
    """The changes as events, in their order; neighbours that go together are one event."""
    last: Event | None = None
    end = b""
    for change in changes:
        number = block_number(change.name)
        if isinstance(change, Removed):
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(number)
                continue
            event: Event = BlockRemoved([number], IN_USE)
        elif isinstance(last, BlockStored) and change.parent == end:
            last.block_hashes.append(number)
            last.token_ids += change.tokens if tokens else ()
            end = change.name
            continue
        else:
            parent = parent_number(change.parent)
            token_ids = list(change.tokens) if tokens else []
            event = BlockStored([number], parent, token_ids, block_size, medium=IN_USE)
            end = change.name
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _numbers(names: Sequence[bytes]) -> list[int]:
    """`block_number` of each, without a step of Python for each."""
    words = np.frombuffer(b"".join(names), dtype=">u8").reshape(-1, HASH_BYTES // 8)
    numbers: list[int] = words[:, -1].tolist()
    return numbers


_ROOT = root_hash()
