"""
The engines of workers: their commands, flags, environment, ports, probes and shutdown.

Each module renders one engine. `baton_operator.manifests.workers` puts the result into a pod, with everything
that engines have in common: model files, resources, placement and security.
"""

from __future__ import annotations

from importlib import import_module

from baton_api.workers import ENGINE_TYPES
from baton_operator.kinds.engine import EngineType
from baton_operator.manifests.engines.container import EngineContainer, WorkerPod
from baton_operator.manifests.engines.spec import EngineSpec

ENGINES: dict[EngineType, EngineSpec] = {
    type: import_module(f"baton_operator.manifests.engines.{kind}").SPEC
    for kind, type in ENGINE_TYPES.items()
}
"""By type: the module of its kind has it."""


def container(worker: WorkerPod) -> EngineContainer:
    """Return what the engine of a worker adds to its pod."""
    return ENGINES[worker.blueprint.engine.type].container(worker)
