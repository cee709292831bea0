"""Internal errors: a client gets its request's id, and no internals."""

from __future__ import annotations

import logging

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from baton_api import headers
from baton_api.errors import MESSAGE_LIMIT, InternalError, NotReady
from baton_engine.api.edge import Edge

FAILURES: list[Exception] = [
    FileNotFoundError(2, "No such file or directory", "/srv/models/secret/model.safetensors"),
    KeyError("/srv/models/secret"),
    RuntimeError('Traceback (most recent call last):\n  File "/srv/models/secret/x.py", line 3'),
    RecursionError("maximum recursion depth exceeded in /srv/models/secret"),
    MemoryError(),
    UnicodeDecodeError("utf-8", b"/srv/models/secret", 0, 1, "bad"),
]


def failing(error: Exception, *, begun: bool = False) -> Edge:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return Edge(app)


async def ask(edge: Edge) -> httpx.Response:
    transport = httpx.ASGITransport(app=edge)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
        return await http.get("/anything", headers={headers.REQUEST_ID: "mine"})


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
async def test_edge_internal_error_details_go_only_to_the_log(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    response = await ask(failing(error))
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "Internal server error; the server's log has the details.",
        "type": "server_error",
        "param": None,
        "code": InternalError.code,
    }
    assert "secret" not in response.text and "secret" not in str(response.headers)
    assert response.headers[headers.REQUEST_ID] == "mine"
    (logged,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "mine" in logged.getMessage() and logged.exc_info is not None and logged.exc_info[1] is error


async def test_edge_error_message_is_cut_and_has_retry_after() -> None:
    response = await ask(failing(NotReady("x" * 100_000)))
    assert response.status_code == 503
    assert len(response.json()["error"]["message"]) == MESSAGE_LIMIT
    assert 1 <= int(response.headers["retry-after"]) <= 120
