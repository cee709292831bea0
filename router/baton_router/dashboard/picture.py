"""
The service as the dashboard shows it: workers by role with their load, the queue, and the current pace.

A tenant that is not an admin sees the workers of its models and their health, but no load, no queue, and the
pace of its own requests only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from baton_api import __version__
from baton_router.dashboard.timelines import Epoch, shown_name, visible
from baton_router.scheduling.dispatcher import Dispatch
from baton_router.scheduling.queue import Queue
from baton_router.scheduling.waiting_room import LEVELS
from baton_router.tenants.tenants import Tenant
from baton_router.workers.worker import Worker, Workers

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


WINDOW_S = 60.0
"""Requests that began to be answered longer ago do not count."""

TOKENS_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Of the last minute; None where nothing was seen of it."""

    requests: int
    """That were given to workers."""
    first_token_s: float | None
    """Median, of streams, from their arrival."""
    tokens_s: float
    """Of answers, over the last ten seconds. Answers that run count as their worker's step says."""
    prompt_tokens: int
    cached_tokens: int
    """Of those, how many were in a cache."""


def pace(dispatches: Iterable[Dispatch], now: float) -> Pace:
    """`dispatches` in any order; those that are too old do not count."""
    requests = prompt = cached = 0
    firsts: list[float] = []
    tokens = 0.0
    for made in dispatches:
        if made.ended is not None and made.ended < now - WINDOW_S and made.decided < now - WINDOW_S:
            continue
        requests += made.decided >= now - WINDOW_S
        tokens += _tokens(made, now)
        if made.first_byte is None or made.first_byte < now - WINDOW_S:
            continue
        if made.streams:
            firsts.append(made.first_byte - made.arrived)
        if made.report is not None:
            prompt += made.report.tokens
            cached += made.report.cached
    return Pace(requests, median(firsts) if firsts else None, tokens / TOKENS_WINDOW_S, prompt, cached)


def _tokens(made: Dispatch, now: float) -> float:
    """How many tokens of the answer came in the window."""
    if made.first_byte is None or not made.streams:
        return 0.0
    since = now - TOKENS_WINDOW_S
    end = now if made.ended is None else made.ended
    inside = end - max(since, made.first_byte)
    if inside < 0 or end < since:
        return 0.0
    if made.ended is None:
        load = made.pair.decode.health.load
        return inside / load.step_s if load is not None and load.step_s else 0.0
    whole = made.ended - made.first_byte
    return (made.answered or 0) * (inside / whole if whole > 0 else 1.0)
