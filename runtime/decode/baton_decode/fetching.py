"""
One fetch: runs the actions of its `DecodeSession` on the event loop.

It lives until its last read has ended, which may be long after the engine got the result.
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
from baton_api.messages import Checksums, Chunk, Commit, Failed
from baton_api.prompt_report import Fallback
from baton_decode.sessions import (
    Action,
    BlocksSettled,
    DecodeSession,
    ReadBlocks,
    ReportResult,
    SendToPrefill,
    SessionSpec,
    VerifyChecksums,
)
from baton_engine.kv.cache import KVCache
from baton_engine.requests import Fetch, FetchResult
from baton_engine.streams import Event
from baton_engine.transfer import Pulled, Transfer
from baton_engine.transfer.integrity import by_sums
from baton_engine.transfer.links import Link

log = logging.getLogger(__name__)


class FetchEngine(Protocol):
    """The part of `baton_engine.engine.Engine` that fetches use."""

    def fetched(self, fetched: FetchResult) -> None: ...

    def settled(self, blocks: Collection[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class FetchContext:
    """Shared by all fetches of one worker."""

    engine: FetchEngine
    cache: KVCache
    transfer: Transfer
    vocab: int
    transfer_deadline_s: float
    """Of one read."""
    answer_deadline_s: float
    """Of the whole prompt, its time in the prefill worker's queue included."""
    checksums: Executor


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A prompt that the engine fetches, and the prefill worker that computes it."""

    fetch: Fetch
    address: str
    ticket: str
    """Issued by the router."""
    request_id: str
    """The router's id of the request; the ticket is for it."""
    unused: Event
    """Until it, the device may still write to the blocks of `fetch`."""
    refusal: str | None = None
    """Why the ticket does not allow a connection to `address`; None if it does."""


class FetchTask:
    """A fetch from the engine's `start` until its last read has ended."""

    def __init__(
        self, request: FetchRequest, name: str, context: FetchContext, on_change: Callable[[FetchTask], None]
    ) -> None:
        """`on_change` is called after the result and after the last read."""
        self.request = request
        self.reason: Fallback | None = None
        self.answered = False
        self.epoch = 0
        self._name = name
        self._of = logs.of(request.request_id)
        self._context = context
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._session: DecodeSession | None = None
        self._deadline = self._loop.call_later(context.answer_deadline_s, self.overdue)

    @property
    def settled(self) -> bool:
        """Whether the engine has the result, and no read is under way."""
        return self.answered and (self._session is None or self._session.settled)

    @property
    def retryable(self) -> bool:
        """Whether the first connection was lost before anything arrived over it."""
        return not self.answered and self.epoch == 1 and self._session is None

    def begin(self, link: Link, tail: bytes, ticket: str, source: str) -> None:
        """
        Send the prompt over `link`. `tail` is the chain hash of the whole prompt; `ticket` is valid now.

        The prefill worker may read this worker's cached blocks at `source`; empty: it may not.
        """
        self.epoch += 1
        if link.ended:
            self._retry_or_fail()
            return
        spec = SessionSpec(
            fetch=self.request.fetch,
            session=self._name,
            epoch=self.epoch,
            worker=link.worker,
            tail=tail,
            block_size=self._context.cache.block_size,
            vocab=self._context.vocab,
            remote_blocks=link.peer.pools[0].blocks,
        )
        self._link, self._session = link, DecodeSession(spec)
        link.listeners[self._name] = self
        request = self.request
        left = max(0.001, self._deadline.when() - self._loop.time())
        try:
            self._do(self._session.begin(request.request_id, ticket, left, source))
        except TransferFailed as error:  # the prompt is too long for one frame
            log.warning("cannot send the prompt of %s: %s", request.fetch.request_id, error, extra=self._of)
            self._do(self._session.lost())

    def fail(self, reason: Fallback) -> None:
        """End the fetch if it has no session yet."""
        if not self.answered and self._session is None:
            self._answer(FetchResult(self.request.fetch.request_id, arrived=0, reason=reason.value), reason)

    def broken(self) -> None:
        """End the fetch after an error of this worker; the engine computes the prompt."""
        if self._session is None:
            self.fail(Fallback.TRANSFER_FAILED)
        else:
            self._do(self._session.broken())

    def receive(self, message: Chunk | Checksums | Commit | Failed) -> None:
        """`SessionListener`: a message from the prefill worker."""
        assert self._session is not None
        match message:
            case Chunk():
                self._do(self._session.chunk(message, self._loop.time()))
            case Checksums():
                self._do(self._session.checksums(message))
            case Commit():
                self._do(self._session.commit(message))
            case Failed(reason=reason):
                request_id = self.request.fetch.request_id
                log.warning("prefill of %s failed: %s", request_id, reason[:500], extra=self._of)
                self._do(self._session.failed(message))

    def lost(self) -> None:
        """`SessionListener`: the link has ended."""
        assert self._session is not None
        if self.epoch == 1 and self._session.untouched and not self.answered:
            self._session = None  # the next attempt creates its own
            self._retry_or_fail()
        else:
            self._do(self._session.lost())

    def _retry_or_fail(self) -> None:
        """After the end of a link over which nothing was read."""
        if self.retryable:
            self._on_change(self)
        else:
            self.fail(Fallback.LOST)

    def cancel(self) -> None:
        """Cancel the fetch: the request was aborted."""
        if self._session is None:
            self.fail(Fallback.CANCELLED)
        else:
            self._do(self._session.cancel())

    def overdue(self) -> None:
        """The prompt, or one of its reads, passed its deadline."""
        if self._session is None:
            self.fail(Fallback.DEADLINE)
        else:
            self._do(self._session.overdue())

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendToPrefill(message):
                    assert self._link is not None
                    self._link.send(message)
                case ReadBlocks():
                    self._pull(action)
                case VerifyChecksums():
                    self._verify(action)
                case ReportResult(fetched):
                    assert self._session is not None and self._link is not None
                    self._link.listeners.pop(self._name, None)
                    self._answer(fetched, self._session.reason)
                case BlocksSettled(blocks):
                    self._context.engine.settled(blocks)
                    self._on_change(self)

    def _pull(self, pull: ReadBlocks) -> None:
        assert self._link is not None and self._session is not None
        unused = self.request.unused
        if not unused.done():
            waiting = self._loop.run_in_executor(None, unused.wait)
            waiting.add_done_callback(lambda waited: self._pull_after(waited, pull))
            return
        try:
            under_way = self._context.transfer.pull(self._link.peer, pull.remote, pull.local)
        except TransferFailed as error:
            self._read_failed(pull.number, error)
            return
        timer = self._loop.call_later(self._context.transfer_deadline_s, self.overdue)

        def ended(read: asyncio.Future[Pulled]) -> None:
            assert self._session is not None
            timer.cancel()
            if read.cancelled():  # its end is unknown: its blocks stay quarantined
                self.overdue()
                return
            error = read.exception()
            if error is not None:
                self._read_failed(pull.number, error)
            else:
                self._do(self._session.pulled(pull.number, read.result(), self._loop.time()))

        under_way.settled().add_done_callback(ended)

    def _pull_after(self, waited: asyncio.Future[None], pull: ReadBlocks) -> None:
        """Pull once the device has left the blocks, unless it failed or this worker is closing."""
        error = asyncio.CancelledError() if waited.cancelled() else waited.exception()
        if error is not None:
            self._read_failed(pull.number, error)
        else:
            self._pull(pull)

    def _read_failed(self, number: int, error: BaseException) -> None:
        assert self._session is not None
        request_id = self.request.fetch.request_id
        log.warning("reading blocks of %s failed: %s", request_id, error, extra=self._of)
        self._do(self._session.pull_failed(number, self._loop.time()))
        if isinstance(error, TransferFailed) and self._link is not None:
            self._link.fail(error)

    def _verify(self, verify: VerifyChecksums) -> None:
        assert self._link is not None
        transfer = self._context.transfer
        sums = by_sums(self._link.peer.pools, len(transfer.pools))
        computing = self._loop.run_in_executor(
            self._context.checksums, transfer.checksums, verify.blocks, sums
        )

        def compared(computed: asyncio.Future[list[int]]) -> None:
            assert self._session is not None
            if computed.cancelled() or computed.exception() is not None:
                good = [False] * len(verify.blocks)  # blocks that cannot be verified are not used
            else:
                good = [a == b for a, b in zip(computed.result(), verify.checksums, strict=True)]
            if not all(good):
                counts, request_id = (good.count(False), len(good)), self.request.fetch.request_id
                log.error("%d of %d KV blocks of %s arrived damaged", *counts, request_id, extra=self._of)
            self._do(self._session.verified(verify.number, good))

        computing.add_done_callback(compared)

    def _answer(self, fetched: FetchResult, reason: Fallback | None) -> None:
        self._deadline.cancel()
        self.answered = True
        self.reason = reason
        self._context.engine.fetched(fetched)
        self._on_change(self)


def whole_hash(fetch: Fetch, block_size: int) -> bytes:
    """The chain hash of all of `fetch.tokens`, the part in the last block included."""
    digest = fetch.parent
    for start in range(fetch.start_block * block_size, len(fetch.tokens), block_size):
        digest = chain_hash(digest, fetch.tokens[start : start + block_size])
    return digest
