"""
Planning of drafts: which generating sequences compute draft tokens in the next pass, and how many.

Drafts never change an answer. The engine samples each position from its logits with the state of the
sequence, as in a step of its own. It continues with the next position only if the sampled token is the draft
token. This requires a model whose logits do not depend on the other tokens of a row (`Model.exact_rows`).
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable

from baton_engine.forward_pass import PassResult, Sampled, ScheduledChunk
from baton_engine.metrics.counters import EngineCounters
from baton_engine.sampling.token_masks import MaskFiller
from baton_engine.scheduling.scheduler import Scheduler, StepPlan
from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.costs import PassTimes, allot, common_length
from baton_engine.speculation.draft_model import DraftModel
from baton_engine.speculation.lookup import AcceptanceRates, Lookup
from baton_engine.speculation.verification import verify

log = logging.getLogger(__name__)


class Speculator:
    """Plans drafts on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        counters: EngineCounters,
        tokens: int,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`tokens` is the maximum length of a draft; 0 disables speculation."""
        self._draft_model = draft_model
        self._scheduler = scheduler
        self._counters = counters
        self._tokens = tokens
        self._times = PassTimes()
        self._rates = AcceptanceRates()

    def plan(self, plan: StepPlan) -> dict[Sequence, tuple[int, ...]]:
        """
        Return the drafts of the next pass, and allocate their blocks.

        A pass with prompt tokens is limited by arithmetic, so it has no drafts.
        """
        if not self._tokens or plan.prefills:
            return {}
        if self._draft_model is not None:
            return self._modeled(plan.decodes, self._draft_model)
        proposals = [(sequence, self._proposed(sequence)) for sequence in plan.decodes]
        proposals = [(sequence, draft) for sequence, draft in proposals if draft]
        if not proposals:
            return {}
        chances = [sequence.lookup.chances(len(draft)) for sequence, draft in proposals if sequence.lookup]
        counts = allot(chances, len(plan.decodes), self._times)
        granted = {}
        for (sequence, draft), count in zip(proposals, counts, strict=True):
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
        """See `verification.verify`. Also records the pass, and releases the blocks of rejected tokens."""
        if not self._tokens:
            return 0
        if all(chunk.is_decode for chunk in chunks):
            self._times.add(sum(chunk.size for chunk in chunks), result.seconds)
        drafts = [chunk for chunk in chunks if chunk.draft]
        accepted = verify(chunks, result, mask_filler, take) if drafts else 0
        self.forget(drafts)
        self._counters.add_drafts(len(drafts), sum(len(chunk.draft) for chunk in drafts), accepted)
        return accepted

    def forget(self, chunks: abc.Sequence[ScheduledChunk]) -> None:
        """Release the blocks of draft tokens that are not part of an answer."""
        for chunk in chunks:
            if chunk.draft:
                self._scheduler.trim(chunk.sequence, chunk.sequence.request.computed)

    def _modeled(
        self, decodes: abc.Sequence[Sequence], draft_model: DraftModel
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts of the draft model, of the same length for all sequences that need as many."""
        limits = {sequence: limit for sequence in decodes if (limit := self._limit(sequence))}
        if not limits:
            return {}
        acceptances = [draft_model.acceptance(sequence) for sequence in limits]
        longest = max(limits.values())
        count = common_length(acceptances, longest, len(decodes), self._times, draft_model.times)
        wanted = [(one, self._scheduler.reserve(one, min(count, limit))) for one, limit in limits.items()]
        wanted = [(sequence, granted) for sequence, granted in wanted if granted]
        try:
            drafts = draft_model.draft(wanted) if wanted else {}
        except Exception:  # the draft model must not end requests
            log.exception("The draft model failed. Drafts come from the requests' own tokens from now on.")
            self._draft_model, drafts = None, {}
        for sequence, _ in wanted:
            if sequence not in drafts:
                self._scheduler.trim(sequence, sequence.request.length)
        return drafts

    def _limit(self, sequence: Sequence) -> int:
        """Return the maximum length of a draft, at least 0."""
        request = sequence.request
        left = min(
            request.sampling.max_tokens - len(request.output),
            self._scheduler.limits.max_model_len - request.length,
        )
        # A pass also samples the token after the draft.
        return max(0, min(self._tokens, left - 1)) if sequence.speculates else 0

    def _proposed(self, sequence: Sequence) -> list[int]:
        request, most = sequence.request, self._limit(sequence)
        if not most:
            return []
        if sequence.lookup is None:
            sequence.lookup = Lookup(request.prompt, request.prediction, self._rates)
        sequence.lookup.follow(request.output)
        return sequence.lookup.propose(most)
