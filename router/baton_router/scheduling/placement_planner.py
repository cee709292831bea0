"""
The planner: it prices every option to serve a request, books the best one, and learns from the outcome.

One request is one `Placement`, from its decision to its end. However it ends, it is released once, and no
booking remains.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from baton_api.profiles import Profile
from baton_api.prompt_report import PromptReport
from baton_api.workers import PEER
from baton_router.requests.picker import DirectRoute, PickRequest
from baton_router.scheduling import pair_selection
from baton_router.scheduling.candidates import CandidateCache, Candidates
from baton_router.scheduling.pair_selection import (
    CANDIDATES_PER_GROUP,
    LOCAL_PREFILL,
    DecodeOffer,
    PlainOption,
    PrefillOffer,
    PromptWork,
)
from baton_router.scheduling.placement import ALTERNATIVES_SHOWN, DecisionCounters, Placement
from baton_router.scheduling.policies import PredictedTime, RoutingPolicy
from baton_router.scheduling.restoring import PromptPlan, Reach, soonest
from baton_router.scheduling.revision_weights import RevisionShares
from baton_router.workers.costs import RunningAverage
from baton_router.workers.worker_list import Workers
from baton_router.workers.worker_state import ACCURACY_REQUESTS, WorkerState, WorkerStates

log = logging.getLogger(__name__)

PLACEMENTS_LIMIT = 1_000
EXPECTED_ANSWER_TOKENS = 200.0
"""Assumed length of an answer before the first one has ended."""

MIN_RESTORED_TOKENS = 256
"""Restored tokens of a measurement; the time for fewer is within the error of the predicted computing."""

NO_BACKLOG: Mapping[int, float] = {}
NO_WEIGHTS: Mapping[str, float] = {}
NO_REACH: Mapping[int, Reach] = {}


class PlacementPlanner:
    """Belongs to one thread, and never waits."""

    def __init__(
        self,
        workers: Workers,
        rng: random.Random,
        local_prefill_limit: int,
        weights: Callable[[], Mapping[str, float]] = dict,
        profiles: Iterable[Profile] = (),
        policy: RoutingPolicy | None = None,
    ) -> None:
        """
        `local_prefill_limit`: maximum tokens that a decode worker computes beside its streams. `profiles`: by
        model, measured in advance. `policy`: PredictedTime by default. `weights`: share of requests by
        revision; if empty, revisions compete.
        """
        self.policy = policy or PredictedTime()
        self._weights = weights
        self._shares = RevisionShares()
        self._rng = rng
        self._local_prefill_limit = local_prefill_limit
        self._numbers = itertools.count(1)
        self._answer_tokens = RunningAverage(EXPECTED_ANSWER_TOKENS)
        self.metrics = DecisionCounters()
        self.worker_states = WorkerStates(profiles)
        self._candidate_cache = CandidateCache(workers, self.worker_states)
        self.placements: deque[Placement] = deque(maxlen=PLACEMENTS_LIMIT)
        """The latest placements, the newest last."""

    def candidates(
        self, model: str | None, now: float, direct: DirectRoute | None = None
    ) -> Candidates | None:
        """Workers for a request that no worker had yet. Raises the errors of `Workers.serving`."""
        return self._candidate_cache.candidates(model, (), now, direct)

    def plan(
        self,
        request: PickRequest,
        now: float,
        ahead: Mapping[int, float] = NO_BACKLOG,
        queued_s: float = 0.0,
    ) -> Placement | None:
        """
        Choose among the workers that the request does not exclude; None if none is left. This books nothing.

        `ahead` are seconds, by the workers' slots, of prompts that are not booked but will go there before
        this one. `queued_s`: predicted seconds of the requests that wait for these workers. The time of its
        prompts but the first is predicted as if none of them were cached. Raises what `Workers.serving`
        raises.
        """
        candidates = self._candidate_cache.candidates(request.model, request.excluded, now, request.direct)
        if candidates is None:
            return None
        prompt, cost = request.prompt, request.cost
        matched = self.worker_states.match(prompt)
        weights = self._usable_weights(candidates) if candidates.by_revision else NO_WEIGHTS
        if weights:
            candidates = candidates.by_revision[self._shares.choose(weights, candidates.holder(matched))]
        ratio = candidates.bytes_per_token.value
        tokens = max(1, round(prompt.bytes / ratio))
        held = self.worker_states.held(prompt, matched)
        cached = {slot: int(size / ratio) for slot, size in held.items()}
        reach = NO_REACH
        if self.worker_states.blocks.tiers:
            reach = {
                slot: [(tier, int(size / ratio)) for tier, size in reached]
                for slot, reached in self.worker_states.reach(prompt).items()
            }
        peers = self._peers(candidates, tokens, cached)
        options = self._options(candidates, tokens, cached, reach, peers, now, ahead, queued_s)
        option = pair_selection.choose_option(options, self._rng)
        decode_state = prefill_state = candidates.decode_states[option.decode]
        if option.prefill != LOCAL_PREFILL:
            prefill_state = candidates.prefill_states[option.prefill]
        others, others_s = cost.others(ratio), 0.0
        if others:
            each = math.ceil(others / max(1, cost.prompts - 1))
            others_s = others / each * prefill_state.prefill_cost.seconds(each, each)
            option = option._replace(first_token_s=option.first_token_s + others_s)
        hot, reached = cached.get(prefill_state.slot, 0), reach.get(prefill_state.slot, ())
        expected_cached = (
            self._prompt_plan(prefill_state, 1.0, hot, reached, tokens).cached
            if reached
            else min(hot, tokens - 1)
        )
        plan: PromptPlan | None = None
        if option.prefill != LOCAL_PREFILL and option.decode in peers and prefill_state.peers:
            reached = [*reached, (PEER, peers[option.decode])]  # not expected: the worker may compute instead
        if reached:
            whole = self._prompt_plan(prefill_state, 1.0, hot, reached, tokens)
            plan = self._prompt_plan(prefill_state, prefill_state.cache_weight, hot, reached, tokens)
            plan = plan._replace(reachable=whole.reachable)  # the worker may restore what no price counts on
            compute_s = plan.seconds
        else:
            compute_s = prefill_state.prefill_cost.seconds(tokens - option.cached, tokens)
        return Placement(
            number=next(self._numbers),
            pair=candidates.pair(option),
            option=option,
            candidates=candidates,
            options=options[: ALTERNATIVES_SHOWN + 1],
            request=request,
            tokens=tokens,
            expected_cached=expected_cached,
            hot=min(hot, tokens - 1),
            restored=plan.restored if plan else (),
            reachable=plan.reachable if plan else (),
            decided=now,
            prefill_state=prefill_state,
            decode_state=decode_state,
            compute_s=compute_s + others_s,
            others=others,
            others_s=others_s,
            matched=[(state, matched.get(state.slot, 0)) for state in {prefill_state, decode_state}],
            weights=weights,
            price_unit=self.policy.price_unit,
        )

    def _options(
        self,
        candidates: Candidates,
        tokens: int,
        cached: dict[int, int],
        reach: Mapping[int, Reach],
        peers: Mapping[int, int],
        now: float,
        ahead: Mapping[int, float],
        queued_s: float,
    ) -> list[PlainOption]:
        """
        The pairs of workers for a prompt of `tokens`, the cheapest first.

        `cached`: tokens in the pool, by slot; `reach`: with tiers, for workers that have some; `peers` as
        returned by `_peers`.
        """
        generating, computing = candidates.decode_states, candidates.prefill_states
        each = queued_s / len(computing or generating)

        def works(states: Iterable[WorkerState], peer: Reach = ()) -> Iterator[PromptWork]:
            """`peer`: what all of them can read from another worker."""
            for state in states:
                slot, prefills = state.slot, state.prefills
                hits = cached.get(slot, 0)
                if peer or (reach and slot in reach):
                    reached = [*reach.get(slot, ()), *peer]
                    plan = self._prompt_plan(state, state.cache_weight, hits, reached, tokens)
                    hits, compute_s = plan.cached, plan.seconds
                else:
                    if hits:
                        hits = min(int(hits * state.cache_weight), tokens - 1)
                    compute_s = state.prefill_cost.seconds(tokens - hits, tokens)
                backlog_s = prefills.backlog_s(now) if prefills.waiting else 0.0
                if ahead:
                    backlog_s += ahead.get(slot, 0.0)
                yield hits, backlog_s, prefills.waiting, compute_s, each

        decodes = [
            self._decode_offer(state, work, tokens, cached)
            for state, work in zip(generating, works(generating), strict=True)
        ]
        prefills = [self.policy.prefill_offer(work) for work in works(computing)]

        def reading(end: int) -> Callable[[int], PrefillOffer]:
            def offer(source: int) -> PrefillOffer:
                state = computing[source]
                if not state.peers:
                    return prefills[source]
                return self.policy.prefill_offer(next(works((state,), ((PEER, end),))))

            return offer

        transfers = candidates.transfers
        return pair_selection.pair_options(
            decodes,
            prefills,
            candidates.groups,
            lambda source, target: transfers[source][target].seconds(tokens, now),
            self._local_prefill_limit,
            tokens,
            candidates.pair_only,
            self.policy.transfer_weight,
            {target: reading(end) for target, end in peers.items()},
        )

    @staticmethod
    def _peers(candidates: Candidates, tokens: int, cached: Mapping[int, int]) -> dict[int, int]:
        """
        The decode workers of which prefill workers can read a part of the prompt, and how many tokens.

        Those that have most of it come first, and others are left out.
        """
        if not cached or not candidates.reads_peers:
            return {}
        held = [
            (min(cached[state.slot], tokens - 1), number)
            for number, state in enumerate(candidates.decode_states)
            if state.peers and cached.get(state.slot, 0) >= MIN_RESTORED_TOKENS
        ]
        return {number: end for end, number in heapq.nlargest(CANDIDATES_PER_GROUP, held)}

    @staticmethod
    def _prompt_plan(state: WorkerState, weight: float, hot: int, reach: Reach, tokens: int) -> PromptPlan:
        """How the worker gets a prompt; `weight`: the share of its assumed cache to count on."""
        counted = [(tier, int(end * weight)) for tier, end in reach]
        hot = min(int(hot * weight), tokens - 1)
        return soonest(state.prefill_cost, state.restore, hot, counted, tokens)

    def book(self, placement: Placement, now: float) -> None:
        """Book a plan that was made at this same moment: its request goes to the workers."""
        placement.decided = placement.arrived = now
        # Workers give other tenants a turn after each prompt, so only the first one is in the way of others.
        compute_s = placement.compute_s - placement.others_s
        placement.prefill_state.prefills.book(placement.number, compute_s, placement.uncached, now)
        placement.decode_state.streams.book(
            placement.number, placement.tokens + placement.others, max(1, placement.request.cost.choices)
        )
        sent = self.worker_states.sent
        placement.assumed_chunks = [
            (state, sent(placement.request.prompt, state, matched)) for state, matched in placement.matched
        ]
        self.placements.append(placement)
        self.metrics.decided(
            remote=placement.pair.prefill is not None, prefills=bool(placement.candidates.prefills)
        )
        if placement.weights:
            self._shares.sent(placement.weights, placement.pair.decode.revision)

    @property
    def answer_tokens(self) -> float:
        """Expected tokens of an answer, before it begins."""
        return self._answer_tokens.value

    def blocks_free_s(self, placement: Placement) -> float:
        """Seconds until the worker that is to generate has room for all of the prompt."""
        state = placement.decode_state
        streams = state.streams
        if (
            not streams.count
            or not state.total_blocks
            or placement.tokens > state.total_blocks * state.block_size
        ):
            return 0.0  # the worker rejects a prompt that can never fit
        return self._blocks_free_s(
            state, placement.tokens, state.step_cost.seconds(streams.count, streams.tokens)
        )

    def computed(self, placement: Placement, now: float) -> None:
        """The prompt is computed, or assumed to be: the worker can begin with another one."""
        placement.prefill_state.prefills.release(placement.number, now)

    def began(self, placement: Placement, report: PromptReport | None, now: float) -> None:
        """The first byte of the answer arrived, and with it the worker's report of the prompt."""
        if placement.first_byte is not None:
            return
        placement.first_byte, placement.report = now, report
        prefills, waited_s = placement.prefill_state.prefills, None
        if report is not None and report.estimated:
            waited_s = prefills.waited_s(placement.number, placement.decided)
        prefills.release(placement.number, now)
        if report is not None and placement.request.cost.prompts == 1:  # of several, it may be any one's
            self.metrics.computed(placement, report)
            self.worker_states.computed(placement.request.prompt, report, placement.assumed_chunks)
            compute_s = report.compute_s
            if report.estimated:
                compute_s = 0.0 if waited_s is None else max(0.0, compute_s - waited_s)
            self._learn(placement, report, compute_s)

    def release(
        self,
        placement: Placement,
        now: float,
        *,
        complete: bool,
        tokens: int | None = None,
        cached: int | None = None,
    ) -> None:
        """
        The request has ended, one way or another; `complete` if its answer is whole.

        `tokens` are those of the answer, if they were counted. `cached` are those of the prompt, where only
        the end of the answer reports them.
        """
        if placement.ended is not None:
            return
        if placement.report is not None and placement.request.cost.prompts == 1:
            self._learn_cached(placement, placement.report.completed(cached))
        placement.ended, placement.complete, placement.answered = now, complete, tokens
        placement.decode_state.streams.release(placement.number)
        if placement.first_byte is None:
            placement.prefill_state.prefills.release(placement.number, now)
            for state, chunks in placement.assumed_chunks:
                self.worker_states.lost(chunks, state)
        elif complete:
            self.worker_states.answered(placement.request.prompt, placement.decode_state)
            if tokens is not None and placement.request.cost.choices:
                self._answer_tokens.learn(tokens / placement.request.cost.choices)
        placement.drop_prompt()

    def _learn_cached(self, placement: Placement, report: PromptReport) -> None:
        """Learn from a count of cached tokens that only the end of the answer reports."""
        if report is placement.report or report.cached is None:
            return
        placement.report = report
        self.metrics.cached(placement, report)
        if not report.remote or placement.pair.prefill is not None:
            expected = placement.expected_cached * report.tokens / placement.tokens
            self._check_accuracy(placement, expected, report.cached)
            if placement.computed_s > 0:
                self._learn_speed(placement, report, report.cached, placement.computed_s)

    def _learn(self, placement: Placement, report: PromptReport, compute_s: float) -> None:
        """`compute_s` as reported or estimated; 0 if unknown."""
        if placement.request.prompt.bytes:
            placement.candidates.bytes_per_token.learn(placement.request.prompt.bytes, report.tokens)
        if report.remote and placement.pair.prefill is None:
            return
        expected = placement.expected_cached * report.tokens / placement.tokens
        cached = min(int(expected), report.tokens) if report.cached is None else report.cached
        state = placement.prefill_state if report.remote else placement.decode_state
        if compute_s > 0 and report.cached is None and placement.reachable:
            placement.computed_s = compute_s  # with or without restoring: the end of the answer may tell
        elif compute_s > 0:
            self._learn_speed(placement, report, cached, compute_s)
        if state is placement.prefill_state and report.cached is not None:
            self._check_accuracy(placement, expected, report.cached)
        if report.remote and report.transfer_s > 0:
            moved = report.tokens - report.held
            placement.candidates.transfers[placement.option.prefill][placement.option.decode].learn(
                moved, report.transfer_s
            )

    def _restored(self, placement: Placement, report: PromptReport) -> int:
        """Cached tokens that the computing worker has restored, as its pool did not have them."""
        if not placement.reachable or report.cached is None:
            return 0
        scale = report.tokens / placement.tokens
        most = sum(tokens for _, tokens in placement.reachable)
        return max(0, int(min(report.cached - placement.hot * scale, most * scale)))

    def _learn_speed(self, placement: Placement, report: PromptReport, cached: int, compute_s: float) -> None:
        """
        Learn the speed of computing, or of restoring, which is what computing does not explain.

        The latter takes a known speed of computing, and tokens of one tier.
        """
        state = placement.prefill_state if report.remote else placement.decode_state
        restored = self._restored(placement, report) if state is placement.prefill_state else 0
        uncached = max(1, report.tokens - cached)
        if restored < MIN_RESTORED_TOKENS:
            state.prefill_cost.learn(uncached, report.tokens, compute_s)
            source, tokens = placement.restored[-1] if placement.restored else ("", 0)
            came = 2 * restored >= tokens * report.tokens / placement.tokens
            if source == PEER and not came and state is placement.prefill_state:  # so it costs as much
                state.restore[PEER].learn(tokens, state.prefill_cost.seconds(tokens, placement.tokens))
            return
        tier, tokens = placement.reachable[0]
        if restored <= tokens * report.tokens / placement.tokens and state.prefill_cost.is_calibrated:
            rest_s = compute_s - state.prefill_cost.seconds(uncached, report.tokens)
            state.restore[tier].learn(restored, max(0.0, rest_s))

    def _usable_weights(self, candidates: Candidates) -> Mapping[str, float]:
        """Return the weights of the eligible revisions; empty if none of them has a weight."""
        weights = self._weights()
        return {
            revision: weight for revision in candidates.by_revision if (weight := weights.get(revision, 0.0))
        }

    def _check_accuracy(self, placement: Placement, expected_cached: float, actual: int) -> None:
        accuracy = placement.prefill_state.accuracy
        if not accuracy.learn(expected_cached, actual):
            return
        if accuracy.broken:
            log.warning(
                "Worker %s had only %.0f %% of the expected prompt tokens cached, over about the last %d "
                "requests. The router chooses it by its load only until that changes.",
                placement.computing_worker.name,
                100 * accuracy.ratio,
                ACCURACY_REQUESTS,
            )
        else:
            log.info(
                "The cache of the worker %s matches the router's index again.",
                placement.computing_worker.name,
            )

    def _decode_offer(
        self, state: WorkerState, work: PromptWork, tokens: int, cached: dict[int, int]
    ) -> DecodeOffer:
        streams, blocks_free_s, slowdown_s = state.streams.count, 0.0, 0.0
        if streams:
            step_s, slower_s = state.step_cost.with_added_stream(streams, state.streams.tokens, tokens)
            if slower_s > step_s:
                slowdown_s = streams * (slower_s - step_s) * self._answer_tokens.value
            if state.total_blocks:
                had, _, _, _, _ = work
                pooled = min(had, cached.get(state.slot, 0))  # restored tokens take blocks, too
                blocks_free_s = self._blocks_free_s(state, tokens - pooled, step_s)
        return self.policy.decode_offer(work, streams, blocks_free_s, slowdown_s)

    def _blocks_free_s(self, state: WorkerState, tokens: int, step_s: float) -> float:
        """Seconds until blocks for so many tokens come free, if one stream ends after the other."""
        missing = -(-tokens // state.block_size) - state.free_blocks
        if missing <= 0:
            return 0.0
        streams = state.streams.count
        each = state.streams.tokens / streams / state.block_size
        return missing / max(1.0, each) * step_s * self._answer_tokens.value / streams
