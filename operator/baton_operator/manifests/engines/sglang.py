"""
Workers that run SGLang: `python3 -m sglang.launch_server`, with NIXL between prefill and decode workers.

Flags are those of SGLang 0.5.23. After SIGTERM, SGLang finishes its requests, those of which a decode worker
still reads the blocks included, and has no time limit of its own.
"""

from __future__ import annotations

from baton_api.workers import Role
from baton_operator.kinds.engine import Variable
from baton_operator.manifests.engines.arguments import data_parallel
from baton_operator.manifests.engines.container import (
    LEADER_ADDRESS,
    NODE_RANK,
    USER,
    EngineContainer,
    WorkerPod,
    compact,
    event_ports,
)
from baton_operator.manifests.engines.startup import startup_s
from baton_operator.manifests.objects import Manifest

MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


def container(worker: WorkerPod) -> EngineContainer:
    """Return the container of a worker, or of another node of it."""
    return EngineContainer(
        worker,
        command=("python3", "-m", "sglang.launch_server"),
        args=[f"--model-path={worker.model}", *_flags(worker), *worker.arguments],
        ports=_ports(worker),
        env=[USER, Variable(name="SGLANG_HOST_IP", value="$(POD_IP)")],
        startup_s=startup_s(worker.blueprint.model, worker.spec),
    )


def _flags(worker: WorkerPod) -> list[str]:
    engine, ports = worker.blueprint.engine, worker.ports
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.kv_events}",
        "replay_endpoint": f"tcp://*:{ports.kv_replay}",
    }
    flags = [
        f"--served-model-name={worker.blueprint.served_names[0]}",
        "--host=0.0.0.0",
        f"--port={ports.http}",
        f"--dtype={engine.dtype}",
        *_parallelism(worker),
        *([] if data_parallel(worker.arguments) else [f"--kv-events-config={compact(events)}"]),
        "--enable-metrics",
    ]
    if worker.role in MODES:
        flags += [
            f"--disaggregation-mode={MODES[worker.role]}",
            "--disaggregation-transfer-backend=nixl",
            f"--disaggregation-bootstrap-port={ports.control}",
        ]
    if engine.max_model_len is not None:
        flags.append(f"--context-length={engine.max_model_len}")
    return flags


def _parallelism(worker: WorkerPod) -> list[str]:
    wanted = worker.spec.parallelism
    flags = [f"--tp-size={wanted.tensor}", f"--pp-size={wanted.pipeline}"]
    if wanted.nodes == 1:
        return flags
    rank = NODE_RANK if worker.follower else "0"
    address = f"--dist-init-addr={LEADER_ADDRESS}:{worker.ports.health}"
    return [*flags, f"--nnodes={wanted.nodes}", f"--node-rank={rank}", address]


def _ports(worker: WorkerPod) -> list[Manifest]:
    named = [{"name": "http", "containerPort": worker.ports.http}, *event_ports(worker.ports)]
    if worker.role is Role.PREFILL:
        named.append({"name": "bootstrap", "containerPort": worker.ports.control})
    return named
