"""
One fetch under way: carries out what its `Room` decides, on the event loop.

It lives until its last read has settled, which may be long after the engine got its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from baton_api import logs
from baton_api.errors import TransferFailed
from baton_api.hashing import chain_hash
from baton_api.messages import Chunk, Commit, Failed
from baton_api.reports import Fallback
from baton_decode.links import Link
from baton_decode.sessions import Action, Order, Pull, Report, Room, Send, Settled, Verify
from baton_engine.kv.cache import KVCache
from baton_engine.requests import Fetch, FetchResult
from baton_engine.transfer import Pulled, Transfer
from baton_engine.transfer.integrity import block_checksums

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """What of `baton_engine.engine.Engine` is used here."""

    def fetched(self, fetched: FetchResult) -> None: ...

    def settled(self, blocks: Collection[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Means:
    """What all fetches of one worker share."""

    engine: Receiver
    cache: KVCache
    transfer: Transfer
    vocab: int
    transfer_deadline_s: float
    """For one read."""
    answer_deadline_s: float
    """For the whole prompt, its time in the prefill worker's queue included."""
    checksums: Executor


@dataclass(frozen=True, slots=True)
class Errand:
    """What the engine wants and where it is to be had."""

    fetch: Fetch
    address: str
    ticket: str
    """The router's."""
    request_id: str
    """The router's, for which the ticket was issued."""
    refusal: str | None = None
    """Why the ticket admits no connection to `address`; None if it does."""


class Fetching:
    """An errand from the engine's `start` to its answer and on to the last settled read."""

    def __init__(
        self, errand: Errand, name: str, means: Means, on_change: Callable[[Fetching], None]
    ) -> None:
        """`on_change` is called after the answer and after the last read."""
        self.errand = errand
        self.reason: Fallback | None = None
        self.answered = False
        self.epoch = 0
        self._name = name
        self._of = logs.of(errand.request_id)
        self._means = means
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._room: Room | None = None
        self._deadline = self._loop.call_later(means.answer_deadline_s, self.overdue)

    @property
    def settled(self) -> bool:
        """Answered, and nothing is written for it."""
        return self.answered and (self._room is None or self._room.settled)

    @property
    def worth_another_try(self) -> bool:
        """Whether the connection turned out to be a dead one before anything had come over it."""
        return not self.answered and self.epoch == 1 and self._room is None

    def begin(self, link: Link, tail: bytes, ticket: str) -> None:
        """Ask over `link`; `tail` is the chain hash of the whole prompt, `ticket` is valid now."""
        self.epoch += 1
        order = Order(
            fetch=self.errand.fetch,
            room=self._name,
            epoch=self.epoch,
            worker=link.worker,
            tail=tail,
            block_size=self._means.cache.block_size,
            vocab=self._means.vocab,
            remote_blocks=link.peer.pool.blocks,
        )
        self._link, self._room = link, Room(order)
        link.listeners[self._name] = self
        errand = self.errand
        left = max(0.001, self._deadline.when() - self._loop.time())
        try:
            self._do(self._room.begin(errand.request_id, ticket, left))
        except TransferFailed as error:  # a prompt too long for one frame
            log.warning("request %s cannot be asked for: %s", errand.fetch.request_id, error, extra=self._of)
            self._do(self._room.lost())

    def fail(self, reason: Fallback) -> None:
        """It ends before a room was made."""
        if not self.answered and self._room is None:
            self._answer(FetchResult(self.errand.fetch.request_id, arrived=0, reason=reason.value), reason)

    def broken(self) -> None:
        """An error of this worker ended it: the engine computes the prompt."""
        if self._room is None:
            self.fail(Fallback.TRANSFER_FAILED)
        else:
            self._do(self._room.broken())

    def hear(self, message: Chunk | Commit | Failed) -> None:
        """`Listener`: news from the prefill worker."""
        assert self._room is not None
        match message:
            case Chunk():
                self._do(self._room.chunk(message, self._loop.time()))
            case Commit():
                self._do(self._room.commit(message))
            case Failed(reason=reason):
                said = self.errand.fetch.request_id, reason[:500]
                log.warning("prefill of %s failed: %s", *said, extra=self._of)
                self._do(self._room.failed(message))

    def lost(self) -> None:
        """`Listener`: the link has ended."""
        assert self._room is not None
        if self.epoch == 1 and self._room.untouched and not self.answered:
            self._room = None  # the next attempt makes its own
            self._on_change(self)
        else:
            self._do(self._room.lost())

    def cancel(self) -> None:
        """The engine does not want it any more."""
        if self._room is None:
            self.fail(Fallback.CANCELLED)
        else:
            self._do(self._room.cancel())

    def overdue(self) -> None:
        """The prompt, or one of its reads, takes too long."""
        if self._room is None:
            self.fail(Fallback.DEADLINE)
        else:
            self._do(self._room.overdue())

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    assert self._link is not None
                    self._link.send(message)
                case Pull():
                    self._pull(action)
                case Verify():
                    self._verify(action)
                case Report(fetched):
                    assert self._room is not None and self._link is not None
                    self._link.listeners.pop(self._name, None)
                    self._answer(fetched, self._room.reason)
                case Settled(blocks):
                    self._means.engine.settled(blocks)
                    self._on_change(self)

    def _pull(self, pull: Pull) -> None:
        assert self._link is not None and self._room is not None
        try:
            under_way = self._means.transfer.pull(self._link.peer, pull.remote, pull.local)
        except TransferFailed as error:
            self._read_failed(pull.number, error)
            return
        timer = self._loop.call_later(self._means.transfer_deadline_s, self.overdue)

        def ended(read: asyncio.Future[Pulled]) -> None:
            assert self._room is not None
            timer.cancel()
            if read.cancelled():  # nobody knows when it ends: its blocks stay where they are
                self.overdue()
                return
            error = read.exception()
            if error is not None:
                self._read_failed(pull.number, error)
            else:
                self._do(self._room.pulled(pull.number, read.result(), self._loop.time()))

        under_way.settled().add_done_callback(ended)

    def _read_failed(self, number: int, error: BaseException) -> None:
        assert self._room is not None
        said = self.errand.fetch.request_id, error
        log.warning("reading blocks of %s failed: %s", *said, extra=self._of)
        self._do(self._room.pull_failed(number, self._loop.time()))

    def _verify(self, ask: Verify) -> None:
        found = self._loop.run_in_executor(
            self._means.checksums, block_checksums, self._means.cache, ask.blocks
        )

        def compared(found: asyncio.Future[list[int]]) -> None:
            assert self._room is not None
            if found.cancelled() or found.exception() is not None:
                good = [False] * len(ask.blocks)  # what cannot be checked is not used
            else:
                good = [mine == told for mine, told in zip(found.result(), ask.checksums, strict=True)]
            if not all(good):
                said = good.count(False), len(good), self.errand.fetch.request_id
                log.error("%d of %d KV blocks of %s arrived damaged", *said, extra=self._of)
            self._do(self._room.verified(ask.number, good))

        found.add_done_callback(compared)

    def _answer(self, fetched: FetchResult, reason: Fallback | None) -> None:
        self._deadline.cancel()
        self.answered = True
        self.reason = reason
        self._means.engine.fetched(fetched)
        self._on_change(self)


def whole_hash(fetch: Fetch, block_size: int) -> bytes:
    """The chain hash of all of `fetch.tokens`, the part in the last block included."""
    name = fetch.parent
    for start in range(fetch.start_block * block_size, len(fetch.tokens), block_size):
        name = chain_hash(name, fetch.tokens[start : start + block_size])
    return name
