"""
Items of a conversation on `/v1/responses`: messages, calls, outputs of calls, reasoning.

This module gives them ids and lists them in pages. Workers validate their content.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton_api import limits
from baton_api.errors import INVALID_VALUE, InvalidRequest

PAGE_DEFAULT = 20

REFERENCE = "item_reference"
"""Type of an item that refers to a stored one by its id."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


_ITEM = frozenset({"id", "type", "status"})
_CONTENT = frozenset({"content", "summary", "output"})
"""Fields of an item that are a text or a list of parts."""

_FIELDS = {
    "message": _ITEM | {"role", "content", "phase"},
    "reasoning": _ITEM | {"summary", "content", "encrypted_content"},
    "function_call": _ITEM | {"call_id", "name", "arguments", "namespace"},
    "function_call_output": _ITEM | {"call_id", "output"},
    "custom_tool_call": _ITEM | {"call_id", "name", "input", "namespace"},
    "custom_tool_call_output": _ITEM | {"call_id", "output"},
}
"""Fields of the items that a model reads, by type. Items of other types are stored as they are."""

_PART_FIELDS = frozenset({
    "type", "text", "annotations", "logprobs", "refusal", "image_url", "detail", "file_id", "file_url",
    "file_data", "filename", "input_audio",
})  # fmt: skip
"""Fields of the parts of content."""


def new_id(kind: str) -> str:
    """
    Create an id for an item of this type.

    >>> new_id("message")[:4], len(new_id("reasoning"))
    ('msg_', 35)
    """
    return f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


def listed(value: str | Sequence[Any]) -> list[Any]:
    """Return the `input` of a request as a list. A string becomes a user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return list(value)


def named(items: Sequence[Any]) -> tuple[bytes, ...]:
    """
    Return the items of a valid input as JSON, completed for listing, each with an id.

    Fields that the API does not have are left out: they would take memory and have no effect.
    """
    return tuple(msgspec.json.encode(_named(item)) for item in items)


def _named(item: dict[str, Any]) -> dict[str, Any]:
    kind, id = _text(item, "type", "message"), _text(item, "id", "")
    fields = _FIELDS.get(kind)
    named = {"id": id or new_id(kind), "type": kind, "status": "completed"} | {
        key: _known_parts(value) if fields and key in _CONTENT else value
        for key, value in item.items()
        if value is not None and key not in ("id", "type") and (fields is None or key in fields)
    }
    if kind == "message" and isinstance(content := named.get("content"), str):
        output = {"type": "output_text", "text": content, "annotations": []}
        input = {"type": "input_text", "text": content}
        named["content"] = [output if named.get("role") == "assistant" else input]
    return named


def _known_parts(content: Any) -> Any:
    """Content without unknown fields of its parts."""
    if not isinstance(content, list):
        return content
    return [
        {key: value for key, value in part.items() if key in _PART_FIELDS} if isinstance(part, dict) else part
        for part in content
    ]


def _text(item: Mapping[str, Any], name: str, default: str) -> str:
    value = item.get(name)
    return value if value and isinstance(value, str) else default


def page(items: Sequence[bytes], query: Mapping[str, str]) -> bytes:
    """
    Return the list object of `GET /v1/responses/{id}/input_items` as JSON.

    `query` may have limit, order (default: desc) and after (an item's id). Raises InvalidRequest.
    """
    limit = _limit(query.get("limit", str(PAGE_DEFAULT)))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(
            "Invalid 'order': expected one of 'asc', 'desc'.", param="order", code=INVALID_VALUE
        )
    ordered = list(items if order == "asc" else reversed(items))
    ids = [identity(item)[0] for item in ordered]
    first = 0
    if after := query.get("after"):
        if after not in ids:
            raise InvalidRequest(
                "Invalid 'after': the response has no such item.", param="after", code=INVALID_VALUE
            )
        first = ids.index(after) + 1
    last = first + limit
    shown = ids[first:last]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [msgspec.Raw(item) for item in ordered[first:last]],
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
            "has_more": last < len(ids),
        }
    )


def _limit(text: str) -> int:
    row = limits.ITEMS_PAGE
    number = int(text) if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10 else None
    if number is not None and row.least <= number <= row.most:
        return number
    code = INVALID_VALUE if number is None else row.code if number > row.most else row.code_below
    raise InvalidRequest(
        f"Invalid 'limit': expected a whole number from {row.least} to {row.most}.", param="limit", code=code
    )


class _Identity(msgspec.Struct):
    id: str = ""
    type: str = ""


_decoder = msgspec.json.Decoder(_Identity)
_REFERENCE = REFERENCE.encode()


def references(items: Sequence[bytes]) -> dict[int, str]:
    """Return the positions of items that refer to stored ones, and their ids."""
    found = {at: identity(item) for at, item in enumerate(items) if _REFERENCE in item}
    return {at: id for at, (id, kind) in found.items() if kind == REFERENCE}


def identity(item: bytes) -> tuple[str, str]:
    """Return the id and the type of an item, empty without one."""
    try:
        read = _decoder.decode(item)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", ""
    return read.id, read.type
