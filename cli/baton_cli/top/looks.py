"""Two looks at a service, and the figures that they give: for each worker, and for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_api import metrics
from baton_cli.top.series import Exposed, gained, percentiles

SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Look:
    """What was said at one moment."""

    at_s: float
    """By a clock that does not go back."""
    workers: Sequence[Mapping[str, Any]]
    """As `GET /workers` shows them."""
    router: Exposed
    exposed: Mapping[str, Exposed]
    """By worker; those that could not be asked are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """None is what is not known."""

    worker: str
    role: str
    revision: str
    state: str
    reason: str
    running: int | None
    waiting: int | None
    """In the worker's own queue, or for a prefill worker."""
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    kv_usage: float | None
    """Share of the blocks that a new request cannot have."""
    cache_hit: float | None
    """Share of the tokens that were looked for in its prefix cache and were there."""
    transfer_bytes_per_s: float | None
    """Pulled from prefill workers."""
    ttft_s: tuple[float, ...] | None
    """Percentiles 50, 95 and 99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """As the router sees it."""

    models: tuple[str, ...]
    in_flight: int | None
    waiting: int | None
    """In the router."""
    requests_per_s: float | None
    failed_per_s: float | None
    """Of them, those answered with 500 or more."""
    generated_tokens_per_s: float | None
    cache_hit: float | None
    ttft_s: tuple[float, ...] | None
    itl_s: tuple[float, ...] | None
    seconds: float
    """Over which rates and percentiles were taken."""
    workers: tuple[WorkerFigures, ...]


def figures(before: Look, now: Look, since_start: bool = False) -> ServiceFigures:
    """`since_start`: percentiles and shares of all that the processes have seen."""
    seconds = max(1e-9, now.at_s - before.at_s)
    earlier = Exposed({}) if since_start else before.router
    codes = {labels["code"] for labels, _ in now.router.samples.get(metrics.ROUTER_REQUESTS.name, ())}
    failed = [
        gained(before.router, now.router, metrics.ROUTER_REQUESTS, code=code) or 0.0
        for code in codes
        if code >= "500"
    ]
    workers = tuple(_worker(one, before, now, seconds, since_start) for one in now.workers)
    generated = [one.generated_tokens_per_s for one in workers if one.generated_tokens_per_s is not None]
    return ServiceFigures(
        models=tuple(sorted({one["model"] for one in now.workers if one["model"]})),
        in_flight=_whole(now.router.total(metrics.ROUTER_IN_FLIGHT)),
        waiting=_whole(now.router.total(metrics.ROUTER_QUEUE_DEPTH)),
        requests_per_s=_rate(gained(before.router, now.router, metrics.ROUTER_REQUESTS), seconds),
        failed_per_s=sum(failed) / seconds if codes else None,
        generated_tokens_per_s=sum(generated) if generated else None,
        cache_hit=_share(
            gained(earlier, now.router, metrics.ROUTER_PREFIX_TOKENS, kind="cached"),
            gained(earlier, now.router, metrics.ROUTER_PREFIX_TOKENS, kind="prompt"),
        ),
        ttft_s=percentiles(earlier, now.router, metrics.ROUTER_FIRST_BYTE, SHARES),
        itl_s=percentiles(earlier, now.router, metrics.ROUTER_OUTPUT_TOKEN, SHARES),
        seconds=seconds,
        workers=tuple(sorted(workers, key=lambda one: (one.role != "prefill", one.role, one.worker))),
    )


def _worker(
    row: Mapping[str, Any], before: Look, now: Look, seconds: float, since_start: bool
) -> WorkerFigures:
    """From its own metrics, or from what the router knows of its load."""
    name, load = row["worker"], row["load"] or {}
    own, earlier = now.exposed.get(name, Exposed({})), before.exposed.get(name, Exposed({}))
    beginning = Exposed({}) if since_start else earlier
    total, free = load.get("total_blocks", 0), load.get("free_blocks", 0)
    usage = own.total(metrics.WORKER_KV_USAGE)
    waiting = [own.total(one) for one in (metrics.WORKER_QUEUED, metrics.WORKER_FETCHING)]
    known = [one for one in waiting if one is not None]
    return WorkerFigures(
        worker=name,
        role=row["role"],
        revision=row["revision"] or "",
        state=row["state"],
        reason=row["reason"] or "",
        running=_whole(_either(own.total(metrics.WORKER_RUNNING), load.get("running"))),
        waiting=_whole(sum(known) if known else load.get("queued")),
        prompt_tokens_per_s=own.total(metrics.WORKER_PROMPT_RATE),
        generated_tokens_per_s=own.total(metrics.WORKER_GENERATION_RATE),
        kv_usage=_either(usage, 1 - free / total if total else None),
        cache_hit=_share(
            gained(beginning, own, metrics.WORKER_CACHE_HITS),
            gained(beginning, own, metrics.WORKER_CACHE_QUERIES),
        ),
        transfer_bytes_per_s=_rate(gained(earlier, own, metrics.WORKER_TRANSFER_BYTES), seconds),
        ttft_s=percentiles(beginning, own, metrics.WORKER_FIRST_TOKEN, SHARES),
    )


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _rate(count: float | None, seconds: float) -> float | None:
    return None if count is None else count / seconds


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
