"""Those who work off the queue: each takes what is due, has it reconciled, and says when to look again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kubernetes.aio.client.exceptions import ApiException

from baton_api import logs
from baton_operator.leadership import NotLeader
from baton_operator.reconciler import Reconciler
from baton_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

LIMIT_S = 120.0
"""Seconds for one object: more than this would keep others waiting."""

Observe = Callable[[str, str, float], None]
"""Takes kind, result and seconds of each reconciliation."""


async def work(
    queue: WorkQueue, reconcilers: Mapping[str, Reconciler], observe: Observe, clock: Callable[[], float]
) -> None:
    """One of them, until it is cancelled. Raises NotLeader when the Lease is lost."""
    while True:
        key = await queue.take()
        kind, namespace, name = key
        began = clock()
        result = "error"
        try:
            with logs.during(object=f"{kind} {namespace}/{name}"):
                async with asyncio.timeout(LIMIT_S):
                    again_s = await reconcilers[kind].reconcile(namespace, name)
        except NotLeader:
            raise
        except (ApiException, TimeoutError) as error:
            pause = queue.failed(key)
            why = f"{error.status} {error.reason}" if isinstance(error, ApiException) else "it took too long"
            log.warning("%s %s/%s again in %.1f s: %s", kind, namespace, name, pause, why)
        except Exception:
            # One object that nobody has thought of must not stop all others.
            log.exception("%s %s/%s again in %.1f s", kind, namespace, name, queue.failed(key))
        else:
            queue.done(key, again_s)
            result = "success"
        observe(kind, result, clock() - began)
