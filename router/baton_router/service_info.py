"""Information about the service: models, workers, and settings without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from baton_api import __version__
from baton_router.settings import RouterSettings
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers

HIDDEN_SETTINGS = frozenset(
    {
        "api_key",
        "api_key_file",
        "ticket_secret",
        "worker_api_key",
        "batch_secret",
        "database",
        "tenants_file",
        "response_store",
    }
)
"""Settings that are never shown."""


def version() -> dict[str, Any]:
    return {"version": __version__, "server": "baton"}


def model_card(workers: Workers, name: str, created: int) -> dict[str, Any]:
    """One model of `/v1/models`, as a worker would show it."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": next((worker.model for worker in workers.decode if name in worker.names), name),
        "parent": None,
        "max_model_len": workers.context(name),
    }


def model_info(workers: Workers, names: Sequence[str]) -> dict[str, Any]:
    """The first model of some under the names that other servers' tools look for."""
    name = next(iter(names), "")
    return {
        "model_path": name,
        "served_model_name": name,
        "served_model_names": names,
        "is_generation": True,
        "preferred_sampling_params": None,
        "max_model_len": workers.context(name),
    }


def server_info(settings: RouterSettings, workers: Workers, created: int, now: float) -> dict[str, Any]:
    return {
        **version(),
        "status": workers.unavailable_reason(now) or "ready",
        "started": created,
        "models": [model_card(workers, name, created) for name in workers.models()],
        "settings": settings.model_dump(mode="json", exclude=set(HIDDEN_SETTINGS)),
        "workers": [worker_json(worker, now) for worker in workers.all],
    }


def worker_json(worker: Worker, now: float) -> dict[str, Any]:
    """A worker as `GET /workers` shows it."""
    health = worker.health
    return {
        "worker": worker.name,
        "name": worker.own_name or None,
        "role": worker.listed,
        "revision": worker.revision or None,
        "state": worker.state(now),
        "reason": worker.reason or None,
        "warnings": list(worker.warnings),
        "model": worker.model or None,
        "in_flight": worker.in_flight,
        "misses": health.misses,
        "consecutive_failures": health.breaker.failures,
        "load": msgspec.to_builtins(health.load) if health.load else None,
    }


def scrape_targets(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """Return the workers for Prometheus' HTTP service discovery, which needs only the router's address."""
    return [
        {
            "targets": [worker.name],
            "labels": {
                "worker": worker.name,
                "name": worker.own_name,
                "role": str(worker.listed),
                "revision": worker.revision,
            },
        }
        for worker in workers
    ]
