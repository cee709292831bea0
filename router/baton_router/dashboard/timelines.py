"""
One request as the dashboard shows it: phases, workers, cached tokens, and the reason for the choice.

All of it is read off the scheduler's record of the request (`dispatcher.Dispatch`): nothing is kept for the
dashboard. An open page gets a request when it is new, has its first token, or has ended; a slow page skips
states. Names and numbers only, never text. A tenant that is not an admin sees no addresses, and no numbers
that count requests of others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

from baton_router.metrics.tracing import Seen, phases
from baton_router.scheduling.dispatcher import Dispatch, explained
from baton_router.tenants.tenants import Tenant

_SECRET = secrets.token_bytes(16)
"""Of this process: nobody finds the address behind a name by trying all of a network's."""

Epoch = Callable[[float], float]
"""Milliseconds since 1970 of a time of the router's clock."""


def visible(made: Dispatch, tenant: Tenant) -> bool:
    """Whether this tenant may see that there was such a request."""
    return tenant.admin or made.tenant == tenant.id


def shown_name(worker: str, tenant: Tenant) -> str:
    """What the page calls a worker: its address for admins, else a name that only tells workers apart."""
    if tenant.admin:
        return worker
    return f"worker-{hashlib.blake2s(worker.encode(), key=_SECRET, digest_size=4).hexdigest()}"


def seen(made: Dispatch) -> Seen:
    return Seen(made.arrived, made.decided, made.first_byte, made.ended, made.streams)


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


def timeline(made: Dispatch, tenant: Tenant, epoch: Epoch) -> dict[str, Any]:
    """
    One record of the page's `requests`; times are milliseconds since 1970.

    What other ways would have cost tells how busy others are, so it is for admins.
    """
    report = made.report
    decision = explained(made)
    prefill = made.pair.prefill
    size = made.generating.block_size
    moved = report.tokens - report.held if report is not None and report.remote else 0
    return {
        "number": made.number if tenant.admin else round(1000 * epoch(made.decided)),
        "tenant": made.tenant.partition(":")[2],
        "class": made.kind,
        "model": made.pair.decode.model,
        "decode": shown_name(made.pair.decode.name, tenant),
        "prefill": shown_name(prefill.name, tenant) if prefill else None,
        "outcome": outcome(made),
        "streams": made.streams,
        "phases": [
            {"name": one.name, "start": epoch(one.start), "end": None if one.end is None else epoch(one.end)}
            for one in phases(seen(made), report)
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


class Watch:
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
        return [timeline(made, self.tenant, epoch) for made in changed[-REQUESTS_LIMIT:]]

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
