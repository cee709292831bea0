"""
Who may speak to whom: clients to routers, routers to workers, and workers to those of their own generation.

Workers have no keys of their own here, so this is the border. What moves by RDMA passes beside it: there, the
border is the fabric's partition.
"""

from __future__ import annotations

from baton_api import batch_jobs, labels
from baton_operator import names
from baton_operator.generation import Generation
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.objects import Manifest, Owner, made
from baton_operator.manifests.workers import files

OPERATORS: Manifest = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "baton-operator"}},
}
"""The operator's pods, as its chart names them: they ask routers what becomes of requests."""


def _namespace(name: str) -> Manifest:
    """All pods of one."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


DNS = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def routers(owner: Owner, spec: InferenceServiceSpec) -> Manifest:
    """
    Routers are reached from the namespaces that the spec names, or from all, by their runners, and by who
    reads metrics.
    """
    port: Manifest = {"ports": [{"protocol": "TCP", "port": names.ROUTER_PORT}]}
    allowed = spec.security.ingress_namespace_labels
    if allowed:
        runners = {"podSelector": {"matchLabels": names.selecting(owner.name, batch_jobs.ROLE)}}
        reading = spec.security.metrics_namespace
        port["from"] = [
            {"namespaceSelector": {"matchLabels": dict(allowed)}},
            runners,
            OPERATORS,
            *([_namespace(reading)] if reading else []),
        ]
    body = {
        "podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)},
        "policyTypes": ["Ingress"],
        "ingress": [port],
    }
    name = names.router(owner.name)
    return made(owner, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": body})


def workers(owner: Owner, generation: Generation, metrics_namespace: str = "") -> Manifest:
    """
    Workers of one generation are reached by routers at their three ports, and by one another at all; by
    `metrics_namespace` where their metrics are.

    Between workers the ports are UCX's to choose. Outwards they speak to one another, and to the world only
    if they have to fetch their model themselves.
    """
    revision = generation.revision
    of_generation = {labels.SERVICE: owner.name, labels.REVISION: revision}
    each_other = [{"podSelector": {"matchLabels": of_generation}}]
    routers = [{"podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)}}]
    health = {"protocol": "TCP", "port": names.HEALTH_PORT}  # has nothing but health and metrics
    ports = (names.HTTP_PORT, names.KV_EVENTS_PORT, names.KV_REPLAY_PORT)
    probed = [{"ports": [health]}] if generation.blueprint.mutual_tls else []
    if metrics_namespace and not probed:
        http = {"protocol": "TCP", "port": names.HTTP_PORT}
        probed = [{"from": [_namespace(metrics_namespace)], "ports": [http]}]
    body = {
        "podSelector": {"matchLabels": of_generation},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": routers, "ports": [{"protocol": "TCP", "port": port} for port in ports]},
            {"from": each_other},
            *probed,
        ],
        "egress": [{}] if files(owner, generation).init_containers else [{"to": each_other}, DNS],
    }
    name = f"{owner.name}-workers-{revision}"
    there = {**names.of_service(owner.name), labels.REVISION: revision}
    return made(owner, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": body}, there)
