"""
Where each request goes: every way to serve it is priced, the best is booked, and what came of it is learned.

One request is one `Dispatch`, from its decision to its end. Whatever way it ends, it is let go once, and
nothing of it stays booked.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from baton_api.profiles import Profile
from baton_api.reports import PromptReport
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.metrics.request_counters import DecisionCounters
from baton_router.scheduling import pair_selection
from baton_router.scheduling.candidates import CandidateCache, Candidates
from baton_router.scheduling.fallback_policy import WorkerPair
from baton_router.scheduling.pair_selection import (
    LOCAL_PREFILL,
    DecodeOffer,
    PairOption,
    PlainOption,
    PrefillOffer,
)
from baton_router.scheduling.revision_weights import RevisionShares
from baton_router.workers.costs import RunningAverage
from baton_router.workers.worker import Worker, Workers
from baton_router.workers.worker_state import ACCURACY_REQUESTS, WorkerState, WorkerStates

log = logging.getLogger(__name__)

DISPATCHES_LIMIT = 1_000
EXPECTED_ANSWER_TOKENS = 200.0
"""Before the first answer has ended."""

ALTERNATIVES_SHOWN = 3

NO_BACKLOG: Mapping[int, float] = {}
NO_WEIGHTS: Mapping[str, float] = {}


class Dispatch(msgspec.Struct, eq=False):
    """Where one request was sent, why there, and what came of it. Times are of the router's clock."""

    number: int
    pair: WorkerPair
    way: PairOption
    among: Candidates
    others: list[PlainOption]
    """The cheapest ways."""
    prompt: PromptChunks
    """Once the request has ended, its size alone."""
    tokens: int
    """Of the prompt, estimated."""
    expected: int
    """How many of them whoever computes it is believed to hold, whether or not one counts on it."""
    decided: float
    computing: WorkerState
    """What is known of whoever computes the prompt."""
    generating: WorkerState
    compute_s: float
    """What it takes to compute the prompt there."""
    matched: list[tuple[WorkerState, int]]
    """How many of its chunks those two held when it was planned."""
    weights: Mapping[str, float]
    """Of the generations that could have had it, if there were several."""
    hoped: list[tuple[WorkerState, list[int]]] = []
    """The chunks of the prompt that a worker is believed to hold since it was sent there."""
    first_byte: float | None = None
    ended: float | None = None
    report: PromptReport | None = None
    arrived: float = 0.0
    """When the request came to the router."""
    tenant: str = ""
    """Its id."""
    digest: int = 0
    """Of the request's body."""
    kind: str = ""
    """The request's class."""
    streams: bool = True
    complete: bool = False
    """Whether all of the answer was passed on."""
    answered: int | None = None
    """Tokens of the answer, if they were counted."""

    def forget_prompt(self) -> None:
        """Drop what only a request that runs needs: of a long prompt, chunks take more than all the rest."""
        self.prompt = PromptChunks((), self.prompt.sizes[-1:])
        self.hoped, self.matched = [], []

    @property
    def computer(self) -> Worker:
        """Who was to compute the prompt."""
        return self.pair.prefill or self.pair.decode

    @property
    def uncached(self) -> int:
        """Tokens to compute, as far as was known."""
        return max(1, self.tokens - self.way.cached)

    @property
    def costs(self) -> str:
        """The cheapest ways and their prices in seconds: `decode` alone, or `prefill>decode`."""
        shown = []
        for way in map(PairOption._make, self.others[:ALTERNATIVES_SHOWN]):
            pair = self.among.pair(way)
            name = f"{pair.prefill.name}>{pair.decode.name}" if pair.prefill else pair.decode.name
            shown.append(f"{name}={way.price_s:.6f}")
        return ";".join(shown)

    @property
    def summary(self) -> str:
        """For a header of the answer."""
        return (
            f"number={self.number};computed_by={self.computer.name};tokens={self.tokens};"
            f"cached={self.way.cached};first_token_s={self.way.first_token_s:.6f}"
        )


class Dispatcher:
    """Belongs to one thread, and never waits."""

    def __init__(
        self,
        workers: Workers,
        rng: random.Random,
        local_prefill_limit: int,
        weights: Callable[[], Mapping[str, float]] = dict,
        profiles: Iterable[Profile] = (),
    ) -> None:
        """
        `local_prefill_limit`: maximum tokens that a decode worker computes beside its streams. `profiles`: by
        model, measured in advance.

        `weights`: of requests, by generation; without any, generations compete.
        """
        self._weights = weights
        self._shares = RevisionShares()
        self._rng = rng
        self._local_prefill_limit = local_prefill_limit
        self._numbers = itertools.count(1)
        self._answer_tokens = RunningAverage(EXPECTED_ANSWER_TOKENS)
        self.figures = DecisionCounters()
        self.knowledge = WorkerStates(profiles)
        self._field = CandidateCache(workers, self.knowledge)
        self.dispatches: deque[Dispatch] = deque(maxlen=DISPATCHES_LIMIT)
        """The last ones, the newest at the end."""

    def candidates(self, model: str | None, now: float) -> Candidates | None:
        """Who may be chosen for a request that nobody had yet. Raises what `Workers.serving` raises."""
        return self._field.candidates(model, (), now)

    def plan(
        self,
        model: str | None,
        prompt: PromptChunks,
        tried: Collection[str],
        now: float,
        ahead: Mapping[int, float] = NO_BACKLOG,
    ) -> Dispatch | None:
        """
        Choose among the workers that are not in `tried`, by name; None if none is left. Nothing is booked.

        `ahead` are seconds, by the workers' slots, of prompts that are not booked but will go there before
        this one. Raises what `Workers.serving` raises.
        """
        among = self._field.candidates(model, tried, now)
        if among is None:
            return None
        matched = self.knowledge.match(prompt)
        weights = self._weighted(among) if among.by_revision else NO_WEIGHTS
        if weights:
            among = among.by_revision[self._shares.choose(weights, among.holder(matched))]
        ratio = among.bytes_per_token.value
        tokens = max(1, round(prompt.bytes / ratio))
        held = {slot: int(size / ratio) for slot, size in self.knowledge.held(prompt, matched).items()}
        transfers = among.transfers
        found = pair_selection.pair_options(
            [self._decode_offer(known, tokens, held, now, ahead) for known in among.known_decodes],
            [self._prefill_offer(known, tokens, held, now, ahead) for known in among.known_prefills],
            among.groups,
            lambda source, target: transfers[source][target].seconds(tokens, now),
            self._local_prefill_limit,
            tokens,
        )
        way = pair_selection.choose_option(found, self._rng)
        generating = among.known_decodes[way.decode]
        computing = generating if way.prefill == LOCAL_PREFILL else among.known_prefills[way.prefill]
        return Dispatch(
            next(self._numbers),
            among.pair(way),
            way,
            among,
            found[: ALTERNATIVES_SHOWN + 1],
            prompt,
            tokens,
            min(held.get(computing.slot, 0), tokens - 1),
            now,
            computing,
            generating,
            computing.prefill_cost.seconds(tokens - way.cached, tokens),
            [(known, matched.get(known.slot, 0)) for known in {computing, generating}],
            weights,
        )

    def book(self, made: Dispatch, now: float) -> None:
        """The request goes where it was planned, which must have been in this same moment."""
        made.decided = made.arrived = now
        made.computing.computing.book(made.number, made.compute_s, made.uncached, now)
        made.generating.streams.book(made.number, made.tokens)
        sent = self.knowledge.sent
        made.hoped = [(known, sent(made.prompt, known, matched)) for known, matched in made.matched]
        self.dispatches.append(made)
        self.figures.decided(remote=made.pair.prefill is not None, prefills=bool(made.among.prefills))
        if made.weights:
            self._shares.sent(made.weights, made.pair.decode.revision)

    @property
    def answer_tokens(self) -> float:
        """How many tokens an answer has, as far as one can tell before."""
        return self._answer_tokens.value

    def room_s(self, made: Dispatch) -> float:
        """Seconds until the worker that is to generate has room for all of the prompt."""
        known = made.generating
        streams = known.streams
        if not streams.count or not known.total_blocks or made.tokens > known.total_blocks * known.block_size:
            return 0.0  # one that can never fit is for the worker to refuse
        return self._room_s(known, made.tokens, known.step_cost.seconds(streams.count, streams.tokens))

    def computed(self, made: Dispatch, now: float) -> None:
        """The prompt is computed, or believed to be: the worker can begin with another."""
        made.computing.computing.release(made.number, now)

    def began(self, made: Dispatch, report: PromptReport | None, now: float) -> None:
        """The first byte of the answer is there, and with it what the worker says of the prompt."""
        if made.first_byte is not None:
            return
        made.first_byte, made.report = now, report
        made.computing.computing.release(made.number, now)
        if report is not None:
            self.figures.computed(made.expected, report)
            self.knowledge.computed(made.prompt, report, made.hoped)
            self._learn(made, report)

    def let_go(self, made: Dispatch, now: float, *, complete: bool, tokens: int | None = None) -> None:
        """
        The request has ended, one way or another; `complete` if its answer is whole.

        `tokens` are those of the answer, if they were counted.
        """
        if made.ended is not None:
            return
        made.ended, made.complete, made.answered = now, complete, tokens
        made.generating.streams.release(made.number)
        if made.first_byte is None:
            made.computing.computing.release(made.number, now)
            for known, chunks in made.hoped:
                self.knowledge.lost(chunks, known)
        elif complete:
            self.knowledge.answered(made.prompt, made.generating)
            if tokens is not None:
                self._answer_tokens.learn(tokens)
        made.forget_prompt()

    def _learn(self, made: Dispatch, report: PromptReport) -> None:
        if made.prompt.bytes:
            made.among.bytes_per_token.learn(made.prompt.bytes / report.tokens)
        computed = max(1, report.tokens - report.cached)
        if report.remote and made.pair.prefill is None:
            return
        known = made.computing if report.remote else made.generating
        known.prefill_cost.learn(computed, report.tokens, report.compute_s)
        if known is made.computing:
            self._compare(made, made.expected * report.tokens / made.tokens, report.cached)
        if report.remote:
            moved = report.tokens - report.held
            made.among.transfers[made.way.prefill][made.way.decode].learn(moved, report.transfer_s)

    def _weighted(self, among: Candidates) -> Mapping[str, float]:
        """The weights of those generations that can be chosen; empty if none of them has one."""
        weights = self._weights()
        return {revision: weight for revision in among.by_revision if (weight := weights.get(revision, 0.0))}

    def _compare(self, made: Dispatch, expected: float, actual: int) -> None:
        parity = made.computing.parity
        if not parity.learn(expected, actual):
            return
        if parity.broken:
            log.warning(
                "The worker %s had only %.0f %% of the prompt tokens cached that it was believed to hold, "
                "over about the last %d requests: it is chosen by its load alone until that changes.",
                made.computer.name,
                100 * parity.ratio,
                ACCURACY_REQUESTS,
            )
        else:
            log.info("The worker %s holds again what it is believed to hold.", made.computer.name)

    def _prefill_offer(
        self, known: WorkerState, tokens: int, held: dict[int, int], now: float, ahead: Mapping[int, float]
    ) -> PrefillOffer:
        cached = held.get(known.slot, 0)
        if cached:
            cached = min(int(cached * known.credence), tokens - 1)
        computing = known.computing
        compute_s = known.prefill_cost.seconds(tokens - cached, tokens)
        backlog_s = computing.backlog_s(now) if computing.waiting else 0.0
        if ahead:
            backlog_s += ahead.get(known.slot, 0.0)
        return pair_selection.prefill_offer(cached, backlog_s, computing.waiting, compute_s)

    def _decode_offer(
        self, known: WorkerState, tokens: int, held: dict[int, int], now: float, ahead: Mapping[int, float]
    ) -> DecodeOffer:
        cached = held.get(known.slot, 0)
        if cached:
            cached = min(int(cached * known.credence), tokens - 1)
        computing = known.computing
        compute_s = known.prefill_cost.seconds(tokens - cached, tokens)
        streams, room_s, slowdown_s = known.streams.count, 0.0, 0.0
        if streams:
            step_s, slower_s = known.step_cost.beside(streams, known.streams.tokens, tokens)
            if slower_s > step_s:
                slowdown_s = streams * (slower_s - step_s) * self._answer_tokens.value
            if known.total_blocks:
                room_s = self._room_s(known, tokens - cached, step_s)
        backlog_s = computing.backlog_s(now) if computing.waiting else 0.0
        if ahead:
            backlog_s += ahead.get(known.slot, 0.0)
        return pair_selection.decode_offer(
            cached, backlog_s, computing.waiting, compute_s, streams, room_s, slowdown_s
        )

    def _room_s(self, known: WorkerState, tokens: int, step_s: float) -> float:
        """Seconds until blocks for so many tokens come free, if one stream ends after the other."""
        missing = -(-tokens // known.block_size) - known.free_blocks
        if missing <= 0:
            return 0.0
        streams = known.streams.count
        each = known.streams.tokens / streams / known.block_size
        return missing / max(1.0, each) * step_s * self._answer_tokens.value / streams


def explain(made: Dispatch) -> dict[str, object]:
    """A dispatch as `GET /debug/decisions` shows it."""
    others = [way for way in made.others if way != made.way][:ALTERNATIVES_SHOWN]
    return {
        "number": made.number,
        "decode": made.pair.decode.name,
        "prefill": made.pair.prefill.name if made.pair.prefill else None,
        "prompt_bytes": made.prompt.bytes,
        "tokens": made.tokens,
        "cached": made.way.cached,
        "price_s": round(made.way.price_s, 6),
        "predicted_first_token_s": round(made.way.first_token_s, 6),
        "first_byte_s": None if made.first_byte is None else round(made.first_byte - made.decided, 6),
        "actual_tokens": made.report.tokens if made.report else None,
        "actual_cached": made.report.cached if made.report else None,
        "others": [
            _option_json(made.among.pair(PairOption._make(way)), PairOption._make(way)) for way in others
        ],
    }


def _option_json(pair: WorkerPair, way: PairOption) -> dict[str, object]:
    return {
        "decode": pair.decode.name,
        "prefill": pair.prefill.name if pair.prefill else None,
        "cached": way.cached,
        "price_s": round(way.price_s, 6),
    }
