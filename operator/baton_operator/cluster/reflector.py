"""
List and watch of one kind, which keep a store of the cache equal to the API server.

A reflector lists once and then watches from that version. It resumes a watch that ends, breaks or falls
silent from the last version. If the API server no longer has that version (410), it lists again; the store
derives the missed changes, deletions included.

Kopf watches custom resources. It also lists again after 410, but does not compare, so a deletion meanwhile
would be lost. For these kinds a reflector lists only: at the start, now and then, and when the operator has a
reason to doubt its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels
from baton_operator.cluster.api_resources import ApiResource
from baton_operator.cluster.api_server import FORBIDDEN, GONE, NOT_FOUND, PAGE, ApiServer
from baton_operator.cluster.cache import CachedObject, ObjectCache, ObjectStore, cached_object
from baton_operator.manifests.objects import ObjectName

log = logging.getLogger(__name__)

FIRST_S, LIMIT_S = 0.2, 30.0
"""Limits of the exponential backoff after failures, in seconds."""

ABSENT_S = 60.0
"""Seconds between two checks for an optional kind that the cluster does not serve."""

WATCH_S = (300.0, 600.0)
"""Range of the random duration of a watch in seconds, so that not all restart at once."""

SILENCE_S = 70.0
"""Seconds without data after which a watch restarts. The API server sends a bookmark each minute, except
for a kind of which no object ever changed."""

RELIST_S = 300.0
"""Seconds between two lists of a kind that kopf watches."""

DOUBT_S = 0.1
"""Seconds for which doubts are collected before a list. Less than `work_queue.BATCH_CHANGES_S`, so that a
service that is gone is known before it is reconciled."""

LASTING_S = 1.0
"""Seconds that a watch lasts at least; a shorter one counts as a failure."""


@dataclass(slots=True)
class Reflector:
    """Keeps one store current."""

    api: ApiServer
    store: ObjectStore
    listed: Callable[[], None]
    """Called after each list."""
    seen: Callable[[str], None]
    """Called with the plural of the kind for each event."""
    clock: Callable[[], float]
    """Monotonic."""
    rng: random.Random
    silence_s: float
    heard: float = field(init=False)
    """Time of the last data from the API server about this kind."""
    _failures: int = 0
    _doubt: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.heard = self.clock()

    @property
    def resource(self) -> ApiResource:
        return self.store.resource

    @property
    def watches(self) -> bool:
        """Whether kopf does not."""
        return not self.resource.custom

    @property
    def _selector(self) -> str:
        """Limits the objects to those that carry the operator's label."""
        return f"{labels.MANAGED_BY}={labels.OPERATOR}" if self.resource.owned else ""

    def doubt(self) -> None:
        """List soon, if kopf watches the kind: an object of the store may be gone."""
        self._doubt.set()

    async def run(self) -> None:
        """List and watch until it is cancelled."""
        while True:
            try:
                await self.relist()
                await self._watch()
            except ApiException as error:
                await self._failed(error)

    async def relist(self) -> None:
        """Replace the content of the store by a new list. Raises ApiException."""
        try:
            try:
                snapshot, version = await self._listed_now(PAGE)
            except ApiException as error:
                if error.status != GONE:
                    raise
                snapshot, version = await self._listed_now(0)
        except ApiException as error:
            if not self._may_lack(error.status):
                raise
            self.heard = self.clock()
            self.store.absent()
        else:
            self.store.replace(snapshot, version)
        self.listed()

    def _may_lack(self, status: int) -> bool:
        """Return whether the operator can do without this kind: it is not served, or forbidden."""
        resource = self.resource
        return resource.optional and (status == NOT_FOUND or (resource.foreign and status == FORBIDDEN))

    async def _listed_now(self, limit: int) -> tuple[dict[ObjectName, CachedObject], int]:
        """Return all objects, and the version of the list. Raises ApiException."""
        resource, namespace = self.resource, self.store.namespace
        snapshot: dict[ObjectName, CachedObject] = {}
        of_list = 0
        pages = self.api.pages(resource.api, resource.kind, namespace, self._selector, limit=limit)
        async for items, version in pages:
            self.heard = self.clock()
            of_list = int(version)
            for item in items:
                name = item["metadata"].get("namespace", ""), item["metadata"]["name"]
                snapshot[name] = cached_object(resource, item)
        return snapshot, of_list

    async def _watch(self) -> None:
        """Watch again and again. Raises ApiException if a new list is necessary."""
        if not self.store.served:
            self._failures = 0
            await asyncio.sleep(ABSENT_S)
            return
        if not self.watches:
            self._failures = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIST_S):
                    await self._doubt.wait()
                    await asyncio.sleep(DOUBT_S)
            self._doubt.clear()
            return
        while True:
            try:
                if await self._follow():
                    self._failures = 0
                    continue
                broken = ApiException(status=0, reason=f"the watch ended within {LASTING_S:g} s")
            except ApiException as error:
                if error.status:
                    raise  # also 410: list again
                broken = error
            await self._failed(broken)

    async def _follow(self) -> bool:
        """Watch once, to its end. Return False if it ended immediately. Raises ApiException."""
        resource, namespace, version = self.resource, self.store.namespace, str(self.store.version)
        brought, began = False, self.clock()
        watch = self.api.watch(
            resource.api, resource.kind, namespace, self._selector, version,
            limit_s=self.rng.uniform(*WATCH_S), silence_s=self.silence_s,
        )  # fmt: skip
        async with aclosing(watch) as events:
            async for event, manifest in events:
                self.heard = self.clock()
                if not event:  # the API server has accepted the watch
                    continue
                brought = True
                self._failures = 0
                if event != "BOOKMARK":
                    self.seen(self.resource.plural)
                self.store.happened(event, manifest)
        return brought or self.clock() - began > LASTING_S

    async def _failed(self, error: ApiException) -> None:
        """Log the failure and wait for the backoff."""
        pause = min(LIMIT_S, FIRST_S * 2.0 ** min(self._failures, 20)) * (0.5 + self.rng.random() / 2)
        self._failures += 1
        if self._failures > 1:  # one broken connection is normal
            where = f" in {self.store.namespace}" if self.store.namespace else ""
            log.warning(
                "Cannot watch %s%s, next attempt in %.1f s: %s %s",
                self.resource.plural, where, pause, error.status, error.reason,
            )  # fmt: skip
        await asyncio.sleep(pause)


class Reflectors:
    """The reflectors of all stores. `seen` is called with the plural of a kind for each event."""

    def __init__(
        self,
        api: ApiServer,
        cache: ObjectCache,
        clock: Callable[[], float],
        rng: random.Random,
        silence_s: float = SILENCE_S,
        seen: Callable[[str], None] = lambda resource: None,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._began: float | None = None
        self._synced = asyncio.Event()
        self._all = [
            Reflector(api, store, self._listed, seen, clock, rng, silence_s) for store in cache.stores
        ]

    def run(self) -> list[asyncio.Task[None]]:
        """Start all reflectors."""
        self._began = self._clock()
        return [asyncio.create_task(reflector.run()) for reflector in self._all]

    async def relist(self) -> None:
        """List all kinds once. Raises ApiException."""
        await asyncio.gather(*(reflector.relist() for reflector in self._all))

    async def synced(self) -> None:
        """Wait until all kinds have been listed."""
        await self._synced.wait()

    @property
    def unsynced(self) -> list[str]:
        """Plurals of kinds that have not been listed since the start."""
        return [] if self._began is None else self._cache.unsynced

    @property
    def age_s(self) -> float:
        """Seconds since the last data of the most silent reflector; 0 before the start."""
        return max((self._age_s(reflector) for reflector in self._all), default=0.0)

    def stale(self, limit_s: float) -> list[str]:
        """Return the plurals of kinds without data for that many seconds."""
        return sorted(
            {reflector.resource.plural for reflector in self._all if self._age_s(reflector) > limit_s}
        )

    def doubt(self, kind: str) -> None:
        """List the objects of a kind soon, if kopf watches it."""
        for reflector in self._all:
            if reflector.resource.kind == kind:
                reflector.doubt()

    def _age_s(self, one: Reflector) -> float:
        if self._began is None:
            return 0.0
        rests = 0.0 if one.watches else RELIST_S
        return max(0.0, self._clock() - max(one.heard, self._began) - rests)

    def _listed(self) -> None:
        if not self._cache.unsynced:
            self._synced.set()
