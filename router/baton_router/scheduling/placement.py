"""
The record of one request: which pair of workers was chosen for it, why, and what came of it.

The planner makes it, the dashboard and `GET /debug/decisions` show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.metrics.counters import LabeledCounter, LabeledHistogram
from baton_api.prompt_report import PromptReport
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.candidates import Candidates, WorkerPair
from baton_router.scheduling.pair_selection import (
    PairOption,
    PlainOption,
)
from baton_router.scheduling.quotas import QuotaReservation
from baton_router.scheduling.restoring import Restored
from baton_router.workers.worker import Worker
from baton_router.workers.worker_state import WorkerState

ALTERNATIVES_SHOWN = 3


class Placement(msgspec.Struct, eq=False):
    """Where one request was sent, why there, and what came of it. Times are of the router's clock."""

    number: int
    pair: WorkerPair
    option: PairOption
    candidates: Candidates
    options: list[PlainOption]
    """The cheapest options."""
    request: PickRequest
    """What was asked for; without its prompt's chunks once it has ended."""
    tokens: int
    """Of the prompt, estimated; of several of the first one."""
    expected_cached: int
    """How many of them the computing worker is assumed to hold, whether or not the price used that."""
    hot: int
    """How many of them its pool is assumed to hold."""
    decided: float
    prefill_state: WorkerState
    """State of the worker that computes the prompt."""
    decode_state: WorkerState
    compute_s: float
    """Predicted seconds to compute all prompts there."""
    matched: list[tuple[WorkerState, int]]
    """How many of its chunks those two held when it was planned."""
    restored: Restored
    """What the computing worker is expected to restore; `option.cached` includes it."""
    reachable: Restored
    """What it could restore beyond its pool, whether or not the price used that."""
    weights: Mapping[str, float]
    """Weights of the eligible revisions, if there were several."""
    price_unit: str = "s"
    """Unit of the options' prices."""
    others: int = 0
    """Tokens of the prompts but the first one, estimated."""
    others_s: float = 0.0
    """Their part of `compute_s`."""
    assumed_chunks: list[tuple[WorkerState, list[int]]] = []
    """Chunks that the workers are assumed to hold because the prompt was sent there, and were not before."""
    first_byte: float | None = None
    ended: float | None = None
    report: PromptReport | None = None
    computed_s: float = 0.0
    """Seconds that the prompt took, if the part of restoring in them is not known yet."""
    arrived: float = 0.0
    """When the request came to the router."""
    reservation: QuotaReservation | None = None
    """Of the tenant's limits, until it is settled."""
    complete: bool = False
    """Whether all of the answer was passed on."""
    answered: int | None = None
    """Tokens of the answer, if they were counted."""

    def drop_prompt(self) -> None:
        """Drop what only a running request needs: the chunks of a long prompt take more memory than all
        else.
        """
        size = PromptChunks((), self.request.prompt.sizes[-1:])
        self.request = msgspec.structs.replace(self.request, prompt=size)
        self.assumed_chunks, self.matched = [], []

    @property
    def computing_worker(self) -> Worker:
        """The worker that computes the prompt."""
        return self.pair.prefill or self.pair.decode

    @property
    def uncached(self) -> int:
        """Tokens of the first prompt to compute, as far as it is known."""
        return max(1, self.tokens - self.option.cached)

    @property
    def costs(self) -> str:
        """The cheapest options and their prices: `decode` alone, or `prefill>decode`."""
        shown = []
        for option in map(PairOption._make, self.options[:ALTERNATIVES_SHOWN]):
            pair = self.candidates.pair(option)
            name = f"{pair.prefill.name}>{pair.decode.name}" if pair.prefill else pair.decode.name
            shown.append(f"{name}={option.price:.6f} {self.price_unit}")
        return ";".join(shown)

    @property
    def summary(self) -> str:
        """For a header of the answer."""
        return (
            f"number={self.number};computed_by={self.computing_worker.name};tokens={self.tokens};"
            f"cached={self.option.cached};first_token_s={self.option.first_token_s:.6f}"
        )


def explain(placement: Placement) -> dict[str, object]:
    """A placement as `GET /debug/decisions` shows it."""
    options = [option for option in placement.options if option != placement.option][:ALTERNATIVES_SHOWN]
    return {
        "number": placement.number,
        "decode": placement.pair.decode.name,
        "prefill": placement.pair.prefill.name if placement.pair.prefill else None,
        "prompt_bytes": placement.request.prompt.bytes,
        "tokens": placement.tokens,
        "cached": placement.option.cached,
        "restored": dict(placement.restored),
        "reachable": dict(placement.reachable),
        "price": round(placement.option.price, 6),
        "price_unit": placement.price_unit,
        "predicted_first_token_s": round(placement.option.first_token_s, 6),
        "first_byte_s": None
        if placement.first_byte is None
        else round(placement.first_byte - placement.decided, 6),
        "actual_tokens": placement.report.tokens if placement.report else None,
        "actual_cached": placement.report.cached if placement.report else None,
        "others": [
            _option_json(placement.candidates.pair(PairOption._make(option)), PairOption._make(option))
            for option in options
        ],
    }


def _option_json(pair: WorkerPair, option: PairOption) -> dict[str, object]:
    return {
        "decode": pair.decode.name,
        "prefill": pair.prefill.name if pair.prefill else None,
        "cached": option.cached,
        "price": round(option.price, 6),
    }


class DecisionCounters(Collector):
    """Metrics of decisions, counted as they are made and as answers begin."""

    def __init__(self) -> None:
        self._decisions = LabeledCounter(metrics.ROUTER_DECISIONS)
        self._tokens = LabeledCounter(metrics.ROUTER_PREFIX_TOKENS)
        self._restored = LabeledCounter(metrics.ROUTER_RESTORED_TOKENS)
        self._transfer = LabeledHistogram(metrics.ROUTER_TRANSFER)

    def decided(self, *, remote: bool, prefills: bool) -> None:
        """`prefills`: whether a prefill worker could have been chosen."""
        if remote:
            self._decisions.add("remote", "cheaper")
        else:
            self._decisions.add("local", "cheaper" if prefills else "no_prefill")

    def computed(self, placement: Placement, report: PromptReport) -> None:
        """Count a computed prompt."""
        self.cached(placement, report)
        if report.remote:
            self._transfer.observe(report.transfer_s)
        elif report.fallback:
            self._decisions.add("fallback", report.fallback)

    def cached(self, placement: Placement, report: PromptReport) -> None:
        """Count the prompt's tokens, if the cached ones are known."""
        if report.cached is not None:
            self._tokens.more(placement.expected_cached, "expected")
            for tier, tokens in placement.restored:
                self._restored.more(tokens, tier)
            self._tokens.more(report.cached, "cached")
            self._tokens.more(report.tokens, "prompt")

    def collect(self) -> Iterator[Family]:
        for one in (self._decisions, self._tokens, self._restored, self._transfer):
            yield from one.collect()
