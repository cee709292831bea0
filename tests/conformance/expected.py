"""Expected answers: the shape of an error, and texts that are forced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from baton_api import headers

ANY: Any = object()
"""A value that the specification leaves open."""

MESSAGE_BYTES = 4096

TRACES = re.compile(r"Traceback|File \"|\.py\b|/(?:root|home|usr|tmp|work)/")
"""A server's internals, which no message to a client may contain."""


def check_error(
    answer: httpx.Response,
    status: int,
    param: Any = ANY,
    code: Any = ANY,
    kind: str = "invalid_request_error",
) -> None:
    """E(status, param, code); `param` may be a tuple of what is allowed."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers[headers.REQUEST_ID]
    body = answer.json()
    assert set(body) == {"error"}
    check_error_object(body["error"], param, code, kind)


def check_error_object(
    error: dict[str, Any], param: Any = ANY, code: Any = ANY, kind: str = "invalid_request_error"
) -> None:
    assert set(error) >= {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"], error
    assert len(error["message"].encode()) <= MESSAGE_BYTES
    assert not TRACES.search(error["message"]), error
    assert error["type"] == kind, error
    assert error["param"] is None or isinstance(error["param"], str), error
    assert error["code"] is None or isinstance(error["code"], str), error
    if isinstance(param, tuple):
        assert error["param"] in param, error
    elif param is not ANY:
        assert error["param"] == param, error
    if code is not ANY:
        assert error["code"] == code, error


def check_param(answer: httpx.Response, beginning: str) -> None:
    """A 400 whose `param` starts so."""
    check_error(answer, 400)
    assert (answer.json()["error"]["param"] or "").startswith(beginning), answer.text


def refusal(call: Callable[[], object], kind: type[openai.APIStatusError]) -> httpx.Response:
    """The answer that made the SDK raise `kind`."""
    with pytest.raises(kind) as raised:
        call()
    answer = raised.value.response
    return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)


def exactly(text: str) -> dict[str, Any]:
    """R(text): fields of a body under which the answer can be nothing else."""
    return {"regex": re.sub(r"([\\^$.|?*+(){}\[\]])", r"\\\1", text)}
