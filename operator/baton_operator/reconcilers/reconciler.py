"""What reconcilers share: their interface, and how they write status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kubernetes.aio.client.exceptions import ApiException

from baton_operator.cluster.api_server import FORBIDDEN, ApiServer
from baton_operator.manifests.objects import Manifest, ReportTransition, Transition

REJECTED_STATUSES = frozenset({400, FORBIDDEN, 422})


NOT_TYPED = "failed to create typed patch object"
"""Begins the API server's message on a server-side apply with two entries of one key, whose status is 500."""


def is_rejected(error: ApiException) -> bool:
    """Return whether the API server rejects the write for good: missing permission or invalid field."""
    return error.status in REJECTED_STATUSES or (error.reason or "").startswith(NOT_TYPED)


class Reconciler(Protocol):
    """Brings objects of one kind to the state that their spec asks for."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Return the seconds until the next reconciliation without a change; None for a deleted object.
        Raises ApiException to be retried, and NotLeader if another operator holds the Lease.
        """


async def write_status(
    api: ApiServer,
    about: Manifest,
    patch: Mapping[str, Any],
    transitions: Sequence[Transition],
    report: ReportTransition,
) -> None:
    """Merge `patch` into the status of the object, then report the transitions. Raises ApiException. An
    interrupted reconciliation has reported nothing, and the next one does: each is reported once.
    """
    if patch:
        await api.write_status(about, patch)
    for transition in transitions:
        report(about, transition)
