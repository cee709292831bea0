"""A service's status of its HTTPRoute: the URL from the listener, and whether Gateways serve it."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.kinds.router_spec import Exposure
from baton_operator.manifests import exposure as exposures
from baton_operator.manifests.exposure import CERTIFICATE_API, GATEWAY_API
from baton_operator.manifests.objects import Manifest, Owner
from tests.operator.fake_cluster import FakeCluster

OWNER = Owner("chat", "models", "uid-1")
HOST = "chat.example.org"
ROUTE: Manifest = {"type": "HTTPRoute", "hosts": [HOST], "gatewayRefs": [{"name": "front"}]}
MINIMAL: Manifest = {"model": {"uri": "builtin://smollm2"}, "decode": {}}


def exposure(*references: Manifest) -> Exposure:
    return Exposure.model_validate({**ROUTE, "gatewayRefs": list(references) or ROUTE["gatewayRefs"]})


def listener(protocol: str, port: int, name: str = "web", **more: Any) -> Manifest:
    return {"name": name, "protocol": protocol, "port": port, **more}


URLS: dict[str, tuple[list[Manifest], list[Manifest], str]] = {
    "a listener with TLS": ([], [listener("HTTPS", 443)], f"https://{HOST}"),
    "one without": ([], [listener("HTTP", 80)], f"http://{HOST}"),
    "at another port": ([], [listener("HTTP", 8080)], f"http://{HOST}:8080"),
    "TLS at another port": ([], [listener("HTTPS", 8443)], f"https://{HOST}:8443"),
    "both": ([], [listener("HTTP", 80), listener("HTTPS", 443, "tls")], f"https://{HOST}"),
    "both, one named": (
        [{"name": "front", "sectionName": "web"}],
        [listener("HTTP", 80), listener("HTTPS", 443, "tls")],
        f"http://{HOST}",
    ),
    "TLS for another host": (
        [],
        [listener("HTTP", 80), listener("HTTPS", 443, "tls", hostname="other.example.org")],
        f"http://{HOST}",
    ),
    "TLS for all hosts of a domain": (
        [],
        [listener("HTTP", 80), listener("HTTPS", 443, "tls", hostname="*.example.org")],
        f"https://{HOST}",
    ),
    "a listener for something else": ([], [listener("HTTP", 80), listener("TCP", 5432, "db")], f"http://{HOST}"),
    "a Gateway that cannot be read": ([{"name": "hidden"}], [listener("HTTP", 80)], f"https://{HOST}"),
    "one of another namespace": (
        [{"name": "front", "namespace": "other"}], [listener("HTTP", 80)], f"https://{HOST}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", URLS)
def test_url_follows_the_listener(case: str) -> None:
    references, listeners, expected = URLS[case]
    gateways = {("models", "front"): {"spec": {"listeners": listeners}}}
    assert exposures.route_url(OWNER, exposure(*references), gateways) == expected


def parent(*conditions: Manifest, **reference: str) -> Manifest:
    return {"parentRef": {"name": "front", **reference}, "conditions": list(conditions)}


def condition(type: str, status: str, reason: str = "Because", generation: int = 2) -> Manifest:
    return {
        "type": type, "status": status, "reason": reason, "message": "A sentence.",
        "observedGeneration": generation,
    }  # fmt: skip


ACCEPTED, RESOLVED = condition("Accepted", "True"), condition("ResolvedRefs", "True")

FACTS: dict[str, tuple[list[Manifest], list[Manifest], tuple[bool | None, str]]] = {
    "nobody has processed it": ([], [], (None, "Pending")),
    "another Gateway has": ([], [parent(ACCEPTED, name="x")], (None, "Pending")),
    "before it was changed": ([], [parent(condition("Accepted", "True", generation=1))], (None, "Pending")),
    "it is accepted": ([], [parent(ACCEPTED, RESOLVED)], (True, "Accepted")),
    "by a Gateway of the same namespace, named": (
        [], [parent(ACCEPTED, namespace="models")], (True, "Accepted"),
    ),
    "it is not accepted": (
        [], [parent(condition("Accepted", "False", "NotAllowed"))], (False, "NotAllowed"),
    ),
    "its Service is not found": (
        [], [parent(ACCEPTED, condition("ResolvedRefs", "False", "NotFound"))], (False, "NotFound"),
    ),
    "other conditions": ([], [parent(ACCEPTED, condition("Special", "False"))], (True, "Accepted")),
    "one of two Gateways has not processed it": (
        [{"name": "front"}, {"name": "back"}], [parent(ACCEPTED)], (None, "Pending"),
    ),
    "another listener accepts it": (
        [{"name": "front", "sectionName": "tls"}], [parent(ACCEPTED, sectionName="web")], (None, "Pending"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTS)
def test_condition_follows_the_routes_status(case: str) -> None:
    references, parents, expected = FACTS[case]
    route = {"metadata": {"generation": 2}, "status": {"parents": parents}}
    fact = exposures.route_fact(OWNER, exposure(*references), route)
    assert (fact.true, fact.reason) == expected
    if not fact.true:
        assert "Gateway models/" in fact.message


def test_exposure_is_in_status_and_route_has_no_certificate() -> None:
    """A Certificate beside the route would be in a Secret that no listener reads."""
    cluster = FakeCluster({**MINIMAL, "exposure": {**ROUTE, "tls": {"issuerRef": {"name": "issuer"}}}})
    cluster.apis = frozenset({GATEWAY_API, CERTIFICATE_API})
    cluster.settle()
    assert cluster.names("Certificate") == []
    assert cluster.condition("ExposureReady") == ("Unknown", "Pending")
    route = cluster.objects[GATEWAY_API, "HTTPRoute", "chat"]
    route["status"] = {"parents": [parent(condition("Accepted", "False", "NoMatchingParent"))]}
    cluster.reconcile()
    assert cluster.condition("ExposureReady") == ("False", "NoMatchingParent")
    assert cluster.condition("Ready") == ("True", "Serving"), "inside of the cluster it is reached"
    cluster.change(MINIMAL)
    cluster.settle()
    assert "ExposureReady" not in {one["type"] for one in cluster.service["status"]["conditions"]}
