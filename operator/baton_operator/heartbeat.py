"""
The proof that watches live: a ConfigMap that the operator changes, and that has to come back by a watch.

A watch that has died and does not know it looks like a cluster in which nothing happens. Here something
always does.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping

from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels
from baton_operator.api_server import ApiServer
from baton_operator.manifests.objects import Manifest

log = logging.getLogger(__name__)

EVERY_S = 30.0
LATE_S = 120.0
"""Seconds without one after which the operator counts as dead."""

ANNOTATION = "baton.dev/heartbeat"


class Heartbeat:
    """One operator's; `clock` is monotonic."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        name: str,
        clock: Callable[[], float],
        every_s: float = EVERY_S,
        late_s: float = LATE_S,
    ) -> None:
        self.namespace = namespace
        self.name = name
        self._api = api
        self._clock = clock
        self._every_s = every_s
        self._late_s = late_s
        self._operator = uuid.uuid4().hex
        self._beats = 0
        self._seen = clock()
        self.watching = False
        """Whether one has ever come back."""

    @property
    def age_s(self) -> float:
        """Seconds since one came back, or since the start."""
        return self._clock() - self._seen

    @property
    def alive(self) -> bool:
        return self.age_s < self._late_s

    def restart(self) -> None:
        """Watches begin only now."""
        self._seen = self._clock()

    async def run(self) -> None:
        """Beat until it is cancelled. Raises NotLeader when the Lease is lost."""
        while True:
            self._beats += 1
            try:
                await self._api.apply(self._manifest(), ours=True)
            except ApiException as error:
                log.warning("No heartbeat: %s %s", error.status, error.reason)
            await asyncio.sleep(self._every_s)

    def seen(self, annotations: Mapping[str, str]) -> None:
        """The ConfigMap came by a watch."""
        # One of an operator before us says nothing about our watches.
        if annotations.get(ANNOTATION, "").startswith(self._operator):
            self._seen = self._clock()
            self.watching = True

    @property
    def _mark(self) -> str:
        return f"{self._operator}-{self._beats}"

    def _manifest(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": {labels.MANAGED_BY: labels.OPERATOR},
                "annotations": {ANNOTATION: self._mark},
            },
        }
