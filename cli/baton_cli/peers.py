"""
The flags of SGLang, vLLM and their routers.

A flag with the meaning of a setting is an alias of it. Other flags are rejected with an alternative or a
reason: ignoring them silently would hide a missing feature. Names are those of SGLang 0.5, sglang-router 0.3
and vLLM 0.33.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from baton_cli.refusals import REFUSALS

WORKER_ALIASES = {
    "max_model_len": ("--context-length",),
    "tensor_parallel_size": ("--tp-size", "--tp"),
    "graph_rows": ("--cuda-graph-max-bs", "--max-cudagraph-capture-size"),
    "max_running": ("--max-running-requests", "--max-num-seqs"),
    "max_queued": ("--max-queued-requests", "--max-num-queued-reqs"),
    "kv_cache_memory": ("--kv-cache-memory-bytes",),
    "kv_cache_tokens": ("--max-total-tokens",),
    "memory_share": ("--mem-fraction-static", "--gpu-memory-utilization"),
    "chunk_tokens": ("--chunked-prefill-size", "--max-num-batched-tokens"),
    "seed": ("--random-seed",),
    "cache_report": ("--enable-cache-report", "--enable-prompt-tokens-details"),
    "stream_include_usage": ("--stream-response-default-include-usage",),
    "log_requests": ("--enable-log-requests",),
    "log_requests_length": ("--max-log-len",),
    "control_port": ("--disaggregation-bootstrap-port",),
    "allowed_origins": ("--cors-allowed-origins",),
    "lora_modules": ("--lora-paths",),
    "max_loras": ("--max-loaded-loras", "--max-cpu-loras"),
}

ROUTER_ALIASES = {
    "decode": ("--worker-urls",),
    "retries": ("--retry-max-retries",),
    "answer_s": ("--request-timeout-secs",),
    "max_body": ("--max-payload-size",),
    "health_interval_s": ("--health-check-interval-secs",),
    "health_misses": ("--health-failure-threshold",),
    "drain_s": ("--shutdown-grace-period-secs",),
    "allowed_origins": ("--cors-allowed-origins",),
}

DEPRECATED = {
    "--alone-tokens": "--local-prefill-max-tokens",
    "--page": "--dashboard",
    "--no-page": "--no-dashboard",
    "--scheduler-patience-s": "--scheduler-timeout-s",
}
"""Flags of 0.1.0 and their new names. The next version removes the old ones."""

ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "WorkerSettings": WORKER_ALIASES,
    "RouterSettings": ROUTER_ALIASES,
}
"""By settings class: the field and its aliases."""

NOTES = {
    "model": "Same as the argument MODEL.",
    "memory_share": "Fraction of the memory that is free at startup. In vLLM: of the whole device.",
    "kv_cache_tokens": "Rounded up to whole blocks of 16 tokens.",
    "chunk_tokens": "Limits all tokens of a forward pass. -1 is not supported: use a large number instead.",
    "cache_report": "Enabled by default; disable it with --no-cache-report.",
    "stream_include_usage": "Requests can override it.",
    "log_requests": "Logs no text unless --log-requests-level is 2.",
    "seed": "Determines the seeds of requests without one.",
    "control_port": "Prefill workers only.",
    "lora_modules": "NAME=PATH. JSON objects and paths without a name are not supported.",
    "max_loras": "One batch may use all loaded adapters. In vLLM: the adapters of one batch.",
    "decode": "One URL per flag, repeatable. Use --prefill for prefill workers.",
    "max_body": "Bytes, or a size with a unit.",
}


def aliases(settings: type, field: str) -> tuple[str, ...]:
    """Return the aliases of a setting."""
    return ALIASES.get(settings.__name__, {}).get(field, ())


def flags(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return a mapping of aliases to Baton's flags."""
    own = {other: "--" + field.replace("_", "-") for field, others in table.items() for other in others}
    return own | {"--model": "--model-path"}


def refusal(flag: str, flags: Collection[str], command: str) -> str:
    """Return the error message for a flag that a command does not have."""
    spelled = flag.replace("_", "-")
    for one in REFUSALS:
        if one.covers(spelled):
            return f"Baton does not support {flag}: {one.reason}."
    close = difflib.get_close_matches(spelled, flags, n=2)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"`baton {command}` has no flag {flag[:60]}.{hint} `baton {command} --help` lists all flags."
