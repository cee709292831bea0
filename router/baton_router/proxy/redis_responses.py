"""
Stored responses in Redis: several routers share them, and they outlive restarts of routers.

Each operation is one call of a script (redis_responses.lua), which has the rules of the store in memory. So
routers never see each other's unfinished work. A turn is stored as its meta data, which the script reads, and
its record: the items of the input and the response object, one after another. All keys have one hash tag.

An operation has `TIMEOUT_S`, and is not repeated: one of which nobody knows whether it was done is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from baton_api.errors import ResponseNotFound, SetupError, StorageUnavailable
from baton_api.response_store import StoreLimits, Turn, named_items

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""Seconds for an operation, with the wait for a connection."""

CONNECTIONS = 32

KEYS = tuple(
    f"{{baton:responses}}:1:{name}" for name in ("data", "expiry", "order", "counts", "sizes", "items")
)
"""The keys of the script, in its order. The number is that of their format."""

SCRIPT = Path(__file__).with_suffix(".lua").read_text()

Operation = Literal["read", "write"]


class TurnMeta(msgspec.Struct):
    """What is stored of a turn besides its record."""

    uid: str
    id: str
    before: str
    """The uid of the turn that it continues; empty without one."""
    size: int
    lengths: list[int]
    """Of the items of the input, in bytes. The rest of the record is the response object."""
    items: dict[str, tuple[int, int]]
    """Start and length, within the record, of the items that have ids, by the digests of these."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TurnMeta)


class RedisResponseStore:
    """Implements `response_stores.RouterResponseStore`."""

    def __init__(
        self,
        url: str,
        limits: StoreLimits,
        failed: Callable[[Operation], None],
        clock: Callable[[], float] = time.time,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """
        `clock`: seconds of the Unix epoch, which routers have in common; `timeout_s`: see `TIMEOUT_S`.

        Connects at the first operation, so that a router starts without its Redis. Raises SetupError.
        """
        self._limits = limits
        self._failed = failed
        self._clock = clock
        self._timeout_s = timeout_s
        self._error = ""
        """Why the last operation failed; empty if it did not."""
        try:
            pool = ConnectionPool.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                socket_timeout=timeout_s,  # wait_for of Python 3.11 may miss the end of ours
                socket_connect_timeout=timeout_s,
            )
            # The first connection would find an unknown option of the URL.
            pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError):  # their texts may have a part of the password
            raise SetupError(
                "Invalid --response-store. Expected 'memory', or a URL such as redis://user:password@host:6379/0."
            ) from None
        self._redis = Redis(connection_pool=pool)
        self._script = self._redis.register_script(SCRIPT)
        self._connections = asyncio.Semaphore(CONNECTIONS)

    async def put(self, owner: bytes, turn: Turn) -> None:
        limits = self._limits
        if turn.size > limits.bytes or not limits.responses or limits.seconds <= 0:
            return
        expiry, ttl = self._clock() + limits.seconds, max(1, round(limits.seconds * 1000))
        arguments = (owner.hex(), _digest(turn.id), expiry, ttl, limits.responses, limits.bytes)
        if not await self._call("write", "put", *arguments, *_packed(turn)):
            await self._call(
                "write", "put", *arguments, *(part for one in _chain(turn) for part in _packed(one))
            )

    async def get(self, owner: bytes, id: str) -> Turn:
        parts = await self._call("read", "get", owner.hex(), _digest(id))
        turn: Turn | None = None
        for meta, record in reversed(list(zip(parts[::2], parts[1::2], strict=True))):
            turn = _unpacked(meta, record, turn)
        if turn is None:
            raise ResponseNotFound(id)
        return turn

    async def items(self, owner: bytes, ids: Collection[str]) -> dict[str, bytes]:
        found = await self._call("read", "items", owner.hex(), *map(_digest, ids))
        return {id: item for id, item in zip(ids, found, strict=True) if item is not None}

    async def delete(self, owner: bytes, id: str) -> None:
        if not await self._call("read", "delete", owner.hex(), _digest(id)):
            raise ResponseNotFound(id)

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def _call(self, operation: Operation, command: str, *arguments: str | float | bytes) -> Any:
        """Return the result of a command of the script. Raises StorageUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s), self._connections:
                result = await self._script(KEYS, (command, self._clock(), *arguments))
        except Exception as error:  # of any type, if what answers is no Redis
            self._failed(operation)
            self._changed(f"{type(error).__name__}: {error}")
            raise StorageUnavailable("The store of responses does not answer; try again.") from error
        self._changed("")
        return result

    def _changed(self, error: str) -> None:
        """Log how the store is, if that is new: not each of many requests."""
        if error and error != self._error:
            log.warning("The store of responses failed, so no response is stored or found: %s", error)
        elif self._error and not error:
            log.info("The store of responses works again.")
        self._error = error


def _digest(id: str) -> str:
    """An id, which may have any characters and length, as the script gets it."""
    return hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _chain(turn: Turn | None) -> Iterator[Turn]:
    while turn is not None:
        yield turn
        turn = turn.before


def _packed(turn: Turn) -> Iterable[bytes]:
    """The meta data and the record of a turn."""
    record = b"".join((*turn.input, turn.body))
    meta = TurnMeta(
        turn.uid,
        turn.id,
        turn.before.uid if turn.before else "",
        turn.size,
        [len(item) for item in turn.input],
        {_digest(id): (record.index(item), len(item)) for id, item in named_items(turn).items()},
    )
    return _encoder.encode(meta), record


def _unpacked(packed: bytes, record: bytes, before: Turn | None) -> Turn:
    meta = _decoder.decode(packed)
    items, start = [], 0
    for length in meta.lengths:
        items.append(record[start : start + length])
        start += length
    return Turn(meta.id, before, tuple(items), record[start:], uid=meta.uid)
