"""One forward pass: batch rows from scheduled chunks, the model, and the form of the results."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton_api.errors import BatonError
from baton_api.messages import TokenChoice
from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.sampling import sampler
from baton_engine.sampling.state import SamplingState
from baton_engine.sampling.token_masks import Mask, MaskFiller
from baton_engine.scheduling.sequence import Sequence
from baton_engine.streams import copied


class ScheduledChunk(msgspec.Struct, frozen=True):
    """The tokens of one sequence in a forward pass. All numbers are those before the pass."""

    sequence: Sequence
    tokens: int
    """Number of pending tokens that the pass computes."""
    samples: bool
    """Whether the pass computes all pending tokens, and the next token is sampled."""
    ends: bool
    """Whether the pass computes all pending tokens, and the request generates none."""
    is_decode: bool
    """Whether the token was generated, and is not part of a prompt."""
    skipped: int = 0
    """Number of tokens before the first one that the prompt output needs."""
    output_tokens: int = 0
    """Number of tokens after these that the prompt output needs."""
    draft: tuple[int, ...] = ()
    """Draft tokens that the pass computes after the pending tokens. Their results count only if the sampled
    tokens are equal."""

    @property
    def wanted(self) -> int:
        """Number of last tokens whose hidden states are needed."""
        needed = self.tokens - self.skipped if self.output_tokens else int(self.samples)
        return needed + len(self.draft)

    @property
    def size(self) -> int:
        """Number of tokens that the pass computes, the draft included."""
        return self.tokens + len(self.draft)


def schedule(sequence: Sequence, tokens: int) -> ScheduledChunk:
    """Return the chunk of the next `tokens` pending tokens."""
    request, output = sequence.request, sequence.prompt_output
    last, generates = tokens == sequence.pending, request.generates
    skipped = output_tokens = 0
    if output is not None:
        skipped = max(0, output.next_position - sequence.computed)
        output_tokens = max(0, min(tokens, output.end - sequence.computed) - skipped)
    return ScheduledChunk(
        sequence,
        tokens,
        samples=last and generates,
        ends=last and not generates,
        is_decode=sequence.decoding,
        skipped=skipped,
        output_tokens=output_tokens,
    )


def decode(sequence: Sequence, draft: tuple[int, ...] = ()) -> ScheduledChunk:
    """Return the chunk of the single pending token of a generating sequence."""
    return ScheduledChunk(sequence, 1, samples=True, ends=False, is_decode=True, draft=draft)


Sampled = TokenChoice | BatonError | None
"""A token, the error if no token is allowed, or None for a sequence whose logits are not finite."""


class PassResult(NamedTuple):
    seconds: float
    """Duration of the pass; of the model alone, if the host waited for it before the selection."""
    sampled: dict[int, Sampled]
    """Tokens by the index of their chunk: those of chunks with `samples` whose sequence still runs."""
    logits: Tensor
    """[S, V] fp32: a row for each chunk with `samples`, and one for each of its draft tokens. Undefined if no
    chunk has a draft."""
    rows: list[int]
    """By chunk, the first of its rows in `logits`."""


def compute(model: Model, cache: KVCache, chunks: list[ScheduledChunk], batch: Batch) -> Tensor:
    """Launch the pass of `batch`. Returns the logits of the chunks with `samples`, and of their drafts."""
    if not any(chunk.output_tokens for chunk in chunks):
        return model.forward(batch, cache)
    hidden = model.hidden_states(batch, cache)
    return model.project(_update_prompt_outputs(model, chunks, hidden))


def sample_rows(
    logits: Tensor, rows: list[int], states: list[SamplingState], mask_filler: MaskFiller
) -> list[Sampled]:
    """Sample a token from each of `rows` of `logits` [S, V] with the state at the same index."""
    masks = mask_filler.begin([state.token_mask for state in states]).wait()
    return with_errors(sampler.sample(logits[rows], states, without_errors(masks)), masks)


def without_errors(masks: abc.Sequence[Mask]) -> list[NDArray[np.int32] | None]:
    """Return the masks to select with. A row whose mask failed is selected without one, and dropped later."""
    return [None if isinstance(mask, BatonError) else mask for mask in masks]


def with_errors(choices: abc.Sequence[TokenChoice | None], masks: abc.Sequence[Mask]) -> list[Sampled]:
    """Replace the choices of rows whose mask failed by the error."""
    return [
        mask if isinstance(mask, BatonError) else choice for mask, choice in zip(masks, choices, strict=True)
    ]


def _update_prompt_outputs(model: Model, chunks: list[ScheduledChunk], hidden: Tensor) -> Tensor:
    """Pass the hidden states to the prompt outputs that need them; return the states to sample from."""
    sampled: list[int] = []
    row = 0
    for chunk in chunks:
        if chunk.output_tokens:
            assert chunk.sequence.prompt_output is not None
            chunk.sequence.prompt_output.update(hidden[row : row + chunk.output_tokens], model.project)
        row += chunk.wanted
        if chunk.samples:
            sampled += range(row - 1 - len(chunk.draft), row)
    return hidden[copied(np.array(sampled, dtype=np.int64), hidden.device)]


def row_of(chunk: ScheduledChunk, *, ahead: bool = False) -> BatchRow:
    """Return the row of a chunk. `ahead`: its token is on the device, and will be the sequence's next one."""
    sequence = chunk.sequence
    start = sequence.length if ahead else sequence.computed
    tokens: abc.Sequence[int] = (0,)
    if not ahead:
        is_decode = chunk.is_decode
        tokens = sequence.output[-1:] if is_decode else sequence.tokens(start, start + chunk.tokens)
    if chunk.draft:
        tokens = [*tokens, *chunk.draft]
    request, table = sequence.request, sequence.table
    adapter = None if request.adapter is None else request.adapter.weights
    return BatchRow(tokens, start, sequence.blocks, chunk.wanted, table=table, adapter=adapter)
