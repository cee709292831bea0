"""What is in the cluster of one InferenceService, as a plan is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from baton_api import labels
from baton_operator.manifests.objects import Manifest, Owner
from baton_operator.trial import Tried

Key = tuple[str, str, str]
"""apiVersion, kind and name of an object in the service's namespace."""


def key(manifest: Manifest) -> Key:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a service's workers or routers."""

    name: str
    role: str
    revision: str
    ready: bool
    terminating: bool
    restarts: int
    """Of its container."""
    trouble: str
    """Why it does not run, in Kubernetes' word and message; empty if it does."""
    created: float = 0.0
    """Unix seconds."""
    address: str = ""
    """Its IP address; empty if it has none yet."""

    @classmethod
    def of(cls, manifest: Manifest) -> Pod:
        """From what the API server says."""
        metadata, status = manifest["metadata"], manifest.get("status", {})
        conditions = {one["type"]: one for one in status.get("conditions", ())}
        containers = status.get("containerStatuses", ())
        return cls(
            name=metadata["name"],
            role=metadata["labels"].get(labels.ROLE, ""),
            revision=metadata["labels"].get(labels.REVISION, ""),
            ready=conditions.get("Ready", {}).get("status") == "True",
            terminating="deletionTimestamp" in metadata,
            restarts=max((one.get("restartCount", 0) for one in containers), default=0),
            trouble=_trouble(conditions, [*status.get("initContainerStatuses", ()), *containers]),
            created=seconds(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else 0.0,
            address=status.get("podIP", ""),
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """One InferenceService with all that belongs to it."""

    service: Manifest
    objects: Mapping[Key, Manifest]
    """What the operator has made for it."""
    pods: Sequence[Pod] = ()
    apis: frozenset[str] = frozenset()
    """Optional APIs that the cluster has, such as gateway.networking.k8s.io/v1."""
    tried: Mapping[str, Tried] = field(default_factory=dict)
    """What lately became of requests, by generation, if there are several."""

    @property
    def owner(self) -> Owner:
        metadata = self.service["metadata"]
        return Owner(metadata["name"], metadata["namespace"], metadata["uid"])

    @property
    def generation(self) -> int:
        """Of the spec, as Kubernetes counts its changes."""
        return int(self.service["metadata"].get("generation", 0))

    @property
    def status(self) -> dict[str, Any]:
        """What was last said of it."""
        return dict(self.service.get("status", {}))

    def of_kind(self, kind: str) -> list[Manifest]:
        return [one for (_, there, _), one in sorted(self.objects.items()) if there == kind]

    def find(self, api: str, kind: str, name: str) -> Manifest | None:
        return self.objects.get((api, kind, name))


def seconds(time: str) -> float:
    """
    Unix seconds of a time as Kubernetes writes it.

    >>> seconds("1970-01-01T00:01:00Z")
    60.0
    """
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def timestamp(time: float) -> str:
    """
    A time as Kubernetes writes it, in whole seconds.

    >>> timestamp(60.7)
    '1970-01-01T00:01:00Z'
    """
    return datetime.fromtimestamp(int(time), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _trouble(conditions: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> str:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}".rstrip(": ")
    for one in containers:
        waiting = one.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""
