"""
Whether a worker restores cached tokens from its tiers or computes them: what is sooner by prediction.

A worker's pool has the beginning of a prompt, and its tiers continue it for some way. For a prefill worker,
the pool of the decode worker is one more tier, which has the answers that it generated. Each tier ends at
some token, and up to each end the worker can restore and compute the rest. Restoring from a slow tier can
take longer than computing: then it is priced as computing. vLLM and SGLang restore whatever they find, so for
them that price is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton_router.workers.costs import PrefillCost, TransferCost

Reach = Sequence[tuple[str, int]]
"""For each tier of a worker, how many tokens the pool, this tier and those before it have in a row."""

Restored = tuple[tuple[str, int], ...]
"""Tokens from each tier, or `PEER`."""


class PromptPlan(NamedTuple):
    """How a worker gets the KV blocks of a prompt."""

    cached: int
    """Tokens that it need not compute: of the pool, and restored ones."""
    seconds: float
    """Of restoring and computing."""
    restored: Restored
    reachable: Restored
    """What it could restore, whether or not that is sooner."""


def soonest(
    cost: PrefillCost, restore: Mapping[str, TransferCost], hot: int, reach: Reach, tokens: int
) -> PromptPlan:
    """
    The quickest way to a prompt of `tokens`, of which the pool has `hot`.

    Of equal ones, that which restores least.
    """
    cached, best_s = hot, cost.seconds(tokens - hot, tokens)
    restored: Restored = ()
    best: Restored = ()
    reached, restore_s = hot, 0.0
    for tier, end in reach:
        end = min(end, tokens - 1)
        if end > reached:
            restored += ((tier, end - reached),)
            restore_s += restore[tier].seconds(end - reached, 0.0)
            reached = end
            seconds = restore_s + cost.seconds(tokens - reached, tokens)
            if seconds < best_s:
                cached, best_s, best = reached, seconds, restored
    return PromptPlan(cached, best_s, best, restored)
