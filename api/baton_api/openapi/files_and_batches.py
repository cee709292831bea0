"""Schemas of files and batches, which only routers serve."""

from __future__ import annotations

from baton_api import limits
from baton_api.completion_windows import DAY, OWN
from baton_api.openapi.values import (
    BOOLEAN,
    COUNT,
    OBJECT,
    TEXT,
    Schema,
    array,
    exactly,
    full,
    integer,
    mapping,
    nullable,
    one_of,
    optional,
    record,
    ref,
    text,
)

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
STATUSES = (
    *("validating", "failed", "in_progress", "finalizing"),
    *("completed", "expired", "cancelling", "cancelled"),
)
TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)
WINDOW: Schema = {"type": "string", "pattern": "^[1-9][0-9]{0,6}[smhd]$", "examples": ["24h"]}


def schemas() -> dict[str, Schema]:
    """Return all schemas of files and batches by name."""
    return _files() | _batches()


def _files() -> dict[str, Schema]:
    return {
        "FileUpload": record(
            {
                "file": {"type": "string", "format": "binary", "minLength": 1},
                "purpose": one_of(*PURPOSES),
                "expires_after[anchor]": exactly("created_at"),
                "expires_after[seconds]": integer(limits.EXPIRES_AFTER),
            },
            ["file", "purpose"],
        )
        | {"dependentRequired": _both("expires_after[anchor]", "expires_after[seconds]")},
        "File": full({
            "id": {"type": "string", "pattern": "^file-"},
            "object": exactly("file"),
            "bytes": COUNT,
            "created_at": COUNT,
            "expires_at": nullable(COUNT),
            "filename": TEXT | {"minLength": 1},
            "purpose": one_of(*PURPOSES, "batch_output"),
            "status": exactly("processed"),
        }),
        "Files": _list("File"),
        "FileDeleted": full({"id": TEXT, "object": exactly("file"), "deleted": BOOLEAN}),
    }  # fmt: skip


def _batches() -> dict[str, Schema]:
    metadata = mapping(text(limits.METADATA_VALUE), limits.METADATA)
    metadata["propertyNames"] = {"maxLength": limits.METADATA_KEY.most}
    expiry = record(
        {"anchor": exactly("created_at"), "seconds": integer(limits.EXPIRES_AFTER)}, ["anchor", "seconds"]
    )
    return {
        "BatchRequest": record(
            {
                "input_file_id": TEXT,
                "endpoint": one_of(*ENDPOINTS),
                "completion_window": exactly(DAY),
            }
            | optional(metadata=metadata, output_expires_after=expiry, **{OWN: WINDOW}),
            ["input_file_id", "endpoint", "completion_window"],
        ),
        "Batch": full({
            "id": {"type": "string", "pattern": "^batch_"},
            "object": exactly("batch"),
            "endpoint": one_of(*ENDPOINTS),
            "model": nullable(TEXT),
            "errors": nullable(full({"object": exactly("list"), "data": array(_line_error(), least=1)})),
            "input_file_id": TEXT,
            "completion_window": WINDOW,
            "status": one_of(*STATUSES),
            "output_file_id": nullable(TEXT),
            "error_file_id": nullable(TEXT),
            "created_at": COUNT,
            "expires_at": COUNT,
            **dict.fromkeys(TIMES, nullable(COUNT)),
            "request_counts": full({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "usage": nullable(OBJECT),
            "metadata": nullable(mapping(TEXT)),
        }),
        "Batches": _list("Batch"),
    }  # fmt: skip


def _list(name: str) -> Schema:
    ends = {"first_id": nullable(TEXT), "last_id": nullable(TEXT), "has_more": BOOLEAN}
    return full({"object": exactly("list"), "data": array(ref(name)), **ends})


def _line_error() -> Schema:
    return full({"code": TEXT, "message": TEXT, "param": nullable(TEXT), "line": nullable(COUNT)})


def _both(first: str, second: str) -> dict[str, list[str]]:
    return {first: [second], second: [first]}
