"""The interface of a cluster to policies: a sample, and the actions. Workers are processes or imagined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.signals import ServiceMetrics
from benchmarks.scaling.day import Request
from benchmarks.scaling.score import Answer, Ends


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker that is wanted."""

    name: str
    started_s: float
    ready_s: float | None = None
    """When it became so."""


@dataclass(frozen=True, slots=True)
class Sight:
    """All that can be known at one moment. Times are as meant, in seconds since the load began."""

    now: float
    pods: Mapping[RoleName, Sequence[Pod]]
    metrics: ServiceMetrics
    """Metrics of Prometheus, or of the router itself if there are no workers."""
    busy: Mapping[str, float]
    """Ratio of the last minute in which each worker was busy, like its CPU usage; empty if unknown."""


@dataclass(slots=True)
class Life:
    """Lifetime of a worker, in modeled seconds."""

    started_s: float
    ended_s: float | None = None


def replica_hours(lives: Iterable[Life], now: float) -> float:
    """
    Of all workers, ready or not, those too that end.

    >>> replica_hours([Life(0.0), Life(1800.0, ended_s=3600.0)], 7200.0)
    2.5
    """
    return sum((now if one.ended_s is None else one.ended_s) - one.started_s for one in lives) / 3600


class World(Protocol):
    """A service with its router, its workers, and its Prometheus."""

    @property
    def replica_hours(self) -> float:
        """Since the load began."""

    @property
    def ends(self) -> Ends: ...

    async def ready(self) -> None:
        """Wait until all workers that are wanted answer, and Prometheus has seen them."""

    def begin(self) -> None:
        """Now the load begins: times and replica-hours count from here."""

    async def see(self) -> Sight: ...

    async def ask(self, request: Request) -> Answer:
        """Send it and read its answer. Raises nothing that the service could be the cause of."""

    async def scale(self, role: RoleName, count: int) -> None:
        """Have so many workers from now on; those with least to do are drained."""

    async def darken(self) -> None:
        """Kill Prometheus."""

    async def lighten(self) -> None:
        """Restart Prometheus."""


class Scaler(Protocol):
    """A policy: says how many workers each role is to have now."""

    def wanted(self, sample: Sight) -> Mapping[RoleName, int]: ...
