"""Two looks at a service, and the figures that they give: for each worker, and for the whole."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from baton_api import metrics
from baton_api.errors import SetupError
from baton_cli.top.series import Exposed, gained, percentiles

SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was said at one moment."""

    at_s: float
    """By a clock that does not go back."""
    workers: Sequence[Mapping[str, Any]]
    """As `GET /workers` shows them."""
    router: Exposed
    exposed: Mapping[str, Exposed]
    """By worker; those that could not be asked are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRates:
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
class ServiceRates:
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
    workers: tuple[WorkerRates, ...]


def figures(before: Snapshot, now: Snapshot, since_start: bool = False) -> ServiceRates:
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
    """From its own metrics, or from what the router knows of its load."""
    name, load = row["worker"], row["load"] or {}
    own, earlier = now.exposed.get(name, Exposed({})), before.exposed.get(name, Exposed({}))
    beginning = Exposed({}) if since_start else earlier
    total, free = load.get("total_blocks", 0), load.get("free_blocks", 0)
    usage = own.total(metrics.WORKER_KV_USAGE)
    waiting = [own.total(one) for one in (metrics.WORKER_QUEUED, metrics.WORKER_FETCHING)]
    known = [one for one in waiting if one is not None]
    return WorkerRates(
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


ANSWER_S = 3.0
AT_ONCE = 32


class ServiceReader:
    """Keeps its connections from look to look."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_keepalive_connections=AT_ONCE * 4)
        self._router = httpx.Client(headers=headers, trust_env=False, timeout=ANSWER_S, limits=limits)
        self._workers = httpx.Client(trust_env=False, timeout=ANSWER_S, limits=limits)
        """Without the key: metrics are for all, and a worker's address may be anybody's by now."""
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def look(self) -> Snapshot:
        """Raises SetupError if the router gives no answer, or none to make sense of."""
        rows = self._rows()
        at_s = time.monotonic()
        router = self._pool.submit(self._read, self._router, self.url)
        asked = {row["worker"]: self._pool.submit(self._read, self._workers, _url(row)) for row in rows}
        found = {name: answer.result() for name, answer in asked.items()}
        exposed = {name: one for name, one in found.items() if one is not None}
        return Snapshot(at_s, rows, router.result() or Exposed({}), exposed)

    def close(self) -> None:
        self._pool.shutdown()
        self._router.close()
        self._workers.close()

    def _rows(self) -> list[dict[str, Any]]:
        way_out = "Give the address of a Baton router with --url."
        try:
            answer = self._router.get(f"{self.url}/workers")
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            reason = str(error) or type(error).__name__
            raise SetupError(f"{self.url} does not answer: {reason}. {way_out}") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise SetupError(
                f"{self.url} wants an API key that is allowed to: give it with --api-key or BATON_API_KEY."
            )
        try:
            rows: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise SetupError(
                f"{self.url} lists no workers (status {answer.status_code}). {way_out}"
            ) from error
        return rows

    def _read(self, client: httpx.Client, url: str) -> Exposed | None:
        """None for who does not answer: a worker in a cluster, seen from outside."""
        try:
            return Exposed.parse(client.get(f"{url}/metrics").raise_for_status().text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None


def _url(row: dict[str, Any]) -> str:
    return f"http://{row['worker']}"
