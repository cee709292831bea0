"""
What all reconcilers share, and the reconciler of LoraAdapters.

The engine of this release does not load LoraAdapters. Their status says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton_operator.cluster.api_server import FORBIDDEN, ApiServer
from baton_operator.cluster.cache import ObjectCache
from baton_operator.manifests.conditions import Fact, Transition, written
from baton_operator.manifests.drift import merge_patch
from baton_operator.manifests.objects import Manifest

REJECTED_STATUSES = frozenset({400, FORBIDDEN, 422})
"""Answers that the same request would get again: no such right, or a field that is none."""


class Reconciler(Protocol):
    """Brings one object of a kind to what it should be."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """
        Seconds after which to look again even if nothing changes; None for an object that is gone.

        Raises ApiException if it cannot be done now, and NotLeader if somebody else does it.
        """


ReportTransition = Callable[[Manifest, Transition], None]
"""Tells people what has happened to an object; returns at once, and never raises."""

NOT_ACTIVE = Fact("Active", False, "NotImplemented", "This release does not load adapters.")


class LoraAdapterReconciler:
    """For all LoraAdapters. `clock` gives Unix seconds."""

    def __init__(
        self, api: ApiServer, cache: ObjectCache, clock: Callable[[], float], resync_s: float
    ) -> None:
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
        if patch := merge_patch(before, {"observedGeneration": generation, "conditions": conditions}):
            await self._api.write_status(there, patch)
        return self._resync_s
