"""
The fallback policy: power of two choices.

Of two workers drawn at random, the less busy one. That is nearly as even as asking all, and many
routers that decide on figures some seconds old do not all run to the same worker. A policy is one
function of this form; what it chooses among was already found able to serve.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton_router.workers.worker import Worker, Workers


class HasPressure(Protocol):
    """Something to choose by how busy it is."""

    @property
    def pressure(self) -> tuple[int, int]: ...


Candidate = TypeVar("Candidate", bound=HasPressure)
FallbackPolicy = Callable[[Sequence[Worker], random.Random], Worker]
"""Chooses one of at least one candidate, at random only by the source passed in."""


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """Who generates, and who computes the prompt; without a prefill worker `decode` does both."""

    decode: Worker
    prefill: Worker | None


def choose_worker(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The less busy of two candidates drawn at random; the first drawn if they are equally busy."""
    if len(candidates) == 1:
        return candidates[0]
    first, second = rng.sample(candidates, 2)
    return second if second.pressure < first.pressure else first


def choose_pair(
    policy: FallbackPolicy,
    workers: Workers,
    model: str | None,
    tried: Collection[str],
    now: float,
    rng: random.Random,
) -> WorkerPair | None:
    """
    A decode worker that was not tried yet and a prefill worker that fits it; None if all were tried.

    Raises what `Workers.serving` raises. Without a fitting prefill worker the decode worker is
    chosen alone.
    """
    candidates = workers.serving(model, tried, now)
    if not candidates:
        return None
    decode = policy(candidates, rng)
    prefills = workers.prefills(decode, now)
    return WorkerPair(decode, policy(prefills, rng) if prefills else None)
