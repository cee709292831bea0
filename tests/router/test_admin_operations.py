"""Admin operations on all workers or on one pair."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from baton_api import __version__, headers
from baton_api.errors import Overloaded, WorkerLost
from baton_api.workers import Role
from baton_router.service_info import HIDDEN_SETTINGS
from baton_router.settings import RouterSettings
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker, plain, saying
from tests.router.running import RunningRouter, running_router


async def abort(router: RunningRouter, **body: Any) -> httpx.Response:
    return await router.client.post("/abort_request", json=body, headers={headers.REQUEST_ID: "op-1"})


async def test_abort_is_sent_to_every_worker_and_summed() -> None:
    one = FakeWorker(saying(200, b'{"aborted":1}'))
    two = FakeWorker(saying(200, b'{"aborted":2}'))
    prefill = FakeWorker(saying(200, b'{"aborted":0}'), role=Role.PREFILL, control="127.0.0.1:7")
    async with one, two, prefill, running_router([one, two], [prefill]) as router:
        answer = await abort(router, rid="mine")
        assert (answer.status_code, answer.json()) == (200, {"aborted": 3})
        assert answer.headers[headers.REQUEST_ID] == "op-1"
        for worker in (one, two, prefill):
            (request,) = worker.requests
            assert (request.method, request.target, request.body) == (
                "POST",
                "/abort_request",
                b'{"rid":"mine"}',
            )
            assert request.header("content-type") == "application/json"
            assert request.header(headers.REQUEST_ID) == "op-1"


async def test_flush_cache_reaches_all_workers() -> None:
    one, two = (
        FakeWorker(saying(200, b'{"flushed_blocks":5}')),
        FakeWorker(saying(200, b'{"flushed_blocks":0}')),
    )
    async with one, two, running_router([one, two]) as router:
        answer = await router.client.post("/flush_cache")
        assert (answer.status_code, answer.json()) == (200, {"flushed_blocks": 5})
        assert [worker.requests[0].target for worker in (one, two)] == ["/flush_cache"] * 2


async def test_abort_skips_dead_and_dying_workers() -> None:
    worker, dying = FakeWorker(saying(200, b'{"aborted":1}')), FakeWorker(fake_worker.die_at_once)
    async with worker, dying, FakeWorker() as dead, running_router([worker, dying, dead]) as router:
        await dead.die()
        answer = await abort(router, abort_all=True)
        assert (answer.status_code, answer.json()) == (200, {"aborted": 1})


async def test_worker_refusal_is_passed_on_unchanged() -> None:
    words = b'{"error":{"message":"Say which.","type":"invalid_request_error","param":"rid","code":null}}'
    async with FakeWorker(saying(400, words)) as worker, running_router([worker]) as router:
        answer = await abort(router)
        assert (answer.status_code, answer.content) == (400, words)


async def test_body_over_the_limit_is_not_read() -> None:
    async with FakeWorker() as worker, running_router([worker], max_body=100) as router:
        answer = await abort(router, rid="x" * 200)
        assert answer.status_code == 413
        assert not worker.requests


async def test_invalid_worker_reply_does_not_count_as_an_abort() -> None:
    async with FakeWorker(saying(200, b"<html>")) as worker, running_router([worker]) as router:
        answer = await abort(router, rid="mine")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == WorkerLost.code


async def test_health_generate_asks_the_pair_and_passes_its_status() -> None:
    prefill = FakeWorker(role=Role.PREFILL, control="127.0.0.1:7001")
    async with FakeWorker() as decode, prefill, running_router([decode], [prefill]) as router:
        answer = await router.client.get("/health_generate")
        assert (answer.status_code, answer.content) == (200, b"")
        (probe,) = decode.probed
        assert probe.header(headers.PREFILL) == "127.0.0.1:7001"
        assert not prefill.probed
        decode.probe = plain(503, b'{"error":{}}')
        answer = await router.client.get("/health_generate")
        assert (answer.status_code, answer.json()) == (503, {"error": {}})


async def test_health_generate_without_a_worker_is_503() -> None:
    async with running_router() as router:
        answer = await router.client.get("/health_generate")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == Overloaded.code


@pytest.mark.parametrize(("method", "path"), [("GET", "/abort_request"), ("POST", "/health_generate")])
async def test_wrong_method_is_405(method: str, path: str) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.client.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == ("POST" if method == "GET" else "GET")


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"])
async def test_model_operations_are_forwarded_even_without_a_model(path: str) -> None:
    async with FakeWorker(saying(200, b'{"count":3}')) as worker, running_router([worker]) as router:
        for body in ({"model": "tiny", "prompt": "x"}, {"prompt": "x"}):
            answer = await router.client.post(path, json=body)
            assert (answer.status_code, answer.json()) == (200, {"count": 3})
        assert [request.target for request in worker.requests] == [path, path]
        assert (await router.client.post(path, json={"model": "other"})).status_code == 404


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_describes_the_service_without_secrets(path: str) -> None:
    secrets: dict[str, Any] = {
        "api_key": "client-key",
        "ticket_secret": "a-ticket-secret",
        "worker_api_key": "a-worker-key",
    }
    async with FakeWorker() as worker, running_router([worker], **secrets) as router:
        answer = await router.client.get(path, headers={"authorization": "Bearer client-key"})
        reply = answer.json()
        assert (reply["version"], reply["status"]) == (__version__, "ready")
        assert [model["id"] for model in reply["models"]] == ["tiny"]
        assert [one["worker"] for one in reply["workers"]] == [worker.name]
        assert reply["settings"]["retries"] == 2
        for secret in secrets.values():
            assert secret not in answer.text


def test_hidden_settings_cover_every_secret_setting() -> None:
    suspects = {
        name
        for name in RouterSettings.model_fields
        if re.search("key|secret|tenants|database|response_store$", name) and not name.endswith("_per_key")
    }
    assert suspects == HIDDEN_SETTINGS


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_describes_the_model(path: str) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        reply = (await router.client.get(path)).json()
        assert (reply["served_model_name"], reply["is_generation"]) == ("tiny", True)
    async with running_router() as router:
        assert (await router.client.get(path)).status_code == 503


async def test_version_and_ping_are_answered() -> None:
    async with running_router() as router:
        assert (await router.client.get("/version")).json()["version"] == __version__
        assert (await router.client.get("/ping")).status_code == 200
