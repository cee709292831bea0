"""Pods as the operator makes them: how routers come and go, and what workers mount."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from typing import Any

import pytest

from baton_api import labels as label_names
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.resources import RDMA, ResourceRequirements
from baton_operator.manifests import pods, routers
from baton_operator.manifests.mutual_tls import Shown
from baton_operator.manifests.objects import Manifest, Owner
from baton_operator.manifests.revision import Blueprint, Revision
from baton_router.settings import RouterSettings
from tests.operator.fake_cluster import FakeCluster

OWNER = Owner("chat", "models", "uid-1")
MINIMAL: Manifest = {"model": {"uri": "builtin://smollm2"}, "decode": {}}
NODE, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


def router(**wanted: Any) -> Manifest:
    """The spec of a router's pod."""
    spec = InferenceServiceSpec.model_validate({**MINIMAL, "router": wanted})
    deployment = routers.router(OWNER, spec, "router:1", 2, Shown([], [], []), 1)
    pod: Manifest = deployment["spec"]["template"]["spec"]
    return pod


def first(cluster: FakeCluster, kind: str, component: str) -> Manifest:
    """The pod of a cluster's first object of a kind, with this component in its labels."""
    manifests = [one for (_, object_kind, _), one in sorted(cluster.objects.items()) if object_kind == kind]
    pods = [one for one in manifests if one["metadata"]["labels"]["app.kubernetes.io/component"] == component]
    pod: Manifest = pods[0]["spec"]["template"]["spec"]
    return pod


def test_router_slow_to_answer_once_stays_ready() -> None:
    """One probe that is late takes a router out of its Service only if two more are late after it."""
    probe = router()["containers"][0]["readinessProbe"]
    assert probe["failureThreshold"] >= 3
    assert probe["failureThreshold"] * probe["periodSeconds"] <= 10


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        pytest.param({}, {NODE: "ScheduleAnyway", ZONE: "ScheduleAnyway"}, id="by default"),
        pytest.param(
            {"topologySpreadConstraints": [{"topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]},
            {"rack": "DoNotSchedule"},
            id="as the service says",
        ),
    ],
)
def test_routers_are_spread(placement: Manifest, expected: dict[str, str]) -> None:
    """Each revision of the Deployment by itself, or the pods of the old one would decide about the new."""
    spread = router(placement=placement)["topologySpreadConstraints"]
    assert {one["topologyKey"]: one["whenUnsatisfiable"] for one in spread} == expected
    assert all(one["matchLabelKeys"] == ["pod-template-hash"] for one in spread)
    labels = {label_names.SERVICE: "chat", label_names.ROLE: "router"}
    assert all(one["labelSelector"] == {"matchLabels": labels} for one in spread)


@pytest.mark.parametrize(
    ("drain", "flags", "grace"),
    [
        pytest.param({}, {"--drain-notice-s=5", "--drain-s=600"}, 620, id="by default"),
        pytest.param(
            {"preStopDelay": "15s", "timeout": "30m"},
            {"--drain-notice-s=15", "--drain-s=1800"},
            1830,
            id="as the service says",
        ),
    ],
)
def test_router_drains_as_long_as_the_spec_says(drain: Manifest, flags: set[str], grace: int) -> None:
    pod = router(drain=drain)
    given = {one for one in pod["containers"][0]["args"] if one.startswith("--drain")}
    assert given == flags
    assert {one.partition("=")[0].removeprefix("--").replace("-", "_") for one in given} <= set(
        RouterSettings.model_fields
    )
    assert pod["terminationGracePeriodSeconds"] == grace


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"uri": "pvc://models/qwen"}, id="a volume that is there"),
        pytest.param({"uri": "hf://org/name", "cache": {"type": "PVC", "size": "1Gi"}}, id="a cache"),
    ],
)
def test_worker_cannot_write_to_the_models_volume(model: Manifest) -> None:
    """Nor does a kubelet change the owner of its files, pod after pod."""
    cluster = FakeCluster({**MINIMAL, "model": model})
    cluster.settle()
    pod = first(cluster, "Deployment", "both")
    (claim,) = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert claim["readOnly"] is True
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_job_that_fetches_a_model_can_write_to_its_volume() -> None:
    cluster = FakeCluster({**MINIMAL, "model": {"uri": "hf://a/b", "cache": {"type": "PVC", "size": "1Gi"}}})
    cluster.settle()
    pod = first(cluster, "Job", "model")
    (claim,) = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert "readOnly" not in claim
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def resources(**wanted: Any) -> Manifest:
    """Those of a worker's container."""
    cluster = FakeCluster({**MINIMAL, "decode": {"resources": wanted}})
    cluster.settle()
    requested: Manifest = first(cluster, "Deployment", "both")["containers"][0]["resources"]
    return requested


def test_worker_has_the_resources_of_the_spec() -> None:
    rails = {f"networking.gke.io.networks/rdma-{number}": 1 for number in range(8)}
    limits = {"memory": "64Gi", **rails, "hugepages-2Mi": "5Gi", "hugepages-1Gi": "8Gi"}
    requested = resources(requests={"cpu": 2, "memory": "32Gi"}, limits=limits)
    assert requested == {
        "requests": {"cpu": "2", "memory": "32Gi"},
        "limits": {name: str(amount) for name, amount in limits.items()},
    }


def test_worker_uses_all_claims_unless_its_resources_name_some() -> None:
    claims = [{"name": name, "resourceClaimTemplateName": f"one-{name}"} for name in ("gpu", "nic")]
    for named, used in (
        ([], [{"name": "gpu"}, {"name": "nic"}]),
        ([{"name": "gpu", "request": "first"}], [{"name": "gpu", "request": "first"}]),
    ):
        cluster = FakeCluster(
            {**MINIMAL, "decode": {"resources": {"claims": named}, "resourceClaims": claims}}
        )
        cluster.settle()
        pod = first(cluster, "Deployment", "both")
        assert pod["resourceClaims"] == claims
        assert pod["containers"][0]["resources"] == {"claims": used}


ACCELERATORS = """
nvidia.com/gpu nvidia.com/gpu.shared nvidia.com/mig-1g.10gb nvidia.com/mig-1g.10gb.shared nvidia.com/pgpu
amd.com/gpu amd.com/cpx_nps4 amd.com/spx_nps1
google.com/tpu aws.amazon.com/neuron aws.amazon.com/neuroncore aws.amazon.com/neurondevice
habana.ai/gaudi gpu.intel.com/i915 gpu.intel.com/xe furiosa.ai/npu
huawei.com/Ascend910 huawei.com/Ascend910B4 huawei.com/Ascend310P huawei.com/Ascend910-8c huawei.com/npu
cambricon.com/mlu cambricon.com/vmlu cambricon.com/mlu370.share cambricon.com/mlu370.mim-2m.8gb
hygon.com/dcu hygon.com/dcunum hygon.com/dcu-share-30c-16g hygon.com/dcu-mig-2g-15gb
metax-tech.com/gpu metax-tech.com/sgpu mthreads.com/vgpu iluvatar.ai/vgpu iluvatar.ai/MR-V100-vgpu
enflame.com/gcu enflame.com/vgcu kunlunxin.com/xpu kunlunxin.com/vxpu
volcano.sh/gpu-number volcano.sh/vgpu-number lab.fish/gpu shell.sh.example/gpu
"""
"""As device plugins of vendors, HAMi and Volcano name them, and as any other may."""

OTHERS = """
nvidia.com/gpumem nvidia.com/gpumem-percentage nvidia.com/gpucores nvidia.com/priority
huawei.com/Ascend910-memory huawei.com/Ascend910B4-memory huawei.com/npu-core
cambricon.com/mlu.smlu.vcore cambricon.com/mlu.smlu.vmemory hygon.com/dcumem hygon.com/dcucores
metax-tech.com/vcore metax-tech.com/vmemory iluvatar.ai/MR-V100.vCore iluvatar.ai/vcuda-core
enflame.com/gcu-memory enflame.com/vgcu-percentage kunlunxin.com/vxpu-memory
volcano.sh/gpu-memory volcano.sh/vgpu-memory volcano.sh/vgpu-cores aliyun.com/gpu-mem
koordinator.sh/gpu koordinator.sh/gpu.shared koordinator.sh/gpu-core tencent.com/vcuda-core
gpu.intel.com/i915_monitoring gpu.intel.com/memory.max gpu.intel.com/tiles
rdma/hca vpc.amazonaws.com/efa hugepages-2Mi memory
"""
"""Amounts of an accelerator's memory or cores, and resources of other kinds."""


@pytest.mark.parametrize(("names", "each"), [(ACCELERATORS, 1), (OTHERS, 0)], ids=["counted", "not counted"])
def test_accelerators_are_counted_by_the_names_of_resources(names: str, each: int) -> None:
    counted = {
        name: ResourceRequirements.model_validate({"limits": {name: "3"}}).accelerators
        for name in names.split()
    }
    assert counted == dict.fromkeys(counted, 3 * each)


def test_accelerators_of_several_kinds_are_added() -> None:
    limits = {"habana.ai/gaudi": 1, "gpu.intel.com/i915": "2", "nvidia.com/gpumem": 3000}
    assert ResourceRequirements.model_validate({"limits": limits}).accelerators == 3


@pytest.mark.parametrize(
    ("name", "is_rdma"),
    [
        ("rdma/hca", True),
        ("networking.gke.io.networks/rdma-1", True),
        ("vpc.amazonaws.com/efa", True),
        ("openshift.io/mlnx_roce", True),
        ("nvidia.com/roce-v2", True),
        ("example.com/process", False),
        ("microcell.example/fpga", False),
    ],
)
def test_rdma_devices_have_these_names(name: str, is_rdma: bool) -> None:
    assert bool(re.search(RDMA, name)) is is_rdma


HOST = {"spec": {"hostNetwork": True}}
PAIR: Manifest = {**MINIMAL, "prefill": {"podTemplate": HOST}, "decode": {"podTemplate": HOST}}


def listening(cluster: FakeCluster) -> dict[str, dict[str, int]]:
    """The ports of each worker's container by their names, by the worker's role and revision."""
    deployments = [one for (_, kind, _), one in cluster.objects.items() if kind == "Deployment"]
    return {
        one["metadata"]["name"]: {
            port["name"]: port["containerPort"]
            for port in one["spec"]["template"]["spec"]["containers"][0]["ports"]
        }
        for one in deployments
        if one["metadata"]["labels"][label_names.ROLE] != "router"
    }


@pytest.mark.parametrize("tls", [False, True], ids=["", "with certificates"])
def test_workers_in_the_nodes_network_share_no_port(tls: bool) -> None:
    """Prefill and decode, the old revision and the new one: each may be on the same node."""
    spec = {**PAIR, "security": {"mutualTls": {"secretName": "own"}}} if tls else PAIR
    cluster = FakeCluster(spec)
    cluster.settle()
    old = listening(cluster)
    cluster.change({**spec, "engine": {"maxModelLen": 1024}})
    cluster.settle()
    ports_by_role = {**old, **listening(cluster)}
    assert len(ports_by_role) == 4
    taken = [port for one in ports_by_role.values() for port in one.values()]
    assert len(taken) == len(set(taken))
    assert all(pods.FIRST_PORT <= port <= pods.LAST_PORT for port in taken)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_in_the_nodes_network_has_its_ports_as_flags(role: str) -> None:
    """The listening ports, the ports for Kubernetes' placement and those sent to routers are the same."""
    cluster = FakeCluster({**PAIR, "security": {"mutualTls": {"secretName": "own"}}})
    cluster.settle()
    pod = first(cluster, "Deployment", role)
    (container,) = pod["containers"]
    named = {one["name"]: one["containerPort"] for one in container["ports"]}
    for flag in (
        f"--port={named['https']}",
        f"--health-port={named['http']}",
        f"--kv-events=tcp://$(POD_IP):{named['kv-events']}",
        f"--kv-replay=tcp://$(POD_IP):{named['kv-replay']}",
        "--control-host=$(POD_IP)",
        f"--control-port={named['control']}",
    ):
        assert flag in container["args"]
    assert container["readinessProbe"]["httpGet"]["port"] == "http"
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize(
    ("role", "roles", "control"),
    [
        pytest.param("prefill", {"prefill": {}}, {"control": 6000}, id="prefill"),
        pytest.param("decode", {"prefill": {}}, {"control": 6000}, id="decode"),
        pytest.param("both", {}, {}, id="both, whose blocks no other worker reads"),
    ],
)
def test_worker_in_its_own_network_keeps_its_ports(
    role: str, roles: Manifest, control: dict[str, int]
) -> None:
    cluster = FakeCluster({**MINIMAL, **roles, "transfer": {"controlPort": 6000}})
    cluster.settle()
    (named,) = [ports for name, ports in listening(cluster).items() if f"-{role}-" in name]
    assert named == {"http": 8000, "kv-events": 5558, "kv-replay": 5559, **control}
    pod = first(cluster, "Deployment", role)
    flags = [one for one in pod["containers"][0]["args"] if one.startswith("--control")]
    assert flags == (["--control-host=$(POD_IP)", "--control-port=6000"] if control else [])
    assert "dnsPolicy" not in pod


def test_ports_of_a_revisions_roles_differ_in_every_service() -> None:
    spec = InferenceServiceSpec.model_validate(PAIR)
    blueprint = Blueprint.of("chat", spec)
    revision = Revision(blueprint=blueprint, image="worker:1", created=0.0, name="6f1c2ab9")
    for number in range(5000):
        owner = Owner(f"service-{number}", "models", "uid")
        both = [pods.ports(owner, revision, role) for role in blueprint.roles]
        taken = [port for one in both for port in astuple(one)]
        assert len(set(taken)) == 2 * pods.PORTS_OF_ROLE
        assert min(taken) >= pods.FIRST_PORT and max(taken) <= pods.LAST_PORT


SEPARATE: Manifest = {**MINIMAL, "prefill": {}}
OWN: Manifest = {"name": "BATON_TICKET_SECRET", "value": "mine"}
OWN_TEMPLATE: Manifest = {"spec": {"containers": [{"name": "main", "env": [OWN]}]}}
CREATED = {"secretKeyRef": {"name": "chat-tickets", "key": "secret"}}


def variables(cluster: FakeCluster, component: str) -> dict[str, Any]:
    """Environment of the main container, of which no variable is set twice."""
    listed = first(cluster, "Deployment", component)["containers"][0]["env"]
    assert len({one["name"] for one in listed}) == len(listed)
    return {one["name"]: one.get("valueFrom") or one["value"] for one in listed}


def test_ticket_secret_reaches_routers_and_both_roles() -> None:
    cluster = FakeCluster(SEPARATE)
    cluster.settle()
    assert variables(cluster, "router")["BATON_ROUTER_TICKET_SECRET"] == CREATED
    for role in ("prefill", "decode"):
        assert variables(cluster, role)["BATON_TICKET_SECRET"] == CREATED


def test_ticket_secret_of_worker_of_both_roles_is_absent() -> None:
    cluster = FakeCluster(MINIMAL)
    cluster.settle()
    assert "BATON_TICKET_SECRET" not in variables(cluster, "both")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({**SEPARATE, "engine": {"env": [OWN]}}, id="by engine.env"),
        pytest.param({**SEPARATE, "decode": {"podTemplate": OWN_TEMPLATE}}, id="by podTemplate"),
    ],
)
def test_ticket_secret_set_by_the_user_is_kept(spec: Manifest) -> None:
    cluster = FakeCluster(spec)
    cluster.settle()
    assert variables(cluster, "decode")["BATON_TICKET_SECRET"] == "mine"


def test_ticket_secret_is_created_once_and_when_a_pod_lacks_it() -> None:
    """The operator cannot read it: it would cost a request at every reconciliation otherwise."""
    cluster = FakeCluster(SEPARATE)
    assert cluster.reconcile().ticket_secret
    cluster.settle()
    assert not cluster.plan().ticket_secret
    cluster.change({**SEPARATE, "decode": {"replicas": 3}})
    assert not cluster.plan().ticket_secret
    why = 'CreateContainerConfigError: secret "chat-tickets" not found'
    cluster.pods[0] = replace(cluster.pods[0], trouble=why)
    assert cluster.plan().ticket_secret
