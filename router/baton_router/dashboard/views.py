"""
What the dashboard shows: the service with its workers, queue and rates, and each request as a timeline.

Everything is read from the scheduler's records (`dispatcher.Dispatch`); nothing is stored for the dashboard.
An open dashboard gets a request when it is new, has its first token, or has ended; a slow client skips
states. Names and numbers only, never text. A tenant that is not an admin sees its own requests, and neither
addresses nor the load and queue of others.
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
from baton_router.metrics.tracing import RequestTimes, request_phases
from baton_router.scheduling.dispatcher import Dispatch, explain
from baton_router.scheduling.queue import Queue
from baton_router.scheduling.waiting_room import LEVELS
from baton_router.tenants.tenants import Tenant
from baton_router.workers.worker import Worker, Workers

WORKERS_LIMIT = 64
"""Workers of a picture; it says how many are left out."""


def service_view(
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
        "pace": asdict(service_rates(own, now)),
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
        "name": display_name(worker.name, tenant),
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
class ServiceRates:
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


def service_rates(dispatches: Iterable[Dispatch], now: float) -> ServiceRates:
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
    return ServiceRates(
        requests, median(firsts) if firsts else None, tokens / TOKENS_WINDOW_S, prompt, cached
    )


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


_SECRET = secrets.token_bytes(16)
"""Of this process: nobody finds the address behind a name by trying all of a network's."""

Epoch = Callable[[float], float]
"""Milliseconds since 1970 of a time of the router's clock."""


def visible(made: Dispatch, tenant: Tenant) -> bool:
    """Whether this tenant may see that there was such a request."""
    return tenant.admin or made.tenant == tenant.id


def display_name(worker: str, tenant: Tenant) -> str:
    """What the page calls a worker: its address for admins, else a name that only tells workers apart."""
    if tenant.admin:
        return worker
    return f"worker-{hashlib.blake2s(worker.encode(), key=_SECRET, digest_size=4).hexdigest()}"


def times_of(made: Dispatch) -> RequestTimes:
    return RequestTimes(made.arrived, made.decided, made.first_byte, made.ended, made.streams)


def outcome(made: Dispatch) -> str:
    """
    `running`; `whole`; `lost` if its worker gave no answer that was passed on, so that maybe another one did;
    `refused` if the worker would not compute its prompt, and said so; `cut` if the answer ended early, mostly
    because its client left.
    """
    if made.ended is None:
        return "running"
    if made.first_byte is None:
        return "lost"
    if made.complete:
        return "whole"
    return "refused" if made.report is None else "cut"


def request_view(made: Dispatch, tenant: Tenant, epoch: Epoch) -> dict[str, Any]:
    """
    One record of the page's `requests`; times are milliseconds since 1970.

    What other ways would have cost tells how busy others are, so it is for admins.
    """
    report = made.report
    decision = explain(made)
    prefill = made.pair.prefill
    size = made.generating.block_size
    moved = report.tokens - report.held if report is not None and report.remote else 0
    return {
        "number": made.number if tenant.admin else round(1000 * epoch(made.decided)),
        "tenant": made.tenant.partition(":")[2],
        "class": made.kind,
        "model": made.pair.decode.model,
        "decode": display_name(made.pair.decode.name, tenant),
        "prefill": display_name(prefill.name, tenant) if prefill else None,
        "outcome": outcome(made),
        "streams": made.streams,
        "phases": [
            {"name": one.name, "start": epoch(one.start), "end": None if one.end is None else epoch(one.end)}
            for one in request_phases(times_of(made), report)
        ],
        "prompt_tokens": report.tokens if report else None,
        "cached_tokens": report.cached if report else None,
        "held_tokens": report.held if report else None,
        "remote": report.remote if report else None,
        "fallback": report.fallback if report else "",
        "blocks_moved": -(-moved // size) if size else 0,
        "answer_tokens": made.answered,
        "decision": {
            "estimated_tokens": made.tokens,
            "expected_cached": made.way.cached,
            "price_s": decision["price_s"],
            "predicted_first_token_s": decision["predicted_first_token_s"],
            "first_token_s": decision["first_byte_s"] if made.streams else None,
            "others": decision["others"] if tenant.admin else [],
        },
    }


REQUESTS_LIMIT = 40
"""Requests in one event, the newest; how many there were besides, the service's picture says."""

FOLLOWED_LIMIT = 400
"""Requests that run, of which a page hears when they go on."""


class RequestWatch:
    """One page's."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._last = 0
        """The number of the newest request that was told."""
        self._running: dict[int, Dispatch] = {}
        """Told, and to be told again; the oldest first."""
        self._told: dict[int, float | None] = {}
        """When those began to be answered, as far as was told."""

    def news(self, dispatches: deque[Dispatch], epoch: Epoch) -> list[dict[str, Any]]:
        """The records of what has changed since the last call, the oldest first."""
        changed = [made for made in self._running.values() if self._has_changed(made)]
        changed += self._new(dispatches)
        for made in changed:
            self._follow(made)
        return [request_view(made, self.tenant, epoch) for made in changed[-REQUESTS_LIMIT:]]

    def _has_changed(self, made: Dispatch) -> bool:
        return made.ended is not None or made.first_byte != self._told[made.number]

    def _new(self, dispatches: deque[Dispatch]) -> list[Dispatch]:
        found: list[Dispatch] = []
        newest = self._last
        for made in reversed(dispatches):
            if made.number <= self._last or len(found) == REQUESTS_LIMIT:
                break
            newest = max(newest, made.number)
            if visible(made, self.tenant):
                found.append(made)
        self._last = newest
        return found[::-1]

    def _follow(self, made: Dispatch) -> None:
        if made.ended is not None:
            self._running.pop(made.number, None)
            self._told.pop(made.number, None)
            return
        self._running[made.number] = made
        self._told[made.number] = made.first_byte
        if len(self._running) > FOLLOWED_LIMIT:
            oldest = next(iter(self._running))
            del self._running[oldest], self._told[oldest]
