"""A worker's metrics: what its clients saw, what its engine does, its cache, and blocks that come over."""

from __future__ import annotations

from baton_api.metrics.metric import (
    FIRST_TOKEN_BUCKETS,
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TOKEN_BUCKETS,
    TRANSFER_BUCKETS,
    Label,
    Metric,
)
from baton_api.reports import Fallback

TRANSPORT = Label(
    "transport", bound="ways by which a read can go, such as nixl/ucx shm; none before the first read: 8"
)
FAILURES = tuple(one.value for one in Fallback)
CHOSEN = ("no_prefill_worker", "reads_prompt", "short", "cached")
"""Why a prompt is computed where it is wanted, without anything having failed."""

WORKER_INFO = Metric(
    "baton_worker_info",
    "gauge",
    "yes or no",
    "Always 1: what this worker is called, its role, and the model that it serves.",
    (
        Label("worker", bound="this worker's name, one"),
        Label("role", ("both", "prefill", "decode")),
        Label("model", bound="the name that stands in answers, one"),
    ),
)

# --- What its clients saw ---

WORKER_REQUESTS = Metric(
    "baton_worker_requests_total",
    "counter",
    "requests",
    "Choices of requests that ended, by how: stop, length, abort (the client went away) or error.",
    (Label("finish_reason", ("stop", "length", "abort", "error")),),
)
WORKER_PROMPT_TOKENS = Metric(
    "baton_worker_prompt_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens by where their KV came from: computed here, remote (by a prefill worker), cached.",
    (Label("source", ("computed", "remote", "cached")),),
)
WORKER_GENERATION_TOKENS = Metric(
    "baton_worker_generation_tokens_total", "counter", "tokens", "Tokens generated for clients."
)
WORKER_PROMPT_LENGTH = Metric(
    "baton_worker_request_prompt_tokens",
    "histogram",
    "tokens",
    "Lengths of the prompts of requests that ended.",
    buckets=LENGTH_BUCKETS,
)
WORKER_GENERATION_LENGTH = Metric(
    "baton_worker_request_generation_tokens",
    "histogram",
    "tokens",
    "Lengths of the answers of requests that ended, one for each choice.",
    buckets=LENGTH_BUCKETS,
)
WORKER_FIRST_TOKEN = Metric(
    "baton_worker_time_to_first_token_seconds",
    "histogram",
    "seconds",
    "From a request's arrival to its first token.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_TOKEN = Metric(
    "baton_worker_inter_token_latency_seconds",
    "histogram",
    "seconds",
    "Between two tokens of one sequence.",
    buckets=TOKEN_BUCKETS,
)
WORKER_REQUEST_TIME = Metric(
    "baton_worker_request_seconds",
    "histogram",
    "seconds",
    "From a request's arrival to its last token.",
    buckets=REQUEST_BUCKETS,
)
WORKER_DECODE_TIME = Metric(
    "baton_worker_decode_seconds",
    "histogram",
    "seconds",
    "From a request's first token to its last one.",
    buckets=REQUEST_BUCKETS,
)

# --- Its engine ---

WORKER_RUNNING = Metric("baton_worker_requests_running", "gauge", "requests", "Sequences in the batch.")
WORKER_RUNNING_LIMIT = Metric(
    "baton_worker_requests_running_limit", "gauge", "requests", "Most sequences that the batch can have."
)
WORKER_QUEUED = Metric(
    "baton_worker_requests_queued", "gauge", "requests", "Sequences that wait to be in the batch."
)
WORKER_FETCHING = Metric(
    "baton_worker_requests_fetching",
    "gauge",
    "requests",
    "Sequences whose prompt is being brought from a prefill worker.",
)
WORKER_HELD = Metric(
    "baton_worker_requests_held",
    "gauge",
    "requests",
    "Computed prompts whose blocks wait to be pulled by a decode worker.",
)
WORKER_QUEUED_TOKENS = Metric(
    "baton_worker_queued_tokens", "gauge", "tokens", "Prompt tokens that have still to be computed."
)
WORKER_QUEUE_TIME = Metric(
    "baton_worker_queue_seconds",
    "histogram",
    "seconds",
    "From a prompt's arrival at the engine that computes it to its first pass.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_PREFILL_TIME = Metric(
    "baton_worker_prefill_seconds",
    "histogram",
    "seconds",
    "From a prompt's first pass in the engine that computes it to its first token.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_GENERATION_RATE = Metric(
    "baton_worker_generation_tokens_per_second",
    "gauge",
    "tokens per second",
    "Tokens drawn, averaged over about the last ten seconds.",
)
WORKER_PROMPT_RATE = Metric(
    "baton_worker_prompt_tokens_per_second",
    "gauge",
    "tokens per second",
    "Prompt tokens computed, averaged over about the last ten seconds.",
)
WORKER_RETRACTIONS = Metric(
    "baton_worker_retractions_total",
    "counter",
    "requests",
    "Times a sequence gave its blocks back to go on later.",
)
WORKER_STEP = Metric(
    "baton_worker_step_seconds",
    "histogram",
    "seconds",
    "Time of one engine step, the forward pass included.",
    buckets=STEP_BUCKETS,
)
WORKER_FORWARD = Metric(
    "baton_worker_forward_seconds",
    "histogram",
    "seconds",
    "Time of one forward pass; what a step takes beyond it is the engine's own.",
    buckets=STEP_BUCKETS,
)

# --- Its KV cache ---

WORKER_BLOCKS = Metric(
    "baton_worker_kv_blocks",
    "gauge",
    "blocks",
    "KV blocks by state: free, cached, owned, pinned, quarantined.",
    (Label("state", ("free", "cached", "owned", "pinned", "quarantined")),),
)
WORKER_KV_USAGE = Metric(
    "baton_worker_kv_usage_ratio", "gauge", "ratio", "Share of the KV blocks that a new request cannot have."
)
WORKER_CACHE_QUERIES = Metric(
    "baton_worker_prefix_cache_queries_total",
    "counter",
    "tokens",
    "Prompt tokens that were looked for in the prefix cache.",
)
WORKER_CACHE_HITS = Metric(
    "baton_worker_prefix_cache_hits_total", "counter", "tokens", "Those of them that were found."
)
WORKER_CACHE_EVICTIONS = Metric(
    "baton_worker_prefix_cache_evictions_total",
    "counter",
    "blocks",
    "Blocks of known content that were dropped to make room.",
)
WORKER_KV_BATCHES = Metric(
    "baton_worker_kv_event_batches_total",
    "counter",
    "events",
    "Batches of KV events published, empty ones included.",
)

# --- KV blocks that come from a prefill worker ---

WORKER_TRANSFER_BYTES = Metric(
    "baton_worker_transfer_bytes_total",
    "counter",
    "bytes",
    "Bytes of KV blocks pulled from prefill workers.",
    (TRANSPORT,),
)
WORKER_TRANSFER_SECONDS = Metric(
    "baton_worker_transfer_seconds",
    "histogram",
    "seconds",
    "Time in which at least one read of a prompt's blocks was under way; one for each prompt that came over.",
    (TRANSPORT,),
    TRANSFER_BUCKETS,
)
WORKER_TRANSFER_FAILURES = Metric(
    "baton_worker_transfer_failures_total",
    "counter",
    "requests",
    "Prompts that did not come over whole, by reason; the rest was computed here.",
    (TRANSPORT, Label("reason", FAILURES)),
)
WORKER_QUARANTINES = Metric(
    "baton_worker_quarantined_blocks_total",
    "counter",
    "blocks",
    "Blocks set aside because a read of them was given up before it had ended.",
    (TRANSPORT,),
)
WORKER_LOCAL_PREFILLS = Metric(
    "baton_worker_local_prefills_total",
    "counter",
    "requests",
    "Prompts that a decode worker computed itself, by reason: chosen so, or because a transfer failed.",
    (Label("reason", (*CHOSEN, *FAILURES)),),
)

# --- Its certificate ---

WORKER_CERTIFICATE_END = Metric(
    "baton_worker_certificate_end_timestamp_seconds",
    "gauge",
    "seconds",
    "Unix time at which the certificate ends that this process shows to routers; nothing without one.",
)
WORKER_CERTIFICATE_LIFE = Metric(
    "baton_worker_certificate_life_seconds",
    "gauge",
    "seconds",
    "From the begin to the end of that certificate.",
)
