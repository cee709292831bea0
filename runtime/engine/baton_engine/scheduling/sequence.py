"""
A request while the engine has it: where it stands, its chain of block hashes, its row of the block table.

`Request` is what callers agree on; a `Sequence` adds what only the engine's thread needs. All that grows with
the context is kept up to date step by step, so that a decode step costs the same at any length.
"""

from __future__ import annotations

import enum
from collections import abc

import numpy as np
from numpy.typing import NDArray

from baton_api.hashing import block_hashes, chain_hash, root_hash
from baton_engine.requests import Fetch, Request
from baton_engine.sampling.prompt_outputs import prompt_output_of
from baton_engine.sampling.state import SamplingState


class Stage(enum.Enum):
    """Where a job stands; it is in that one of the scheduler's collections."""

    WAITING = "waiting"
    FETCHING = "fetching"
    """Its prompt's KV is being brought from elsewhere; its blocks are pinned."""
    RUNNING = "running"
    HELD = "held"
    """It has ended; its exported blocks are pinned until they are released."""
    ENDED = "ended"
    """In no collection."""


class Sequence:
    """One request and what the engine knows about it. Made on any thread, since hashing takes a while."""

    __slots__ = (
        "admissions",
        "admitted_at",
        "arrived_at",
        "block_size",
        "cancelled",
        "fetch",
        "fetchable",
        "hashes",
        "local_tokens",
        "prompt_output",
        "published",
        "request",
        "room",
        "root",
        "sampling_state",
        "stage",
        "table",
    )

    def __init__(self, request: Request, block_size: int, table_blocks: int) -> None:
        self.request = request
        self.block_size = block_size
        self.root = root_hash(request.salt)
        hashes = request.hashes
        self.hashes = block_hashes(request.prompt, block_size, self.root) if hashes is None else list(hashes)
        """Of all full blocks whose tokens are known."""
        request.tail = self.hashes[-1] if self.hashes else b""
        self.published = 0
        """Leading blocks that the prefix cache knows, or knows others for."""
        self.table: NDArray[np.int32] = np.zeros(table_blocks, dtype=np.int32)
        """The request's block ids, with room for all that it can grow to."""
        self.room = 0
        """Tokens that its blocks can hold."""
        self.stage = Stage.WAITING
        self.admissions = 0
        self.arrived_at = 0.0
        self.admitted_at = 0.0
        """For the first time; both by the engine's clock."""
        self.local_tokens = 0
        """Prompt tokens that this worker's prefix cache had when it was admitted for the first time."""
        self.prompt_output = prompt_output_of(request)
        """What is still to be reported about its prompt."""
        self.fetchable = request.remote is not None and self.prompt_output is None
        self.fetch: Fetch | None = None
        self.cancelled = False
        """Aborted while fetching: it has been reported, and only its blocks are waited for."""
        self.sampling_state = SamplingState(request.sampling, request.prompt, request.matcher)

    @property
    def readmitted(self) -> bool:
        """Whether it came back after a retraction or a failed fetch, of which nothing counts twice."""
        return self.admissions > 1

    @property
    def decoding(self) -> bool:
        """Whether all but the token drawn last is computed: it goes into every pass."""
        request = self.request
        return bool(request.output) and request.pending == 1

    @property
    def cacheable(self) -> int:
        """
        Leading tokens that the prefix cache may stand in for.

        The last token is computed in any case, since its result is what is wanted; so is what a reading
        has not seen.
        """
        last = self.request.length - 1
        return last if self.prompt_output is None else min(last, self.prompt_output.next_position)

    @property
    def retractable(self) -> bool:
        """Blocks that were announced to a peer cannot be taken back."""
        return self.request.export is None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def grow(self, blocks: abc.Sequence[int]) -> None:
        """Append blocks that the pool gave."""
        held = self.request.blocks
        self.table[len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)
        self.room = len(held) * self.block_size

    def drop_blocks(self) -> list[int]:
        """Forget all blocks, and with them what was computed; the caller gives them back to the pool."""
        blocks = self.request.blocks
        self.request.blocks = []
        self.request.computed = 0
        self.published = 0
        self.room = 0
        return blocks

    def tokens(self, start: int, stop: int) -> abc.Sequence[int]:
        """Tokens of prompt + output; copies no more than is asked for."""
        request = self.request
        length = len(request.prompt)
        if stop <= length:
            return request.prompt[start:stop]
        if start >= length:
            return request.output[start - length : stop - length]
        return [*request.prompt[start:], *request.output[: stop - length]]

    def block_hash(self, index: int) -> bytes:
        """The chain hash of a full block, hashing what was generated since the last call."""
        size = self.block_size
        while len(self.hashes) <= index:
            start = len(self.hashes) * size
            self.hashes.append(chain_hash(self.parent(len(self.hashes)), self.tokens(start, start + size)))
        return self.hashes[index]

    def parent(self, index: int) -> bytes:
        """The chain hash before block `index`."""
        return self.hashes[index - 1] if index else self.root
