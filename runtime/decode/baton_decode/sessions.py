"""
One prompt on the decode side, as a pure state machine: what happened goes in, what to do comes out.

    asking -> receiving -> committed -> reported

Two things are kept apart. The *answer* is given once, as early as it is known: the first token once every
block is here and checked, or how many leading blocks are good. The *memory* is another matter: a
block is written by a read until that read has settled, whatever was decided meanwhile, so the answer names
the blocks of unsettled reads as unsafe and each is declared settled later. Only then is the room over.

Nothing that a peer says is believed by its order: a chunk names its position, attempts are told apart by
their epoch, and a block counts only once its read is done and its checksum is the announced one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import Abort, Chunk, Commit, Done, Failed, Prefill
from baton_api.reports import Fallback
from baton_engine.requests import Fetch, FetchResult, RelayRecord
from baton_engine.transfer import Pulled


@dataclass(frozen=True, slots=True)
class Send:
    message: Prefill | Done | Abort


@dataclass(frozen=True, slots=True)
class Pull:
    """Read the peer's blocks `remote` into `local`, pairwise; then `pulled` or `pull_failed` `number`."""

    number: int
    remote: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the checksums of `blocks`; then `verified` with one verdict for each."""

    number: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer; once in a room's life."""

    fetched: FetchResult


@dataclass(frozen=True, slots=True)
class Settled:
    """Blocks that were reported as unsafe can no longer change."""

    blocks: tuple[int, ...]


Action = Send | Pull | Verify | Report | Settled


class State(enum.StrEnum):
    ASKING = "asking"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    REPORTED = "reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one attempt is to bring, and what it is measured by."""

    fetch: Fetch
    room: str
    epoch: int
    worker: str
    """The prefill worker's name."""
    tail: bytes
    """Chain hash of the whole prompt, the part in its last block included."""
    block_size: int
    vocab: int
    remote_blocks: int
    """Size of the peer's pool."""

    @property
    def first_block(self) -> int:
        return self.fetch.start_block

    @property
    def end_block(self) -> int:
        """One past the last position that is to be filled."""
        return self.fetch.start_block + len(self.fetch.blocks)

    def ask(self, request_id: str, ticket: str, deadline_s: float) -> Prefill:
        fetch = self.fetch
        return Prefill(
            room=self.room,
            epoch=self.epoch,
            tokens=list(fetch.tokens),
            start_block=fetch.start_block,
            parent=fetch.parent,
            sampling=fetch.sampling.first_token(),
            salt=fetch.salt,
            ticket=ticket,
            request_id=request_id,
            trace=fetch.trace,
            deadline_s=deadline_s,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    positions: tuple[int, ...]
    remote: tuple[int, ...]
    local: tuple[int, ...]
    checksums: tuple[int, ...]


class Room:
    """One attempt to have one prompt computed elsewhere. `now` is in seconds of any steady clock."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.state = State.ASKING
        self.reason: Fallback | None = None
        self._announced: dict[int, tuple[int, int]] = {}
        """Position -> (block, checksum)."""
        self._reads: dict[int, _Read] = {}
        """Not settled."""
        self._checks: dict[int, _Read] = {}
        self._good: set[int] = set()
        self._commit: Commit | None = None
        self._peer_failed: Failed | None = None
        self._pulls = 0
        self._bytes = 0
        self._transport = ""
        self._reading_since = 0.0
        self._transfer_s = 0.0

    @property
    def settled(self) -> bool:
        """Whether the room is over: answered, and no block is written for it."""
        return self.state is State.REPORTED and not self._reads

    @property
    def untouched(self) -> bool:
        """Whether no read was begun, so that another attempt may have the same blocks."""
        return self._pulls == 0

    @property
    def arrived(self) -> int:
        """Leading blocks of the order that are whole and checked."""
        position = self.order.first_block
        while position in self._good:
            position += 1
        return position - self.order.first_block

    def begin(self, request_id: str, ticket: str, deadline_s: float) -> list[Action]:
        return [Send(self.order.ask(request_id, ticket, deadline_s))]

    def chunk(self, chunk: Chunk, now: float) -> list[Action]:
        if not self._concerns(chunk) or self._peer_failed is not None:
            return []
        if self._forbidden(chunk):
            return self._give_up(Fallback.PROTOCOL)
        if self.state is State.ASKING:
            self.state = State.RECEIVING
        positions, remote, checksums = [], [], []
        for offset, told in enumerate(zip(chunk.blocks, chunk.checksums, strict=True)):
            position = chunk.first_block + offset
            if self._announced.setdefault(position, told) != told:
                return self._give_up(Fallback.PROTOCOL)
            if position not in self._good and not self._is_under_way(position):
                positions.append(position)
                remote.append(told[0])
                checksums.append(told[1])
        if not positions:
            return []
        local = tuple(self.order.fetch.blocks[p - self.order.first_block] for p in positions)
        if not self._reads:
            self._reading_since = now
        self._pulls += 1
        self._reads[self._pulls] = _Read(tuple(positions), tuple(remote), local, tuple(checksums))
        return [Pull(self._pulls, tuple(remote), local)]

    def commit(self, commit: Commit) -> list[Action]:
        if not self._concerns(commit) or self._commit is not None or self._peer_failed is not None:
            return []
        length = len(self.order.fetch.tokens)
        asked = (length, self.order.tail, self.order.fetch.sampling.logprobs is not None)
        if asked != (commit.prompt_tokens, commit.tail, commit.first.logprob is not None):
            return self._give_up(Fallback.MISMATCH)
        if not (0 <= commit.first.token < self.order.vocab and 0 <= commit.cached_tokens <= length):
            return self._give_up(Fallback.PROTOCOL)
        self._commit = commit
        self.state = State.COMMITTED
        return self._answer_if_whole()

    def failed(self, failed: Failed) -> list[Action]:
        """The peer gives up; the reads under way may still bring good blocks."""
        if not self._concerns(failed):
            return []
        self._peer_failed = failed
        return self._answer_if_whole()

    def pulled(self, number: int, pulled: Pulled, now: float) -> list[Action]:
        """Read `number` is done."""
        read = self._settle(number, now)
        if self.state is State.REPORTED:
            return [Settled(read.local)]
        self._bytes += pulled.bytes
        self._transport = pulled.transport
        self._checks[number] = read
        return [Verify(number, read.local, read.checksums)]

    def pull_failed(self, number: int, now: float) -> list[Action]:
        """Read `number` ended in an error: it writes no more, what it wrote is void."""
        read = self._settle(number, now)
        if self.state is State.REPORTED:
            return [Settled(read.local)]
        return self._give_up(Fallback.TRANSPORT)

    def verified(self, number: int, good: Sequence[bool]) -> list[Action]:
        read = self._checks.pop(number)
        if self.state is State.REPORTED:
            return []
        self._good.update(p for p, equal in zip(read.positions, good, strict=True) if equal)
        return self._answer_if_whole() if all(good) else self._give_up(Fallback.CHECKSUM)

    def overdue(self) -> list[Action]:
        """A read, or the whole prompt, takes longer than anybody wants to wait."""
        return self._give_up(Fallback.DEADLINE)

    def cancel(self) -> list[Action]:
        """The request is aborted."""
        return self._give_up(Fallback.CANCELLED)

    def lost(self) -> list[Action]:
        """The connection ended."""
        return self._give_up(Fallback.LOST, tell=False)

    def broken(self) -> list[Action]:
        """This worker itself failed to go on with it."""
        return self._give_up(Fallback.TRANSFER_FAILED, tell=False)

    def _concerns(self, message: Chunk | Commit | Failed) -> bool:
        mine = (message.room, message.epoch) == (self.order.room, self.order.epoch)
        return mine and self.state is not State.REPORTED

    def _forbidden(self, chunk: Chunk) -> bool:
        end = chunk.first_block + len(chunk.blocks)
        return (
            not chunk.blocks
            or len(chunk.blocks) != len(chunk.checksums)
            or chunk.first_block < self.order.first_block
            or end > self.order.end_block
            or not all(0 < block < self.order.remote_blocks for block in chunk.blocks)
        )

    def _is_under_way(self, position: int) -> bool:
        return any(position in read.positions for read in (*self._reads.values(), *self._checks.values()))

    def _settle(self, number: int, now: float) -> _Read:
        read = self._reads.pop(number)
        if not self._reads:
            self._transfer_s += now - self._reading_since
        return read

    def _answer_if_whole(self) -> list[Action]:
        if self._peer_failed is not None and not self._reads and not self._checks:
            return [self._done(), self._report(_why(self._peer_failed))]
        if self._commit is None or len(self._good) < len(self.order.fetch.blocks):
            return []
        self.state = State.REPORTED
        fetched = FetchResult(
            self.order.fetch.request_id,
            arrived=self.arrived,
            first=self._commit.first,
            cached_tokens=self._commit.cached_tokens,
            relay=self._relay(self._commit),
        )
        return [self._done(), Report(fetched)]

    def _give_up(self, reason: Fallback, tell: bool = True) -> list[Action]:
        if self.state is State.REPORTED:
            return []
        abort = [Send(Abort(room=self.order.room, epoch=self.order.epoch))] if tell else []
        return [*abort, self._report(reason)]

    def _report(self, reason: Fallback) -> Report:
        self.state = State.REPORTED
        self.reason = reason
        unsafe = frozenset(block for read in self._reads.values() for block in read.local)
        return Report(
            FetchResult(
                self.order.fetch.request_id,
                arrived=self.arrived,
                unsafe=unsafe,
                reason=reason.value,
                transport=self._transport,
            )
        )

    def _done(self) -> Send:
        return Send(Done(room=self.order.room, epoch=self.order.epoch))

    def _relay(self, commit: Commit) -> RelayRecord:
        return RelayRecord(
            prefill_worker=self.order.worker,
            prompt_tokens=commit.prompt_tokens,
            computed_tokens=commit.prompt_tokens - commit.cached_tokens,
            local_tokens=self.order.first_block * self.order.block_size,
            blocks=len(self._good),
            bytes=self._bytes,
            transport=self._transport,
            transfer_s=self._transfer_s,
            queue_s=commit.queue_s,
            compute_s=commit.compute_s,
        )


def _why(failed: Failed) -> Fallback:
    if failed.busy:
        return Fallback.BUSY
    return Fallback.FAILED if failed.retry else Fallback.REJECTED
