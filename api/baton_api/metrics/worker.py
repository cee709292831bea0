"""Metrics of a worker: requests, engine, KV cache, and transfers of KV blocks."""

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
from baton_api.prompt_report import Fallback

TRANSPORT = Label("transport", bound="8 transports, such as nixl/ucx shm; empty before the first read")
TIERS = ("memory", "disk", "shared")
"""Tiers behind the KV cache of Baton's workers."""

TIER = Label("tier", TIERS)
FAILURES = tuple(reason.value for reason in Fallback)
CHOSEN = ("no_prefill_worker", "reads_prompt", "short", "cached")
"""Reasons other than failures for which a decode worker computes a prompt."""

WORKER_INFO = Metric(
    "baton_worker_info",
    "gauge",
    "yes or no",
    "Always 1. The labels are the worker's name, its role and its model.",
    (
        Label("worker", bound="one"),
        Label("role", ("both", "prefill", "decode")),
        Label("model", bound="one, as in responses"),
    ),
)

# --- Requests ---

WORKER_REQUESTS = Metric(
    "baton_worker_requests_total",
    "counter",
    "requests",
    "Finished choices by finish reason. `abort`: the client closed the connection.",
    (Label("finish_reason", ("stop", "length", "abort", "error")),),
)
WORKER_PROMPT_TOKENS = Metric(
    "baton_worker_prompt_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens by the source of their KV blocks: computed by this worker, by a prefill worker "
    "(`remote`), cached, read from the cache of another worker (`peer`), or restored from a tier (`memory`, "
    "`disk`).",
    (Label("source", ("computed", "remote", "cached", "peer", *TIERS)),),
)
WORKER_GENERATION_TOKENS = Metric(
    "baton_worker_generation_tokens_total", "counter", "tokens", "Generated tokens."
)
WORKER_PROMPT_LENGTH = Metric(
    "baton_worker_request_prompt_tokens",
    "histogram",
    "tokens",
    "Prompt length of finished requests.",
    buckets=LENGTH_BUCKETS,
)
WORKER_GENERATION_LENGTH = Metric(
    "baton_worker_request_generation_tokens",
    "histogram",
    "tokens",
    "Output length of finished requests, per choice.",
    buckets=LENGTH_BUCKETS,
)
WORKER_FIRST_TOKEN = Metric(
    "baton_worker_time_to_first_token_seconds",
    "histogram",
    "seconds",
    "Time from a request's arrival to its first token.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_TOKEN = Metric(
    "baton_worker_inter_token_latency_seconds",
    "histogram",
    "seconds",
    "Time between two tokens of a sequence.",
    buckets=TOKEN_BUCKETS,
)
WORKER_REQUEST_TIME = Metric(
    "baton_worker_request_seconds",
    "histogram",
    "seconds",
    "Time from a request's arrival to its last token.",
    buckets=REQUEST_BUCKETS,
)
WORKER_DECODE_TIME = Metric(
    "baton_worker_decode_seconds",
    "histogram",
    "seconds",
    "Time from a request's first token to its last token.",
    buckets=REQUEST_BUCKETS,
)

# --- Engine ---

WORKER_RUNNING = Metric("baton_worker_requests_running", "gauge", "requests", "Sequences in the batch.")
WORKER_RUNNING_LIMIT = Metric(
    "baton_worker_requests_running_limit", "gauge", "requests", "Maximum sequences in the batch."
)
WORKER_QUEUED = Metric("baton_worker_requests_queued", "gauge", "requests", "Sequences in the queue.")
WORKER_FETCHING = Metric(
    "baton_worker_requests_fetching",
    "gauge",
    "requests",
    "Sequences whose prompt a prefill worker is computing or transferring, or of which blocks are read "
    "from another worker's cache.",
)
WORKER_HELD = Metric(
    "baton_worker_requests_held",
    "gauge",
    "requests",
    "Computed prompts whose blocks wait for the reads of a decode worker.",
)
WORKER_QUEUED_TOKENS = Metric(
    "baton_worker_queued_tokens", "gauge", "tokens", "Prompt tokens left to compute."
)
WORKER_QUEUE_TIME = Metric(
    "baton_worker_queue_seconds",
    "histogram",
    "seconds",
    "Time from a prompt's arrival at the engine that computes it to its first forward pass.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_PREFILL_TIME = Metric(
    "baton_worker_prefill_seconds",
    "histogram",
    "seconds",
    "Time from a prompt's first forward pass to its first token, in the engine that computes it.",
    buckets=FIRST_TOKEN_BUCKETS,
)
WORKER_GENERATION_RATE = Metric(
    "baton_worker_generation_tokens_per_second",
    "gauge",
    "tokens per second",
    "Generated tokens per second, averaged over about ten seconds.",
)
WORKER_PROMPT_RATE = Metric(
    "baton_worker_prompt_tokens_per_second",
    "gauge",
    "tokens per second",
    "Computed prompt tokens per second, averaged over about ten seconds.",
)
WORKER_RETRACTIONS = Metric(
    "baton_worker_retractions_total",
    "counter",
    "requests",
    "Sequences that released their blocks and were queued again, because KV cache or memory was full.",
)
WORKER_OUT_OF_MEMORY = Metric(
    "baton_worker_out_of_memory_total",
    "counter",
    "events",
    "Forward passes that ran out of memory. The worker repeats their tokens in smaller passes.",
)
WORKER_DRAFTS = Metric(
    "baton_worker_drafts_total",
    "counter",
    "drafts",
    "Drafts that speculation computed: one per generating sequence and forward pass.",
)
WORKER_DRAFT_TOKENS = Metric(
    "baton_worker_draft_tokens_total",
    "counter",
    "tokens",
    "Draft tokens that speculation computed.",
)
WORKER_ACCEPTED_TOKENS = Metric(
    "baton_worker_accepted_draft_tokens_total",
    "counter",
    "tokens",
    "Draft tokens that became part of an answer. Their ratio to all draft tokens is the acceptance rate.",
)
WORKER_STEP = Metric(
    "baton_worker_step_seconds",
    "histogram",
    "seconds",
    "Time of one engine step, including the forward pass.",
    buckets=STEP_BUCKETS,
)
WORKER_FORWARD = Metric(
    "baton_worker_forward_seconds",
    "histogram",
    "seconds",
    "Time of one forward pass. The rest of a step is overhead of the engine.",
    buckets=STEP_BUCKETS,
)

# --- KV cache ---

WORKER_BLOCKS = Metric(
    "baton_worker_kv_blocks",
    "gauge",
    "blocks",
    "KV blocks by state.",
    (Label("state", ("free", "cached", "owned", "pinned", "quarantined")),),
)
WORKER_KV_USAGE = Metric(
    "baton_worker_kv_usage_ratio",
    "gauge",
    "ratio",
    "Share of KV blocks that is not available to a new request.",
)
WORKER_CACHE_QUERIES = Metric(
    "baton_worker_prefix_cache_queries_total",
    "counter",
    "tokens",
    "Prompt tokens looked up in the prefix cache.",
)
WORKER_CACHE_HITS = Metric(
    "baton_worker_prefix_cache_hits_total", "counter", "tokens", "Prompt tokens found in the prefix cache."
)
WORKER_CACHE_EVICTIONS = Metric(
    "baton_worker_prefix_cache_evictions_total",
    "counter",
    "blocks",
    "Cached blocks evicted to free memory.",
)
WORKER_PEER_CACHE_QUERIES = Metric(
    "baton_worker_external_prefix_cache_queries_total",
    "counter",
    "tokens",
    "Prompt tokens that this worker tried to read from the prefix cache of another worker.",
)
WORKER_PEER_CACHE_HITS = Metric(
    "baton_worker_external_prefix_cache_hits_total",
    "counter",
    "tokens",
    "Those of them that arrived and were verified. The others were computed.",
)
WORKER_PEER_READS = Metric(
    "baton_worker_peer_reads_total",
    "counter",
    "requests",
    "Reads from the prefix cache of another worker by outcome: `read`, or why blocks were computed instead. "
    "`rejected`: the other worker no longer had all of them.",
    (Label("outcome", ("read", *FAILURES)),),
)
WORKER_TIER_BLOCKS = Metric(
    "baton_worker_tier_blocks", "gauge", "blocks", "KV blocks in a tier behind the KV cache.", (TIER,)
)
WORKER_TIER_BYTES = Metric(
    "baton_worker_tier_bytes", "gauge", "bytes", "Size of the KV blocks in a tier.", (TIER,)
)
WORKER_TIER_LIMIT = Metric(
    "baton_worker_tier_limit_bytes", "gauge", "bytes", "Size of the KV blocks that fit into a tier.", (TIER,)
)
WORKER_TIER_QUERIES = Metric(
    "baton_worker_tier_block_queries_total",
    "counter",
    "blocks",
    "KV blocks of prompts that were not in the prefix cache, and looked up in a tier.",
    (TIER,),
)
WORKER_TIER_HITS = Metric(
    "baton_worker_tier_block_hits_total",
    "counter",
    "blocks",
    "KV blocks that were restored from a tier and verified.",
    (TIER,),
)
WORKER_TIER_READ_SECONDS = Metric(
    "baton_worker_tier_read_seconds_total", "counter", "seconds", "Time of restoring KV blocks.", (TIER,)
)
WORKER_TIER_WRITES = Metric(
    "baton_worker_tier_block_writes_total",
    "counter",
    "blocks",
    "KV blocks that were copied to a tier.",
    (TIER,),
)
WORKER_TIER_WRITE_SECONDS = Metric(
    "baton_worker_tier_write_seconds_total",
    "counter",
    "seconds",
    "Time of copying KV blocks to a tier.",
    (TIER,),
)
WORKER_TIER_DROPPED = Metric(
    "baton_worker_tier_dropped_blocks_total",
    "counter",
    "blocks",
    "KV blocks that were evicted from the prefix cache before they were copied to a tier.",
    (TIER,),
)
WORKER_TIER_CORRUPT = Metric(
    "baton_worker_tier_corrupt_blocks_total",
    "counter",
    "blocks",
    "KV blocks of a tier whose checksum was wrong. They were computed instead.",
    (TIER,),
)
WORKER_TIER_ERRORS = Metric(
    "baton_worker_tier_write_errors_total",
    "counter",
    "events",
    "Failed writes to a tier, and failures to clear or to open it.",
    (TIER,),
)
WORKER_TIER_PAUSED = Metric(
    "baton_worker_tier_paused",
    "gauge",
    "yes or no",
    "1 while a tier is left alone after a read that was late or failed, or if the last write failed, or it "
    "could not be opened.",
    (TIER,),
)
WORKER_TIER_READS = Metric(
    "baton_worker_tier_reads_total",
    "counter",
    "requests",
    "Prompts that were restored from a tier by outcome: `read`, or why blocks were computed instead.",
    (TIER, Label("outcome", ("read", *FAILURES))),
)
WORKER_KV_BATCHES = Metric(
    "baton_worker_kv_event_batches_total",
    "counter",
    "events",
    "Published KV event batches, including empty ones.",
)

# --- Transfers of KV blocks from prefill workers ---

WORKER_TRANSFER_BYTES = Metric(
    "baton_worker_transfer_bytes_total",
    "counter",
    "bytes",
    "Bytes of KV blocks read from prefill workers.",
    (TRANSPORT,),
)
WORKER_TRANSFER_SECONDS = Metric(
    "baton_worker_transfer_seconds",
    "histogram",
    "seconds",
    "Time with at least one read of a prompt's blocks in progress, per transferred prompt.",
    (TRANSPORT,),
    TRANSFER_BUCKETS,
)
WORKER_TRANSFER_FAILURES = Metric(
    "baton_worker_transfer_failures_total",
    "counter",
    "requests",
    "Prompts whose transfer failed, by reason. The decode worker computed the rest.",
    (TRANSPORT, Label("reason", FAILURES)),
)
WORKER_QUARANTINES = Metric(
    "baton_worker_quarantined_blocks_total",
    "counter",
    "blocks",
    "Blocks quarantined because a read of them was abandoned before it ended.",
    (TRANSPORT,),
)
WORKER_LOCAL_PREFILLS = Metric(
    "baton_worker_local_prefills_total",
    "counter",
    "requests",
    "Prompts that a decode worker computed itself, by reason: by choice, or after a failed transfer.",
    (Label("reason", (*CHOSEN, *FAILURES)),),
)

# --- Certificate ---

WORKER_CERTIFICATE_END = Metric(
    "baton_worker_certificate_end_timestamp_seconds",
    "gauge",
    "seconds",
    "Expiry of the certificate that this process presents to routers, in Unix seconds. Absent without a "
    "certificate.",
)
WORKER_CERTIFICATE_LIFE = Metric(
    "baton_worker_certificate_life_seconds",
    "gauge",
    "seconds",
    "Validity period of that certificate, from its start to its expiry.",
)
