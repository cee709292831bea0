"""`RoleScaler`: the number of workers of one role of a service, and the target of autoscalers."""

from __future__ import annotations

from typing import Annotated, Literal

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

    recommended: Annotated[int, Field(ge=0)] = 0
    """Number of workers that the autoscaler recommends."""

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
    """Bound: the service exists and uses spec.replicas. Reasons of others: NoService, ServiceInvalid (its
    spec is refused), OtherName (it uses another RoleScaler), NotScaled (the role has no scaling). The other
    conditions describe the autoscaler's last decision, and are absent with autoscaling.mode Disabled.
    ScalingActive: it is by metrics. Reasons without metrics: MetricsHeld (the number is kept) and
    MetricsFallback (after onMetricsLoss.holdDuration, fallbackReplicas applies). ScalingLimited: a limit
    keeps the role below the number it needs. Reasons: AtMaximum, GpuBudget, CapacityExhausted, OtherRole."""

    scaling: ScalingStatus | None = None
    """Last decision of the operator's autoscaler. Absent with autoscaling.mode Disabled."""
