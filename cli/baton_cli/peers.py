"""
The flags of SGLang, vLLM and their routers.

A flag with the meaning of a setting is an alias of it. Other flags are rejected, because ignoring them
silently would hide a missing feature; for the frequent ones the error names Baton's way. Names are those of
SGLang 0.5, sglang-router 0.3 and vLLM 0.33.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

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
    "draft_model": ("--speculative-draft-model-path",),
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

MORE_WORKERS = "start more workers (`baton up --decode 4`)"
ROLES = "use `baton prefill` and `baton decode`, or `baton up` for both"
EAGER = "--graph-rows 0 disables CUDA graphs"
DRAFTS = "--speculation mtp, eagle3, draft or ngram"
CACHED = "the prefix cache is always on and does not change answers"

INSTEAD = {
    "--data-parallel-size": MORE_WORKERS,
    "--dp-size": MORE_WORKERS,
    "--disable-cuda-graph": EAGER,
    "--enforce-eager": EAGER,
    "--disable-radix-cache": CACHED,
    "--enable-prefix-caching": CACHED,
    "--speculative-config": DRAFTS,
    "--speculative-algorithm": DRAFTS,
    "--disaggregation-mode": ROLES,
    "--kv-transfer-config": ROLES,
    "--enable-auto-tool-choice": "--tool-call-parser is sufficient",
    "--quantization": "the format is detected; --quantize converts weights while they load",
    "--revision": "download it with `baton fetch --revision` and use the folder as MODEL",
    "--trust-remote-code": "Baton runs no code from the folder of a model",
}
"""Frequent flags of launch lines that have no equal setting, and what to do."""

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
    "control_port": "Prefill and decode workers only.",
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
    translated = {
        other: "--" + field.replace("_", "-") for field, others in table.items() for other in others
    }
    return translated | {"--model": "--model-path"}


def refusal(flag: str, flags: Collection[str], command: str) -> str:
    """Return the error message for a flag that a command does not have."""
    spelled = flag.replace("_", "-")
    if spelled in INSTEAD:
        return f"Baton does not support {flag}: {INSTEAD[spelled]}."
    close = difflib.get_close_matches(spelled, flags, n=2)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"`baton {command}` has no flag {flag[:60]}.{hint} `baton {command} --help-all` lists all flags."
