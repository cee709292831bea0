"""
NetworkPolicies: clients reach routers, routers reach workers, and workers reach those of their own revision.

Workers check no API keys by default, so these policies are their protection. RDMA traffic bypasses them:
there, the partition of the fabric separates services.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from baton_api import batch_jobs, labels
from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.objects import Manifest, Owner, owned
from baton_operator.manifests.ports import in_pod_network
from baton_operator.manifests.revision import Revision
from baton_operator.manifests.workers import files

TRACING_FLAG, TRACING_VARIABLE = "--tracing-endpoint", "BATON_TRACING_ENDPOINT"
"""Flag and variable with which `args` and `env` set the address of a tracing collector."""

TRACING_FLAGS = (TRACING_FLAG, "--otlp-traces-endpoint")
"""The flags of Baton, and of vLLM and SGLang."""


def _namespace(name: str) -> Manifest:
    """Select all pods of a namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _operators(namespace: str) -> Manifest:
    """Select the operator's pods, which read the metrics of routers and load adapters in workers."""
    return {**_namespace(namespace), "podSelector": {"matchLabels": {labels.ROLE: names.OPERATOR}}}


DNS = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def routers(owner: Owner, spec: InferenceServiceSpec, operator_namespace: str) -> Manifest:
    """
    Return the policy of routers. `operator_namespace`: namespace of the operator's pods.

    Their API accepts connections from the namespaces in the spec (default: all) and from batch runners, their
    metrics from the operator and Prometheus only.
    """
    port: Manifest = {"ports": [{"protocol": "TCP", "port": names.ROUTER_PORT}]}
    if spec.exposure.inference_pool is not None:
        port["ports"].append({"protocol": "TCP", "port": names.PICKER_PORT})
    allowed = spec.security.ingress_namespace_labels
    if allowed:
        runners = {"podSelector": {"matchLabels": names.selecting(owner.name, batch_jobs.ROLE)}}
        port["from"] = [{"namespaceSelector": {"matchLabels": dict(allowed)}}, runners]
    reading = spec.security.metrics_namespace
    metrics = {
        "ports": [{"protocol": "TCP", "port": names.ROUTER_METRICS_PORT}],
        "from": [_operators(operator_namespace), *([_namespace(reading)] if reading else [])],
    }
    body = {
        "podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)},
        "policyTypes": ["Ingress"],
        "ingress": [port, metrics],
    }
    name = names.router(owner.name)
    return owned(owner, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": body})


def gateways(owner: Owner, spec: InferenceServiceSpec) -> Manifest:
    """Return the policy with which gateways reach decode workers, at the port of the API."""
    peers = [{"namespaceSelector": {"matchLabels": dict(spec.security.ingress_namespace_labels)}}]
    role = Role.BOTH if spec.prefill is None else Role.DECODE
    body = {
        "podSelector": {"matchLabels": names.selecting(owner.name, role)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers, "ports": [{"protocol": "TCP", "port": names.HTTP_PORT}]}],
    }
    return owned(owner, "networking.k8s.io/v1", "NetworkPolicy", f"{owner.name}-gateways", {"spec": body})


def workers_policy(service: str, revision: str) -> str:
    """Name of the NetworkPolicy of the workers of one revision."""
    return f"{service}-workers-{revision}"


def workers(
    owner: Owner, revision: Revision, operator_namespace: str, metrics_namespace: str = ""
) -> Manifest:
    """
    Return the policy of the workers of one revision.

    Ingress: routers at three ports, workers of the revision at all ports, and `metrics_namespace` at the port
    with metrics. The operator's pods in `operator_namespace` reach the port of the API if the workers load
    adapters. UCX and NCCL choose their ports; side channels and bootstrap servers have fixed ones.
    Egress: workers of the revision, DNS, and the port of the tracing collector in `args` or `env`; any
    address if the pods download their model themselves.
    """
    of_revision = {labels.SERVICE: owner.name, labels.REVISION: revision.name}
    each_other = [{"podSelector": {"matchLabels": of_revision}}]
    routers = [{"podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)}}]
    health = {"protocol": "TCP", "port": names.HEALTH_PORT}  # has nothing but health and metrics
    listening = in_pod_network(revision)
    ports = (listening.http, listening.kv_events, listening.kv_replay)
    probed = [{"ports": [health]}] if revision.blueprint.mutual_tls else []
    if metrics_namespace and not probed:
        http = {"protocol": "TCP", "port": names.HTTP_PORT}
        probed = [{"from": [_namespace(metrics_namespace)], "ports": [http]}]
    loading = []
    if revision.blueprint.engine.lora is not None:
        http = {"protocol": "TCP", "port": listening.http}
        loading = [{"from": [_operators(operator_namespace)], "ports": [http]}]
    body = {
        "podSelector": {"matchLabels": of_revision},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": routers, "ports": [{"protocol": "TCP", "port": port} for port in ports]},
            {"from": each_other},
            *probed,
            *loading,
        ],
        "egress": [{}]
        if files(owner, revision).init_containers
        else [{"to": each_other}, DNS, *_tracing(revision)],
    }
    name = workers_policy(owner.name, revision.name)
    policy_labels = {**names.of_service(owner.name), labels.REVISION: revision.name}
    return owned(owner, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": body}, policy_labels)


def _tracing(revision: Revision) -> list[Manifest]:
    """Return the ports of tracing collectors, at any address: a policy cannot contain host names."""
    ports = sorted({port for url in _endpoints(revision) if (port := _port(url))})
    return [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}] if ports else []


def _endpoints(revision: Revision) -> Iterable[str]:
    blueprint = revision.blueprint
    for role in blueprint.roles.values():
        arguments = [*blueprint.engine.args, *role.args]
        for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
            flag, equals, value = argument.partition("=")
            if flag in TRACING_FLAGS:
                yield value if equals else after
        for variable in (*blueprint.engine.env, *blueprint.transfer.env, *role.env):
            if variable.name == TRACING_VARIABLE and variable.value:
                yield variable.value


def _port(url: str) -> int | None:
    """Return the port of an HTTP URL; None if the URL is invalid or has another scheme."""
    try:
        parts = urlsplit(url)
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
