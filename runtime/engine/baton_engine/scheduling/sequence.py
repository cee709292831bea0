"""
The engine's state of a request: its output, its blocks and their hashes, its stage.

Only the engine's thread changes it. State that grows with the context is updated incrementally, so that the
cost of a decode step does not depend on the length.
"""

from __future__ import annotations

import enum
from collections import abc

import numpy as np
from numpy.typing import NDArray

from baton_api.hashing import block_hashes, chain_hash
from baton_engine.prompt_lookup import Lookup
from baton_engine.requests import Fetch, RemotePrefill, Request, TierTokens
from baton_engine.sampling.prompt_outputs import prompt_output_of
from baton_engine.sampling.state import SamplingState

FIRST_ACCEPTANCE = 0.7
"""Estimated acceptance of a token before the first draft."""


class DraftState:
    """Tokens of a sequence in the draft model's cache, its last draft and its acceptance."""

    __slots__ = ("acceptance", "admissions", "draft", "filled", "start")

    def __init__(self, admissions: int) -> None:
        self.admissions = admissions
        """`Sequence.admissions`: another number means other blocks."""
        self.filled = 0
        """Number of leading tokens whose KV is in the draft model's blocks."""
        self.acceptance = FIRST_ACCEPTANCE
        """Estimated probability that a draft token is accepted if those before it are."""
        self.start = 0
        """Position of the last draft."""
        self.draft: tuple[int, ...] = ()
        """The last draft, until its result is known. KV of all its tokens but the last was computed."""


class Stage(enum.Enum):
    """Stage of a sequence, which corresponds to the scheduler's collection that contains it."""

    WAITING = "waiting"
    FETCHING = "fetching"
    """The prompt's KV is being transferred; the blocks are pinned."""
    RUNNING = "running"
    HELD = "held"
    """The sequence has ended; its exported blocks are pinned until they are released."""
    ENDED = "ended"
    """The sequence is in no collection."""


class Sequence:
    """One request in the engine. Created on any thread, because hashing is slow."""

    __slots__ = (
        "admissions",
        "admitted_at",
        "arrived_at",
        "block_size",
        "blocks",
        "cached_tokens",
        "cancelled",
        "capacity",
        "computed",
        "draft_state",
        "fallback",
        "fetch",
        "fetchable",
        "hashes",
        "local_tokens",
        "lookup",
        "output",
        "peer_tokens",
        "prompt_output",
        "published",
        "request",
        "root",
        "sampling_state",
        "source",
        "speculates",
        "stage",
        "table",
        "tier_tokens",
        "tried",
    )

    def __init__(self, request: Request, block_size: int, table_blocks: int) -> None:
        self.request = request
        self.block_size = block_size
        self.root = request.root
        hashes = request.hashes
        self.hashes = block_hashes(request.prompt, block_size, self.root) if hashes is None else list(hashes)
        """Hashes of all full blocks whose tokens are known."""
        self.output: list[int] = []
        """Tokens sampled so far."""
        self.computed = 0
        """Tokens of prompt + output whose KV is in `blocks`."""
        self.blocks: list[int] = []
        self.published = 0
        """Number of leading blocks that are published, or have published duplicates."""
        self.table: NDArray[np.int32] = np.zeros(table_blocks, dtype=np.int32)
        """`blocks`, with space for the request's maximum length."""
        self.capacity = 0
        """Number of tokens that its blocks can store."""
        self.stage = Stage.WAITING
        self.admissions = 0
        self.arrived_at = 0.0
        self.admitted_at = 0.0
        """Time of the first admission; both times are by the engine's clock."""
        self.local_tokens = 0
        """Prompt tokens in this worker's prefix cache at the first admission."""
        self.cached_tokens = 0
        """Prompt tokens that no worker computed for this request."""
        self.peer_tokens = 0
        """Those of `cached_tokens` that came from another worker's cache."""
        self.tier_tokens: TierTokens = ()
        """Those of `cached_tokens` that were restored, by tier."""
        self.fallback = ""
        """`Output.fallback`."""
        self.prompt_output = prompt_output_of(request)
        """Pending output of the prompt, if requested."""
        self.fetchable = request.remote is not None and self.prompt_output is None
        """Whether a prefill worker may still compute the prompt."""
        self.tried: set[str] = set()
        """Names of the `CachedPrefix`es that are not read any more."""
        self.fetch: Fetch | None = None
        self.source: RemotePrefill | None = None
        """What starts and cancels `fetch`, or did so of the last one."""
        self.cancelled = False
        """Aborted during the fetch: the end is reported, and the blocks are released after the fetch."""
        self.lookup: Lookup | None = None
        """Its tokens as a source of drafts; None until the first draft is planned."""
        self.draft_state: DraftState | None = None
        """State of the draft model; None without one, or before its first draft."""
        self.speculates = True
        """Whether drafts may be planned."""
        self.sampling_state = SamplingState(request.sampling, request.prompt, request.matcher)

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet: first the prompt, then one at a time."""
        return self.length - self.computed

    @property
    def tail(self) -> bytes:
        """`Output.tail`."""
        blocks = len(self.request.prompt) // self.block_size
        return self.hashes[blocks - 1] if blocks else b""

    @property
    def readmitted(self) -> bool:
        """Whether the sequence was admitted again after a retraction or a failed fetch."""
        return self.admissions > 1

    @property
    def decoding(self) -> bool:
        """Whether only the last sampled token is pending. Such sequences take part in every pass."""
        return bool(self.output) and self.computed + 1 == len(self.request.prompt) + len(self.output)

    @property
    def cacheable(self) -> int:
        """
        Number of leading tokens that the prefix cache may replace.

        The last token must be computed, because its logits are needed, and so must positions that the prompt
        output has not processed.
        """
        last = self.length - 1
        return last if self.prompt_output is None else min(last, self.prompt_output.next_position)

    @property
    def retractable(self) -> bool:
        """Whether the sequence can be retracted. Blocks that were announced to a peer cannot."""
        return self.request.export is None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def grow(self, blocks: abc.Sequence[int]) -> None:
        """Append allocated blocks."""
        self.table[len(self.blocks) : len(self.blocks) + len(blocks)] = blocks
        self.blocks.extend(blocks)
        self.capacity = len(self.blocks) * self.block_size

    def trim(self, tokens: int) -> list[int]:
        """Remove and return the blocks after the first `tokens` tokens. The caller releases the blocks."""
        count = self.blocks_for(tokens)
        blocks = self.blocks[count:]
        del self.blocks[count:]
        self.capacity = count * self.block_size
        return blocks

    def drop_blocks(self) -> list[int]:
        """Remove and return all blocks, and reset the computed tokens. The caller releases the blocks."""
        blocks, self.blocks = self.blocks, []
        self.computed = 0
        self.published = 0
        self.capacity = 0
        return blocks

    def tokens(self, start: int, stop: int) -> abc.Sequence[int]:
        """Return tokens `start` to `stop` of prompt and output."""
        prompt, length = self.request.prompt, len(self.request.prompt)
        if stop <= length:
            return prompt[start:stop]
        if start >= length:
            return self.output[start - length : stop - length]
        return [*prompt[start:], *self.output[: stop - length]]

    def block_hash(self, index: int) -> bytes:
        """Return the chain hash of a full block. Hashes new blocks if necessary."""
        size = self.block_size
        while len(self.hashes) <= index:
            start = len(self.hashes) * size
            self.hashes.append(chain_hash(self.parent(len(self.hashes)), self.tokens(start, start + size)))
        return self.hashes[index]

    def parent(self, index: int) -> bytes:
        """Return the chain hash before block `index`."""
        return self.hashes[index - 1] if index else self.root
