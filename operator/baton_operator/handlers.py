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
from baton_operator.crd import GROUP, VERSION
from baton_operator.heartbeat import Heartbeat
from baton_operator.work_queue import WorkQueue

SERVICES, SCALERS, ADAPTERS = "inferenceservices", "rolescalers", "loraadapters"
BATCHES = "batchjobs"

SERVICE = labels.SERVICE

CUSTOM = tuple((GROUP, VERSION, plural) for plural in (SERVICES, SCALERS, ADAPTERS, BATCHES))
"""What users write."""

OWNED = (
    ("apps", "v1", "deployments"),
    ("batch", "v1", "jobs"),
    ("networking.k8s.io", "v1", "ingresses"),
    ("networking.k8s.io", "v1", "networkpolicies"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    ("rbac.authorization.k8s.io", "v1", "roles"),
    ("", "v1", "configmaps"),
    ("", "v1", "pods"),
    ("", "v1", "serviceaccounts"),
    ("", "v1", "services"),
)
"""What the operator has made, and wants to hear of at once."""

OPTIONAL = (
    ("cert-manager.io", "v1", "certificates"),
    ("gateway.networking.k8s.io", "v1", "httproutes"),
)
"""The same where the cluster knows them when the operator starts."""

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
    What kopf is to call; `apis` are those of OPTIONAL that the cluster has, as group/version.

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
    for group, version, plural in CUSTOM:
        kopf.on.event(group, version, plural, registry=made)(asked)
    there = [one for one in OPTIONAL if f"{one[0]}/{one[1]}" in apis]
    for group, version, plural in (*OWNED, *there):
        kopf.on.event(group, version, plural, registry=made)(changed)
    return made


def settings(silence_s: float) -> kopf.OperatorSettings:
    """How kopf is to watch; a watch that is silent for so many seconds is begun anew."""
    made = kopf.OperatorSettings()
    made.scanning.disabled = True  # else it wants to read CRDs and namespaces
    made.posting.enabled = False
    made.peering.standalone = True
    made.watching.chunk_size = PAGE
    made.watching.inactivity_timeout = silence_s
    for group, version, plural in (*OWNED, *OPTIONAL):
        # The server sends only what is ours.
        made.watching.label_selectors[group, version, plural] = f"{labels.MANAGED_BY}={labels.OPERATOR}"
    return made


def quiet() -> None:
    """Have kopf say only what went wrong: it has a line for every event."""
    for name in ("kopf", "kopf.objects", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)
