"""Parts that pods share: identity, environment, resources, probes, placement and disruption budgets."""

from __future__ import annotations

from collections.abc import Sequence

from baton_api import labels
from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.resources import ResourceRequirements
from baton_operator.kinds.worker_role import Placement
from baton_operator.manifests.objects import Manifest, Owner, given, owned

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
    named = [given(name=one.name, request=one.request) for one in wanted.claims]
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
                "topologyKey": one.topology_key,
                "maxSkew": one.max_skew,
                "whenUnsatisfiable": one.when_unsatisfiable,
                "labelSelector": {"matchLabels": selector},
                "matchLabelKeys": [revision],
            }
            for one in placement.topology_spread_constraints
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
