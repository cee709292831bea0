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
from baton_operator.manifests.objects import Key, Manifest, key
from baton_operator.manifests.routers import SPEC_GENERATION
from baton_operator.reconcilers.plan import ServicePlan

log = logging.getLogger(__name__)

LIMIT = 4
"""Services at a time, unless the settings say otherwise."""

WAIT_S = 30.0
"""Seconds after which a service that waits for its turn is planned again."""

Name = tuple[str, str]
"""Namespace and name of a service."""


class RouterRollouts:
    """The services whose routers an upgrade is replacing now: at most `limit`."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._turns: set[Name] = set()
        self._waiting: set[Name] = set()

    def admit(self, made: ServicePlan, cluster: ClusterState) -> ServicePlan:
        """The plan; without the routers' Deployment if that has to wait for other services."""
        owner = cluster.owner
        service: Name = (owner.namespace, owner.name)
        routers: Key = ("apps/v1", "Deployment", names.router(owner.name))
        there = cluster.objects.get(routers)
        wished = next((one for one in made.apply if key(one) == routers), None)
        if not is_upgrade(there, wished):
            self._waiting.discard(service)
            if is_settled(there):
                self._turns.discard(service)
            return made
        if service in self._turns or len(self._turns) < self._limit:
            self._turns.add(service)
            return made
        if service not in self._waiting:
            self._waiting.add(service)
            log.info(
                "The routers keep their template until those of %d other services are ready.", self._limit
            )
        rest = [one for one in made.apply if key(one) != routers]
        return replace(made, apply=rest, again_s=min(made.again_s or WAIT_S, WAIT_S))

    def forget(self, namespace: str, name: str) -> None:
        """The service is gone."""
        self._turns.discard((namespace, name))
        self._waiting.discard((namespace, name))


def is_upgrade(there: Manifest | None, wished: Manifest | None) -> bool:
    """Whether routers would be replaced although the service's spec is the one that they were made from."""
    if there is None or wished is None or not there["spec"].get("replicas", 1):
        return False
    made_from, asked = (
        one["metadata"].get("annotations", {}).get(SPEC_GENERATION) for one in (there, wished)
    )
    # Version 0.1.0 did not write down the spec's generation.
    same = made_from in (None, asked)
    return same and not contains(there["spec"]["template"], wished["spec"]["template"])


def is_settled(deployment: Manifest | None) -> bool:
    """Whether all routers are of the newest template, and ready; also where nothing is reported of them."""
    status = (deployment or {}).get("status", {})
    if deployment is None or "observedGeneration" not in status:
        return True
    replicas = deployment["spec"].get("replicas", 1)
    return status["observedGeneration"] >= deployment["metadata"].get("generation", 0) and all(
        status.get(count, 0) == replicas for count in ("replicas", "updatedReplicas", "availableReplicas")
    )
