"""
The pair that answers soonest without making the others wait too much for it.

For a prompt there are two ways: a prefill worker computes it and a decode worker takes over its blocks,
or the decode worker does all by itself. What each way takes is predicted from what the workers have
taught (`costs`), what they hold of the prompt (`prefix_index`) and what they are busy with (`bookings`).
No threshold says when a prompt is short: a short or a cached one is sooner done where it is generated,
and that falls out.

The price of a way is its seconds for this request, and what it costs those behind it: the busier a
worker, the more a second of it is worth. With little to do, the nearest cache wins; with much to do, the
work is spread. What is here is arithmetic over plain figures; whoever calls it knows the workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CLOSE_S = 0.010
"""Prices this close are equal: then the longest match wins, then the idler worker, then chance."""

LEAST_CONCERN = 0.5
MOST_CONCERN = 8.0
"""What a second of a worker costs those behind, per second: at the least, and at the most."""

DISTURBANCE = 0.3
"""How much of a prompt's time each stream loses that generates beside it."""

BEST_OF_EACH = 4
"""Prefill and decode workers that are looked at pair by pair; the others cost more by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOffer:
    """One worker that could compute the prompt."""

    worker: str
    group: str
    """Only workers of one group can be a pair."""
    cached: int
    """Tokens of the prompt that it is believed to hold."""
    backlog_s: float
    waiting: int
    """Prompts that it has still to compute."""
    compute_s: float
    """For what it does not hold."""

    @property
    def price_s(self) -> float:
        return self.backlog_s + (1 + concern(self.waiting)) * self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOffer:
    """One worker that could generate."""

    worker: str
    group: str
    cached: int
    streams: int
    """For which it generates already."""
    backlog_s: float
    """Of prompts that it computes itself."""
    waiting: int
    compute_s: float
    """If it computes itself what it does not hold."""
    room_s: float
    """Until it has KV blocks for the request."""
    slowdown_s: float
    """What the others lose, all together, by one stream more."""

    @property
    def price_s(self) -> float:
        """Whoever computes the prompt."""
        return self.room_s + self.slowdown_s

    @property
    def alone_s(self) -> float:
        """The price if it computes the prompt itself."""
        mine = self.backlog_s + (1 + concern(self.waiting)) * self.compute_s
        return self.price_s + mine + self.streams * DISTURBANCE * self.compute_s


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve the request."""

    decode: DecodeOffer
    prefill: PrefillOffer | None
    """None: the decode worker computes the prompt itself."""
    price_s: float
    first_token_s: float
    """Predicted, from now."""

    @property
    def cached(self) -> int:
        """Tokens of the prompt that nobody computes."""
        return self.decode.cached if self.prefill is None else self.prefill.cached

    @property
    def busy(self) -> int:
        """Requests ahead, to tell apart what costs the same."""
        return self.decode.streams + (self.prefill or self.decode).waiting


def concern(waiting: int) -> float:
    """What a second of a worker with so many prompts waiting costs those behind, per second."""
    return min(MOST_CONCERN, LEAST_CONCERN + waiting)


def ways(
    decodes: Sequence[DecodeOffer],
    prefills: Sequence[PrefillOffer],
    transfer_s: Callable[[str, str], float],
    alone_limit: int,
    context: int,
) -> list[Way]:
    """
    The ways worth comparing, the cheapest first.

    `transfer_s` is asked for some pairs of a prefill and a decode worker. A decode worker that would compute
    more than `alone_limit` of the `context` tokens beside its streams is asked to only if nobody else can.
    """
    found: list[Way] = []
    cheapest = sorted(decodes, key=lambda offer: offer.price_s)
    for group in {offer.group for offer in decodes} if prefills else ():
        sources = sorted((one for one in prefills if one.group == group), key=lambda one: one.price_s)
        targets = [one for one in cheapest if one.group == group]
        for source in sources[:BEST_OF_EACH]:
            for target in targets[:BEST_OF_EACH]:
                moving = transfer_s(source.worker, target.worker)
                first = source.backlog_s + source.compute_s + moving + target.room_s
                price = source.price_s + moving + target.price_s
                found.append(Way(target, source, price, first))
    served = {way.decode.group for way in found}
    for offer in decodes:
        if context - offer.cached <= alone_limit or offer.group not in served:
            first = offer.backlog_s + offer.compute_s + offer.room_s
            found.append(Way(offer, None, offer.alone_s, first))
    return sorted(found, key=lambda way: way.price_s)


def choose(found: Sequence[Way], rng: random.Random) -> Way:
    """The cheapest way; among those that cost about the same, the one with most cached, least busy."""
    close = [way for way in found if way.price_s <= found[0].price_s + CLOSE_S]
    best = max((way.cached, -way.busy) for way in close)
    return rng.choice([way for way in close if (way.cached, -way.busy) == best])
