"""
Selection of the pair of workers that answers soonest without delaying other requests too much.

A prompt is computed by a prefill worker, whose blocks a decode worker takes over, or by the decode worker
itself (local prefill). The time of each option is predicted from learned costs (`costs`), cached prefixes
(`prefix_index`) and booked work (`worker`). No threshold defines a short prompt: a short or cached prompt
is faster where it is generated, and the prediction shows it.

By default the price of an option is its seconds for this request, plus the delay that it causes for later
requests: a second of a busy worker costs more. With little load the nearest cache wins; with much load the
work spreads. Other policies (`policies`) count something else.
This module is arithmetic over plain numbers. It runs for every worker at every request, so it uses tuples.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from baton_router.workers.costs import NEVER

CLOSE_S = 0.010
"""Prices this close are equal. Then the longest match wins, then the less busy worker, then chance."""

MIN_CONGESTION = 2.0
MAX_CONGESTION = 32.0
"""Price of a worker's second for later requests, per second: minimum and maximum."""

QUEUED_WEIGHT = 0.5
"""Growth of that price with each second that the workers need for the router's queue. In an overload,
computing a cached prefix again delays every later request; a queue of short prompts is soon empty."""

IDLE_WEIGHT = 1 + MIN_CONGESTION
"""Price of a second where nothing waits."""

DISTURBANCE = 0.3
"""Share of a prompt's time that each stream on the same worker loses."""

CANDIDATES_PER_GROUP = 4
"""Prefill and decode workers that are compared pair by pair; the others cost more by themselves."""

LOCAL_PREFILL = -1
"""Number of the prefill worker where the decode worker computes the prompt."""

PromptWork = tuple[int, float, int, float, float]
"""The prompt at a worker that would compute it: cached tokens; seconds and number of the prompts before it;
its own seconds; seconds per worker of the router's queue."""

PrefillOffer = tuple[float, float, int, int]
"""Price, seconds to the end of the prompt, cached tokens, queued prompts."""

DecodeOffer = tuple[float, float, float, float, int, int, int]
"""Price with a prefill worker; price and seconds to first token with local prefill; seconds until blocks are
free; cached tokens; streams; queued prompts."""

NO_PEERS: Mapping[int, Callable[[int], PrefillOffer]] = {}

PlainOption = tuple[float, float, int, int, int, int]
"""A `PairOption` before it is chosen."""


class PairOption(NamedTuple):
    """One way to serve the request."""

    price: float
    """In the policy's unit."""
    first_token_s: float
    """Predicted seconds to the first token."""
    cached: int
    """Cached tokens of the prompt."""
    busy: int
    """Requests ahead, as a tiebreaker."""
    decode: int
    prefill: int


class WorkerGroup(NamedTuple):
    """Workers of which any two can be a pair."""

    decodes: Sequence[int]
    prefills: Sequence[int]


def prefill_offer(work: PromptWork) -> PrefillOffer:
    """The offer of a worker that would compute the prompt."""
    cached, backlog_s, waiting, compute_s, queued_s = work
    if waiting or queued_s:
        price = backlog_s + (1 + congestion(waiting, queued_s)) * compute_s
    else:
        price = backlog_s + IDLE_WEIGHT * compute_s
    return price, backlog_s + compute_s, cached, waiting


def decode_offer(work: PromptWork, streams: int, blocks_free_s: float, slowdown_s: float) -> DecodeOffer:
    """
    The offer of a worker that would generate beside `streams` others; `work`: its local prefill.

    KV blocks are free in `blocks_free_s`. One more stream slows the others down by `slowdown_s` in total.
    """
    cached, backlog_s, waiting, compute_s, queued_s = work
    price = blocks_free_s + slowdown_s
    first = backlog_s + compute_s + blocks_free_s
    if not streams and not waiting and not queued_s:
        return price, price + backlog_s + IDLE_WEIGHT * compute_s, first, blocks_free_s, cached, 0, 0
    local_price = price + backlog_s + (1 + congestion(waiting, queued_s) + streams * DISTURBANCE) * compute_s
    return price, local_price, first, blocks_free_s, cached, streams, waiting


def congestion(waiting: int, queued_s: float = 0.0) -> float:
    """
    The price of a worker's second for later requests.

    `waiting`: prompts at the worker; `queued_s`: seconds per worker of the router's queue.
    """
    weight = MIN_CONGESTION + waiting + QUEUED_WEIGHT * queued_s
    return weight if weight < MAX_CONGESTION else MAX_CONGESTION


def pair_options(
    decodes: Sequence[DecodeOffer],
    prefills: Sequence[PrefillOffer],
    groups: Sequence[WorkerGroup],
    transfer_s: Callable[[int, int], float],
    local_prefill_limit: int,
    context: int,
    pair_only: Collection[int] = (),
    transfer_weight: float = 1.0,
    peers: Mapping[int, Callable[[int], PrefillOffer]] = NO_PEERS,
) -> list[PlainOption]:
    """
    The options worth comparing, the cheapest first; at least one if there are decode workers.

    Workers are numbered by their index in `decodes` and `prefills`. `transfer_s` is called for some pairs of
    a prefill and a decode worker; each second costs `transfer_weight`. Local prefill of more than
    `local_prefill_limit` tokens is an option only without a pair, and never for the decode workers in
    `pair_only`. `peers` are decode workers of which prefill workers can read a part of the prompt, with the
    offer of a prefill worker that does.
    """
    options: list[PlainOption] = []
    paired: set[int] = set()
    for group in groups:
        if group.prefills:
            count = len(options)
            targets = _cheapest(group.decodes, decodes)
            if peers:
                targets = [*targets, *(one for one in peers if one in group.decodes and one not in targets)]
            for source in _cheapest(group.prefills, prefills):
                alone = prefills[source]
                for target in targets:
                    price, computed, cached, waiting = peers[target](source) if target in peers else alone
                    generating, _, _, blocks_free, _, streams, _ = decodes[target]
                    moving = transfer_s(source, target)
                    if moving == NEVER:
                        continue
                    first = computed + moving + blocks_free
                    pair_price = price + transfer_weight * moving + generating
                    options.append((pair_price, first, cached, streams + waiting, target, source))
            if len(options) > count:
                paired.update(group.decodes)
    for target, (_, price, first, _, cached, streams, waiting) in enumerate(decodes):
        if target in pair_only:
            continue
        if context - cached <= local_prefill_limit or target not in paired:
            options.append((price, first, cached, streams + waiting, target, LOCAL_PREFILL))
    options.sort()
    return options


def choose_option(options: Sequence[PlainOption], rng: random.Random) -> PairOption:
    """The cheapest option; of those about as cheap, the one with most cached tokens, then the least busy."""
    limit = options[0][0] + CLOSE_S
    tied = [options[0]]
    _, _, most, least, _, _ = options[0]
    for way in options[1:]:
        price, _, cached, busy, _, _ = way
        if price > limit:
            break
        if cached > most or (cached == most and busy < least):
            tied, most, least = [way], cached, busy
        elif cached == most and busy == least:
            tied.append(way)
    return PairOption._make(tied[0] if len(tied) == 1 else rng.choice(tied))


def _cheapest(
    numbers: Sequence[int], offers: Sequence[PrefillOffer] | Sequence[DecodeOffer]
) -> Sequence[int]:
    if len(numbers) <= CANDIDATES_PER_GROUP:
        return numbers
    return heapq.nsmallest(CANDIDATES_PER_GROUP, numbers, key=lambda number: offers[number][0])
