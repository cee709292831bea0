"""
Drafts of a smaller model with the same vocabulary.

The draft model has a KV cache of its own with as many blocks as the model's. It uses the block tables of the
sequences, so a block holds the same tokens in both caches. Blocks that were filled from a transfer or for
a sequence without drafts have no KV of the draft model. The hash of a filled block says whose tokens it has;
missing tokens are computed before the next draft.

Draft tokens are sampled with the random numbers of their positions, as the verification does. The draft is
therefore likely to be accepted at any temperature.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.sampling import sampler
from baton_engine.scheduling.sequence import DraftState, Sequence
from baton_engine.speculation.acceptance import judge, state_of
from baton_engine.speculation.costs import PassTimes

CATCH_UP_TOKENS = 512
"""Maximum missing tokens of a pass. A sequence that misses more has no draft in this step."""


class DraftModel:
    """Computes drafts on the engine's thread."""

    def __init__(self, model: Model, cache: KVCache, clock: Callable[[], float]) -> None:
        self._model = model
        self._cache = cache
        self._clock = clock
        self._owners: list[bytes] = [b""] * cache.blocks
        """By block, the hash of the tokens whose KV it holds; empty: none, or an incomplete block."""
        self.times = PassTimes()
        self._warm = False
        """Whether a pass was computed. The first one may compile kernels, so it is not measured."""

    def acceptance(self, sequence: Sequence) -> float:
        """Process the result of the last draft. Returns the estimated acceptance of the next one."""
        state = state_of(sequence)
        drafted = len(state.draft)
        accepted = judge(sequence, state)
        if drafted:
            self._fill(sequence, state, state.start + min(accepted, drafted - 1))
        else:
            self._find(sequence, state)
        return state.acceptance

    def draft(self, wanted: abc.Sequence[tuple[Sequence, int]]) -> dict[Sequence, tuple[int, ...]]:
        """
        Return drafts of at most the wanted numbers of tokens. Their blocks must be reserved.

        Sequences of which too many tokens are missing, or with logits that are not finite, are left out.
        """
        live = self._catch_up(wanted)
        counts = dict(wanted)
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence, _ in live}
        while live:
            choices = sampler.sample(
                torch.stack([logits for _, logits in live]),
                [sequence.sampling_state.ahead(len(drafts[sequence])) for sequence, _ in live],
            )
            growing = []
            for (sequence, _), choice in zip(live, choices, strict=True):
                if choice is not None:
                    drafts[sequence].append(choice.token)
                    if len(drafts[sequence]) < counts[sequence]:
                        growing.append(sequence)
            rows = [
                _row(sequence, drafts[sequence][-1:], sequence.length + len(drafts[sequence]) - 1, 1)
                for sequence in growing
            ]
            live = list(zip(growing, self._forward(rows), strict=True)) if rows else []
        done = {sequence: tuple(draft) for sequence, draft in drafts.items() if draft}
        for sequence, draft in done.items():
            state = _state(sequence)
            state.start, state.draft = sequence.length, draft
        return done

    def _catch_up(self, wanted: abc.Sequence[tuple[Sequence, int]]) -> list[tuple[Sequence, Tensor]]:
        """Compute missing tokens. Returns the logits [V] after the last token of complete sequences."""
        rows: dict[Sequence, BatchRow] = {}
        left, written = CATCH_UP_TOKENS, set[int]()
        for sequence, _ in wanted:
            state, length, size = _state(sequence), sequence.length, self._cache.block_size
            tokens = sequence.tokens(state.filled, min(length, state.filled + left))
            blocks = sequence.blocks[state.filled // size : -(-length // size)]
            # Sequences with the same prefix share blocks: the others find them filled in the next step.
            if tokens and written.isdisjoint(blocks):
                left -= len(tokens)
                written.update(blocks)
                last = state.filled + len(tokens) == length
                # Two are missing after a draft that was right to its end: all results, for a captured pass.
                results = (len(tokens) if len(tokens) <= 2 else 1) if last else 0
                rows[sequence] = _row(sequence, tokens, state.filled, results)
        logits, row_end, complete = self._forward(list(rows.values())), 0, []
        for sequence, row in rows.items():
            self._fill(sequence, _state(sequence), row.context)
            row_end += row.wanted
            if row.wanted:
                complete.append((sequence, logits[row_end - 1]))
        return complete

    def _forward(self, rows: list[BatchRow]) -> Tensor:
        """Compute a pass. Forgets the blocks that it writes."""
        size = self._cache.block_size
        for row in rows:
            for index in range(row.start // size, -(-row.context // size)):
                self._owners[row.blocks[index]] = b""
        began = self._clock()
        logits = self._model.forward(Batch(rows, size, self._cache.kv.device), self._cache)
        self._cache.streams.finish()
        if all(len(row.tokens) == 1 for row in rows):
            if self._warm:
                self.times.add(len(rows), self._clock() - began)
            self._warm = True
        return logits

    def _find(self, sequence: Sequence, state: DraftState) -> None:
        """Find leading blocks that the draft model filled for an earlier sequence."""
        size, blocks = self._cache.block_size, sequence.blocks
        for index in range(state.filled // size, (sequence.length - 1) // size):
            if self._owners[blocks[index]] != sequence.block_hash(index):
                break
            state.filled = (index + 1) * size

    def _fill(self, sequence: Sequence, state: DraftState, tokens: int) -> None:
        """Record that the KV of the first `tokens` tokens was computed."""
        size = self._cache.block_size
        for index in range(state.filled // size, tokens // size):
            self._owners[sequence.blocks[index]] = sequence.block_hash(index)
        state.filled = tokens


def _state(sequence: Sequence) -> DraftState:
    assert sequence.draft_state is not None, "acceptance was not called"
    return sequence.draft_state


def _row(sequence: Sequence, tokens: abc.Sequence[int], start: int, wanted: int) -> BatchRow:
    return BatchRow(tokens, start, sequence.blocks, wanted, table=sequence.table)
