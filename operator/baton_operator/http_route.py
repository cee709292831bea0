"""
What Gateways make of a service's HTTPRoute: whether they serve it, and under which URL.

Gateways belong to others. Their listeners hold the certificates and decide between http and https, and their
controllers write into the route's status whether they serve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton_operator.conditions import Fact
from baton_operator.kinds.router_spec import Exposure, GatewayReference
from baton_operator.manifests.objects import Manifest, Owner

EXPOSED = "ExposureReady"
"""The condition that says whether the HTTPRoute is served."""

Name = tuple[str, str]
"""Namespace and name of a Gateway."""

PORTS = {"https": 443, "http": 80}


def gateways(service: Manifest) -> list[Name]:
    """The Gateways that an InferenceService names for its HTTPRoute."""
    exposure = service["spec"].get("exposure", {})
    if exposure.get("type") != "HTTPRoute":
        return []
    home = service["metadata"]["namespace"]
    return [(one.get("namespace", home), one["name"]) for one in exposure.get("gatewayRefs", ())]


def url(owner: Owner, exposure: Exposure, known: Mapping[Name, Manifest]) -> str:
    """Where clients find the API: as a listener has it, one with TLS if there are several."""
    host = exposure.hosts[0]
    served = [
        ("http" if listener["protocol"] == "HTTP" else "https", listener["port"])
        for one in exposure.gateway_refs or ()
        for listener in _listeners(owner, one, known)
        if _serves(listener, host)
    ]
    # A Gateway that cannot be read is taken to have TLS at its usual port.
    scheme, port = min(served, key=lambda one: one[0] == "http", default=("https", PORTS["https"]))
    return f"{scheme}://{host}" + ("" if port == PORTS[scheme] else f":{port}")


def fact(owner: Owner, exposure: Exposure, route: Manifest | None) -> Fact:
    """Whether each Gateway serves the route, by what its controller has written into the route's status."""
    for one in exposure.gateway_refs or ():
        conditions = list(_conditions(owner, one, route or {}))
        name = f"Gateway {one.namespace or owner.namespace}/{one.name}"
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
    owner: Owner, reference: GatewayReference, known: Mapping[Name, Manifest]
) -> Sequence[Manifest]:
    gateway = known.get((reference.namespace or owner.namespace, reference.name), {})
    listeners: list[Manifest] = gateway.get("spec", {}).get("listeners", [])
    return [one for one in listeners if reference.section_name in (None, one["name"])]


def _serves(listener: Manifest, host: str) -> bool:
    """Whether requests for the host come to the listener; one without a host name serves all."""
    if listener["protocol"] not in ("HTTP", "HTTPS"):
        return False
    pattern: str = listener.get("hostname", "")
    return pattern in ("", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _conditions(owner: Owner, reference: GatewayReference, route: Manifest) -> Iterator[Mapping[str, Any]]:
    """`Accepted` and `ResolvedRefs` for one Gateway, of the route as it is now."""
    wanted = (reference.namespace or owner.namespace, reference.name, reference.section_name)
    for parent in route.get("status", {}).get("parents", ()):
        there = parent["parentRef"]
        if (there.get("namespace", owner.namespace), there["name"], there.get("sectionName")) != wanted:
            continue
        for condition in parent.get("conditions", ()):
            current = condition.get("observedGeneration", 0) >= route["metadata"].get("generation", 0)
            if condition["type"] in ("Accepted", "ResolvedRefs") and current:
                yield condition
