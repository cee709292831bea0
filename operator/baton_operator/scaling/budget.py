"""
The GPU budget of all scaled services: free GPUs go to the roles with the highest pressure.

GPUs of a shrinking role become free when its pods are gone; until then they count as taken. The budget
limits growth and never shrinks a role in favor of another.

Allocated GPUs are read from the cluster: written replicas and existing pods. Only demands are remembered,
for a limited time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from baton_operator.cluster.state import ClusterReader, Pod
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import ObjectName
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import roles
from baton_operator.scaling.roles import desired_workers, worker_roles


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """GPU demand of one role. All numbers are at least 0."""

    holder: str
    """Namespace, service and role."""
    gpus: int
    """GPUs per worker."""
    replicas: int
    """Desired workers now."""
    pods: int
    """Existing pods, including terminating ones."""
    requested: int
    pressure: float
    """Need divided by ready workers."""

    @classmethod
    def of(
        cls, service: ObjectName, name: RoleName, role: WorkerRole, replicas: int, pods: Sequence[Pod]
    ) -> GpuDemand:
        """Return the demand of a role that keeps its replicas."""
        gpus = role.resources.accelerators * role.parallelism.nodes
        return cls(holder(service, name), gpus, replicas, len(of_role(name, pods)), replicas, pressure=0.0)

    @property
    def taken(self) -> int:
        """GPUs that this role takes."""
        return self.gpus * max(self.replicas, self.pods)


def allocate(demands: Iterable[GpuDemand], gpus: int) -> Mapping[str, int]:
    """
    Return the workers for each holder: the requested number, or fewer if it would grow.

    >>> small = GpuDemand("chat/prefill", 1, replicas=2, pods=2, requested=6, pressure=1.2)
    >>> great = GpuDemand("chat/decode", 2, replicas=1, pods=1, requested=3, pressure=2.0)
    >>> allocate([small, great], 10)
    {'chat/decode': 3, 'chat/prefill': 4}
    """
    ordered = sorted(demands, key=lambda demand: (-demand.pressure, demand.holder))
    free = gpus - sum(one.taken for one in ordered)
    allocation = {}
    for one in ordered:
        if one.requested <= one.replicas or not one.gpus:
            allocation[one.holder] = one.requested
            continue
        # Its own terminating pods still count as taken.
        more = min(one.requested - one.replicas, max(0, free) // one.gpus)
        free -= more * one.gpus
        allocation[one.holder] = one.replicas + more
    return allocation


class GpuBudget:
    """The GPUs that all scaled services share; 0: no limit."""

    def __init__(self, gpus: int, reader: ClusterReader) -> None:
        self._gpus = gpus
        self._reader = reader
        self._held: dict[ObjectName, tuple[int, tuple[GpuDemand, ...]]] = {}
        """Allocation of each service, with the state of the cache that it was read from."""
        self._demands: dict[ObjectName, tuple[float, Mapping[str, GpuDemand]]] = {}
        """Expiry time and demands by holder, per service."""
        self._reserved: dict[str, int] = {}
        """Granted workers that are not written yet."""

    def grant(
        self, service: ObjectName, demands: Sequence[GpuDemand], now: float, until: float
    ) -> Mapping[str, int]:
        """Return the workers for each holder and reserve them until `written`. `demands` are all of this
        service. They compete with those of other services until `until`.
        """
        if not self._gpus:
            return {demand.holder: demand.requested for demand in demands}
        self._demands[service] = until, {demand.holder: demand for demand in demands}
        others = [one for key in self._services() if key != service for one in self._stand(key, now)]
        allowed = allocate([*demands, *others], self._gpus)
        self._reserved |= {demand.holder: allowed[demand.holder] for demand in demands}
        return allowed

    def written(self, service: ObjectName) -> None:
        """Release the reservation: the replicas are written, or will not be."""
        for name in ("prefill", "decode"):
            self._reserved.pop(holder(service, name), None)

    def forget(self, service: ObjectName) -> None:
        """Forget a service that is no longer scaled."""
        self.written(service)
        self._demands.pop(service, None)

    def _services(self) -> list[ObjectName]:
        replicas = self._reader.cache.services()
        self._held = {key: self._held[key] for key in replicas if key in self._held}
        return replicas

    def _stand(self, service: ObjectName, now: float) -> list[GpuDemand]:
        """Return the allocation and the demand of another service."""
        until, demands = self._demands.get(service, (0.0, {}))
        stand = []
        for one in self._read(service):
            replicas = max(one.replicas, self._reserved.get(one.holder, 0))
            demand = demands.get(one.holder)
            if demand is None or until < now:
                stand.append(replace(one, replicas=replicas, requested=replicas))
            else:
                requested = max(replicas, demand.requested)
                stand.append(replace(one, replicas=replicas, requested=requested, pressure=demand.pressure))
        return stand

    def _read(self, service: ObjectName) -> tuple[GpuDemand, ...]:
        state = self._reader.cache.changed(*service)
        before = self._held.get(service)
        if before is None or before[0] != state:
            self._held[service] = before = state, _held(self._reader, service)
        return before[1]


def holder(service: ObjectName, name: RoleName) -> str:
    """Namespace, service and role."""
    return "/".join((*service, name))


def of_role(name: RoleName, pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods of a role, including terminating ones: one for each worker."""
    those = roles.labels_of(name)
    return [pod for pod in pods if pod.role in those and not pod.finished and not pod.follower]


def _held(reader: ClusterReader, service: ObjectName) -> tuple[GpuDemand, ...]:
    """Return the written allocation of a service; empty if it is not scaled."""
    spec = InferenceServiceSpec.of(reader.cache.service(*service))
    if spec is None or spec.autoscaling.mode == "Disabled":
        return ()
    pods = reader.pods(*service)
    by_name = worker_roles(spec).items()
    written = {name: desired_workers(role, reader.scaler(*service, name)) for name, role in by_name}
    return tuple(
        GpuDemand.of(service, name, role, 0 if spec.suspend else written[name], pods)
        for name, role in by_name
    )
