"""
Conditions of an object's status, and which changes of them are worth an Event.

A condition has a reason, one word for programs, and a message for people. Its transition time changes only
with its status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_operator.kinds.part import MESSAGE_LIMIT
from baton_operator.manifests.objects import Manifest, timestamp

Condition = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """A condition as determined now."""

    type: str
    true: bool | None
    """None: unknown."""
    reason: str
    message: str = ""

    @property
    def status(self) -> str:
        return "Unknown" if self.true is None else str(self.true)


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition whose status changed, which becomes an Event."""

    fact: Fact
    warning: bool


ReportTransition = Callable[[Manifest, Transition], None]
"""Reports a transition of an object as an Event and in metrics. Does not wait and never raises."""

GOOD = frozenset(
    {
        *("Ready", "Available", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "SpecSupported"),
        *("ExposureReady", "UpToDate", "Active"),
    }
)
"""Conditions that are true in a healthy service or adapter."""

BAD = frozenset({"Degraded", "Failed"})
"""Conditions that are false in a healthy service."""

QUIET = frozenset({"Available"})
"""Conditions without Events: Ready changes with them."""


def written(
    facts: Iterable[Fact], before: Sequence[Mapping[str, Any]], generation: int, now: float
) -> tuple[list[Condition], list[Transition]]:
    """Return the conditions for status, and the changes since `before`. Other types are not in them."""
    before_by_type = {one["type"]: one for one in before}
    conditions: list[Condition] = []
    transitions: list[Transition] = []
    for fact in facts:
        old = before_by_type.get(fact.type)
        same = old is not None and old["status"] == fact.status
        conditions.append(
            {
                "type": fact.type,
                "status": fact.status,
                "reason": fact.reason,
                "message": fact.message[:MESSAGE_LIMIT],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same and old else timestamp(now),
            }
        )
        if fact.type in QUIET:
            continue
        if not same and fact.true is not None and (old is not None or fact.true):
            bad = fact.true if fact.type in BAD else not fact.true and fact.type in GOOD
            transitions.append(Transition(fact, bad))
    return conditions, transitions


def by_type(manifest: Mapping[str, Any] | None) -> dict[str, Condition]:
    """Return the conditions in the status of an object by their types; empty without an object."""
    return {one["type"]: one for one in (manifest or {}).get("status", {}).get("conditions") or ()}


def updated(before: Sequence[Condition], conditions: Sequence[Condition]) -> list[Condition]:
    """Return `before` with `conditions` in place of those of the same type. Others are another writer's."""
    ours = {one["type"]: one for one in conditions}
    return [*(ours.pop(one["type"], one) for one in before), *ours.values()]
