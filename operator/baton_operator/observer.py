"""
What is in the cluster of one service, read fresh: watches only say that something has changed.

Everything that belongs to a service carries its name as a label. RoleScalers may be anybody's, and name the
service in their spec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from baton_api import labels
from baton_operator import names, scalers
from baton_operator.api_resources import API, OPTIONAL_APIS, OWNED
from baton_operator.api_server import ApiServer
from baton_operator.manifests.objects import Manifest
from baton_operator.observed import Key, Observed, Pod, key
from baton_operator.trial import Tried
from baton_operator.tries import NoTries, Tries

ALIVE = ("Warming", "Serving", "Draining")
"""Phases of generations of which something is there."""

APIS_S = 60.0
"""Seconds for which it is remembered which of those there are."""


class Observer:
    """Reads for all services. `clock` is monotonic; `tries` are asked while a rollout is under way."""

    def __init__(self, api: ApiServer, clock: Callable[[], float], tries: Tries | None = None) -> None:
        self._tries: Tries = tries or NoTries()
        self._api = api
        self._clock = clock
        self._apis: frozenset[str] = frozenset()
        self._asked: float | None = None

    async def service(self, namespace: str, name: str) -> Manifest | None:
        """The InferenceService; None if there is none, or it is being deleted. Raises ApiException."""
        there = await self._api.get(API, "InferenceService", namespace, name)
        return None if there is None or "deletionTimestamp" in there["metadata"] else there

    async def scalers(self, namespace: str, name: str) -> list[Manifest]:
        """All RoleScalers that name the service. Raises ApiException."""
        there = await self._api.list(API, scalers.KIND, namespace)
        return [one for one in there if one["spec"]["serviceName"] == name]

    async def around(self, service: Manifest, of_it: list[Manifest]) -> Observed:
        """The service with all that belongs to it, and those of its RoleScalers. Raises ApiException."""
        metadata = service["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        selector = f"{labels.SERVICE}={name}"
        apis = await self._optional()
        kinds = [one for one in OWNED if not one.optional or one.api in apis]
        lists = await asyncio.gather(
            *(self._api.list(one.api, one.kind, namespace, selector) for one in kinds)
        )
        owned = [one for found in lists for one in found]
        objects: dict[Key, Manifest] = {key(one): one for one in owned if one["kind"] != "Pod"}
        objects |= {key(one): one for one in of_it if _is_bound(one, name)}
        there = [Pod.of(one) for one in owned if one["kind"] == "Pod"]
        return Observed(service, objects, there, apis, await self._tried(service, there))

    async def _tried(self, service: Manifest, pods: Sequence[Pod]) -> Mapping[str, Tried]:
        uid = service["metadata"]["uid"]
        phases = [one["phase"] for one in service.get("status", {}).get("revisions", ())]
        if sum(phase in ALIVE for phase in phases) < 2:
            self._tries.forget(uid)
            return {}
        routers = {pod.name: pod.address for pod in pods if pod.role == names.ROUTER and pod.address}
        return await self._tries.lately(uid, routers)

    async def _optional(self) -> frozenset[str]:
        now = self._clock()
        if self._asked is None or now - self._asked > APIS_S:
            apis = sorted(OPTIONAL_APIS)
            there = await asyncio.gather(*map(self._api.has, apis))
            self._apis = frozenset(api for api, has in zip(apis, there, strict=True) if has)
            self._asked = now
        return self._apis


def _is_bound(scaler: Manifest, service: str) -> bool:
    """Whether it is the one that the service listens to."""
    name: str = scaler["metadata"]["name"]
    return name == names.role(service, scaler["spec"]["role"])
