"""What is asked of all workers, or of a pair, for those who run the service."""

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


async def test_an_abort_goes_to_every_worker_and_is_summed() -> None:
    one = FakeWorker(saying(200, b'{"aborted":1}'))
    two = FakeWorker(saying(200, b'{"aborted":2}'))
    prefill = FakeWorker(saying(200, b'{"aborted":0}'), role=Role.PREFILL, control="127.0.0.1:7")
    async with one, two, prefill, running_router([one, two], [prefill]) as router:
        answer = await abort(router, rid="mine")
        assert (answer.status_code, answer.json()) == (200, {"aborted": 3})
        assert answer.headers[headers.REQUEST_ID] == "op-1"
        for worker in (one, two, prefill):
            (asked,) = worker.asked
            assert (asked.method, asked.target, asked.body) == ("POST", "/abort_request", b'{"rid":"mine"}')
            assert asked.header("content-type") == "application/json"
            assert asked.header(headers.REQUEST_ID) == "op-1"


async def test_caches_are_emptied_everywhere() -> None:
    one, two = (
        FakeWorker(saying(200, b'{"flushed_blocks":5}')),
        FakeWorker(saying(200, b'{"flushed_blocks":0}')),
    )
    async with one, two, running_router([one, two]) as router:
        answer = await router.client.post("/flush_cache")
        assert (answer.status_code, answer.json()) == (200, {"flushed_blocks": 5})
        assert [worker.asked[0].target for worker in (one, two)] == ["/flush_cache"] * 2


async def test_a_worker_that_is_gone_has_nothing_left_to_abort() -> None:
    worker, dying = FakeWorker(saying(200, b'{"aborted":1}')), FakeWorker(fake_worker.die_at_once)
    async with worker, dying, FakeWorker() as dead, running_router([worker, dying, dead]) as router:
        await dead.die()
        answer = await abort(router, abort_all=True)
        assert (answer.status_code, answer.json()) == (200, {"aborted": 1})


async def test_a_refusal_is_passed_on_in_the_workers_words() -> None:
    words = b'{"error":{"message":"Say which.","type":"invalid_request_error","param":"rid","code":null}}'
    async with FakeWorker(saying(400, words)) as worker, running_router([worker]) as router:
        answer = await abort(router)
        assert (answer.status_code, answer.content) == (400, words)


async def test_a_body_over_the_limit_is_not_read() -> None:
    async with FakeWorker() as worker, running_router([worker], max_body=100) as router:
        answer = await abort(router, rid="x" * 200)
        assert answer.status_code == 413
        assert not worker.asked


async def test_a_worker_that_answers_nonsense_is_not_counted_as_an_abort() -> None:
    async with FakeWorker(saying(200, b"<html>")) as worker, running_router([worker]) as router:
        answer = await abort(router, rid="mine")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == WorkerLost.code


async def test_one_token_is_asked_of_a_pair() -> None:
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


async def test_without_a_worker_no_token_can_be_had() -> None:
    async with running_router() as router:
        answer = await router.client.get("/health_generate")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == Overloaded.code


@pytest.mark.parametrize(("method", "path"), [("GET", "/abort_request"), ("POST", "/health_generate")])
async def test_another_method_is_a_405(method: str, path: str) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.client.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == ("POST" if method == "GET" else "GET")


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"])
async def test_what_a_model_does_is_forwarded_with_or_without_its_name(path: str) -> None:
    async with FakeWorker(saying(200, b'{"count":3}')) as worker, running_router([worker]) as router:
        for body in ({"model": "tiny", "prompt": "x"}, {"prompt": "x"}):
            answer = await router.client.post(path, json=body)
            assert (answer.status_code, answer.json()) == (200, {"count": 3})
        assert [asked.target for asked in worker.asked] == [path, path]
        assert (await router.client.post(path, json={"model": "other"})).status_code == 404


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_the_service_is_described_without_secrets(path: str) -> None:
    secrets: dict[str, Any] = {
        "api_key": "client-key",
        "ticket_secret": "a-ticket-secret",
        "worker_api_key": "a-worker-key",
    }
    async with FakeWorker() as worker, running_router([worker], **secrets) as router:
        answer = await router.client.get(path, headers={"authorization": "Bearer client-key"})
        told = answer.json()
        assert (told["version"], told["status"]) == (__version__, "ready")
        assert [model["id"] for model in told["models"]] == ["tiny"]
        assert [one["worker"] for one in told["workers"]] == [worker.name]
        assert told["settings"]["retries"] == 2
        for secret in secrets.values():
            assert secret not in answer.text


def test_every_setting_that_may_be_a_secret_is_kept_back() -> None:
    suspects = {
        name
        for name in RouterSettings.model_fields
        if re.search("key|secret|tenants|database", name) and not name.endswith("_per_key")
    }
    assert suspects == HIDDEN_SETTINGS


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_the_model_is_described(path: str) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        told = (await router.client.get(path)).json()
        assert (told["served_model_name"], told["is_generation"]) == ("tiny", True)
    async with running_router() as router:
        assert (await router.client.get(path)).status_code == 503


async def test_the_version_and_the_ping() -> None:
    async with running_router() as router:
        assert (await router.client.get("/version")).json()["version"] == __version__
        assert (await router.client.get("/ping")).status_code == 200
