"""Permitted connections: the policies of a service and every connection that its parts open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from baton_api import batch_jobs, labels
from baton_engine.settings import WorkerSettings
from baton_operator import names
from baton_operator.manifests import network
from baton_operator.reconcilers.plan import OperatorDefaults, plan_service
from tests.operator import network_policies
from tests.operator.fake_cluster import FakeCluster
from tests.operator.network_policies import NAME, Labels, Manifest, Peer, allows

# --- The semantics. ---

HOME, AWAY = "home", "away"
NAMESPACES: Mapping[str, Labels] = {HOME: {NAME: HOME, "team": "a"}, AWAY: {NAME: AWAY, "team": "b"}}
POD = Peer(HOME, {"app": "server"}, "10.0.0.1", {"web": ("TCP", 8080)})
CLIENT = Peer(HOME, {"app": "client"}, "10.0.0.2")
STRANGER = Peer(AWAY, {"app": "client"}, "10.1.0.2")
OUTSIDE = Peer(address="192.0.2.7")


def ingress(*rules: Manifest, **spec: Any) -> list[Manifest]:
    body = {"podSelector": {"matchLabels": {"app": "server"}}, "ingress": list(rules), **spec}
    return [{"metadata": {"namespace": HOME}, "spec": body}]


def peers(*given: Manifest) -> Manifest:
    return {"from": list(given)}


def ports(*given: Manifest) -> Manifest:
    return {"ports": list(given)}


BLOCK = {"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]}}
CLIENTS = {"podSelector": {"matchLabels": {"app": "client"}}}
TEAM_B = {"namespaceSelector": {"matchLabels": {"team": "b"}}}
EGRESS: Manifest = {"podSelector": {"matchLabels": {"app": "client"}}, "egress": []}

SEMANTICS: dict[str, tuple[list[Manifest], Peer, int, str, bool]] = {
    "no policy allows all": ([], OUTSIDE, 1, "TCP", True),
    "no rule denies all": (ingress(), CLIENT, 8080, "TCP", False),
    "an empty rule allows all": (ingress({}), OUTSIDE, 1, "UDP", True),
    "an empty list of peers is everybody": (ingress(peers()), OUTSIDE, 1, "TCP", True),
    "an empty list of ports is every port": (ingress(ports()), OUTSIDE, 1, "UDP", True),
    "another pod's policy": (ingress(podSelector={"matchLabels": {"app": "x"}}), OUTSIDE, 1, "TCP", True),
    "an empty podSelector is all pods": (ingress(podSelector={}), CLIENT, 1, "TCP", False),
    "a policy for egress alone": (ingress(policyTypes=["Egress"]), OUTSIDE, 1, "TCP", True),
    "pods of the policy's namespace": (ingress(peers(CLIENTS)), CLIENT, 1, "TCP", True),
    "not the same pods of another": (ingress(peers(CLIENTS)), STRANGER, 1, "TCP", False),
    "all pods of a namespace": (ingress(peers(TEAM_B)), STRANGER, 1, "TCP", True),
    "an empty namespaceSelector": (ingress(peers({"namespaceSelector": {}})), STRANGER, 1, "TCP", True),
    "which is no address outside": (ingress(peers({"namespaceSelector": {}})), OUTSIDE, 1, "TCP", False),
    "both in one peer are both": (
        ingress(peers({**TEAM_B, "podSelector": {"matchLabels": {"app": "x"}}})), STRANGER, 1, "TCP", False,
    ),
    "both in two peers are either": (ingress(peers(TEAM_B, CLIENTS)), CLIENT, 1, "TCP", True),
    "an address in a block": (ingress(peers(BLOCK)), OUTSIDE, 1, "TCP", True),
    "an address excepted from it": (ingress(peers(BLOCK)), Peer(address="192.0.2.200"), 1, "TCP", False),
    "a port": (ingress(ports({"port": 8080})), CLIENT, 8080, "TCP", True),
    "another port": (ingress(ports({"port": 8080})), CLIENT, 8081, "TCP", False),
    "another protocol": (ingress(ports({"port": 8080})), CLIENT, 8080, "UDP", False),
    "a protocol without a port": (ingress(ports({"protocol": "UDP"})), CLIENT, 1, "UDP", True),
    "the end of a range": (ingress(ports({"port": 10, "endPort": 20})), CLIENT, 20, "TCP", True),
    "beyond the end": (ingress(ports({"port": 10, "endPort": 20})), CLIENT, 21, "TCP", False),
    "a named port": (ingress(ports({"port": "web"})), CLIENT, 8080, "TCP", True),
    "a name that the pod has not": (ingress(ports({"port": "db"})), CLIENT, 8080, "TCP", False),
    "peer and port of one rule": (ingress({**peers(TEAM_B), **ports({"port": 1})}), CLIENT, 1, "TCP", False),
    "rules add up": (ingress(peers(TEAM_B), ports({"port": 1})), CLIENT, 1, "TCP", True),
    "policies add up": ([*ingress(), *ingress({})], CLIENT, 1, "TCP", True),
    "the source's egress too": (
        [*ingress({}), {"metadata": {"namespace": HOME}, "spec": EGRESS}], CLIENT, 1, "TCP", False,
    ),
    "in": (
        ingress(podSelector={"matchExpressions": [{"key": "app", "operator": "In", "values": ["server"]}]}),
        CLIENT, 1, "TCP", False,
    ),
    "not in": (
        ingress(podSelector={"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}),
        CLIENT, 1, "TCP", False,
    ),
    "exists": (
        ingress(podSelector={"matchExpressions": [{"key": "a", "operator": "Exists"}]}),
        CLIENT, 1, "TCP", True,
    ),
    "does not exist": (
        ingress(podSelector={"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}),
        CLIENT, 1, "TCP", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEMANTICS)
def test_evaluator_keeps_to_kubernetes_semantics(case: str) -> None:
    policies, source, port, protocol, expected = SEMANTICS[case]
    assert allows(policies, NAMESPACES, source, POD, port, protocol) is expected


# --- A service. ---

MODELS, MONITORING, GATEWAY, STRANGERS = "models", "monitoring", "gateway", "strangers"
CLUSTER = {
    one: {NAME: one} for one in (MODELS, MONITORING, GATEWAY, STRANGERS, "baton-system", "kube-system")
}
CLUSTER[GATEWAY]["ingress"] = "yes"

PAIR: Manifest = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {}}
RESTRICTED = {**PAIR, "security": {"ingressNamespaceLabels": {"ingress": "yes"}}}
POOLED = {**RESTRICTED, "exposure": {"inferencePool": {}}}
MUTUAL_TLS = {**PAIR, "security": {"mutualTls": {"secretName": "own"}}}
HUB = {**PAIR, "model": {"uri": "hf://org/model"}}
TRACED = {**PAIR, "engine": {"args": ["--tracing-endpoint=http://collector.observing:4318"]}}
TRACED_BY_ENV = {
    **PAIR,
    "decode": {"env": [{"name": "BATON_TRACING_ENDPOINT", "value": "https://collector.example"}]},
}
UNTRACEABLE = {**PAIR, "engine": {"args": ["--tracing-endpoint", "http://collector:port"]}}
STORED = {**PAIR, "engine": {"kvCacheTiers": [
    {"type": "Memory", "size": "1Gi"}, {"type": "SharedStore", "size": "1Ti", "url": "s3://kv/a"},
]}}  # fmt: skip
MOUNTED = {**PAIR, "engine": {"kvCacheTiers": [
    {"type": "Memory", "size": "1Gi"},
    {"type": "SharedStore", "size": "1Ti", "volume": {"nfs": {"server": "a", "path": "/kv"}}},
]}}  # fmt: skip
JOBS = {**RESTRICTED, "router": {"batches": {"execution": "Jobs"}}}

ANY = 41_000
"""A port that UCX may choose."""

OPERATOR = Peer("baton-system", {labels.ROLE: "operator"}, "10.2.0.1")
FALSE_OPERATOR = Peer(STRANGERS, OPERATOR.labels, "10.2.0.2")
FALSE_BESIDE = Peer(MODELS, OPERATOR.labels, "10.2.0.3")
PROMETHEUS = Peer(MONITORING, {"app.kubernetes.io/name": "prometheus"}, "10.3.0.1")
CONTROLLER = Peer(GATEWAY, {}, "10.4.0.1")
IN_NAMESPACE = Peer(MODELS, {}, "10.0.9.1")
IN_OTHER = Peer(STRANGERS, {}, "10.5.0.1")
DNS = Peer("kube-system", {"k8s-app": "kube-dns"}, "10.6.0.1")
HUB_ADDRESS, COLLECTOR, DATABASE = (Peer(address=f"198.51.100.{one}") for one in (1, 2, 3))
RUNNER = Peer(MODELS, names.of_role("chat", batch_jobs.ROLE), "10.0.7.1")
OTHERS_ROUTER = Peer(MODELS, names.of_role("other", names.ROUTER), "10.0.8.1")

VLLM: Manifest = {
    "model": {"uri": "pvc://models/a"},
    "engine": {"type": "vLLM", "image": "vllm:1", "args": ["--otlp-traces-endpoint=grpc://collector:4317"]},
    "prefill": {},
    "decode": {},
}
ADAPTERS: Manifest = {**VLLM, "engine": {**VLLM["engine"], "lora": {}}}
SGLANG: Manifest = {**VLLM, "engine": {"type": "SGLang", "image": "sglang:1"}}

CONNECTIONS: list[tuple[str, Manifest, str | Peer, str | Peer, int, bool]] = [
    ("a router takes a request to a prefill worker", PAIR, "router", "prefill", names.HTTP_PORT, True),
    ("a router takes a request to a decode worker", PAIR, "router", "decode", names.HTTP_PORT, True),
    ("a router hears of KV events", PAIR, "router", "decode", names.KV_EVENTS_PORT, True),
    ("a router asks for KV events again", PAIR, "router", "prefill", names.KV_REPLAY_PORT, True),
    ("decode asks for a prompt", PAIR, "decode", "prefill", 5557, True),
    ("decode pulls blocks", PAIR, "decode", "prefill", ANY, True),
    ("prefill answers a transfer", PAIR, "prefill", "decode", ANY, True),
    ("prefill asks decode for cached blocks", PAIR, "prefill", "decode", 5557, True),
    ("a router does not", PAIR, "router", "decode", 5557, False),
    ("nor does a client", PAIR, IN_NAMESPACE, "decode", 5557, False),
    ("a worker asks DNS", PAIR, "decode", DNS, 53, True),
    ("Prometheus reads a worker's metrics", PAIR, PROMETHEUS, "decode", names.HTTP_PORT, True),
    ("and of one that wants certificates", MUTUAL_TLS, PROMETHEUS, "decode", names.HEALTH_PORT, True),
    ("Prometheus reads a router's metrics", PAIR, PROMETHEUS, "router", names.ROUTER_METRICS_PORT, True),
    ("of one with few clients, too", RESTRICTED, PROMETHEUS, "router", names.ROUTER_METRICS_PORT, True),
    ("but not its API", RESTRICTED, PROMETHEUS, "router", names.ROUTER_PORT, False),
    ("the operator reads them", RESTRICTED, OPERATOR, "router", names.ROUTER_METRICS_PORT, True),
    ("clients do not", PAIR, IN_NAMESPACE, "router", names.ROUTER_METRICS_PORT, False),
    ("nor does an Ingress controller", RESTRICTED, CONTROLLER, "router", names.ROUTER_METRICS_PORT, False),
    ("a client of the namespace", PAIR, IN_NAMESPACE, "router", names.ROUTER_PORT, True),
    ("a client of another namespace", PAIR, IN_OTHER, "router", names.ROUTER_PORT, True),
    ("an Ingress controller or Gateway", RESTRICTED, CONTROLLER, "router", names.ROUTER_PORT, True),
    ("a runner of a batch", JOBS, RUNNER, "router", names.ROUTER_PORT, True),
    ("a runner asks DNS", JOBS, RUNNER, DNS, 53, True),
    ("a router reaches a database", RESTRICTED, "router", DATABASE, 5432, True),
    ("a router reaches an object store", RESTRICTED, "router", DATABASE, 443, True),
    ("a router sends spans", RESTRICTED, "router", COLLECTOR, 4318, True),
    ("a router watches EndpointSlices", RESTRICTED, "router", HUB_ADDRESS, 6443, True),
    ("a worker fetches its model", HUB, "decode", HUB_ADDRESS, 443, True),
    ("a worker reaches a shared store", STORED, "decode", DATABASE, 443, True),
    ("each role does, too", STORED, "prefill", DATABASE, 9000, True),
    ("of one in a volume it opens nothing", MOUNTED, "decode", DATABASE, 443, False),
    ("a worker sends spans", TRACED, "decode", COLLECTOR, 4318, True),
    ("each role does", TRACED, "prefill", COLLECTOR, 4318, True),
    ("spans go where the environment says", TRACED_BY_ENV, "decode", COLLECTOR, 443, True),
    ("a worker reaches nothing else", TRACED, "decode", HUB_ADDRESS, 443, False),
    ("an endpoint that is none opens nothing", UNTRACEABLE, "decode", COLLECTOR, 4318, False),
    ("a worker with its model reaches no hub", PAIR, "decode", HUB_ADDRESS, 443, False),
    ("a client does not reach a worker", PAIR, IN_NAMESPACE, "decode", names.HTTP_PORT, False),
    ("nor does a runner", JOBS, RUNNER, "decode", names.HTTP_PORT, False),
    ("nor another service's router", PAIR, OTHERS_ROUTER, "decode", names.HTTP_PORT, False),
    ("nor Prometheus its transfers", PAIR, PROMETHEUS, "prefill", 5557, False),
    ("a router does not open transfers", PAIR, "router", "prefill", 5557, False),
    ("a router reads KV events of vLLM", VLLM, "router", "prefill", 5557, True),
    ("a router reads KV events of SGLang again", SGLANG, "router", "decode", 5558, True),
    ("vLLM decode reads a side channel", VLLM, "decode", "prefill", 5600, True),
    ("SGLang decode asks a bootstrap server", SGLANG, "decode", "prefill", 8998, True),
    ("the operator loads an adapter", ADAPTERS, OPERATOR, "prefill", names.HTTP_PORT, True),
    ("not from another namespace", ADAPTERS, FALSE_OPERATOR, "prefill", names.HTTP_PORT, False),
    ("a false one reads no router", RESTRICTED, FALSE_OPERATOR, "router", names.ROUTER_METRICS_PORT, False),
    ("nor one beside the service", ADAPTERS, FALSE_BESIDE, "decode", names.HTTP_PORT, False),
    ("but not where there are none", VLLM, OPERATOR, "decode", names.HTTP_PORT, False),
    ("nor at another port", ADAPTERS, OPERATOR, "decode", 5557, False),
    ("and a client loads none", ADAPTERS, IN_NAMESPACE, "decode", names.HTTP_PORT, False),
    ("a router opens no side channel", VLLM, "router", "prefill", 5600, False),
    ("a client reaches no bootstrap server", SGLANG, IN_NAMESPACE, "prefill", 8998, False),
    ("Prometheus reads metrics of vLLM", VLLM, PROMETHEUS, "decode", names.HTTP_PORT, True),
    ("a vLLM worker sends spans", VLLM, "decode", COLLECTOR, 4317, True),
    ("a stranger does not reach a restricted router", RESTRICTED, IN_OTHER, "router", 8080, False),
    ("a gateway asks a router for a worker", POOLED, CONTROLLER, "router", names.PICKER_PORT, True),
    ("a gateway sends a request to a decode worker", POOLED, CONTROLLER, "decode", names.HTTP_PORT, True),
    ("a gateway does not reach a prefill worker", POOLED, CONTROLLER, "prefill", names.HTTP_PORT, False),
    ("a gateway without a pool reaches no worker", RESTRICTED, CONTROLLER, "decode", names.HTTP_PORT, False),
    ("a stranger does not reach a pooled worker", POOLED, IN_OTHER, "decode", names.HTTP_PORT, False),
    ("a stranger asks no router for workers", POOLED, IN_OTHER, "router", names.PICKER_PORT, False),
    ("a runner reaches nothing else", JOBS, RUNNER, HUB_ADDRESS, 443, False),
]


@pytest.mark.parametrize("case", CONNECTIONS, ids=lambda case: case[0])
def test_policies_allow_what_parts_do_and_no_more(
    case: tuple[str, Manifest, str | Peer, str | Peer, int, bool],
) -> None:
    _, spec, source, target, port, expected = case
    objects = service_objects(spec)
    pods = roles(objects)
    source, target = (pods[one] if isinstance(one, str) else one for one in (source, target))
    policies = network_policies.of(objects)
    protocol = "UDP" if target is DNS else "TCP"
    assert allows(policies, CLUSTER, source, target, port, protocol) is expected


def test_policies_keep_revisions_apart() -> None:
    old = service_objects(PAIR)
    new = service_objects({**PAIR, "engine": {"maxModelLen": 1024}})
    policies = network_policies.of([*old, *new])
    assert allows(policies, CLUSTER, roles(old)["decode"], roles(old)["prefill"], ANY)
    assert not allows(policies, CLUSTER, roles(old)["decode"], roles(new)["prefill"], ANY)


def test_tracing_flag_and_variable_are_the_engines() -> None:
    assert "tracing_endpoint" in WorkerSettings.model_fields
    assert network.TRACING_FLAG == "--tracing-endpoint"
    prefix = WorkerSettings.model_config["env_prefix"]
    assert f"{prefix}tracing_endpoint".upper() == network.TRACING_VARIABLE


def service_objects(spec: Manifest) -> list[Manifest]:
    """All objects of a service, by an operator whose default Prometheus namespace is `monitoring`."""
    images = OperatorDefaults(
        "registry.example/worker:1", "registry.example/router:1", metrics_namespace=MONITORING
    )
    cluster = FakeCluster(spec)
    cluster.settle()
    applied = plan_service(cluster.observe(), images, cluster.now).apply
    latest = {(one["kind"], one["metadata"]["name"]): one for one in (*cluster.objects.values(), *applied)}
    return list(latest.values())


def roles(objects: list[Manifest]) -> dict[str, Peer]:
    """A pod of each Deployment, by its role."""
    deployments = [one for one in objects if one["kind"] == "Deployment"]
    return {
        one["metadata"]["labels"][labels.ROLE]: Peer.of(
            one["spec"]["template"], one["metadata"]["namespace"], f"10.0.{number}.1"
        )
        for number, one in enumerate(deployments)
    }
