"""
The load: three hours that have in them what days have, each part long against the start of a worker.

Requests come when they come, whether or not the others were answered. Long prompts and long answers have a
step each, so that one role has to grow while the other has not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """So many requests a second, of so many tokens, until a minute."""

    name: str
    until: float
    rate: Callable[[float], float]
    """Of the minute."""
    most: float
    """That the rate ever is."""
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Request:
    """One that comes `at_s`; its text is made of the seed."""

    at_s: float
    phase: Phase
    seed: int


def steady(name: str, until: float, rate: float, prompt: int, answer: int) -> Phase:
    return Phase(name, until, lambda minute: rate, rate, prompt, answer)


def _sine(minute: float) -> float:
    return 0.2 - 0.15 * math.cos(2 * math.pi * (minute - 80) / 30)


PHASES = (
    steady("base", 10, 0.08, 8000, 600),
    steady("step of long prompts", 35, 0.3, 16_000, 250),
    steady("base again", 55, 0.08, 8000, 600),
    steady("step of long answers", 80, 0.28, 1200, 2000),
    Phase("sine", 140, _sine, 0.35, 8000, 800),
    steady("nothing", 160, 0.0, 1, 1),
    steady("from zero", 180, 0.08, 8000, 600),
)

DARK = (34.0, 44.0)
"""Minutes between which there is no Prometheus: it goes while the load is high, and is away when it falls."""


def requests(phases: Sequence[Phase], seed: int) -> Iterator[Request]:
    """The same ones for the same seed, in order."""
    rng = random.Random(seed)
    densest = max(phase.most for phase in phases)
    at = 0.0
    while True:
        at += rng.expovariate(densest)
        phase = next((one for one in phases if at < one.until * MINUTE), None)
        if phase is None:
            return
        # Of the densest load's requests those stay that this moment has.
        if rng.random() < phase.rate(at / MINUTE) / densest:
            yield Request(at, phase, rng.getrandbits(60))
