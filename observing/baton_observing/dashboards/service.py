"""The dashboard "Service": objectives, latency, traffic and errors of a service."""

from __future__ import annotations

from baton_api import metrics
from baton_observing import objectives
from baton_observing.dashboards.panels import (
    CLUSTER,
    MODEL,
    NAMESPACE,
    PERCENT,
    REQUESTS_PER_SECOND,
    ROLLOUTS,
    SECONDS,
    SELECTED,
    SERVICE,
    TENANT,
    Dashboard,
    Panel,
    Query,
    Row,
    Unit,
    count,
    per_second,
    quantiles,
)
from baton_observing.promql import NOT_BACKGROUND, or_zero, ratio, ratios

MATCHERS = "{" + ", ".join(SELECTED.matchers) + "}"
REQUESTS = SELECTED.rate(metrics.ROUTER_REQUESTS, model="=~$model")
LATENCY_BUDGET = f"on (namespace, service) {objectives.LATENCY_BUDGET.name}"


def _burn_rate(
    title: str, objective: str, indicator: objectives.Indicator, budget: str, runbook: str
) -> Panel:
    return Panel(
        title=title,
        description=f"{objective} At 1 the error budget lasts exactly 30 days. Above 14.4 for a few minutes "
        "the alert pages.",
        unit=count("times the sustainable rate"),
        queries=tuple(
            Query(or_zero(f"max({indicator.over(window)}{MATCHERS} / {budget})"), f"over {window}")
            for window in ("5m", "1h")
        ),
        threshold=14.4,
        runbook=runbook,
    )


def _latency(
    title: str, description: str, metric: metrics.Metric, runbook: str = "", threshold: float | None = None
) -> Panel:
    return Panel(
        title=title,
        description=description,
        unit=SECONDS,
        queries=quantiles(SELECTED, metric, class_=NOT_BACKGROUND),
        threshold=threshold,
        runbook=runbook,
    )


def _stat(title: str, description: str, unit: Unit, expression: str, threshold: float | None = None) -> Panel:
    return Panel(
        title=title,
        description=description,
        unit=unit,
        queries=(Query(expression),),
        kind="stat",
        width=4,
        threshold=threshold,
    )


NOW = Row(
    "Current status",
    (
        _stat(
            "Request rate",
            "Completed inference requests of all classes.",
            REQUESTS_PER_SECOND,
            or_zero(REQUESTS),
        ),
        _stat(
            "Error rate",
            "Ratio of requests that failed with a 5xx status or were cut off, over five minutes. Above 0: "
            "see the panel Errors.",
            PERCENT,
            or_zero(f"max({objectives.FAILED.over('5m')}{MATCHERS})"),
            objectives.AVAILABILITY.budget,
        ),
        _stat(
            "Time to first byte, p95",
            "Interactive streams. If it is red, see the first row of the dashboard Prefill and decode.",
            SECONDS,
            SELECTED.quantile(0.95, metrics.ROUTER_FIRST_BYTE, class_=NOT_BACKGROUND),
            objectives.FIRST_BYTE_S,
        ),
        _stat(
            "Time per output token, p95",
            "Interactive streams. If it is red, decode workers are overloaded.",
            SECONDS,
            SELECTED.quantile(0.95, metrics.ROUTER_OUTPUT_TOKEN, class_=NOT_BACKGROUND),
            objectives.OUTPUT_TOKEN_S,
        ),
        _stat(
            "Queued requests",
            "Requests that are queued in the router until a worker has capacity.",
            count("requests"),
            SELECTED.gauge(metrics.ROUTER_QUEUE_DEPTH),
        ),
        _stat(
            "Requests in flight",
            "Inference requests that all routers are processing.",
            count("requests"),
            SELECTED.gauge(metrics.ROUTER_IN_FLIGHT),
        ),
    ),
)

BURN_RATES = Row(
    "Objectives",
    (
        _burn_rate(
            "Availability: burn rate",
            f"Objective: {objectives.AVAILABILITY.target:.1%} of requests succeed.",
            objectives.FAILED,
            f"{objectives.AVAILABILITY.budget:.4g}",
            "BatonAvailabilityBurn",
        ),
        _burn_rate(
            "Time to first byte: burn rate",
            f"Objective: that of the service's spec. Without an operator, {objectives.LATENCY.target:.0%} of "
            f"streams begin within {objectives.FIRST_BYTE_S:g} s.",
            objectives.FIRST_BYTE_LATE,
            LATENCY_BUDGET,
            "BatonTimeToFirstTokenBurn",
        ),
        _burn_rate(
            "Time per output token: burn rate",
            f"Objective: that of the service's spec. Without an operator, {objectives.LATENCY.target:.0%} of "
            f"streams take at most {objectives.OUTPUT_TOKEN_S:g} s per token.",
            objectives.TOKENS_SLOW,
            LATENCY_BUDGET,
            "BatonInterTokenLatencyBurn",
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        _latency(
            "Time to first byte",
            "Queueing, prefill and KV transfer of interactive streams. If it rises, check Queued requests "
            "below, then the dashboard Prefill and decode.",
            metrics.ROUTER_FIRST_BYTE,
            "BatonTimeToFirstTokenBurn",
            objectives.FIRST_BYTE_S,
        ),
        _latency(
            "Time per output token",
            "Mean per interactive stream. It rises with the batch size of decode workers: add decode "
            "workers, or lower --max-running.",
            metrics.ROUTER_OUTPUT_TOKEN,
            "BatonInterTokenLatencyBurn",
            objectives.OUTPUT_TOKEN_S,
        ),
        _latency(
            "Request duration",
            "From the last byte of the request to the last byte of the response. It depends mostly on the "
            "length of responses.",
            metrics.ROUTER_REQUEST_TIME,
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            title="Requests by class",
            description="Completed requests by priority class. Batch requests use the capacity that other "
            "classes leave.",
            unit=REQUESTS_PER_SECOND,
            queries=(Query(SELECTED.rate(metrics.ROUTER_REQUESTS, "class", model="=~$model"), "{{class}}"),),
            kind="stacked",
        ),
        Panel(
            title="Errors",
            description="Ratio of responses with an error, by HTTP status. 4xx: client errors (429: tenant "
            "limit). 499: client disconnected. 503: overloaded or no worker. cut: the response ended early.",
            unit=PERCENT,
            queries=(
                Query(
                    or_zero(
                        ratios(
                            SELECTED.rate(metrics.ROUTER_REQUESTS, "code", model="=~$model", code="=~[45].."),
                            REQUESTS,
                        ),
                        code="none",
                    ),
                    "{{code}}",
                ),
                Query(or_zero(ratio(SELECTED.rate(metrics.ROUTER_CUT), REQUESTS)), "cut"),
            ),
            runbook="BatonAvailabilityBurn",
        ),
        Panel(
            title="Queued requests",
            description="Requests queued in the router because no worker has capacity. If it stays above 0 "
            "for minutes, add decode workers; for long prompts, add prefill workers.",
            unit=count("requests"),
            queries=(Query(SELECTED.gauge(metrics.ROUTER_QUEUE_DEPTH, "class"), "{{class}}"),),
            kind="stacked",
            runbook="BatonOverloaded",
        ),
        Panel(
            title="Tokens",
            description="Prompt tokens, how many of those came from a prefix cache, and generated tokens.",
            unit=per_second("tokens"),
            queries=(
                Query(SELECTED.rate(metrics.ROUTER_TENANT_TOKENS, "kind", tenant="=~$tenant"), "{{kind}}"),
            ),
        ),
        Panel(
            title="Tokens by tenant",
            description="Prompt and generated tokens of the ten largest tenants. docs/guides/tenants.md "
            "describes limits.",
            unit=per_second("tokens"),
            queries=(
                Query(
                    "topk(10, "
                    + SELECTED.rate(
                        metrics.ROUTER_TENANT_TOKENS, "tenant", tenant="=~$tenant", kind="=~prompt|generated"
                    )
                    + ")",
                    "{{tenant}}",
                ),
            ),
            kind="stacked",
        ),
        Panel(
            title="Goodput",
            description="All interactive streams, and those that kept the default bounds. The difference is "
            "work that was done too late.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    SELECTED.rate(metrics.ROUTER_FIRST_BYTE, suffix="_count", class_=NOT_BACKGROUND),
                    "all streams",
                ),
                Query(
                    SELECTED.rate_below(
                        metrics.ROUTER_FIRST_BYTE, objectives.FIRST_BYTE_S, class_=NOT_BACKGROUND
                    ),
                    f"first byte within {objectives.FIRST_BYTE_S:g} s",
                ),
                Query(
                    SELECTED.rate_below(
                        metrics.ROUTER_OUTPUT_TOKEN, objectives.OUTPUT_TOKEN_S, class_=NOT_BACKGROUND
                    ),
                    f"at most {objectives.OUTPUT_TOKEN_S:g} s per token",
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="service",
    title="Baton: Service",
    description="Objectives, latency, traffic and errors of a service. Start here.",
    variables=(CLUSTER, NAMESPACE, SERVICE, MODEL, TENANT),
    rows=(NOW, BURN_RATES, LATENCY, TRAFFIC),
    annotations=(ROLLOUTS,),
)
