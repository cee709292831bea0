"""Scale to zero: an idle service has no workers, and its next requests wait for them and are answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton_api import labels
from e2e import prometheus
from e2e.client import ask
from e2e.installation import Installation
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

PER_SECOND = 2
WORKERS = f"{labels.ROLE} in (prefill, decode)"


@pytest.fixture(scope="module")
def scaled(
    cluster: Kubernetes, installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubernetes]:
    """A service whose roles may scale to zero, with one worker each."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus.running(installation, cluster, folder) as url:
        installation.apply(autoscaling_windowSeconds="20")
        manifest = tiny_service(cluster, tmp_path_factory.mktemp("model"))
        for role in ("prefill", "decode"):
            del manifest["spec"][role]["replicas"]
            manifest["spec"][role]["scaling"] = {"minReplicas": 0, "maxReplicas": 2}
        manifest["spec"]["router"]["scaleFromZeroTimeout"] = "3m"
        manifest["spec"]["autoscaling"] = {
            "mode": "Internal",
            "interval": "5s",
            "scaleToZeroAfter": "1m",
            "prometheus": {"url": url},
        }
        cluster.apply(manifest)
        cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
        yield cluster
        installation.apply()


def test_idle_service_has_no_workers(scaled: Kubernetes) -> None:
    with scaled.reach(NAME) as url:
        assert ask(url, NAME)
        watch = Stopwatch("an idle service")
        until("no worker is left", lambda: not scaled.objects("pods", WORKERS), READY_S)
        watch.note("last answer -> no workers")
    assert scaled.objects("pods", f"{labels.ROLE}=router")
    for role in ("prefill", "decode"):
        conditions = scaled.object("rolescaler", f"{NAME}-{role}")["status"]["conditions"]
        assert {one["reason"] for one in conditions if one["type"] == "ScalingActive"} == {"Idle"}


def test_requests_to_a_service_at_zero_wait_for_its_workers(scaled: Kubernetes) -> None:
    with scaled.reach(NAME) as url:
        watch = Stopwatch("a service at zero")
        with Traffic(url, PER_SECOND) as traffic:
            until("twenty answers", lambda: traffic.outcome.answered >= 20, READY_S)
            watch.note("first request -> twenty answers")
    assert not traffic.outcome.failures
