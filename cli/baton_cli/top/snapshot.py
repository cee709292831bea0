"""Snapshots of the metrics of a service, and the rates between two of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from baton_api import metrics
from baton_api.engines import EngineKind
from baton_api.errors import SetupError
from baton_cli.top.engine_metrics import in_contract
from baton_cli.top.series import Exposed, gained, percentiles

SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of a service at one moment."""

    at_s: float
    """Monotonic time in seconds."""
    workers: Sequence[Mapping[str, Any]]
    """The rows of `GET /workers`."""
    router: Exposed
    exposed: Mapping[str, Exposed]
    """Metrics by worker, without those that did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRates:
    """The metrics of one worker. None means unknown."""

    worker: str
    role: str
    revision: str
    state: str
    reason: str
    warnings: tuple[str, ...] = ()
    """Why it serves with less than it was listed for."""
    running: int | None
    waiting: int | None
    """Queued in the worker, or waiting for a prefill worker."""
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    kv_usage: float | None
    """Ratio of KV blocks that a new request cannot use."""
    cache_hit: float | None
    """Ratio of prompt tokens found in the prefix cache."""
    transfer_bytes_per_s: float | None
    """Pulled from prefill workers."""
    ttft_s: tuple[float, ...] | None
    """Percentiles 50, 95 and 99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRates:
    """The metrics of a service."""

    models: tuple[str, ...]
    in_flight: int | None
    waiting: int | None
    """Queued in the router."""
    requests_per_s: float | None
    failed_per_s: float | None
    """Requests that ended with a 5xx status."""
    generated_tokens_per_s: float | None
    cache_hit: float | None
    ttft_s: tuple[float, ...] | None
    itl_s: tuple[float, ...] | None
    seconds: float
    """Length of the window."""
    workers: tuple[WorkerRates, ...]


def rates(before: Snapshot, now: Snapshot, since_start: bool = False) -> ServiceRates:
    """Compute rates. With `since_start`, percentiles and ratios cover the lifetime of the processes."""
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
    return ServiceRates(
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
    row: Mapping[str, Any], before: Snapshot, now: Snapshot, seconds: float, since_start: bool
) -> WorkerRates:
    """Compute the rates of a worker by its own metrics, or by its load as the router knows it."""
    name, load = row["worker"], reported_load(row) or {}
    own, earlier = now.exposed.get(name, Exposed({})), before.exposed.get(name, Exposed({}))
    beginning = Exposed({}) if since_start else earlier
    total, free = load.get("total_blocks", 0), load.get("free_blocks", 0)
    usage = own.total(metrics.WORKER_KV_USAGE)
    waiting = [own.total(one) for one in (metrics.WORKER_QUEUED, metrics.WORKER_FETCHING)]
    queued = [one for one in waiting if one is not None]
    return WorkerRates(
        worker=name,
        role=row["role"],
        revision=row["revision"] or "",
        state=row["state"],
        reason=row["reason"] or "",
        warnings=tuple(row.get("warnings", ())),
        running=_whole(_either(own.total(metrics.WORKER_RUNNING), load.get("running"))),
        waiting=_whole(sum(queued) if queued else load.get("queued")),
        prompt_tokens_per_s=_either(
            own.total(metrics.WORKER_PROMPT_RATE),
            _rate(gained(earlier, own, metrics.WORKER_PROMPT_TOKENS, source="computed"), seconds),
        ),
        generated_tokens_per_s=_either(
            own.total(metrics.WORKER_GENERATION_RATE),
            _rate(gained(earlier, own, metrics.WORKER_GENERATION_TOKENS), seconds),
        ),
        kv_usage=_either(usage, 1 - free / total if total else None),
        cache_hit=_share(
            gained(beginning, own, metrics.WORKER_CACHE_HITS),
            gained(beginning, own, metrics.WORKER_CACHE_QUERIES),
        ),
        transfer_bytes_per_s=_rate(gained(earlier, own, metrics.WORKER_TRANSFER_BYTES), seconds),
        ttft_s=percentiles(beginning, own, metrics.WORKER_FIRST_TOKEN, SHARES),
    )


def reported_load(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the load in a row of `GET /workers`. None if it is unknown: then its numbers mean nothing."""
    load: Mapping[str, Any] | None = row["load"]
    if load and load.get("engine", EngineKind.BATON) != EngineKind.BATON and not load.get("total_blocks"):
        return None  # the worker exposes no metrics
    return load


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _rate(count: float | None, seconds: float) -> float | None:
    return None if count is None else count / seconds


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


ANSWER_S = 3.0
AT_ONCE = 32


class ServiceReader:
    """Reads snapshots of a service. Connections are reused."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_keepalive_connections=AT_ONCE * 4)
        self._router = httpx.Client(headers=headers, trust_env=False, timeout=ANSWER_S, limits=limits)
        self._workers = httpx.Client(trust_env=False, timeout=ANSWER_S, limits=limits)
        """Sends no key: metrics are public, and a worker's address may belong to another process by now."""
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def read(self) -> Snapshot:
        """Read a snapshot. Raises SetupError if the router does not answer, or is not a Baton router."""
        rows = self._rows()
        at_s = time.monotonic()
        router = self._pool.submit(self._read, self._router, self.url)
        pending = {row["worker"]: self._pool.submit(self._read, self._workers, _url(row)) for row in rows}
        results = {name: future.result() for name, future in pending.items()}
        exposed = {name: one for name, one in results.items() if one is not None}
        return Snapshot(at_s, rows, router.result() or Exposed({}), exposed)

    def close(self) -> None:
        self._pool.shutdown()
        self._router.close()
        self._workers.close()

    def _rows(self) -> list[dict[str, Any]]:
        solution = "Set the address of a Baton router with --url."
        try:
            answer = self._router.get(f"{self.url}/workers")
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            reason = str(error) or type(error).__name__
            raise SetupError(f"{self.url} does not answer: {reason}. {solution}") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise SetupError(
                f"{self.url} requires an API key with permission: set --api-key or BATON_API_KEY."
            )
        try:
            rows: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise SetupError(
                f"{self.url} returned no list of workers (status {answer.status_code}). {solution}"
            ) from error
        return rows

    def _read(self, client: httpx.Client, url: str) -> Exposed | None:
        """Return metrics, or None without an answer, such as from a worker in a cluster."""
        try:
            return in_contract(Exposed.parse(client.get(f"{url}/metrics").raise_for_status().text))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None


def _url(row: dict[str, Any]) -> str:
    return f"http://{row['worker']}"
