"""The chart: install, test, upgrade beside a running service, uninstall and install again."""

from __future__ import annotations

from e2e.client import ask
from e2e.installation import ROOT, Installation
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.stopwatch import Stopwatch

MINIMAL = ROOT / "examples" / "minimal.yaml"
READY_S = 300


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
    kinds = "deployments,services,configmaps,networkpolicies,poddisruptionbudgets,roles,rolebindings"
    left = [one for one in cluster.objects(kinds) if one["metadata"]["name"].startswith("smollm2")]
    assert not left


def _pods(cluster: Kubernetes) -> dict[str, tuple[str, int]]:
    """Return uid and number of restarts by pod."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ())),
        )
        for pod in cluster.objects("pods")
    }
