"""
Admission to the queue: by the predicted time to first token, and by the queue's capacity.

A request that would be answered too late only delays the others, so each class has a limit: interactive
requests are rejected at once with a time for the retry, critical ones wait longer, batch requests
without limit. A correction factor compares predictions with what came, because a worker computes several
short prompts at a time.

Capacity counts requests and bytes. One tenant may fill a share of what it and absent tenants
have together, so that a tenant that comes after a flood still finds room.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from baton_api.errors import Overloaded

TOLERANCE = 1.5
"""An interactive request waits for so many times its objective at most, and is let in if it is predicted to
take no longer than that: a prediction may be wrong."""

MIN_TOLERANCE = 0.8
TIGHTEN = 0.05
RELAX = 0.0025
"""What one more that waited in vain, and one that did not, change of it: a twentieth may wait in vain."""

SMOOTHING = 0.05
MIN_CORRECTION = 0.05
MAX_CORRECTION = 4.0


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """On which a request waits."""

    objective_s: float
    """To the first token; infinite if it has none."""
    max_wait_s: float
    """After which it gives up."""


def wait_limits(kind: str, wanted_s: float | None, interactive_s: float, wait_s: float) -> WaitLimits:
    """
    Of a request of the class `kind` that says it wants its first token in `wanted_s`, if it says so.

    `interactive_s` is the objective of interactive requests that do not say, `wait_s` the patience of those
    that have no objective.
    """
    if kind == "batch":
        return WaitLimits(math.inf, math.inf)
    if kind == "interactive":
        objective = interactive_s if wanted_s is None else wanted_s
        return WaitLimits(objective, TOLERANCE * objective)
    if wanted_s is None:
        return WaitLimits(math.inf, wait_s)
    return WaitLimits(wanted_s, wanted_s)


def too_late(kind: str, on: WaitLimits, predicted_s: float, room_s: float, tolerance: float) -> bool:
    """
    Whether a request is better refused at once than after waiting.

    `tolerance`: how many times its objective an interactive one may be predicted to take.

    `room_s` is the part of the prediction that no other order of those who wait would shorten: the time
    until any decode worker has KV blocks for it.
    """
    if kind == "interactive":
        return predicted_s > tolerance * on.objective_s
    return room_s > on.max_wait_s


class PredictionTolerance:
    """
    How wrong predictions are taken to be: less and less, while those who were let in wait in vain.

    Under an overload that lasts, who is let in at one and a half times its objective will be late; who is
    told at once can go elsewhere.
    """

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = TOLERANCE

    def waited(self, *, in_vain: bool) -> None:
        """Another interactive request has waited."""
        self.times += -TIGHTEN if in_vain else RELAX
        self.times = min(TOLERANCE, max(MIN_TOLERANCE, self.times))


class WaitCorrection:
    """How long those who wait do wait, against the prediction that computes one prompt after the other."""

    __slots__ = ("ratio",)

    def __init__(self) -> None:
        self.ratio = 1.0

    def corrected(self, predicted_s: float) -> float:
        return self.ratio * predicted_s

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """Somebody for whom so much was predicted, uncorrected, has gone after so long."""
        if predicted_s > 0:
            seen = min(MAX_CORRECTION, max(MIN_CORRECTION, actual_s / predicted_s))
            self.ratio += SMOOTHING * (seen - self.ratio)


TENANT_SHARE = 0.8
"""Of the room that it and those who are not there yet have together, that a tenant may fill."""


class HasSize(Protocol):
    """A request that takes a place."""

    @property
    def tenant(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes of memory."""
        ...


class QueueCapacity:
    """Of all who wait."""

    def __init__(self, requests: int, size: int) -> None:
        """Room for so many `requests` of together `size` bytes."""
        self._requests = requests
        self._size = size
        self._count_total = 0
        self._bytes = 0
        self._counts_by_tenant: Counter[str] = Counter()
        """How many wait, by tenant."""
        self._bytes_by_tenant: Counter[str] = Counter()
        """Bytes of those who wait, by tenant."""

    def __len__(self) -> int:
        return self._count_total

    def refuse(self, entry: HasSize) -> None:
        """Raises Overloaded if its tenant has no place left."""
        count, held = self._counts_by_tenant[entry.tenant], self._bytes_by_tenant[entry.tenant]
        places = self._requests - self._count_total + count
        room = self._size - self._bytes + held
        if count + 1 > TENANT_SHARE * places:
            raise Overloaded(count, int(TENANT_SHARE * places))
        if held + entry.size > TENANT_SHARE * room:
            raise Overloaded(held, int(TENANT_SHARE * room), what="bytes")

    def take(self, entry: HasSize) -> None:
        self._count(entry, 1)

    def leave(self, entry: HasSize) -> None:
        self._count(entry, -1)

    def _count(self, entry: HasSize, by: int) -> None:
        self._count_total += by
        self._bytes += by * entry.size
        self._counts_by_tenant[entry.tenant] += by
        self._bytes_by_tenant[entry.tenant] += by * entry.size
        if not self._counts_by_tenant[entry.tenant]:
            del self._counts_by_tenant[entry.tenant], self._bytes_by_tenant[entry.tenant]
