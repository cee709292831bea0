"""LoraAdapters: declared, and not loaded by the engine of this release. Their status says so."""

from __future__ import annotations

from collections.abc import Callable

from baton_operator.api_server import ApiServer
from baton_operator.cache import Cache
from baton_operator.conditions import Fact, written
from baton_operator.merge_patch import difference

NOT_ACTIVE = Fact("Active", False, "NotImplemented", "This release does not load adapters.")


class AdapterReconciler:
    """For all LoraAdapters. `clock` gives Unix seconds."""

    def __init__(self, api: ApiServer, cache: Cache, clock: Callable[[], float], resync_s: float) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._resync_s = resync_s

    async def reconcile(self, namespace: str, name: str) -> float | None:
        there = self._cache.get("LoraAdapter", namespace, name)
        if there is None or "deletionTimestamp" in there["metadata"]:
            return None
        before = there.get("status", {})
        generation = int(there["metadata"].get("generation", 0))
        conditions, _ = written([NOT_ACTIVE], before.get("conditions", ()), generation, self._clock())
        if patch := difference(before, {"observedGeneration": generation, "conditions": conditions}):
            await self._api.write_status(there, patch)
        return self._resync_s
