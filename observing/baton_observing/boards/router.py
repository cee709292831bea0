"""How the router chooses: what it knows of workers, how right that is, and what it costs."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.annotations import ROLLOUTS
from baton_observing.panels import HERE, Board, Panel, Query, Row
from baton_observing.promql import or_zero, ratio
from baton_observing.variables import CLUSTER, NAMESPACE, SERVICE

PROMPTS = HERE.per_second(metrics.ROUTER_PREFIX_TOKENS, kind="prompt")

CHOICE = Row(
    "Does it choose well?",
    (
        Panel(
            title="Prompt tokens that were cached",
            meaning="Share that the router expected, and what workers found. Expected above found: it "
            "believes in "
            "blocks that are gone (see Cache parity); found above expected: KV events are missing.",
            unit="percentunit",
            queries=tuple(
                Query(ratio(HERE.per_second(metrics.ROUTER_PREFIX_TOKENS, kind=kind), PROMPTS), kind)
                for kind in ("expected", "cached")
            ),
        ),
        Panel(
            title="Predicted first token",
            meaning="Predicted time against what it was; 1 is right. Far from it for long: choices are "
            "bad; what "
            "the router has learned of workers is told at /debug/decisions.",
            unit="none",
            queries=tuple(
                Query(HERE.quantile(share, metrics.ROUTER_PREDICTION), f"p{share * 100:g}")
                for share in (0.1, 0.5, 0.9)
            ),
        ),
        Panel(
            title="Decisions",
            meaning="Where prompts were to be computed, and why; fallback: what was to be remote and was "
            "not.",
            unit="reqps",
            queries=(
                Query(
                    HERE.per_second(metrics.ROUTER_DECISIONS, "path", "reason") + " > 0",
                    "{{path}}: {{reason}}",
                ),
            ),
            kind="stacked",
        ),
    ),
)

WORKERS = Row(
    "What does it see of workers?",
    (
        Panel(
            title="Workers by state",
            meaning="Ejected: requests failed on it. Full: it refused one a moment ago. Down: it does not "
            "answer.",
            unit="none",
            queries=(
                Query(HERE.now(metrics.ROUTER_WORKER_STATE, "role", "state") + " > 0", "{{role}} {{state}}"),
            ),
            kind="stacked",
            runbook="BatonWorkersMissing",
        ),
        Panel(
            title="Requests at each worker",
            meaning="Of this service's routers. Workers of one role should have about the same, but for "
            "what their "
            "caches draw to them.",
            unit="none",
            queries=(Query(HERE.now(metrics.ROUTER_WORKER_IN_FLIGHT, "worker"), "{{worker}}"),),
            kind="stacked",
        ),
        Panel(
            title="Tried again, resumed and cut",
            meaning="Requests given to another worker, by cause; streams that another worker went on with; "
            "and "
            "answers that could not be completed.",
            unit="reqps",
            queries=(
                Query(
                    or_zero(HERE.per_second(metrics.ROUTER_RETRIES, "cause") + " > 0", cause="none"),
                    "again: {{cause}}",
                ),
                Query(
                    or_zero(HERE.per_second(metrics.ROUTER_RESUMES, "result") + " > 0", result="none"),
                    "resume: {{result}}",
                ),
                Query(
                    or_zero(HERE.per_second(metrics.ROUTER_CUT, "cause") + " > 0", cause="none"),
                    "cut: {{cause}}",
                ),
            ),
            runbook="BatonRetrying",
        ),
    ),
)

KNOWLEDGE = Row(
    "Is what it knows of caches right?",
    (
        Panel(
            title="Cache parity",
            meaning="Cached tokens against those believed to be, by worker. Below a half the worker is "
            "chosen by "
            "its load alone.",
            unit="percentunit",
            queries=(Query(HERE.now(metrics.ROUTER_CACHE_PARITY, "worker", how="min"), "{{worker}}"),),
            runbook="BatonCacheIgnored",
        ),
        Panel(
            title="KV events",
            meaning="From each worker's process, a second. None from a worker that is busy: see below.",
            unit="cps",
            queries=(Query(HERE.per_second(metrics.ROUTER_KV_EVENTS, "worker"), "{{worker}}"),),
            runbook="BatonKvEventsMissing",
        ),
        Panel(
            title="Lag of KV events",
            meaning="From the making of a worker's last batch to its arrival. It is right if clocks are.",
            unit="s",
            queries=(Query(HERE.now(metrics.ROUTER_KV_LAG, "worker", how="max"), "{{worker}}"),),
            runbook="BatonKvEventsMissing",
        ),
        Panel(
            title="Gaps in KV events",
            meaning="Times within the window that batches of events were missing and requested again.",
            unit="none",
            queries=(Query(HERE.times(metrics.ROUTER_KV_GAPS), "gaps"),),
            width=12,
            runbook="BatonKvEventsMissing",
        ),
        Panel(
            title="Workers whose cache is ignored, or counts half",
            meaning="Ignored: too little of what it should hold is there. Half: its KV events do not come.",
            unit="none",
            width=12,
            queries=(
                Query(HERE.now(metrics.ROUTER_CACHE_IGNORED), "ignored"),
                Query(HERE.now(metrics.ROUTER_KV_DEGRADED), "counts half"),
            ),
            runbook="BatonCacheIgnored",
        ),
        Panel(
            title="Size of the index",
            meaning="Chunks of prompts that any worker is believed to hold.",
            unit="short",
            queries=(Query(HERE.now(metrics.ROUTER_INDEX_CHUNKS, how="max"), "chunks"),),
            width=12,
        ),
        Panel(
            title="Memory of the index",
            meaning="Estimated. It is bounded: what is oldest is forgotten.",
            unit="bytes",
            queries=(Query(HERE.now(metrics.ROUTER_INDEX_BYTES, how="max"), "bytes"),),
            width=12,
        ),
    ),
)

COST = Row(
    "What does it cost, and whom does it send away?",
    (
        Panel(
            title="Overhead",
            meaning="From a request's last byte to the choice of its worker, waiting included. Without a "
            "queue a "
            "millisecond at most.",
            unit="s",
            queries=tuple(
                Query(HERE.quantile(share, metrics.ROUTER_OVERHEAD), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            title="Lag of the event loop, p99",
            meaning="How late it comes to what is due. Above a quarter of a second: more processes "
            "(--processes), or more routers.",
            unit="s",
            queries=(Query(HERE.quantile(0.99, metrics.ROUTER_LOOP_LAG), "p99"),),
            limit=0.25,
            runbook="BatonRouterSlow",
        ),
        Panel(
            title="Rejected without the scheduler",
            meaning="Requests that the scheduler process did not acknowledge in time: away, late, or full.",
            unit="reqps",
            queries=(
                Query(
                    or_zero(HERE.per_second(metrics.ROUTER_UNASKED, "reason") + " > 0", reason="none"),
                    "{{reason}}",
                ),
            ),
            runbook="BatonSchedulerAway",
        ),
        Panel(
            title="Age of the oldest that waits",
            meaning="By class. A class waits while those above it have work.",
            unit="s",
            queries=(Query(HERE.now(metrics.ROUTER_QUEUE_AGE, "class", how="max"), "{{class}}"),),
            runbook="BatonQueueOld",
        ),
        Panel(
            title="Sent away",
            meaning="Requests that were not served. Requests, tokens, streams: limits of a tenant. Full, "
            "late, "
            "waited: too much load. Unready: no worker came up in time.",
            unit="reqps",
            queries=(
                Query(
                    or_zero(HERE.per_second(metrics.ROUTER_REJECTS, "reason") + " > 0", reason="none"),
                    "{{reason}}",
                ),
            ),
            kind="stacked",
            runbook="BatonSendingAway",
        ),
        Panel(
            title="Tenants",
            meaning="Tenants in the file, and whether the file was wrong when it was last read: then an "
            "older one "
            "counts.",
            unit="none",
            queries=(
                Query(or_zero(HERE.now(metrics.ROUTER_TENANTS, how="max")), "tenants"),
                Query(or_zero(HERE.now(metrics.ROUTER_TENANTS_STALE, how="max")), "file is wrong"),
            ),
            runbook="BatonTenantsStale",
        ),
    ),
)

BOARD = Board(
    "router",
    "Baton: Router",
    "How requests find their workers, how right the router is, and what that costs.",
    (CLUSTER, NAMESPACE, SERVICE),
    (CHOICE, WORKERS, KNOWLEDGE, COST),
    (ROLLOUTS,),
)
