"""
How many workers each role is to have: the spec's number, or that of its RoleScaler within the spec's
bounds.

A RoleScaler is made once, with as many as there are, and then belongs to whoever scales. Nothing else of
the operator writes its number, and nobody but the operator writes those of the Deployments.
"""

from __future__ import annotations

from baton_operator import names
from baton_operator.cluster.api_resources import API as API
from baton_operator.cluster.state import ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest, made
from baton_operator.rollout.decision import RoleName

KIND = "RoleScaler"


def roles(spec: InferenceServiceSpec) -> dict[RoleName, WorkerRole]:
    """The roles of a spec, by name."""
    there: dict[RoleName, WorkerRole] = {"decode": spec.decode}
    return {"prefill": spec.prefill, **there} if spec.prefill is not None else there


def targets(cluster: ClusterState, spec: InferenceServiceSpec) -> dict[RoleName, int]:
    """How many workers each role is to have; none of a role that there is not."""
    return {"prefill": 0, **{name: _target(cluster, name, role) for name, role in roles(spec).items()}}


def scaler(cluster: ClusterState, name: RoleName, current: int) -> Manifest:
    """A role's scaler, to be made if it is not there; `current` workers are there, so nothing jumps."""
    owner = cluster.owner
    body = {"spec": {"serviceName": owner.name, "role": name, "replicas": current}}
    there = names.of_role(owner.name, name)
    return made(owner, API, KIND, names.role(owner.name, name), body, there)


def scaled(role: WorkerRole, asked: int) -> int:
    """
    What is asked for, within the bounds.

    >>> from baton_operator.kinds.worker_role import Scaling
    >>> scaled(WorkerRole(scaling=Scaling(min_replicas=1, max_replicas=4)), 9)
    4
    """
    if role.scaling is None:
        return asked
    return max(role.scaling.min_replicas, min(asked, role.scaling.max_replicas))


def _target(cluster: ClusterState, name: RoleName, role: WorkerRole) -> int:
    if role.scaling is None:
        return 1 if role.replicas is None else role.replicas
    there = cluster.find(API, KIND, names.role(cluster.owner.name, name))
    # A new service shows what it is, even one that goes to zero when nobody asks for it.
    return scaled(role, there["spec"]["replicas"] if there else 1)
