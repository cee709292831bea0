"""A router's metrics: the requests of its clients, its queue, its decisions and what it knows of workers."""

from __future__ import annotations

import enum

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
from baton_api.reports import Fallback

CLASSES = ("critical", "interactive", "default", "batch")
CLASS = Label("class", CLASSES)
WORKER = Label("worker", bound="the workers that are listed now")
ROLE = Label("role", ("prefill", "decode"))
LOSSES = ("connect", "reset", "hung", "malformed", "incomplete", "idle", "slow", "overdue")
"""How a worker is lost to a request."""
STALE = "stale"

# --- Requests ---

ROUTER_REQUESTS = Metric(
    "baton_router_requests_total",
    "counter",
    "requests",
    "Requests to generate that ended, by path, model, class and status; 499 if the client went away. The "
    "model is other if nobody served it, or the request was refused before it was read.",
    (
        Label("path", bound="paths that are forwarded: 9"),
        Label("model", bound="models that were served: 100, and other"),
        Label("class", (*CLASSES, "other")),
        Label("code", bound="statuses of HTTP, some twenty"),
    ),
)
ROUTER_REQUEST_TIME = Metric(
    "baton_router_request_seconds",
    "histogram",
    "seconds",
    "From the last byte of a request that was served to the last byte of its answer.",
    (CLASS,),
    REQUEST_BUCKETS,
)
ROUTER_FIRST_BYTE = Metric(
    "baton_router_time_to_first_byte_seconds",
    "histogram",
    "seconds",
    "From a request's last byte to the first byte of its answer, of streams.",
    (CLASS,),
    FIRST_TOKEN_BUCKETS,
)
ROUTER_OUTPUT_TOKEN = Metric(
    "baton_router_time_per_output_token_seconds",
    "histogram",
    "seconds",
    "Of each whole stream, the mean time from one token to the next.",
    (CLASS,),
    TOKEN_BUCKETS,
)
ROUTER_OVERHEAD = Metric(
    "baton_router_overhead_seconds",
    "histogram",
    "seconds",
    "From a request's last byte to the choice of its first worker.",
    buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0),
)
ROUTER_IN_FLIGHT = Metric(
    "baton_router_requests_in_flight", "gauge", "requests", "Requests to generate that run now."
)
ROUTER_CUT = Metric(
    "baton_router_answers_cut_total",
    "counter",
    "requests",
    "Answers that ended before they were complete although the client was there, by cause.",
    (Label("cause", (*LOSSES, "router")),),
)
ROUTER_RESUMES = Metric(
    "baton_router_resumes_total",
    "counter",
    "requests",
    "Streams whose worker was lost: gone on with by another one, or failed.",
    (Label("result", ("resumed", "failed")),),
)
ROUTER_RETRIES = Metric(
    "baton_router_retries_total",
    "counter",
    "requests",
    "Requests given to another worker, by cause; stale: sent again to the same one, because it had just "
    "closed the kept connection.",
    (Label("cause", (*LOSSES, "refused", STALE)),),
)
ROUTER_GENERATION_REQUESTS = Metric(
    "baton_router_generation_requests_total",
    "counter",
    "requests",
    "Requests given to the workers of a generation: passed, or failed there, whoever answered them then.",
    (
        Label("revision", bound="generations that were served: two or three at a time"),
        Label("result", ("passed", "failed")),
    ),
)
ROUTER_GENERATION_FIRST_TOKEN = Metric(
    "baton_router_generation_first_token_seconds",
    "histogram",
    "seconds",
    "From the choice of a generation's workers for a stream to the first byte of its answer.",
    (Label("revision", bound="generations that were served: two or three at a time"),),
    LIMIT_BUCKETS,
)
ROUTER_LOOP_LAG = Metric(
    "baton_router_loop_lag_seconds",
    "histogram",
    "seconds",
    "How late the event loop came to what was due, looked at ten times a second.",
    buckets=STEP_BUCKETS,
)


class BackgroundTask(enum.StrEnum):
    """A loop that a router runs beside its requests."""

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
    "Exceptions in the loops that run beside requests, by loop. The loop goes on; the log has the cause.",
    (Label("task", tuple(BackgroundTask)),),
)

# --- Tenants ---

ROUTER_TENANT_TOKENS = Metric(
    "baton_router_tenant_tokens_total",
    "counter",
    "tokens",
    "Tokens of prompts, how many of those were cached, and tokens generated, as far as workers say. A "
    "hundred tenants have names, all others are other.",
    (Label("tenant", bound="tenants: 100, and other"), Label("kind", ("prompt", "cached", "generated"))),
)
ROUTER_TENANTS = Metric("baton_router_tenants", "gauge", "tenants", "Tenants in the file of tenants.")
ROUTER_TENANTS_STALE = Metric(
    "baton_router_tenants_stale",
    "gauge",
    "yes or no",
    "1 if the file of tenants was not taken as it is now, because it is wrong: then an older one counts.",
)

# --- The queue ---

ROUTER_QUEUE_DEPTH = Metric(
    "baton_router_queue_depth",
    "gauge",
    "requests",
    "Requests that wait in the router for a free worker.",
    (CLASS,),
)
ROUTER_QUEUE_AGE = Metric(
    "baton_router_queue_age_seconds",
    "gauge",
    "seconds",
    "Since the oldest of them arrived; 0 if nobody waits.",
    (CLASS,),
)
ROUTER_HELD = Metric(
    "baton_router_requests_held",
    "gauge",
    "requests",
    "Those that wait although there is no worker that could ever have them: one has to be started.",
)
ROUTER_QUEUED_TOKENS = Metric(
    "baton_router_queued_tokens",
    "gauge",
    "tokens",
    "Tokens of the prompts that wait, as far as they are not expected to be cached.",
)
ROUTER_DEMAND = Metric(
    "baton_router_demand_tokens_total",
    "counter",
    "tokens",
    "What requests asked for when they came, those too that were refused: prompt tokens that are not "
    "expected to be cached; local, those of them that a decode worker computes by itself although there are "
    "prefill workers; and tokens that their answers are expected to have.",
    (Label("kind", ("prompt", "local", "answer")),),
)
ROUTER_REJECTS = Metric(
    "baton_router_admission_rejects_total",
    "counter",
    "requests",
    "Requests that were not served: their tenant has used its requests, tokens or streams; the queue is "
    "full; they would be too late, have waited for too long, or no worker became ready; or workers were lost "
    "with them (poison).",
    (Label("reason", ("requests", "tokens", "streams", "full", "late", "waited", "unready", "poison")),),
)

# --- Decisions ---

ROUTER_DECISIONS = Metric(
    "baton_router_decisions_total",
    "counter",
    "requests",
    "Where prompts were to be computed: remote, by a prefill worker; local, by the decode worker, because "
    "that was cheaper or there is no prefill worker; and fallback, of those that were to be remote, the ones "
    "that the decode worker computed after all, by what went wrong.",
    (
        Label("path", ("remote", "local", "fallback")),
        Label("reason", ("cheaper", "no_prefill", *(one.value for one in Fallback))),
    ),
)
ROUTER_PREDICTION = Metric(
    "baton_router_predicted_first_token_ratio",
    "histogram",
    "ratio",
    "Time to the first token of a stream as predicted, against what it was: 1 is right, more was too long.",
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)
ROUTER_PREFIX_TOKENS = Metric(
    "baton_router_prefix_tokens_total",
    "counter",
    "tokens",
    "Tokens of prompts, how many of them were expected to be cached, and how many were.",
    (Label("kind", ("prompt", "expected", "cached")),),
)
ROUTER_TRANSFER = Metric(
    "baton_router_transfer_seconds",
    "histogram",
    "seconds",
    "Time in which a prompt's blocks were moved from a prefill to a decode worker, as that one says.",
    buckets=TRANSFER_BUCKETS,
)
ROUTER_UNASKED = Metric(
    "baton_router_unasked_total",
    "counter",
    "requests",
    "Requests that a frontend process rejected with 503 because its scheduler process was away or late to "
    "acknowledge them, or because too many were waiting for it (full).",
    (Label("reason", ("away", "late", "full")),),
)

# --- What it knows of workers ---

ROUTER_ROSTER_WORKERS = Metric(
    "baton_router_roster_workers",
    "gauge",
    "workers",
    "Ready workers of which a frontend process knows from its scheduler process.",
)
ROUTER_WORKER_STATE = Metric(
    "baton_router_worker_state",
    "gauge",
    "yes or no",
    "1 for the state that the router sees a worker in, 0 for the others.",
    (
        WORKER,
        ROLE,
        Label(
            "state",
            ("starting", "ready", "not_ready", "draining", "ejected", "on_trial", "full", "down"),
        ),
    ),
)
ROUTER_WORKER_IN_FLIGHT = Metric(
    "baton_router_worker_requests_in_flight",
    "gauge",
    "requests",
    "Requests of this router that a worker has now.",
    (WORKER, ROLE),
)
ROUTER_INDEX_CHUNKS = Metric(
    "baton_router_index_chunks",
    "gauge",
    "chunks",
    "Different chunks of prompts that any worker is believed to hold.",
)
ROUTER_INDEX_BYTES = Metric(
    "baton_router_index_bytes", "gauge", "bytes", "Memory of what workers are believed to hold, estimated."
)
ROUTER_CACHE_PARITY = Metric(
    "baton_router_cache_parity_ratio",
    "gauge",
    "ratio",
    "Prompt tokens that were cached against those believed to be, over about the last 200 requests.",
    (WORKER,),
)
ROUTER_CACHE_IGNORED = Metric(
    "baton_router_cache_ignored",
    "gauge",
    "yes or no",
    "1 for a worker that is chosen by its load alone, because too little of what it should hold is there.",
    (WORKER,),
)
ROUTER_KV_EVENTS = Metric(
    "baton_router_kv_events_total",
    "counter",
    "events",
    "KV events that came from a worker's process.",
    (WORKER,),
)
ROUTER_KV_GAPS = Metric(
    "baton_router_kv_event_gaps_total",
    "counter",
    "events",
    "Times that batches of KV events were missing and were asked for again.",
    (WORKER,),
)
ROUTER_KV_LAG = Metric(
    "baton_router_kv_events_lag_seconds",
    "gauge",
    "seconds",
    "From the making of the last batch of KV events to its arrival; right if the clocks are.",
    (WORKER,),
)
ROUTER_KV_DEGRADED = Metric(
    "baton_router_kv_events_degraded",
    "gauge",
    "yes or no",
    "1 for a worker whose KV events do not come: what it is believed to hold counts half.",
    (WORKER,),
)

# --- Its certificate ---

ROUTER_CERTIFICATE_END = Metric(
    "baton_router_certificate_end_timestamp_seconds",
    "gauge",
    "seconds",
    "Unix time at which the certificate ends that this process shows to workers; nothing without one.",
)
ROUTER_CERTIFICATE_LIFE = Metric(
    "baton_router_certificate_life_seconds",
    "gauge",
    "seconds",
    "From the begin to the end of that certificate.",
)
