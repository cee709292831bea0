"""
What the figures of one answer mean for a role: what was seen, what was seen to be nothing, what is not
known.

Where a target is away its series are, and then a sum over the others is too small. It may still ask for
workers, but never for fewer: a role with a silent worker, or a service with a silent router, says so.
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
"""Since the routers were last scraped, after which what was scraped says nothing of now."""

ANSWER_TOKENS = 200.0
"""Of an answer, as long as none has ended."""

STEEP = 1.25
"""Times what was seen that a worker may be believed to do when it is fuller."""

STEP = 1.5
"""Times the demand of the whole window that the end of it must have to be taken for what comes."""

FULL = 0.9
"""Of the decode workers' KV blocks or batch slots together, above which routers queue requests for them."""

HALF = 0.5
"""Of its room, below which what a worker does says nothing of what it could."""


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """The answer to one question, or why there is none."""

    values: Mapping[str, float]
    lost: str = ""

    def read(self, name: str) -> Measurement:
        if self.lost:
            return unknown(self.lost)
        age = self.values.get("age")
        if age is None or not self.values.get("routers"):
            return unknown("no router of the service is scraped")
        if age > STALE_S:
            return unknown(f"the routers were last scraped {age:.0f} s ago")
        value = self.values.get(name)
        return unknown(f"there is no {name.replace('_', ' ')}") if value is None else Measurement.of(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePods:
    """The pods of one role, and the routers, as the cluster has them."""

    replicas: int
    ready: int
    routers: int
    """That are ready."""
    pending_s: float = 0.0
    rolling: bool = False


class _OfRole(TypedDict):
    """What is measured of one role apart from its pods, by the names of `Observation`."""

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
    held: Measurement | None = None,
    size: WorkerSize | None = None,
) -> RoleSample:
    """
    One role as a decision wants it; `objective_s` is that of its latency.

    `held` are requests that routers themselves said they hold, if they were asked. `size`: of one worker by
    a profile.
    """
    requests = _sum(metrics.read("in_flight"), metrics.read("waiting"), metrics.read("demand_answer"))
    seen_held = metrics.read("held")
    if held is not None and (held.above(seen_held.value or 0.0) or not seen_held.known):
        seen_held = held
    silent_routers = max(0, pods.routers - int(metrics.read("routers").value or 0))
    role = _prefill(metrics, pods) if name == "prefill" else _decode(metrics, pods, objective_s)
    return RoleSample(
        replicas=pods.replicas,
        ready=pods.ready,
        **role,
        size=size,
        requests=requests,
        queued=_queued(name, metrics, pods),
        held=seen_held,
        silent=max(0, pods.ready - int(metrics.read(f"{name}_workers").value or 0)) + silent_routers,
        pending_s=pods.pending_s,
        rolling=pods.rolling,
    )


def _prefill(metrics: ServiceMetrics, pods: RolePods) -> _OfRole:
    backlog = metrics.read("prefill_queued_tokens") if pods.ready else ZERO
    # What routers queue for a decode worker no prefill worker would make shorter.
    if not _decode_full(metrics):
        backlog = _sum(metrics.read("queued_prompt"), backlog)
    return _OfRole(
        demand=_demand(metrics, "prompt", without="local"),
        backlog=backlog,
        latency=metrics.read("first_token"),
        first_token=unknown("its latency says it"),
        utilisation=unknown("what waits says it"),
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
        # What is queued will take as many blocks each as what runs.
        blocks = Measurement.of(blocks.value * (1 + queued.value / running.value))
    backlog = queued
    if queued.value:
        answer = metrics.read("decode_answer")
        backlog = Measurement.of(queued.value * (ANSWER_TOKENS if answer.value is None else answer.value))
    latency = metrics.read("decode_token")
    demand, generated = _demand(metrics, "answer"), metrics.read("decode_generated")
    if demand.known and generated.above(demand.value or 0.0):
        demand = generated  # answers are longer than was expected of them
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
    """The larger one. If one is unknown, a known one counts only if it alone asks for more workers."""
    known = max((one for one in parts if one.known), key=lambda one: one.value or 0.0, default=None)
    missing = next((one for one in parts if not one.known), None)
    return missing if missing and not (known and known.above(HIGH)) else known or parts[0]


def _decode_full(metrics: ServiceMetrics) -> bool:
    """Whether the decode workers have no KV blocks, or no batch slots, for what routers queue."""
    return metrics.read("decode_usage").above(FULL) or _slots_used(metrics).above(FULL)


def _slots_used(metrics: ServiceMetrics, name: str = "decode_running") -> Measurement:
    """Share of the decode workers' batch slots that are taken."""
    running, slots = metrics.read(name), metrics.read("decode_slots")
    if running.value is None or not slots.value:
        return unknown("the decode workers do not report their batch slots")
    return Measurement.of(running.value / slots.value)


def _queued(name: RoleName, metrics: ServiceMetrics, pods: RolePods) -> Measurement:
    """Requests that wait in routers, and in workers of either role as far as there are any."""
    parts = [metrics.read("waiting")]
    for role in ("prefill", "decode"):
        if pods.ready if role == name else metrics.read(f"{role}_workers").value:
            parts.append(metrics.read(f"{role}_queued"))
    return _sum(*parts)


def _demand(metrics: ServiceMetrics, kind: str, without: str = "") -> Measurement:
    """As it was over the window, or lately, if that is so much more that it is hardly chance."""
    demand, lately = (
        _less(metrics.read(f"demand_{kind}{when}"), metrics.read(f"demand_{without}{when}"))
        for when in ("", "_lately")
    )
    return lately if demand.value is not None and lately.above(STEP * demand.value) else demand


def _decode_rate(metrics: ServiceMetrics, latency: Measurement, objective_s: float) -> Measurement:
    """
    What a decode worker would do if it were as full as it should be: its rate, by how full it is.

    One that is nearly idle says nothing of that.
    """
    generated, workers = metrics.read("decode_generated"), metrics.read("decode_workers")
    usage, slots = metrics.read("decode_mean_usage"), _slots_used(metrics, "decode_mean_running")
    if not (generated.value and workers.value and usage.known and slots.known):
        return unknown("no decode worker was busy")
    full = max(usage.value or 0.0, min(1.0, slots.value or 0.0), HIGH * (latency.value or 0.0) / objective_s)
    if full < HALF:
        return unknown("no decode worker was half full")
    return Measurement.of(generated.value / workers.value * min(STEEP, HIGH / full))


def _less(whole: Measurement, part: Measurement) -> Measurement:
    """Without a part that is only reported where there is some."""
    return whole if whole.value is None else Measurement.of(max(0.0, whole.value - (part.value or 0.0)))


def _sum(*parts: Measurement) -> Measurement:
    """Known only if all of them are."""
    missing = next((one for one in parts if not one.known), None)
    return missing if missing is not None else Measurement.of(sum(one.value or 0.0 for one in parts))
