"""
Every metric that Baton exposes: name, kind, meaning, labels and buckets, each defined once.

Dashboards, alert rules, the autoscaler and `baton top` read these names, so they are a contract like
the control messages. Counters end in `_total` and times are in seconds, as Prometheus asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""


# From a cached prompt on a GPU to a million tokens on a CPU.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

# From a tiny model's step to the pause that a long prompt causes.
TOKEN_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

TRANSFER_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


# --- A worker: what its clients saw ---

WORKER_REQUESTS = Metric(
    "baton_worker_requests_total",
    "counter",
    "Choices of requests that ended, by how: stop, length, abort (the client went away) or error.",
    ("finish_reason",),
)
WORKER_PROMPT_TOKENS = Metric(
    "baton_worker_prompt_tokens_total",
    "counter",
    "Prompt tokens by where their KV came from: computed here, remote (by a prefill worker), cached.",
    ("source",),
)
WORKER_GENERATION_TOKENS = Metric(
    "baton_worker_generation_tokens_total", "counter", "Tokens generated for clients."
)
WORKER_FIRST_TOKEN = Metric(
    "baton_worker_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to its first token.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_TOKEN = Metric(
    "baton_worker_inter_token_latency_seconds",
    "histogram",
    "Between two tokens of one sequence.",
    buckets=TOKEN_BUCKETS,
)
WORKER_REQUEST_TIME = Metric(
    "baton_worker_request_seconds",
    "histogram",
    "From a request's arrival to its last token.",
    buckets=REQUEST_BUCKETS,
)

# --- A worker: its engine ---

WORKER_RUNNING = Metric("baton_worker_requests_running", "gauge", "Sequences in the batch.")
WORKER_QUEUED = Metric("baton_worker_requests_queued", "gauge", "Sequences that wait to be in the batch.")
WORKER_FETCHING = Metric(
    "baton_worker_requests_fetching",
    "gauge",
    "Sequences whose prompt is being brought from a prefill worker.",
)
WORKER_HELD = Metric(
    "baton_worker_requests_held",
    "gauge",
    "Computed prompts whose blocks wait to be pulled by a decode worker.",
)
WORKER_QUEUED_TOKENS = Metric(
    "baton_worker_queued_tokens", "gauge", "Prompt tokens that have still to be computed."
)
WORKER_BLOCKS = Metric(
    "baton_worker_kv_blocks",
    "gauge",
    "KV blocks by state: free, cached, owned, pinned, quarantined.",
    ("state",),
)
WORKER_RETRACTIONS = Metric(
    "baton_worker_retractions_total", "counter", "Times a sequence gave its blocks back to go on later."
)
WORKER_STEP = Metric(
    "baton_worker_step_seconds",
    "histogram",
    "Time of one engine step, the forward pass included.",
    buckets=STEP_BUCKETS,
)
WORKER_FORWARD = Metric(
    "baton_worker_forward_seconds",
    "histogram",
    "Time of one forward pass; what a step takes beyond it is the engine's own.",
    buckets=STEP_BUCKETS,
)

# --- A worker: KV blocks that came from a prefill worker ---

WORKER_TRANSFER_BYTES = Metric(
    "baton_worker_transfer_bytes_total",
    "counter",
    "Bytes of KV blocks pulled from prefill workers.",
    ("transport",),
)
WORKER_TRANSFER_SECONDS = Metric(
    "baton_worker_transfer_seconds",
    "histogram",
    "Time in which at least one read of a prompt's blocks was under way.",
    ("transport",),
    TRANSFER_BUCKETS,
)
WORKER_TRANSFER_FAILURES = Metric(
    "baton_worker_transfer_failures_total",
    "counter",
    "Prompts that did not come over whole, by reason; the rest was computed here.",
    ("reason",),
)
WORKER_LOCAL_PREFILLS = Metric(
    "baton_worker_local_prefills_total",
    "counter",
    "Prompts with a prefill worker at hand that were computed here all the same, by reason.",
    ("reason",),
)

# --- A worker: what it tells of its prefix cache ---

WORKER_KV_BATCHES = Metric(
    "baton_worker_kv_event_batches_total",
    "counter",
    "Batches of KV events published, empty ones included.",
)

# --- The router ---

ROUTER_REQUESTS = Metric(
    "baton_router_requests_total",
    "counter",
    "Requests to generate that ended, by path, model, class and status; 499 if the client went away. The "
    "model is other if nobody served it, or the request was refused before it was read.",
    ("path", "model", "class", "code"),
)
ROUTER_TENANT_TOKENS = Metric(
    "baton_router_tenant_tokens_total",
    "counter",
    "Tokens of prompts, how many of those were cached, and tokens generated, as far as workers say. A "
    "hundred tenants have names, all others are other.",
    ("tenant", "kind"),
)
ROUTER_TENANTS = Metric("baton_router_tenants", "gauge", "Tenants in the file of tenants.")
ROUTER_TENANTS_STALE = Metric(
    "baton_router_tenants_stale",
    "gauge",
    "1 if the file of tenants was not taken as it is now, because it is wrong: then an older one counts.",
)
ROUTER_CUT = Metric(
    "baton_router_answers_cut_total",
    "counter",
    "Answers that ended before they were complete although the client was there, by cause.",
    ("cause",),
)
ROUTER_RESUMES = Metric(
    "baton_router_resumes_total",
    "counter",
    "Streams whose worker was lost: gone on with by another one, or failed.",
    ("result",),
)
ROUTER_IN_FLIGHT = Metric("baton_router_requests_in_flight", "gauge", "Requests to generate that run now.")
ROUTER_QUEUE_DEPTH = Metric(
    "baton_router_queue_depth", "gauge", "Requests that wait in the router for a free worker.", ("class",)
)
ROUTER_QUEUE_AGE = Metric(
    "baton_router_queue_age_seconds",
    "gauge",
    "Since the oldest of them arrived; 0 if nobody waits.",
    ("class",),
)
ROUTER_REJECTS = Metric(
    "baton_router_admission_rejects_total",
    "counter",
    "Requests that were not served: their tenant has used its requests, tokens or streams; the queue is "
    "full; they would be too late, have waited for too long, or no worker became ready.",
    ("reason",),
)
ROUTER_RETRIES = Metric(
    "baton_router_retries_total", "counter", "Requests given to another worker, by cause.", ("cause",)
)
ROUTER_UNASKED = Metric(
    "baton_router_unasked_total",
    "counter",
    "Requests for which a front chose by load alone, since its scheduler was away, or late to answer.",
    labels=("reason",),
)
ROUTER_ROSTER_WORKERS = Metric(
    "baton_router_roster_workers",
    "gauge",
    "Ready workers that a front could choose among by itself, if its scheduler went away now.",
)
ROUTER_WORKER_STATE = Metric(
    "baton_router_worker_state",
    "gauge",
    "1 for the state that the router sees a worker in, 0 for the others.",
    ("worker", "role", "state"),
)
ROUTER_WORKER_IN_FLIGHT = Metric(
    "baton_router_worker_requests_in_flight",
    "gauge",
    "Requests of this router that a worker has now.",
    ("worker", "role"),
)
ROUTER_INDEX_CHUNKS = Metric(
    "baton_router_index_chunks", "gauge", "Different chunks of prompts that any worker is believed to hold."
)
ROUTER_CACHE_PARITY = Metric(
    "baton_router_cache_parity_ratio",
    "gauge",
    "Prompt tokens that were cached against those believed to be, over about the last 200 requests.",
    ("worker",),
)
ROUTER_CACHE_IGNORED = Metric(
    "baton_router_cache_ignored",
    "gauge",
    "1 for a worker that is chosen by its load alone, because too little of what it should hold is there.",
    ("worker",),
)
ROUTER_KV_EVENTS = Metric(
    "baton_router_kv_events_total", "counter", "KV events that came from a worker's process.", ("worker",)
)
ROUTER_KV_GAPS = Metric(
    "baton_router_kv_event_gaps_total",
    "counter",
    "Times that batches of KV events were missing and were asked for again.",
    ("worker",),
)
ROUTER_KV_LAG = Metric(
    "baton_router_kv_events_lag_seconds",
    "gauge",
    "From the making of the last batch of KV events to its arrival; right if the clocks are.",
    ("worker",),
)
ROUTER_KV_DEGRADED = Metric(
    "baton_router_kv_events_degraded",
    "gauge",
    "1 for a worker whose KV events do not come: what it is believed to hold counts half.",
    ("worker",),
)
ROUTER_OVERHEAD = Metric(
    "baton_router_overhead_seconds",
    "histogram",
    "From a request's last byte to the choice of its first worker.",
    buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0),
)
ROUTER_FIRST_BYTE = Metric(
    "baton_router_time_to_first_byte_seconds",
    "histogram",
    "From a request's last byte to the first byte of its answer, of streams.",
    buckets=FIRST_TOKEN_BUCKETS,
)
ROUTER_OUTPUT_TOKEN = Metric(
    "baton_router_time_per_output_token_seconds",
    "histogram",
    "Of each whole stream, the mean time from one token to the next.",
    buckets=TOKEN_BUCKETS,
)
ROUTER_PREDICTION = Metric(
    "baton_router_predicted_first_token_ratio",
    "histogram",
    "Time to the first token of a stream as predicted, against what it was: 1 is right, more was too long.",
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)
ROUTER_PREFIX_TOKENS = Metric(
    "baton_router_prefix_tokens_total",
    "counter",
    "Tokens of prompts, how many of them were expected to be cached, and how many were.",
    ("kind",),
)
ROUTER_DECISIONS = Metric(
    "baton_router_decisions_total",
    "counter",
    "Where prompts were to be computed: remote, by a prefill worker; local, by the decode worker, because "
    "that was cheaper or there is no prefill worker; and fallback, of those that were to be remote, the ones "
    "that the decode worker computed after all, by what went wrong.",
    ("path", "reason"),
)
ROUTER_TRANSFER = Metric(
    "baton_router_transfer_seconds",
    "histogram",
    "Time in which a prompt's blocks were moved from a prefill to a decode worker, as that one says.",
    buckets=TRANSFER_BUCKETS,
)
ROUTER_INDEX_BYTES = Metric(
    "baton_router_index_bytes", "gauge", "Memory of what workers are believed to hold, estimated."
)
ROUTER_LOOP_LAG = Metric(
    "baton_router_loop_lag_seconds",
    "histogram",
    "How late the event loop came to what was due, looked at ten times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)

# --- The operator ---

OPERATOR_RECONCILE = Metric(
    "baton_operator_reconcile_seconds",
    "histogram",
    "Time of one look at an object, all writes included; success or error.",
    ("kind", "result"),
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
OPERATOR_QUEUE = Metric(
    "baton_operator_queue_depth", "gauge", "Objects that could be looked at now, and wait."
)
OPERATOR_QUEUE_OLDEST = Metric(
    "baton_operator_queue_oldest_seconds", "gauge", "For how long one of them has waited at most."
)
OPERATOR_LAST_EVENT = Metric(
    "baton_operator_watch_last_event_seconds",
    "gauge",
    "Time since the last event of a kind came by its watch.",
    ("resource",),
)
OPERATOR_HEARTBEAT = Metric(
    "baton_operator_heartbeat_age_seconds",
    "gauge",
    "Time since the operator's own change of a ConfigMap came back by a watch.",
)
OPERATOR_LEADER = Metric("baton_operator_leader", "gauge", "1 if this operator holds the Lease.")
OPERATOR_API = Metric(
    "baton_operator_api_requests_total",
    "counter",
    "Requests to the Kubernetes API by method and status; 0 if there was no answer.",
    ("method", "code"),
)
OPERATOR_CONDITION = Metric(
    "baton_operator_condition",
    "gauge",
    "1 for the status that a condition of a service has.",
    ("namespace", "service", "type", "status"),
)
OPERATOR_DESIRED = Metric(
    "baton_operator_desired_replicas",
    "gauge",
    "Pods that a role of a service is to have.",
    ("namespace", "service", "role"),
)
OPERATOR_READY = Metric(
    "baton_operator_ready_replicas",
    "gauge",
    "Pods of a role of a service that are ready.",
    ("namespace", "service", "role"),
)
OPERATOR_WEIGHT = Metric(
    "baton_operator_generation_weight",
    "gauge",
    "How many of a hundred requests a generation of workers gets.",
    ("namespace", "service", "revision"),
)
OPERATOR_ROLLBACKS = Metric(
    "baton_operator_rollbacks_total",
    "counter",
    "Generations that failed and were taken back.",
    ("namespace", "service"),
)
