"""
The engines of workers: their commands, flags, environment, ports, probes and shutdown.

Each module renders one engine. `baton_operator.manifests.workers` puts the result into a pod, with everything
that engines have in common: model files, resources, placement and security.
"""

from __future__ import annotations

from baton_operator.kinds.engine import EngineType
from baton_operator.manifests.engines import baton, custom, sglang, trtllm, vllm
from baton_operator.manifests.engines.container import EngineContainer, WorkerPod
from baton_operator.manifests.engines.spec import EngineSpec

ENGINES: dict[EngineType, EngineSpec] = {
    "Baton": baton.SPEC,
    "vLLM": vllm.SPEC,
    "SGLang": sglang.SPEC,
    "TensorRT-LLM": trtllm.SPEC,
    "Custom": custom.SPEC,
}


def container(worker: WorkerPod) -> EngineContainer:
    """Return what the engine of a worker adds to its pod."""
    return ENGINES[worker.blueprint.engine.type].container(worker)
