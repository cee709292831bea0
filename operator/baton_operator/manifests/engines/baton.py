"""Workers that run Baton's own engine: `baton prefill`, `baton decode` and `baton serve`."""

from __future__ import annotations

from baton_api.workers import EngineKind, Role
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.part import amount
from baton_operator.manifests import mutual_tls
from baton_operator.manifests.engines import tiers
from baton_operator.manifests.engines.container import EngineContainer, WorkerPod, lora_flags, named_ports
from baton_operator.manifests.engines.spec import EngineSpec

COMMANDS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "serve"}


def container(worker: WorkerPod) -> EngineContainer:
    """Return the container of a worker."""
    control = "control" if _in_pair(worker) else ""
    return EngineContainer(
        worker,
        args=[*_flags(worker), *worker.arguments],
        ports=named_ports(worker.ports, control, tls=worker.blueprint.mutual_tls is not None),
        env=_tickets(worker),
        ready="/ready",
        startup_s=worker.spec.startup_timeout.whole_seconds,
        volumes=tiers.volumes(worker.blueprint.engine),
        mounts=tiers.mounts(worker.blueprint.engine),
    )


def _flags(worker: WorkerPod) -> list[str]:
    blueprint, ports = worker.blueprint, worker.ports
    engine = blueprint.engine
    flags = [
        COMMANDS[worker.role],
        worker.model,
        "--name=$(POD_NAME)",
        "--host=0.0.0.0",
        f"--port={ports.http}",
        f"--dtype={engine.dtype}",
        f"--kv-events=tcp://$(POD_IP):{ports.kv_events}",
        f"--kv-replay=tcp://$(POD_IP):{ports.kv_replay}",
        f"--drain-s={worker.spec.drain.timeout.seconds:g}",
        f"--transfer-deadline-s={blueprint.transfer.timeout.seconds:g}",
        *(f"--served-model-name={name}" for name in blueprint.served_names),
        *worker.tls,
    ]
    if blueprint.mutual_tls:
        # Events are not encrypted; routers do without the tokens in them.
        flags += [f"--health-port={ports.health}", "--no-kv-tokens"]
    if _in_pair(worker):
        flags += ["--control-host=$(POD_IP)", f"--control-port={ports.control}"]
    if worker.spec.parallelism.tensor > 1:
        flags.append(f"--tensor-parallel-size={worker.spec.parallelism.tensor}")
    if engine.max_model_len is not None:
        flags.append(f"--max-model-len={engine.max_model_len}")
    if engine.kv_cache_memory is not None:
        flags.append(f"--kv-cache-memory={engine.kv_cache_memory}")
    if size := tiers.memory(engine):
        flags.append(f"--kv-memory-tier={size}")
    if disk := tiers.disk(engine):
        flags += [
            f"--kv-disk-tier={tiers.FOLDER}/blocks",
            f"--kv-disk-tier-size={int(amount(disk.size))}",
        ]
    if store := tiers.shared(engine):
        url = store.url or f"file://{tiers.SHARED_FOLDER}/blocks"
        flags += [f"--kv-shared-store={url}", f"--kv-shared-store-size={int(amount(store.size))}"]
    return flags + lora_flags(engine)


def _tickets(worker: WorkerPod) -> list[Variable]:
    """Return the key that verifies tickets."""
    if not _in_pair(worker):
        return []
    return mutual_tls.ticket_variable(mutual_tls.WORKER_VARIABLE, worker.owner.name, worker.spec.pod_template)


def _in_pair(worker: WorkerPod) -> bool:
    """Whether other workers read its KV blocks: it then has a control server, and uses tickets."""
    return worker.role is not Role.BOTH


SPEC = EngineSpec(kind=EngineKind.BATON, container=container)
