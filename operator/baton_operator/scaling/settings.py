"""From the operator's settings and a service's spec to what the scaler wants to know."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton_operator import scalers
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.rollout import RoleName
from baton_operator.scaling.observation import Policy

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

ZERO_AFTER_S = 300.0
"""Without a request, if nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """The operator's."""

    prometheus_url: str = ""
    gpu_budget: int = 0
    """Accelerators of all services together; 0: as many as there are."""
    window_s: int = 120
    """Over which rates are taken."""


def policy(spec: InferenceServiceSpec, name: RoleName) -> Policy:
    """Of a role that has `scaling`."""
    scaling = scalers.roles(spec)[name].scaling
    assert scaling is not None
    wanted = spec.autoscaling
    objective = wanted.slo.ttft if name == "prefill" else wanted.slo.itl
    return Policy(
        least=scaling.min_replicas,
        most=scaling.max_replicas,
        fallback=scaling.fallback_replicas,
        objective_s=seconds(objective),
        up=scaling.scale_up,
        down=scaling.scale_down,
        loss=wanted.on_metrics_loss,
        zero_after_s=float(wanted.scale_to_zero_after_seconds or ZERO_AFTER_S),
        queue_s=seconds(objective) if name == "prefill" else None,
    )


def seconds(duration: str) -> float:
    """
    Of a duration as people write it.

    >>> seconds("1m30s"), seconds("50ms"), seconds("2.5s")
    (90.0, 0.05, 2.5)
    """
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|s|m|h)", duration))
