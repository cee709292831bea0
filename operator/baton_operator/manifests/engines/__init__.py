"""
The engines of workers: their commands, flags, environment, ports, probes and shutdown.

Each module renders one engine. `baton_operator.manifests.workers` puts the result into a pod, with everything
that engines have in common: model files, resources, placement and security.
"""

from __future__ import annotations

from baton_api.engines import EngineKind
from baton_operator.kinds.engine import EngineType
from baton_operator.manifests.engines import baton, custom, sglang, vllm
from baton_operator.manifests.engines.container import EngineContainer, WorkerPod

RENDERERS = {
    "Baton": baton.container,
    "vLLM": vllm.container,
    "SGLang": sglang.container,
    "Custom": custom.container,
}

KINDS: dict[EngineType, EngineKind] = {
    "Baton": EngineKind.BATON,
    "vLLM": EngineKind.VLLM,
    "SGLang": EngineKind.SGLANG,
    "Custom": EngineKind.OPENAI,
}
"""Engines of the spec as routers name them."""


def container(worker: WorkerPod) -> EngineContainer:
    """Return what the engine of a worker adds to its pod."""
    return RENDERERS[worker.blueprint.engine.type](worker)
