"""A worker's estimated capacity before enough samples exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton_api.profiles import Objectives as Measured
from baton_api.profiles import PrefillLine, Profile, StepLine, TransferLine, capacity
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.scaling.decision import decide
from baton_operator.scaling.history import ENOUGH_SAMPLES, CapacityEstimate
from baton_operator.scaling.roles import policy_of
from baton_operator.scaling.sample import ZERO, Measurement, RoleMemory, RoleSample, ScalingPolicy, unknown

PREFILL = PrefillLine(base_s=0.01, token_s=1e-3, pair_s=0.0)
STEP = StepLine(base_s=0.01, stream_s=0.001, token_s=0.0)
TRANSFER = TransferLine(start_s=0.001, token_s=0.0)
MEASURED = Measured(ttft_s=5.0, itl_s=0.1, prompt_tokens=500, output_tokens=100)
PROFILE = Profile(
    model="tiny",
    machine="2 cores",
    baton="0.1.0",
    measured_at=0.0,
    prefill=PREFILL,
    step=STEP,
    transfer=TRANSFER,
    kv_tokens=100_000,
    objectives=MEASURED,
    capacity=capacity(PREFILL, STEP, TRANSFER, 100_000, 64, MEASURED),
)


@pytest.mark.parametrize("samples", [0, 1, ENOUGH_SAMPLES - 1])
def test_capacity_seed_counts_until_enough_samples(samples: int) -> None:
    estimate = CapacityEstimate((100.0,) * samples, seed=1000.0)
    assert estimate.value == 1000.0 and not estimate.learnt
    enough = replace(estimate, samples=(100.0,) * ENOUGH_SAMPLES)
    assert enough.value == 100.0 and enough.learnt
    assert CapacityEstimate((100.0,)).learnt, "where nothing was said, the first one counts"


def test_decide_seeded_role_meets_demand_at_once() -> None:
    wanted = ScalingPolicy(least=1, most=8, objective_s=2.0, queue_s=2.0)
    seen = RoleSample(
        replicas=1, ready=1, demand=Measurement.of(3000.0), backlog=ZERO, latency=Measurement.of(0.1),
        utilisation=ZERO, rate=unknown("nobody was at work"), requests=Measurement.of(5.0),
    )  # fmt: skip
    now = 10_000.0
    for seed, expected in ((None, 1), (1000.0, 4)):
        memory = RoleMemory.new(0.0, seed)
        for tick in range(4):
            decision, memory = decide(wanted, memory, seen, now + 15 * tick)
            if decision.replicas > 1:
                break
        assert decision.replicas == expected


@pytest.mark.parametrize(("prefill", "first_token_s"), [(None, 2.0), ({}, None)])
def test_policy_decode_without_prefill_has_first_token_objective(
    prefill: dict[str, str] | None, first_token_s: float | None
) -> None:
    given = {
        "model": {"uri": "builtin://smollm2"},
        "decode": {"scaling": {"maxReplicas": 4}},
        "autoscaling": {"mode": "Internal"},
        **({} if prefill is None else {"prefill": prefill}),
    }
    assert policy_of(InferenceServiceSpec.model_validate(given), "decode").first_token_s == first_token_s
