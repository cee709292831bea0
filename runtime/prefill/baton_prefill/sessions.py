"""
The transfer session of one prompt on the prefill side: a pure state machine from events to actions.

    requested -> computing -> committed -> released
                      \\-> failed ---/

Blocks are announced once their content is final, and their checksums follow: the decode worker reads while
they are computed. Blocks are held until the decode worker sends
Done or Abort, disconnects, or the deadline passes. Releasing them early never endangers the decode worker's
memory: it only changes the content that it reads, which checksums detect.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import Checksums, Chunk, Commit, Drained, Failed, Prefill, TokenChoice
from baton_engine.requests import TierTokens


@dataclass(frozen=True, slots=True)
class SubmitPrompt:
    """Submit the prompt to the engine."""


@dataclass(frozen=True, slots=True)
class AwaitBlocks:
    """Wait until the device has written these blocks, then call `PrefillSession.written`."""

    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeChecksums:
    """Compute the checksums of these blocks, then call `PrefillSession.checksummed`."""

    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendToDecode:
    message: Chunk | Checksums | Commit | Failed | Drained


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Stop computing and release the blocks. Once for each SubmitPrompt."""


Action = SubmitPrompt | AwaitBlocks | ComputeChecksums | SendToDecode | ReleaseBlocks


class PrefillState(enum.StrEnum):
    REQUESTED = "requested"
    COMPUTING = "computing"
    COMMITTED = "committed"
    FAILED = "failed"
    RELEASED = "released"


class PrefillSession:
    """One attempt to compute one prompt for one decode worker."""

    def __init__(self, prefill: Prefill, block_size: int, tail: bytes) -> None:
        self.prefill = prefill
        self.state = PrefillState.REQUESTED
        self._block_size = block_size
        self._tail = tail
        self._taken = prefill.start_block
        """Blocks before it were given to `AwaitBlocks`, or are not wanted."""
        self._summed = prefill.start_block
        """Number of blocks whose checksums were sent, or that are not wanted."""
        self._commit: Commit | None = None

    @property
    def blocks(self) -> int:
        """Blocks of the whole prompt, a partial last one included."""
        return -(-len(self.prefill.tokens) // self._block_size)

    def begin(self) -> list[Action]:
        assert self.state is PrefillState.REQUESTED
        self.state = PrefillState.COMPUTING
        return [SubmitPrompt()]

    def computed(self, tokens: int, blocks: Sequence[int]) -> list[Action]:
        """The KV of the first `tokens` prompt tokens is in the first of `blocks`."""
        if self.state is not PrefillState.COMPUTING:
            return []
        # A partial last block is final only with the last token.
        final = self.blocks if tokens >= len(self.prefill.tokens) else tokens // self._block_size
        if final <= self._taken:
            return []
        first, self._taken = self._taken, final
        return [AwaitBlocks(first, tuple(blocks[first:final]))]

    def written(self, first_block: int, blocks: tuple[int, ...]) -> list[Action]:
        """The content of the blocks of `AwaitBlocks` is final. Announces them before anything else."""
        if self.state is not PrefillState.COMPUTING:
            return []
        chunk = Chunk(
            session=self.prefill.session,
            epoch=self.prefill.epoch,
            first_block=first_block,
            blocks=list(blocks),
        )
        return [SendToDecode(chunk), ComputeChecksums(first_block, blocks)]

    def checksummed(self, first_block: int, checksums: Sequence[int]) -> list[Action]:
        """The result of `ComputeChecksums`."""
        if self.state is not PrefillState.COMPUTING:
            return []
        self._summed += len(checksums)
        message = Checksums(
            session=self.prefill.session,
            epoch=self.prefill.epoch,
            first_block=first_block,
            checksums=list(checksums),
        )
        return [SendToDecode(message), *self._commit_if_whole()]

    def finished(
        self,
        first: TokenChoice,
        cached_tokens: int,
        peer_tokens: int = 0,
        queue_s: float = 0.0,
        compute_s: float = 0.0,
        tier_tokens: TierTokens = (),
    ) -> list[Action]:
        """The first token was sampled. Commit follows the last Checksums."""
        if self.state is not PrefillState.COMPUTING:
            return []
        self._commit = Commit(
            session=self.prefill.session,
            epoch=self.prefill.epoch,
            first=first,
            prompt_tokens=len(self.prefill.tokens),
            cached_tokens=cached_tokens,
            peer_tokens=peer_tokens,
            tier_tokens=tier_tokens,
            tail=self._tail,
            queue_s=queue_s,
            compute_s=compute_s,
        )
        return self._commit_if_whole()

    def failed(self, reason: str, retry: bool) -> list[Action]:
        """The engine failed. Announced blocks are held until the decode worker answers."""
        if self.state is not PrefillState.COMPUTING:
            return []
        self.state = PrefillState.FAILED
        return [self._failed(reason, retry)]

    def done(self) -> list[Action]:
        """The decode worker has read the blocks."""
        return self._end(send=True)

    def abort(self) -> list[Action]:
        """The decode worker cancelled the prompt."""
        return self._end(send=True)

    def lost(self) -> list[Action]:
        """The connection ended."""
        return self._end(send=False)

    def deadline(self) -> list[Action]:
        """The deadline passed without Done or Abort."""
        if self.state is PrefillState.COMPUTING:
            return [self._failed("the deadline passed", retry=False), *self._end(send=True)]
        return self._end(send=True)

    def _commit_if_whole(self) -> list[Action]:
        if self._commit is None or self._summed < self.blocks:
            return []
        self.state = PrefillState.COMMITTED
        return [SendToDecode(self._commit)]

    def _failed(self, reason: str, retry: bool) -> SendToDecode:
        return SendToDecode(
            Failed(session=self.prefill.session, epoch=self.prefill.epoch, reason=reason, retry=retry)
        )

    def _end(self, send: bool) -> list[Action]:
        if self.state in (PrefillState.REQUESTED, PrefillState.RELEASED):
            return []
        drained = (
            [SendToDecode(Drained(session=self.prefill.session, epoch=self.prefill.epoch))] if send else []
        )
        self.state = PrefillState.RELEASED
        return [ReleaseBlocks(), *drained]
