"""
Anthropic's Messages API: its paths, and errors in its shape.

Statuses stay those of Baton's errors. A worker without capacity answers 503 and not Anthropic's 529, because
proxies and routers know 503. Source: https://docs.claude.com/en/api/errors
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_api import headers
from baton_api.errors import BatonError
from baton_api.json_text import on_one_line

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
PATHS = frozenset({MESSAGES, COUNT_TOKENS})
"""Paths whose errors have Anthropic's shape."""

REQUEST_ID = "request-id"
"""The header with the request's id that Anthropic's SDKs read."""

_REQUEST_ID = headers.REQUEST_ID.encode()

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "api_error"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
}
"""Types of errors by status; other statuses are invalid requests, or errors of the server from 500 on."""


def error_type(status: int) -> str:
    """
    Return Anthropic's type of an error.

    >>> error_type(400), error_type(401), error_type(503), error_type(500)
    ('invalid_request_error', 'authentication_error', 'overloaded_error', 'api_error')
    """
    return ERROR_TYPES.get(status, INVALID_REQUEST if status < 500 else SERVER_ERROR)


def error_object(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    return {"type": "error", "error": {"type": error_type(status), "message": message}}


def error_body(error: BatonError, path: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error response: in Anthropic's shape on its paths, otherwise in OpenAI's."""
    if path not in PATHS:
        return error.body()
    return error_object(error.status, error.message) | {"request_id": request_id}


def id_headers(path: str) -> tuple[bytes, ...]:
    """Return the names of the headers with the request's id on a response of `path`."""
    return (_REQUEST_ID, REQUEST_ID.encode()) if path in PATHS else (_REQUEST_ID,)


def error_event(error: BatonError) -> bytes:
    """Encode the error event that ends a stream of `/v1/messages`."""
    return event("error", error_object(error.status, error.message))


def event(kind: str, body: dict[str, Any]) -> bytes:
    """Encode one typed event of a stream; `kind` is the value of its `type`."""
    data = on_one_line(msgspec.json.encode({"type": kind} | body))
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
