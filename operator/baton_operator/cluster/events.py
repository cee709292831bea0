"""
Kubernetes Events: what has happened to a service, one for each transition.

They are posted beside the work, which never waits for them: one that cannot be posted is lost. The same
thing that happens again within an hour makes its Event count on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from kubernetes.aio.client.exceptions import ApiException

from baton_operator.cluster.api_server import ApiServer
from baton_operator.manifests.conditions import Transition
from baton_operator.manifests.objects import Manifest, timestamp

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1000
"""Events that wait to be posted; more are lost."""

POSTED_LIMIT = 4000
AGGREGATE_S = 3000.0
"""The API server forgets Events after an hour."""

EventKey = tuple[str, str, str, str]
"""An object's uid; type, status and reason of its condition."""


@dataclass(frozen=True, slots=True)
class PostedEvent:
    """An Event that was posted."""

    name: str
    count: int
    first: float


class EventPoster:
    """Posts them; `clock` gives Unix seconds."""

    def __init__(self, api: ApiServer, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._waiting: asyncio.Queue[tuple[Manifest, Transition, float]] = asyncio.Queue(QUEUE_LIMIT)
        self._told: OrderedDict[EventKey, PostedEvent] = OrderedDict()

    def tell(self, about: Manifest, transition: Transition) -> None:
        """Have it posted in a while."""
        try:
            self._waiting.put_nowait((about, transition, self._clock()))
        except asyncio.QueueFull:
            log.warning("An Event of %s is lost: %d wait.", about["metadata"]["name"], QUEUE_LIMIT)

    async def run(self) -> None:
        """Post what comes, one after the other. Raises NotLeader when the Lease is lost."""
        while True:
            about, transition, when = await self._waiting.get()
            try:
                await self._post(about, transition, when)
            except ApiException as error:
                log.warning("An Event of %s is lost: %s", about["metadata"]["name"], error.reason)

    async def _post(self, about: Manifest, transition: Transition, when: float) -> None:
        fact = transition.fact
        sort = (about["metadata"]["uid"], fact.type, fact.status, fact.reason)
        known = self._told.pop(sort, None)
        if known is not None and when - known.first < AGGREGATE_S:
            again = replace(known, count=known.count + 1)
            if await self._counted(about, again, event(about, transition, again, when)):
                self._remember(sort, again)
                return
        new = PostedEvent(f"{about['metadata']['name']}.{time.time_ns():x}", 1, when)
        await self._api.create(event(about, transition, new, when))
        self._remember(sort, new)

    async def _counted(self, about: Manifest, told: PostedEvent, body: Manifest) -> bool:
        """False if the Event is gone."""
        counted = {name: body[name] for name in ("count", "lastTimestamp", "message")}
        return await self._api.merge("v1", "Event", about["metadata"]["namespace"], told.name, counted)

    def _remember(self, sort: EventKey, told: PostedEvent) -> None:
        self._told[sort] = told
        while len(self._told) > POSTED_LIMIT:
            self._told.popitem(last=False)


def event(about: Manifest, transition: Transition, told: PostedEvent, now: float) -> Manifest:
    """As it is posted."""
    fact, metadata = transition.fact, about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": told.name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if transition.warning else "Normal",
        "reason": fact.reason,
        "message": f"{fact.type} is {fact.status}. {fact.message}".rstrip()[:1024],
        "source": {"component": "baton"},
        "firstTimestamp": timestamp(told.first),
        "lastTimestamp": timestamp(now),
        "count": told.count,
    }
