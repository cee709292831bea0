"""
The ports of a worker: fixed in a pod's own network, chosen in the node's.

With `hostNetwork` all pods of a node share its ports, and Kubernetes places a pod only where its ports are
free. So each role of each revision has its own ports: prefill and decode workers, old and new revisions,
and several services fit on one node. Two workers of the same role and revision still need two nodes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Owner
from baton_operator.manifests.revision import Revision

FIRST, LAST = 20_000, 29_999
"""Below NodePorts and the ports from which Linux chooses."""

OF_ONE_ROLE = 5
OF_A_REVISION = 2 * OF_ONE_ROLE


@dataclass(frozen=True, slots=True)
class Ports:
    """Where one worker listens."""

    http: int
    health: int
    kv_events: int
    kv_replay: int
    control: int


def ports(owner: Owner, generation: Revision, role: Role) -> Ports:
    """The ports of all workers of a role and revision."""
    control = generation.blueprint.transfer.control_port
    if not in_node_network(generation.blueprint.roles[role]):
        return Ports(names.HTTP_PORT, names.HEALTH_PORT, names.KV_EVENTS_PORT, names.KV_REPLAY_PORT, control)
    name = f"{owner.namespace}/{owner.name}/{generation.revision}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    blocks = (LAST + 1 - FIRST) // OF_A_REVISION
    first = FIRST + number % blocks * OF_A_REVISION + (0 if role is Role.PREFILL else OF_ONE_ROLE)
    return Ports(*range(first, first + OF_ONE_ROLE))


def in_node_network(role: WorkerRole) -> bool:
    """Whether the role's podTemplate asks for `hostNetwork`."""
    return ((role.pod_template or {}).get("spec") or {}).get("hostNetwork") is True
