"""
Workers that run SGLang: `python3 -m sglang.launch_server`, with NIXL between prefill and decode workers.

Flags are those of SGLang 0.5.23. After SIGTERM, SGLang finishes its requests, those of which a decode worker
still reads the blocks included, and has no time limit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_api.workers import EngineKind, Role
from baton_operator.kinds.engine import Engine, Variable
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import amount
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.engines import tiers
from baton_operator.manifests.engines.container import (
    LEADER_ADDRESS,
    NODE_RANK,
    USER,
    EngineContainer,
    WorkerPod,
    compact,
    data_parallel,
    flag_name,
    named_ports,
    startup_s,
)
from baton_operator.manifests.engines.spec import (
    DTYPE,
    MODEL,
    NODES,
    OF_VLLM_AND_SGLANG,
    PIPELINE,
    TENSOR,
    TRANSFER,
    EngineSpec,
    Slots,
)

DISK_VARIABLES = ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE")
"""Folder of the tier on a disk, and the bytes in it that each rank may write."""

DEFAULT_SLOTS, SPECULATIVE_DEFAULT_SLOTS = 2048, 48
"""SGLang's smallest default (0.5), and the one with speculative decoding."""

MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


def container(worker: WorkerPod) -> EngineContainer:
    """Return the container of a worker, or of another node of it."""
    engine = worker.blueprint.engine if has_tiers(worker.role) else Engine()
    return EngineContainer(
        worker,
        command=("python3", "-m", "sglang.launch_server"),
        args=[f"--model-path={worker.model}", *_flags(worker), *worker.arguments],
        ports=named_ports(worker.ports, "bootstrap" if worker.role is Role.PREFILL else ""),
        env=_variables(worker),
        startup_s=startup_s(worker.blueprint.model, worker.spec),
        volumes=tiers.volumes(engine),
        mounts=tiers.mounts(engine),
    )


def has_tiers(role: Role) -> bool:
    """Return whether workers of a role can have tiers. A decode worker of a pair has no prefix cache."""
    return role is not Role.DECODE


def host_memory(engine: Engine, role: WorkerRole) -> int:
    """Return the GB in the host's memory of each rank: SGLang's flag counts whole ones."""
    return tiers.memory(engine) // ranks(role) // 10**9


def ranks(role: WorkerRole) -> int:
    """Return the number of ranks in a pod."""
    return max(1, role.parallelism.accelerators // role.parallelism.nodes)


def _variables(worker: WorkerPod) -> list[Variable]:
    values = {"SGLANG_HOST_IP": "$(POD_IP)"}
    disk = tiers.disk(worker.blueprint.engine)
    if disk is not None and has_tiers(worker.role):
        each = int(amount(disk.size)) // ranks(worker.spec)
        values |= dict(zip(DISK_VARIABLES, (tiers.FOLDER, str(each)), strict=True))
    return [USER, *(Variable(name=name, value=value) for name, value in values.items())]


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
    if engine.kv_cache_tiers and has_tiers(worker.role):
        flags += ["--enable-hierarchical-cache", f"--hicache-size={host_memory(engine, worker.spec)}"]
        if tiers.disk(engine):
            flags.append("--hicache-storage-backend=file")
    return flags


def _parallelism(worker: WorkerPod) -> list[str]:
    wanted = worker.spec.parallelism
    flags = [f"--tp-size={wanted.tensor}", f"--pp-size={wanted.pipeline}"]
    if wanted.nodes == 1:
        return flags
    rank = NODE_RANK if worker.follower else "0"
    address = f"--dist-init-addr={LEADER_ADDRESS}:{worker.ports.health}"
    return [*flags, f"--nnodes={wanted.nodes}", f"--node-rank={rank}", address]


def _default_slots(spec: InferenceServiceSpec, arguments: Sequence[str]) -> int:
    speculative = any(flag_name(argument).startswith("--speculative") for argument in arguments)
    return SPECULATIVE_DEFAULT_SLOTS if speculative else DEFAULT_SLOTS


SPEC = EngineSpec(
    kind=EngineKind.SGLANG,
    container=container,
    owned_flags={
        **OF_VLLM_AND_SGLANG,
        "--model-path": MODEL,
        "--disaggregation-mode": TRANSFER,
        "--disaggregation-transfer-backend": TRANSFER,
        "--disaggregation-bootstrap-port": TRANSFER,
        **dict.fromkeys(("--tp-size", "--tp"), TENSOR),
        **dict.fromkeys(("--pp-size", "--pp"), PIPELINE),
        **dict.fromkeys(("--dist-init-addr", "--nccl-init-addr"), NODES),
    },
    layout_flags={"--page-size": "", "--kv-cache-dtype": "auto", DTYPE: ""},
    image_flag="--sglang-image",
    slots=Slots("--max-running-requests", _default_slots),
)
