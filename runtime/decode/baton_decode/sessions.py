"""
The transfer session of one prompt on the decode side: a pure state machine from events to actions.

    asking -> receiving -> committed -> reported

The session reports its result once, as early as it is known. The result is the first token, once all blocks
have arrived and their checksums match, or the number of leading blocks that are good. A read may still write
its blocks after the report. The report names these blocks as unsafe, and `BlocksSettled` follows once their
read has ended. The session is over when all reads have ended.

The order of a peer's messages is not trusted. A chunk names its position, an epoch identifies the attempt,
and a block counts only once its read is done and its checksum equals the one that the peer sent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import Abort, Checksums, Chunk, Commit, Done, Failed, Prefill
from baton_api.metrics import TIERS
from baton_api.prompt_report import Fallback
from baton_engine.requests import Fetch, FetchResult, RelayRecord
from baton_engine.transfer import Pulled


@dataclass(frozen=True, slots=True)
class SendToPrefill:
    message: Prefill | Done | Abort


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Read the peer's blocks `remote` into `local`, pairwise; then call `pulled` or `pull_failed`."""

    number: int
    remote: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyChecksums:
    """Compare the checksums of `blocks`; then call `verified` with one result for each."""

    number: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Report the result; once in a session."""

    fetched: FetchResult


@dataclass(frozen=True, slots=True)
class BlocksSettled:
    """These blocks were reported as unsafe, and are no longer written."""

    blocks: tuple[int, ...]


Action = SendToPrefill | ReadBlocks | VerifyChecksums | ReportResult | BlocksSettled


class DecodeState(enum.StrEnum):
    ASKING = "asking"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    REPORTED = "reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The blocks that one attempt fetches, and the values that its messages must match."""

    fetch: Fetch
    session: str
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
        """The position after the last block to fill."""
        return self.fetch.start_block + len(self.fetch.blocks)

    def prefill(self, request_id: str, ticket: str, deadline_s: float, source: str) -> Prefill:
        fetch = self.fetch
        return Prefill(
            session=self.session,
            epoch=self.epoch,
            tokens=list(fetch.tokens),
            start_block=fetch.start_block,
            parent=fetch.parent,
            sampling=fetch.sampling.first_token(),
            salt=fetch.salt,
            adapter="" if fetch.adapter is None else fetch.adapter.name,
            adapter_digest="" if fetch.adapter is None else fetch.adapter.digest,
            ticket=ticket,
            request_id=request_id,
            tenant=fetch.tenant,
            trace=fetch.trace,
            source=source,
            deadline_s=deadline_s,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    positions: tuple[int, ...]
    remote: tuple[int, ...]
    local: tuple[int, ...]


class DecodeSession:
    """One attempt to fetch one prompt. `now` is in seconds of a monotonic clock."""

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.state = DecodeState.ASKING
        self.reason: Fallback | None = None
        self._announced: dict[int, int] = {}
        """Position -> block."""
        self._sums: dict[int, int] = {}
        """Position -> checksum."""
        self._reads: dict[int, _Read] = {}
        """Reads that have not ended."""
        self._arrived: dict[int, _Read] = {}
        """Reads that have ended, of which checksums are missing."""
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
        """Whether the session is over: reported, and no read is under way."""
        return self.state is DecodeState.REPORTED and not self._reads

    @property
    def untouched(self) -> bool:
        """Whether no read has begun, so that another attempt can use the same blocks."""
        return self._pulls == 0

    @property
    def arrived(self) -> int:
        """Leading blocks of the fetch that have arrived and are verified."""
        position = self.spec.first_block
        while position in self._good:
            position += 1
        return position - self.spec.first_block

    def begin(self, request_id: str, ticket: str, deadline_s: float, source: str = "") -> list[Action]:
        return [SendToPrefill(self.spec.prefill(request_id, ticket, deadline_s, source))]

    def chunk(self, chunk: Chunk, now: float) -> list[Action]:
        if not self._concerns(chunk) or self._peer_failed is not None:
            return []
        if self._forbidden(chunk):
            return self._give_up(Fallback.PROTOCOL)
        if self.state is DecodeState.ASKING:
            self.state = DecodeState.RECEIVING
        positions, remote = [], []
        for position, block in enumerate(chunk.blocks, start=chunk.first_block):
            if self._announced.setdefault(position, block) != block:
                return self._give_up(Fallback.PROTOCOL)
            if position not in self._good and not self._is_under_way(position):
                positions.append(position)
                remote.append(block)
        if not positions:
            return []
        local = tuple(self.spec.fetch.blocks[p - self.spec.first_block] for p in positions)
        if not self._reads:
            self._reading_since = now
        self._pulls += 1
        self._reads[self._pulls] = _Read(tuple(positions), tuple(remote), local)
        return [ReadBlocks(self._pulls, tuple(remote), local)]

    def checksums(self, message: Checksums) -> list[Action]:
        if not self._concerns(message):
            return []
        end = message.first_block + len(message.checksums)
        if not message.checksums or message.first_block < self.spec.first_block or end > self.spec.end_block:
            return self._give_up(Fallback.PROTOCOL)
        for position, checksum in enumerate(message.checksums, start=message.first_block):
            if self._sums.setdefault(position, checksum) != checksum:
                return self._give_up(Fallback.PROTOCOL)
        return self._verify()

    def commit(self, commit: Commit) -> list[Action]:
        if not self._concerns(commit) or self._commit is not None or self._peer_failed is not None:
            return []
        length = len(self.spec.fetch.tokens)
        expected = (length, self.spec.tail, self.spec.fetch.sampling.logprobs is not None)
        if expected != (commit.prompt_tokens, commit.tail, commit.first.logprob is not None):
            return self._give_up(Fallback.MISMATCH)
        if not (
            0 <= commit.first.token < self.spec.vocab
            and commit.peer_tokens + sum(tokens for _, tokens in commit.tier_tokens) <= commit.cached_tokens
            and commit.cached_tokens <= length
            and commit.peer_tokens >= 0
            and all(tier in TIERS and tokens >= 0 for tier, tokens in commit.tier_tokens)
        ):
            return self._give_up(Fallback.PROTOCOL)
        self._commit = commit
        self.state = DecodeState.COMMITTED
        return self._answer_if_whole()

    def failed(self, failed: Failed) -> list[Action]:
        """The peer failed; reads under way may still bring good blocks."""
        if not self._concerns(failed):
            return []
        self._peer_failed = failed
        return self._answer_if_whole()

    def pulled(self, number: int, pulled: Pulled, now: float) -> list[Action]:
        """Read `number` has ended."""
        read = self._settle(number, now)
        if self.state is DecodeState.REPORTED:
            return [BlocksSettled(read.local)]
        self._bytes += pulled.bytes
        self._transport = pulled.transport
        self._arrived[number] = read
        return self._verify() or self._answer_if_whole()

    def pull_failed(self, number: int, now: float) -> list[Action]:
        """Read `number` failed: it writes no more, and its blocks are not used."""
        read = self._settle(number, now)
        if self.state is DecodeState.REPORTED:
            return [BlocksSettled(read.local)]
        return self._give_up(Fallback.TRANSPORT)

    def verified(self, number: int, good: Sequence[bool]) -> list[Action]:
        read = self._checks.pop(number)
        if self.state is DecodeState.REPORTED:
            return []
        self._good.update(p for p, equal in zip(read.positions, good, strict=True) if equal)
        return self._answer_if_whole() if all(good) else self._give_up(Fallback.CHECKSUM)

    def overdue(self) -> list[Action]:
        """A read, or the whole prompt, passed its deadline."""
        return self._give_up(Fallback.DEADLINE)

    def cancel(self) -> list[Action]:
        """The request is aborted."""
        return self._give_up(Fallback.CANCELLED)

    def lost(self) -> list[Action]:
        """The connection ended."""
        return self._give_up(Fallback.LOST, send=False)

    def broken(self) -> list[Action]:
        """This worker failed."""
        return self._give_up(Fallback.TRANSFER_FAILED, send=False)

    def _concerns(self, message: Chunk | Checksums | Commit | Failed) -> bool:
        mine = (message.session, message.epoch) == (self.spec.session, self.spec.epoch)
        return mine and self.state is not DecodeState.REPORTED

    def _forbidden(self, chunk: Chunk) -> bool:
        end = chunk.first_block + len(chunk.blocks)
        return (
            not chunk.blocks
            or chunk.first_block < self.spec.first_block
            or end > self.spec.end_block
            or not all(0 < block < self.spec.remote_blocks for block in chunk.blocks)
        )

    def _is_under_way(self, position: int) -> bool:
        reads = (*self._reads.values(), *self._arrived.values(), *self._checks.values())
        return any(position in read.positions for read in reads)

    def _verify(self) -> list[Action]:
        """Begin to verify the reads that have ended and whose checksums are known."""
        known = [
            number
            for number, read in self._arrived.items()
            if all(position in self._sums for position in read.positions)
        ]
        actions: list[Action] = []
        for number in known:
            read = self._checks[number] = self._arrived.pop(number)
            sums = tuple(self._sums[position] for position in read.positions)
            actions.append(VerifyChecksums(number, read.local, sums))
        return actions

    def _settle(self, number: int, now: float) -> _Read:
        read = self._reads.pop(number)
        if not self._reads:
            self._transfer_s += now - self._reading_since
        return read

    def _answer_if_whole(self) -> list[Action]:
        if self._peer_failed is not None and not self._reads and not self._checks:
            return [self._done(), self._report(_why(self._peer_failed))]
        if self._commit is None or len(self._good) < len(self.spec.fetch.blocks):
            return []
        self.state = DecodeState.REPORTED
        fetched = FetchResult(
            self.spec.fetch.request_id,
            arrived=self.arrived,
            first=self._commit.first,
            cached_tokens=self._commit.cached_tokens,
            peer_tokens=self._commit.peer_tokens,
            tier_tokens=self._commit.tier_tokens,
            relay=self._relay(self._commit),
        )
        return [self._done(), ReportResult(fetched)]

    def _give_up(self, reason: Fallback, send: bool = True) -> list[Action]:
        if self.state is DecodeState.REPORTED:
            return []
        abort = [SendToPrefill(Abort(session=self.spec.session, epoch=self.spec.epoch))] if send else []
        return [*abort, self._report(reason)]

    def _report(self, reason: Fallback) -> ReportResult:
        self.state = DecodeState.REPORTED
        self.reason = reason
        unsafe = frozenset(block for read in self._reads.values() for block in read.local)
        return ReportResult(
            FetchResult(
                self.spec.fetch.request_id,
                arrived=self.arrived,
                unsafe=unsafe,
                reason=reason.value,
                transport=self._transport,
            )
        )

    def _done(self) -> SendToPrefill:
        return SendToPrefill(Done(session=self.spec.session, epoch=self.spec.epoch))

    def _relay(self, commit: Commit) -> RelayRecord:
        return RelayRecord(
            prefill_worker=self.spec.worker,
            prompt_tokens=commit.prompt_tokens,
            computed_tokens=commit.prompt_tokens - commit.cached_tokens,
            local_tokens=self.spec.first_block * self.spec.block_size,
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
