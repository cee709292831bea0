"""
One request as the page shows it: its phases, who did what, what was cached, and why it went where it went.

Read off the scheduler's own record of the request (`dispatcher.Dispatch`), so that nothing is kept for the
page. Names and figures only, never text. A tenant that is no admin reads no addresses, and no numbers that
count the requests of others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from baton_router.dispatcher import Dispatch, explained
from baton_router.phases import Seen, phases
from baton_router.tenants import Tenant

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
