"""
Metrics of a router: requests, queue, decisions, the state of workers, and batches.

Gauges of the ledger of batches are equal on all routers that share it, so panels take their maximum.
Counters are of one router, so panels add them.
"""

from __future__ import annotations

import enum

from baton_api.inference_paths import PROXIED_PATHS
from baton_api.metrics.metric import (
    FIRST_TOKEN_BUCKETS,
    LIMIT_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TOKEN_BUCKETS,
    TRANSFER_BUCKETS,
    Label,
    Metric,
)
from baton_api.prompt_report import Fallback
from baton_api.request_classes import CLASSES
from baton_api.workers import PEER

CLASS = Label("class", tuple(CLASSES))
WORKER = Label("worker", bound="current workers, by address")
NAME = Label("name", bound="current workers, by the name in their log; empty until it is known")
ROLE = Label("role", ("prefill", "decode"))
LOSSES = (
    *("connect", "reset", "hung", "malformed", "incomplete", "idle", "slow", "overdue"),
    *("aborted", "prefill", "prefill_crashed"),
)
"""Causes by which a request loses its worker."""
STALE = "stale"

# --- Requests ---

ROUTER_REQUESTS = Metric(
    "baton_router_requests_total",
    "counter",
    "requests",
    "Finished generation requests by path, model, class and HTTP status. Status 499: the client closed "
    "the connection. Model `other`: the model is not served, or the request was rejected before it was "
    "parsed.",
    (
        Label("path", bound=f"{len(PROXIED_PATHS)} forwarded paths"),
        Label("model", bound="100 served models, and other"),
        Label("class", (*CLASSES, "other")),
        Label("code", bound="about 20 HTTP statuses"),
    ),
)
ROUTER_REQUEST_TIME = Metric(
    "baton_router_request_seconds",
    "histogram",
    "seconds",
    "Time from the last byte of a successful request to the last byte of its response.",
    (CLASS,),
    REQUEST_BUCKETS,
)
ROUTER_FIRST_BYTE = Metric(
    "baton_router_time_to_first_byte_seconds",
    "histogram",
    "seconds",
    "Time from the last byte of a streaming request to the first byte of its response.",
    (CLASS,),
    FIRST_TOKEN_BUCKETS,
)
ROUTER_OUTPUT_TOKEN = Metric(
    "baton_router_time_per_output_token_seconds",
    "histogram",
    "seconds",
    "Mean time between tokens of a complete stream.",
    (CLASS,),
    TOKEN_BUCKETS,
)
ROUTER_OVERHEAD = Metric(
    "baton_router_overhead_seconds",
    "histogram",
    "seconds",
    "Time from the last byte of a request to the selection of its first worker.",
    buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0),
)
ROUTER_IN_FLIGHT = Metric(
    "baton_router_requests_in_flight", "gauge", "requests", "Generation requests in progress."
)
ROUTER_CUT = Metric(
    "baton_router_answers_cut_total",
    "counter",
    "requests",
    "Responses that ended before they were complete while the client was connected, by cause.",
    (Label("cause", (*LOSSES, "router")),),
)
ROUTER_RESUMES = Metric(
    "baton_router_resumes_total",
    "counter",
    "requests",
    "Streams whose worker was lost, by result: another worker resumed them, or they failed.",
    (Label("result", ("resumed", "failed")),),
)
ROUTER_RETRIES = Metric(
    "baton_router_retries_total",
    "counter",
    "requests",
    "Requests sent to another worker, by cause. Cause `stale`: sent again to the same worker, because it "
    "had just closed the idle connection.",
    (Label("cause", (*LOSSES, "refused", STALE)),),
)
ROUTER_REVISION_REQUESTS = Metric(
    "baton_router_revision_requests_total",
    "counter",
    "requests",
    "Requests sent to the workers of a revision, by result. A request that failed there counts as failed,"
    " even if another revision served it later.",
    (
        Label("revision", bound="two or three revisions at a time"),
        Label("result", ("passed", "failed")),
    ),
)
ROUTER_REVISION_FIRST_TOKEN = Metric(
    "baton_router_revision_first_token_seconds",
    "histogram",
    "seconds",
    "Time from the selection of a revision's workers for a stream to the first byte of the response.",
    (Label("revision", bound="two or three revisions at a time"),),
    LIMIT_BUCKETS,
)
ROUTER_LOOP_LAG = Metric(
    "baton_router_loop_lag_seconds",
    "histogram",
    "seconds",
    "Delay of the event loop, sampled ten times per second.",
    buckets=STEP_BUCKETS,
)


class BackgroundTask(enum.StrEnum):
    """A background loop of a router."""

    HEALTH_CHECKS = "health_checks"
    KV_EVENTS = "kv_events"
    DISCOVERY = "discovery"
    DRAINING = "draining"
    LOOP_LAG = "loop_lag"
    BATCH_CONTROLLER = "batch_controller"
    BATCH_RUNNERS = "batch_runners"
    BATCH_JOBS = "batch_jobs"
    SCHEDULER_SERVICE = "scheduler_service"
    SCHEDULER_LINK = "scheduler_link"
    FRONTEND_METRICS = "frontend_metrics"


ROUTER_BACKGROUND_ERRORS = Metric(
    "baton_router_background_errors_total",
    "counter",
    "events",
    "Exceptions in background loops, by loop. The loop continues; the log has the cause.",
    (Label("task", tuple(BackgroundTask)),),
)

# --- Tenants ---

ROUTER_TENANT_TOKENS = Metric(
    "baton_router_tenant_tokens_total",
    "counter",
    "tokens",
    "Tokens per tenant: prompt tokens, cached prompt tokens, and generated tokens, as workers report "
    "them. Tenants after the first 100 count as `other`.",
    (Label("tenant", bound="100 tenants, and other"), Label("kind", ("prompt", "cached", "generated"))),
)
ROUTER_TENANTS = Metric("baton_router_tenants", "gauge", "tenants", "Tenants in the tenants file.")
ROUTER_TENANTS_STALE = Metric(
    "baton_router_tenants_stale",
    "gauge",
    "yes or no",
    "1 if the tenants file is invalid and the router uses an older version of it.",
)

# --- The queue ---

ROUTER_QUEUE_DEPTH = Metric(
    "baton_router_queue_depth",
    "gauge",
    "requests",
    "Requests in the router's queue.",
    (CLASS,),
)
ROUTER_QUEUE_AGE = Metric(
    "baton_router_queue_age_seconds",
    "gauge",
    "seconds",
    "Age of the oldest queued request. 0: the queue is empty.",
    (CLASS,),
)
ROUTER_HELD = Metric(
    "baton_router_requests_held",
    "gauge",
    "requests",
    "Queued requests that no current worker can serve. They wait for a worker to start.",
)
ROUTER_QUEUED_TOKENS = Metric(
    "baton_router_queued_tokens",
    "gauge",
    "tokens",
    "Prompt tokens of queued requests that are not expected to be cached.",
)
ROUTER_DEMAND = Metric(
    "baton_router_demand_tokens_total",
    "counter",
    "tokens",
    "Tokens of all arriving requests, including rejected ones. Kind `prompt`: prompt tokens that are not "
    "expected to be cached. Kind `local`: those of them that a decode worker computes although prefill "
    "workers exist. Kind `answer`: expected output tokens.",
    (Label("kind", ("prompt", "local", "answer")),),
)
ROUTER_REJECTS = Metric(
    "baton_router_admission_rejects_total",
    "counter",
    "requests",
    "Rejected requests by reason. `requests`, `tokens`, `streams`: a limit of the tenant. `full`: the "
    "queue is full. `late`: the first token would miss its deadline. `waited`: the queue time ran out. "
    "`unready`: no worker became ready. `poison`: several workers were lost with the request.",
    (Label("reason", ("requests", "tokens", "streams", "full", "late", "waited", "unready", "poison")),),
)

# --- Decisions ---

ROUTER_DECISIONS = Metric(
    "baton_router_decisions_total",
    "counter",
    "requests",
    "Prompts by the worker that computes them. Path `remote`: a prefill worker. Path `local`: the decode "
    "worker, because that is cheaper or no prefill worker exists. Path `fallback`: remote prompts that "
    "the decode worker computed after a failure; the reason names it.",
    (
        Label("path", ("remote", "local", "fallback")),
        Label("reason", ("cheaper", "no_prefill", *(reason.value for reason in Fallback))),
    ),
)
ROUTER_PREDICTION = Metric(
    "baton_router_predicted_first_token_ratio",
    "histogram",
    "ratio",
    "Predicted time to first token of a stream, divided by the measured one. 1 is exact; above 1 the "
    "prediction was too long.",
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)
ROUTER_PREFIX_TOKENS = Metric(
    "baton_router_prefix_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens: all, expected to be cached, and cached.",
    (Label("kind", ("prompt", "expected", "cached")),),
)
_TIERS = ("memory", "disk", "shared")
_TIER = Label("tier", _TIERS)
ROUTER_RESTORED_TOKENS = Metric(
    "baton_router_restored_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens that were expected to be cached in a tier of the worker, which restores them, by tier. "
    "They are a part of the expected ones of baton_router_prefix_tokens_total, but for those of a peer: the "
    "decode worker, whose cache the prefill worker reads.",
    (Label("tier", (*_TIERS, PEER)),),
)
ROUTER_TRANSFER = Metric(
    "baton_router_transfer_seconds",
    "histogram",
    "seconds",
    "Time of moving a prompt's KV blocks from the prefill to the decode worker, as the decode worker "
    "reports it.",
    buckets=TRANSFER_BUCKETS,
)
ROUTER_RESPONSE_STORE_ERRORS = Metric(
    "baton_router_response_store_errors_total",
    "counter",
    "events",
    "Failed operations of the store of responses in Redis. `write`: a response was not stored; its client "
    "got it. `read`: a request for a stored response was answered with 503.",
    (Label("operation", ("read", "write")),),
)
ROUTER_SCHEDULER_UNAVAILABLE = Metric(
    "baton_router_scheduler_unavailable_total",
    "counter",
    "requests",
    "Requests that a frontend process rejected with 503, by reason. `away`: it has no connection to the "
    "scheduler process. `late`: the scheduler process did not acknowledge in time. `full`: too many "
    "requests were waiting for it.",
    (Label("reason", ("away", "late", "full")),),
)

# --- Workers ---

ROUTER_REGISTERED_WORKERS = Metric(
    "baton_router_registered_workers",
    "gauge",
    "workers",
    "Ready workers that the scheduler process has reported to this frontend process.",
)
ROUTER_WORKER_STATE = Metric(
    "baton_router_worker_state",
    "gauge",
    "yes or no",
    "1 for the current state of a worker, as the router sees it; 0 for other states.",
    (
        WORKER,
        NAME,
        ROLE,
        Label(
            "state",
            ("starting", "ready", "not_ready", "draining", "ejected", "half_open", "full", "down"),
        ),
    ),
)
ROUTER_WORKER_IN_FLIGHT = Metric(
    "baton_router_worker_requests_in_flight",
    "gauge",
    "requests",
    "Requests of this router in progress on a worker.",
    (WORKER, NAME, ROLE),
)
ROUTER_INDEX_CHUNKS = Metric(
    "baton_router_index_chunks",
    "gauge",
    "chunks",
    "Distinct prompt chunks in the prefix index, over all workers.",
)
ROUTER_INDEX_TIER_CHUNKS = Metric(
    "baton_router_index_tier_chunks",
    "gauge",
    "chunks",
    "Distinct prompt chunks that workers can restore from a tier, over all workers, by tier in use.",
    (_TIER,),
)
ROUTER_INDEX_BYTES = Metric(
    "baton_router_index_bytes", "gauge", "bytes", "Estimated memory of the prefix index."
)
ROUTER_CACHE_ACCURACY = Metric(
    "baton_router_cache_accuracy_ratio",
    "gauge",
    "ratio",
    "Cached prompt tokens divided by the prompt tokens that the prefix index expected to be cached, over "
    "about 200 requests.",
    (WORKER,),
)
ROUTER_CACHE_IGNORED = Metric(
    "baton_router_cache_ignored",
    "gauge",
    "yes or no",
    "1 for a worker that is selected by load alone, because too few of the expected blocks were cached.",
    (WORKER,),
)
ROUTER_KV_EVENTS = Metric(
    "baton_router_kv_events_total",
    "counter",
    "events",
    "KV events received from a worker.",
    (WORKER,),
)
ROUTER_KV_GAPS = Metric(
    "baton_router_kv_event_gaps_total",
    "counter",
    "events",
    "Gaps in a worker's KV event batches, each with a replay request.",
    (WORKER,),
)
ROUTER_KV_LAG = Metric(
    "baton_router_kv_events_lag_seconds",
    "gauge",
    "seconds",
    "Delay from the creation of the last KV event batch to its arrival. Accurate only with synchronized "
    "clocks.",
    (WORKER,),
)
ROUTER_KV_DEGRADED = Metric(
    "baton_router_kv_events_degraded",
    "gauge",
    "yes or no",
    "1 for a worker whose KV events do not arrive. Its expected cache hits count half.",
    (WORKER,),
)

# --- Certificate ---

ROUTER_CERTIFICATE_END = Metric(
    "baton_router_certificate_end_timestamp_seconds",
    "gauge",
    "seconds",
    "Expiry of the certificate that this process presents to workers, in Unix seconds. Absent without a "
    "certificate.",
)
ROUTER_CERTIFICATE_LIFE = Metric(
    "baton_router_certificate_life_seconds",
    "gauge",
    "seconds",
    "Validity period of that certificate, from its start to its expiry.",
)


BATCHES = Metric(
    "baton_batches",
    "gauge",
    "batches",
    "Batches by status. All routers that share a ledger report the same value.",
    (
        Label(
            "status",
            (
                *("validating", "in_progress", "finalizing", "cancelling"),
                *("completed", "failed", "expired", "cancelled"),
            ),
        ),
    ),
)
BATCHES_LATE = Metric(
    "baton_batches_late",
    "gauge",
    "batches",
    "Batches with less than 90% of their lines done after 90% of their completion window.",
)
BATCH_LINES_LEFT = Metric(
    "baton_batch_lines_left", "gauge", "lines", "Lines without a result in batches in progress."
)
BATCH_RUNNERS = Metric(
    "baton_batch_runners", "gauge", "batches", "Batches in progress whose lease a runner holds."
)
BATCH_LINES = Metric(
    "baton_batch_lines_total",
    "counter",
    "lines",
    "Lines whose result this router recorded, by result.",
    (Label("result", ("completed", "failed")),),
)
BATCH_RETRIES = Metric(
    "baton_batch_retries_total",
    "counter",
    "lines",
    "Retries of lines by runners, by the outcome of the previous attempt.",
    (Label("outcome", ("busy", "fault", "outage", "lost", "slow", "away")),),
)
BATCH_STORAGE_ERRORS = Metric(
    "baton_batch_storage_errors_total",
    "counter",
    "events",
    "Failed calls to the database or the object store, by error.",
    (Label("error", ("unavailable", "full")),),
)
