"""
The state of one InferenceService in the cluster, and the reader that takes it from the cache.

Every object of a service carries the name of the service as a label. RoleScalers may belong to anybody and
name the service in their spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import labels
from baton_operator import names
from baton_operator.cluster.api_resources import OWNED
from baton_operator.cluster.cache import ObjectCache
from baton_operator.manifests import exposure
from baton_operator.manifests.objects import Key, Manifest, Owner, key, seconds
from baton_operator.rollout.rollout_health import HealthSource, NoHealthSource, RolloutHealth

FINISHED = frozenset({"Succeeded", "Failed"})
"""Phases of pods that run nothing any more."""

JOB = "batch.kubernetes.io/job-name"
"""Label by which Kubernetes marks the pods of a Job."""


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
    phase: str = ""
    """Pending, Running, Succeeded, Failed or Unknown, as Kubernetes has it."""
    job: str = ""
    """Name of the Job that the pod belongs to; empty for pods of Deployments."""
    note: str = ""
    """What a container that succeeded wrote to its termination log; empty if none did."""

    @property
    def finished(self) -> bool:
        """Whether all containers have ended for good, as after an eviction. Only the object is left."""
        return self.phase in FINISHED

    @classmethod
    def of(cls, manifest: Manifest) -> Pod:
        """From what the API server says."""
        metadata, status = manifest["metadata"], manifest.get("status", {})
        conditions = {one["type"]: one for one in status.get("conditions", ())}
        containers = status.get("containerStatuses", ())
        all_of_them = [*status.get("initContainerStatuses", ()), *containers]
        return cls(
            name=metadata["name"],
            role=metadata["labels"].get(labels.ROLE, ""),
            revision=metadata["labels"].get(labels.REVISION, ""),
            ready=conditions.get("Ready", {}).get("status") == "True",
            terminating="deletionTimestamp" in metadata,
            restarts=max((one.get("restartCount", 0) for one in containers), default=0),
            trouble=_trouble(status, conditions, all_of_them),
            created=seconds(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else 0.0,
            address=status.get("podIP", ""),
            phase=status.get("phase", ""),
            job=metadata["labels"].get(JOB, ""),
            note=next(filter(None, (_note(one) for one in all_of_them)), ""),
        )


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One InferenceService with all that belongs to it."""

    service: Manifest
    objects: Mapping[Key, Manifest]
    """What the operator has made for it."""
    pods: Sequence[Pod] = ()
    apis: frozenset[str] = frozenset()
    """Optional APIs that the cluster has, such as gateway.networking.k8s.io/v1."""
    health: Mapping[str, RolloutHealth] = field(default_factory=dict)
    """What lately became of requests, by revision, if there are several."""
    gateways: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    """Gateways of its HTTPRoute that can be read, by namespace and name."""

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


def pod_creation_failure(deployment: Manifest | None) -> str:
    """
    Return why the API server refuses the pods of a Deployment; an empty string if it refuses none.

    Such pods do not exist: quotas, Pod Security and missing accounts show only in this condition.
    """
    for one in (deployment or {}).get("status", {}).get("conditions", ()):
        if one["type"] == "ReplicaFailure" and one["status"] == "True":
            return _sentence(one.get("reason", "FailedCreate"), one.get("message", ""))
    return ""


def _trouble(
    status: Mapping[str, Any], conditions: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]
) -> str:
    if status.get("phase") == "Failed":
        ended = [one.get("state", {}).get("terminated") or {} for one in containers]
        failed = next((one for one in ended if one.get("exitCode")), {})
        reason = status.get("reason") or failed.get("reason") or "Failed"
        return _sentence(reason, status.get("message") or failed.get("message", ""))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _sentence(scheduled.get("reason", "Unschedulable"), scheduled.get("message", ""))
    for one in containers:
        waiting = one.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            # The last words of the container that failed say more than "back-off restarting".
            last = one.get("lastState", {}).get("terminated") or {}
            return _sentence(waiting["reason"], last.get("message") or waiting.get("message", ""))
    return ""


def _sentence(reason: str, message: str) -> str:
    return f"{reason}: {' '.join(message.split())}".rstrip(": ")


def _note(container: Mapping[str, Any]) -> str:
    ended = container.get("state", {}).get("terminated") or {}
    words: str = ended.get("message", "")
    return "" if ended.get("exitCode", 1) else words.strip()


ALIVE = ("Warming", "Serving", "Draining")
"""Phases of revisions of which something is there."""

ROLE_SCALER = "RoleScaler"
"""The kind."""

_OBJECTS = tuple(one.kind for one in OWNED if one.kind != "Pod")


class ClusterReader:
    """Reads for all services. `tries` are asked while a rollout is under way."""

    def __init__(self, cache: ObjectCache, health_source: HealthSource | None = None) -> None:
        self._cache = cache
        self._health_source: HealthSource = health_source or NoHealthSource()

    def service(self, namespace: str, name: str) -> Manifest | None:
        """The InferenceService; None if there is none, or it is being deleted."""
        there = self._cache.get("InferenceService", namespace, name)
        return None if there is None or "deletionTimestamp" in there["metadata"] else there

    def scalers(self, namespace: str, name: str) -> list[Manifest]:
        """All RoleScalers that name the service."""
        return list(self._cache.of_service(namespace, name, ROLE_SCALER))

    def scaler(self, namespace: str, name: str, role: str) -> Manifest | None:
        """The RoleScaler that the role of the service listens to."""
        return self._cache.get(ROLE_SCALER, namespace, names.role(name, role))

    def pods(self, namespace: str, name: str) -> list[Pod]:
        """The service's workers and routers."""
        return [Pod.of(one) for one in self._cache.of_service(namespace, name, "Pod")]

    def services(self) -> list[tuple[str, str]]:
        """Namespace and name of all InferenceServices."""
        return self._cache.services()

    def state(self, namespace: str, name: str) -> int:
        """A number that differs whenever anything of the service has changed."""
        return self._cache.changed(namespace, name)

    async def around(self, service: Manifest, of_it: list[Manifest]) -> ClusterState:
        """The service with all that belongs to it, and those of its RoleScalers."""
        metadata = service["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        owned = self._cache.of_service(namespace, name, *_OBJECTS)
        objects: dict[Key, Manifest] = {key(one): one for one in owned}
        objects |= {key(one): one for one in of_it if _is_bound(one, name)}
        there = self.pods(namespace, name)
        health = await self._tried(service, there)
        return ClusterState(service, objects, there, self._cache.apis, health, self._gateways(service))

    def _gateways(self, service: Manifest) -> dict[exposure.GatewayName, Manifest]:
        """Those of the service's HTTPRoute that exist, and that the operator may read."""
        wanted = exposure.gateways(service)
        found = {name: self._cache.get("Gateway", *name) for name in wanted}
        return {name: one for name, one in found.items() if one is not None}

    async def _tried(self, service: Manifest, pods: Sequence[Pod]) -> Mapping[str, RolloutHealth]:
        uid = service["metadata"]["uid"]
        phases = [one["phase"] for one in service.get("status", {}).get("revisions", ())]
        if sum(phase in ALIVE for phase in phases) < 2:
            self._health_source.forget(uid)
            return {}
        routers = {pod.name: pod.address for pod in pods if pod.role == names.ROUTER and pod.address}
        return await self._health_source.recent(uid, routers)


def _is_bound(scaler: Manifest, service: str) -> bool:
    """Whether it is the one that the service listens to."""
    name: str = scaler["metadata"]["name"]
    return name == names.role(service, scaler["spec"]["role"])
