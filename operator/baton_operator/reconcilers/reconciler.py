"""What reconcilers share: their interface, and how they write status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from baton_operator.cluster.api_server import FORBIDDEN, ApiServer
from baton_operator.manifests.conditions import Transition
from baton_operator.manifests.objects import Manifest

REJECTED_STATUSES = frozenset({400, FORBIDDEN, 422})
"""Statuses of permanent rejections: missing permission or invalid field."""


class Reconciler(Protocol):
    """Brings objects of one kind to the state that their spec asks for."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Return the seconds until the next reconciliation without a change; None for a deleted object.
        Raises ApiException to be retried, and NotLeader if another operator holds the Lease.
        """


ReportTransition = Callable[[Manifest, Transition], None]
"""Reports a transition of an object as an Event and in metrics. Does not wait and never raises."""


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
