"""`RoleScaler`: how many workers one role of a service is to have, for whoever scales it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Label, Part, Rule, rules
from baton_operator.kinds.status import Conditions

Bound = Literal["KVBlocks", "BatchSlots", "InterTokenLatency", "TimeToFirstToken", "Throughput"]


@rules(
    Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot be changed", ".serviceName"),
    Rule("self.role == oldSelf.role", "role cannot be changed", ".role"),
)
class RoleScalerSpec(Part):
    """How many workers there are to be."""

    service_name: Label
    """The InferenceService."""

    role: Literal["prefill", "decode"]
    """Which of its roles."""

    replicas: Annotated[int, Field(ge=0, le=1000)]
    """How many workers; the service's bounds hold all the same."""


class Scaling(Part):
    """What the operator's autoscaler thinks of the role. With mode External nobody need follow it."""

    recommended: Annotated[int, Field(ge=0)] = 0
    """How many workers there should be."""

    reason: Annotated[str, Field(max_length=64)] = ""
    """Why, in one word."""

    message: Annotated[str, Field(max_length=1024)] = ""
    """Why, in words, as it was when the reason came up."""

    source: Literal["Measured", "Held", "Fallback"] = "Measured"
    """Measured: from metrics. Held: there are none, so that nothing changes. Fallback: there were none for
    long, so that the role has what was set for that."""

    limited: Annotated[str, Field(max_length=64)] = ""
    """What keeps it from having what it needs: AtMaximum, GpuBudget, CapacityExhausted, OtherRole."""

    bound: Bound | None = None
    """What one worker runs out of first: by the profile, or what was full or slow. Throughput: its time."""

    capacity: Annotated[float, Field(ge=0)] | None = None
    """Tokens a second that one worker was seen to be able to do."""

    startup_seconds: Annotated[int, Field(ge=0)] | None = None
    """In which nine of ten workers start."""

    last_scale_time: (
        Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] | None
    ) = None
    """When it was last given another number of workers."""


class RoleScalerStatus(Part):
    """How many workers there are."""

    replicas: Annotated[int, Field(ge=0)] = 0
    """Pods of the role, of all generations."""

    selector: Annotated[str, Field(max_length=1024)] = ""
    """Labels of those pods, for a HorizontalPodAutoscaler."""

    conditions: Conditions = []
    """Bound: whether the service exists and takes the number."""

    scaling: Scaling | None = None
    """What the operator's autoscaler thinks; nothing while spec.autoscaling.mode is Disabled."""
