"""What a RoleScaler's status says: how many pods its role has, which they are, and whether it is heard."""

from __future__ import annotations

from typing import Any

from baton_operator import names, scalers
from baton_operator.conditions import Fact, written
from baton_operator.manifests.objects import Manifest
from baton_operator.plan import State


def status(scaler: Manifest, state: State | None, now: float) -> dict[str, Any]:
    """
    The whole status. `state` is where the service stands, None if there is no service or it cannot be
    carried out.
    """
    spec, metadata = scaler["spec"], scaler["metadata"]
    service, role = spec["serviceName"], spec["role"]
    label = "both" if role == "decode" and state and state.spec.prefill is None else role
    selecting = names.selecting(service, label)
    before = scaler.get("status", {}).get("conditions", ())
    conditions, _ = written([_bound(scaler, state)], before, metadata.get("generation", 0), now)
    there = [one.roles[role] for one in state.seen if role in one.roles] if state else []
    scaled = state is not None and state.spec.autoscaling.mode != "Disabled"
    kept = ("scaling",) if scaled else ()
    return {
        # The autoscaler's to write.
        **{name: value for name, value in scaler.get("status", {}).items() if name in kept},
        "replicas": sum(one.pods for one in there),
        "selector": ",".join(f"{name}={value}" for name, value in sorted(selecting.items())),
        "conditions": conditions,
    }


def _bound(scaler: Manifest, state: State | None) -> Fact:
    service, role = scaler["spec"]["serviceName"], scaler["spec"]["role"]
    named = names.role(service, role)
    if state is None:
        return Fact("Bound", False, "NoService", f"There is no InferenceService {service} that can be run.")
    if scaler["metadata"]["name"] != named:
        return Fact("Bound", False, "OtherName", f"{service} listens to the RoleScaler {named}.")
    there = scalers.roles(state.spec).get(role)
    if there is None or there.scaling is None:
        message = f"{service} has no spec.{role}.scaling, so that its own number of replicas holds."
        return Fact("Bound", False, "NotScaled", message)
    return Fact("Bound", True, "Bound")
