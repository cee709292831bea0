"""
A new version of the operator takes over what an older one left: no worker restarts, and none is forgotten.

`earlier_state.json.gz` holds the objects of an earlier operator in a real API server, with the field names of
today, at moments of a service's life. The moments are: during a rollout, after a rollback, with a model whose
Job is gone, and while such a Job runs.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_api import labels
from baton_operator.cluster.state import Pod
from baton_operator.crd import RESOURCES
from baton_operator.manifests.objects import key
from baton_operator.manifests.revision import Revision
from baton_operator.reconcilers.plan import OperatorDefaults
from baton_operator.rollout.revision_history import REVISION_KEY
from tests.operator.fake_cluster import FakeCluster

LEFT: dict[str, Any] = json.loads(
    gzip.decompress((Path(__file__).parent / "earlier_state.json.gz").read_bytes())
)
NOW = 1_800_000_100.0
"""A little later than it was recorded."""

PAIR: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3},
}


def left(moment: str) -> FakeCluster:
    """The cluster as the earlier operator left it, before an operator with other default images."""
    state = copy.deepcopy(LEFT[moment])
    cluster = FakeCluster(state["service"]["spec"])
    cluster.service = state["service"]
    cluster.objects = {key(one): one for one in state["objects"]}
    cluster.pods = [Pod.of(one) for one in state["pods"]]
    cluster.now = NOW
    cluster.images = OperatorDefaults("registry.example/worker:2", "registry.example/router:2")
    for pod in cluster.pods:
        if pod.ready and pod.revision:
            for role in ("prefill", "decode"):
                worker = cluster.objects["apps/v1", "Deployment", f"chat-{role}-{pod.revision}"]
                cluster.files |= cluster.wanted_files(worker)
    return cluster


def settle_while_requests_go_on(cluster: FakeCluster) -> None:
    """All weight stays on revisions that can serve, and their capacity does not shrink."""
    targets = {"prefill": 0, "decode": 0}
    for role in targets:
        part = cluster.service["spec"].get(role)
        targets[role] = part.get("replicas", 1) if part is not None else 0
    for _ in range(300):
        before = cluster.writes
        cluster.reconcile()
        weights = {one["name"]: one["weight"] for one in cluster.service["status"]["revisions"]}
        assert sum(weights.values()) == 100
        for revision, weight in weights.items():
            ready = {pod.role for pod in cluster.alive(revision) if pod.ready}
            assert not weight or ready == {"prefill", "decode"}, "requests go only to who can serve"
        for role, target in targets.items():
            ready_pods = [pod for pod in cluster.alive() if pod.role == role and pod.ready]
            assert len(ready_pods) >= target
        if not cluster.happen() and cluster.writes == before:
            break
    orphans = {
        one["metadata"]["labels"][labels.REVISION]
        for one in cluster.objects.values()
        if labels.REVISION in one["metadata"].get("labels", {})
    } - {one["name"] for one in cluster.service["status"]["revisions"]}
    assert not orphans
    for _ in range(3):
        plan = cluster.reconcile()
        assert not plan.apply and not plan.create and not plan.prune


def unknown(path: str, value: Any, schema: dict[str, Any]) -> Iterator[str]:
    """Paths of the fields that the schema does not have."""
    if isinstance(value, list):
        for item in value:
            yield from unknown(f"{path}[]", item, schema.get("items", {}))
    elif "properties" in schema:
        for name, below in value.items():
            if name in schema["properties"]:
                yield from unknown(f"{path}.{name}", below, schema["properties"][name])
            else:
                yield f"{path}.{name}"


@pytest.mark.parametrize("moment", LEFT)
def test_recorded_state_has_names_of_today_only(moment: str) -> None:
    """Others are left out by the API server, and ignored by the types."""
    schemas = {
        one.kind: one.definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        for one in RESOURCES
    }
    objects = [LEFT[moment]["service"], *LEFT[moment]["objects"]]
    own = [one for one in objects if one["kind"] in schemas]
    parts = [(one["kind"], part, one[part]) for one in own for part in ("spec", "status")]
    assert not [name for kind, part, value in parts for name in unknown(part, value, schemas[kind][part])]
    for revision in [one["data"][REVISION_KEY] for one in objects if REVISION_KEY in one.get("data", {})]:
        read = Revision.model_validate_json(revision[:-1] + ',"name":"a"}')
        assert json.loads(read.model_dump_json(by_alias=True, exclude_defaults=True)) == json.loads(revision)


@pytest.mark.parametrize("moment", LEFT)
def test_upgrade_continues_from_an_earlier_state(moment: str) -> None:
    cluster = left(moment)
    before = copy.deepcopy(cluster.service["status"])
    cluster.reconcile()
    status = cluster.service["status"]
    assert status["updateRevision"] == before["updateRevision"]
    assert {one["name"]: one["weight"] for one in status["revisions"]} == {
        one["name"]: one["weight"] for one in before["revisions"]
    }
    settle_while_requests_go_on(cluster)
    status = cluster.service["status"]
    if moment == "rolled-back":
        assert cluster.condition("Degraded") == ("True", "RolledBack")
        assert status["currentRevision"] == before["currentRevision"]
    else:
        assert cluster.condition("Ready") == ("True", "Serving")
        assert status["currentRevision"] == before["updateRevision"]


@pytest.mark.parametrize("moment", ["fetched", "rolled-back"])
def test_upgrade_of_a_service_at_rest_touches_no_worker(moment: str) -> None:
    """Neither their pods nor their templates; nor is a model fetched again that serves."""
    cluster = left(moment)
    pods = {pod.name for pod in cluster.pods if pod.revision}
    before = _worker_templates(cluster)
    settle_while_requests_go_on(cluster)
    assert {pod.name for pod in cluster.pods if pod.revision} == pods
    assert cluster.names("Job") == []
    after = _worker_templates(cluster)
    assert cluster.ticket_secret and before == after, "routers sign, and workers go on without a secret"


def _worker_templates(cluster: FakeCluster) -> dict[str, Any]:
    """Pod templates of the workers' Deployments, by name."""
    return {
        one["metadata"]["name"]: copy.deepcopy(one["spec"]["template"])
        for one in cluster.objects.values()
        if one["kind"] == "Deployment" and labels.REVISION in one["metadata"]["labels"]
    }


def test_upgrade_amid_a_fetch_takes_back_workers_without_a_model() -> None:
    """The earlier operator started them on an empty volume; they come again when the files are present."""
    cluster = left("fetching")
    new = cluster.service["status"]["updateRevision"]
    cluster.fetch_s = 1000.0
    for _ in range(30):
        cluster.reconcile()
        cluster.happen()
    assert not cluster.alive(new) and cluster.revision(new)["phase"] == "Waiting"
    cluster.fetch_s = 0.0
    settle_while_requests_go_on(cluster)
    assert cluster.service["status"]["currentRevision"] == new


def test_revision_of_old_template_version_is_rolled_out_again() -> None:
    """Its workers are found under the name that they have, and serve until others take over."""
    cluster = left("fetched")
    old = cluster.service["status"]["currentRevision"]
    memory = cluster.objects["v1", "ConfigMap", f"chat-rev-{old}"]
    generation = json.loads(memory["data"][REVISION_KEY])
    generation["blueprint"]["templateVersion"] = 0
    memory["data"] = {REVISION_KEY: json.dumps(generation)}
    cluster.reconcile()
    assert cluster.revision(old)["weight"] == 100
    settle_while_requests_go_on(cluster)
    assert cluster.service["status"]["currentRevision"] != old
    assert not [name for name in cluster.names("Deployment") if old in name]


def test_template_that_another_version_rendered_stays() -> None:
    """A rendering that has changed would restart all workers in place."""
    cluster = FakeCluster(PAIR)
    cluster.settle()
    revision = cluster.service["status"]["currentRevision"]
    worker = cluster.objects["apps/v1", "Deployment", f"chat-decode-{revision}"]
    worker["metadata"]["annotations"]["baton.dev/template"] = "of another version"
    worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 7
    before = copy.deepcopy(worker["spec"]["template"])
    cluster.change({**PAIR, "decode": {"replicas": 4}})
    cluster.settle()
    worker = cluster.objects["apps/v1", "Deployment", f"chat-decode-{revision}"]
    assert worker["spec"]["template"] == before and worker["spec"]["replicas"] == 4


def test_edited_template_is_reverted() -> None:
    cluster = FakeCluster(PAIR)
    cluster.settle()
    revision = cluster.service["status"]["currentRevision"]
    worker = cluster.objects["apps/v1", "Deployment", f"chat-decode-{revision}"]
    wished = copy.deepcopy(worker["spec"]["template"])
    worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 7
    (again,) = cluster.plan().apply
    assert again["metadata"]["name"] == f"chat-decode-{revision}" and again["spec"]["template"] == wished


def test_claim_size_makes_no_revision() -> None:
    """The size was a part of the earlier operator's revisions, which stay the same all the same."""
    cluster = left("fetched")
    spec = copy.deepcopy(cluster.service["spec"])
    spec["model"]["cache"]["size"] = "40Gi"
    cluster.change(spec)
    settle_while_requests_go_on(cluster)
    assert len(cluster.service["status"]["revisions"]) == 1
