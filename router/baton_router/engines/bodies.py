"""
Bodies of requests and errors, changed as little as an engine's protocol requires.

Members are added at the end of a JSON object, and the client's bytes stay as they are. Of two members with
one name, the JSON readers of the engines keep the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from baton_api import anthropic
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest, ModelNotFound

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

UNROUTED = ("Not Found", "Method Not Allowed")
"""Messages of web frameworks for a path without a handler."""

UNSERVED = "unsupported_endpoint"
"""Code of errors about a path that the workers' engine does not have."""

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


class EngineBody(Protocol):
    """The members of a request's body that decide how an engine's workers are driven."""

    @property
    def reserved(self) -> Mapping[str, object]:
        """By name, those that only the router sets. A client's could name other clients' KV blocks."""
        ...


Body = TypeVar("Body", bound=EngineBody)


def read_options(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body | None:
    """
    The members of a request's body; None if it is invalid, so that the worker rejects it in its own words.

    Raises InvalidRequest if a client sets a reserved member.
    """
    try:
        options = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name, value in options.reserved.items():
        if value is not None:
            raise InvalidRequest(
                f"Unsupported parameter: {name!r}. The router sets it.",
                param=name,
                code=UNSUPPORTED_PARAMETER,
            )
    return options


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


def openai_error(status: int, body: bytes, path: str = "") -> bytes:
    """
    The body of an engine's error in OpenAI's shape: a type of OpenAI's, and no status in place of a code.

    `path` of the request is named if the engine does not serve it. Anthropic's paths have its shape instead.

    >>> openai_error(400, b'{"error":{"message":"No.","type":"BadRequestError","code":400}}')
    b'{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":null}}'
    """
    try:
        given = _errors.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body.decode("utf-8", "replace")[:1000]
        return _encoded(status, _Error(text or f"status {status}"), path)
    error = given.error if isinstance(given.error, _Error) else _Error(_message(status, given))
    if path and error.message in UNROUTED:
        error = _Error(f"The workers that have the requested model do not serve POST {path}.", code=UNSERVED)
    return _encoded(status, error, path)


def _message(status: int, given: _ErrorBody) -> str:
    """The message of an error without an `error` object; FastAPI's details each have a place."""
    if isinstance(given.error, str) or given.message is not None:
        return given.error if isinstance(given.error, str) else given.message or ""
    if isinstance(given.detail, list):
        return "; ".join(map(_detail, given.detail)) or f"status {status}"
    return str(given.detail or f"status {status}")


def _detail(one: Any) -> str:
    if not isinstance(one, dict):
        return str(one)
    place = ".".join(str(part) for part in one.get("loc", ()) if part != "body")
    return f"{place}: {one.get('msg', '')}" if place else str(one.get("msg", one))


def _encoded(status: int, given: _Error, path: str) -> bytes:
    if path in anthropic.PATHS:
        return msgspec.json.encode(anthropic.error_object(status, given.message))
    kind = _NAMED_TYPES.get(status, INVALID_REQUEST if status < 500 else SERVER_ERROR)
    code = given.code if isinstance(given.code, str) else None
    if code is None and status == 404 and "model" in given.message.lower():
        code = ModelNotFound.code
    error = {"message": given.message, "type": kind, "param": given.param, "code": code}
    return msgspec.json.encode({"error": error})
