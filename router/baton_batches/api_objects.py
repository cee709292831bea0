"""Files and batches in OpenAI's API: requests parsed and checked, objects rendered with every key present."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_api import limits
from baton_api.batch_jobs import DAY, OWN
from baton_api.errors import INVALID_TYPE, INVALID_VALUE, MISSING_REQUIRED_PARAMETER, InvalidRequest
from baton_api.limits import Limit
from baton_batches.files import PURPOSES
from baton_batches.values import BatchRecord, StoredFile

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ORDERS = ("desc", "asc")
ANCHOR = "created_at"

BATCH_FILE_S = 30 * 86_400
"""Default lifetime of a batch input file, in seconds. Other files stay until they are deleted."""

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The requested page of a list."""

    limit: int
    after: str
    newest_first: bool = True
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None
    output_seconds: int | None


def parse_page(query: Mapping[str, str], most: Limit, default: int) -> PageQuery:
    """Raises InvalidRequest."""
    raw = query.get("limit", "")
    limit = _integer(raw, "limit", most) if raw else default
    order = query.get("order") or ORDERS[0]
    if order not in ORDERS:
        raise _invalid_choice("order", ORDERS)
    return PageQuery(limit, query.get("after", ""), order == ORDERS[0], query.get("purpose", ""))


def parse_upload(fields: Mapping[str, str], now: int) -> tuple[str, int | None]:
    """The purpose of an uploaded file, and when it expires. Raises InvalidRequest."""
    purpose = fields.get("purpose")
    if not purpose:
        raise _missing("purpose")
    if purpose not in PURPOSES:
        raise _invalid_choice("purpose", PURPOSES)
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, now + BATCH_FILE_S if purpose == "batch" else None
    if anchor != ANCHOR:
        raise (
            _missing("expires_after[anchor]")
            if anchor is None
            else _invalid_choice("expires_after[anchor]", (ANCHOR,))
        )
    if seconds is None:
        raise _missing("expires_after[seconds]")
    return purpose, now + _integer(seconds, "expires_after[seconds]", limits.EXPIRES_AFTER)


def parse_new_batch(body: bytes) -> NewBatch:
    """Raises InvalidRequest."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("The body is not valid JSON.") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("The body must be a JSON object.")
    file = _text(fields, "input_file_id")
    endpoint = _text(fields, "endpoint")
    if endpoint not in ENDPOINTS:
        raise _invalid_choice("endpoint", ENDPOINTS)
    window = _text(fields, "completion_window")
    if window != DAY:
        message = (
            f"completion_window must be {DAY}, not {window[:100]!r}. Set {OWN} for a time from 60s to 30d."
        )
        raise InvalidRequest(message, param="completion_window", code=INVALID_VALUE)
    if fields.get(OWN) is not None:
        window = _text(fields, OWN)
        if window_seconds(window) is None:
            message = f"{OWN} must be a time from 60s to 30d, such as 90m, not {window[:100]!r}."
            raise InvalidRequest(message, param=OWN, code=INVALID_VALUE)
    return NewBatch(
        file,
        endpoint,
        window,
        _metadata(fields.get("metadata")),
        _expiry(fields.get("output_expires_after")),
    )


def parse_byte_range(header: str, size: int) -> tuple[int, int] | None:
    """
    Return start and end of the requested range; None if it lies outside of the file.

    Any other header than a single range of bytes returns the whole file.

    >>> parse_byte_range("bytes=2-3", 10), parse_byte_range("bytes=-3", 10), parse_byte_range("bytes=10-", 10)
    ((2, 4), (7, 10), None)
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[0] == "bytes=-":
        return 0, size
    first, last = match[1], match[2]
    if not first:
        return (max(0, size - int(last)), size) if int(last) and size else None
    if last and int(last) < int(first):
        return 0, size
    start, end = int(first), min(int(last) + 1, size) if last else size
    return (start, end) if start < size else None


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise _missing(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string.", param=name, code=INVALID_TYPE)
    return value


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("metadata must be an object.", param="metadata", code=INVALID_TYPE)
    if len(value) > limits.METADATA.most:
        message = f"metadata has {len(value)} members and may have {limits.METADATA.most}."
        raise InvalidRequest(message, param="metadata", code=limits.METADATA.code)
    for key, one in value.items():
        where = f"metadata.{key[:100]}"
        if not isinstance(one, str):
            raise InvalidRequest(f"{where} must be a string.", param=where, code=INVALID_TYPE)
        for text, limit in ((key, limits.METADATA_KEY), (one, limits.METADATA_VALUE)):
            if len(text) > limit.most:
                message = f"{where} has {len(text)} characters and may have {limit.most}."
                raise InvalidRequest(message, param=where, code=limit.code)
    return value


def _expiry(value: Any) -> int | None:
    if value is None:
        return None
    name = "output_expires_after"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object.", param=name, code=INVALID_TYPE)
    if _text({f"{name}.{key}": one for key, one in value.items()}, f"{name}.anchor") != ANCHOR:
        raise _invalid_choice(f"{name}.anchor", (ANCHOR,))
    seconds = value.get("seconds")
    if seconds is None:
        raise _missing(f"{name}.seconds")
    if isinstance(seconds, float) and seconds.is_integer():
        seconds = int(seconds)
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise InvalidRequest(
            f"{name}.seconds must be a whole number.", param=f"{name}.seconds", code=INVALID_TYPE
        )
    return _within(seconds, f"{name}.seconds", limits.EXPIRES_AFTER)


def _integer(text: str, name: str, limit: Limit) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise InvalidRequest(f"{name} must be a whole number.", param=name, code=INVALID_TYPE)
    return _within(int(text), name, limit)


def _within(number: int, name: str, limit: Limit) -> int:
    if number > limit.most:
        raise InvalidRequest(f"{name} must be at most {limit.most}.", param=name, code=limit.code)
    if number < limit.least:
        raise InvalidRequest(f"{name} must be at least {limit.least}.", param=name, code=limit.code_below)
    return number


def _missing(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{name}'.", param=name, code=MISSING_REQUIRED_PARAMETER
    )


def _invalid_choice(name: str, values: tuple[str, ...]) -> InvalidRequest:
    message = f"{name} must be one of {', '.join(values)}."
    return InvalidRequest(message, param=name, code=INVALID_VALUE)


MIN_WINDOW_S, MAX_WINDOW_S = 60, 30 * 86_400

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_seconds(window: str) -> int | None:
    """
    Seconds of a completion window; None if it is invalid.

    >>> [window_seconds(text) for text in ("24h", "90s", "30d", "59s", "soon")]
    [86400, 90, 2592000, None, None]
    """
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    if match is None:
        return None
    whole = int(match[1]) * _UNITS[match[2]]
    return whole if MIN_WINDOW_S <= whole <= MAX_WINDOW_S else None


JsonObject = dict[str, Any]


def render_file(stored: StoredFile) -> JsonObject:
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


def render_deleted(id: str) -> JsonObject:
    return {"id": id, "object": "file", "deleted": True}


def render_batch(batch_record: BatchRecord) -> JsonObject:
    # Results of validation count only after the whole file is valid.
    validated = batch_record.in_progress_at is not None
    counts = {"total": batch_record.total, "completed": batch_record.completed, "failed": batch_record.failed}
    errors = [msgspec.to_builtins(error) for error in batch_record.errors]
    return {
        "id": batch_record.id,
        "object": "batch",
        "endpoint": batch_record.endpoint,
        "model": batch_record.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch_record.input_file,
        "completion_window": batch_record.completion_window,
        "status": batch_record.status.value,
        "output_file_id": batch_record.output_file,
        "error_file_id": batch_record.error_file,
        "created_at": batch_record.created_at,
        "in_progress_at": batch_record.in_progress_at,
        "expires_at": batch_record.expires_at,
        "finalizing_at": batch_record.finalizing_at,
        "completed_at": batch_record.completed_at,
        "failed_at": batch_record.failed_at,
        "expired_at": batch_record.expired_at,
        "cancelling_at": batch_record.cancelling_at,
        "cancelled_at": batch_record.cancelled_at,
        "request_counts": counts if validated else dict.fromkeys(counts, 0),
        "usage": batch_record.usage and _usage(batch_record.usage),
        "metadata": batch_record.metadata,
    }


def render_page(objects: Iterable[JsonObject], has_more: bool) -> JsonObject:
    shown = list(objects)
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }


def _usage(counts: dict[str, int]) -> JsonObject:
    return {
        "input_tokens": counts["input_tokens"],
        "input_tokens_details": {"cached_tokens": counts["cached_tokens"]},
        "output_tokens": counts["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": counts["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }
