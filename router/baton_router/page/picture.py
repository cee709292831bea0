"""
The whole service as the page shows it: workers by role and what they do, who waits, how fast it is.

Who is no admin sees the workers that serve its models and how they are, but not what others do with them:
neither the queue nor any load, and a pace of its own requests alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from baton_api import __version__
from baton_router.dispatcher import Dispatch
from baton_router.page.pace import pace
from baton_router.page.timelines import Epoch, shown_name, visible
from baton_router.queue import Queue
from baton_router.tenants import Tenant
from baton_router.waiting_room import LEVELS
from baton_router.workers import Worker, Workers

WORKERS_LIMIT = 64
"""Workers of a picture; it says how many are left out."""


def picture(
    workers: Workers,
    queue: Queue,
    dispatches: Iterable[Dispatch],
    tenant: Tenant,
    now: float,
    epoch: Epoch,
    draining: bool,
) -> dict[str, Any]:
    """The page's `service`; `now` is of the router's clock."""
    own = [made for made in dispatches if visible(made, tenant)]
    running = [made for made in own if made.ended is None]
    shown = [one for one in workers.all if not one.names or any(map(tenant.may_use, one.names))]
    return {
        "version": __version__,
        "now": epoch(now),
        "tenant": tenant.name,
        "everything": tenant.admin,
        "refusal": "The router is draining." if draining else _refusal(workers, tenant, now),
        "models": [name for name in workers.models() if tenant.may_use(name)],
        "workers": [_worker(one, running, tenant, now) for one in shown[:WORKERS_LIMIT]],
        "workers_left_out": max(0, len(shown) - WORKERS_LIMIT),
        "waiting": _waiting(queue, now) if tenant.admin else None,
        "pace": asdict(pace(own, now)),
    }


def _refusal(workers: Workers, tenant: Tenant, now: float) -> str | None:
    refusal = workers.refusal(now)
    return refusal if refusal is None or tenant.admin else "No decode worker is ready."


def _waiting(queue: Queue, now: float) -> list[dict[str, Any]]:
    """By class, the most urgent first."""
    return [
        {
            "class": name,
            "count": queue.count(level),
            "oldest_s": None if (oldest := queue.oldest(level)) is None else round(now - oldest, 1),
        }
        for name, level in LEVELS.items()
    ]


def _worker(worker: Worker, running: list[Dispatch], tenant: Tenant, now: float) -> dict[str, Any]:
    load = worker.health.load if tenant.admin else None
    mine = [made for made in running if worker in (made.pair.decode, made.pair.prefill)]
    prefills = worker.listed == "prefill"
    return {
        "name": shown_name(worker.name, tenant),
        "role": worker.listed,
        "model": worker.model,
        "revision": worker.revision,
        "state": worker.state(now),
        "reason": worker.reason if tenant.admin else "",
        "computing": sum(made.first_byte is None and made.computer is worker for made in mine),
        "generating": 0 if prefills else sum(made.first_byte is not None for made in mine),
        "load": None
        if load is None
        else {
            "running": load.running,
            "queued": load.queued,
            "queued_tokens": load.queued_tokens,
            "used_blocks": max(0, load.total_blocks - load.free_blocks),
            "total_blocks": load.total_blocks,
            "block_size": load.block_size,
            "step_s": load.step_s,
        },
    }
