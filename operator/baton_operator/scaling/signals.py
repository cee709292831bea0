"""
What the figures of one answer mean for a role: what was seen, what was seen to be nothing, what is not known.

Where a target is away its series are, and then a sum over the others is too small. It may still ask for
workers, but never for fewer: a role with a silent worker, or a service with a silent router, says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_operator.rollout import RoleName
from baton_operator.scaling.decision import HIGH
from baton_operator.scaling.observation import Observation
from baton_operator.scaling.reading import ZERO, Reading, unknown

STALE_S = 90.0
"""Since the routers were last scraped, after which what was scraped says nothing of now."""

ANSWER_TOKENS = 200.0
"""Of an answer, as long as none has ended."""

STEEP = 1.25
"""Times what was seen that a worker may be believed to do when it is fuller."""

STEP = 1.5
"""Times the demand of the whole window that the end of it must have to be taken for what comes."""

HALF = 0.5
"""Of its room, below which what a worker does says nothing of what it could."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The answer to one question, or why there is none."""

    values: Mapping[str, float]
    lost: str = ""

    def read(self, name: str) -> Reading:
        if self.lost:
            return unknown(self.lost)
        age = self.values.get("age")
        if age is None or not self.values.get("routers"):
            return unknown("no router of the service is scraped")
        if age > STALE_S:
            return unknown(f"the routers were last scraped {age:.0f} s ago")
        value = self.values.get(name)
        return unknown(f"there is no {name.replace('_', ' ')}") if value is None else Reading.of(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of one role, and the routers, as the cluster has them."""

    replicas: int
    ready: int
    routers: int
    """That are ready."""
    pending_s: float = 0.0
    rolling: bool = False


def observed(
    name: RoleName, figures: Figures, pods: Pods, objective_s: float, held: Reading | None = None
) -> Observation:
    """
    One role as a decision wants it; `objective_s` is that of its latency.

    `held` are requests that routers themselves said they hold, if they were asked.
    """
    requests = _sum(figures.read("in_flight"), figures.read("waiting"), figures.read("demand_answer"))
    seen_held = figures.read("held")
    if held is not None and (held.above(seen_held.value or 0.0) or not seen_held.known):
        seen_held = held
    silent_routers = max(0, pods.routers - int(figures.read("routers").value or 0))
    if name == "prefill":
        demand, backlog, latency, used, rate = _prefill(figures, pods)
    else:
        demand, backlog, latency, used, rate = _decode(figures, pods, objective_s)
    return Observation(
        replicas=pods.replicas,
        ready=pods.ready,
        demand=demand,
        backlog=backlog,
        latency=latency,
        first_token=figures.read("first_token") if name == "decode" else unknown("its latency says it"),
        utilisation=used,
        rate=rate,
        requests=requests,
        held=seen_held,
        silent=max(0, pods.ready - int(figures.read(f"{name}_workers").value or 0)) + silent_routers,
        pending_s=pods.pending_s,
        rolling=pods.rolling,
    )


def _prefill(figures: Figures, pods: Pods) -> tuple[Reading, Reading, Reading, Reading, Reading]:
    in_workers = figures.read("prefill_queued_tokens") if pods.ready else ZERO
    backlog = _sum(figures.read("queued_prompt"), in_workers)
    used = unknown("what waits says it")
    return (
        _demand(figures, "demand_prompt"), backlog, figures.read("first_token"), used,
        figures.read("prefill_speed"),
    )  # fmt: skip


def _decode(
    figures: Figures, pods: Pods, objective_s: float
) -> tuple[Reading, Reading, Reading, Reading, Reading]:
    queued = figures.read("decode_queued") if pods.ready else ZERO
    answer = figures.read("decode_answer")
    backlog = queued
    if queued.value:
        tokens = answer.value if answer.value is not None else ANSWER_TOKENS
        backlog = Reading.of(queued.value * tokens)
    latency = figures.read("decode_token")
    used = figures.read("decode_fullest") if pods.ready else ZERO
    demand, generated = _demand(figures, "demand_answer"), figures.read("decode_generated")
    if demand.known and generated.above(demand.value or 0.0):
        demand = generated  # answers are longer than was expected of them
    return demand, backlog, latency, used, _decode_rate(figures, latency, objective_s)


def _demand(figures: Figures, name: str) -> Reading:
    """As it was over the window, or lately, if that is so much more that it is hardly chance."""
    demand, lately = figures.read(name), figures.read(f"{name}_lately")
    return lately if demand.value is not None and lately.above(STEP * demand.value) else demand


def _decode_rate(figures: Figures, latency: Reading, objective_s: float) -> Reading:
    """
    What a decode worker would do if it were as full as it should be: its rate, by how full it is.

    One that is nearly idle says nothing of that.
    """
    generated, workers = figures.read("decode_generated"), figures.read("decode_workers")
    usage = figures.read("decode_usage")
    if not (generated.value and workers.value and usage.known):
        return unknown("no decode worker was busy")
    full = max(usage.value or 0.0, HIGH * (latency.value or 0.0) / objective_s)
    if full < HALF:
        return unknown("no decode worker was half full")
    return Reading.of(generated.value / workers.value * min(STEEP, HIGH / full))


def _sum(*parts: Reading) -> Reading:
    """Known only if all of them are."""
    missing = next((one for one in parts if not one.known), None)
    return missing if missing is not None else Reading.of(sum(one.value or 0.0 for one in parts))
