"""
The desired number of workers per role: from the spec, or from its RoleScaler within the bounds of the spec.

The operator creates each RoleScaler once, with the current number of workers. After that, only an
autoscaler, its own or an external one, writes the replicas. Only the operator writes the replicas of
Deployments.
"""

from __future__ import annotations

from baton_operator import names
from baton_operator.cluster.api_resources import API as API
from baton_operator.cluster.state import ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest, owned
from baton_operator.rollout.decision import RoleName

KIND = "RoleScaler"


def roles(spec: InferenceServiceSpec) -> dict[RoleName, WorkerRole]:
    """Return the roles of a spec by name."""
    decode: dict[RoleName, WorkerRole] = {"decode": spec.decode}
    return {"prefill": spec.prefill, **decode} if spec.prefill is not None else decode


def labels_of(name: str) -> tuple[str, ...]:
    """Return the role labels of its workers. Those of a service without prefill workers have `both`."""
    return ("decode", "both") if name == "decode" else (name,)


def targets(cluster: ClusterState, spec: InferenceServiceSpec) -> dict[RoleName, int]:
    """Return the desired number of workers per role; 0 for a missing role."""
    scalers = {name: cluster.find(API, KIND, names.role(cluster.owner.name, name)) for name in roles(spec)}
    return {"prefill": 0, **{name: desired(role, scalers[name]) for name, role in roles(spec).items()}}


def scaler(cluster: ClusterState, name: RoleName, current: int) -> Manifest:
    """Return a new RoleScaler. It starts with the `current` number of workers, so the role does not jump."""
    owner = cluster.owner
    body = {"spec": {"serviceName": owner.name, "role": name, "replicas": current}}
    labels = names.of_role(owner.name, name)
    return owned(owner, API, KIND, names.role(owner.name, name), body, labels)


def scaled(role: WorkerRole, replicas: int) -> int:
    """
    Return the requested replicas within the bounds of the role.

    >>> from baton_operator.kinds.worker_role import Scaling
    >>> scaled(WorkerRole(scaling=Scaling(min_replicas=1, max_replicas=4)), 9)
    4
    """
    if role.scaling is None:
        return replicas
    return max(role.scaling.min_replicas, min(replicas, role.scaling.max_replicas))


def desired(role: WorkerRole, scaler: Manifest | None = None) -> int:
    """Return the desired number of workers. `scaler`: its RoleScaler, if it exists."""
    if role.scaling is None:
        return 1 if role.replicas is None else role.replicas
    # A new service starts with one worker, even if it may scale to zero.
    return scaled(role, scaler["spec"]["replicas"] if scaler else 1)
