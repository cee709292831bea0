"""The two sides of rendering an engine: the worker that it is for, and its part of the worker's pod."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.workers import Role
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest, Owner
from baton_operator.manifests.pods import probe
from baton_operator.manifests.ports import Ports
from baton_operator.manifests.revision import Blueprint, Revision

STARTUP_PERIOD_S = 10

LEADER_ADDRESS = "$(LWS_LEADER_ADDRESS)"
NODE_RANK = "$(LWS_WORKER_INDEX)"
"""Variables that LeaderWorkerSet adds to each container: the leader's address, and the number of the pod."""

USER = Variable(name="USER", value="baton")
"""Name of the pods' user, which images of other projects do not know: without it, torch fails to start."""


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """One pod of a worker, before its engine is rendered."""

    owner: Owner
    revision: Revision
    role: Role
    ports: Ports
    model: str
    """Path of the model's files."""
    tls: Sequence[str] = ()
    """Flags for mutual TLS."""
    follower: bool = False
    """Whether it is another node than the first of a worker with several nodes."""

    @property
    def blueprint(self) -> Blueprint:
        return self.revision.blueprint

    @property
    def spec(self) -> WorkerRole:
        return self.blueprint.roles[self.role]

    @property
    def arguments(self) -> list[str]:
        """Flags of the user, which follow those of the operator."""
        return [*self.blueprint.engine.args, *self.spec.args]


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """Fields of the main container that an engine decides."""

    worker: WorkerPod
    args: list[str]
    ports: list[Manifest]
    """Named container ports; `http` is that of probes and metrics. Unused by other nodes than the first."""
    startup_s: int
    """Seconds from the start until the worker has to be ready."""
    command: Sequence[str] = ()
    """Empty: the entry point of the image."""
    env: Sequence[Variable] = ()
    """Variables that users may override."""
    ready: str = "/health"
    """Path that answers with status 200 once the worker accepts requests."""
    volumes: Sequence[Manifest] = ()
    mounts: Sequence[Manifest] = ()
    shared_memory: int = 0
    """Bytes in /dev/shm beyond sharedMemorySize of the role."""
    kept_s: int = 0
    """Seconds after the drain timeout for which the engine keeps blocks that were not read."""

    @property
    def pre_stop_s(self) -> int:
        """Seconds of the preStop hook, during which the worker still serves."""
        drain = self.worker.spec.drain
        # Other nodes have to outlive the first one, which drains.
        return drain.total_s + self.kept_s if self.worker.follower else drain.pre_stop_delay.whole_seconds

    @property
    def stop_s(self) -> int:
        """Seconds that the engine may take to stop after that."""
        return 0 if self.worker.follower else self.worker.spec.drain.timeout.whole_seconds + self.kept_s

    @property
    def served(self) -> Manifest:
        """Ports, probes and the preStop hook. A slow step must not restart a worker: liveness waits long."""
        seconds = self.pre_stop_s
        hook = {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}} if seconds else {}
        if self.worker.follower:
            return {"ports": [], **hook}
        failures = max(1, self.startup_s // STARTUP_PERIOD_S)
        return {
            "ports": self.ports,
            "startupProbe": probe(self.ready, STARTUP_PERIOD_S, 5, failures),
            "readinessProbe": probe(self.ready, 5, 5, 2),
            "livenessProbe": probe("/health", 20, 15, 6),
            **hook,
        }


def compact(values: Manifest) -> str:
    """Return the JSON of a flag."""
    return json.dumps(values, separators=(",", ":"))


def named_ports(ports: Ports, control: str = "", *, tls: bool = False) -> list[Manifest]:
    """
    Return the container ports. `control`: name of the control port; empty: none.

    Probes and Prometheus use `http`, which needs no certificate.
    """
    served = {"https": ports.http, "http": ports.health} if tls else {"http": ports.http}
    named = {**served, "kv-events": ports.kv_events, "kv-replay": ports.kv_replay, control: ports.control}
    return [{"name": name, "containerPort": number} for name, number in named.items() if name]
