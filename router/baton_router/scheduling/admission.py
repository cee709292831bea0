"""
Admission to the queue: by the predicted time to first token, and by the queue's capacity.

A request that would be answered too late only delays the others, so each class has a limit. Interactive
requests are rejected immediately with a time for the retry, critical ones wait longer, batch requests
without limit. A correction factor compares predictions with what came, because a worker computes several
short prompts at a time.

Capacity counts requests and bytes, which tenants share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from baton_api.capacity import SharedCapacity
from baton_api.errors import Overloaded
from baton_api.request_classes import CLASSES

MAX_FACTOR = 1.5
"""Maximum wait of an interactive request, in multiples of its objective. The `DeadlineFactor` begins here and
never exceeds it: a prediction may be wrong."""

MIN_FACTOR = 0.8
TIGHTEN = 0.05
RELAX = 0.0025
"""Change of the factor with each request that waited without success, and with each other one. About
one in twenty may wait without success."""

SMOOTHING = 0.05
MIN_CORRECTION = 0.05
MAX_CORRECTION = 4.0


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long a request may wait."""

    ttft_slo_s: float
    """To the first token; infinite without an objective."""
    max_wait_s: float
    """Seconds after which the request is rejected."""


def wait_limits(
    priority_class: str, ttft_slo_s: float | None, interactive_s: float, wait_s: float
) -> WaitLimits:
    """
    The limits of a request of the class `priority_class` with the objective `ttft_slo_s`, if it has one.

    `interactive_s` is the default objective of classes that have one, `wait_s` the maximum wait without
    objective.
    """
    if CLASSES[priority_class].background:
        return WaitLimits(math.inf, math.inf)
    if CLASSES[priority_class].rejects_late:
        objective = interactive_s if ttft_slo_s is None else ttft_slo_s
        return WaitLimits(objective, MAX_FACTOR * objective)
    if ttft_slo_s is None:
        return WaitLimits(math.inf, wait_s)
    return WaitLimits(ttft_slo_s, ttft_slo_s)


def too_late(
    priority_class: str, on: WaitLimits, predicted_s: float, blocks_free_s: float, deadline_factor: float
) -> bool:
    """
    Whether a request would be answered too late, so that it is better rejected at once.

    `deadline_factor`: maximum ratio of prediction to objective, where late requests are rejected.
    `blocks_free_s`: the part of the prediction that no reordering of the queue can shorten, the time until
    any decode worker has KV blocks.
    """
    if CLASSES[priority_class].rejects_late:
        return predicted_s > deadline_factor * on.ttft_slo_s
    return blocks_free_s > on.max_wait_s


class DeadlineFactor:
    """
    How far a predicted time may exceed the objective; lowered while admitted requests time out.

    During a lasting overload, a request admitted at 1.5 times its objective would be late. A request that is
    rejected at once can go elsewhere.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = MAX_FACTOR

    def waited(self, *, in_vain: bool) -> None:
        """Count an interactive request that left the queue; `in_vain` if it timed out."""
        self.value += -TIGHTEN if in_vain else RELAX
        self.value = min(MAX_FACTOR, max(MIN_FACTOR, self.value))


class WaitBias:
    """Ratio of actual to predicted waits; the prediction computes one prompt after the other."""

    __slots__ = ("ratio",)

    def __init__(self) -> None:
        self.ratio = 1.0

    def corrected(self, predicted_s: float) -> float:
        return self.ratio * predicted_s

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """A request left the queue after `actual_s`; `predicted_s` is uncorrected."""
        if predicted_s > 0:
            seen = min(MAX_CORRECTION, max(MIN_CORRECTION, actual_s / predicted_s))
            self.ratio += SMOOTHING * (seen - self.ratio)


class HasSize(Protocol):
    """A request that takes queue capacity."""

    @property
    def tenant(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes of memory."""
        ...


class QueueCapacity:
    """Limits of the queue, in requests and bytes."""

    def __init__(self, requests: int, size: int) -> None:
        """Capacity for `requests` of together `size` bytes."""
        self._requests = SharedCapacity(requests)
        self._bytes = SharedCapacity(size)

    def __len__(self) -> int:
        return self._requests.used

    def refuse(self, entry: HasSize) -> None:
        """Raise Overloaded if the tenant has no capacity left."""
        tenant = entry.tenant
        if not self._requests.fits(tenant, 1):
            raise Overloaded(self._requests.used_by(tenant), self._requests.allowed(tenant))
        if not self._bytes.fits(tenant, entry.size):
            raise Overloaded(self._bytes.used_by(tenant), self._bytes.allowed(tenant), what="bytes")

    def take(self, entry: HasSize) -> None:
        self._requests.add(entry.tenant, 1)
        self._bytes.add(entry.tenant, entry.size)

    def leave(self, entry: HasSize) -> None:
        self._requests.add(entry.tenant, -1)
        self._bytes.add(entry.tenant, -entry.size)
