"""The two sides of rendering an engine: the worker that it is for, and its part of the worker's pod."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.workers import Role
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest, Owner
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

    args: list[str]
    ports: list[Manifest]
    """Named container ports; `http` is that of probes and metrics."""
    command: Sequence[str] = ()
    """Empty: the entry point of the image."""
    env: Sequence[Variable] = ()
    """Variables that users may override."""
    ready: str = "/health"
    """Path that answers with status 200 once the worker accepts requests."""
    startup_s: int = 0
    """Seconds from the start until the worker has to be ready. 0: the pod has no probes."""
    pre_stop_s: int = 0
    """Seconds of the preStop hook, during which the worker still serves."""
    stop_s: int = 0
    """Seconds that the engine may take to stop after that."""

    @property
    def probes(self) -> Manifest:
        """Probes. Liveness has a long timeout: a slow step must not restart a worker."""
        if not self.startup_s:
            return {}
        failures = max(1, self.startup_s // STARTUP_PERIOD_S)
        return {
            "startupProbe": _probe(self.ready, STARTUP_PERIOD_S, 5, failures),
            "readinessProbe": _probe(self.ready, 5, 5, 2),
            "livenessProbe": _probe("/health", 20, 15, 6),
        }

    @property
    def lifecycle(self) -> Manifest:
        """The preStop hook: the worker serves until all routers know of its deletion."""
        seconds = self.pre_stop_s
        return {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}} if seconds else {}


def _probe(path: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def event_ports(ports: Ports) -> list[Manifest]:
    """Return the ports of KV events."""
    return [
        {"name": "kv-events", "containerPort": ports.kv_events},
        {"name": "kv-replay", "containerPort": ports.kv_replay},
    ]
