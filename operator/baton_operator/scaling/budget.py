"""
Who grows where there are not accelerators for all: those who need it most, and only into what is free.

What a role gives up is free when its pods are gone, not when that was decided; until then it counts as
taken. Nobody is made smaller for the sake of another: the budget holds growth back, and moves nothing.

What services hold is read from the cluster: the numbers that are written, and the pods that exist. Only
wishes are remembered, and only for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from baton_operator.cluster.state import ClusterReader, Pod
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import role_scalers
from baton_operator.scaling.metrics import ServiceName


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """What one role would like to have. All numbers are at least 0."""

    holder: str
    """Which role of which service."""
    gpus: int
    """Of one worker."""
    there: int
    """Workers that are asked for now."""
    pods: int
    """That are there, those that end too."""
    requested: int
    pressure: float
    """What it needs against what it has."""

    @property
    def taken(self) -> int:
        """Accelerators that are not free because of it."""
        return self.gpus * max(self.there, self.pods)


def allocate(demands: Iterable[GpuDemand], gpus: int) -> Mapping[str, int]:
    """
    Workers for each holder: as many as it wishes, or less if it would grow.

    >>> small = GpuDemand("chat/prefill", 1, there=2, pods=2, requested=6, pressure=1.2)
    >>> great = GpuDemand("chat/decode", 2, there=1, pods=1, requested=3, pressure=2.0)
    >>> allocate([small, great], 10)
    {'chat/decode': 3, 'chat/prefill': 4}
    """
    ordered = sorted(demands, key=lambda one: (-one.pressure, one.holder))
    free = gpus - sum(one.taken for one in ordered)
    made = {}
    for one in ordered:
        if one.requested <= one.there or not one.gpus:
            made[one.holder] = one.requested
            continue
        # What of its own still ends will not be there for long, but is there.
        more = min(one.requested - one.there, max(0, free) // one.gpus)
        free -= more * one.gpus
        made[one.holder] = one.there + more
    return made


class GpuBudget:
    """The accelerators that all scaled services share; 0: as many as there are."""

    def __init__(self, gpus: int, reader: ClusterReader) -> None:
        self._gpus = gpus
        self._reader = reader
        self._held: dict[ServiceName, tuple[int, tuple[GpuDemand, ...]]] = {}
        """What each service holds, and the state of the cache that this was read from."""
        self._demands: dict[ServiceName, tuple[float, Mapping[str, GpuDemand]]] = {}
        """Wishes by holder, and when they are too old to count."""
        self._reserved: dict[str, int] = {}
        """What was granted and is not written yet."""

    def grant(
        self, service: ServiceName, demands: Sequence[GpuDemand], now: float, until: float
    ) -> Mapping[str, int]:
        """
        Workers for each holder. Grants are reserved until `written`.

        `wishes` are all of the service's; they stand against those of other services until `until`.
        """
        if not self._gpus:
            return {one.holder: one.requested for one in demands}
        self._demands[service] = until, {one.holder: one for one in demands}
        others = [one for key in self._services() if key != service for one in self._stand(key, now)]
        allowed = allocate([*demands, *others], self._gpus)
        self._reserved |= {one.holder: allowed[one.holder] for one in demands}
        return allowed

    def written(self, service: ServiceName) -> None:
        """What was granted stands in the cluster now, or will not be written."""
        for name in ("prefill", "decode"):
            self._reserved.pop(holder(service, name), None)

    def forget(self, service: ServiceName) -> None:
        """The service is not scaled any more."""
        self.written(service)
        self._demands.pop(service, None)

    def _services(self) -> list[ServiceName]:
        there = self._reader.services()
        self._held = {key: self._held[key] for key in there if key in self._held}
        return there

    def _stand(self, service: ServiceName, now: float) -> list[GpuDemand]:
        """What another service holds, and would like to have."""
        until, demands = self._demands.get(service, (0.0, {}))
        stand = []
        for one in self._read(service):
            there = max(one.there, self._reserved.get(one.holder, 0))
            wish = demands.get(one.holder)
            if wish is None or until < now:
                stand.append(replace(one, there=there, requested=there))
            else:
                requested = max(there, wish.requested)
                stand.append(replace(one, there=there, requested=requested, pressure=wish.pressure))
        return stand

    def _read(self, service: ServiceName) -> tuple[GpuDemand, ...]:
        state = self._reader.state(*service)
        before = self._held.get(service)
        if before is None or before[0] != state:
            self._held[service] = before = state, _held(self._reader, service)
        return before[1]


def holder(service: ServiceName, name: RoleName) -> str:
    """Which role of which service."""
    return "/".join((*service, name))


def gpus(role: WorkerRole) -> int:
    """Accelerators of one worker."""
    return role.resources.gpu.count if role.resources.gpu else 0


def of_role(name: RoleName, pods: Sequence[Pod]) -> list[Pod]:
    """The role's workers, those that end too."""
    those = ("decode", "both") if name == "decode" else (name,)
    return [pod for pod in pods if pod.role in those and not pod.finished]


def _held(reader: ClusterReader, service: ServiceName) -> tuple[GpuDemand, ...]:
    """What a scaled service holds as it is written; nothing if it is not scaled."""
    manifest = reader.service(*service)
    try:
        spec = InferenceServiceSpec.model_validate(manifest["spec"]) if manifest else None
    except ValidationError:
        return ()
    if spec is None or spec.autoscaling.mode == "Disabled":
        return ()
    pods = reader.pods(*service)
    held = []
    for name, role in role_scalers.roles(spec).items():
        there = 0 if spec.suspend else _written(reader.scaler(*service, name), role)
        held.append(
            GpuDemand(holder(service, name), gpus(role), there, len(of_role(name, pods)), there, pressure=0.0)
        )
    return tuple(held)


def _written(scaler: Manifest | None, role: WorkerRole) -> int:
    if role.scaling is None:
        return 1 if role.replicas is None else role.replicas
    return role_scalers.scaled(role, scaler["spec"]["replicas"] if scaler else 1)
