"""Endpoints outside the hot path: models, readiness, metrics, the list of workers, and unknown paths."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton_api import metrics
from baton_api.errors import ModelNotFound, Overloaded
from baton_api.workers import Role
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, STREAM, running_router, until


async def test_models_are_those_of_all_workers_in_stable_order() -> None:
    one, two = FakeWorker(model="one"), FakeWorker(model="meta-llama/two")
    async with one, two, running_router([one, two]) as router:
        listed = (await router.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["meta-llama/two", "one"]
        card = {"object": "model", "owned_by": "baton", "parent": None, "max_model_len": None}
        for model in listed["data"]:
            assert card.items() <= model.items()
            assert model["root"] == model["id"]
            assert model["created"] > 0
        answer = await router.client.get("/v1/models/meta-llama/two")
        assert answer.json() == listed["data"][0]
        missing = await router.client.get("/v1/models/three")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == ModelNotFound.code
        assert (await router.client.get("/v1/models")).json() == listed


async def test_model_context_is_the_minimum_of_its_workers() -> None:
    one, two = FakeWorker(), FakeWorker()
    one.load = msgspec.structs.replace(one.load, max_model_len=8192, names=("tiny", "small"))
    two.load = msgspec.structs.replace(two.load, max_model_len=4096)
    async with one, two, running_router([one, two]) as router:
        cards = (await router.client.get("/v1/models")).json()["data"]
        shown = [(card["id"], card["root"], card["max_model_len"]) for card in cards]
        assert shown == [("tiny", "tiny", 4096), ("small", "tiny", 8192)]


async def test_model_is_served_by_its_whole_path_too() -> None:
    """Clients of vLLM and SGLang send the path as the server was given it."""
    async with FakeWorker() as worker:
        worker.load = msgspec.structs.replace(worker.load, names=("tiny", "/models/tiny"))
        async with running_router([worker]) as router:
            assert (await router.post({**QUESTION, "model": "/models/tiny"})).status_code == 200
            assert (await router.client.get("/v1/models//models/tiny")).json()["root"] == "tiny"
            listed = (await router.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["tiny", "/models/tiny"]


async def test_models_and_ready_are_503_until_a_decode_worker_is_ready() -> None:
    async with FakeWorker() as worker:
        worker.ready = False
        async with running_router([worker], health_interval_s=0.1) as router:
            for path in ("/ready", "/v1/models", "/v1/models/tiny"):
                answer = await router.client.get(path)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == Overloaded.code
                assert worker.name in answer.json()["error"]["message"]
                assert 1 <= int(answer.headers["retry-after"]) <= 120
            assert (await router.client.get("/health")).status_code == 200
            worker.ready = True
            await until(lambda: router.router.unready_reason() is None)
            for path in ("/ready", "/v1/models", "/v1/models/tiny"):
                assert (await router.client.get(path)).status_code == 200


async def test_dead_worker_is_down_and_its_successor_is_used() -> None:
    async with FakeWorker() as worker, running_router([worker], health_interval_s=0.1) as router:
        await worker.die()
        await until(lambda: router.router.unready_reason())
        view = (await router.client.get("/workers")).json()["data"][0]
        assert view["state"] == "down"
        assert "connect" in view["reason"]
        assert (await router.post()).status_code == 503


async def test_workers_endpoint_shows_role_state_and_load() -> None:
    prefill = FakeWorker(role=Role.PREFILL, control="127.0.0.1:7001", name="prefill-0")
    async with FakeWorker() as decode, prefill, running_router([decode], [prefill]) as router:
        views = (await router.client.get("/workers")).json()["data"]
        assert [(view["worker"], view["name"], view["role"], view["state"]) for view in views] == [
            (decode.name, None, "decode", "ready"),
            (prefill.name, "prefill-0", "prefill", "ready"),
        ]
        assert views[1]["load"]["control"] == "127.0.0.1:7001"


async def test_service_discovery_lists_the_workers_for_prometheus() -> None:
    prefill = FakeWorker(role=Role.PREFILL, control="127.0.0.1:7001", name="prefill-0")
    async with FakeWorker() as decode, prefill, running_router([decode], [prefill]) as router:
        assert (await router.client.get("/workers/targets")).json() == [
            {
                "targets": [one.name],
                "labels": {"worker": one.name, "name": name, "role": role, "revision": ""},
            }
            for one, name, role in ((decode, "", "decode"), (prefill, "prefill-0", "prefill"))
        ]


NONSENSE = {"json": b'{"role": "cook"}', "utf-8": b'{"role": "\xff"}', "nested": b"[" * 20_000}


@pytest.mark.parametrize("nonsense", [b"", *NONSENSE.values()], ids=["silent", *NONSENSE])
async def test_worker_with_no_or_an_invalid_reply_is_down(nonsense: bytes) -> None:
    async with FakeWorker() as worker, running_router([worker], health_interval_s=0.1) as router:
        worker.silent, worker.nonsense = not nonsense, nonsense
        await until(lambda: router.router.workers.decode[0].health.down)
        assert (await router.client.get("/ready")).status_code == 503
        worker.silent, worker.nonsense = False, b""
        await until(lambda: router.router.unready_reason() is None)


async def test_metrics_count_requests_and_show_states() -> None:
    async with FakeWorker(name="decode-7") as worker, running_router([worker]) as router:
        await router.post(STREAM)
        await router.post({**QUESTION, "model": "other"})
        page = await router.client.get("/metrics", headers={"accept": "text/plain;version=0.0.4"})
        assert page.headers["content-type"] == metrics.CONTENT_TYPE
        text = page.text
        labels = f'class="default",code="200",model="tiny",path="{CHAT}"'
        assert f"baton_router_requests_total{{{labels}}} 1.0" in text
        assert router.metric(metrics.ROUTER_REQUESTS.name, path=CHAT, code="404", model="other") == 1
        ready = f'name="decode-7",role="decode",state="ready",worker="{worker.name}"'
        assert f"baton_router_worker_state{{{ready}}} 1.0" in text
        assert "baton_router_requests_in_flight 0.0" in text
        assert "baton_router_overhead_seconds_count 1.0" in text
        assert 'baton_router_time_to_first_byte_seconds_count{class="default"} 1.0' in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/uploads/x", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_unknown_paths_and_methods_are_errors_in_openais_shape(
    method: str, path: str, status: int
) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert path in answer.json()["error"]["message"]
        if status == 405:
            assert answer.headers["allow"] == ("POST" if path == CHAT else "GET")


async def test_openapi_paths_are_all_served() -> None:
    nothing = fake_worker.saying(200, b"{}")
    async with FakeWorker(nothing) as worker, running_router([worker]) as router:
        described = (await router.client.get("/openapi.json")).json()
        assert described["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
        for path, methods in described["paths"].items():
            for method in methods:
                answer = await router.client.request(method, path.replace("{model}", "tiny"), json={})
                if answer.status_code == 404:
                    assert "{" in path and "Unknown request URL" not in answer.text, path
                elif method == "post" and path in ("/v1/files", "/v1/batches"):
                    assert answer.status_code == 400, "an empty request is none of theirs"
                else:
                    assert answer.status_code == 200, path


async def test_draining_router_is_not_ready_and_finishes_streams() -> None:
    async with (
        FakeWorker(fake_worker.gated) as worker,
        running_router([worker], drain_s=10, drain_notice_s=0.5) as router,
    ):
        running = asyncio.create_task(router.post(STREAM))
        await worker.arrived.wait()
        # On this connection the next question is answered too, even if the router listens no more.
        assert (await router.client.get("/ready")).status_code == 200
        router.server.should_exit = True
        await until(lambda: router.router.draining)
        answer = await router.client.get("/ready")
        assert answer.status_code == 503
        assert "draining" in answer.json()["error"]["message"]
        worker.release.set()
        assert b"[DONE]" in (await running).content


async def test_connection_serves_one_request_after_listening_ends() -> None:
    """A request may be in transit. Its response asks the client to connect elsewhere for the next one."""
    body = b'{"model":"tiny"}'
    message = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
    async with (
        FakeWorker(fake_worker.saying(200, b"{}")) as worker,
        running_router([worker], drain_s=60, drain_notice_s=0.1) as router,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(message)
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n{}")
        router.server.should_exit = True
        await until(lambda: not any(one.is_serving() for one in router.server.servers))
        writer.write(message)
        last = await reader.read()
        assert last.startswith(b"HTTP/1.1 200") and b"connection: close" in last
        writer.close()


async def test_stream_longer_than_the_drain_ends_with_error_and_cut() -> None:
    async with FakeWorker(fake_worker.gated) as worker:
        async with running_router([worker], drain_s=1) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            body = b'{"model":"tiny","stream":true}'
            writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 30\r\n\r\n" % CHAT.encode() + body)
            await worker.arrived.wait()
        seen = await reader.read()
        assert b"stopping" in seen
        assert not seen.endswith(b"0\r\n\r\n")
        await worker.left.wait()
        writer.close()


def test_router_does_not_import_torch() -> None:
    code = (
        "import sys, baton_router.server; sys.exit('torch' in sys.modules or 'baton_engine' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", CHAT, "application/json"),
        ("POST", "/v1/responses", "application/json"),
        ("POST", "/v1/files", "multipart/form-data; boundary=b"),
        ("POST", "/v1/batches", "application/json"),
        ("POST", "/abort_request", "application/json"),
        ("DELETE", "/v1/files/file-1", "application/json"),
        ("POST", "/unknown", "application/json"),
    ],
)
@pytest.mark.parametrize("sent", [b"", b"{" * 1000])
async def test_client_that_leaves_while_it_sends_is_not_logged(
    sent: bytes, method: str, path: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeWorker() as worker, running_router([worker], state=str(tmp_path)) as router:
        state = router.server.server_state
        before = state.connections.copy()
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: 2000\r\n\r\n"
        writer.write(head.encode() + sent)
        await until(lambda: state.connections - before)
        writer.transport.abort()
        await until(lambda: not state.connections - before and not state.tasks)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", ["/v1/files/", "/v1/batches/", "/v1/responses/resp_1/", "/health/"])
async def test_path_with_a_slash_more_is_not_redirected(path: str, tmp_path: Path) -> None:
    async with running_router(state=str(tmp_path)) as router:
        answer = await router.client.get(path, headers={"host": "elsewhere.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers
