"""The plan for an InferenceService: what it makes of a spec, and the laws that it keeps to."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest

from baton_api import labels
from baton_operator.cluster.api_resources import PRUNED
from baton_operator.cluster.state import ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.exposure import CERTIFICATE_API, GATEWAY_API
from baton_operator.manifests.objects import key
from baton_operator.manifests.revision import Blueprint
from baton_operator.manifests.routers import SPEC_GENERATION
from baton_operator.reconcilers.plan import OperatorDefaults, plan_service
from tests.operator.fake_cluster import IMAGES, FakeCluster
from tests.seeds import seeds

MINIMAL: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "decode": {}}
PAIR: dict[str, Any] = {**MINIMAL, "prefill": {"replicas": 2}, "decode": {"replicas": 3}}
HUB: dict[str, Any] = {
    "model": {"uri": "hf://org/model", "cache": {"type": "PVC", "size": "20Gi"}},
    "prefill": {},
    "decode": {},
}


def settled(spec: dict[str, Any], seed: int = 0) -> FakeCluster:
    cluster = FakeCluster(spec, seed=seed)
    cluster.settle()
    return cluster


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(spec)
    *parents, last = path.split(".")
    where = copied
    for name in parents:
        where = where.setdefault(name, {})
    where[last] = value
    return copied


def test_plan_pair_makes_workers_routers_and_supporting_objects() -> None:
    cluster = settled(PAIR)
    revision = cluster.service["status"]["currentRevision"]
    assert cluster.names("Deployment") == [
        f"chat-decode-{revision}",
        f"chat-prefill-{revision}",
        "chat-router",
    ]
    assert cluster.names("Service") == ["chat", f"chat-decode-{revision}", f"chat-prefill-{revision}"]
    assert cluster.names("PodDisruptionBudget") == ["chat-decode", "chat-prefill"]
    assert cluster.names("NetworkPolicy") == ["chat-router", f"chat-workers-{revision}"]
    assert cluster.names("ConfigMap") == [f"chat-rev-{revision}", "chat-router"]
    assert cluster.names("ServiceAccount") == ["chat-router", "chat-workers"]
    assert cluster.condition("Ready") == ("True", "Serving")
    shown = [cluster.message(type) for type in ("PrefillReady", "DecodeReady", "RouterReady")]
    assert shown == ["2/2 ready", "3/3 ready", "1/1 ready"]
    status = cluster.service["status"]
    assert status["url"] == "http://chat.models.svc.cluster.local"
    assert status["modelName"] == "chat"


@pytest.mark.parametrize("page", [False, True])
def test_routers_show_a_page_only_where_it_is_wanted(page: bool) -> None:
    cluster = settled(changed(PAIR, "router.dashboard", page))
    pod = cluster.objects["apps/v1", "Deployment", "chat-router"]["spec"]["template"]["spec"]
    assert ("--dashboard" in pod["containers"][0]["args"]) is page


def test_without_prefill_workers_decode_workers_do_both() -> None:
    cluster = settled(MINIMAL)
    (worker,) = [name for name in cluster.names("Deployment") if name != "chat-router"]
    assert worker.startswith("chat-both-")
    container = cluster.objects["apps/v1", "Deployment", worker]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][:2] == ["serve", "smollm2"]
    assert "prefill" not in cluster.service["status"]


@pytest.mark.parametrize(
    ("decode", "flags", "accelerators"),
    [
        ({}, [], None),
        ({"parallelism": {"tensor": 2}}, ["--tensor-parallel-size=2"], None),
        (
            {"parallelism": {"tensor": 4}, "resources": {"limits": {"nvidia.com/gpu": 4}}},
            ["--tensor-parallel-size=4"],
            "4",
        ),
    ],
    ids=["one", "processes", "accelerators"],
)
def test_plan_worker_gets_its_degree_and_accelerators(
    decode: dict[str, Any], flags: list[str], accelerators: str | None
) -> None:
    cluster = settled(changed(MINIMAL, "decode", decode))
    (worker,) = [name for name in cluster.names("Deployment") if name != "chat-router"]
    container = cluster.objects["apps/v1", "Deployment", worker]["spec"]["template"]["spec"]["containers"][0]
    assert [flag for flag in container["args"] if "parallel" in flag] == flags
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu") == accelerators


def test_everything_belongs_to_the_service_and_says_so() -> None:
    cluster = settled(HUB)
    for manifest in cluster.objects.values():
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "models"
        assert metadata["ownerReferences"][0]["uid"] == "uid-1"
        assert metadata["labels"][labels.SERVICE] == "chat"
        assert metadata["labels"][labels.MANAGED_BY] == labels.OPERATOR
        assert len(metadata["name"]) <= 63


def test_pods_can_do_nothing_that_they_need_not() -> None:
    cluster = settled(HUB)
    pods = [
        one["spec"]["template"]["spec"]
        for one in cluster.objects.values()
        if "template" in one.get("spec", {})
    ]
    assert len(pods) == 4
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostIPC", "hostPID"} & pod.keys()
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    assert sum(pod["automountServiceAccountToken"] for pod in pods) == 1, "the routers'"


def test_plan_model_is_fetched_before_workers_start() -> None:
    cluster = FakeCluster(HUB)
    cluster.reconcile()
    assert cluster.names("PersistentVolumeClaim") == ["chat-model"]
    cluster.reconcile()
    assert len(cluster.names("Job")) == 1
    replicas = {
        one["spec"]["replicas"] for one in cluster._deployments() if "router" not in one["metadata"]["name"]
    }
    assert replicas <= {0}
    assert cluster.condition("ModelReady") == ("False", "Fetching")
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving")
    job = cluster.names("Job")[0]
    del cluster.objects["batch/v1", "Job", job]  # its time is over
    cluster.settle()
    assert cluster.names("Job") == [] and cluster.condition("Ready") == ("True", "Serving")


SPECS = {
    "minimal": MINIMAL,
    "pair": PAIR,
    "fetched": HUB,
    "scaled": changed(
        changed(PAIR, "decode", {"scaling": {"minReplicas": 1, "maxReplicas": 4}}),
        "autoscaling.mode",
        "External",
    ),
    "exposed": changed(
        PAIR, "exposure", {"type": "Ingress", "hosts": ["a.example"], "tls": {"secretName": "s"}}
    ),
    "overlaid": changed(
        PAIR, "decode.podTemplate", {"spec": {"containers": [{"name": "main", "tty": True}]}}
    ),
    "quantities": changed(
        PAIR,
        "decode.resources",
        {"requests": {"cpu": "1000m"}, "limits": {"memory": "4096Mi", "rdma/hca": 2}},
    ),
    "open": changed(PAIR, "security.networkPolicy", False),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_plan_settled_service_has_no_actions(spec: dict[str, Any], seed: int) -> None:
    cluster = settled(spec, seed)
    writes = cluster.writes
    for _ in range(3):
        plan = cluster.reconcile()
        assert not plan.apply and not plan.create and not plan.prune
        cluster.later(3600)
    assert cluster.writes == writes


@pytest.mark.parametrize("seed", range(10))
def test_plan_order_of_objects_does_not_matter(seed: int) -> None:
    cluster = FakeCluster(PAIR, seed=seed)
    for _ in range(seed * 2):
        cluster.reconcile()
        cluster.happen()
    one, other = cluster.plan(), cluster.plan()  # each observes in another order
    assert (one.apply, one.create, one.prune, one.again_s) == (
        other.apply,
        other.create,
        other.prune,
        other.again_s,
    )


def test_plan_fields_added_by_kubernetes_are_kept() -> None:
    cluster = settled(PAIR)
    for manifest in cluster.objects.values():
        manifest["metadata"]["resourceVersion"] = "12"
        manifest["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
        manifest["status"] = {"observedGeneration": 1}
        for container in manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            container["terminationMessagePath"] = "/dev/termination-log"
    assert not cluster.plan().apply


def test_plan_foreign_changes_are_reverted() -> None:
    cluster = settled(PAIR)
    name = next(name for name in cluster.names("Deployment") if "prefill" in name)
    cluster.objects["apps/v1", "Deployment", name]["spec"]["replicas"] = 9
    (again,) = cluster.plan().apply
    assert again["metadata"]["name"] == name and again["spec"]["replicas"] == 2
    del cluster.objects["v1", "Service", "chat"]
    assert {one["metadata"]["name"] for one in cluster.plan().apply} == {name, "chat"}


def test_plan_removed_field_is_removed_from_the_object() -> None:
    cluster = settled(changed(PAIR, "router.placement", {"nodeSelector": {"disk": "fast"}}))
    cluster.change(PAIR)
    (router,) = cluster.plan().apply
    assert "nodeSelector" not in router["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("path", "value", "same"),
    [
        ("decode.replicas", 5, True),
        ("decode.podDisruptionBudget", {"maxUnavailable": 2}, True),
        ("decode.updateStrategy", {"maxSurge": 2}, True),
        ("router.replicas", 3, True),
        ("exposure", {"type": "Ingress", "hosts": ["a.example"]}, True),
        ("rollout.progressDeadline", "1m", True),
        ("security.networkPolicy", False, True),
        ("model.name", "another", False),
        ("model.uri", "hf://a/b", False),
        ("engine.maxModelLen", 1024, False),
        ("transfer.backend", "TCP", False),
        ("decode.resources", {"requests": {"cpu": 2}}, False),
        ("decode.drain", {"timeout": "1m"}, False),
        ("prefill", {}, True),
        ("prefill.args", ["--threads=2"], False),
    ],
)
def test_revision_changes_only_with_worker_fields(path: str, value: Any, same: bool) -> None:
    def revision(spec: dict[str, Any]) -> str:
        return Blueprint.of("chat", InferenceServiceSpec.model_validate(spec)).digest

    assert (revision(changed(PAIR, path, value)) == revision(PAIR)) is same


def test_revision_names_are_stable_across_releases() -> None:
    """If this fails, an upgrade replaces all workers, unless revisions are found by their content."""
    names = {
        name: Blueprint.of("chat", InferenceServiceSpec.model_validate(spec)).digest
        for name, spec in SPECS.items()
    }
    assert names == NAMES


NAMES = {
    "minimal": "7be3a9c9",
    "pair": "07874325",
    "fetched": "e43c2b93",
    "scaled": "07874325",
    "exposed": "07874325",
    "overlaid": "35fb887c",
    "quantities": "b7b13440",
    "open": "07874325",
}


def test_plan_new_default_image_keeps_workers() -> None:
    cluster = settled(PAIR)
    plan = plan_service(
        cluster.observe(), OperatorDefaults("registry.example/worker:2", IMAGES.router), cluster.now
    )
    assert not plan.apply


@pytest.mark.parametrize("seed", seeds(20, quick=10))
def test_rollout_never_prunes_serving_objects_nor_loses_workers(seed: int) -> None:
    cluster = settled(PAIR, seed)
    rng = random.Random(seed)
    specs = [changed(PAIR, "engine.maxModelLen", length) for length in (1024, 2048)]
    cluster.change(specs[0])
    for turn in range(600):
        if turn == rng.randint(3, 30):
            cluster.change(specs[1])
        alive = {pod.revision for pod in cluster.pods}
        weights = {one["name"]: one["weight"] for one in cluster.service["status"]["revisions"]}
        objects, before = dict(cluster.objects), cluster.writes
        for gone in cluster.reconcile().prune:
            revision = objects[gone]["metadata"]["labels"].get(labels.REVISION)
            assert revision not in alive and not weights.get(revision, 0)
        ready = [pod for pod in cluster.pods if pod.ready and not pod.terminating]
        assert sum(pod.role == "decode" for pod in ready) >= 3
        assert sum(pod.role == "prefill" for pod in ready) >= 2
        if not cluster.happen() and cluster.writes == before and turn > 30:
            break
    assert cluster.condition("Ready") == ("True", "Serving")
    assert cluster.service["status"]["currentRevision"] == cluster.service["status"]["updateRevision"]
    assert len([name for name in cluster.names("Deployment") if name != "chat-router"]) == 2


def test_rollout_each_role_keeps_its_own_bounds() -> None:
    """Only prefill may lose a worker before another one is ready; decode may only have one more."""
    spec = changed(PAIR, "prefill.updateStrategy", {"maxSurge": 0, "maxUnavailable": 1})
    spec = changed(spec, "decode.updateStrategy", {"maxSurge": 2, "maxUnavailable": 0})
    cluster = settled(spec)
    old = cluster.service["status"]["currentRevision"]
    cluster.change(changed(spec, "engine.maxModelLen", 1024))
    cluster.reconcile()
    replicas = {
        (one["metadata"]["labels"][labels.ROLE], one["metadata"]["labels"][labels.REVISION] == old):
        one["spec"]["replicas"]
        for one in cluster.objects.values()
        if one["kind"] == "Deployment" and labels.REVISION in one["metadata"]["labels"]
    }  # fmt: skip
    assert replicas == {
        ("prefill", True): 1, ("prefill", False): 1, ("decode", True): 3, ("decode", False): 2,
    }  # fmt: skip


def test_rollout_crashing_revision_is_rolled_back_once() -> None:
    cluster = settled(PAIR)
    good = cluster.service["status"]["currentRevision"]
    bad = changed(PAIR, "engine.args", ["--nonsense"])
    cluster.broken.add(Blueprint.of("chat", InferenceServiceSpec.model_validate(bad)).digest)
    cluster.change(bad)
    cluster.settle()
    assert cluster.condition("Degraded") == ("True", "RolledBack")
    assert cluster.condition("Progressing") == ("False", "RolloutFailed")
    assert cluster.service["status"]["currentRevision"] == good
    assert "started" in cluster.message("Degraded"), "also long after it failed"
    assert {pod.revision for pod in cluster.pods if pod.role != "router"} == {good}
    cluster.change(PAIR)
    cluster.settle()
    assert cluster.condition("Degraded")[0] == "False" and cluster.condition("Ready") == ("True", "Serving")


def test_progress_deadline_excludes_pauses_and_canary_steps() -> None:
    """Neither a long pause nor a canary's long step makes a revision fail when it gets more replicas."""
    policy = {"canary": {"steps": [{"weight": 10, "pause": "100s"}]}, "progressDeadline": "1m"}
    cluster = settled(changed(PAIR, "rollout", policy))
    old = cluster.service["status"]["currentRevision"]
    next_one = changed(changed(PAIR, "engine.maxModelLen", 1024), "rollout", {**policy, "paused": True})
    cluster.change(next_one)
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "Paused")
    cluster.later(86_400)
    cluster.change(changed(next_one, "rollout.paused", False))
    cluster.settle()
    status = cluster.service["status"]
    assert status["currentRevision"] == old and status["revisions"][0]["weight"] == 10, (
        "it stands on its step"
    )
    cluster.later(101)
    cluster.settle()
    assert cluster.condition("Degraded")[0] == "False"
    assert cluster.condition("Ready") == ("True", "Serving")
    assert cluster.service["status"]["currentRevision"] != old


def test_rollout_past_progress_deadline_fails() -> None:
    cluster = settled(changed(PAIR, "rollout", {"progressDeadline": "1m"}))
    old = cluster.service["status"]["currentRevision"]
    cluster.change(changed(changed(PAIR, "engine.maxModelLen", 1024), "rollout.progressDeadline", "1m"))
    for _ in range(3):  # its Deployments exist; none of its pods gets ready
        cluster.reconcile()
    cluster.later(61)
    cluster.reconcile()
    assert cluster.condition("Degraded") == ("True", "RolledBack")
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] == old


def test_rollout_rollback_to_named_revision() -> None:
    cluster = settled(PAIR)
    first = cluster.service["status"]["currentRevision"]
    cluster.change(changed(PAIR, "engine.maxModelLen", 1024))
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] != first
    cluster.change(changed(changed(PAIR, "engine.maxModelLen", 1024), "rollout.rollbackTo", first))
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] == first


def test_plan_paused_canary_keeps_its_weights() -> None:
    """A rollout continues from the weights of the status, and the operator plans again in time."""
    policy = {"canary": {"steps": [{"weight": 10, "pause": "100s"}]}}
    cluster = settled(changed(PAIR, "rollout", policy))
    old = cluster.service["status"]["currentRevision"]
    next_one = changed(changed(PAIR, "engine.maxModelLen", 1024), "rollout", policy)
    for spec in (next_one, changed(next_one, "rollout.paused", True)):
        cluster.change(spec)
        cluster.settle()
        plan = cluster.plan()
        assert plan.state is not None
        weights = {name: fate.weight for name, fate in plan.state.revision_plans.items()}
        assert weights == {old: 90, plan.state.target.name: 10}
        assert {one.revision: one.weight for one in plan.state.seen} == weights
        assert plan.again_s is not None and 0 < plan.again_s <= 100


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_plan_routers_are_as_many_as_the_spec_says(replicas: int) -> None:
    """Two or more have a budget, of which one may be disrupted; workers get no token of the API server."""
    cluster = settled(changed(PAIR, "router.replicas", replicas))
    router = cluster.objects["apps/v1", "Deployment", "chat-router"]
    assert router["spec"]["replicas"] == replicas
    assert router["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGES.router
    assert router["metadata"]["annotations"][SPEC_GENERATION] == "1"
    budget = cluster.objects.get(("policy/v1", "PodDisruptionBudget", "chat-router"))
    assert (budget is not None) is (replicas > 1)
    assert budget is None or budget["spec"]["maxUnavailable"] == 1
    account = cluster.objects["v1", "ServiceAccount", "chat-workers"]
    assert account["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("spec", "roles"), [(MINIMAL, ["both"]), (PAIR, ["decode", "prefill"])])
def test_plan_budgets_select_the_workers_of_their_role(spec: dict[str, Any], roles: list[str]) -> None:
    cluster = settled(spec)
    assert cluster.names("PodDisruptionBudget") == [f"chat-{role}" for role in roles]
    for role in roles:
        budget = cluster.objects["policy/v1", "PodDisruptionBudget", f"chat-{role}"]["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"][labels.ROLE] == role


@pytest.mark.parametrize("revisions", [0, 1, 2])
def test_plan_unknown_rollback_names_the_known_revisions(revisions: int) -> None:
    cluster, names = FakeCluster(PAIR), []
    for number in range(revisions):
        cluster.change(changed(PAIR, "engine.maxModelLen", 1024 + number))
        cluster.settle()
        names.append(cluster.service["status"]["currentRevision"])
    cluster.change(changed(PAIR, "rollout.rollbackTo", "00000000"))
    with pytest.raises(ValueError, match=rf": {', '.join(sorted(names)) or 'none'}\.$"):
        cluster.plan()


def test_plan_ingress_certificate_needs_cert_manager() -> None:
    exposure = {"type": "Ingress", "hosts": ["chat.example.org"], "tls": {"issuerRef": {"name": "issuer"}}}
    cluster = settled(changed(PAIR, "exposure", exposure))
    assert cluster.condition("SpecSupported") == ("False", "ApiMissing")
    assert CERTIFICATE_API in cluster.message("SpecSupported") and cluster.names("Certificate") == []
    cluster.apis = frozenset({CERTIFICATE_API})
    cluster.settle()
    assert cluster.condition("SpecSupported")[0] == "True" and cluster.names("Certificate") == ["chat"]
    route = {**exposure, "type": "HTTPRoute", "gatewayRefs": [{"name": "gateway"}]}
    other = FakeCluster(changed(PAIR, "exposure", route))
    other.apis = frozenset({GATEWAY_API})
    other.settle()
    assert other.condition("SpecSupported")[0] == "True", "a Certificate of a route is its Gateway's"


def test_rollout_rollback_to_unknown_revision_is_an_error() -> None:
    cluster = settled(PAIR)
    cluster.change(changed(PAIR, "rollout.rollbackTo", "00000000"))
    with pytest.raises(ValueError, match=r"rollbackTo: 00000000"):
        cluster.plan()


def test_plan_revision_history_is_limited() -> None:
    cluster = settled(changed(PAIR, "rollout.revisionHistoryLimit", 2))
    created = []
    for length in range(1000, 1005):
        spec = changed(changed(PAIR, "rollout.revisionHistoryLimit", 2), "engine.maxModelLen", length)
        cluster.change(spec)
        cluster.settle()
        created.append(cluster.service["status"]["currentRevision"])
    kept = [name.rpartition("-")[2] for name in cluster.names("ConfigMap") if "-rev-" in name]
    assert sorted(kept) == sorted(created[-3:]), "the newest"
    cluster.change(changed(spec, "rollout.rollbackTo", created[-2]))
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] == created[-2]


def test_plan_scaled_role_starts_from_current_replicas_in_bounds() -> None:
    cluster = settled(changed(PAIR, "decode.replicas", 3))
    cluster.change(SPECS["scaled"])
    cluster.settle()
    scaler = cluster.objects["baton.dev/v1alpha1", "RoleScaler", "chat-decode"]
    assert scaler["spec"]["replicas"] == 3, "nothing jumps when scaling is switched on"
    scaler["spec"]["replicas"] = 9
    cluster.settle()
    assert cluster.service["status"]["decode"]["desiredReplicas"] == 4
    assert scaler["spec"]["replicas"] == 9, "the number belongs to whoever scales"


def test_plan_suspended_service_keeps_all_but_its_pods() -> None:
    cluster = settled(PAIR)
    cluster.change(changed(PAIR, "suspend", True))
    cluster.settle()
    assert not cluster.pods and cluster.condition("Ready") == ("False", "Suspended")
    assert "chat" in cluster.names("Service")
    cluster.change(PAIR)
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving")


def test_plan_missing_api_is_reported_and_the_rest_is_made() -> None:
    route = {"type": "HTTPRoute", "hosts": ["a.example"], "gatewayRefs": [{"name": "g"}]}
    cluster = settled(changed(PAIR, "exposure", route))
    assert cluster.condition("SpecSupported") == ("False", "ApiMissing")
    assert cluster.names("HTTPRoute") == [] and cluster.condition("Ready") == ("True", "Serving")
    cluster.apis = frozenset({GATEWAY_API})
    cluster.settle()
    assert cluster.condition("SpecSupported")[0] == "True" and cluster.names("HTTPRoute") == ["chat"]


def test_plan_object_of_unpruned_kind_stays() -> None:
    cluster = settled(HUB)
    other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "labels": {}}}
    cluster.objects[key(other)] = other
    assert "Secret" not in PRUNED and not cluster.plan().prune


def test_plan_leaves_its_inputs_unchanged() -> None:
    cluster = settled(PAIR)
    cluster.change(changed(PAIR, "engine.maxModelLen", 1024))
    before = copy.deepcopy((cluster.service, cluster.objects, cluster.pods))
    cluster.plan()
    assert (cluster.service, cluster.objects, cluster.pods) == before


def test_plan_of_settled_service_ignores_time() -> None:
    cluster = settled(PAIR)
    state: ClusterState = cluster.observe()
    assert not plan_service(state, IMAGES, cluster.now + 1e6).apply


def test_docs_every_ready_reason_is_explained() -> None:
    root = Path(__file__).parents[2]
    explained = set(
        re.findall(
            r"^\| `([A-Za-z]+)` \|", (root / "docs" / "guides" / "kubernetes.md").read_text(), re.MULTILINE
        )
    )
    seen = set()
    for spec in (PAIR, HUB, changed(PAIR, "suspend", True), changed(MINIMAL, "decode.replicas", 0)):
        cluster = FakeCluster(spec)
        for _ in range(40):
            cluster.reconcile()
            seen.add(cluster.condition("Ready")[1])
            cluster.happen()
    cluster = settled(PAIR)
    cluster.change(changed(PAIR, "engine.maxModelLen", 1024))
    cluster.reconcile()
    seen.add(cluster.condition("Ready")[1])
    assert {"Serving", "Suspended", "ScaledToZero", "NoRouter", "RollingOut"} <= seen
    assert seen <= explained
