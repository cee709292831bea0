"""
Drafts of a draft head, which computes beside the model (`baton_engine.model.draft_head`).

The head's keys, values and states are part of the model's blocks, and each pass of the model writes them. So
a sequence misses none of them, wherever its blocks were computed. A pass also writes those of draft tokens.
If some are rejected, the state of the last accepted token is kept. Keys and values are computed again.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Protocol

from baton_engine.batch import Batch, BatchRow
from baton_engine.captured_passes import PassModel
from baton_engine.kv.cache import KVCache
from baton_engine.sampling import sampler
from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.acceptance import judge, state_of
from baton_engine.speculation.costs import PassTimes


class StateKeeper(Protocol):
    """What holds the states of a head: a `DraftHead`, or those of all ranks."""

    def keep(self, rows: abc.Sequence[int], blocks: abc.Sequence[int], cache: KVCache) -> None:
        """Make results `rows` of the last pass the states of `blocks`: later tokens were rejected."""
        ...

    def select(self, rows: abc.Sequence[int]) -> None:
        """Keep these rows of the last pass of the head for the next one."""
        ...


class HeadDrafts:
    """Computes drafts on the engine's thread."""

    def __init__(
        self, head: StateKeeper, passes: PassModel, cache: KVCache, clock: Callable[[], float]
    ) -> None:
        """`passes` computes those of `head`: itself, or captured ones."""
        self._head = head
        self._passes = passes
        self._cache = cache
        self._clock = clock
        self.times = PassTimes()
        self._warm = False
        """Whether a pass was computed. The first one may compile kernels, so it is not measured."""

    def acceptance(self, sequence: Sequence) -> float:
        """Process the result of the last draft. Returns the estimated acceptance of the next one."""
        state = state_of(sequence)
        judge(sequence, state)
        return state.acceptance

    def draft(self, wanted: abc.Sequence[tuple[Sequence, int]]) -> dict[Sequence, tuple[int, ...]]:
        """
        Return drafts of at most the wanted numbers of tokens. Their blocks must be reserved.

        Sequences with logits that are not finite are left out.
        """
        counts, live = dict(wanted), [sequence for sequence, _ in wanted]
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in live}
        device = self._cache.kv.device
        for ahead in range(max(counts.values(), default=0)):
            rows = [
                BatchRow(
                    drafts[sequence][-1:] or sequence.tokens(sequence.length - 1, sequence.length),
                    sequence.length - 1 + ahead,
                    sequence.blocks,
                    1,
                    table=sequence.table,
                )
                for sequence in live
            ]
            batch = Batch(rows, self._cache.block_size, device)
            if ahead:
                batch.continue_states()
            began = self._clock()
            logits = self._passes.forward(batch, self._cache)
            self._cache.streams.finish()
            if self._warm:
                self.times.add(len(rows), self._clock() - began)
            self._warm = True
            choices = sampler.sample(logits, [sequence.sampling_state.ahead(ahead) for sequence in live])
            growing = []
            for row, (sequence, choice) in enumerate(zip(live, choices, strict=True)):
                if choice is not None:
                    drafts[sequence].append(choice.token)
                    if ahead + 1 < counts[sequence]:
                        growing.append(row)
            if not growing:
                break
            if len(growing) < len(live):
                self._head.select(growing)
                live = [live[row] for row in growing]
        done = {sequence: tuple(draft) for sequence, draft in drafts.items() if draft}
        for sequence, draft in done.items():
            state = state_of(sequence)
            state.start, state.draft = sequence.length, draft
        return done

    def keep(self, rows: abc.Sequence[int], blocks: abc.Sequence[int]) -> None:
        """Make results `rows` of the last pass the states of `blocks`: later tokens were rejected."""
        self._head.keep(rows, blocks, self._cache)
