"""Failures of the node that `e2e/cluster` started: killed and stopped processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.kubernetes import command

CLUSTER = "BATON_CLUSTER"
"""The variable with the path of the script, set by `cluster run`."""


def kill_container(pod: Any) -> None:
    """Run `kill -9` on a pod's first container: it does not drain, and its connections are cut."""
    _, _, container = pod["status"]["containerStatuses"][0]["containerID"].partition("://")
    _cluster("kill", container)


@contextmanager
def without(component: str) -> Iterator[None]:
    """Stop `component`, such as kubelet, and start it again at the end."""
    _cluster("stop", component)
    try:
        yield
    finally:
        _cluster("start", component)


def needed() -> None:
    """Skip the test unless the node belongs to `e2e/cluster`."""
    if CLUSTER not in os.environ:
        pytest.skip("only the node of e2e/cluster can be broken: run e2e/run without KUBECONFIG")


def _cluster(*arguments: str) -> None:
    command([os.environ[CLUSTER], *arguments])
