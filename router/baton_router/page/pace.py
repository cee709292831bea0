"""How fast the service is now, of its last requests: tokens a second, first tokens, what caches saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from baton_router.dispatcher import Dispatch

WINDOW_S = 60.0
"""Requests that began to be answered longer ago do not count."""

TOKENS_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Of the last minute; None where nothing was seen of it."""

    requests: int
    """That were given to workers."""
    first_token_s: float | None
    """Median, of streams, from their arrival."""
    tokens_s: float
    """Of answers, over the last ten seconds. Answers that run count as their worker's step says."""
    prompt_tokens: int
    cached_tokens: int
    """Of those, how many were in a cache."""


def pace(dispatches: Iterable[Dispatch], now: float) -> Pace:
    """`dispatches` in any order; those that are too old do not count."""
    requests = prompt = cached = 0
    firsts: list[float] = []
    tokens = 0.0
    for made in dispatches:
        if made.ended is not None and made.ended < now - WINDOW_S and made.decided < now - WINDOW_S:
            continue
        requests += made.decided >= now - WINDOW_S
        tokens += _tokens(made, now)
        if made.first_byte is None or made.first_byte < now - WINDOW_S:
            continue
        if made.streams:
            firsts.append(made.first_byte - made.arrived)
        if made.report is not None:
            prompt += made.report.tokens
            cached += made.report.cached
    return Pace(requests, median(firsts) if firsts else None, tokens / TOKENS_WINDOW_S, prompt, cached)


def _tokens(made: Dispatch, now: float) -> float:
    """How many tokens of the answer came in the window."""
    if made.first_byte is None or not made.streams:
        return 0.0
    since = now - TOKENS_WINDOW_S
    end = now if made.ended is None else made.ended
    inside = end - max(since, made.first_byte)
    if inside < 0 or end < since:
        return 0.0
    if made.ended is None:
        load = made.pair.decode.health.load
        return inside / load.step_s if load is not None and load.step_s else 0.0
    whole = made.ended - made.first_byte
    return (made.answered or 0) * (inside / whole if whole > 0 else 1.0)
