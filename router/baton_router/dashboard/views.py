"""
The dashboard's data: the service with its workers, queue and rates, and each request as a timeline.

All data come from the scheduler's records (`placement.Placement`); the dashboard stores no data of its own.
An open dashboard receives a request when it is new, has its first token, or has ended; a slow client skips
states. It shows names and numbers only, never text. A tenant that is not an admin sees its own requests, and
neither addresses nor the load and queue of others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from baton_api import __version__
from baton_router.proxy.tracing import RequestTimes, request_phases
from baton_router.scheduling.placement import Placement, explain
from baton_router.scheduling.priority_queue import LEVELS
from baton_router.scheduling.queue import Queue
from baton_router.tenants.tenants import Tenant
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers

WORKERS_LIMIT = 64
"""Maximum workers that are shown; the data say how many are left out."""


def service_view(
    workers: Workers,
    queue: Queue,
    placements: Iterable[Placement],
    tenant: Tenant,
    now: float,
    epoch: Epoch,
    draining: bool,
) -> dict[str, Any]:
    """The page's `service`; `now` is of the router's clock."""
    own = [placement for placement in placements if visible(placement, tenant)]
    running = [placement for placement in own if placement.ended is None]
    shown = [one for one in workers.all if not one.names or any(map(tenant.may_use, one.names))]
    return {
        "version": __version__,
        "now": epoch(now),
        "tenant": tenant.name,
        "everything": tenant.admin,
        "refusal": "The router is draining." if draining else _refusal(workers, tenant, now),
        "models": [name for name in workers.models() if tenant.may_use(name)],
        "workers": [_worker(worker, running, tenant, now) for worker in shown[:WORKERS_LIMIT]],
        "workers_left_out": max(0, len(shown) - WORKERS_LIMIT),
        "waiting": _waiting(queue, now) if tenant.admin else None,
        "pace": asdict(service_rates(own, now)),
    }


def _refusal(workers: Workers, tenant: Tenant, now: float) -> str | None:
    reason = workers.unavailable_reason(now)
    return reason if reason is None or tenant.admin else "No decode worker is ready."


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


def _worker(worker: Worker, running: list[Placement], tenant: Tenant, now: float) -> dict[str, Any]:
    load = worker.health.load if tenant.admin else None
    own = [placement for placement in running if worker in (placement.pair.decode, placement.pair.prefill)]
    prefills = worker.listed == "prefill"
    return {
        "name": display_name(worker.name, tenant),
        "own_name": worker.own_name if tenant.admin else "",
        "role": worker.listed,
        "model": worker.model,
        "revision": worker.revision,
        "state": worker.state(now),
        "reason": worker.reason if tenant.admin else "",
        "warnings": list(worker.warnings) if tenant.admin else [],
        "computing": sum(
            placement.first_byte is None and placement.computing_worker is worker for placement in own
        ),
        "generating": 0 if prefills else sum(placement.first_byte is not None for placement in own),
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
class ServiceRates:
    """Rates of the last minute; None where there was no request."""

    requests: int
    """Requests that were placed."""
    first_token_s: float | None
    """Median time to first token of streams, from their arrival."""
    tokens_s: float
    """Of answers, over the last ten seconds. Answers that run count as their worker's step says."""
    prompt_tokens: int
    cached_tokens: int
    """Of those, how many were in a cache."""


def service_rates(placements: Iterable[Placement], now: float) -> ServiceRates:
    """`placements` in any order; those that are too old do not count."""
    requests = prompt = cached = 0
    firsts: list[float] = []
    tokens = 0.0
    for placement in placements:
        if (
            placement.ended is not None
            and placement.ended < now - WINDOW_S
            and placement.decided < now - WINDOW_S
        ):
            continue
        requests += placement.decided >= now - WINDOW_S
        tokens += _tokens(placement, now)
        if placement.first_byte is None or placement.first_byte < now - WINDOW_S:
            continue
        if placement.request.streams:
            firsts.append(placement.first_byte - placement.arrived)
        if placement.report is not None:
            prompt += placement.report.tokens
            cached += placement.report.cached or 0
    return ServiceRates(
        requests, median(firsts) if firsts else None, tokens / TOKENS_WINDOW_S, prompt, cached
    )


def _tokens(placement: Placement, now: float) -> float:
    """Tokens of the answer that came within the window."""
    if placement.first_byte is None or not placement.request.streams:
        return 0.0
    since = now - TOKENS_WINDOW_S
    end = now if placement.ended is None else placement.ended
    inside = end - max(since, placement.first_byte)
    if inside < 0 or end < since:
        return 0.0
    if placement.ended is None:
        load = placement.pair.decode.health.load
        return inside / load.step_s if load is not None and load.step_s else 0.0
    whole = placement.ended - placement.first_byte
    return (placement.answered or 0) * (inside / whole if whole > 0 else 1.0)


_SECRET = secrets.token_bytes(16)
"""Random per process, so that trying all addresses of a network does not reveal the one behind a name."""

Epoch = Callable[[float], float]
"""Milliseconds since 1970 of a time of the router's clock."""


def visible(placement: Placement, tenant: Tenant) -> bool:
    """Whether the tenant may see the request."""
    return tenant.admin or placement.request.tenant == tenant.id


def display_name(worker: str, tenant: Tenant) -> str:
    """Return a worker's name on the dashboard: its address for admins, else an opaque unique name."""
    if tenant.admin:
        return worker
    return f"worker-{hashlib.blake2s(worker.encode(), key=_SECRET, digest_size=4).hexdigest()}"


def times_of(placement: Placement) -> RequestTimes:
    return RequestTimes(
        placement.arrived, placement.decided, placement.first_byte, placement.ended, placement.request.streams
    )


def outcome(placement: Placement) -> str:
    """
    Return the outcome of a placement.

    - `running`: it has not ended.
    - `whole`: the answer is complete.
    - `lost`: no byte of this worker's answer was forwarded; another worker may have served the request.
    - `refused`: the worker answered without computing the prompt.
    - `cut`: the answer ended early, usually because the client left.
    """
    if placement.ended is None:
        return "running"
    if placement.first_byte is None:
        return "lost"
    if placement.complete:
        return "whole"
    return "refused" if placement.report is None else "cut"


def request_view(placement: Placement, tenant: Tenant, epoch: Epoch) -> dict[str, Any]:
    """
    Return one record of the dashboard's `requests`; times are milliseconds since 1970.

    Only admins get the prices of the other options, because they reveal how busy other tenants are.
    """
    report = placement.report
    decision = explain(placement)
    prefill = placement.pair.prefill
    size = placement.decode_state.block_size
    moved = report.tokens - report.held if report is not None and report.remote else 0
    return {
        "number": placement.number if tenant.admin else round(1000 * epoch(placement.decided)),
        "tenant": placement.request.tenant.partition(":")[2],
        "class": placement.request.priority_class,
        "model": placement.pair.decode.model,
        "decode": display_name(placement.pair.decode.name, tenant),
        "prefill": display_name(prefill.name, tenant) if prefill else None,
        "outcome": outcome(placement),
        "streams": placement.request.streams,
        "phases": [
            {
                "name": phase.name,
                "start": epoch(phase.start),
                "end": None if phase.end is None else epoch(phase.end),
            }
            for phase in request_phases(times_of(placement), report)
        ],
        "prompt_tokens": report.tokens if report else None,
        "cached_tokens": report.cached if report else None,
        "held_tokens": report.held if report else None,
        "remote": report.remote if report else None,
        "fallback": report.fallback if report else "",
        "blocks_moved": -(-moved // size) if size else 0,
        "answer_tokens": placement.answered,
        "decision": {
            "estimated_tokens": placement.tokens,
            "expected_cached": placement.option.cached,
            "expected_restored": dict(placement.restored),
            "price": decision["price"],
            "price_unit": decision["price_unit"],
            "predicted_first_token_s": decision["predicted_first_token_s"],
            "first_token_s": decision["first_byte_s"] if placement.request.streams else None,
            "others": decision["others"] if tenant.admin else [],
        },
    }


REQUESTS_LIMIT = 40
"""Maximum requests in one event, the newest; the service's state has the number of all."""

FOLLOWED_LIMIT = 400
"""Maximum running requests whose changes one open dashboard receives."""


class RequestWatch:
    """The requests that one open dashboard has received."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._last = 0
        """The number of the newest request that was sent."""
        self._running: dict[int, Placement] = {}
        """Requests sent that have not ended; the oldest first."""
        self._first_bytes: dict[int, float | None] = {}
        """Their times of the first byte, as last sent."""

    def news(self, placements: deque[Placement], epoch: Epoch) -> list[dict[str, Any]]:
        """The records of what has changed since the last call, the oldest first."""
        changed = [placement for placement in self._running.values() if self._has_changed(placement)]
        changed += self._new(placements)
        for placement in changed:
            self._follow(placement)
        return [request_view(placement, self.tenant, epoch) for placement in changed[-REQUESTS_LIMIT:]]

    def _has_changed(self, placement: Placement) -> bool:
        return placement.ended is not None or placement.first_byte != self._first_bytes[placement.number]

    def _new(self, placements: deque[Placement]) -> list[Placement]:
        found: list[Placement] = []
        newest = self._last
        for placement in reversed(placements):
            if placement.number <= self._last or len(found) == REQUESTS_LIMIT:
                break
            newest = max(newest, placement.number)
            if visible(placement, self.tenant):
                found.append(placement)
        self._last = newest
        return found[::-1]

    def _follow(self, placement: Placement) -> None:
        if placement.ended is not None:
            self._running.pop(placement.number, None)
            self._first_bytes.pop(placement.number, None)
            return
        self._running[placement.number] = placement
        self._first_bytes[placement.number] = placement.first_byte
        if len(self._running) > FOLLOWED_LIMIT:
            oldest = next(iter(self._running))
            del self._running[oldest], self._first_bytes[oldest]
