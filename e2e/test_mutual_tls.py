"""Mutual TLS between workers and routers: only holders of the service's certificate are served."""

from __future__ import annotations

import base64
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_api import labels
from e2e.client import ask
from e2e.kubernetes import Kubernetes, Manifest
from e2e.polling import until
from e2e.relays import QUESTION, converse, peer_tokens, pulled_bytes
from e2e.services import NAME, READY_S, service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic
from tests.authority import Authority

SECRET = "relay-mtls"
TLS_PORT, PROBES_PORT = 8000, 8001

PER_SECOND = 1
RENEWED_S = 300
"""Seconds in which kubelets update the mounted files of a changed Secret."""

ANSWERED_S = 30.0

OURS, THEIRS = Authority(), Authority()


@pytest.fixture(scope="module")
def shown(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the service's certificate, with the files of its Secret."""
    return OURS.fill(tmp_path_factory.mktemp("shown"), _name(cluster))


def test_service_with_certificates_answers(cluster: Kubernetes, shown: Path) -> None:
    watch = Stopwatch("certificates")
    cluster.apply(_secret(shown))
    manifest = service()
    manifest["spec"]["security"] = {"mutualTls": {"secretName": SECRET}}
    cluster.apply(manifest)
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    watch.note("applied -> Ready")
    with cluster.reach(NAME) as url:
        content = ask(url, NAME, QUESTION)
    watch.note("Ready -> first answer")
    print(f"\n{content!r}")
    assert content
    # Probes and Prometheus have no certificate and use a separate port.
    assert pulled_bytes(cluster, _pods(cluster)["decode"], PROBES_PORT) > 0


def test_prefill_pod_reads_from_the_decode_pod_by_tls(cluster: Kubernetes) -> None:
    with cluster.reach(NAME) as url:
        converse(url, NAME)
    assert peer_tokens(cluster, _pods(cluster)["prefill"], PROBES_PORT) > 0


def test_client_with_a_wrong_or_no_certificate_is_rejected(
    cluster: Kubernetes, shown: Path, tmp_path: Path
) -> None:
    neighbor = OURS.fill(tmp_path / "neighbor", f"other.{cluster.namespace}.svc.cluster.local")
    foreign = THEIRS.fill(tmp_path / "foreign", _name(cluster))
    over = OURS.fill(tmp_path / "over", _name(cluster), over=True)
    for role in ("prefill", "decode"):
        with cluster.reach_pod(_pods(cluster)[role], TLS_PORT) as address:
            assert _status(f"https://{address}/load", _tls(shown, shown)) == 200, role
            for wrong in (neighbor, foreign, over, None):
                assert _status(f"https://{address}/load", _tls(shown, wrong)) is None, f"{role}: {wrong}"
            assert _status(f"http://{address}/load") is None, f"{role}: without TLS"
    with cluster.reach(NAME) as url:
        assert ask(url, NAME, QUESTION), "the service still answers its own router"


def test_renewed_certificate_is_used_without_restart_or_failure(cluster: Kubernetes, shown: Path) -> None:
    pods = _pods(cluster)
    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("an answer before the change", lambda: traffic.outcome.answered, READY_S)
        watch = Stopwatch("a certificate")
        cluster.apply(_secret(OURS.fill(shown, _name(cluster))))
        for role in ("prefill", "decode"):
            with cluster.reach_pod(pods[role], TLS_PORT) as address:
                until(f"the {role} pod shows it", partial(_is_shown, address, shown), RENEWED_S)
        watch.note("renewed -> both workers show the new one")
        answered = traffic.outcome.answered
        until("ten answers after it", lambda: traffic.outcome.answered >= answered + 10, READY_S)
        pulled = pulled_bytes(cluster, pods["decode"], PROBES_PORT)
        assert ask(url, NAME, f"Again: {QUESTION}")
        assert pulled_bytes(cluster, pods["decode"], PROBES_PORT) > pulled
    assert not traffic.outcome.failures
    assert _pods(cluster) == pods
    for pod in cluster.objects("pods"):
        assert [one["restartCount"] for one in pod["status"]["containerStatuses"]] == [0]


def _name(cluster: Kubernetes) -> str:
    return f"{NAME}.{cluster.namespace}.svc.cluster.local"


def _secret(folder: Path) -> Manifest:
    files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in folder.iterdir()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": files}


def _pods(cluster: Kubernetes) -> dict[str, str]:
    """Return the pods' names by role."""
    names: dict[str, Any] = {}
    for pod in cluster.objects("pods"):
        names[pod["metadata"]["labels"][labels.ROLE]] = pod["metadata"]["name"]
    return names


def _tls(trusted: Path, shown: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the authority of `trusted` and presents the certificate of `shown`."""
    context = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    context.check_hostname = False  # pods are known by their service's name, not by their address
    if shown is not None:
        context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
    return context


def _status(url: str, tls: ssl.SSLContext | bool = True) -> int | None:
    """Return the status of a response, or None if the connection fails."""
    with httpx.Client(verify=tls, trust_env=False, timeout=ANSWERED_S) as client:
        try:
            return client.get(url).status_code
        except (httpx.NetworkError, httpx.ProtocolError):
            return None


def _is_shown(address: str, folder: Path) -> bool:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=ANSWERED_S) as plain,
        _tls(folder, folder).wrap_socket(plain) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
    return certificate == ssl.PEM_cert_to_DER_cert((folder / "tls.crt").read_text())
