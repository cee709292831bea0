"""
The ports on which workers listen.

Ports are fixed in the network of a pod. With `hostNetwork`, all pods of a node share its ports, and
Kubernetes places a pod only where its ports are free. Each role of each revision therefore has its own
ports: prefill and decode workers, old and new revisions, and several services fit on one node. Two workers of
the same role and revision still need two nodes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Owner
from baton_operator.manifests.revision import Revision

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Ports for `hostNetwork`: below NodePorts and the ephemeral ports of Linux."""

PORTS_OF_ROLE = 5
PORTS_OF_REVISION = 2 * PORTS_OF_ROLE

VLLM_SIDE_CHANNEL_PORT = 5600
SGLANG_BOOTSTRAP_PORT = 8998
RENDEZVOUS_PORT = 29_501

# The default ports of vLLM and SGLang, which clients of their KV events expect.
KV_EVENTS_PORT = 5557
KV_REPLAY_PORT = 5558


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on which one worker listens."""

    http: int
    health: int
    """For engine Baton. Of other engines, the nodes of one worker find one another here."""
    kv_events: int
    kv_replay: int
    control: int
    """Where other workers request blocks: the control server of Baton, NIXL's side channel of vLLM, the
    bootstrap server of SGLang."""


def ports(owner: Owner, revision: Revision, role: Role) -> Ports:
    """Return the ports of the workers of a role and revision."""
    if not in_node_network(revision.blueprint.roles[role]):
        return in_pod_network(revision)
    name = f"{owner.namespace}/{owner.name}/{revision.name}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    blocks = (LAST_PORT + 1 - FIRST_PORT) // PORTS_OF_REVISION
    first = FIRST_PORT + number % blocks * PORTS_OF_REVISION + (0 if role is Role.PREFILL else PORTS_OF_ROLE)
    return Ports(*range(first, first + PORTS_OF_ROLE))


def in_pod_network(revision: Revision) -> Ports:
    """Return the ports of workers that have a network of their own."""
    match revision.blueprint.engine.type:
        case "vLLM":
            control = VLLM_SIDE_CHANNEL_PORT
        case "SGLang":
            control = SGLANG_BOOTSTRAP_PORT
        case _:
            control = revision.blueprint.transfer.control_port
            events = names.KV_EVENTS_PORT, names.KV_REPLAY_PORT
            return Ports(names.HTTP_PORT, names.HEALTH_PORT, *events, control)
    return Ports(names.HTTP_PORT, RENDEZVOUS_PORT, KV_EVENTS_PORT, KV_REPLAY_PORT, control)


def in_node_network(role: WorkerRole) -> bool:
    """Whether the role's podTemplate sets `hostNetwork`."""
    return ((role.pod_template or {}).get("spec") or {}).get("hostNetwork") is True
