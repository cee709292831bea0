"""The chart: install, test, upgrade, uninstall and install again under a service; deletion without it."""

from __future__ import annotations

from typing import Any

from baton_api import labels
from e2e.client import ask
from e2e.installation import ROOT, Installation
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import DRAIN, service
from e2e.stopwatch import Stopwatch

MINIMAL = ROOT / "examples" / "minimal.yaml"
READY_S = 300
DELETED_S = 20
"""Time limit of `kubectl delete` without an operator: nothing waits for one."""
COLLECTED_S = 120
KINDS = (
    "rolescalers,deployments,services,configmaps,networkpolicies,poddisruptionbudgets,roles,rolebindings,"
    "serviceaccounts"
)


def test_helm_test_passes(installation: Installation) -> None:
    watch = Stopwatch("the chart")
    output = installation.helm("test", "baton", "--logs")
    watch.note("helm test")
    assert "Succeeded" in output


def test_helm_upgrade_keeps_the_pods_of_services(cluster: Kubernetes, installation: Installation) -> None:
    cluster.apply(MINIMAL)
    cluster.wait("inferenceservice/smollm2", "condition=Ready", READY_S)
    before = _pods(cluster)
    watch = Stopwatch("the chart")
    installation.apply(replicas="1", resyncSeconds="5")
    watch.note("helm upgrade")
    generation = cluster.object("inferenceservice", "smollm2")["metadata"]["generation"]
    assert cluster.object("inferenceservice", "smollm2")["status"]["observedGeneration"] == generation
    assert _pods(cluster) == before
    installation.apply()


def test_services_outlive_the_operator(cluster: Kubernetes, installation: Installation) -> None:
    before = _pods(cluster)
    watch = Stopwatch("the chart")
    installation.helm("uninstall", "baton", "--wait")
    watch.note("helm uninstall")
    operators = "app.kubernetes.io/instance=baton"
    until("the operator is gone", lambda: not installation.cluster.objects("pods", operators), 60)
    assert _pods(cluster) == before
    with cluster.reach("smollm2") as url:
        assert ask(url, "smollm2")
    installation.apply()
    watch.note("helm install, again")
    assert _pods(cluster) == before


def test_deleted_service_leaves_no_objects(cluster: Kubernetes, installation: Installation) -> None:
    watch = Stopwatch("examples/minimal.yaml")
    cluster.kubectl("delete", "bsvc", "smollm2", "--cascade=foreground", timeout_s=240)
    watch.note("deleted, with all of its objects")
    assert not _left(cluster)


def test_services_are_deleted_without_an_operator(cluster: Kubernetes, installation: Installation) -> None:
    for name in ("one", "two"):
        manifest = service()
        manifest["metadata"]["name"] = name
        manifest["spec"]["decode"] = {"scaling": {"minReplicas": 1, "maxReplicas": 2}, "drain": DRAIN}
        manifest["spec"]["autoscaling"] = {"mode": "External"}
        cluster.apply(manifest)
    for name in ("one", "two"):
        cluster.wait(f"bsvc/{name}", "condition=Ready", READY_S)
    installation.helm("uninstall", "baton", "--wait")
    print(cluster.kubectl("get", "bsvc,rolescalers"))
    watch = Stopwatch("without an operator")
    print(cluster.kubectl("delete", "bsvc", "--all", timeout_s=DELETED_S))
    watch.note("kubectl delete bsvc --all")
    until("Kubernetes has deleted their objects", lambda: not _left(cluster), COLLECTED_S)
    watch.note("-> Kubernetes has deleted their objects")
    until("no pod is left", lambda: not cluster.objects("pods"), COLLECTED_S)
    watch.note("-> no pod is left")
    installation.apply()


def _left(cluster: Kubernetes) -> list[Any]:
    """Return the objects of services, without pods."""
    return cluster.objects(KINDS, f"{labels.MANAGED_BY}={labels.OPERATOR}")


def _pods(cluster: Kubernetes) -> dict[str, tuple[str, int]]:
    """Return uid and number of restarts by pod."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ())),
        )
        for pod in cluster.objects("pods")
    }
