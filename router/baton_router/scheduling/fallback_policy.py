"""
The fallback policy: power of two choices.

It draws two workers at random and takes the less busy one. That is nearly as even as comparing all of them,
and many routers that decide by metrics some seconds old do not all choose the same worker. A policy is one
function of this form; its candidates are able to serve.
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
    """The generating worker, and the one that computes the prompt; without `prefill`, `decode` does both."""

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
    excluded: Collection[str],
    now: float,
    rng: random.Random,
) -> WorkerPair | None:
    """
    Choose a decode worker that is not excluded and a matching prefill worker; None if all are excluded.

    Raises what `Workers.serving` raises. Without a fitting prefill worker the decode worker is
    chosen alone.
    """
    candidates = workers.serving(model, excluded, now)
    if not candidates:
        return None
    decode = policy(candidates, rng)
    prefills = workers.prefills(decode, now, model)
    return WorkerPair(decode, policy(prefills, rng) if prefills else None)
