"""
The state of one InferenceService in the cluster, and the reader that takes it from the cache.

Every object of a service carries the name of the service as a label. RoleScalers may lack the label; their
spec names the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import labels
from baton_operator import names
from baton_operator.cluster.api_resources import OWNED
from baton_operator.cluster.cache import ObjectCache
from baton_operator.cluster.rollout_health import RolloutHealth, RouterHealthSource
from baton_operator.manifests import exposure
from baton_operator.manifests.objects import Key, Manifest, ObjectName, Owner, by_type, key, seconds
from baton_operator.manifests.workers import LEADER, WORKER_INDEX

FINISHED = frozenset({"Succeeded", "Failed"})
"""Phases of pods whose containers have all ended."""

JOB = "batch.kubernetes.io/job-name"
"""Label of the pods of a Job."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a worker, a router or a Job."""

    name: str
    role: str
    revision: str
    ready: bool
    terminating: bool
    restarts: int
    """Restarts of its main container."""
    trouble: str
    """Reason and message of Kubernetes if it does not run; otherwise empty."""
    created: float = 0.0
    """Unix seconds."""
    address: str = ""
    """IP address, or empty."""
    phase: str = ""
    """Pending, Running, Succeeded, Failed or Unknown."""
    job: str = ""
    """Name of its Job; empty for pods of Deployments."""
    note: str = ""
    """Termination log of a container that succeeded, or empty."""
    follower: bool = False
    """Whether it is another node than the first of a worker with several nodes."""

    @property
    def finished(self) -> bool:
        """Whether all containers have ended, as after an eviction."""
        return self.phase in FINISHED

    @property
    def host(self) -> str:
        """Its address as in a URL."""
        return f"[{self.address}]" if ":" in self.address else self.address

    @classmethod
    def of(cls, manifest: Manifest) -> Pod:
        """Return the pod from its manifest."""
        metadata, status = manifest["metadata"], manifest.get("status", {})
        conditions = by_type(manifest)
        containers = status.get("containerStatuses", ())
        all_of_them = [*status.get("initContainerStatuses", ()), *containers]
        return cls(
            name=metadata["name"],
            role=metadata["labels"].get(labels.ROLE, ""),
            revision=metadata["labels"].get(labels.REVISION, ""),
            ready=conditions.get("Ready", {}).get("status") == "True",
            terminating="deletionTimestamp" in metadata,
            restarts=max((container.get("restartCount", 0) for container in containers), default=0),
            trouble=_trouble(status, conditions, all_of_them),
            created=seconds(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else 0.0,
            address=status.get("podIP", ""),
            phase=status.get("phase", ""),
            job=metadata["labels"].get(JOB, ""),
            note=next(filter(None, (_note(one) for one in all_of_them)), ""),
            follower=metadata["labels"].get(WORKER_INDEX, LEADER) != LEADER,
        )


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One InferenceService with its objects and pods."""

    service: Manifest
    objects: Mapping[Key, Manifest]
    """Objects that the operator created for it."""
    pods: Sequence[Pod] = ()
    apis: frozenset[str] = frozenset()
    """Optional APIs that the cluster serves, such as gateway.networking.k8s.io/v1."""
    health: Mapping[str, RolloutHealth] = field(default_factory=dict)
    """Rollout health by revision; empty unless several revisions exist."""
    gateways: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    """Readable Gateways of its HTTPRoute, by namespace and name."""

    @property
    def owner(self) -> Owner:
        metadata = self.service["metadata"]
        return Owner(metadata["name"], metadata["namespace"], metadata["uid"])

    @property
    def generation(self) -> int:
        """metadata.generation: the version of the spec."""
        return int(self.service["metadata"].get("generation", 0))

    @property
    def status(self) -> dict[str, Any]:
        """The last written status."""
        return dict(self.service.get("status", {}))

    def of_kind(self, kind: str) -> list[Manifest]:
        return [one for (_, of_kind, _), one in sorted(self.objects.items()) if of_kind == kind]

    def find(self, api: str, kind: str, name: str) -> Manifest | None:
        return self.objects.get((api, kind, name))


def pod_creation_failure(deployment: Manifest | None) -> str:
    """Return why the API server rejects the pods of a Deployment; empty if it rejects none. Such pods do not
    exist: quotas, Pod Security and missing accounts show only in this condition.
    """
    failure = by_type(deployment).get("ReplicaFailure", {})
    if failure.get("status") != "True":
        return ""
    return _sentence(failure.get("reason", "FailedCreate"), failure.get("message", ""))


def _trouble(
    status: Mapping[str, Any], conditions: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]
) -> str:
    if status.get("phase") == "Failed":
        ended = [container.get("state", {}).get("terminated") or {} for container in containers]
        failed = next((end for end in ended if end.get("exitCode")), {})
        reason = status.get("reason") or failed.get("reason") or "Failed"
        return _sentence(reason, status.get("message") or failed.get("message", ""))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _sentence(scheduled.get("reason", "Unschedulable"), scheduled.get("message", ""))
    for container in containers:
        state = container.get("state", {})
        waiting, last_run = state.get("waiting"), state.get("terminated") or {}
        if last_run.get("exitCode"):  # until Kubernetes starts it again
            return _sentence(last_run.get("reason") or "Error", last_run.get("message", ""))
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            # The termination message of a run that crashed says more than "back-off restarting".
            crashed = waiting["reason"] == "CrashLoopBackOff"
            last = container.get("lastState", {}).get("terminated") or {} if crashed else {}
            return _sentence(waiting["reason"], last.get("message") or waiting.get("message", ""))
    return ""


def _sentence(reason: str, message: str) -> str:
    return f"{reason}: {' '.join(message.split())}".rstrip(": ")


def _note(container: Mapping[str, Any]) -> str:
    ended = container.get("state", {}).get("terminated") or {}
    words: str = ended.get("message", "")
    return "" if ended.get("exitCode", 1) else words.strip()


ALIVE = ("Warming", "Serving", "Draining")
"""Phases of revisions that may have workers."""

ROLE_SCALER = "RoleScaler"
"""The kind."""

_OBJECTS = tuple(resource.kind for resource in OWNED if resource.kind != "Pod")


@dataclass(frozen=True, slots=True)
class ClusterReader:
    """Reads the state of services from the cache, and during rollouts their health from routers."""

    cache: ObjectCache
    health_source: RouterHealthSource | None = None

    def scaler(self, namespace: str, name: str, role: str) -> Manifest | None:
        """Return the RoleScaler that sets the replicas of this role."""
        return self.cache.get(ROLE_SCALER, namespace, names.role(name, role))

    def pods(self, namespace: str, name: str) -> list[Pod]:
        """Return the pods of workers, routers and Jobs of the service."""
        return [Pod.of(pod) for pod in self.cache.of_service(namespace, name, "Pod")]

    async def state_of(self, service: Manifest, scalers: list[Manifest]) -> ClusterState:
        """Return the state of the service. `scalers`: the RoleScalers that name it."""
        metadata = service["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        owned = self.cache.of_service(namespace, name, *_OBJECTS)
        objects: dict[Key, Manifest] = {key(manifest): manifest for manifest in owned}
        objects |= {key(scaler): scaler for scaler in scalers if _is_bound(scaler, name)}
        pods = self.pods(namespace, name)
        health = await self._rollout_health(service, pods)
        return ClusterState(service, objects, pods, self.cache.apis, health, self._gateways(service))

    def _gateways(self, service: Manifest) -> dict[ObjectName, Manifest]:
        """Return the existing Gateways of the HTTPRoute that the operator may read."""
        wanted = exposure.gateways(service)
        gateways = {name: self.cache.get("Gateway", *name) for name in wanted}
        return {name: gateway for name, gateway in gateways.items() if gateway is not None}

    async def _rollout_health(self, service: Manifest, pods: Sequence[Pod]) -> Mapping[str, RolloutHealth]:
        if self.health_source is None:
            return {}
        uid = service["metadata"]["uid"]
        phases = [revision["phase"] for revision in service.get("status", {}).get("revisions", ())]
        if sum(phase in ALIVE for phase in phases) < 2:
            self.health_source.forget(uid)
            return {}
        routers = {pod.name: pod.host for pod in pods if pod.role == names.ROUTER and pod.address}
        return await self.health_source.recent(uid, routers)


def _is_bound(scaler: Manifest, service: str) -> bool:
    """Return whether this RoleScaler sets the replicas of its role."""
    name: str = scaler["metadata"]["name"]
    return name == names.role(service, scaler["spec"]["role"])
