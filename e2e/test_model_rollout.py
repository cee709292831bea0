"""A rollout under load to a model whose download onto a volume takes five minutes: no request fails."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import node
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, node_address, service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic
from tests.engine import hub
from tests.engine.models import make_model

PER_SECOND = 20
DOWNLOAD_S = 300
"""More than workers without a model need to crash three times."""

USER = 65532
"""User of Baton's pods, which write to the volume."""

CLASS = "e2e-model"
"""Storage class of this test's volume only. The claim is bound by this name; there is no provisioner."""


@pytest.fixture
def volume(cluster: Kubernetes, tmp_path: Path) -> Iterator[None]:
    """A volume for the claim of the service's model: a folder of the node."""
    node.needed()
    folder = tmp_path / "volume"
    folder.mkdir()
    os.chown(folder, USER, USER)
    for above in folder.parents:
        if above.stat().st_mode & 0o001 == 0:
            above.chmod(above.stat().st_mode | 0o011)  # pytest's own folders are closed to other users
    name = f"{cluster.namespace}-model"
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": CLASS,
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
    )
    yield
    cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


def test_rollout_to_a_slow_model_fails_no_request(cluster: Kubernetes, volume: None, tmp_path: Path) -> None:
    address = node_address(cluster)
    quick, slow = tmp_path / "quick", tmp_path / "slow"
    make_model(quick)
    make_model(slow)
    with (
        hub.serving(quick, "relay/quick", [], host=address) as near,
        hub.serving(slow, "relay/slow", [], host=address, weights_s=DOWNLOAD_S) as far,
    ):
        manifest = service()
        manifest["spec"]["model"] = _model(cluster, "quick", near)
        cluster.apply(manifest)
        cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
        old = _status(cluster)["currentRevision"]

        with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
            until("twenty answers before the change", lambda: traffic.outcome.answered > 20, 60)
            watch, began = Stopwatch("a rollout to a slow model"), time.monotonic()
            cluster.patch(f"bsvc/{NAME}", {"spec": {"model": _model(cluster, "slow", far)}})
            until("the new revision waits", lambda: _phase(cluster) == "Waiting", READY_S)
            watch.note("changed -> it waits for its model")
            new = _status(cluster)["updateRevision"]
            until("its model is available", lambda: _has_model(cluster, old, new), DOWNLOAD_S + READY_S)
            assert time.monotonic() - began >= DOWNLOAD_S
            watch.note("-> the model is available")
            until("it serves", lambda: _status(cluster)["currentRevision"] == new, READY_S)
            watch.note("-> the new revision serves")
            until("the old revision is gone", lambda: not _pods(cluster, old), READY_S)
            watch.note("-> the old revision is gone")

    print(f"\n{traffic.outcome}")
    assert traffic.outcome.answered > PER_SECOND * DOWNLOAD_S / 2
    assert not traffic.outcome.failures
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", 30)
    status = _status(cluster)
    assert status["model"]["resolvedRevision"] == hub.COMMIT
    assert not [one for one in status["revisions"] if one["phase"] == "Failed"]


def _model(cluster: Kubernetes, name: str, endpoint: str) -> dict[str, Any]:
    """Return `spec.model` for a model of a hub, and create the Secret with the address of that hub."""
    secret = f"hub-{name}"
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": secret},
            "stringData": {"HF_ENDPOINT": endpoint},
        }
    )
    return {
        "uri": f"hf://relay/{name}",
        "credentialsSecretRef": {"name": secret},
        "cache": {"type": "PVC", "size": "1Gi", "storageClassName": CLASS},
    }


def _has_model(cluster: Kubernetes, old: str, new: str) -> bool:
    """Return whether the model is available. Before, the old revision serves, and the new one has no pod."""
    status = _status(cluster)
    phases = {one["name"]: one["phase"] for one in status["revisions"]}
    assert phases[new] != "Failed", status["revisions"]
    if phases[new] != "Waiting":
        return True
    assert status["currentRevision"] == old
    assert not _pods(cluster, new)
    return False


def _phase(cluster: Kubernetes) -> str:
    status = _status(cluster)
    phases: dict[str, str] = {one["name"]: one["phase"] for one in status["revisions"]}
    return phases[status["updateRevision"]]


def _status(cluster: Kubernetes) -> Any:
    return cluster.object("bsvc", NAME)["status"]


def _pods(cluster: Kubernetes, revision: str) -> list[Any]:
    return cluster.objects("pods", f"baton.dev/revision={revision}")
