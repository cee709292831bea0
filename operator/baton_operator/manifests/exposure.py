"""How a service is reached from outside of the cluster: an Ingress or an HTTPRoute, and its certificate."""

from __future__ import annotations

from baton_operator.kinds.router_spec import Exposure
from baton_operator.manifests.objects import Manifest, Owner, given, made

GATEWAY_API = "gateway.networking.k8s.io/v1"
CERTIFICATE_API = "cert-manager.io/v1"

STREAMING = {
    "nginx.ingress.kubernetes.io/proxy-buffering": "off",
    "nginx.ingress.kubernetes.io/proxy-read-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-send-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-body-size": "512m",
}
"""Tokens arrive one by one, long answers are not cut, files of batches are let in. Others ignore these."""


def exposed(owner: Owner, exposure: Exposure) -> list[Manifest]:
    """All that it takes; nothing for a service that is reached inside of the cluster only."""
    match exposure.type:
        case "Ingress":
            return [_ingress(owner, exposure), *_certificate(owner, exposure)]
        case "HTTPRoute":
            return [_route(owner, exposure)]  # certificates are the listener's
    return []


def url(owner: Owner, exposure: Exposure) -> str:
    """Where clients find the API, by its Service or by an Ingress."""
    if exposure.type == "None":
        return f"http://{owner.name}.{owner.namespace}.svc.cluster.local"
    return f"{'https' if exposure.tls else 'http'}://{exposure.hosts[0]}"


def _ingress(owner: Owner, exposure: Exposure) -> Manifest:
    backend = {"service": {"name": owner.name, "port": {"name": "http"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    body = given(
        ingressClassName=exposure.ingress_class_name,
        rules=[{"host": host, "http": {"paths": [path]}} for host in exposure.hosts],
        tls=[{"hosts": list(exposure.hosts), "secretName": _secret(owner, exposure)}] if exposure.tls else [],
    )
    annotations = {**STREAMING, **exposure.annotations}
    return made(owner, "networking.k8s.io/v1", "Ingress", owner.name, {"spec": body}, annotations=annotations)


def _route(owner: Owner, exposure: Exposure) -> Manifest:
    parents = [
        given(name=one.name, namespace=one.namespace, sectionName=one.section_name)
        for one in exposure.gateway_refs or ()
    ]
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"name": owner.name, "port": 80}],
        "timeouts": {"request": "0s"},  # a stream takes as long as it takes
    }
    body = {"parentRefs": parents, "hostnames": list(exposure.hosts), "rules": [rule]}
    annotations = dict(exposure.annotations)
    return made(owner, GATEWAY_API, "HTTPRoute", owner.name, {"spec": body}, annotations=annotations)


def _certificate(owner: Owner, exposure: Exposure) -> list[Manifest]:
    if exposure.tls is None or exposure.tls.issuer_ref is None:
        return []
    issuer = exposure.tls.issuer_ref
    body = {
        "secretName": _secret(owner, exposure),
        "dnsNames": list(exposure.hosts),
        "issuerRef": {"name": issuer.name, "kind": issuer.kind},
    }
    return [made(owner, CERTIFICATE_API, "Certificate", owner.name, {"spec": body})]


def _secret(owner: Owner, exposure: Exposure) -> str:
    assert exposure.tls is not None
    return exposure.tls.secret_name or f"{owner.name}-tls"
