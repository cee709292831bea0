"""Evidence of a failed test: objects, events and logs of its namespaces, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e.kubernetes import Kubernetes, Refused

VIEWS = {
    "objects.txt": ("get", "all,configmaps,endpointslices,networkpolicies,pdb", "--output=wide"),
    "services.yaml": ("get", "inferenceservices,batchjobs", "--output=yaml"),
    "pods.txt": ("describe", "pods"),
    "events.txt": ("get", "events", "--sort-by=.lastTimestamp"),
}


def gather(clusters: Sequence[Kubernetes], folder: Path) -> None:
    """Write one file per view. If a command fails, its file contains the error."""
    for cluster in clusters:
        own = folder / cluster.namespace
        own.mkdir(parents=True, exist_ok=True)
        for name, view in VIEWS.items():
            (own / name).write_text(_output(cluster, *view))
        for pod in _output(cluster, "get", "pods", "--output=name").split():
            name = pod.removeprefix("pod/")
            (own / f"{name}.log").write_text(
                _output(cluster, "logs", name, "--all-containers", "--tail=2000")
            )
            before = _output(cluster, "logs", name, "--all-containers", "--previous", "--tail=500")
            (own / f"{name}.before.log").write_text(before)


def _output(cluster: Kubernetes, *arguments: str) -> str:
    try:
        return cluster.kubectl(*arguments)
    except Refused as error:
        return f"{error}\n"
