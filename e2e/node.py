"""What can be done to the node that `e2e/cluster` has started, and to no other: its own processes killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.kubernetes import command

CLUSTER = "BATON_CLUSTER"
"""The variable by which `cluster run` tells where the script is."""


def kill_container(pod: Any) -> None:
    """`kill -9` of a pod's first container: nothing is told, nothing is drained, connections are cut."""
    _, _, container = pod["status"]["containerStatuses"][0]["containerID"].partition("://")
    _cluster("kill", container)


@contextmanager
def without(component: str) -> Iterator[None]:
    """`component`, such as kubelet, is stopped, and runs again afterwards."""
    _cluster("stop", component)
    try:
        yield
    finally:
        _cluster("start", component)


def needed() -> None:
    """Skips a story where the node is somebody else's."""
    if CLUSTER not in os.environ:
        pytest.skip("only the node of e2e/cluster can be broken: run e2e/run without KUBECONFIG")


def _cluster(*arguments: str) -> None:
    command([os.environ[CLUSTER], *arguments])
