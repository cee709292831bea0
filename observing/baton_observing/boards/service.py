"""Whether a service is what it is meant to be, as its clients see it, and which dashboard says why not."""

from __future__ import annotations

from baton_api import metrics
from baton_observing import objectives, recording
from baton_observing.annotations import ROLLOUTS
from baton_observing.panels import HERE, Board, Panel, Query, Row
from baton_observing.promql import or_zero, ratio, shares
from baton_observing.variables import CLUSTER, MODEL, NAMESPACE, SERVICE, TENANT

CHOSEN = "{" + ", ".join(HERE.chosen) + "}"

REQUESTS = HERE.per_second(metrics.ROUTER_REQUESTS, model="=~$model")


OWN = f"on (namespace, service) {recording.BUDGET.name}"


def _budget(title: str, meaning: str, share: recording.Family, budget: str, alert: str) -> Panel:
    """How fast the budget of an objective is used: at 1, thirty days last thirty days."""
    return Panel(
        title=title,
        meaning=f"{meaning} At 1 the budget of 30 days lasts just as long. Above 14 for minutes somebody "
        f"is called.",
        unit="none",
        queries=tuple(
            Query(or_zero(f"max({share.over(window)}{CHOSEN} / {budget})"), f"over {window}")
            for window in ("5m", "1h")
        ),
        limit=14.4,
        runbook=alert,
    )


def _times(title: str, meaning: str, metric: metrics.Metric, alert: str, limit: float | None) -> Panel:
    return Panel(
        title=title,
        meaning=meaning,
        unit="s",
        queries=tuple(
            Query(HERE.quantile(share, metric, class_="!=batch"), f"p{share * 100:g}")
            for share in (0.5, 0.95, 0.99)
        ),
        limit=limit,
        runbook=alert,
    )


def _number(title: str, meaning: str, unit: str, expression: str, limit: float | None = None) -> Panel:
    return Panel(
        title=title,
        meaning=meaning,
        unit=unit,
        queries=(Query(expression),),
        kind="number",
        width=4,
        limit=limit,
    )


NOW = Row(
    "Now",
    (
        _number("Requests", "Requests to generate that end, of all classes.", "reqps", or_zero(REQUESTS)),
        _number(
            "Failed",
            "Share of requests that failed by our fault or were cut off, over five minutes. Not 0: see "
            "Errors.",
            "percentunit",
            or_zero(f"max({recording.FAILED.over('5m')}{CHOSEN})"),
            objectives.AVAILABLE.budget,
        ),
        _number(
            "First byte, p95",
            "Of streams outside of batches. Red: see the dashboard Prefill and decode, first row.",
            "s",
            HERE.quantile(0.95, metrics.ROUTER_FIRST_BYTE, class_="!=batch"),
            objectives.FIRST_TOKEN_S,
        ),
        _number(
            "Time per token, p95",
            "Of streams outside of batches. Red: decode workers have too much to do.",
            "s",
            HERE.quantile(0.95, metrics.ROUTER_OUTPUT_TOKEN, class_="!=batch"),
            objectives.TOKEN_S,
        ),
        _number(
            "Waiting",
            "Requests that wait in the router for a free worker.",
            "none",
            HERE.now(metrics.ROUTER_QUEUE_DEPTH),
        ),
        _number(
            "Running",
            "Requests to generate that run now, in all routers.",
            "none",
            HERE.now(metrics.ROUTER_IN_FLIGHT),
        ),
    ),
)

BUDGETS = Row(
    "Are the objectives kept?",
    (
        _budget(
            "Availability: use of the budget",
            f"{objectives.AVAILABLE.share:.1%} of requests are to be answered whole.",
            recording.FAILED,
            f"{objectives.AVAILABLE.budget:.4g}",
            "BatonAvailabilityBurn",
        ),
        _budget(
            "First byte: use of the budget",
            f"As many streams as spec.autoscaling.slo says are to begin in time; "
            f"{objectives.STREAMS.share:.0%} within {objectives.FIRST_TOKEN_S:g} s where no operator tells.",
            recording.LATE,
            OWN,
            "BatonFirstByteBurn",
        ),
        _budget(
            "Time per token: use of the budget",
            f"As many streams as spec.autoscaling.slo says are to be fluent; {objectives.STREAMS.share:.0%} "
            f"take at most {objectives.TOKEN_S:g} s per token where no operator tells.",
            recording.SLOW,
            OWN,
            "BatonTokenTimeBurn",
        ),
    ),
)

TIMES = Row(
    "What do clients wait for?",
    (
        _times(
            "Time to the first byte",
            "Waiting in the router, prefill and transfer together, of streams outside of batches. If it "
            "grows, look "
            "at Requests waiting below, then at Prefill and decode.",
            metrics.ROUTER_FIRST_BYTE,
            "BatonFirstByteBurn",
            objectives.FIRST_TOKEN_S,
        ),
        _times(
            "Time per token",
            "Mean of each stream outside of batches. It grows with the batches of decode workers: more of "
            "those, or "
            "fewer sequences in each (--max-running).",
            metrics.ROUTER_OUTPUT_TOKEN,
            "BatonTokenTimeBurn",
            objectives.TOKEN_S,
        ),
        _times(
            "Whole requests",
            "From the last byte of the request to the last byte of the answer: mostly how long answers are.",
            metrics.ROUTER_REQUEST_TIME,
            "",
            None,
        ),
    ),
)

TRAFFIC = Row(
    "What is asked, and what comes of it?",
    (
        Panel(
            title="Requests by class",
            meaning="What ended, by class. Batches take what the others leave.",
            unit="reqps",
            queries=(
                Query(HERE.per_second(metrics.ROUTER_REQUESTS, "class", model="=~$model"), "{{class}}"),
            ),
            kind="stacked",
        ),
        Panel(
            title="Errors",
            meaning="Answers with an error, by status, as a share of all. 4xx are the clients' doing (429: "
            "a limit "
            "of their tenant); 499 went away; 503 found the service overloaded or without workers; cut ended "
            "although the client was there.",
            unit="percentunit",
            queries=(
                Query(
                    or_zero(
                        shares(
                            HERE.per_second(
                                metrics.ROUTER_REQUESTS, "code", model="=~$model", code="=~[45].."
                            ),
                            REQUESTS,
                        ),
                        code="none",
                    ),
                    "{{code}}",
                ),
                Query(or_zero(ratio(HERE.per_second(metrics.ROUTER_CUT), REQUESTS)), "cut"),
            ),
            runbook="BatonErrors",
        ),
        Panel(
            title="Requests waiting",
            meaning="Requests that wait in the router because no worker has room. For minutes: more decode "
            "workers; if prompts are long, more prefill workers.",
            unit="none",
            queries=(Query(HERE.now(metrics.ROUTER_QUEUE_DEPTH, "class"), "{{class}}"),),
            kind="stacked",
            runbook="BatonQueueGrowing",
        ),
        Panel(
            title="Tokens",
            meaning="Tokens of prompts that came in, how many of those were in a cache, and tokens that "
            "went out.",
            unit="cps",
            queries=(
                Query(HERE.per_second(metrics.ROUTER_TENANT_TOKENS, "kind", tenant="=~$tenant"), "{{kind}}"),
            ),
        ),
        Panel(
            title="Tokens by tenant",
            meaning="Prompts and answers together, of the ten tenants that use most. Limits: "
            "docs/guides/tenants.md.",
            unit="cps",
            queries=(
                Query(
                    "topk(10, "
                    + HERE.per_second(
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
            meaning="Streams outside of batches that began in time, and those whose tokens came in time, "
            "out of "
            "all. What lies between is work that was done too late.",
            unit="reqps",
            queries=(
                Query(
                    HERE.per_second(metrics.ROUTER_FIRST_BYTE, part="_count", class_="!=batch"), "all streams"
                ),
                Query(
                    HERE.within(metrics.ROUTER_FIRST_BYTE, objectives.FIRST_TOKEN_S, class_="!=batch"),
                    f"first byte within {objectives.FIRST_TOKEN_S:g} s",
                ),
                Query(
                    HERE.within(metrics.ROUTER_OUTPUT_TOKEN, objectives.TOKEN_S, class_="!=batch"),
                    f"at most {objectives.TOKEN_S:g} s per token",
                ),
            ),
        ),
    ),
)

BOARD = Board(
    "service",
    "Baton: Service",
    "Whether a service keeps its objectives, and where to look if it does not.",
    (CLUSTER, NAMESPACE, SERVICE, MODEL, TENANT),
    (NOW, BUDGETS, TIMES, TRAFFIC),
    (ROLLOUTS,),
)
