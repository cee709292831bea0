"""Files and batches as OpenAI's API shows them: every key there, null where there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton_batches.values import Batch, StoredFile

Shown = dict[str, Any]


def file(stored: StoredFile) -> Shown:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": stored.created_at,
        "expires_at": stored.expires_at,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }


def deleted(id: str) -> Shown:
    return {"id": id, "object": "file", "deleted": True}


def batch(kept: Batch) -> Shown:
    # What was answered while the file was still being read counts once it is known to be a batch.
    known = kept.in_progress_at is not None
    counts = {"total": kept.total, "completed": kept.completed, "failed": kept.failed}
    errors = [msgspec.to_builtins(error) for error in kept.errors]
    return {
        "id": kept.id,
        "object": "batch",
        "endpoint": kept.endpoint,
        "model": kept.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": kept.input_file,
        "completion_window": kept.completion_window,
        "status": kept.status.value,
        "output_file_id": kept.output_file,
        "error_file_id": kept.error_file,
        "created_at": kept.created_at,
        "in_progress_at": kept.in_progress_at,
        "expires_at": kept.expires_at,
        "finalizing_at": kept.finalizing_at,
        "completed_at": kept.completed_at,
        "failed_at": kept.failed_at,
        "expired_at": kept.expired_at,
        "cancelling_at": kept.cancelling_at,
        "cancelled_at": kept.cancelled_at,
        "request_counts": counts if known else dict.fromkeys(counts, 0),
        "usage": kept.usage and _usage(kept.usage),
        "metadata": kept.metadata,
    }


def page(shown: Sequence[Shown], has_more: bool) -> Shown:
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }


def _usage(counts: dict[str, int]) -> Shown:
    return {
        "input_tokens": counts["input_tokens"],
        "input_tokens_details": {"cached_tokens": counts["cached_tokens"]},
        "output_tokens": counts["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": counts["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }
