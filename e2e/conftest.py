"""A cluster with the operator in it, and a namespace for each file of stories."""

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
    """Stories need a cluster, and the programs that users speak to one with."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: set KUBECONFIG, or run e2e/run")
    for program in ("kubectl", "helm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="session")
def installation(tools: None) -> Iterator[Installation]:
    """The operator, ready."""
    system = _made(SYSTEM)
    made = Installation(system)
    watch = Stopwatch("the chart")
    made.apply()
    watch.note("helm install")
    yield made
    made.helm("uninstall", "baton", "--wait", "--ignore-not-found")
    _deleted(system)


@pytest.fixture(scope="module")
def cluster(installation: Installation, request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """A namespace in which only restricted pods are admitted."""
    story = Path(request.module.__file__).stem.removeprefix("test_").replace("_", "-")
    made = _made(f"e2e-{story}")
    yield made
    if request.node.stash.get(failed, False):
        folder = EVIDENCE / story
        evidence.gather([made, installation.cluster], folder)
        print(f"\nobjects, events and logs: {folder}")
    _deleted(made)


def _made(namespace: str) -> Kubernetes:
    made = Kubernetes(namespace)
    made.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": RESTRICTED},
        }
    )
    return made


def _deleted(cluster: Kubernetes) -> None:
    """Services and their pods first: a namespace with pods in it is not looked at again for minutes."""
    if cluster.namespace != SYSTEM:
        cluster.kubectl("delete", "inferenceservices", "--all", "--cascade=foreground", timeout_s=ENDED_S)
    cluster.kubectl("delete", "namespace", cluster.namespace, timeout_s=ENDED_S)
