"""How a service is reached from outside of the cluster: an Ingress or an HTTPRoute, and its certificate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton_operator.kinds.router_spec import Exposure, GatewayReference, Issuer
from baton_operator.manifests.objects import Fact, Manifest, ObjectName, Owner, given, owned

GATEWAY_API = "gateway.networking.k8s.io/v1"
CERTIFICATE_API = "cert-manager.io/v1"

STREAMING = {
    "nginx.ingress.kubernetes.io/proxy-buffering": "off",
    "nginx.ingress.kubernetes.io/proxy-read-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-send-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-body-size": "512m",
}
"""Streams are not buffered or cut, and batch files fit. Other controllers ignore these annotations."""


def exposed(owner: Owner, exposure: Exposure, *, pool: Manifest | None = None) -> list[Manifest]:
    """
    Return the objects that expose a service; empty for a service inside of the cluster only.

    `pool`: its InferencePool, if the cluster can have one.
    """
    pools = [] if pool is None else [pool]
    match exposure.type:
        case "Ingress":
            return [_ingress(owner, exposure), *_certificate(owner, exposure)]
        case "HTTPRoute":
            return [*pools, _route(owner, exposure, pool)]  # the Gateway's listener has the certificate
    return pools


def service_url(owner: Owner, exposure: Exposure) -> str:
    """Return the URL of the API through the Service or an Ingress."""
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
    return owned(
        owner, "networking.k8s.io/v1", "Ingress", owner.name, {"spec": body}, annotations=annotations
    )


def _route(owner: Owner, exposure: Exposure, pool: Manifest | None) -> Manifest:
    parents = [
        given(name=reference.name, namespace=reference.namespace, sectionName=reference.section_name)
        for reference in exposure.gateway_refs or ()
    ]
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"name": owner.name, "port": 80} if pool is None else _reference(pool)],
        "timeouts": {"request": "0s"},  # a stream takes as long as it takes
    }
    body = {"parentRefs": parents, "hostnames": list(exposure.hosts), "rules": [rule]}
    annotations = dict(exposure.annotations)
    return owned(owner, GATEWAY_API, "HTTPRoute", owner.name, {"spec": body}, annotations=annotations)


def _reference(pool: Manifest) -> Manifest:
    """Return the backend of a route: an InferencePool has ports of its own."""
    group, _, _ = pool["apiVersion"].partition("/")
    return {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}


def _certificate(owner: Owner, exposure: Exposure) -> list[Manifest]:
    if exposure.tls is None or exposure.tls.issuer_ref is None:
        return []
    return [certificate(owner, owner.name, _secret(owner, exposure), exposure.hosts, exposure.tls.issuer_ref)]


def certificate(
    owner: Owner, name: str, secret: str, hosts: Sequence[str], issuer: Issuer, **more: Any
) -> Manifest:
    """Return the Certificate from which cert-manager creates `secret`. `more`: other fields of its spec."""
    issued = {"secretName": secret, "dnsNames": list(hosts), "issuerRef": issuer.model_dump()}
    return owned(owner, CERTIFICATE_API, "Certificate", name, {"spec": {**issued, **more}})


def _secret(owner: Owner, exposure: Exposure) -> str:
    assert exposure.tls is not None
    return exposure.tls.secret_name or f"{owner.name}-tls"


def gateways(service: Manifest) -> list[ObjectName]:
    """The Gateways that an InferenceService names for its HTTPRoute."""
    exposure = service["spec"].get("exposure", {})
    if exposure.get("type") != "HTTPRoute":
        return []
    home = service["metadata"]["namespace"]
    return [
        (reference.get("namespace", home), reference["name"]) for reference in exposure.get("gatewayRefs", ())
    ]


EXPOSED = "ExposureReady"
"""Condition: whether all Gateways serve the HTTPRoute."""

PORTS = {"https": 443, "http": 80}


def route_url(owner: Owner, exposure: Exposure, gateways: Mapping[ObjectName, Manifest]) -> str:
    """Return the URL of the API through a listener, preferably one with TLS."""
    host = exposure.hosts[0]
    served = [
        ("http" if listener["protocol"] == "HTTP" else "https", listener["port"])
        for reference in exposure.gateway_refs or ()
        for listener in _listeners(owner, reference, gateways)
        if _serves(listener, host)
    ]
    # Assume TLS at its usual port for a Gateway that cannot be read.
    scheme, port = min(served, key=lambda one: one[0] == "http", default=("https", PORTS["https"]))
    return f"{scheme}://{host}" + ("" if port == PORTS[scheme] else f":{port}")


def route_fact(owner: Owner, exposure: Exposure, route: Manifest | None) -> Fact:
    """Return the condition ExposureReady from the route's status, which Gateway controllers write."""
    for reference in exposure.gateway_refs or ():
        conditions = list(_conditions(owner, reference, route or {}))
        name = f"Gateway {reference.namespace or owner.namespace}/{reference.name}"
        if not conditions:
            message = f"{name} has not processed the HTTPRoute. Do the Gateway and its controller run?"
            return Fact(EXPOSED, None, "Pending", message)
        for condition in conditions:
            if condition["status"] != "True":
                message = (
                    f"{name}: {condition['type']} is {condition['status']}: {condition.get('message', '')}"
                )
                return Fact(EXPOSED, False, condition["reason"], message.rstrip(": "))
    return Fact(EXPOSED, True, "Accepted", "Every Gateway serves the HTTPRoute.")


def _listeners(
    owner: Owner, reference: GatewayReference, gateways: Mapping[ObjectName, Manifest]
) -> Sequence[Manifest]:
    gateway = gateways.get((reference.namespace or owner.namespace, reference.name), {})
    listeners: list[Manifest] = gateway.get("spec", {}).get("listeners", [])
    return [listener for listener in listeners if reference.section_name in (None, listener["name"])]


def _serves(listener: Manifest, host: str) -> bool:
    """Whether the listener serves the host. A listener without a host name serves all."""
    if listener["protocol"] not in ("HTTP", "HTTPS"):
        return False
    pattern: str = listener.get("hostname", "")
    return pattern in ("", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _conditions(owner: Owner, reference: GatewayReference, route: Manifest) -> Iterator[Mapping[str, Any]]:
    """Yield the current conditions `Accepted` and `ResolvedRefs` of the route for one Gateway."""
    wanted = (reference.namespace or owner.namespace, reference.name, reference.section_name)
    for parent in route.get("status", {}).get("parents", ()):
        gateway = parent["parentRef"]
        if (gateway.get("namespace", owner.namespace), gateway["name"], gateway.get("sectionName")) != wanted:
            continue
        for condition in parent.get("conditions", ()):
            current = condition.get("observedGeneration", 0) >= route["metadata"].get("generation", 0)
            if condition["type"] in ("Accepted", "ResolvedRefs") and current:
                yield condition
