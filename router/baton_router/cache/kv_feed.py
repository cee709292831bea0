"""
A worker's KV events in order, although some get lost: which to apply, and what to request.

Batches are numbered. A missing batch is requested again; if it does not come, a snapshot of all blocks is
requested, as at the beginning. Batches that come too early wait meanwhile. A feed without any batch, even the
empty ones of an idle worker, is degraded.

Time is passed in, and nothing is sent from here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from baton_api.kv_events import Event
from baton_router.cache.block_map import Tree

REPLAY_S = 1.0
"""Seconds in which a replay has to close the gap."""

SILENCE_S = 10.0
"""Seconds without a batch in its order after which the feed is degraded: five of a worker's heartbeats."""

BUFFER_LIMIT = 10_000
"""Batches that wait for those before them."""

RETRY_S = 0.5
RETRY_LIMIT_S = 30.0
"""Seconds from a failed snapshot to the next try, at first and at most."""


class BlockSink(Protocol):
    """Gets the events in order."""

    def apply(self, events: Sequence[Event]) -> None: ...

    def replace(self, tree: Tree) -> None: ...


class FeedRequest(enum.Enum):
    """The request to send to the worker."""

    REPLAY = "replay"
    """All batches from `KvEventFeed.next` on."""
    SNAPSHOT = "snapshot"


class KvEventFeed:
    """The events of one worker process. A restarted process needs a new feed."""

    def __init__(self, blocks: BlockSink, now: float, *, heartbeats: bool = True) -> None:
        """`heartbeats`: whether an idle process sends empty batches, so that silence means a failure."""
        self._blocks = blocks
        self._heartbeats = heartbeats
        self.next = 0
        """The number of the batch to apply next."""
        self.gaps = 0
        self._missing: FeedRequest | None = FeedRequest.SNAPSHOT
        """The request that would complete the feed; None if it is complete."""
        self._requested_at: float | None = None
        self._request_from = now
        self._pause = RETRY_S
        self._buffered: dict[int, Sequence[Event]] = {}
        self._last_batch_at = now

    @property
    def whole(self) -> bool:
        """Whether no batch is known to be missing."""
        return self._missing is None

    def degraded(self, now: float) -> bool:
        return self._heartbeats and now - self._last_batch_at > SILENCE_S

    def due(self, now: float) -> FeedRequest | None:
        """Return the request that the caller must send now, once; None if none is due."""
        requested_at = self._requested_at
        if self._missing is FeedRequest.REPLAY and requested_at is not None and now - requested_at > REPLAY_S:
            self._want(FeedRequest.SNAPSHOT, now)
        if self._missing is None or self._requested_at is not None or now < self._request_from:
            return None
        self._requested_at = now
        return self._missing

    def batch(self, seq: int, events: Sequence[Event], now: float) -> None:
        """A batch has arrived, published or replayed."""
        if self._missing is FeedRequest.SNAPSHOT or seq > self.next:
            self._buffer(seq, events, now)
        elif seq == self.next:
            self._apply(events)
            self._catch_up(now)

    def replay_ended(self, now: float) -> None:
        """Record the end of the replay. If batches are still missing, a snapshot is needed."""
        if self._missing is FeedRequest.REPLAY:
            self._want(FeedRequest.SNAPSHOT, now)

    def snapshot(self, seq: int, tree: Tree, now: float) -> None:
        """All blocks, as they were after batch `seq`."""
        self._blocks.replace(tree)
        self.next = seq + 1
        self._pause = RETRY_S
        self._buffered = {number: events for number, events in self._buffered.items() if number > seq}
        self._catch_up(now)

    def restart(self, now: float) -> None:
        """
        Continue without a snapshot, which some engines do not have: from the earliest batch that waits.

        No block is known then. Without such a batch, the snapshot stays due.
        """
        if self._buffered:
            self.snapshot(min(self._buffered) - 1, {}, now)
        else:
            self._want(FeedRequest.SNAPSHOT, now)

    def failed(self, now: float) -> None:
        """Record that the snapshot failed."""
        self._want(FeedRequest.SNAPSHOT, now + self._pause)
        self._pause = min(2 * self._pause, RETRY_LIMIT_S)

    def _apply(self, events: Sequence[Event]) -> None:
        self._blocks.apply(events)
        self.next += 1

    def _buffer(self, seq: int, events: Sequence[Event], now: float) -> None:
        if len(self._buffered) >= BUFFER_LIMIT:
            self._buffered.clear()  # a snapshot requested now is newer than all of them
            if self._missing is FeedRequest.REPLAY:
                self._want(FeedRequest.SNAPSHOT, now)
        self._buffered[seq] = events
        if self._missing is None:
            self.gaps += 1
            self._want(FeedRequest.REPLAY, now)

    def _catch_up(self, now: float) -> None:
        """Apply the waiting batches up to the first gap."""
        while (events := self._buffered.pop(self.next, None)) is not None:
            self._apply(events)
        if not self._buffered:
            self._missing, self._last_batch_at = None, now
        elif self._missing is not FeedRequest.REPLAY:
            self.gaps += 1
            self._want(FeedRequest.REPLAY, now)

    def _want(self, missing: FeedRequest, start: float) -> None:
        self._missing, self._requested_at, self._request_from = missing, None, start
