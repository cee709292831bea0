"""
The work queue: which objects to reconcile, when, and the tasks that do it.

The queue holds each key once, however often its object changes. Two tasks never work on one key; a key that
changes meanwhile is queued again. A key that failed returns with exponential backoff.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Callable, Mapping

from kubernetes.aio.client.exceptions import ApiException

from baton_api import logs
from baton_operator.cluster.cache import ObjectChange
from baton_operator.cluster.leadership import NotLeader
from baton_operator.reconcilers import batch_job
from baton_operator.reconcilers.reconciler import (
    Reconciler,
)

QueueKey = tuple[str, str, str]
"""Kind, namespace and name."""

FIRST_BACKOFF_S = 0.5
BACKOFF_LIMIT_S = 300.0
"""Limits of the exponential backoff after failures, in seconds."""


class WorkQueue:
    """A queue of keys with due times. Belongs to one event loop. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._due: dict[QueueKey, float] = {}
        """Due time of each queued key."""
        self._order: list[tuple[float, QueueKey]] = []
        self._working: set[QueueKey] = set()
        self._again: set[QueueKey] = set()
        """Keys that changed while a task works on them."""
        self._failures: dict[QueueKey, int] = {}
        self._bell = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that are due."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    def oldest_s(self) -> float:
        """Return the seconds since the oldest key became due; 0 if none is due."""
        now = self._clock()
        return max((now - due for due in self._due.values() if due <= now), default=0.0)

    def add(self, key: QueueKey, after_s: float = 0.0) -> None:
        """Queue the key after that many seconds, unless it is due earlier."""
        if key in self._working and not after_s:
            self._again.add(key)
            return
        due = self._clock() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._order, (due, key))
        self._bell.set()

    async def take(self) -> QueueKey:
        """Wait for the first due key. It belongs to the caller until `done` or `failed`."""
        while True:
            self._bell.clear()
            now = self._clock()
            while self._order and self._order[0][0] <= now:
                due, key = heapq.heappop(self._order)
                if self._due.get(key) != due:
                    continue  # it was taken, or is due earlier
                del self._due[key]
                if key in self._working:
                    self._again.add(key)
                    continue
                self._working.add(key)
                return key
            wait = self._order[0][0] - now if self._order else None
            try:
                async with asyncio.timeout(wait):
                    await self._bell.wait()
            except TimeoutError:
                pass

    def done(self, key: QueueKey, again_s: float | None = None) -> None:
        """Record a success. The key is queued again after `again_s`."""
        self._failures.pop(key, None)
        self._leave(key, again_s)

    def failed(self, key: QueueKey) -> float:
        """Record a failure, queue the key again, and return the pause in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(BACKOFF_LIMIT_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 20)) * (
            0.5 + self._rng.random() / 2
        )
        self._leave(key, pause)
        return pause

    def _leave(self, key: QueueKey, after_s: float | None) -> None:
        self._working.discard(key)
        self._bell.set()
        if key in self._again:
            self._again.discard(key)
            # A change during the failed attempt does not shorten the pause.
            self.add(key, after_s if key in self._failures and after_s else 0.0)
        elif after_s is not None:
            self.add(key, after_s)


SCALING = "Scaling"
"""Kind of the keys of the autoscaler. They have a queue of their own, because metrics queries may take
long."""

ADAPTERS = "Adapters"
"""Kind of the keys of services whose LoraAdapters are reconciled. They have a queue of their own, because
pods may take long to answer."""

BATCH_CHANGES_S = 0.5
"""Seconds for which changes of one object are collected, since they come in bursts."""


def keys_to_reconcile(change: ObjectChange) -> list[tuple[QueueKey, float]]:
    """Return the keys to reconcile after a change, each with a delay in seconds."""
    namespace, name = change.namespace, change.name
    service: QueueKey = ("InferenceService", namespace, change.service)
    adapters: QueueKey = (ADAPTERS, namespace, change.service)
    match change.resource.kind:
        case "InferenceService":
            if change.spec_changed:
                return [(service, 0.0), ((SCALING, namespace, name), 0.0), (adapters, BATCH_CHANGES_S)]
            return [(service, BATCH_CHANGES_S)]
        case "BatchJob":
            news = change.manifest is None or batch_job.needs_attention(change.manifest)
            return [(("BatchJob", namespace, name), BATCH_CHANGES_S if news else batch_job.PROGRESS_DELAY_S)]
        case "LoraAdapter":
            return [(adapters, BATCH_CHANGES_S)]
        case "Pod" if change.service and not change.batch_job:
            return [(service, BATCH_CHANGES_S), (adapters, BATCH_CHANGES_S)]
        case "Gateway":
            # Gateway controllers count routes in the status. That changes no URL.
            return [
                (("InferenceService", *route), BATCH_CHANGES_S)
                for route in change.routes
                if change.spec_changed
            ]
    if change.batch_job:
        return [(("BatchJob", namespace, change.batch_job), BATCH_CHANGES_S)]
    return [(service, BATCH_CHANGES_S)] if change.service else []


log = logging.getLogger(__name__)

RECONCILE_LIMIT_S = 120.0
"""Time limit of one reconciliation in seconds, so that other objects do not wait longer."""

RecordReconcile = Callable[[str, str, float], None]
"""Records kind, result and seconds of each reconciliation."""


async def run_reconciler(
    queue: WorkQueue,
    reconcilers: Mapping[str, Reconciler],
    record: RecordReconcile,
    clock: Callable[[], float],
) -> None:
    """Reconcile due keys until cancelled. Raises NotLeader when the Lease is lost."""
    while True:
        key = await queue.take()
        kind, namespace, name = key
        began = clock()
        result = "error"
        try:
            with logs.during(object=f"{kind} {namespace}/{name}"):
                async with asyncio.timeout(RECONCILE_LIMIT_S):
                    again_s = await reconcilers[kind].reconcile(namespace, name)
        except NotLeader:
            raise
        except (ApiException, TimeoutError) as error:
            pause = queue.failed(key)
            why = (
                f"{error.status} {error.reason}"
                if isinstance(error, ApiException)
                else f"no result within {RECONCILE_LIMIT_S:.0f} s"
            )
            log.warning(
                "Cannot reconcile %s %s/%s, next attempt in %.1f s: %s", kind, namespace, name, pause, why
            )
        except Exception:
            # One unexpected object must not stop the reconciliation of all others.
            pause = queue.failed(key)
            log.exception("Cannot reconcile %s %s/%s, next attempt in %.1f s", kind, namespace, name, pause)
        else:
            queue.done(key, again_s)
            result = "success"
        record(kind, result, clock() - began)
