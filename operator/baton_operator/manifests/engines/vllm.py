"""
Workers that run vLLM: `vllm serve`, with NixlConnector between prefill and decode workers.

With tiers of the KV cache, OffloadingConnector keeps blocks in memory and on a disk, in a MultiConnector with
NixlConnector where there are pairs. vLLM loads from the first connector that has tokens of a request: from
NixlConnector, if a prefill worker has computed it. The host's memory is a file in /dev/shm.

Flags and variables are those of vLLM 0.32. A prefill worker that ends keeps its blocks until decode workers
have read them or their lease has ended: with --shutdown-timeout, vLLM counts such blocks as work.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_api.workers import EngineKind, Role
from baton_operator.kinds.engine import Engine, Variable
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import amount
from baton_operator.manifests.engines import tiers
from baton_operator.manifests.engines.container import (
    ENABLE_LORA,
    LEADER_ADDRESS,
    MAX_LORA_RANK,
    MAX_LORAS,
    NODE_RANK,
    USER,
    EngineContainer,
    WorkerPod,
    compact,
    data_parallel,
    lora_flags,
    named_ports,
    startup_s,
)
from baton_operator.manifests.engines.spec import (
    DTYPE,
    NODES,
    OF_VLLM_AND_SGLANG,
    PIPELINE,
    TENSOR,
    TRANSFER,
    EngineSpec,
    Slots,
)
from baton_operator.manifests.objects import Manifest

KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}

CHECKED = ("/health", "/metrics", "/v1/models")
"""Paths that routers, kubelets and Prometheus read every few seconds, which otherwise fill its log."""

LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Variable that adds the paths to load and unload adapters to vLLM's API."""

HASH_SEED_VARIABLE = "PYTHONHASHSEED"
"""Variable on which the names of blocks in a tier depend. Workers find one another's blocks, and their own
after a restart, only if it is equal."""

DEFAULT_SLOTS, CPU_DEFAULT_SLOTS = 256, 128
"""vLLM's smallest defaults (0.10 to 0.32). With 70 GiB of memory and more a GPU has 1024, except an A100."""

SIDE_CHANNEL_VARIABLES = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


def container(worker: WorkerPod) -> EngineContainer:
    """Return the container of a worker, or of another node of it."""
    return EngineContainer(
        worker,
        command=("vllm", "serve"),
        args=[worker.model, *_flags(worker), *worker.arguments],
        ports=named_ports(worker.ports, "side-channel" if worker.role in KV_ROLES else ""),
        env=_variables(worker),
        startup_s=startup_s(worker.blueprint.model, worker.spec),
        volumes=tiers.volumes(worker.blueprint.engine),
        mounts=tiers.mounts(worker.blueprint.engine),
        shared_memory=tiers.memory(worker.blueprint.engine),
        kept_s=_kept_s(worker),
    )


def _kept_s(worker: WorkerPod) -> int:
    """Return the seconds for which a worker that ends keeps its blocks: the lease of a prefill worker's."""
    return worker.blueprint.transfer.timeout.whole_seconds if worker.role is Role.PREFILL else 0


def _flags(worker: WorkerPod) -> list[str]:
    engine, ports = worker.blueprint.engine, worker.ports
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.kv_events}",
        "replay_endpoint": f"tcp://*:{ports.kv_replay}",
    }
    flags = [
        "--served-model-name",
        *worker.blueprint.served_names,
        "--host=0.0.0.0",
        f"--port={ports.http}",
        f"--dtype={engine.dtype}",
        *_parallelism(worker),
        *([] if data_parallel(worker.arguments) else [f"--kv-events-config={compact(events)}"]),
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        f"--disable-access-log-for-endpoints={','.join(CHECKED)}",
        f"--shutdown-timeout={worker.spec.drain.timeout.whole_seconds + _kept_s(worker)}",
    ]
    if worker.role in KV_ROLES or engine.kv_cache_tiers:
        flags.append(f"--kv-transfer-config={compact(_transfer(worker))}")
    if engine.max_model_len is not None:
        flags.append(f"--max-model-len={engine.max_model_len}")
    if engine.kv_cache_memory is not None:
        flags.append(f"--kv-cache-memory-bytes={_bytes(engine.kv_cache_memory)}")
    return flags + lora_flags(engine)


def _parallelism(worker: WorkerPod) -> list[str]:
    wanted = worker.spec.parallelism
    flags = [f"--tensor-parallel-size={wanted.tensor}", f"--pipeline-parallel-size={wanted.pipeline}"]
    if wanted.nodes == 1:
        return flags
    rank = [f"--node-rank={NODE_RANK}", "--headless"] if worker.follower else ["--node-rank=0"]
    address = [f"--master-addr={LEADER_ADDRESS}", f"--master-port={worker.ports.health}"]
    return [*flags, f"--nnodes={wanted.nodes}", *rank, *address]


def _transfer(worker: WorkerPod) -> Manifest:
    """Return the connectors of a worker that is part of a pair, has tiers, or both."""
    engine = worker.blueprint.engine
    # A worker that cannot read blocks computes the prompt itself.
    policy = {"kv_load_failure_policy": "recompute"}
    if worker.role not in KV_ROLES:
        return {**_offloading(engine), **policy}
    kv_role = {"kv_role": KV_ROLES[worker.role]}
    lease = {"kv_lease_duration": worker.blueprint.transfer.timeout.whole_seconds}
    nixl = {"kv_connector": "NixlConnector", **kv_role, "kv_connector_extra_config": lease}
    if not engine.kv_cache_tiers:
        return {**nixl, **policy}
    both = {"connectors": [nixl, _offloading(engine)]}
    return {"kv_connector": "MultiConnector", **kv_role, **policy, "kv_connector_extra_config": both}


def _offloading(engine: Engine) -> Manifest:
    """Return the connector that keeps blocks in tiers, with events that name their tokens."""
    settings: Manifest = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": tiers.memory(engine),
        "self_describing_kv_events": True,
    }
    if disk := tiers.disk(engine):
        settings["secondary_tiers"] = [
            {
                "type": "fs",
                "root_dir": tiers.FOLDER,
                "enable_kv_events": True,
                "locality": "REMOTE" if tiers.is_shared(disk) else "LOCAL",
            }
        ]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


def _variables(worker: WorkerPod) -> list[Variable]:
    values = {"VLLM_HOST_IP": "$(POD_IP)", "VLLM_NO_USAGE_STATS": "1"}
    if worker.role in KV_ROLES:
        values |= dict(zip(SIDE_CHANNEL_VARIABLES, ("$(POD_IP)", str(worker.ports.control)), strict=True))
    if worker.blueprint.engine.lora is not None:
        values[LORA_VARIABLE] = "1"
    if worker.blueprint.engine.kv_cache_tiers:
        values[HASH_SEED_VARIABLE] = "0"
    return [USER, *(Variable(name=name, value=value) for name, value in values.items())]


def _bytes(memory: str) -> int:
    """
    Return bytes of a size such as 4GiB, 4G or 4096.

    >>> _bytes("4GiB"), _bytes("1.5 GB")
    (4294967296, 1500000000)
    """
    return int(amount(memory.replace(" ", "").removesuffix("B").replace("K", "k").replace("ki", "Ki")))


def _default_slots(spec: InferenceServiceSpec, arguments: Sequence[str]) -> int:
    return DEFAULT_SLOTS if spec.decode.resources.accelerators else CPU_DEFAULT_SLOTS


SPEC = EngineSpec(
    kind=EngineKind.VLLM,
    container=container,
    owned_flags={
        **OF_VLLM_AND_SGLANG,
        "--kv-transfer-config": TRANSFER,
        "--shutdown-timeout": "drain.timeout of the role",
        **dict.fromkeys((ENABLE_LORA, MAX_LORAS, MAX_LORA_RANK), "spec.engine.lora"),
        "-tp": TENSOR,
        "-pp": PIPELINE,
        **dict.fromkeys(("-n", "-r", "--master-addr", "--master-port", "--headless"), NODES),
    },
    owned_variables=SIDE_CHANNEL_VARIABLES,
    layout_flags={"--block-size": "", "--kv-cache-dtype": "auto", DTYPE: ""},
    image_flag="--vllm-image",
    slots=Slots("--max-num-seqs", _default_slots),
)
