"""
What is in the cache of one service.

Everything that belongs to a service carries its name as a label. RoleScalers may be anybody's, and name the
service in their spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton_operator import names
from baton_operator.api_resources import OWNED
from baton_operator.cache import Cache
from baton_operator.manifests import exposure
from baton_operator.manifests.objects import Key, Manifest, key
from baton_operator.observed import Observed, Pod
from baton_operator.trial import Tried
from baton_operator.tries import NoTries, Tries

ALIVE = ("Warming", "Serving", "Draining")
"""Phases of generations of which something is there."""

ROLE_SCALER = "RoleScaler"
"""The kind."""

_OBJECTS = tuple(one.kind for one in OWNED if one.kind != "Pod")


class Observer:
    """Reads for all services. `tries` are asked while a rollout is under way."""

    def __init__(self, cache: Cache, tries: Tries | None = None) -> None:
        self._cache = cache
        self._tries: Tries = tries or NoTries()

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

    async def around(self, service: Manifest, of_it: list[Manifest]) -> Observed:
        """The service with all that belongs to it, and those of its RoleScalers."""
        metadata = service["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        owned = self._cache.of_service(namespace, name, *_OBJECTS)
        objects: dict[Key, Manifest] = {key(one): one for one in owned}
        objects |= {key(one): one for one in of_it if _is_bound(one, name)}
        there = self.pods(namespace, name)
        tried = await self._tried(service, there)
        return Observed(service, objects, there, self._cache.apis, tried, self._gateways(service))

    def _gateways(self, service: Manifest) -> dict[exposure.GatewayName, Manifest]:
        """Those of the service's HTTPRoute that exist, and that the operator may read."""
        wanted = exposure.gateways(service)
        found = {name: self._cache.get("Gateway", *name) for name in wanted}
        return {name: one for name, one in found.items() if one is not None}

    async def _tried(self, service: Manifest, pods: Sequence[Pod]) -> Mapping[str, Tried]:
        uid = service["metadata"]["uid"]
        phases = [one["phase"] for one in service.get("status", {}).get("revisions", ())]
        if sum(phase in ALIVE for phase in phases) < 2:
            self._tries.forget(uid)
            return {}
        routers = {pod.name: pod.address for pod in pods if pod.role == names.ROUTER and pod.address}
        return await self._tries.lately(uid, routers)


def _is_bound(scaler: Manifest, service: str) -> bool:
    """Whether it is the one that the service listens to."""
    name: str = scaler["metadata"]["name"]
    return name == names.role(service, scaler["spec"]["role"])
