"""Workers and routers that show each other a certificate: who has it is answered, and nobody else."""

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
from e2e.patience import until
from e2e.relays import QUESTION, pulled_bytes
from e2e.services import NAME, READY_S, service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic
from tests.authority import Authority

SECRET = "relay-mtls"
TLS_PORT, PROBES_PORT = 8000, 8001

PER_SECOND = 1
RENEWED_S = 300
"""Until kubelets have brought a Secret that has changed to all who mount it."""

ANSWERED_S = 30.0

OURS, THEIRS = Authority(), Authority()


@pytest.fixture(scope="module")
def shown(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the service's own certificate, as its Secret has it."""
    return OURS.fill(tmp_path_factory.mktemp("shown"), _name(cluster))


def test_a_service_with_certificates_answers(cluster: Kubernetes, shown: Path) -> None:
    watch = Stopwatch("certificates")
    cluster.apply(_secret(shown))
    wanted = service()
    wanted["spec"]["security"] = {"mutualTls": {"secretName": SECRET}}
    cluster.apply(wanted)
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    watch.note("applied -> Ready")
    with cluster.reach(NAME) as url:
        said = ask(url, NAME, QUESTION)
    watch.note("Ready -> first answer")
    print(f"\n{said!r}")
    assert said
    # Probes and whoever measures show none, at a port of their own.
    assert pulled_bytes(cluster, _pods(cluster)["decode"], PROBES_PORT) > 0


def test_who_shows_another_certificate_or_none_is_refused(
    cluster: Kubernetes, shown: Path, tmp_path: Path
) -> None:
    neighbour = OURS.fill(tmp_path / "neighbour", f"other.{cluster.namespace}.svc.cluster.local")
    foreign = THEIRS.fill(tmp_path / "foreign", _name(cluster))
    over = OURS.fill(tmp_path / "over", _name(cluster), over=True)
    for role in ("prefill", "decode"):
        with cluster.reach_pod(_pods(cluster)[role], TLS_PORT) as address:
            assert _status(f"https://{address}/load", _tls(shown, shown)) == 200, role
            for wrong in (neighbour, foreign, over, None):
                assert _status(f"https://{address}/load", _tls(shown, wrong)) is None, f"{role}: {wrong}"
            assert _status(f"http://{address}/load") is None, f"{role}: in the clear"
    with cluster.reach(NAME) as url:
        assert ask(url, NAME, QUESTION), "those who belong to it go on"


def test_a_certificate_is_renewed_without_a_restart_or_a_failed_request(
    cluster: Kubernetes, shown: Path
) -> None:
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
        assert ask(url, NAME, f"Once more: {QUESTION}")
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
    """Names by roles."""
    found: dict[str, Any] = {}
    for pod in cluster.objects("pods"):
        found[pod["metadata"]["labels"][labels.ROLE]] = pod["metadata"]["name"]
    return found


def _tls(trusted: Path, shown: Path | None) -> ssl.SSLContext:
    """Trusts the authority of `trusted`, and shows what is in `shown`."""
    made = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    made.check_hostname = False  # pods are known by their service's name, not by their address
    if shown is not None:
        made.load_cert_chain(shown / "tls.crt", shown / "tls.key")
    return made


def _status(url: str, tls: ssl.SSLContext | bool = True) -> int | None:
    """Of an answer; None if the connection comes to nothing."""
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
        there = connection.getpeercert(binary_form=True)
    return there == ssl.PEM_cert_to_DER_cert((folder / "tls.crt").read_text())
