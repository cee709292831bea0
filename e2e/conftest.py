"""Fixtures: a cluster with the operator, and a namespace for each test file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import evidence
from e2e.installation import ROOT, Installation
from e2e.kubernetes import Kubernetes
from e2e.stopwatch import Stopwatch

EVIDENCE = ROOT / "build" / "e2e"
SYSTEM = "baton-system"
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/warn": "restricted",
}

ENDED_S = 300

failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed:
        for node in (item, item.getparent(pytest.Module)):
            if node is not None:
                node.stash[failed] = True
    return report  # type: ignore[return-value]


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Skip all tests without a cluster, kubectl or helm."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: set KUBECONFIG, or run e2e/run")
    for program in ("kubectl", "helm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="session")
def installation(tools: None) -> Iterator[Installation]:
    """The installed operator."""
    system = _create(SYSTEM)
    release = Installation(system)
    watch = Stopwatch("the chart")
    release.apply()
    watch.note("helm install")
    yield release
    release.helm("uninstall", "baton", "--wait", "--ignore-not-found")
    _delete(system)


@pytest.fixture(scope="module")
def cluster(installation: Installation, request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """A namespace that admits only restricted pods."""
    story = Path(request.module.__file__).stem.removeprefix("test_").replace("_", "-")
    namespace = _create(f"e2e-{story}")
    yield namespace
    if request.node.stash.get(failed, False):
        folder = EVIDENCE / story
        evidence.gather([namespace, installation.cluster], folder)
        print(f"\nobjects, events and logs: {folder}")
    _delete(namespace)


def _create(namespace: str) -> Kubernetes:
    cluster = Kubernetes(namespace)
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": RESTRICTED},
        }
    )
    return cluster


def _delete(cluster: Kubernetes) -> None:
    """Delete services first: the controller checks a namespace with pods only every few minutes."""
    if cluster.namespace != SYSTEM:
        cluster.kubectl("delete", "inferenceservices", "--all", "--cascade=foreground", timeout_s=ENDED_S)
    cluster.kubectl("delete", "namespace", cluster.namespace, timeout_s=ENDED_S)
