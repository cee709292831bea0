"""
Routing policies: what a worker's offer for a request costs. The cheapest option wins (`pair_selection`).

A policy is one class. `--policy` takes the name under which `POLICIES` has it; `RouterSettings.policy` lists
the same names.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from baton_router.scheduling import pair_selection
from baton_router.scheduling.pair_selection import DecodeOffer, PrefillOffer, PromptWork


class RoutingPolicy(Protocol):
    """
    Prices the offers of workers. Belongs to one thread, and never waits.

    Prices are sums: of the offers of both workers of a pair, and of their transfer. Options whose prices
    differ by less than `pair_selection.CLOSE_S` are equal; then the longest cached prefix wins.
    """

    name: ClassVar[str]
    price_unit: ClassVar[str]
    """What prices count: seconds ("s"), or a noun in the plural."""
    transfer_weight: ClassVar[float]
    """Price of one predicted second of a transfer."""

    def prefill_offer(self, work: PromptWork) -> PrefillOffer:
        """The offer of a prefill worker: see `pair_selection.prefill_offer`."""
        ...

    def decode_offer(
        self, work: PromptWork, streams: int, blocks_free_s: float, slowdown_s: float
    ) -> DecodeOffer:
        """The offer of a decode worker with a prefill worker and without: `pair_selection.decode_offer`."""
        ...


class PredictedTime:
    """The lowest predicted time to first token, with the delay of other requests."""

    name: ClassVar[str] = "predicted-time"
    price_unit: ClassVar[str] = "s"
    transfer_weight: ClassVar[float] = 1.0
    prefill_offer = staticmethod(pair_selection.prefill_offer)
    decode_offer = staticmethod(pair_selection.decode_offer)


class LeastRequests:
    """
    The fewest requests at the worker, or at both of a pair.

    Neither predictions nor, but for equal workers, caches matter.
    """

    name: ClassVar[str] = "least-requests"
    price_unit: ClassVar[str] = "requests"
    transfer_weight: ClassVar[float] = 0.0

    def prefill_offer(self, work: PromptWork) -> PrefillOffer:
        cached, backlog_s, waiting, compute_s, _ = work
        return float(waiting), backlog_s + compute_s, cached, waiting

    def decode_offer(
        self, work: PromptWork, streams: int, blocks_free_s: float, slowdown_s: float
    ) -> DecodeOffer:
        cached, backlog_s, waiting, compute_s, _ = work
        first_token_s = backlog_s + compute_s + blocks_free_s
        prices = float(streams), float(streams + waiting)  # with a prefill worker, and without
        return *prices, first_token_s, blocks_free_s, cached, streams, waiting


POLICIES: dict[str, type[RoutingPolicy]] = {policy.name: policy for policy in (PredictedTime, LeastRequests)}
