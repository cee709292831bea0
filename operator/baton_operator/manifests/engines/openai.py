"""
Workers that run any server of the OpenAI API, with its own image and flags.

The server listens on the port in BATON_PORT and answers GET /health. Kubernetes replaces $(BATON_MODEL),
$(BATON_PORT) and $(BATON_SERVED_NAME) in `args`.
"""

from __future__ import annotations

from baton_api.workers import EngineKind
from baton_operator.kinds.engine import Variable
from baton_operator.manifests.engines.container import USER, EngineContainer, WorkerPod, startup_s
from baton_operator.manifests.engines.spec import EngineSpec


def container(worker: WorkerPod) -> EngineContainer:
    """Return the container of a worker."""
    values = {
        "BATON_MODEL": worker.model,
        "BATON_PORT": str(worker.ports.http),
        "BATON_SERVED_NAME": worker.blueprint.served_names[0],
    }
    return EngineContainer(
        worker,
        args=worker.arguments,
        ports=[{"name": "http", "containerPort": worker.ports.http}],
        env=[USER, *(Variable(name=name, value=value) for name, value in values.items())],
        startup_s=startup_s(worker.blueprint.model, worker.spec),
    )


SPEC = EngineSpec(kind=EngineKind.OPENAI, container=container)
