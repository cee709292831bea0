"""
From the metrics of a service to the sample of a role; each value is known, zero or unknown.

A missing scrape target makes sums too small. Such a sample may still grow a role but never shrink it:
`silent` counts workers and routers without metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from baton_operator.kinds.role_scaler import Bound
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.decision import HIGH
from baton_operator.scaling.sample import ZERO, Measurement, RoleSample, WorkerSize, unknown

STALE_S = 90.0
"""Maximum age of the last scrape of the routers in seconds."""

ANSWER_TOKENS = 200.0
"""Assumed tokens of an answer until one has ended."""

STEEP = 1.25
"""Maximum extrapolation of the measured rate of a worker to full utilization."""

STEP = 1.5
"""Minimum ratio of recent demand to that of the window for the recent value to count."""

FULL = 0.9
"""Utilization of all decode workers above which routers queue requests for them."""

HALF = 0.5
"""Minimum utilization of a worker for its rate to be a sample of the capacity."""


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """The result of one query, or the reason why it is missing."""

    values: Mapping[str, float]
    lost: str = ""

    def read(self, name: str) -> Measurement:
        if self.lost:
            return unknown(self.lost)
        age = self.values.get("age")
        if age is None or not self.values.get("routers"):
            return unknown("Prometheus scrapes no router of the service")
        if age > STALE_S:
            return unknown(f"the routers were last scraped {age:.0f} s ago")
        value = self.values.get(name)
        return unknown(f"there is no {name.replace('_', ' ')}") if value is None else Measurement.of(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePods:
    """The pods of one role and the routers of the service in the cluster."""

    replicas: int
    ready: int
    routers: int
    """Ready routers."""
    pending_s: float = 0.0
    rolling: bool = False


class _OfRole(TypedDict):
    """Measurements of one role, by the names of `RoleSample`."""

    demand: Measurement
    backlog: Measurement
    latency: Measurement
    first_token: Measurement
    utilisation: Measurement
    tightest: Bound
    rate: Measurement


def role_sample(
    name: RoleName,
    metrics: ServiceMetrics,
    pods: RolePods,
    objective_s: float,
    size: WorkerSize | None = None,
) -> RoleSample:
    """Return the sample of one role. `objective_s`: its latency objective. `size`: of one worker by a
    profile.
    """
    requests = _sum(metrics.read("in_flight"), metrics.read("waiting"), metrics.read("demand_answer"))
    silent_routers = max(0, pods.routers - int(metrics.read("routers").value or 0))
    role = _prefill(metrics, pods) if name == "prefill" else _decode(metrics, pods, objective_s)
    return RoleSample(
        replicas=pods.replicas,
        ready=pods.ready,
        **role,
        size=size,
        requests=requests,
        queued=_queued(name, metrics, pods),
        held=metrics.read("held"),
        silent=max(0, pods.ready - int(metrics.read(f"{name}_workers").value or 0)) + silent_routers,
        pending_s=pods.pending_s,
        rolling=pods.rolling,
    )


def _prefill(metrics: ServiceMetrics, pods: RolePods) -> _OfRole:
    backlog = metrics.read("prefill_queued_tokens") if pods.ready else ZERO
    # Prefill workers cannot shorten a queue for decode workers.
    if not _decode_full(metrics):
        backlog = _sum(metrics.read("queued_prompt"), backlog)
    return _OfRole(
        demand=_demand(metrics, "prompt", without="local"),
        backlog=backlog,
        latency=metrics.read("first_token"),
        first_token=unknown("included in the latency"),
        utilisation=unknown("derived from the backlog"),
        tightest="Throughput",
        rate=metrics.read("prefill_speed"),
    )


def _decode(metrics: ServiceMetrics, pods: RolePods, objective_s: float) -> _OfRole:
    queued = metrics.read("decode_queued") if pods.ready else ZERO
    blocks = metrics.read("decode_fullest") if pods.ready else ZERO
    slots = metrics.read("decode_fullest_slots") if pods.ready else ZERO
    if _decode_full(metrics):
        waiting, all_slots = metrics.read("waiting"), metrics.read("decode_slots")
        queued = _sum(queued, waiting)
        if slots.value is not None and waiting.value is not None and all_slots.value:
            slots = Measurement.of(slots.value + waiting.value / all_slots.value)
    running = metrics.read("decode_running")
    if blocks.value and queued.value and running.value:
        # Each queued request will need as many blocks as a running one.
        blocks = Measurement.of(blocks.value * (1 + queued.value / running.value))
    backlog = queued
    if queued.value:
        answer = metrics.read("decode_answer")
        backlog = Measurement.of(queued.value * (ANSWER_TOKENS if answer.value is None else answer.value))
    latency = metrics.read("decode_token")
    demand, generated = _demand(metrics, "answer"), metrics.read("decode_generated")
    if demand.has_value and generated.above(demand.value or 0.0):
        demand = generated  # answers are longer than expected
    return _OfRole(
        demand=demand,
        backlog=backlog,
        latency=latency,
        first_token=metrics.read("first_token"),
        utilisation=_fuller(blocks, slots),
        tightest="BatchSlots" if slots.above(blocks.value or 0.0) else "KVBlocks",
        rate=_decode_rate(metrics, latency, objective_s),
    )


def _fuller(*parts: Measurement) -> Measurement:
    """Return the larger value. If one is unknown, the other counts only if it means overload."""
    largest = max((part for part in parts if part.has_value), key=lambda one: one.value or 0.0, default=None)
    missing = next((part for part in parts if not part.has_value), None)
    return missing if missing and not (largest and largest.above(HIGH)) else largest or parts[0]


def _decode_full(metrics: ServiceMetrics) -> bool:
    """Return whether decode workers lack KV blocks or batch slots for queued requests."""
    return metrics.read("decode_usage").above(FULL) or _slots_used(metrics).above(FULL)


def _slots_used(metrics: ServiceMetrics, name: str = "decode_running") -> Measurement:
    """Return the share of used batch slots of decode workers."""
    running, slots = metrics.read(name), metrics.read("decode_slots")
    if running.value is None or not slots.value:
        return unknown("the decode workers do not report their batch slots")
    return Measurement.of(running.value / slots.value)


def _queued(name: RoleName, metrics: ServiceMetrics, pods: RolePods) -> Measurement:
    """Return the requests queued in routers and in workers of both roles."""
    parts = [metrics.read("waiting")]
    for role in ("prefill", "decode"):
        if pods.ready if role == name else metrics.read(f"{role}_workers").value:
            parts.append(metrics.read(f"{role}_queued"))
    return _sum(*parts)


def _demand(metrics: ServiceMetrics, kind: str, without: str = "") -> Measurement:
    """Return the demand over the window, or the recent one if it is significantly higher."""
    demand, lately = (
        _less(metrics.read(f"demand_{kind}{when}"), metrics.read(f"demand_{without}{when}"))
        for when in ("", "_lately")
    )
    return lately if demand.value is not None and lately.above(STEP * demand.value) else demand


def _decode_rate(metrics: ServiceMetrics, latency: Measurement, objective_s: float) -> Measurement:
    """Return the rate of a decode worker, extrapolated to its target utilization. The rate of a nearly idle
    worker is unknown.
    """
    generated, workers = metrics.read("decode_generated"), metrics.read("decode_workers")
    usage, slots = metrics.read("decode_mean_usage"), _slots_used(metrics, "decode_mean_running")
    if not (generated.value and workers.value and usage.has_value and slots.has_value):
        return unknown("no decode worker was busy")
    full = max(usage.value or 0.0, min(1.0, slots.value or 0.0), HIGH * (latency.value or 0.0) / objective_s)
    if full < HALF:
        return unknown("no decode worker was half full")
    return Measurement.of(generated.value / workers.value * min(STEEP, HIGH / full))


def _less(whole: Measurement, part: Measurement) -> Measurement:
    """Subtract a part whose series exists only if it is not zero."""
    return whole if whole.value is None else Measurement.of(max(0.0, whole.value - (part.value or 0.0)))


def _sum(*parts: Measurement) -> Measurement:
    """Return the sum; unknown if any part is."""
    missing = next((part for part in parts if not part.has_value), None)
    return missing if missing is not None else Measurement.of(sum(part.value or 0.0 for part in parts))
