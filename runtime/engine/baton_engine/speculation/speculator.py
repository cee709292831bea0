"""
Drafts: which generating sequences compute draft tokens in the next pass, how many, and which are accepted.

The engine samples each position from its logits with the state of the sequence, as in a step of its own. It
continues with the next position only if the sampled token is the draft token. So an answer is a sample of the
model's distribution, with drafts and without. Both have the same bits if those of a token's logits do not
depend on the other tokens of its pass (`NativeDecoder.exact_rows`).
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from typing import Protocol

from baton_engine import forward_pass
from baton_engine.forward_pass import PassResult, Sampled, ScheduledChunk
from baton_engine.metrics.counters import EngineCounters
from baton_engine.prompt_lookup import AcceptanceRates, Lookup
from baton_engine.sampling.token_masks import MaskFiller
from baton_engine.scheduling.scheduler import Scheduler, StepPlan
from baton_engine.scheduling.sequence import Sequence, Stage
from baton_engine.speculation.costs import PassTimes, allot, common_length

log = logging.getLogger(__name__)

MOST_SEQUENCES = 64
"""Maximum number of sequences of a pass with drafts of their own tokens. With more, the host would look for
drafts longer than they save."""


class DraftSource(Protocol):
    """A model of drafts: one of its own (`DraftModel`), or a head of the model (`HeadDrafts`)."""

    times: PassTimes
    """Those of its passes of one token for each sequence."""

    def acceptance(self, sequence: Sequence) -> float:
        """Process the result of the last draft. Returns the estimated acceptance of the next one."""
        ...

    def draft(self, wanted: abc.Sequence[tuple[Sequence, int]]) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts of at most the wanted numbers of tokens. Their blocks must be reserved."""
        ...


class Speculator:
    """Plans drafts on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        counters: EngineCounters,
        drafts: DraftSource | None = None,
        keep: Callable[[abc.Sequence[int], abc.Sequence[int]], None] | None = None,
    ) -> None:
        """`keep` makes results of the last pass, by their rows, the states of blocks (`HeadDrafts.keep`)."""
        self._drafts = drafts
        self._keep = keep
        self._scheduler = scheduler
        self._counters = counters
        self._tokens = scheduler.limits.speculation_tokens
        self.times = PassTimes(scheduler.limits.results)
        """Those of the model."""
        self._rates = AcceptanceRates()

    def expects(self, sequences: abc.Sequence[Sequence]) -> bool:
        """
        Return whether drafts of the requests' own tokens will probably pay after the next token of each.

        A pass that is launched before that token is known has no drafts.
        """
        if not self._tokens:
            return False
        chances = [chances[1:] for _, _, chances in self._proposals(sequences)]
        return bool(chances) and any(allot(chances, len(sequences), self.times))

    def plan(self, plan: StepPlan) -> dict[Sequence, tuple[int, ...]]:
        """
        Return the drafts of the next pass, and allocate their blocks.

        A pass with prompt tokens is limited by arithmetic, so it has no drafts.
        """
        if not self._tokens or plan.prefills:
            return {}
        if self._drafts is not None:
            return self._modeled(plan.decodes, self._drafts)
        if not (proposals := self._proposals(plan.decodes)):
            return {}
        chances = [chances for _, _, chances in proposals]
        counts = allot(chances, len(plan.decodes), self.times)
        granted = {}
        for (sequence, draft, _), count in zip(proposals, counts, strict=True):
            if count and (count := self._scheduler.reserve(sequence, count)):
                granted[sequence] = tuple(draft[:count])
        return granted

    def verify(
        self,
        chunks: abc.Sequence[ScheduledChunk],
        result: PassResult,
        mask_filler: MaskFiller,
        take: Callable[[Sequence, Sampled], None],
    ) -> int:
        """As the function `verify`. Also records the pass, and releases the blocks of rejected tokens."""
        if not self._tokens:
            return 0
        if all(chunk.is_decode for chunk in chunks):
            self.times.add(sum(chunk.size for chunk in chunks), result.seconds)
            if self._drafts is not None:
                self._drafts.times.age()  # drafts that seemed slow are tried again
        drafts = [chunk for chunk in chunks if chunk.draft]
        computed = [chunk.sequence.computed for chunk in chunks]
        accepted = verify(chunks, result, mask_filler, take) if drafts else 0
        if drafts and self._keep is not None:
            self._keep_states(chunks, result, computed, self._keep)
        self.forget(drafts)
        self._counters.add_drafts(len(drafts), sum(len(chunk.draft) for chunk in drafts), accepted)
        return accepted

    def _keep_states(
        self,
        chunks: abc.Sequence[ScheduledChunk],
        result: PassResult,
        computed: abc.Sequence[int],
        keep: Callable[[abc.Sequence[int], abc.Sequence[int]], None],
    ) -> None:
        """
        Keep the states of the last accepted tokens. `computed`: of each sequence before the verification.

        A sequence whose pending token gave no logits keeps a state of a later token: its own was overwritten.
        """
        rows, blocks = [], []
        for index, (chunk, row, before) in enumerate(zip(chunks, result.rows, computed, strict=True)):
            sequence = chunk.sequence
            accepted = sequence.computed - before
            running = sequence.stage is Stage.RUNNING and result.sampled.get(index) is not None
            if running and accepted < len(chunk.draft):
                rows.append(row + accepted)
                blocks.append(sequence.blocks[(sequence.computed - 1) // self._scheduler.block_size])
        if rows:
            keep(rows, blocks)

    def forget(self, chunks: abc.Sequence[ScheduledChunk]) -> None:
        """Release the blocks of draft tokens that are not part of an answer."""
        for chunk in chunks:
            if chunk.draft:
                self._scheduler.trim(chunk.sequence, chunk.sequence.computed)

    def _modeled(
        self, decodes: abc.Sequence[Sequence], source: DraftSource
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts of a model, of the same length for all sequences that need as many."""
        limits = {sequence: limit for sequence in decodes if (limit := self._limit(sequence))}
        if not limits:
            return {}
        acceptances = [source.acceptance(sequence) for sequence in limits]
        longest = max(limits.values())
        count = common_length(acceptances, longest, len(decodes), self.times, source.times)
        wanted = [
            (sequence, self._scheduler.reserve(sequence, min(count, limit)))
            for sequence, limit in limits.items()
        ]
        wanted = [(sequence, granted) for sequence, granted in wanted if granted]
        try:
            drafts = source.draft(wanted) if wanted else {}
        except Exception:  # drafts must not end requests
            log.exception("Computing drafts failed. Drafts come from the requests' own tokens from now on.")
            self._drafts, drafts = None, {}
        for sequence, _ in wanted:
            if sequence not in drafts:
                self._scheduler.trim(sequence, sequence.length)
        return drafts

    def _limit(self, sequence: Sequence) -> int:
        """Return the maximum length of a draft, at least 0."""
        request = sequence.request
        left = min(
            request.sampling.max_tokens - len(sequence.output),
            self._scheduler.limits.max_model_len - sequence.length,
        )
        # A pass also samples the token after the draft.
        return max(0, min(self._tokens, left - 1)) if sequence.speculates else 0

    def _proposals(self, sequences: abc.Sequence[Sequence]) -> list[tuple[Sequence, list[int], list[float]]]:
        """Return the sequences that have drafts of their own tokens, with them and their chances."""
        proposals = []
        for sequence in sequences if len(sequences) <= MOST_SEQUENCES else ():
            request, most = sequence.request, self._limit(sequence)
            if not most:
                continue
            if sequence.lookup is None:
                sequence.lookup = Lookup(request.prompt, request.prediction, self._rates)
            sequence.lookup.follow(sequence.output)
            if draft := sequence.lookup.propose(most):
                proposals.append((sequence, draft, sequence.lookup.chances(len(draft))))
        return proposals


def verify(
    chunks: abc.Sequence[ScheduledChunk],
    result: PassResult,
    mask_filler: MaskFiller,
    take: Callable[[Sequence, Sampled], None],
) -> int:
    """
    Sample the positions after accepted draft tokens. Returns the number of accepted tokens.

    Positions are sampled one after the other, each with the state that the tokens before it left: random
    numbers by position, penalties, token masks and the minimum length. The first token that is not the
    draft's is still a result of the model; the results after it are dropped.

    The tokens after the pending ones were already added to their sequences. `take` is called for each
    accepted draft token with the token sampled after it, and adds that one to the sequence, or ends it.
    """
    live = list(zip(chunks, result.rows, strict=True))
    accepted = ahead = 0
    while live := [(chunk, row) for chunk, row in live if _accepts(chunk, ahead)]:
        ahead += 1
        accepted += len(live)
        rows = [row + ahead for _, row in live]
        states = [chunk.sequence.sampling_state for chunk, _ in live]
        sampled = forward_pass.sample_rows(result.logits, rows, states, mask_filler)
        for (chunk, _), choice in zip(live, sampled, strict=True):
            take(chunk.sequence, choice)
    return accepted


def _accepts(chunk: ScheduledChunk, ahead: int) -> bool:
    """Return whether the last token of a sequence that still generates is its draft token `ahead`."""
    sequence = chunk.sequence
    return (
        ahead < len(chunk.draft)
        and sequence.stage is Stage.RUNNING
        and sequence.speculates
        and sequence.output[-1] == chunk.draft[ahead]
    )
