"""
Conditions that tell the truth: each from what was seen, and changed only when something has changed.

`Ready` is about requests: it is true when they are answered by what the spec asks for now. Everything else
says what is missing for that, in one word for programs and a sentence for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_operator.manifests.objects import timestamp


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement about a service."""

    type: str
    true: bool | None
    """None: nobody knows."""
    reason: str
    message: str = ""

    @property
    def status(self) -> str:
        return "Unknown" if self.true is None else str(self.true)


@dataclass(frozen=True, slots=True)
class Transition:
    """A statement that has become true or false: worth an Event."""

    fact: Fact
    warning: bool


GOOD = frozenset(
    {
        *("Ready", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "SpecSupported"),
        *("ExposureReady", "UpToDate"),
    }
)
"""Conditions that should be true; Progressing should not for long."""

BAD = frozenset({"Degraded", "Failed"})
"""Conditions that should not."""


def written(
    facts: Iterable[Fact], before: Sequence[Mapping[str, Any]], generation: int, now: float
) -> tuple[list[dict[str, Any]], list[Transition]]:
    """The conditions for status, and what has changed. A time changes only with its status."""
    known = {one["type"]: one for one in before}
    conditions: list[dict[str, Any]] = []
    transitions: list[Transition] = []
    for fact in facts:
        old = known.get(fact.type)
        same = old is not None and old["status"] == fact.status
        conditions.append(
            {
                "type": fact.type,
                "status": fact.status,
                "reason": fact.reason,
                "message": fact.message,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same and old else timestamp(now),
            }
        )
        if not same and fact.true is not None and (old is not None or fact.true):
            bad = fact.true if fact.type in BAD else not fact.true and fact.type in GOOD
            transitions.append(Transition(fact, bad))
    return conditions, transitions
