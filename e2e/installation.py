"""The operator, installed by its chart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.kubernetes import Kubernetes, command

ROOT = Path(__file__).parent.parent
CHART = ROOT / "charts" / "baton"
RELEASE = "baton"
INSTALLED_S = 180


@dataclass(frozen=True, slots=True)
class Installation:
    """A release of the chart in a separate namespace."""

    cluster: Kubernetes

    def helm(self, *arguments: str) -> str:
        return command(
            ["helm", "--namespace", self.cluster.namespace, *arguments], timeout_s=INSTALLED_S + 30
        )

    def apply(self, **values: str) -> str:
        """Run `helm install`, or `helm upgrade` if the release exists, and wait until its pods are ready."""
        settings = [f"--set={name}={value}" for name, value in {**_images(), **_dotted(values)}.items()]
        return self.helm(
            "upgrade", "--install", RELEASE, str(CHART), *settings, "--wait", f"--timeout={INSTALLED_S}s"
        )


def image(name: str) -> str:
    """Return the image `name` of the tests: operator, router, worker or vllm."""
    return f"{_registry()}/baton-{name}:{_tag()}"


def _images() -> Mapping[str, str]:
    return {
        "images.registry": _registry(),
        **{f"images.{name}.tag": _tag() for name in ("operator", "router", "worker")},
    }


def _registry() -> str:
    return os.environ.get("BATON_E2E_REGISTRY", "baton.local")


def _tag() -> str:
    return os.environ.get("BATON_E2E_TAG", "e2e")


def _dotted(values: Mapping[str, str]) -> Mapping[str, str]:
    return {name.replace("_", "."): value for name, value in values.items()}
