"""
One prompt on the prefill side, as a pure state machine: what happened goes in, what to do comes out.

    asked -> computing -> committed -> released
                      \\-> failed ---/

Blocks are announced in order, each once its content is final, and are held from then on until the
decode worker says that it is done with them or that it no longer wants them, until it is gone, or until
the deadline. Letting them go early is never a danger to the decode worker's memory, only to the content
of what it reads, and that is what the checksums are for.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import Chunk, Commit, Drained, Failed, Prefill, TokenChoice


@dataclass(frozen=True, slots=True)
class Submit:
    """Give the prompt to the engine."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Compute the checksums of these blocks, then call `Room.checksummed` with them."""

    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    message: Chunk | Commit | Failed | Drained


@dataclass(frozen=True, slots=True)
class Release:
    """Stop computing if that has not ended, and let the blocks go. Once for each Submit."""


Action = Submit | Checksum | Send | Release


class State(enum.StrEnum):
    ASKED = "asked"
    COMPUTING = "computing"
    COMMITTED = "committed"
    FAILED = "failed"
    RELEASED = "released"


class Room:
    """One attempt to compute one prompt for one decode worker."""

    def __init__(self, ask: Prefill, block_size: int, tail: bytes) -> None:
        self.ask = ask
        self.state = State.ASKED
        self._block_size = block_size
        self._tail = tail
        self._taken = ask.start_block
        """Blocks before it were handed to `Checksum`, or are not wanted."""
        self._announced = ask.start_block
        self._commit: Commit | None = None

    @property
    def blocks(self) -> int:
        """Blocks of the whole prompt, the part in the last one included."""
        return -(-len(self.ask.tokens) // self._block_size)

    def begin(self) -> list[Action]:
        assert self.state is State.ASKED
        self.state = State.COMPUTING
        return [Submit()]

    def computed(self, tokens: int, blocks: Sequence[int]) -> list[Action]:
        """The first `tokens` of the prompt are in the first of `blocks`."""
        if self.state is not State.COMPUTING:
            return []
        # The last block may be filled in part, but only its last token makes its content final.
        final = self.blocks if tokens >= len(self.ask.tokens) else tokens // self._block_size
        if final <= self._taken:
            return []
        first, self._taken = self._taken, final
        return [Checksum(first, tuple(blocks[first:final]))]

    def checksummed(self, first_block: int, blocks: Sequence[int], checksums: Sequence[int]) -> list[Action]:
        """The answer to `Checksum`; answers come in the order of the questions."""
        if self.state is not State.COMPUTING:
            return []
        assert first_block == self._announced
        self._announced += len(blocks)
        chunk = Chunk(
            room=self.ask.room,
            epoch=self.ask.epoch,
            first_block=first_block,
            blocks=list(blocks),
            checksums=list(checksums),
        )
        return [Send(chunk), *self._commit_if_whole()]

    def finished(
        self, first: TokenChoice, cached_tokens: int, queue_s: float = 0.0, compute_s: float = 0.0
    ) -> list[Action]:
        """The first token is drawn; its Commit waits for the last Chunk."""
        if self.state is not State.COMPUTING:
            return []
        self._commit = Commit(
            room=self.ask.room,
            epoch=self.ask.epoch,
            first=first,
            prompt_tokens=len(self.ask.tokens),
            cached_tokens=cached_tokens,
            tail=self._tail,
            queue_s=queue_s,
            compute_s=compute_s,
        )
        return self._commit_if_whole()

    def failed(self, reason: str, retry: bool) -> list[Action]:
        """The engine gave the prompt up. What was announced is kept until the decode worker answers."""
        if self.state is not State.COMPUTING:
            return []
        self.state = State.FAILED
        return [self._failed(reason, retry)]

    def done(self) -> list[Action]:
        """The decode worker has what it wants and reads no more."""
        return self._end(tell=True)

    def abort(self) -> list[Action]:
        """The decode worker does not want the rest."""
        return self._end(tell=True)

    def lost(self) -> list[Action]:
        """The connection ended, and with it all that the decode worker may have wanted."""
        return self._end(tell=False)

    def deadline(self) -> list[Action]:
        """Nobody wants the answer any more, and nobody said so."""
        if self.state is State.COMPUTING:
            return [self._failed("the deadline passed", retry=False), *self._end(tell=True)]
        return self._end(tell=True)

    def _commit_if_whole(self) -> list[Action]:
        if self._commit is None or self._announced < self.blocks:
            return []
        self.state = State.COMMITTED
        return [Send(self._commit)]

    def _failed(self, reason: str, retry: bool) -> Send:
        return Send(Failed(room=self.ask.room, epoch=self.ask.epoch, reason=reason, retry=retry))

    def _end(self, tell: bool) -> list[Action]:
        if self.state in (State.ASKED, State.RELEASED):
            return []
        drained = [Send(Drained(room=self.ask.room, epoch=self.ask.epoch))] if tell else []
        self.state = State.RELEASED
        return [Release(), *drained]
