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
from baton_operator.manifests.engines import tiers
from baton_operator.manifests.engines.container import last_value
from baton_operator.manifests.objects import Manifest, Owner, owned
from baton_operator.manifests.pods import in_pod_network
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


def tcp(*ports: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


DNS = {"ports": [{"protocol": "UDP", "port": 53}, *tcp(53)]}


def network_policy(
    owner: Owner,
    name: str,
    selected: names.Labels,
    ingress: list[Manifest],
    egress: list[Manifest] | None = None,
    labels: names.Labels | None = None,
) -> Manifest:
    """Return the policy of the pods with the labels `selected`. They reach everything without `egress`."""
    body = {
        "podSelector": {"matchLabels": selected},
        "policyTypes": ["Ingress", *([] if egress is None else ["Egress"])],
        "ingress": ingress,
        **({} if egress is None else {"egress": egress}),
    }
    return owned(owner, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": body}, labels)


def routers(owner: Owner, spec: InferenceServiceSpec, operator_namespace: str) -> Manifest:
    """
    Return the policy of routers. `operator_namespace`: namespace of the operator's pods.

    Their API accepts connections from the namespaces in the spec (default: all) and from batch runners, their
    metrics from the operator and Prometheus only.
    """
    picking = [names.PICKER_PORT] if spec.exposure.inference_pool is not None else []
    api: Manifest = {"ports": tcp(names.ROUTER_PORT, *picking)}
    allowed = spec.security.ingress_namespace_labels
    if allowed:
        runners = {"podSelector": {"matchLabels": names.selecting(owner.name, batch_jobs.ROLE)}}
        api["from"] = [{"namespaceSelector": {"matchLabels": dict(allowed)}}, runners]
    reading = spec.security.metrics_namespace
    metrics = {
        "ports": tcp(names.ROUTER_METRICS_PORT),
        "from": [_operators(operator_namespace), *([_namespace(reading)] if reading else [])],
    }
    selected = names.selecting(owner.name, names.ROUTER)
    return network_policy(owner, names.router(owner.name), selected, [api, metrics])


def gateways(owner: Owner, spec: InferenceServiceSpec) -> Manifest:
    """Return the policy with which gateways reach decode workers, at the port of the API."""
    peers = [{"namespaceSelector": {"matchLabels": dict(spec.security.ingress_namespace_labels)}}]
    role = Role.BOTH if spec.prefill is None else Role.DECODE
    ingress: list[Manifest] = [{"from": peers, "ports": tcp(names.HTTP_PORT)}]
    return network_policy(owner, f"{owner.name}-gateways", names.selecting(owner.name, role), ingress)


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
    address if the pods download their model themselves, or share KV blocks in object storage.
    """
    of_revision = {labels.SERVICE: owner.name, labels.REVISION: revision.name}
    each_other = [{"podSelector": {"matchLabels": of_revision}}]
    routers = [{"podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)}}]
    listening = in_pod_network(revision)
    ingress: list[Manifest] = [
        {"from": routers, "ports": tcp(listening.http, listening.kv_events, listening.kv_replay)},
        {"from": each_other},
    ]
    if revision.blueprint.mutual_tls:
        ingress.append({"ports": tcp(names.HEALTH_PORT)})  # has nothing but health and metrics
    elif metrics_namespace:
        ingress.append({"from": [_namespace(metrics_namespace)], "ports": tcp(names.HTTP_PORT)})
    if revision.blueprint.engine.lora is not None:
        ingress.append({"from": [_operators(operator_namespace)], "ports": tcp(listening.http)})
    fetching = files(owner, revision).init_containers
    store = tiers.shared(revision.blueprint.engine)
    anywhere = fetching or (store is not None and store.url)
    egress = [{}] if anywhere else [{"to": each_other}, DNS, *_tracing(revision)]
    name = workers_policy(owner.name, revision.name)
    policy_labels = {**names.of_service(owner.name), labels.REVISION: revision.name}
    return network_policy(owner, name, of_revision, ingress, egress, policy_labels)


def _tracing(revision: Revision) -> list[Manifest]:
    """Return the ports of tracing collectors, at any address: a policy cannot contain host names."""
    ports = sorted({port for url in _endpoints(revision) if (port := _port(url))})
    return [{"ports": tcp(*ports)}] if ports else []


def _endpoints(revision: Revision) -> Iterable[str]:
    blueprint = revision.blueprint
    for role in blueprint.roles.values():
        yield last_value([*blueprint.engine.args, *role.args], *TRACING_FLAGS)
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
