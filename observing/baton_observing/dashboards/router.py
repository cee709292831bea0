"""The dashboard "Router": scheduling decisions, worker states, cache accuracy, overhead and rejections."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.dashboards.panels import (
    BYTES,
    CLUSTER,
    NAMESPACE,
    PERCENT,
    REQUESTS_PER_SECOND,
    ROLLOUTS,
    SECONDS,
    SELECTED,
    SERVICE,
    Dashboard,
    Panel,
    Query,
    Row,
    count,
    per_second,
    quantiles,
)
from baton_observing.promql import or_zero, ratio, ratios

PROMPT_TOKENS = SELECTED.rate(metrics.ROUTER_PREFIX_TOKENS, kind="prompt")

SCHEDULING = Row(
    "Scheduling",
    (
        Panel(
            title="Prefix cache hit rate: expected and actual",
            description="Ratio of prompt tokens that the router expected in the worker's cache, and that "
            "it contained. Those expected from a tier are a part of the expected ones: the worker restores "
            "them. Those from a peer, the decode worker, are not: they raise the actual ones only. Expected "
            "above actual: blocks were evicted (see Cache accuracy). Actual above expected by more than "
            "those from a peer: KV events are missing.",
            unit=PERCENT,
            queries=(
                Query(
                    ratio(SELECTED.rate(metrics.ROUTER_PREFIX_TOKENS, kind="expected"), PROMPT_TOKENS),
                    "expected",
                ),
                Query(
                    ratio(SELECTED.rate(metrics.ROUTER_PREFIX_TOKENS, kind="cached"), PROMPT_TOKENS),
                    "actual",
                ),
                Query(
                    ratios(
                        or_zero(SELECTED.rate(metrics.ROUTER_RESTORED_TOKENS, "tier"), tier="any tier"),
                        PROMPT_TOKENS,
                    ),
                    "expected from {{tier}}",
                ),
            ),
        ),
        Panel(
            title="Predicted to actual time to first token",
            description="1 is an exact prediction. Far from 1 for long: scheduling decisions are poor. "
            "/debug/decisions shows the learned speed of each worker.",
            unit=count("predicted time divided by actual time"),
            queries=quantiles(SELECTED, metrics.ROUTER_PREDICTION, (0.1, 0.5, 0.9)),
        ),
        Panel(
            title="Prefill decisions",
            description="Where prompts are computed, and why. fallback: prompts planned for a prefill worker "
            "that the decode worker computed after all.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    SELECTED.rate(metrics.ROUTER_DECISIONS, "path", "reason") + " > 0",
                    "{{path}}: {{reason}}",
                ),
            ),
            kind="stacked",
        ),
    ),
)

WORKERS = Row(
    "Workers",
    (
        Panel(
            title="Workers by state",
            description="ejected: requests failed on the worker. full: it just refused a request. down: it "
            "does not answer.",
            unit=count("workers"),
            queries=(
                Query(
                    SELECTED.gauge(metrics.ROUTER_WORKER_STATE, "role", "state") + " > 0",
                    "{{role}} {{state}}",
                ),
            ),
            kind="stacked",
            runbook="BatonWorkersDown",
        ),
        Panel(
            title="Requests in flight by worker",
            description="From this service's routers. Workers of one role should be about equal, except "
            "where a prefix cache attracts requests.",
            unit=count("requests"),
            queries=(
                Query(
                    SELECTED.gauge(metrics.ROUTER_WORKER_IN_FLIGHT, "worker", "name"), "{{name}} {{worker}}"
                ),
            ),
            kind="stacked",
        ),
        Panel(
            title="Retries, resumed streams and cut responses",
            description="Requests retried on another worker, by cause; streams that another worker "
            "continued; and responses that ended early.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    or_zero(SELECTED.rate(metrics.ROUTER_RETRIES, "cause") + " > 0", cause="none"),
                    "retry: {{cause}}",
                ),
                Query(
                    or_zero(SELECTED.rate(metrics.ROUTER_RESUMES, "result") + " > 0", result="none"),
                    "resume: {{result}}",
                ),
                Query(
                    or_zero(SELECTED.rate(metrics.ROUTER_CUT, "cause") + " > 0", cause="none"),
                    "cut: {{cause}}",
                ),
            ),
            runbook="BatonRetrying",
        ),
    ),
)

CACHE_STATE = Row(
    "Cache state",
    (
        Panel(
            title="Cache accuracy",
            description="Cached prompt tokens divided by the expected ones, by worker. Below 50 % the router "
            "chooses the worker by load alone.",
            unit=PERCENT,
            queries=(
                Query(SELECTED.gauge(metrics.ROUTER_CACHE_ACCURACY, "worker", how="min"), "{{worker}}"),
            ),
            runbook="BatonCacheStateStale",
        ),
        Panel(
            title="KV events",
            description="KV events received from each worker. 0 from a busy worker: see the panels below.",
            unit=per_second("events"),
            queries=(Query(SELECTED.rate(metrics.ROUTER_KV_EVENTS, "worker"), "{{worker}}"),),
            runbook="BatonCacheStateStale",
        ),
        Panel(
            title="KV event lag",
            description="Age of a worker's last event batch at its arrival. It is accurate if the clocks of "
            "the nodes agree.",
            unit=SECONDS,
            queries=(Query(SELECTED.gauge(metrics.ROUTER_KV_LAG, "worker", how="max"), "{{worker}}"),),
            runbook="BatonCacheStateStale",
        ),
        Panel(
            title="KV event gaps",
            description="Missing event batches within the window. The router requests a replay of each.",
            unit=count("gaps"),
            queries=(Query(SELECTED.increase(metrics.ROUTER_KV_GAPS), "gaps"),),
            width=12,
            runbook="BatonCacheStateStale",
        ),
        Panel(
            title="Workers with stale cache state",
            description="ignored: the worker holds far fewer blocks than expected, so the router ignores its "
            "cache. no events: no KV events arrive, so cached blocks count half.",
            unit=count("workers"),
            width=12,
            queries=(
                Query(SELECTED.gauge(metrics.ROUTER_CACHE_IGNORED), "ignored"),
                Query(SELECTED.gauge(metrics.ROUTER_KV_DEGRADED), "no events"),
            ),
            runbook="BatonCacheStateStale",
        ),
        Panel(
            title="Prefix index size",
            description="Distinct prompt chunks that the router expects in any worker's cache: hot in the "
            "memory in which it computes, and in tiers from which it can restore them.",
            unit=count("chunks"),
            queries=(
                Query(SELECTED.gauge(metrics.ROUTER_INDEX_CHUNKS, how="max"), "hot"),
                Query(
                    or_zero(
                        SELECTED.gauge(metrics.ROUTER_INDEX_TIER_CHUNKS, "tier", how="max"), tier="any tier"
                    ),
                    "{{tier}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Prefix index memory",
            description="Estimated memory of the prefix index. It is bounded: the oldest chunks are dropped.",
            unit=BYTES,
            queries=(Query(SELECTED.gauge(metrics.ROUTER_INDEX_BYTES, how="max"), "bytes"),),
            width=12,
        ),
    ),
)

OVERHEAD = Row(
    "Overhead and rejections",
    (
        Panel(
            title="Router overhead",
            description="From a request's last byte to the choice of its worker, queueing included. Without "
            "a queue it is at most 1 ms.",
            unit=SECONDS,
            queries=quantiles(SELECTED, metrics.ROUTER_OVERHEAD),
        ),
        Panel(
            title="Event loop lag, p99",
            description="Delay of the router's event loop. Above 0.25 s, use more processes (--processes) or "
            "more routers.",
            unit=SECONDS,
            queries=(Query(SELECTED.quantile(0.99, metrics.ROUTER_LOOP_LAG), "p99"),),
            threshold=0.25,
            runbook="BatonRouterSlow",
        ),
        Panel(
            title="Scheduler or response store unreachable",
            description="Requests rejected with 503 because the scheduler process was away, late, or had too "
            "many requests waiting (full). Responses that Redis did not store (write) or return (read).",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    or_zero(
                        SELECTED.rate(metrics.ROUTER_SCHEDULER_UNAVAILABLE, "reason") + " > 0", reason="none"
                    ),
                    "{{reason}}",
                ),
                Query(
                    or_zero(
                        SELECTED.rate(metrics.ROUTER_RESPONSE_STORE_ERRORS, "operation") + " > 0",
                        operation="none",
                    ),
                    "Redis: {{operation}}",
                ),
            ),
            runbook="BatonSchedulerUnreachable",
        ),
        Panel(
            title="Age of the oldest queued request",
            description="By priority class. A class waits while higher classes have requests.",
            unit=SECONDS,
            queries=(Query(SELECTED.gauge(metrics.ROUTER_QUEUE_AGE, "class", how="max"), "{{class}}"),),
            runbook="BatonOverloaded",
        ),
        Panel(
            title="Rejected",
            description="Rejected requests. full, late, waited: overload. unready: no worker became ready in "
            "time. poison: the request has lost several workers. Others: a tenant's limit.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    or_zero(SELECTED.rate(metrics.ROUTER_REJECTS, "reason") + " > 0", reason="none"),
                    "{{reason}}",
                ),
            ),
            kind="stacked",
            runbook="BatonOverloaded",
        ),
        Panel(
            title="Background errors",
            description="Exceptions in the router's background loops, by loop. It should be 0; the log has "
            "each cause.",
            unit=per_second("errors"),
            queries=(
                Query(
                    or_zero(SELECTED.rate(metrics.ROUTER_BACKGROUND_ERRORS, "task") + " > 0", task="none"),
                    "{{task}}",
                ),
            ),
            kind="stacked",
            runbook="BatonRouterBackgroundErrors",
        ),
        Panel(
            title="Tenants",
            description="Tenants in the tenants file, and whether the current file is invalid. While it is, "
            "the previous version stays in effect.",
            unit=count("tenants"),
            queries=(
                Query(or_zero(SELECTED.gauge(metrics.ROUTER_TENANTS, how="max")), "tenants"),
                Query(or_zero(SELECTED.gauge(metrics.ROUTER_TENANTS_STALE, how="max")), "file invalid"),
            ),
            width=24,
            runbook="BatonTenantsFileInvalid",
        ),
    ),
)

DASHBOARD = Dashboard(
    name="router",
    title="Baton: Router",
    description="How the router schedules requests, what it knows of workers, and what it rejects.",
    variables=(CLUSTER, NAMESPACE, SERVICE),
    rows=(SCHEDULING, WORKERS, CACHE_STATE, OVERHEAD),
    annotations=(ROLLOUTS,),
)
