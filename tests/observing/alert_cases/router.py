"""Cases of alerts on routers."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.promql import Scope
from tests.observing.alert_series import (
    DECODE,
    ENOUGH_REQUESTS,
    SERVICE,
    Case,
    Series,
    constant,
    counter,
    stopped_counter,
)

LIFETIME = 100_000.0
"""Seconds. The cases are evaluated after 1800 of them."""


def certificates(router: float, worker: float) -> Series:
    """Return certificates that expire at these times."""
    return {
        **constant(metrics.ROUTER_CERTIFICATE_END, router, **SERVICE),
        **constant(metrics.ROUTER_CERTIFICATE_LIFE, LIFETIME, **SERVICE),
        **constant(metrics.WORKER_CERTIFICATE_END, worker, **DECODE),
        **constant(metrics.WORKER_CERTIFICATE_LIFE, LIFETIME, **DECODE),
    }


CASES = (
    Case(
        "BatonNoWorker",
        "page",
        {
            **ENOUGH_REQUESTS,
            **constant(metrics.ROUTER_WORKER_STATE, 0, **DECODE, state="ready"),
            **constant(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="down"),
        },
        {
            **constant(metrics.ROUTER_WORKER_STATE, 0, **DECODE, state="ready"),
            **constant(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="starting"),
        },
    ),
    Case(
        "BatonWorkersDown",
        "ticket",
        constant(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="down"),
        constant(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="draining"),
    ),
    Case(
        "BatonOverloaded",
        "info",
        {Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **SERVICE, class_="default"): "0+2x400"},
        {
            Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **SERVICE, class_="default"): "50-1x50",
            Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **SERVICE, class_="batch"): "0+2x400",
        },
    ),
    Case(
        "BatonOverloaded",
        "page",
        constant(metrics.ROUTER_QUEUE_AGE, 40, **SERVICE, class_="interactive"),
        constant(metrics.ROUTER_QUEUE_AGE, 400, **SERVICE, class_="batch"),
    ),
    Case(
        "BatonOverloaded",
        "ticket",
        {**ENOUGH_REQUESTS, **counter(metrics.ROUTER_REJECTS, 5, **SERVICE, reason="full")},
        {**ENOUGH_REQUESTS, **counter(metrics.ROUTER_REJECTS, 5, **SERVICE, reason="tokens")},
    ),
    Case(
        "BatonTenantsFileInvalid",
        "ticket",
        constant(metrics.ROUTER_TENANTS_STALE, 1, **SERVICE),
        constant(metrics.ROUTER_TENANTS_STALE, 0, **SERVICE),
    ),
    Case(
        "BatonRetrying",
        "info",
        {**ENOUGH_REQUESTS, **counter(metrics.ROUTER_RETRIES, 6, **SERVICE, cause="reset")},
        {**ENOUGH_REQUESTS, **counter(metrics.ROUTER_RETRIES, 1, **SERVICE, cause="reset")},
    ),
    Case(
        "BatonSchedulerUnreachable",
        "ticket",
        {**ENOUGH_REQUESTS, **counter(metrics.ROUTER_SCHEDULER_UNAVAILABLE, 6, **SERVICE, reason="away")},
        {
            **ENOUGH_REQUESTS,
            **stopped_counter(metrics.ROUTER_SCHEDULER_UNAVAILABLE, 6, 10, **SERVICE, reason="away"),
        },
    ),
    Case(
        "BatonRouterSlow",
        "ticket",
        {
            **counter(metrics.ROUTER_LOOP_LAG, 500, "_bucket", **SERVICE, le="0.25"),
            **counter(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **SERVICE, le="0.5"),
            **counter(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **SERVICE, le="+Inf"),
        },
        {
            **counter(metrics.ROUTER_LOOP_LAG, 599, "_bucket", **SERVICE, le="0.25"),
            **counter(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **SERVICE, le="0.5"),
            **counter(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **SERVICE, le="+Inf"),
        },
    ),
    Case(
        "BatonCacheStateStale",
        "info",
        constant(metrics.ROUTER_CACHE_IGNORED, 1, **SERVICE, worker="decode-0"),
        constant(metrics.ROUTER_CACHE_IGNORED, 0, **SERVICE, worker="decode-0"),
    ),
    Case(
        "BatonCacheStateStale",
        "info",
        constant(metrics.ROUTER_KV_DEGRADED, 1, **SERVICE, worker="decode-0"),
        constant(metrics.ROUTER_KV_DEGRADED, 0, **SERVICE, worker="decode-0"),
    ),
    Case(
        "BatonRouterBackgroundErrors",
        "ticket",
        counter(metrics.ROUTER_BACKGROUND_ERRORS, 1, **SERVICE, task="kv_events"),
        stopped_counter(metrics.ROUTER_BACKGROUND_ERRORS, 1, 10, **SERVICE, task="kv_events"),
    ),
    Case(
        "BatonCertificateExpiring",
        "ticket",
        certificates(90_000, 12_000),  # one worker still has the old certificate
        certificates(90_000, 90_000),
    ),
    Case("BatonCertificateExpiring", "page", certificates(4_000, 90_000), certificates(12_000, 90_000)),
)
