"""
The transfer session of one prompt on the prefill side: a pure state machine from events to actions.

    requested -> computing -> committed -> released
                      \\-> failed ---/

Blocks are announced in order, each once its content is final. They are held until the decode worker sends
Done or Abort, disconnects, or the deadline passes. Releasing them early never endangers the decode worker's
memory: it only changes the content that it reads, which checksums detect.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import Chunk, Commit, Drained, Failed, Prefill, TokenChoice


@dataclass(frozen=True, slots=True)
class SubmitPrompt:
    """Submit the prompt to the engine."""


@dataclass(frozen=True, slots=True)
class ComputeChecksums:
    """Compute the checksums of these blocks, then call `PrefillSession.checksummed`."""

    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendToDecode:
    message: Chunk | Commit | Failed | Drained


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Stop computing and release the blocks. Once for each SubmitPrompt."""


Action = SubmitPrompt | ComputeChecksums | SendToDecode | ReleaseBlocks


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
        """Blocks before it were given to `ComputeChecksums`, or are not wanted."""
        self._announced = prefill.start_block
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
        return [ComputeChecksums(first, tuple(blocks[first:final]))]

    def checksummed(self, first_block: int, blocks: Sequence[int], checksums: Sequence[int]) -> list[Action]:
        """The result of `ComputeChecksums`; results arrive in the order of the actions."""
        if self.state is not PrefillState.COMPUTING:
            return []
        assert first_block == self._announced
        self._announced += len(blocks)
        chunk = Chunk(
            session=self.prefill.session,
            epoch=self.prefill.epoch,
            first_block=first_block,
            blocks=list(blocks),
            checksums=list(checksums),
        )
        return [SendToDecode(chunk), *self._commit_if_whole()]

    def finished(
        self, first: TokenChoice, cached_tokens: int, queue_s: float = 0.0, compute_s: float = 0.0
    ) -> list[Action]:
        """The first token was sampled. Commit follows the last Chunk."""
        if self.state is not PrefillState.COMPUTING:
            return []
        self._commit = Commit(
            session=self.prefill.session,
            epoch=self.prefill.epoch,
            first=first,
            prompt_tokens=len(self.prefill.tokens),
            cached_tokens=cached_tokens,
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
        if self._commit is None or self._announced < self.blocks:
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
