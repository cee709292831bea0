"""
A worker to render, its engine's part of the pod, the flags in its arguments, and how long it may start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.workers import Role
from baton_operator.kinds.engine import Engine, Variable
from baton_operator.kinds.model import Model
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest, Owner
from baton_operator.manifests.pods import Ports, probe
from baton_operator.manifests.revision import Blueprint, Revision

BASE_S = 600
"""Seconds for the process, compilation and CUDA graphs."""

BILLION_S = 8
"""Seconds per billion parameters: 2 GB of weights at 250 MB/s, as from a shared volume."""

ACCELERATOR_BILLIONS = 40
"""Billion parameters assumed per accelerator: half of 80 GB at 2 bytes each."""

_EXPERTS = re.compile(r"(?<![A-Za-z0-9.])(\d+)x(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)


def startup_s(model: Model, role: WorkerRole) -> int:
    """Return the seconds until a worker has to be ready. A value that the user set is kept."""
    given = role.startup_timeout
    if given != type(role).model_fields["startup_timeout"].get_default():
        return given.whole_seconds
    billions = billions_of(f"{model.uri} {model.name or ''}")
    if billions is None:
        billions = ACCELERATOR_BILLIONS * role.parallelism.accelerators
    return max(given.whole_seconds, BASE_S + round(BILLION_S * billions))


def billions_of(name: str) -> float | None:
    """
    Return the billion parameters that the name of a model mentions; None if it mentions none.

    >>> billions_of("hf://meta-llama/Llama-3.3-70B-Instruct"), billions_of("Mixtral-8x22B-v0.1")
    (70.0, 176.0)
    >>> billions_of("Qwen3-235B-A22B"), billions_of("deepseek-v3")
    (235.0, None)
    """
    experts = [int(count) * float(size) for count, size in _EXPERTS.findall(name)]
    return max([*experts, *map(float, _SIZE.findall(name))], default=None)


ENABLE_LORA, MAX_LORAS, MAX_LORA_RANK = "--enable-lora", "--max-loras", "--max-lora-rank"


def lora_flags(engine: Engine) -> list[str]:
    """Return the flags with which workers load adapters, the same for Baton and vLLM."""
    if engine.lora is None:
        return []
    limits = engine.lora
    return [ENABLE_LORA, f"{MAX_LORAS}={limits.max_adapters}", f"{MAX_LORA_RANK}={limits.max_rank}"]


def flag_name(argument: str) -> str:
    """
    Return the flag of an argument in its usual form; empty if it is a value.

    >>> flag_name("--kv_transfer_config.kv_role=kv_both"), flag_name("-tp=4"), flag_name("256")
    ('--kv-transfer-config', '-tp', '')
    """
    name = argument.strip().split("=")[0].split(" ")[0].split(".")[0]
    return name.replace("_", "-") if name.startswith("-") and not name[1:2].isdigit() else ""


def last_value(arguments: Sequence[str], *flags: str) -> str:
    """
    Return the value of the last of these flags, which wins; empty if they are not set.

    >>> last_value(["--block-size", "16", "--block_size=32"], "--block-size")
    '32'
    """
    value = ""
    for index, argument in enumerate(arguments):
        if flag_name(argument) not in flags:
            continue
        name, equals, text = argument.strip().partition("=")
        _, space, apart = name.partition(" ")
        if equals or space:
            value = (text if equals else apart).strip()
        elif index + 1 < len(arguments):
            value = arguments[index + 1].strip()
    return value


def data_parallel(arguments: Sequence[str]) -> bool:
    """
    Return whether several data-parallel ranks run behind one port.

    Each rank then publishes KV events at ports of its own, which routers do not follow.

    >>> data_parallel(["--data-parallel-size", "2"]), data_parallel(["--dp-size=1"]), data_parallel([])
    (True, False, False)
    """
    return last_value(arguments, "--data-parallel-size", "-dp", "--dp-size", "--dp") not in ("", "1")


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
