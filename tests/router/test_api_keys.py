"""Admission by API keys, and keys sent to workers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_api import anthropic
from baton_api import headers as header_names
from baton_api.errors import SetupError, Unauthorized
from baton_api.inference_paths import RERANK_PATHS, SCORE_PATHS
from baton_router.app import create_app
from baton_router.server import log_startup
from baton_router.settings import RouterSettings
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, RunningRouter, running_router, until


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(router: RunningRouter, **headers: str) -> httpx.Response:
    return await router.client.post(CHAT, json=QUESTION, headers=headers)


async def test_key_is_required_except_for_monitoring_endpoints() -> None:
    async with FakeWorker() as worker, running_router([worker], api_key=["k-1", "k-2"]) as router:
        for headers in ({}, bearer("k-3"), {"authorization": "k-1"}):
            answer = await ask(router, **headers)
            assert answer.status_code == 401
            assert answer.json()["error"] == answer.json()["error"] | {
                "type": "invalid_request_error", "param": None, "code": Unauthorized.code,
            }  # fmt: skip
            assert answer.headers["www-authenticate"] == 'Bearer realm="baton"'
            assert answer.headers[header_names.REQUEST_ID]
            for path in ("/v1/models", "/workers", "/no/such/path"):
                assert (await router.client.get(path, headers=headers)).status_code == 401
        assert worker.requests == []
        for key in ("k-1", "k-2"):
            assert (await ask(router, **bearer(key))).status_code == 200
            assert (await router.client.get("/workers", headers=bearer(key))).status_code == 200
        for path in ("/health", "/ready", "/ping"):
            assert (await router.client.get(path)).status_code == 200
        assert (await router.client.get("/metrics")).status_code == 401


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, "Bearer client"),
        ({"api_key": ["client"]}, None),
        ({"api_key": ["client"], "worker_api_key": "ours"}, "Bearer ours"),
        ({"worker_api_key": "ours"}, "Bearer ours"),
    ],
    ids=[
        "an open router passes keys on",
        "a router that wants keys keeps them",
        "it shows its own instead",
        "an open router with a key for its workers shows that one",
    ],
)
async def test_worker_key_follows_the_settings(settings: dict[str, Any], seen: str | None) -> None:
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        assert (await ask(router, **bearer("client"))).status_code == 200
        assert [value for name, value in worker.requests[0].headers if name == "authorization"] == (
            [seen] if seen else []
        )


async def test_health_checks_send_the_worker_key() -> None:
    worker = FakeWorker()
    worker.key = "ours"
    async with worker, running_router([worker], worker_api_key="ours") as router:
        assert (await ask(router)).status_code == 200
        assert (await router.client.get("/ready")).status_code == 200


async def test_worker_that_requires_another_key_is_down_with_reason() -> None:
    worker = FakeWorker()
    worker.key = "theirs"
    settings: dict[str, Any] = {"health_interval_s": 0.2, "health_misses": 1, "wait": False}
    async with worker, running_router([worker], **settings) as router:
        looked_at = router.router.workers.decode[0]
        # A check that is late is another reason.
        await until(lambda: looked_at.health.down and "BATON_ROUTER_WORKER_API_KEY" in looked_at.reason)
        rows = (await router.client.get("/workers")).json()["data"]
        assert rows[0]["state"] == "down" and rows[0]["reason"]
        assert (await ask(router)).status_code == 503


async def test_keys_from_a_file_with_names_and_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:k-1\n")
    async with FakeWorker() as worker, running_router([worker], api_key_file=str(file)) as router:
        assert (await ask(router, **bearer("k-1"))).status_code == 200
        assert (await ask(router)).status_code == 401


def test_missing_key_file_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Cannot read"):
        create_app(RouterSettings(api_key_file=str(tmp_path / "none")))


async def test_cors_allows_pages_with_keys_or_by_configuration() -> None:
    page = {"origin": "https://chat.example.org"}
    preflight = {**page, "access-control-request-method": "POST"}
    cases: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({}, None),
        ({"api_key": ["k"]}, "*"),
        ({"allowed_origins": ["https://chat.example.org"]}, "https://chat.example.org"),
    )
    for settings, allowed in cases:
        async with FakeWorker() as worker, running_router([worker], **settings) as router:
            preflighted = await router.client.options(CHAT, headers=preflight)
            answer = await ask(router, **page, **bearer("k"))
            for got in (preflighted, answer):
                assert got.headers.get("access-control-allow-origin") == allowed
            assert answer.status_code == 200


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": "k"}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_router_without_keys_on_a_public_address_warns(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warned: bool
) -> None:
    given = RouterSettings.model_validate(settings)
    log_startup(given, create_app(given).access.required, "http://0.0.0.0:8080")
    loud = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.startswith("WARNING: any client that reaches 0.0.0.0:8080") for line in loud] == [
        True
    ] * warned


MESSAGE = {"model": "tiny", "max_tokens": 8, "messages": QUESTION["messages"]}


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, "Bearer client"),
        ({"api_key": ["client"]}, None),
        ({"api_key": ["client"], "worker_api_key": "ours"}, "Bearer ours"),
    ],
)
async def test_key_of_anthropics_clients_is_authorization(settings: dict[str, Any], seen: str | None) -> None:
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        keys = {"x-api-key": "client", "anthropic-version": "2023-06-01"}
        answer = await router.client.post(anthropic.MESSAGES, json=MESSAGE, headers=keys)
        assert answer.status_code == 200
        (request,) = worker.requests
        assert request.header("authorization") == seen
        assert request.header("x-api-key") is None
        assert request.header("anthropic-version") == "2023-06-01"


async def test_error_of_messages_has_anthropics_shape() -> None:
    async with FakeWorker() as worker, running_router([worker], api_key=["k-1"]) as router:
        post = router.client.post
        refused = await post(anthropic.MESSAGES, json=MESSAGE, headers={"x-api-key": "k-2"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        keys = {"x-api-key": "k-1"}
        unknown = await post(anthropic.COUNT_TOKENS, json={**MESSAGE, "model": "no"}, headers=keys)
        invalid = await post(anthropic.MESSAGES, content=b"{", headers=keys)
        wrong = await router.client.get(anthropic.MESSAGES, headers=keys)
        for answer, status, kind in (
            (unknown, 404, "not_found_error"),
            (invalid, 400, "invalid_request_error"),
            (wrong, 405, "invalid_request_error"),
        ):
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert answer.json()["type"] == "error"


@pytest.mark.parametrize("path", [*RERANK_PATHS, *SCORE_PATHS])
async def test_requests_for_scores_reach_a_worker(path: str) -> None:
    async with FakeWorker() as worker, running_router([worker], api_key=["k"]) as router:
        body = {"model": "tiny", "query": "a", "documents": ["b"]}
        answer = await router.client.post(path, json=body, headers=bearer("k"))
        assert answer.status_code == 200
        assert [request.target for request in worker.requests] == [path]
