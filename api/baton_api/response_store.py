"""
Stored responses of `/v1/responses`: clients retrieve them by id, and later requests continue them.

`ResponseStore` is in memory, limited in number, bytes and time; routers can share one in Redis instead, with
the same rules (`baton_router.proxy.response_stores`). When it is full, the oldest responses are evicted
of the owner that has most, so that no owner evicts what others keep within an equal share. Each entry has
only what it adds to its conversation, and a link to the previous response. So a conversation of n turns
costs n turns and not n². A deleted or expired response is not found, but later responses keep what they need
of it.

Items of retrievable responses have ids, to which later requests may refer.

Each response belongs to the sender of its request. For others it does not exist.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from baton_api import response_items
from baton_api.errors import InvalidRequest, ResponseNotFound

OVERHEAD = 1024
"""Bytes of memory per response besides its text."""

ITEM_OVERHEAD = 256
"""Bytes of memory per item of an input besides its text."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of a store. 0 for any of them stores no responses."""

    responses: int
    bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class Turn:
    """One response and the input of its own request, which do not change."""

    id: str
    before: Turn | None
    """The response that this one continues."""
    input: tuple[bytes, ...]
    """Each input item as JSON, without those of previous turns."""
    body: bytes
    """The response object as JSON."""
    holders: int = 0
    """Reference count: the store, while the response is retrievable, and stored later turns."""
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique. `id` may not be: a worker or a client has chosen it."""

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.body) + sum(len(item) + ITEM_OVERHEAD for item in self.input)

    @property
    def output(self) -> list[bytes]:
        return [bytes(item) for item in _output(self.body)]

    @property
    def whole_input(self) -> list[bytes]:
        """All input items of the response, oldest first."""
        return [*(self.before.conversation if self.before else ()), *self.input]

    @property
    def conversation(self) -> list[bytes]:
        """The input of the next turn: all items up to the last one of this response."""
        return [item for turn in reversed(list(_chain(self))) for item in (*turn.input, *turn.output)]

    def is_longer_than(self, limit: int) -> bool:
        """Whether the items of `conversation` have more than `limit` bytes."""
        size = 0
        for turn in _chain(self):
            size += sum(map(len, turn.input)) + sum(map(len, turn.output))
            if size > limit:
                return True
        return False


@dataclass(slots=True)
class OwnersShare:
    """What the store has of one owner."""

    ids: dict[str, None] = field(default_factory=dict)
    """Of retrievable responses, oldest first."""
    size: int = 0
    """Bytes of turns in memory."""
    items: dict[str, list[tuple[Turn, bytes]]] = field(default_factory=dict)
    """Items of retrievable responses by their ids, with each response that has them, the newest last."""


class ResponseStore:
    """The responses of all owners. Thread-safe."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: dict[tuple[bytes, str], tuple[Turn, float]] = {}
        """By owner and id, oldest first, with their expiry."""
        self._shares: dict[bytes, OwnersShare] = {}
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of all turns in memory, including those that are no longer retrievable."""
        return self._size

    def put(self, owner: bytes, turn: Turn) -> None:
        """Store `turn` and evict others if needed. A turn larger than the store is not stored."""
        with self._lock:
            self._expire()
            if turn.size > self._limits.bytes or not self._limits.responses or self._limits.seconds <= 0:
                return
            if (owner, turn.id) in self._kept:
                self._drop((owner, turn.id))
            share = self._shares.setdefault(owner, OwnersShare())
            self._hold(share, turn)
            share.ids[turn.id] = None
            for id, item in named_items(turn).items():
                share.items.setdefault(id, []).append((turn, item))
            self._kept[owner, turn.id] = turn, self._clock() + self._limits.seconds
            while len(self._kept) > self._limits.responses:
                self._evict(lambda share: len(share.ids))
            while self._size > self._limits.bytes:
                self._evict(lambda share: share.size)

    def get(self, owner: bytes, id: str) -> Turn:
        """Return a response. Raises ResponseNotFound if it does not exist or has another owner."""
        with self._lock:
            self._expire()
            entry = self._kept.get((owner, id))
        if entry is None:
            raise ResponseNotFound(id)
        return entry[0]

    def items(self, owner: bytes, ids: Collection[str]) -> dict[str, bytes]:
        """Return those of an owner's items that retrievable responses have, by their ids."""
        with self._lock:
            self._expire()
            share = self._shares.get(owner, OwnersShare())
            return {id: bytes(share.items[id][-1][1]) for id in ids if id in share.items}

    def delete(self, owner: bytes, id: str) -> None:
        """Delete a response. Raises ResponseNotFound."""
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

    def _evict(self, amount: Callable[[OwnersShare], int]) -> None:
        """Drop the oldest response of the owner with the largest `amount`."""
        owner = max(self._shares, key=lambda owner: amount(self._shares[owner]))
        self._drop((owner, next(iter(self._shares[owner].ids))))

    def _drop(self, key: tuple[bytes, str]) -> None:
        turn, _ = self._kept.pop(key)
        owner, id = key
        share = self._shares[owner]
        del share.ids[id]
        for item_id in named_items(turn):
            having = share.items[item_id]
            del having[next(at for at, (holder, _) in enumerate(having) if holder is turn)]
            if not having:
                del share.items[item_id]
        self._release(share, turn)
        if not share.ids:
            del self._shares[owner]

    def _hold(self, share: OwnersShare, turn: Turn) -> None:
        for stored in _chain(turn):
            stored.holders += 1
            if stored.holders > 1:
                return
            self._size += stored.size
            share.size += stored.size

    def _release(self, share: OwnersShare, turn: Turn) -> None:
        for stored in _chain(turn):
            stored.holders -= 1
            if stored.holders:
                return
            self._size -= stored.size
            share.size -= stored.size


class _Answer(msgspec.Struct):
    """The part of a response object that the store reads."""

    output: list[msgspec.Raw]


_decoder = msgspec.json.Decoder(_Answer)


def owner(authorization: bytes, keyed: bool) -> bytes:
    """Return the owner for an Authorization header. Each API key is an owner; without keys there is one
    owner.
    """
    return hashlib.sha256(authorization.partition(b" ")[2].strip()).digest() if keyed else b""


def resolved(items: Sequence[bytes], references: Mapping[int, str], kept: Mapping[str, bytes]) -> list[bytes]:
    """
    Return `items` with kept ones, by their ids, in place of `references`, by their positions.

    Raises InvalidRequest for an unknown id.
    """
    whole = list(items)
    for position, id in references.items():
        if id not in kept:
            raise InvalidRequest(
                f"Item with id {id[:100]!r} not found: no response that is stored for this key "
                "has it. Send the item itself, in the AI SDK by the option 'store: false'.",
                param=f"input[{position}].id",
            )
        whole[position] = kept[id]
    return whole


def named_items(turn: Turn) -> dict[str, bytes]:
    """The items of a response that have ids, by these. Of its output, views of its body."""
    items = (*turn.input, *_output(turn.body))
    return {id: item for item in items if (id := response_items.identity(item)[0])}


def _output(body: bytes) -> list[msgspec.Raw]:
    """Return the output of a response object; empty if it is none."""
    try:
        return _decoder.decode(body).output
    except msgspec.DecodeError:
        return []


def _chain(turn: Turn | None) -> Iterator[Turn]:
    while turn is not None:
        yield turn
        turn = turn.before


def retrieved(turn: Turn, query: Mapping[str, str]) -> bytes:
    """Return the answer to `GET /v1/responses/{id}`. Raises InvalidRequest."""
    if query.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest(
            "Cannot stream this response again: it was not created in the background.", param="stream"
        )
    return turn.body


def deleted(id: str) -> bytes:
    """Return the answer to `DELETE /v1/responses/{id}`."""
    return msgspec.json.encode({"id": id, "object": "response", "deleted": True})


def not_cancelable() -> InvalidRequest:
    """The answer to `POST /v1/responses/{id}/cancel`: no response runs in the background."""
    return InvalidRequest("Cannot cancel a synchronous response.")
