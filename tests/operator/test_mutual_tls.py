"""Certificates that workers and routers show to each other: what becomes of each way to ask for them."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api import labels
from baton_operator.manifests.exposure import CERTIFICATE_API
from baton_operator.manifests.mutual_tls import by_issuer
from baton_operator.manifests.objects import Manifest
from baton_operator.reconcilers.plan import OperatorDefaults, plan_service
from tests.operator.fake_cluster import IMAGES, FakeCluster

PAIR: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {}}
SECRET: dict[str, Any] = {**PAIR, "security": {"mutualTls": {"secretName": "mine"}}}
ISSUED: dict[str, Any] = {**PAIR, "security": {"mutualTls": {"issuerRef": {"name": "own"}}}}

FLAGS = ["--tls-folder=/etc/baton/mtls", "--tls-name=chat.models.svc.cluster.local"]


def settled(spec: dict[str, Any]) -> FakeCluster:
    cluster = FakeCluster(spec)
    cluster.apis = frozenset({CERTIFICATE_API})
    cluster.settle()
    return cluster


def deployments(cluster: FakeCluster) -> dict[str, Manifest]:
    """Pods of each Deployment, by its name without a revision."""
    pods = {}
    for key, manifest in cluster.objects.items():
        if key[1] == "Deployment":
            role = manifest["metadata"]["labels"][labels.ROLE]
            pods[role] = manifest["spec"]["template"]["spec"]
    return pods


def secrets(pod: Manifest) -> list[str]:
    """The Secrets that it mounts where certificates are looked for."""
    (container,) = pod["containers"]
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    return [
        volume["secret"]["secretName"]
        for volume in pod["volumes"]
        if "secret" in volume and mounts[volume["name"]]["mountPath"] == "/etc/baton/mtls"
    ]


@pytest.mark.parametrize(
    ("spec", "secret"), [(SECRET, "mine"), (ISSUED, "chat-mtls")], ids=["secret", "issuer"]
)
def test_all_pods_mount_the_one_secret_and_speak_tls(spec: dict[str, Any], secret: str) -> None:
    cluster = settled(spec)
    pods = deployments(cluster)
    assert set(pods) == {"router", "prefill", "decode"}
    for pod in pods.values():
        assert secrets(pod) == [secret]
        assert set(FLAGS) < set(pod["containers"][0]["args"])
    for key, manifest in cluster.objects.items():
        if key[1] == "Service" and key[2] != "chat":
            (port,) = manifest["spec"]["ports"]
            assert port["appProtocol"] == "https", "routers are told so by slices"
            assert port["targetPort"] == "https"


def test_kubelets_ask_at_a_port_where_they_need_no_certificate() -> None:
    container = deployments(settled(SECRET))["decode"]["containers"][0]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert f"--health-port={ports['http']}" in container["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"


def test_mutual_tls_metrics_port_is_the_only_open_one() -> None:
    for spec, ports in ((SECRET, [8001]), (PAIR, [])):
        policies = [one for key, one in settled(spec).objects.items() if "workers" in key[2]]
        (policy,) = (one for one in policies if one["kind"] == "NetworkPolicy")
        open_to_all = [one for one in policy["spec"]["ingress"] if "from" not in one]
        assert [port["port"] for one in open_to_all for port in one["ports"]] == ports


def test_events_beside_it_have_no_tokens_in_them() -> None:
    assert "--no-kv-tokens" in deployments(settled(SECRET))["prefill"]["containers"][0]["args"]


def test_mutual_tls_issuer_certificate_has_service_name() -> None:
    """A Secret without an issuer needs no Certificate."""
    cluster = settled(ISSUED)
    assert cluster.names("Certificate") == ["chat-mtls"]
    (certificate,) = (one["spec"] for key, one in cluster.objects.items() if key[1] == "Certificate")
    assert certificate["dnsNames"] == ["chat.models.svc.cluster.local"]
    assert certificate["issuerRef"] == {"name": "own", "kind": "Issuer"}
    assert certificate["secretName"] == "chat-mtls"
    assert settled(SECRET).names("Certificate") == []


def test_without_it_nothing_of_it_is_there() -> None:
    cluster = settled(PAIR)
    assert cluster.names("Certificate") == []
    for pod in deployments(cluster).values():
        assert secrets(pod) == []
        assert not [one for one in pod["containers"][0]["args"] if one.startswith("--tls")]


def test_routers_present_certificate_while_old_revision_needs_it() -> None:
    cluster = settled(ISSUED)
    cluster.change(PAIR)
    cluster.reconcile()
    assert secrets(deployments(cluster)["router"]) == ["chat-mtls"], "the old workers serve on"
    assert cluster.names("Certificate") == ["chat-mtls"]
    cluster.settle()
    assert secrets(deployments(cluster)["router"]) == []
    assert cluster.names("Certificate") == []


def test_mutual_tls_operator_default_applies_to_unset_services() -> None:
    defaults = OperatorDefaults(IMAGES.worker, IMAGES.router, by_issuer("ClusterIssuer/all"))
    for spec, issuers in ((PAIR, [{"name": "all", "kind": "ClusterIssuer"}]), (SECRET, [])):
        cluster = FakeCluster(spec)
        cluster.apis = frozenset({CERTIFICATE_API})
        applied = plan_service(cluster.observe(), defaults, cluster.now).apply
        assert [one["spec"]["issuerRef"] for one in applied if one["kind"] == "Certificate"] == issuers


def test_mutual_tls_without_cert_manager_is_reported_in_status() -> None:
    cluster = FakeCluster(ISSUED)
    cluster.settle()
    assert cluster.names("Certificate") == []
    assert cluster.condition("SpecSupported")[0] == "False"
    assert secrets(deployments(cluster)["decode"]) == ["chat-mtls"], "in the clear nobody is spoken to"
