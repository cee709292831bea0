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
from collections.abc import Collection
from dataclasses import dataclass

from baton_api.reports import PromptReport
from baton_router import choice
from baton_router.bookings import Booking
from baton_router.choice import DecodeOffer, PrefillOffer, Way
from baton_router.costs import Average
from baton_router.knowledge import Knowledge, Known
from baton_router.parity import REQUESTS
from baton_router.policy import Pair
from baton_router.prompt_chunks import Prompt
from baton_router.workers import Worker, Workers

log = logging.getLogger(__name__)

DISPATCHES_LIMIT = 1_000
EXPECTED_ANSWER_TOKENS = 200.0
"""Before the first answer has ended."""

OTHERS_SHOWN = 3


@dataclass(slots=True, eq=False)
class Dispatch:
    """Where one request was sent, why there, and what came of it. Times are of the router's clock."""

    number: int
    pair: Pair
    way: Way
    others: tuple[Way, ...]
    """The next best ways, the cheapest first."""
    prompt: Prompt
    tokens: int
    """Of the prompt, estimated."""
    expected: int
    """How many of them whoever computes it is believed to hold, whether or not one counts on it."""
    decided: float
    first_byte: float | None = None
    ended: float | None = None
    hoped: tuple[tuple[Worker, list[int]], ...] = ()
    """The chunks of the prompt that a worker is believed to hold since it was sent there."""
    report: PromptReport | None = None

    @property
    def computer(self) -> Worker:
        """Who was to compute the prompt."""
        return self.pair.prefill or self.pair.decode

    @property
    def uncached(self) -> int:
        """Tokens to compute, as far as was known."""
        return max(1, self.tokens - self.way.cached)

    @property
    def summary(self) -> str:
        """For a header of the answer."""
        return (
            f"number={self.number};computed_by={self.computer.name};tokens={self.tokens};"
            f"cached={self.way.cached};first_token_s={self.way.first_token_s:.6f}"
        )


class Dispatcher:
    """Belongs to one thread, and never waits."""

    def __init__(self, workers: Workers, rng: random.Random, alone_limit: int) -> None:
        """`alone_limit`: tokens that a decode worker computes beside its streams, at most."""
        self._workers = workers
        self._rng = rng
        self._alone_limit = alone_limit
        self._numbers = itertools.count(1)
        self._answer_tokens = Average(EXPECTED_ANSWER_TOKENS)
        self.knowledge = Knowledge()
        self.dispatches: deque[Dispatch] = deque(maxlen=DISPATCHES_LIMIT)
        """The last ones, the newest at the end."""

    def dispatch(
        self, model: str | None, prompt: Prompt, tried: Collection[str], now: float
    ) -> Dispatch | None:
        """
        Choose among the workers that are not in `tried`, by name, and book the request; None if none is left.

        Raises what `Workers.serving` raises.
        """
        decodes = self._workers.serving(model, tried, now)
        if not decodes:
            return None
        prefills = [one for one in self._workers.prefill if one.name not in tried and one.ready(now)]
        # Before what is held is asked for: a worker that began anew holds nothing.
        generating = [(worker, self._known(worker)) for worker in decodes]
        computing = [(worker, self._known(worker)) for worker in prefills]
        name = decodes[0].model
        tokens = self.knowledge.tokens(prompt, name)
        ratio = self.knowledge.bytes_per_token(name).value
        held = {slot: int(size / ratio) for slot, size in self.knowledge.held(prompt).items()}
        found = choice.ways(
            [self._decode_offer(worker, known, tokens, held, now) for worker, known in generating],
            [self._prefill_offer(worker, known, tokens, held, now) for worker, known in computing],
            lambda source, target: self.knowledge.transfer(source, target).seconds(tokens),
            self._alone_limit,
            tokens,
        )
        way = choice.choose(found, self._rng)
        named = {worker.name: worker for worker in (*decodes, *prefills)}
        pair = Pair(named[way.decode.worker], named[way.prefill.worker] if way.prefill else None)
        others = tuple(one for one in found[: OTHERS_SHOWN + 1] if one is not way)[:OTHERS_SHOWN]
        computer = self._known(pair.prefill or pair.decode)
        expected = min(held.get(computer.slot, 0), tokens - 1)
        made = Dispatch(next(self._numbers), pair, way, others, prompt, tokens, expected, now)
        self._book(made, now)
        self.dispatches.append(made)
        return made

    def began(self, made: Dispatch, report: PromptReport | None, now: float) -> None:
        """The first byte of the answer is there, and with it what the worker says of the prompt."""
        if made.first_byte is not None:
            return
        made.first_byte, made.report = now, report
        self._known(made.computer).computing.release(made.number, now)
        if report is not None:
            self.knowledge.computed(made.prompt, report, made.hoped)
            self._learn(made, report)

    def let_go(self, made: Dispatch, now: float, *, complete: bool) -> None:
        """The request has ended, one way or another; `complete` if its answer is whole."""
        if made.ended is not None:
            return
        made.ended = now
        self._known(made.computer).computing.release(made.number, now)
        self._known(made.pair.decode).streams.release(made.number)
        if made.first_byte is None:
            for worker, chunks in made.hoped:
                self.knowledge.lost(chunks, worker)
        elif complete:
            self.knowledge.answered(made.prompt, made.pair.decode)

    def _known(self, worker: Worker) -> Known:
        return self.knowledge.of(worker)

    def _book(self, made: Dispatch, now: float) -> None:
        computer, decode = self._known(made.computer), self._known(made.pair.decode)
        offer = made.way.prefill or made.way.decode
        computer.computing.book(made.number, Booking(offer.compute_s, made.uncached), now)
        decode.streams.book(made.number, made.tokens)
        there = {made.computer, made.pair.decode}
        made.hoped = tuple((worker, self.knowledge.sent(made.prompt, worker)) for worker in there)

    def _learn(self, made: Dispatch, report: PromptReport) -> None:
        model = made.pair.decode.model
        if made.prompt.bytes:
            self.knowledge.bytes_per_token(model).learn(made.prompt.bytes / report.tokens)
        computed = max(1, report.tokens - report.cached)
        computer = made.pair.prefill if report.remote else made.pair.decode
        if computer is None:
            return
        known = self._known(computer)
        known.prefill_cost.learn(computed, report.tokens, report.compute_s)
        if computer is made.computer:
            self._compare(computer, made.expected * report.tokens / made.tokens, report.cached)
        if report.remote:
            moved = report.tokens - report.held
            self.knowledge.transfer(computer.name, made.pair.decode.name).learn(moved, report.transfer_s)

    def _compare(self, worker: Worker, expected: float, actual: int) -> None:
        parity = self._known(worker).parity
        if not parity.learn(expected, actual):
            return
        if parity.broken:
            log.warning(
                "The worker %s had only %.0f %% of the prompt tokens cached that it was believed to hold, "
                "over about the last %d requests: it is chosen by its load alone until that changes.",
                worker.name,
                100 * parity.ratio,
                REQUESTS,
            )
        else:
            log.info("The worker %s holds again what it is believed to hold.", worker.name)

    def _prefill_offer(
        self, worker: Worker, known: Known, tokens: int, held: dict[int, int], now: float
    ) -> PrefillOffer:
        cached = min(int(held.get(known.slot, 0) * known.credence), tokens - 1)
        return PrefillOffer(
            worker=worker.name,
            group=worker.compatibility,
            cached=cached,
            backlog_s=known.computing.backlog_s(now),
            waiting=len(known.computing),
            compute_s=known.prefill_cost.seconds(tokens - cached, tokens),
        )

    def _decode_offer(
        self, worker: Worker, known: Known, tokens: int, held: dict[int, int], now: float
    ) -> DecodeOffer:
        cached = min(int(held.get(known.slot, 0) * known.credence), tokens - 1)
        streams, context = len(known.streams), known.streams.tokens
        slower = 0.0
        if streams:
            step = known.step_cost
            slower = step.seconds(streams + 1, context + tokens) - step.seconds(streams, context)
        return DecodeOffer(
            worker=worker.name,
            group=worker.compatibility,
            cached=cached,
            streams=streams,
            backlog_s=known.computing.backlog_s(now),
            waiting=len(known.computing),
            compute_s=known.prefill_cost.seconds(tokens - cached, tokens),
            room_s=self._room_s(worker, known, tokens - cached),
            slowdown_s=streams * max(0.0, slower) * self._answer_tokens.value,
        )

    def _room_s(self, worker: Worker, known: Known, tokens: int) -> float:
        """Seconds until blocks for so many tokens come free, if one stream ends after the other."""
        load = worker.health.load
        if load is None or not load.total_blocks:
            return 0.0
        missing = -(-tokens // load.block_size) - load.free_blocks
        if missing <= 0 or not len(known.streams):
            return 0.0
        step = known.step_cost.seconds(len(known.streams), known.streams.tokens)
        each = known.streams.tokens / len(known.streams) / load.block_size
        return missing / max(1.0, each) * step * self._answer_tokens.value / len(known.streams)


def explained(made: Dispatch) -> dict[str, object]:
    """A dispatch as `GET /debug/decisions` shows it."""
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
        "others": [_way(way) for way in made.others],
    }


def _way(way: Way) -> dict[str, object]:
    return {
        "decode": way.decode.worker,
        "prefill": way.prefill.worker if way.prefill else None,
        "cached": way.cached,
        "price_s": round(way.price_s, 6),
    }
