"""
What a worker tells of itself: `/version`, `/model_info` and `/server_info`.

Settings are shown by name, and those that are secrets are left out, whatever they hold. Names of other
servers' answers that tools look for are given besides our own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_api import __version__
from baton_api.workers import Role
from baton_engine.api.served import Served

SECRETS = frozenset({"api_key", "api_key_file", "ticket_secret"})
"""Settings that nobody is told."""

_FIGURES = (
    "running", "queued", "fetching", "held", "queued_tokens", "block_size", "total_blocks", "free_blocks",
    "cached_blocks", "owned_blocks", "pinned_blocks", "quarantined_blocks", "generated_per_s",
    "computed_per_s",
)  # fmt: skip


def model_card(served: Served, name: str) -> dict[str, Any]:
    """One model of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "baton",
        "root": served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
    }


def version() -> dict[str, Any]:
    return {"version": __version__, "server": "baton"}


def model_info(served: Served) -> dict[str, Any]:
    settings, vocabulary = served.settings, served.vocabulary
    return {
        "model_path": settings.model,
        "served_model_name": served.name,
        "served_model_names": served.names,
        "tokenizer_path": settings.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "max_model_len": served.max_model_len,
        "vocab_size": vocabulary.size,
        "eos_token_ids": vocabulary.eos_ids,
        "has_chat_template": bool(settings.chat_template or served.tokenizer.chat_template),
        "reasoning_parser": settings.reasoning_parser or None,
        "tool_call_parser": settings.tool_call_parser or None,
        "disaggregation_mode": "null" if settings.role is Role.BOTH else settings.role,
    }


def server_info(served: Served) -> dict[str, Any]:
    """Settings and the engine's figures of this moment."""
    settings = served.settings.model_dump(mode="json", exclude=set(SECRETS))
    snapshot = served.engine.snapshot()
    return {
        **version(),
        "status": served.not_ready() or "ready",
        "started": served.created,
        **model_info(served),
        "max_total_num_tokens": snapshot.total_blocks * snapshot.block_size,
        "settings": settings,
        "figures": {name: getattr(snapshot, name) for name in _FIGURES}
        | {"totals": msgspec.to_builtins(snapshot.totals)},
    }
