"""
The pair that answers soonest without making the others wait too much for it.

For a prompt there are two ways: a prefill worker computes it and a decode worker takes over its blocks,
or the decode worker does all by itself. What each way takes is predicted from what the workers have
taught (`costs`), what they hold of the prompt (`prefix_index`) and what they are busy with (`bookings`).
No threshold says when a prompt is short: a short or a cached one is sooner done where it is generated,
and that falls out.

The price of a way is its seconds for this request, and what it costs those behind it: the busier a
worker, the more a second of it is worth. With little to do, the nearest cache wins; with much to do, the
work is spread. What is here is arithmetic over plain figures; whoever calls it knows the workers by their
numbers. It is done for every worker at every request, hence plain tuples.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton_router.workers.costs import NEVER

CLOSE_S = 0.010
"""Prices this close are equal: then the longest match wins, then the idler worker, then chance."""

MIN_CONGESTION = 2.0
MAX_CONGESTION = 8.0
"""What a second of a worker costs those behind, per second: at the least, and at the most."""

IDLE_WEIGHT = 1 + MIN_CONGESTION
"""What a second costs where nothing waits."""

DISTURBANCE = 0.3
"""How much of a prompt's time each stream loses that generates beside it."""

CANDIDATES_PER_GROUP = 4
"""Prefill and decode workers that are looked at pair by pair; the others cost more by themselves."""

LOCAL_PREFILL = -1
"""The prefill worker's number where the decode worker computes the prompt itself."""

PrefillOffer = tuple[float, float, int, int]
"""Price, seconds to the prompt's end, tokens cached, prompts waiting."""

DecodeOffer = tuple[float, float, float, float, int, int, int]
"""Price whoever computes the prompt, price and seconds to the first token if it does so itself, seconds
until it has room, tokens cached, streams, prompts waiting."""

PlainOption = tuple[float, float, int, int, int, int]
"""A `PairOption` before it is chosen."""


class PairOption(NamedTuple):
    """One way to serve the request."""

    price_s: float
    first_token_s: float
    """Predicted, from now."""
    cached: int
    """Tokens of the prompt that nobody computes."""
    busy: int
    """Requests ahead, to tell apart what costs the same."""
    decode: int
    prefill: int


class WorkerGroup(NamedTuple):
    """Workers of which any two can be a pair."""

    decodes: Sequence[int]
    prefills: Sequence[int]


def prefill_offer(cached: int, backlog_s: float, waiting: int, compute_s: float) -> PrefillOffer:
    """
    A worker that could compute the prompt, of which it holds `cached` tokens, in `compute_s`.

    Before that it has to compute `waiting` prompts, for `backlog_s`.
    """
    price = (
        backlog_s + (1 + congestion(waiting)) * compute_s if waiting else backlog_s + IDLE_WEIGHT * compute_s
    )
    return price, backlog_s + compute_s, cached, waiting


def decode_offer(
    cached: int,
    backlog_s: float,
    waiting: int,
    compute_s: float,
    streams: int,
    room_s: float,
    slowdown_s: float,
) -> DecodeOffer:
    """
    A worker that could generate beside `streams` others, and compute the prompt as in `prefill_offer`.

    `room_s` passes until it has KV blocks for the request; the others lose `slowdown_s`, all together, by one
    stream more.
    """
    price = room_s + slowdown_s
    first = backlog_s + compute_s + room_s
    if not streams and not waiting:
        return price, price + backlog_s + IDLE_WEIGHT * compute_s, first, room_s, cached, 0, 0
    alone = price + backlog_s + (1 + congestion(waiting) + streams * DISTURBANCE) * compute_s
    return price, alone, first, room_s, cached, streams, waiting


def congestion(waiting: int) -> float:
    """What a second of a worker with so many prompts waiting costs those behind, per second."""
    weight = MIN_CONGESTION + waiting
    return weight if weight < MAX_CONGESTION else MAX_CONGESTION


def pair_options(
    decodes: Sequence[DecodeOffer],
    prefills: Sequence[PrefillOffer],
    groups: Sequence[WorkerGroup],
    transfer_s: Callable[[int, int], float],
    local_prefill_limit: int,
    context: int,
) -> list[PlainOption]:
    """
    The ways worth comparing, the cheapest first; at least one, if there are decode workers.

    Workers are numbered by their places in `decodes` and `prefills`. `transfer_s` is asked for some pairs of
    a prefill and a decode worker. A decode worker that would compute more than `local_prefill_limit` of the
    `context` tokens beside its streams is asked to only if nobody else can.
    """
    options: list[PlainOption] = []
    paired: set[int] = set()
    for group in groups:
        if group.prefills:
            count = len(options)
            targets = _cheapest(group.decodes, decodes)
            for source in _cheapest(group.prefills, prefills):
                price, computed, cached, waiting = prefills[source]
                for target in targets:
                    generating, _, _, room, _, streams, _ = decodes[target]
                    moving = transfer_s(source, target)
                    if moving == NEVER:
                        continue
                    first = computed + moving + room
                    way = (price + moving + generating, first, cached, streams + waiting, target, source)
                    options.append(way)
            if len(options) > count:
                paired.update(group.decodes)
    for target, (_, price, first, _, cached, streams, waiting) in enumerate(decodes):
        if context - cached <= local_prefill_limit or target not in paired:
            options.append((price, first, cached, streams + waiting, target, LOCAL_PREFILL))
    options.sort()
    return options


def choose_option(options: Sequence[PlainOption], rng: random.Random) -> PairOption:
    """The cheapest way; among those that cost about the same, the one with most cached, least busy."""
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
