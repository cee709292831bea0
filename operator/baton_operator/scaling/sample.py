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
"""Assumed start-up time of a worker until one is measured, in seconds."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured number, or the reason why it is unknown."""

    value: float | None
    """None: unknown."""
    why: str = ""
    """Why it is unknown."""

    @classmethod
    def of(cls, value: float) -> Measurement:
        """
        Return a measurement; a number that is not finite is unknown.

        >>> Measurement.of(0.0).zero, Measurement.of(math.nan).has_value
        (True, False)
        """
        return cls(value) if math.isfinite(value) else cls(None, "it is not a number")

    @property
    def has_value(self) -> bool:
        return self.value is not None

    @property
    def zero(self) -> bool:
        """Whether the value is known to be zero."""
        return self.value == 0

    def above(self, limit: float) -> bool:
        """Return whether the value is known and above the limit."""
        return self.value is not None and self.value > limit

    def below(self, limit: float) -> bool:
        """Return whether the value is known and below the limit."""
        return self.value is not None and self.value < limit


ZERO = Measurement(0.0)


def unknown(why: str) -> Measurement:
    return Measurement(None, why)


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """Size of one worker by a profile."""

    tokens_per_s: float
    """Throughput at the objectives; 0 if it cannot meet them."""
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Bounds and objectives of one role."""

    least: int
    most: int
    fallback: int | None = None
    objective_s: float
    """Latency objective in seconds: time to first token for prefill, inter-token latency for decode."""
    up: ScaleUp = field(default_factory=ScaleUp)
    down: ScaleDown = field(default_factory=ScaleDown)
    loss: MetricsLoss = field(default_factory=MetricsLoss)
    zero_after_s: float = 300.0
    """Seconds without requests before a role with `least` 0 scales to zero."""
    first_token_s: float | None = None
    """Objective of the time to first token, if workers of this role compute prompts themselves."""
    queue_s: float | None = None
    """Queued work in seconds that means full utilization. None: use `RoleSample.utilisation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSample:
    """Measured state of one role."""

    replicas: int
    """Desired workers."""
    ready: int
    demand: Measurement
    """Tokens per second that clients request, including rejected requests."""
    backlog: Measurement
    """Tokens queued in routers and workers."""
    latency: Measurement
    """Latency in seconds at the percentile of the objective."""
    first_token: Measurement = ZERO
    """Time to first token, likewise, if `ScalingPolicy.first_token_s` is set."""
    utilisation: Measurement
    """Utilization of the fullest worker, above 1 with queued requests: the larger of its shares of KV blocks
    and batch slots. Unused if `ScalingPolicy.queue_s` derives it from the backlog."""
    tightest: Bound | None = None
    """The larger of the two."""
    size: WorkerSize | None = None
    """Size of one worker by a profile. None: use the learned capacity."""
    rate: Measurement
    """Tokens per second of a busy worker: a sample of the capacity."""
    requests: Measurement = ZERO
    """Requests of the service that arrive, run or wait. A role scales to zero only at 0."""
    queued: Measurement = ZERO
    """Queued requests of the service. No role shrinks above 0."""
    held: Measurement = ZERO
    """Requests that routers hold because no worker exists."""
    silent: int = 0
    """Ready workers or routers without metrics."""
    pending_s: float = 0.0
    """Seconds for which a pod has been unschedulable."""
    rolling: bool = False
    """Whether a rollout is in progress."""
    capped: str = ""
    """Why growth would not help now, because another role is the bottleneck; otherwise empty."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Memory of the decisions of one role. With a new memory a role does not shrink for a while."""

    windows: RecommendationWindows
    capacity: CapacityEstimate = field(default_factory=CapacityEstimate)
    startup_s: float = STARTUP_S
    """90th percentile of the start-up time."""
    demand: tuple[TimedValue, ...] = ()
    blind_since: float | None = None
    idle_since: float | None = None
    grown: tuple[tuple[float, int], ...] = ()
    """Time and number of added workers in the last period."""
    shrunk: tuple[tuple[float, int], ...] = ()
    ready: int | None = None
    """Ready workers of the last sample; None without one."""
    ready_since: float = -math.inf
    """Time of the last increase of ready workers."""

    @classmethod
    def new(cls, now: float, capacity: float | None = None, startup_s: float = STARTUP_S) -> RoleMemory:
        """Return a new memory; capacity and start-up time may come from status."""
        return cls(RecommendationWindows(now), CapacityEstimate(seed=capacity), startup_s)


MetricsSource = Literal["Measured", "Held", "Fallback"]


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Desired workers of a role, with the reason."""

    replicas: int
    raw: int
    """Recommendation before stabilization windows and steps."""
    reason: str
    """Reason in one word."""
    message: str
    """Reason in a sentence."""
    source: MetricsSource = "Measured"
    limited: str = ""
    """Limit below the need in one word, or empty."""
    bound: Bound | None = None
    """The first limit that one worker reaches, if known."""
    pressure: float = 0.0
    """Need divided by ready workers. The budget serves the highest first."""
