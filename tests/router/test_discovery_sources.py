"""Sources of workers, from the settings."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import ValidationError

from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_router.settings import RouterSettings
from baton_router.workers.discovery.listed import ListedWorker
from baton_router.workers.discovery.sources import WorkerSources


def sources(**given: Any) -> WorkerSources:
    return WorkerSources(RouterSettings(**given), random.Random(0))


def test_flags_list_their_workers_at_once() -> None:
    built = sources(decode=("http://10.0.0.1:8001", "http://[fd00::1]"), prefill=("http://workers",))
    assert built.flags == {
        ListedWorker("10.0.0.1", 8001, Role.DECODE),
        ListedWorker("fd00::1", 80, Role.DECODE),
        ListedWorker("workers", 80, Role.PREFILL),
    }
    assert built.complete()


def test_workers_by_tls_require_a_router_certificate() -> None:
    with pytest.raises(SetupError, match=r"https://10.0.0.1:443 .* --tls-folder"):
        sources(decode=("https://10.0.0.1",))
    built = sources(decode=("https://10.0.0.1", "http://10.0.0.2"), tls_folder="/etc/mtls")
    assert {(one.name, one.secure) for one in built.flags} == {("10.0.0.1:443", True), ("10.0.0.2:80", False)}


EMPTY: dict[str, tuple[dict[str, Any], str]] = {
    "nobody asked": ({}, "none is configured: name one with --decode http://HOST:PORT"),
    "DNS has not answered": ({"decode_dns": ["w:80"]}, "DNS: decode w:80 has not reported yet"),
    "two have not answered": (
        {"decode_dns": ["w:80"], "kubernetes_selector": "a=b"},
        "DNS: decode w:80 and Kubernetes have not reported yet",
    ),
}


@pytest.mark.parametrize(("given", "message"), EMPTY.values(), ids=EMPTY.keys())
def test_empty_sources_explain_missing_workers(given: dict[str, Any], message: str) -> None:
    built = sources(**given)
    assert built.why_none() == message
    assert built.complete() == (not given)


WRONG = [
    ("decode_dns", "workers", "give NAME:PORT"),
    ("prefill_dns", "http://workers:80", "give NAME:PORT"),
    ("revision_weight", "abc", "Expected REVISION=NUMBER"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), WRONG)
def test_invalid_sources_are_refused_at_startup(name: str, value: str, remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        RouterSettings.model_validate({name: [value]})


def test_pod_uses_the_api_server_of_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, url in (("10.96.0.1", "https://10.96.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
        assert RouterSettings().kubernetes_api == url
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert RouterSettings().kubernetes_api == ""
