"""
Workers that run TensorRT-LLM: `trtllm-serve`, with its cache transceiver between prefill and decode workers.

The transceiver has no flag: it is in a file of options, which the container writes from the variable
BATON_TRTLLM_OPTIONS before it starts the server. Other options without a flag go into that variable, too: the
`env` of the spec replaces it as a whole.

Flags are those of TensorRT-LLM 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_api.workers import EngineKind, Role
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.engines.container import USER, EngineContainer, WorkerPod, compact, startup_s
from baton_operator.manifests.engines.spec import (
    ADDRESS,
    NAMES,
    PIPELINE,
    TENSOR,
    TRANSFER,
    EngineSpec,
    Slots,
)
from baton_operator.manifests.objects import Manifest

OPTIONS = "BATON_TRTLLM_OPTIONS"
FILE = "/tmp/trtllm-options.yaml"

START = f'printf %s "${OPTIONS}" >{FILE} && exec trtllm-serve "$@"'
"""A script with the arguments of trtllm-serve as its own. YAML contains JSON."""

DEFAULT_SLOTS = 2048


def container(worker: WorkerPod) -> EngineContainer:
    """Return the container of a worker."""
    options = Variable(name=OPTIONS, value=compact(_options(worker)))
    return EngineContainer(
        worker,
        command=("/bin/sh", "-c", START, "trtllm-serve"),
        args=["serve", worker.model, *_flags(worker), *worker.arguments],
        ports=[{"name": "http", "containerPort": worker.ports.http}],
        env=[USER, options],
        startup_s=startup_s(worker.blueprint.model, worker.spec),
    )


def _flags(worker: WorkerPod) -> list[str]:
    engine, wanted = worker.blueprint.engine, worker.spec.parallelism
    flags = [
        f"--served_model_name={worker.blueprint.served_names[0]}",
        "--host=0.0.0.0",
        f"--port={worker.ports.http}",
        f"--tp_size={wanted.tensor}",
        f"--pp_size={wanted.pipeline}",
        f"--extra_llm_api_options={FILE}",
    ]
    if engine.max_model_len is not None:
        flags.append(f"--max_seq_len={engine.max_model_len}")
    return flags


def _options(worker: WorkerPod) -> Manifest:
    engine = worker.blueprint.engine
    options: Manifest = {"return_perf_metrics": True}
    if engine.dtype != "auto":
        options["dtype"] = engine.dtype
    if worker.role is not Role.BOTH:
        timeout_ms = 1000 * worker.blueprint.transfer.timeout.whole_seconds
        transceiver: Manifest = {"backend": "NIXL", "kv_transfer_timeout_ms": timeout_ms}
        if engine.max_model_len is not None:
            transceiver["max_tokens_in_buffer"] = engine.max_model_len
        options["cache_transceiver_config"] = transceiver
    if worker.role is Role.PREFILL:
        options["disable_overlap_scheduler"] = True  # which context servers do not support
    return options


def _default_slots(spec: InferenceServiceSpec, arguments: Sequence[str]) -> int:
    return DEFAULT_SLOTS


SPEC = EngineSpec(
    kind=EngineKind.TRTLLM,
    container=container,
    owned_flags={  # as `flag_name` reads them, with hyphens
        **ADDRESS,
        "--served-model-name": NAMES,
        **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), TENSOR),
        **dict.fromkeys(("--pp-size", "--pipeline-parallel-size"), PIPELINE),
        **dict.fromkeys(("--extra-llm-api-options", "--config"), f"{TRANSFER}, and the variable {OPTIONS}"),
    },
    slots=Slots("--max-batch-size", _default_slots),
)
