"""Both roles of a service together, and the accelerators that they share."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.autoscaler import ScaledService, is_rolling_out
from baton_operator.scaling.budget import GpuDemand, allocate
from baton_operator.scaling.roles import ScaledRole, decide_all
from baton_operator.scaling.sample import (
    ZERO,
    Measurement,
    RoleMemory,
    RoleSample,
    ScalingDecision,
    ScalingPolicy,
)
from baton_operator.scaling.signals import RolePods, ServiceMetrics, role_sample
from tests.operator.fake_cluster import FakeCluster

NOW = 50_000.0


def role(replicas: int, demand: float, *, utilisation: float = 0.5, least: int = 1) -> ScaledRole:
    sample = RoleSample(
        replicas=replicas,
        ready=replicas,
        demand=Measurement.of(demand),
        backlog=ZERO,
        latency=Measurement.of(0.01),
        utilisation=Measurement.of(utilisation),
        rate=Measurement.of(1000.0),
        requests=Measurement.of(demand),
    )
    policy = ScalingPolicy(least=least, most=10, objective_s=0.05, zero_after_s=60.0)
    return ScaledRole(policy, RoleMemory.new(NOW - 9000, 1000.0), sample)


def all_of_them(decisions: Mapping[RoleName, ScalingDecision]) -> dict[RoleName, int]:
    return {name: one.replicas for name, one in decisions.items()}


def test_decide_all_scales_each_role_by_its_own_signals() -> None:
    decided = decide_all({"prefill": role(2, 3000), "decode": role(3, 2400)}, all_of_them, NOW)
    assert {name: decision.replicas for name, (decision, _) in decided.items()} == {"prefill": 4, "decode": 3}


def test_prefill_does_not_grow_before_a_decode_that_is_full() -> None:
    full: dict[RoleName, ScaledRole] = {"prefill": role(2, 3000), "decode": role(3, 2400, utilisation=0.95)}
    decisions = {name: one for name, (one, _) in decide_all(full, all_of_them, NOW).items()}
    assert (decisions["prefill"].replicas, decisions["prefill"].reason) == (2, "OtherRole")
    assert decisions["decode"].replicas == 4


def test_decide_all_busy_prefill_keeps_a_decode_worker() -> None:
    sleeping = role(1, 0.0, utilisation=0.0, least=0)
    awake: dict[RoleName, ScaledRole] = {"prefill": role(2, 1500), "decode": sleeping}
    memory = sleeping.memory
    for tick in range(40):
        awake["decode"] = replace(sleeping, memory=memory)
        decision, memory = decide_all(awake, all_of_them, NOW + 15 * tick)["decode"]
        assert decision.replicas >= 1


def test_decide_all_growth_over_budget_waits() -> None:
    def nothing_is_free(decisions: Mapping[RoleName, ScalingDecision]) -> dict[RoleName, int]:
        return dict.fromkeys(decisions, 2)

    decided = decide_all({"prefill": role(2, 3000), "decode": role(3, 2400)}, nothing_is_free, NOW)
    grown, _ = decided["prefill"]
    assert (grown.replicas, grown.reason, grown.limited) == (2, "GpuBudget", "GpuBudget")
    assert decided["decode"][0].replicas == 3, "a budget takes nothing away"


KV_LOW = {
    "routers": 1.0, "age": 5.0, "demand_prompt": 500.0, "demand_local": 0.0, "demand_answer": 300.0,
    "first_token": 20.0, "held": 0.0, "prefill_workers": 2.0, "prefill_queued_tokens": 0.0,
    "prefill_queued": 0.0, "prefill_speed": 1000.0, "decode_workers": 2.0, "decode_generated": 300.0,
    "decode_answer": 200.0, "decode_fullest": 0.3, "decode_usage": 0.3, "decode_mean_usage": 0.3,
    "decode_running": 128.0, "decode_mean_running": 128.0, "decode_slots": 128.0, "decode_token": 0.015,
    "decode_fullest_slots": 1.0, "in_flight": 128.0,
}  # fmt: skip
IN_DECODE = {"decode_queued": 120.0, "decode_fullest_slots": 1.95, "waiting": 0.0, "queued_prompt": 0.0}
IN_ROUTERS = {"decode_queued": 0.0, "waiting": 120.0, "queued_prompt": 500_000.0}


@pytest.mark.parametrize("queued", [IN_DECODE, IN_ROUTERS], ids=["in decode", "in routers"])
def test_decode_out_of_slots_grows_and_prefill_does_not(queued: dict[str, float]) -> None:
    """KV is 30 % used and tokens come fast: only the batch slots say that decode is full."""
    metrics = ServiceMetrics({**KV_LOW, **queued})
    replicas: dict[RoleName, int] = {"prefill": 2, "decode": 2}
    memories = {name: RoleMemory.new(NOW - 9000) for name in replicas}
    objectives: dict[RoleName, float] = {"prefill": 2.0, "decode": 0.05}
    for tick in range(40):
        roles: dict[RoleName, ScaledRole] = {}
        for name, objective_s in objectives.items():
            policy = ScalingPolicy(
                least=1, most=8, objective_s=objective_s, queue_s=objective_s if name == "prefill" else None
            )
            sample = role_sample(
                name, metrics, RolePods(replicas=replicas[name], ready=2, routers=1), objective_s
            )
            roles[name] = ScaledRole(policy, memories[name], sample)
        for name, (decision, memory) in decide_all(roles, all_of_them, NOW + 15 * tick).items():
            replicas[name], memories[name] = decision.replicas, memory
    assert replicas["prefill"] == 2
    assert replicas["decode"] >= 4


SPEC: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {}}
CHANGED: dict[str, Any] = {**SPEC, "engine": {"maxModelLen": 1024}}


def test_service_rolls_only_while_a_revision_takes_over() -> None:
    cluster = FakeCluster(SPEC)
    cluster.settle()
    assert not is_rolling_out(cluster.service)
    cluster.change(CHANGED)
    cluster.reconcile()
    assert is_rolling_out(cluster.service)
    cluster.settle()
    assert not is_rolling_out(cluster.service)


def test_service_after_rollback_does_not_roll() -> None:
    """It may stay so for weeks, and must shrink and go to zero all the same."""
    cluster = FakeCluster(SPEC)
    cluster.settle()
    cluster.change(CHANGED)
    cluster.reconcile()
    cluster.broken.add(cluster.service["status"]["updateRevision"])
    cluster.settle()
    assert cluster.condition("Degraded") == ("True", "RolledBack")
    status = cluster.service["status"]
    assert status["currentRevision"] != status["updateRevision"] and not is_rolling_out(cluster.service)


def test_service_that_waits_for_a_model_does_not_roll() -> None:
    """A download may take hours; no worker of the next revision exists to take over."""
    cached = {"uri": "hf://org/model", "cache": {"type": "PVC", "size": "20Gi"}}
    cluster = FakeCluster(SPEC)
    cluster.settle()
    cluster.change({**SPEC, "model": cached})
    cluster.reconcile()
    assert cluster.condition("Progressing") == ("True", "FetchingModel")
    assert not is_rolling_out(cluster.service)


CASES: dict[str, tuple[list[GpuDemand], int, dict[str, int]]] = {
    "there is enough": (
        [GpuDemand("a", 1, 1, 1, 3, 1.0), GpuDemand("b", 2, 1, 1, 2, 1.0)], 9, {"a": 3, "b": 2}
    ),
    "who needs it more goes first": (
        [GpuDemand("a", 1, 1, 1, 5, 1.1), GpuDemand("b", 1, 1, 1, 4, 3.0)], 5, {"b": 4, "a": 1},
    ),
    "one that does not fit leaves room for a smaller one": (
        [GpuDemand("a", 4, 1, 1, 2, 3.0), GpuDemand("b", 1, 1, 1, 3, 1.0)], 7, {"a": 1, "b": 3},
    ),
    "what a role gives up is free when its pods are gone": (
        [GpuDemand("a", 1, 2, 4, 2, 0.5), GpuDemand("b", 1, 2, 2, 4, 2.0)], 7, {"a": 2, "b": 3},
    ),
    "whoever shrinks may": ([GpuDemand("a", 1, 4, 4, 3, 0.5)], 2, {"a": 3}),
    "without accelerators there is no budget": ([GpuDemand("a", 0, 1, 1, 9, 1.0)], 0, {"a": 9}),
}  # fmt: skip


@pytest.mark.parametrize(("demands", "gpus", "expected"), CASES.values(), ids=CASES)
def test_allocate_case_gives_expected_replicas(
    demands: list[GpuDemand], gpus: int, expected: dict[str, int]
) -> None:
    assert allocate(demands, gpus) == expected


@pytest.mark.parametrize("seed", range(50))
def test_allocate_random_demands_keep_budget_and_replicas(seed: int) -> None:
    rng = random.Random(seed)
    demands = [
        GpuDemand(str(number), rng.randint(0, 4), replicas := rng.randint(0, 5), replicas + rng.randint(0, 2),
             rng.randint(0, 9), rng.random())
        for number in range(rng.randint(1, 8))
    ]  # fmt: skip
    gpus = rng.randint(0, 60)
    decided = allocate(demands, gpus)
    for one in demands:
        assert min(one.replicas, one.requested) <= decided[one.holder] <= one.requested
    grown = sum(one.gpus * max(0, decided[one.holder] - one.replicas) for one in demands)
    assert grown <= max(0, gpus - sum(one.taken for one in demands))


SCALING = {"minReplicas": 1, "maxReplicas": 4}


@pytest.mark.parametrize(
    ("prefill", "requested", "desired"),
    [
        ({}, None, 1),
        ({"replicas": 3}, None, 3),
        ({"replicas": 0}, None, 0),
        ({"scaling": SCALING}, None, 1),
        ({"scaling": SCALING}, 2, 2),
        ({"scaling": SCALING}, 9, 4),
    ],
)
def test_desired_workers_of_a_role(prefill: dict[str, Any], requested: int | None, desired: int) -> None:
    """They count in the budget: also those of a role that has neither a number nor a RoleScaler yet."""
    model = {"uri": "builtin://smollm2"}
    spec = InferenceServiceSpec.model_validate({"model": model, "prefill": prefill, "decode": {}})
    scalers: dict[RoleName, Any] = {} if requested is None else {"prefill": {"spec": {"replicas": requested}}}
    assert ScaledService({}, spec, scalers, (), NOW).replicas("prefill") == desired
