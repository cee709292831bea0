"""
The flags of SGLang, vLLM and their routers, for whoever comes with a launch line from there.

A flag that means what one of our settings means is another name for it. One that means nothing here is
refused with what to use instead, or why nothing is needed: a flag that is taken and ignored would have
somebody wait for what never comes. Names are those of SGLang 0.5, sglang-router 0.3 and vLLM 0.33.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from baton_cli.refusals import REFUSALS

WORKER_ALIASES = {
    "max_model_len": ("--context-length",),
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
}
"""Flags of 0.1.0 and their new names. The next version removes the old ones."""

ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "WorkerSettings": WORKER_ALIASES,
    "RouterSettings": ROUTER_ALIASES,
}
"""By the settings' class: the field, and what others call it."""

NOTES = {
    "model": "The argument MODEL may be given by a flag too.",
    "memory_share": "Of what was free at start; vLLM takes its share of the whole device.",
    "kv_cache_tokens": "Rounded up to whole blocks of 16 tokens.",
    "chunk_tokens": "Bounds all tokens of one pass. There is no -1: a large number computes prompts whole.",
    "cache_report": "On already, as OpenAI has it; --no-cache-report turns it off.",
    "stream_include_usage": "A request may still say no.",
    "log_requests": "Without text: --log-requests-level 2 adds it.",
    "seed": "Draws the seeds of requests that have none.",
    "control_port": "Of a prefill worker.",
    "decode": "Repeated, one URL at a time; --prefill names prefill workers.",
    "max_body": "Bytes.",
}


def aliases(settings: type, field: str) -> tuple[str, ...]:
    """What others call a field of `settings`."""
    return ALIASES.get(settings.__name__, {}).get(field, ())


def flags(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """From what others call a flag to what it is called here."""
    own = {other: "--" + field.replace("_", "-") for field, others in table.items() for other in others}
    return own | {"--model": "--model-path"}


def refusal(flag: str, known: Collection[str], command: str) -> str:
    """What to tell whoever gave `flag`, which is none of the `known` ones."""
    spelled = flag.replace("_", "-")
    for one in REFUSALS:
        if one.covers(spelled):
            return f"{flag} is no flag of Baton: {one.reason}."
    close = difflib.get_close_matches(spelled, known, n=2)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"`baton {command}` has no flag {flag[:60]}.{hint} `baton {command} --help` shows all."
