"""`RoleScaler`: the number of workers of one role of a service, and the target of autoscalers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from baton_operator.kinds.part import Conditions, Duration, Label, Part, Rule, Time, rules

Bound = Literal["KVBlocks", "BatchSlots", "InterTokenLatency", "TimeToFirstToken", "Throughput"]


@rules(
    Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot be changed", ".serviceName"),
    Rule("self.role == oldSelf.role", "role cannot be changed", ".role"),
)
class RoleScalerSpec(Part):
    """Number of workers of one role. The operator creates one RoleScaler for each role with `scaling`."""

    service_name: Label
    """Name of the InferenceService in the same namespace. Immutable."""

    role: Literal["prefill", "decode"]
    """Role that is scaled. Immutable."""

    replicas: Annotated[int, Field(ge=0, le=1000)]
    """Desired number of workers. The service limits it to minReplicas and maxReplicas of the role. Written by
    the operator with autoscaling.mode Internal; by a HorizontalPodAutoscaler, KEDA or `kubectl scale` with
    External."""


class ScalingStatus(Part):
    """Last decision of the operator's autoscaler for the role. With mode External it is a recommendation."""

    renamed_fields: ClassVar = {"startupSeconds": "startupDuration"}

    recommended: Annotated[int, Field(ge=0)] = 0
    """Number of workers that the autoscaler recommends."""

    reason: Annotated[str, Field(max_length=64)] = ""
    """Cause of the decision, in one word for programs."""

    message: Annotated[str, Field(max_length=1024)] = ""
    """Cause of the decision, in words for people, as of the time when the reason last changed."""

    source: Literal["Measured", "Held", "Fallback"] = "Measured"
    """Basis of the decision. Measured: metrics. Held: metrics are missing, and the number is kept. Fallback:
    metrics are missing for longer than onMetricsLoss.holdDuration, and fallbackReplicas applies."""

    limited: Annotated[str, Field(max_length=64)] = ""
    """Limit that keeps the role below the number it needs: AtMaximum, GpuBudget, CapacityExhausted or
    OtherRole. Empty if nothing does."""

    bound: Bound | None = None
    """Resource of a worker that is exhausted first: KV blocks, batch slots, one of the latency objectives, or
    throughput."""

    capacity: Annotated[float, Field(ge=0)] | None = None
    """Measured throughput of one worker, in tokens per second."""

    startup_duration: Duration | None = None
    """Time in which 90 percent of the workers become ready after their start."""

    last_scale_time: Time | None = None
    """Time of the last change of spec.replicas by the operator."""


class RoleScalerStatus(Part):
    """Current number of workers, and the autoscaler's last decision."""

    replicas: Annotated[int, Field(ge=0)] = 0
    """Pods of the role, of all revisions."""

    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of those pods, as a HorizontalPodAutoscaler needs it."""

    conditions: Conditions = []
    """Bound: whether the service exists and uses spec.replicas."""

    scaling: ScalingStatus | None = None
    """Last decision of the operator's autoscaler. Absent with autoscaling.mode Disabled."""
