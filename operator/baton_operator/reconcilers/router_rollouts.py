"""
Upgrades of the operator that replace routers: a few services at a time.

A new operator has other defaults and flags, so the routers of every service get another template. Each
Deployment replaces its routers one by one; this bounds how many Deployments do so at once. A change by a
user does not wait. Routers that never become ready keep their service's turn: a bad upgrade stops there,
and the old routers serve on.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from baton_operator import names
from baton_operator.cluster.state import ClusterState
from baton_operator.manifests.drift import contains
from baton_operator.manifests.objects import Key, Manifest, ObjectName, key
from baton_operator.manifests.routers import SPEC_GENERATION
from baton_operator.reconcilers.plan import ServicePlan

log = logging.getLogger(__name__)

LIMIT = 4
"""Services at a time, unless the settings say otherwise."""

WAIT_S = 30.0
"""Seconds after which a service that waits for its turn is planned again."""


class RouterRollouts:
    """Limits how many services replace their routers at once after an upgrade of the operator."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._rolling: set[ObjectName] = set()
        self._waiting: set[ObjectName] = set()

    def admit(self, plan: ServicePlan, cluster: ClusterState) -> ServicePlan:
        """Return the plan, without the Deployment of routers if it has to wait for other services."""
        owner = cluster.owner
        service: ObjectName = (owner.namespace, owner.name)
        routers: Key = ("apps/v1", "Deployment", names.router(owner.name))
        existing = cluster.objects.get(routers)
        desired = next((one for one in plan.apply if key(one) == routers), None)
        if not is_upgrade(existing, desired):
            self._waiting.discard(service)
            if is_settled(existing):
                self._rolling.discard(service)
            return plan
        if service in self._rolling or len(self._rolling) < self._limit:
            self._rolling.add(service)
            return plan
        if service not in self._waiting:
            self._waiting.add(service)
            log.info("The routers keep their template while %d other services replace theirs.", self._limit)
        rest = [one for one in plan.apply if key(one) != routers]
        return replace(plan, apply=rest, again_s=min(plan.again_s or WAIT_S, WAIT_S))

    def forget(self, namespace: str, name: str) -> None:
        """Forget a deleted service."""
        self._rolling.discard((namespace, name))
        self._waiting.discard((namespace, name))


def is_upgrade(existing: Manifest | None, desired: Manifest | None) -> bool:
    """Return whether routers would be replaced without a change of the spec."""
    if existing is None or desired is None or not existing["spec"].get("replicas", 1):
        return False
    old_generation, new_generation = (
        one["metadata"].get("annotations", {}).get(SPEC_GENERATION) for one in (existing, desired)
    )
    # Version 0.1.0 did not record the generation of the spec.
    same = old_generation in (None, new_generation)
    return same and not contains(existing["spec"]["template"], desired["spec"]["template"])


def is_settled(deployment: Manifest | None) -> bool:
    """Return whether all routers have the newest template and are ready, or no status exists."""
    status = (deployment or {}).get("status", {})
    if deployment is None or "observedGeneration" not in status:
        return True
    replicas = deployment["spec"].get("replicas", 1)
    return status["observedGeneration"] >= deployment["metadata"].get("generation", 0) and all(
        status.get(count, 0) == replicas for count in ("replicas", "updatedReplicas", "availableReplicas")
    )
