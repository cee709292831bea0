"""Between clients and workers."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.promql import Scope
from tests.observing.told_series import DECODE, ENOUGH, OF, Case, level, once, rise

CASES = (
    Case(
        "BatonNoWorker",
        "page",
        {
            **ENOUGH,
            **level(metrics.ROUTER_WORKER_STATE, 0, **DECODE, state="ready"),
            **level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="down"),
        },
        {
            **level(metrics.ROUTER_WORKER_STATE, 0, **DECODE, state="ready"),
            **level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="starting"),
        },
    ),
    Case(
        "BatonWorkersMissing",
        "ticket",
        level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="down"),
        level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="draining"),
    ),
    Case(
        "BatonQueueGrowing",
        "ticket",
        {Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **OF, class_="default"): "0+2x400"},
        {
            Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **OF, class_="default"): "50-1x50",
            Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **OF, class_="batch"): "0+2x400",
        },
    ),
    Case(
        "BatonQueueOld",
        "page",
        level(metrics.ROUTER_QUEUE_AGE, 40, **OF, class_="interactive"),
        level(metrics.ROUTER_QUEUE_AGE, 400, **OF, class_="batch"),
    ),
    Case(
        "BatonSendingAway",
        "ticket",
        {**ENOUGH, **rise(metrics.ROUTER_REJECTS, 5, **OF, reason="full")},
        {**ENOUGH, **rise(metrics.ROUTER_REJECTS, 5, **OF, reason="tokens")},
    ),
    Case(
        "BatonTenantsStale",
        "ticket",
        level(metrics.ROUTER_TENANTS_STALE, 1, **OF),
        level(metrics.ROUTER_TENANTS_STALE, 0, **OF),
    ),
    Case(
        "BatonRetrying",
        "ticket",
        {**ENOUGH, **rise(metrics.ROUTER_RETRIES, 6, **OF, cause="reset")},
        {**ENOUGH, **rise(metrics.ROUTER_RETRIES, 1, **OF, cause="reset")},
    ),
    Case(
        "BatonSchedulerAway",
        "ticket",
        {**ENOUGH, **rise(metrics.ROUTER_UNASKED, 6, **OF, reason="away")},
        {**ENOUGH, **once(metrics.ROUTER_UNASKED, 6, 10, **OF, reason="away")},
    ),
    Case(
        "BatonRouterSlow",
        "ticket",
        {
            **rise(metrics.ROUTER_LOOP_LAG, 500, "_bucket", **OF, le="0.25"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="0.5"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="+Inf"),
        },
        {
            **rise(metrics.ROUTER_LOOP_LAG, 599, "_bucket", **OF, le="0.25"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="0.5"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="+Inf"),
        },
    ),
    Case(
        "BatonCacheIgnored",
        "ticket",
        level(metrics.ROUTER_CACHE_IGNORED, 1, **OF, worker="decode-0"),
        level(metrics.ROUTER_CACHE_IGNORED, 0, **OF, worker="decode-0"),
    ),
    Case(
        "BatonKvEventsMissing",
        "ticket",
        level(metrics.ROUTER_KV_DEGRADED, 1, **OF, worker="decode-0"),
        level(metrics.ROUTER_KV_DEGRADED, 0, **OF, worker="decode-0"),
    ),
)
