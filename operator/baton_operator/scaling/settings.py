"""From the operator's settings and a service's spec to what the scaler wants to know."""

from __future__ import annotations

from dataclasses import dataclass

from baton_operator import scalers
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import duration_s
from baton_operator.rollout import RoleName
from baton_operator.scaling.observation import Policy

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
    objective_s = duration_s(wanted.slo.ttft if name == "prefill" else wanted.slo.itl)
    return Policy(
        least=scaling.min_replicas,
        most=scaling.max_replicas,
        fallback=scaling.fallback_replicas,
        objective_s=objective_s,
        up=scaling.scale_up,
        down=scaling.scale_down,
        loss=wanted.on_metrics_loss,
        zero_after_s=float(wanted.scale_to_zero_after_seconds or ZERO_AFTER_S),
        queue_s=objective_s if name == "prefill" else None,
        first_token_s=duration_s(wanted.slo.ttft) if name == "decode" and spec.prefill is None else None,
    )
