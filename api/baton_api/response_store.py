"""
The responses that `/v1/responses` keeps: asked for again by their ids, and continued by later requests.

Kept in memory, within bounds of number, bytes and time; the oldest go first. What is kept of a response
is what it adds to its conversation, with a link to the response before it, so that a conversation of n
turns costs n turns and not n². A response that was deleted or has gone is found no more, but what follows
it keeps what it needs.

Each response belongs to whoever sent the request. Nobody finds another's: it is as if it was not there.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from baton_api.errors import PreviousResponseNotFound, ResponseNotFound

OVERHEAD = 1024
"""Bytes that a response costs besides its text."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The bounds of a store; 0 of any keeps nothing."""

    responses: int
    bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class Turn:
    """One response and the input that its own request brought. What it holds does not change."""

    id: str
    before: Turn | None
    """The response that it continues."""
    input: tuple[bytes, ...]
    """Each item as JSON; those of the turns before are theirs."""
    body: bytes
    """The response object as JSON."""
    holders: int = 0
    """The store itself, if it can be asked for, and turns after it that are held."""

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.body) + sum(map(len, self.input))

    @property
    def output(self) -> list[bytes]:
        return [bytes(item) for item in _decoder.decode(self.body).output]

    @property
    def whole_input(self) -> list[bytes]:
        """All items that the response was made from, oldest first."""
        return [*(self.before.conversation if self.before else ()), *self.input]

    @property
    def conversation(self) -> list[bytes]:
        """What the next turn begins with: all items up to this response's last."""
        turns = [self]
        while (before := turns[-1].before) is not None:
            turns.append(before)
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]


class ResponseStore:
    """May be used from several threads."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: dict[tuple[bytes, str], tuple[Turn, float]] = {}
        """By owner and id, in the order of their coming, with the time at which they go."""
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of all turns that are held, those included that cannot be asked for any more."""
        return self._size

    def put(self, owner: bytes, turn: Turn) -> None:
        """Keep `turn`, perhaps in place of older ones, unless it is larger than all that may be kept."""
        with self._lock:
            self._expire()
            if turn.size > self._limits.bytes or not self._limits.responses or self._limits.seconds <= 0:
                return
            self._hold(turn)
            self._kept[owner, turn.id] = turn, self._clock() + self._limits.seconds
            while len(self._kept) > self._limits.responses or self._size > self._limits.bytes:
                self._drop(next(iter(self._kept)))

    def get(self, owner: bytes, id: str) -> Turn:
        """Raises ResponseNotFound, also if it is another owner's."""
        with self._lock:
            self._expire()
            found = self._kept.get((owner, id))
        if found is None:
            raise ResponseNotFound(id)
        return found[0]

    def previous(self, owner: bytes, id: str) -> Turn:
        """The same for a request that continues it: raises PreviousResponseNotFound."""
        try:
            return self.get(owner, id)
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(id) from error

    def delete(self, owner: bytes, id: str) -> None:
        """Raises ResponseNotFound."""
        with self._lock:
            self._expire()
            if (owner, id) not in self._kept:
                raise ResponseNotFound(id)
            self._drop((owner, id))

    def _expire(self) -> None:
        now = self._clock()
        gone = []
        for key, (_, until) in self._kept.items():
            if now < until:
                break
            gone.append(key)
        for key in gone:
            self._drop(key)

    def _drop(self, key: tuple[bytes, str]) -> None:
        turn, _ = self._kept.pop(key)
        self._release(turn)

    def _hold(self, turn: Turn) -> None:
        for held in _chain(turn):
            held.holders += 1
            if held.holders > 1:
                return
            self._size += held.size

    def _release(self, turn: Turn) -> None:
        for held in _chain(turn):
            held.holders -= 1
            if held.holders:
                return
            self._size -= held.size


class _Answer(msgspec.Struct):
    """What a response object is read for here."""

    output: list[msgspec.Raw]


_decoder = msgspec.json.Decoder(_Answer)


def owner(authorization: bytes, keyed: bool) -> bytes:
    """Who sent a request with this header: each API key is somebody, and without keys all are the same."""
    return hashlib.sha256(authorization.partition(b" ")[2].strip()).digest() if keyed else b""


def _chain(turn: Turn | None) -> Iterator[Turn]:
    while turn is not None:
        yield turn
        turn = turn.before
