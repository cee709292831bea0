"""What a drained node may take away at once, of each role over all revisions."""

from __future__ import annotations

from baton_operator import names
from baton_operator.manifests.objects import Manifest, Owner, made


def budget(owner: Owner, role: str, max_unavailable: int) -> Manifest:
    body = {
        "maxUnavailable": max_unavailable,
        "selector": {"matchLabels": names.selecting(owner.name, role)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a pod that never gets ready must not hold up a drain
    }
    there = names.of_role(owner.name, role)
    name = names.role(owner.name, role)
    return made(owner, "policy/v1", "PodDisruptionBudget", name, {"spec": body}, there)
