"""
A sample of one role: the input of a scaling decision, and what decisions remember.

Zero and unknown differ: a missing series is not a load of zero. So an unknown measurement is a value that
has a reason and compares with nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from baton_operator.kinds.role_scaler import Bound
from baton_operator.kinds.service_policies import MetricsLoss
from baton_operator.kinds.worker_role import ScaleDown, ScaleUp
from baton_operator.scaling.history import CapacityEstimate, RecommendationWindows, TimedValue

STARTUP_S = 240.0
"""Of a worker, before one was seen to start."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one question to the metrics gave."""

    value: float | None
    """None: unknown."""
    why: str = ""
    """Why it is unknown."""

    @classmethod
    def of(cls, value: float) -> Measurement:
        """
        A number that was seen; one that is no number is unknown.

        >>> Measurement.of(0.0).zero, Measurement.of(math.nan).known
        (True, False)
        """
        return cls(value) if math.isfinite(value) else cls(None, "it is not a number")

    @property
    def known(self) -> bool:
        return self.value is not None

    @property
    def zero(self) -> bool:
        """Whether nothing was seen, by somebody who looked."""
        return self.value == 0

    def above(self, limit: float) -> bool:
        """Whether it is surely more; what is unknown is not."""
        return self.value is not None and self.value > limit

    def below(self, limit: float) -> bool:
        """Whether it is surely less; what is unknown is not."""
        return self.value is not None and self.value < limit


ZERO = Measurement(0.0)


def unknown(why: str) -> Measurement:
    return Measurement(None, why)


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """One worker, as the lines of a profile have it."""

    tokens_per_s: float
    """0 if it cannot keep the objectives at all."""
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """What somebody wants of one role."""

    least: int
    most: int
    fallback: int | None = None
    objective_s: float
    """Of the role's latency: to the first token for prefill, from token to token for decode."""
    up: ScaleUp = field(default_factory=ScaleUp)
    down: ScaleDown = field(default_factory=ScaleDown)
    loss: MetricsLoss = field(default_factory=MetricsLoss)
    zero_after_s: float = 300.0
    """Without any request, before a role whose `least` is 0 goes there."""
    first_token_s: float | None = None
    """The objective for first tokens, where the workers of this role compute prompts themselves."""
    queue_s: float | None = None
    """Of queued work that makes a worker wholly used; None: `Observation.utilisation` says how used it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSample:
    """One role as it is now."""

    replicas: int
    """Asked for."""
    ready: int
    demand: Measurement
    """Tokens a second that clients ask for, refused ones too."""
    backlog: Measurement
    """Tokens that wait, in routers and workers."""
    latency: Measurement
    """Seconds, at the objective's percentile."""
    first_token: Measurement = ZERO
    """Likewise, where `Policy.first_token_s` has an objective for it."""
    utilisation: Measurement
    """
    Of the fullest worker, 0 to 1 and more with what is queued: the larger of its share of KV blocks and of
    batch slots. Unused where `Policy.queue_s` tells it from the backlog.
    """
    tightest: Bound | None = None
    """Which of the two it is."""
    size: WorkerSize | None = None
    """One worker by a profile, if there is one; without it, one is taken to do what was learned."""
    rate: Measurement
    """Tokens a second that a busy worker was seen to do: a sample of the capacity."""
    requests: Measurement = ZERO
    """Of the service, that came, run or wait: what has to be nothing before a role goes to zero."""
    queued: Measurement = ZERO
    """Requests of the service that are queued in routers or workers: no role shrinks while there are any."""
    held: Measurement = ZERO
    """Requests that wait in routers because there is no worker."""
    silent: int = 0
    """Ready workers of which nothing is heard."""
    pending_s: float = 0.0
    """For which a worker has waited for a place in the cluster."""
    rolling: bool = False
    """Whether one revision of workers is giving way to another."""
    capped: str = ""
    """Why it is no use to grow now, if it is not: what would come of it waits for another role."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """What one role's decisions remember. A new one shrinks nothing for a while."""

    windows: RecommendationWindows
    capacity: CapacityEstimate = field(default_factory=CapacityEstimate)
    startup_s: float = STARTUP_S
    """Nine of ten workers took no longer to start."""
    demand: tuple[TimedValue, ...] = ()
    blind_since: float | None = None
    idle_since: float | None = None
    grown: tuple[tuple[float, int], ...] = ()
    """When, and by how many, in the last period."""
    shrunk: tuple[tuple[float, int], ...] = ()
    ready: int | None = None
    """At the last look, if there was one."""
    ready_since: float = -math.inf
    """When there last was one more."""

    @classmethod
    def new(cls, now: float, capacity: float | None = None, startup_s: float = STARTUP_S) -> RoleMemory:
        """Of somebody who has just begun to look; capacity and start-up time may be known from before."""
        return cls(RecommendationWindows(now), CapacityEstimate(seed=capacity), startup_s)


MetricsSource = Literal["Measured", "Held", "Fallback"]


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many workers a role is to have, and why."""

    replicas: int
    raw: int
    """What the moment alone would ask for, before windows and steps."""
    reason: str
    """In one word."""
    message: str
    """In a sentence."""
    source: MetricsSource = "Measured"
    limited: str = ""
    """What keeps it from having what it needs, in one word; empty if nothing does."""
    bound: Bound | None = None
    """What keeps one worker from serving more, as far as that is known."""
    pressure: float = 0.0
    """What it needs against what it has: who goes first where there is not enough for all."""
