"""
Kubernetes Events for transitions of conditions.

A background task posts them, so reconciliation never waits; an Event that cannot be posted is lost. A
transition that repeats within an hour increases the count of its Event.
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
from baton_operator.manifests.objects import Manifest, Transition, timestamp

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1000
"""Maximum queued Events; further ones are lost."""

POSTED_LIMIT = 4000
AGGREGATE_S = 3000.0
"""Seconds in which equal transitions share an Event. The API server deletes Events after an hour."""

EventKey = tuple[str, str, str, str]
"""UID of the object; type, status and reason of its condition."""


@dataclass(frozen=True, slots=True)
class PostedEvent:
    """Name, count and first time (Unix seconds) of a posted Event."""

    name: str
    count: int
    first: float


class EventPoster:
    """Posts Events in the background. `clock` returns Unix seconds."""

    def __init__(self, api: ApiServer, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._queue: asyncio.Queue[tuple[Manifest, Transition, float]] = asyncio.Queue(QUEUE_LIMIT)
        self._posted: OrderedDict[EventKey, PostedEvent] = OrderedDict()

    def post(self, about: Manifest, transition: Transition) -> None:
        """Queue an Event for this transition."""
        try:
            self._queue.put_nowait((about, transition, self._clock()))
        except asyncio.QueueFull:
            log.warning(
                "Dropped an Event of %s: %d Events are queued.", about["metadata"]["name"], QUEUE_LIMIT
            )

    async def run(self) -> None:
        """Post queued Events until cancelled. Raises NotLeader when the Lease is lost."""
        while True:
            about, transition, when = await self._queue.get()
            try:
                await self._post(about, transition, when)
            except ApiException as error:
                log.warning("Cannot post an Event of %s: %s", about["metadata"]["name"], error.reason)

    async def _post(self, about: Manifest, transition: Transition, when: float) -> None:
        fact = transition.fact
        key = (about["metadata"]["uid"], fact.type, fact.status, fact.reason)
        posted = self._posted.pop(key, None)
        if posted is not None and when - posted.first < AGGREGATE_S:
            again = replace(posted, count=posted.count + 1)
            body = event(about, transition, again, when)
            counted = {name: body[name] for name in ("count", "lastTimestamp", "message")}
            # False: the Event no longer exists.
            if await self._api.merge("v1", "Event", about["metadata"]["namespace"], again.name, counted):
                self._remember(key, again)
                return
        new = PostedEvent(f"{about['metadata']['name']}.{time.time_ns():x}", 1, when)
        await self._api.create(event(about, transition, new, when))
        self._remember(key, new)

    def _remember(self, key: EventKey, posted: PostedEvent) -> None:
        self._posted[key] = posted
        while len(self._posted) > POSTED_LIMIT:
            self._posted.popitem(last=False)


def event(about: Manifest, transition: Transition, posted: PostedEvent, now: float) -> Manifest:
    """Return the manifest of the Event."""
    fact, metadata = transition.fact, about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": posted.name, "namespace": metadata["namespace"]},
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
        "firstTimestamp": timestamp(posted.first),
        "lastTimestamp": timestamp(now),
        "count": posted.count,
    }
