"""`RoleScaler`: how many workers one role of a service is to have, for whoever scales it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Label, Part, Rule, rules
from baton_operator.kinds.status import Conditions


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


class RoleScalerStatus(Part):
    """How many workers there are."""

    replicas: Annotated[int, Field(ge=0)] = 0
    """Pods of the role, of all generations."""

    selector: Annotated[str, Field(max_length=1024)] = ""
    """Labels of those pods, for a HorizontalPodAutoscaler."""

    conditions: Conditions = []
    """Bound: whether the service exists and takes the number."""
