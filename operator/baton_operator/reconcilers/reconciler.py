"""
The interface of reconcilers, and the reconciler of LoraAdapters.

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
"""Statuses of permanent rejections: missing permission or invalid field."""


class Reconciler(Protocol):
    """Brings objects of one kind to the state that their spec asks for."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """
        Return the seconds until the next reconciliation without a change; None for a deleted object.

        Raises ApiException to be retried, and NotLeader if another operator holds the Lease.
        """


ReportTransition = Callable[[Manifest, Transition], None]
"""Reports a transition of an object as an Event and in metrics. Does not wait and never raises."""

NOT_ACTIVE = Fact("Active", False, "NotImplemented", "This release does not load adapters.")


class LoraAdapterReconciler:
    """Reconciles LoraAdapters. `clock` returns Unix seconds."""

    def __init__(
        self, api: ApiServer, cache: ObjectCache, clock: Callable[[], float], resync_s: float
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._resync_s = resync_s

    async def reconcile(self, namespace: str, name: str) -> float | None:
        adapter = self._cache.get("LoraAdapter", namespace, name)
        if adapter is None or "deletionTimestamp" in adapter["metadata"]:
            return None
        before = adapter.get("status", {})
        generation = int(adapter["metadata"].get("generation", 0))
        conditions, _ = written([NOT_ACTIVE], before.get("conditions", ()), generation, self._clock())
        if patch := merge_patch(before, {"observedGeneration": generation, "conditions": conditions}):
            await self._api.write_status(adapter, patch)
        return self._resync_s
