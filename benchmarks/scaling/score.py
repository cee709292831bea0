"""The result of one policy: attained objectives, and cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.scaling.case import ITL_S, TTFT_S, Case


@dataclass(slots=True)
class Answer:
    """Outcome of one request, in modeled seconds."""

    phase: str
    first: float = math.inf
    token: float = 0.0
    ok: bool = False
    why: str = ""

    @property
    def good(self) -> bool:
        return self.ok and self.first <= TTFT_S and self.token <= ITL_S


@dataclass(frozen=True, slots=True)
class Count:
    """Workers that are wanted at a minute."""

    minute: float
    prefill: int
    decode: int

    def fell(self, before: Count) -> bool:
        return self.prefill < before.prefill or self.decode < before.decode


@dataclass(slots=True)
class Ends:
    """How workers ended that were ready."""

    well: int = 0
    badly: int = 0
    """By being killed, or with a status that is not 0."""

    def count(self, *, well: bool) -> None:
        self.well += well
        self.badly += not well


@dataclass(slots=True)
class Score:
    """Of one policy."""

    policy: str
    case: Case
    answers: Sequence[Answer] = ()
    counts: list[Count] = field(default_factory=list)
    ends: Ends = field(default_factory=Ends)
    replica_hours: float = 0.0
    loads: list[float] = field(default_factory=list)
    """Of the machine."""

    @property
    def attained(self) -> float:
        return _share(self.answers)

    @property
    def fell_in_the_dark(self) -> int:
        """Times that replicas fell while there was no Prometheus."""
        during = [one for one in self.counts if self.case.dark[0] + 0.5 <= one.minute < self.case.dark[1]]
        return sum(after.fell(before) for before, after in pairwise(during))

    @property
    def summary(self) -> dict[str, Any]:
        """As it is printed."""
        firsts = [one.first for one in self.answers if one.ok]
        return {
            "policy": self.policy,
            "requests": len(self.answers),
            "failed": sum(not one.ok for one in self.answers),
            "why": sorted({one.why for one in self.answers if not one.ok})[:5],
            "attained": f"{self.attained:.1%}",
            "replica_hours": round(self.replica_hours, 2),
            "ttft_p50_p95_s": " ".join(f"{statistics.quantiles(firsts, n=20)[at]:.1f}" for at in (9, 18)),
            "most": f"{max(one.prefill for one in self.counts)}+{max(one.decode for one in self.counts)}",
            "ended_well": self.ends.well,
            "ended_badly": self.ends.badly,
            "fell_without_prometheus": self.fell_in_the_dark,
            "by_phase": dict(self._by_phase()),
            "replicas": " ".join(f"{one.minute:.1f}:{one.prefill}+{one.decode}" for one in self._changes()),
            "machine_load": f"{min(self.loads):.1f} to {max(self.loads):.1f}",
        }

    def _by_phase(self) -> Iterator[tuple[str, str]]:
        for phase in self.case.phases:
            if own := [one for one in self.answers if one.phase == phase.name]:
                yield phase.name, f"{_share(own):.1%} of {len(own)}"

    def _changes(self) -> Iterator[Count]:
        before: tuple[int, int] | None = None
        for one in self.counts:
            if (one.prefill, one.decode) != before:
                before = one.prefill, one.decode
                yield one


def _share(answers: Sequence[Answer]) -> float:
    return sum(one.good for one in answers) / len(answers)
