"""
Bodies of requests and errors, changed as little as an engine's protocol requires.

Members are added at the end of a JSON object, and the client's bytes stay as they are. Of two members with
one name, the JSON readers of the engines keep the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_api.errors import ModelNotFound

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_NAMED_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    """vLLM and OpenAI: `{"error": {...}}`. SGLang: the error itself. FastAPI: `detail`."""

    error: _Error | str | None = None
    message: str | None = None
    detail: Any = None


_errors = msgspec.json.Decoder(_ErrorBody)


def with_members(body: bytes, members: Mapping[str, Any]) -> bytes:
    """
    Add members to a JSON object; they replace members of the same name.

    >>> with_members(b'{"n": 1}', {"max_tokens": 1})
    b'{"n": 1,"max_tokens":1}'
    """
    if not members:
        return body
    text = body.rstrip()
    comma = b"" if not text[1:-1].strip() else b","
    return text[:-1] + comma + msgspec.json.encode(members)[1:]


def openai_error(status: int, body: bytes) -> bytes:
    """
    The body of an engine's error in OpenAI's shape: a type of OpenAI's, and no status in place of a code.

    >>> openai_error(400, b'{"error":{"message":"No.","type":"BadRequestError","code":400}}')
    b'{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":null}}'
    """
    try:
        given = _errors.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _encoded(status, _Error(body.decode("utf-8", "replace")[:1000] or f"status {status}"))
    if isinstance(given.error, _Error):
        return _encoded(status, given.error)
    message = given.error or given.message
    if message is None:
        message = given.detail if isinstance(given.detail, str) else str(given.detail or f"status {status}")
    return _encoded(status, _Error(message))


def _encoded(status: int, given: _Error) -> bytes:
    kind = _NAMED_TYPES.get(status, INVALID_REQUEST if status < 500 else SERVER_ERROR)
    code = given.code if isinstance(given.code, str) else None
    if code is None and status == 404 and "model" in given.message.lower():
        code = ModelNotFound.code
    error = {"message": given.message, "type": kind, "param": given.param, "code": code}
    return msgspec.json.encode({"error": error})
