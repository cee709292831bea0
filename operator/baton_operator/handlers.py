"""
The shell: kopf watches, and says whose turn it is.

Nothing else of kopf's is used: no annotations, no finalizers, no Events, no peering. A handler only puts a
name into the queue; what is to be done is found out from what is there when its turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import kopf

from baton_api import batch_jobs, labels
from baton_operator import batches
from baton_operator.api_resources import OWNED, WATCHED, ApiResource
from baton_operator.heartbeat import Heartbeat
from baton_operator.work_queue import WorkQueue

SERVICE = labels.SERVICE

GATHER_S = 0.5
"""Seconds for which changes of what was made are gathered: they come in showers."""

PAGE = 500

Login = Callable[[], Awaitable[kopf.ConnectionInfo]]
Seen = Callable[[str], None]
"""Told of each event by the plural of its kind."""


def registry(
    login: Login,
    queue: WorkQueue,
    scaling: WorkQueue,
    heartbeat: Heartbeat,
    seen: Seen,
    apis: Collection[str] = (),
) -> kopf.OperatorRegistry:
    """
    What kopf is to call; `apis`: the optional ones that the cluster has, as group/version.

    Who is scaled comes into a queue of its own: to ask for metrics may take long.
    """
    made = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    async def asked(
        namespace: str | None, name: str, resource: kopf.Resource, body: kopf.Body, **_: Any
    ) -> None:
        assert namespace is not None
        seen(resource.plural)
        match resource.plural:
            case "inferenceservices":
                queue.add(("InferenceService", namespace, name))
                scaling.add(("Scaling", namespace, name))
            case "rolescalers":
                queue.add(("InferenceService", namespace, body["spec"]["serviceName"]), GATHER_S)
            case "batchjobs":
                pause = GATHER_S if batches.is_news(body) else batches.COUNTING_S
                queue.add(("BatchJob", namespace, name), pause)
            case "loraadapters":
                queue.add(("LoraAdapter", namespace, name))

    async def changed(
        namespace: str | None,
        name: str,
        resource: kopf.Resource,
        labels: kopf.Labels,
        annotations: kopf.Annotations,
        **_: Any,
    ) -> None:
        assert namespace is not None
        seen(resource.plural)
        if (resource.plural, namespace, name) == ("configmaps", heartbeat.namespace, heartbeat.name):
            heartbeat.seen(annotations)
        elif batch_jobs.LABEL in labels:
            queue.add(("BatchJob", namespace, labels[batch_jobs.LABEL]), GATHER_S)
        elif SERVICE in labels:
            queue.add(("InferenceService", namespace, labels[SERVICE]), GATHER_S)

    kopf.on.login(registry=made)(log_in)
    for one in WATCHED:
        if not one.optional or one.api in apis:
            kopf.on.event(*_selected(one), registry=made)(asked if one.custom else changed)
    return made


def settings(silence_s: float) -> kopf.OperatorSettings:
    """How kopf is to watch; a watch that is silent for so many seconds is begun anew."""
    made = kopf.OperatorSettings()
    made.scanning.disabled = True  # else it wants to read CRDs and namespaces
    made.posting.enabled = False
    made.peering.standalone = True
    made.watching.chunk_size = PAGE
    made.watching.inactivity_timeout = silence_s
    for one in OWNED:
        # The server sends only what is ours.
        made.watching.label_selectors[_selected(one)] = f"{labels.MANAGED_BY}={labels.OPERATOR}"
    return made


def _selected(one: ApiResource) -> tuple[str, str, str]:
    """Group, version and plural, as kopf wants them."""
    return one.group, one.api.rpartition("/")[2], one.plural


def quiet() -> None:
    """Have kopf say only what went wrong: it has a line for every event."""
    for name in ("kopf", "kopf.objects", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)
