"""
Parts that pods share: identity, environment, ports, resources, probes, placement and disruption budgets.

Ports are fixed in the network of a pod. With `hostNetwork`, all pods of a node share its ports, and
Kubernetes places a pod only where its ports are free. Each role of each revision therefore has its own
ports: prefill and decode workers, old and new revisions, and several services fit on one node. Two workers of
the same role and revision still need two nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api import labels
from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.resources import ResourceRequirements
from baton_operator.kinds.worker_role import Placement, WorkerRole
from baton_operator.manifests.objects import Manifest, Owner, given, owned
from baton_operator.manifests.revision import Revision

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Ports for `hostNetwork`: below NodePorts and the ephemeral ports of Linux."""

PORTS_OF_ROLE = 5
PORTS_OF_REVISION = 2 * PORTS_OF_ROLE

VLLM_SIDE_CHANNEL_PORT = 5600
SGLANG_BOOTSTRAP_PORT = 8998
RENDEZVOUS_PORT = 29_501

# The default ports of vLLM and SGLang, which clients of their KV events expect.
KV_EVENTS_PORT = 5557
KV_REPLAY_PORT = 5558


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on which one worker listens."""

    http: int
    health: int
    """For engine Baton. Of other engines, the nodes of one worker find one another here."""
    kv_events: int
    kv_replay: int
    control: int
    """Where other workers request blocks: the control server of Baton, NIXL's side channel of vLLM, the
    bootstrap server of SGLang."""


def ports(owner: Owner, revision: Revision, role: Role) -> Ports:
    """Return the ports of the workers of a role and revision."""
    if not in_node_network(revision.blueprint.roles[role]):
        return in_pod_network(revision)
    name = f"{owner.namespace}/{owner.name}/{revision.name}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    blocks = (LAST_PORT + 1 - FIRST_PORT) // PORTS_OF_REVISION
    first = FIRST_PORT + number % blocks * PORTS_OF_REVISION + (0 if role is Role.PREFILL else PORTS_OF_ROLE)
    return Ports(*range(first, first + PORTS_OF_ROLE))


def in_pod_network(revision: Revision) -> Ports:
    """Return the ports of workers that have a network of their own."""
    match revision.blueprint.engine.type:
        case "vLLM":
            control = VLLM_SIDE_CHANNEL_PORT
        case "SGLang":
            control = SGLANG_BOOTSTRAP_PORT
        case _:
            control = revision.blueprint.transfer.control_port
            events = names.KV_EVENTS_PORT, names.KV_REPLAY_PORT
            return Ports(names.HTTP_PORT, names.HEALTH_PORT, *events, control)
    return Ports(names.HTTP_PORT, RENDEZVOUS_PORT, KV_EVENTS_PORT, KV_REPLAY_PORT, control)


def in_node_network(role: WorkerRole) -> bool:
    """Whether the role's podTemplate sets `hostNetwork`."""
    return ((role.pod_template or {}).get("spec") or {}).get("hostNetwork") is True


USER = 65532
"""The user of distroless images, without rights on the node."""


def identity(account: str, pull_secrets: Sequence[str], *, token: bool = False) -> Manifest:
    """Return account and security context of a pod, as the Pod Security Standard `restricted` requires."""
    return {
        "serviceAccountName": account,
        "automountServiceAccountToken": token,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # Kubelets change the owner of each of a volume's files only if that of its root differs.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **given(imagePullSecrets=[{"name": name} for name in pull_secrets]),
    }


def container_security() -> Manifest:
    """Return the security context of a container, as `restricted` requires."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def environment(*groups: Sequence[Variable]) -> list[Manifest]:
    """Return the variables of all groups. A later variable replaces an earlier one of the same name."""
    chosen = {variable.name: variable for group in groups for variable in group}
    return [
        given(name=one.name, value=one.value, valueFrom=one.value_from)
        if one.value or one.value_from
        else {"name": one.name, "value": ""}
        for one in chosen.values()
    ]


def resources(wanted: ResourceRequirements, claims: Sequence[str] = ()) -> Manifest:
    """Return the resources of a container. `claims`: those that it uses if it names none."""
    named = [given(name=claim.name, request=claim.request) for claim in wanted.claims]
    return given(
        requests=wanted.requests, limits=wanted.limits, claims=named or [{"name": name} for name in claims]
    )


def field(name: str, path: str) -> Manifest:
    """Return a variable that Kubernetes sets from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def from_secret(name: str, secret: str, key: str, *, optional: bool = False) -> Manifest:
    """Return a variable that kubelets read from a Secret."""
    reference = {"name": secret, "key": key, **({"optional": True} if optional else {})}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def all_of_secret(secret: SecretReference | None) -> Manifest:
    """Return `envFrom` with all keys of a Secret; empty without one."""
    return {"envFrom": [{"secretRef": {"name": secret.name}}]} if secret else {}


def probe(path: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def placed(placement: Placement, selector: names.Labels, revision: str = labels.REVISION) -> Manifest:
    """
    Return the scheduling fields of a pod.

    `selector`: labels of the pods to spread, separately for each value of the label `revision`.
    """
    return given(
        nodeSelector=dict(placement.node_selector),
        tolerations=list(placement.tolerations),
        affinity=placement.affinity,
        priorityClassName=placement.priority_class_name,
        runtimeClassName=placement.runtime_class_name,
        schedulerName=placement.scheduler_name,
        topologySpreadConstraints=[
            {
                "topologyKey": constraint.topology_key,
                "maxSkew": constraint.max_skew,
                "whenUnsatisfiable": constraint.when_unsatisfiable,
                "labelSelector": {"matchLabels": selector},
                "matchLabelKeys": [revision],
            }
            for constraint in placement.topology_spread_constraints
        ],
    )


def scratch(*paths: str, sizes: Sequence[str] = ()) -> tuple[list[Manifest], list[Manifest]]:
    """
    Return volumes and mounts for folders that the container writes to.

    `sizes` are their limits in the order of `paths`; folders beyond them have none. Kubernetes evicts a pod
    that exceeds one.
    """
    limits = [given(sizeLimit=size) for size in (*sizes, *[""] * (len(paths) - len(sizes)))]
    volumes = [{"name": f"scratch-{number}", "emptyDir": limit} for number, limit in enumerate(limits)]
    mounts = [{"name": f"scratch-{number}", "mountPath": path} for number, path in enumerate(paths)]
    return volumes, mounts


def disruption_budget(owner: Owner, role: str, max_unavailable: int) -> Manifest:
    """Return the PodDisruptionBudget of a role, over all revisions."""
    body = {
        "maxUnavailable": max_unavailable,
        "selector": {"matchLabels": names.selecting(owner.name, role)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a pod that never gets ready must not hold up a drain
    }
    name, pod_labels = names.role(owner.name, role), names.of_role(owner.name, role)
    return owned(owner, "policy/v1", "PodDisruptionBudget", name, {"spec": body}, pod_labels)
