"""
Whether a request that has to wait is let in, by when its first token can be expected.

To wait for an answer that comes too late helps nobody and makes all the others wait longer. So each class
has its own patience: who is interactive is told at once, with the time at which to come again; who is
critical or has no objective waits as long as anybody would; work that nobody waits for waits for ever.
What is predicted is compared with what comes, because a worker computes several short prompts at a time
and a queue drains faster than one after the other. Plain arithmetic; nothing is known of workers here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERANCE = 1.5
"""An interactive request waits for so many times its objective at most, and is let in if it is predicted to
take no longer than that: a prediction may be wrong."""

LEAST_TOLERANCE = 0.8
STRICTER = 0.05
LAXER = 0.0025
"""What one more that waited in vain, and one that did not, change of it: a twentieth may wait in vain."""

SMOOTHING = 0.05
LEAST_PACE = 0.05
MOST_PACE = 4.0


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a request waits."""

    objective_s: float
    """To the first token; infinite if it has none."""
    patience_s: float
    """After which it gives up."""


def terms(kind: str, wanted_s: float | None, interactive_s: float, wait_s: float) -> Terms:
    """
    Of a request of the class `kind` that says it wants its first token in `wanted_s`, if it says so.

    `interactive_s` is the objective of interactive requests that do not say, `wait_s` the patience of those
    that have no objective.
    """
    if kind == "batch":
        return Terms(math.inf, math.inf)
    if kind == "interactive":
        objective = interactive_s if wanted_s is None else wanted_s
        return Terms(objective, TOLERANCE * objective)
    if wanted_s is None:
        return Terms(math.inf, wait_s)
    return Terms(wanted_s, wanted_s)


def too_late(kind: str, on: Terms, predicted_s: float, room_s: float, tolerance: float) -> bool:
    """
    Whether a request is better refused at once than after waiting.

    `tolerance`: how many times its objective an interactive one may be predicted to take.

    `room_s` is the part of the prediction that no other order of those who wait would shorten: the time
    until any decode worker has KV blocks for it.
    """
    if kind == "interactive":
        return predicted_s > tolerance * on.objective_s
    return room_s > on.patience_s


class Tolerance:
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
        self.times += -STRICTER if in_vain else LAXER
        self.times = min(TOLERANCE, max(LEAST_TOLERANCE, self.times))


class Pace:
    """How long those who wait do wait, against the prediction that computes one prompt after the other."""

    __slots__ = ("ratio",)

    def __init__(self) -> None:
        self.ratio = 1.0

    def corrected(self, predicted_s: float) -> float:
        return self.ratio * predicted_s

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """Somebody for whom so much was predicted, uncorrected, has gone after so long."""
        if predicted_s > 0:
            seen = min(MOST_PACE, max(LEAST_PACE, actual_s / predicted_s))
            self.ratio += SMOOTHING * (seen - self.ratio)
