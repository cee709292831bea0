"""What every pod has: no rights and no way to more, files that it cannot change, and a place."""

from __future__ import annotations

from collections.abc import Sequence

from baton_api import labels
from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.worker_role import Placement
from baton_operator.manifests.objects import Manifest, given

USER = 65532
"""Nobody in particular, as in distroless images."""


def pod_security() -> Manifest:
    """Of a pod, as the Pod Security Standard `restricted` wants it."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Kubelets change the owner of each of a volume's files only if that of its root differs.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def environment(*groups: Sequence[Variable]) -> list[Manifest]:
    """The variables of all groups; of two with one name the later one."""
    chosen = {variable.name: variable for group in groups for variable in group}
    return [
        given(name=one.name, value=one.value, valueFrom=one.value_from)
        if one.value or one.value_from
        else {"name": one.name, "value": ""}
        for one in chosen.values()
    ]


def field(name: str, path: str) -> Manifest:
    """A variable with what Kubernetes knows of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def placed(placement: Placement, selector: names.Labels, revision: str = labels.REVISION) -> Manifest:
    """Where a pod is placed. `selector` tells whose pods are spread, apart for each value of `revision`."""
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
            for one in placement.topology_spread
        ],
    )


def scratch(*paths: str) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts for folders that are written to."""
    volumes = [{"name": f"scratch-{number}", "emptyDir": {}} for number, _ in enumerate(paths)]
    mounts = [{"name": f"scratch-{number}", "mountPath": path} for number, path in enumerate(paths)]
    return volumes, mounts
