"""The page's files and data, as a browser asks for them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_api.prompt_report import PromptReport
from baton_api.workers import Role
from baton_router.dashboard.endpoints import FOLDER, TYPES, WATCHERS_LIMIT
from tests.router.fake_worker import (
    STREAM_END,
    STREAM_HEAD,
    FakeWorker,
    WorkerRequest,
    chunk,
    die_at_once,
    gated,
    whole_stream,
)
from tests.router.running import CHAT, STREAM, RunningRouter, anew, running_router, until
from tests.router.test_frontend_pool import running_pool

REPORT = PromptReport(
    tokens=100, cached=40, held=0, queue_s=0.0, compute_s=0.0, transfer_s=0.0, remote=True, tail=""
)


async def reporting(worker: FakeWorker, received: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    """A whole stream of a prompt that a prefill worker computed."""
    report_line = b"x-baton-prompt: %b\r\n\r\n" % REPORT.encode().encode()
    writer.write(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\n" + report_line) + chunk(whole_stream()) + STREAM_END)


@asynccontextmanager
async def a_pair(**settings: Any) -> AsyncIterator[RunningRouter]:
    prefill = FakeWorker(role=Role.PREFILL, control="127.0.0.1:1")
    async with (
        FakeWorker(reporting) as decode,
        prefill,
        running_router([decode], [prefill], dashboard=True, local_prefill_max_tokens=0, **settings) as router,
    ):
        yield router


async def now(router: RunningRouter, key: str = "") -> dict[str, Any]:
    answer = await router.client.get("/dashboard/state", headers=bearer(key))
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def events(router: RunningRouter, key: str = "") -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Yield the events that a page receives."""

    async def read(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
        kind = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            if line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))

    async with router.client.stream("GET", "/dashboard/events", headers=bearer(key)) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        yield read(answer)


async def next_request(stream: AsyncIterator[tuple[str, Any]]) -> dict[str, Any]:
    async for kind, value in stream:
        if kind == "requests":
            reply: dict[str, Any] = value["requests"][-1]
            return reply
    raise AssertionError("the events have ended")


async def test_dashboard_is_absent_without_the_setting() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        for path in ("/", "/dashboard/main.js", "/dashboard/state", "/dashboard/events"):
            assert (await router.client.get(path)).status_code == 404


async def test_files_are_served_with_a_strict_policy() -> None:
    async with a_pair(api_key="k-1") as router:
        names = [path.name for path in FOLDER.iterdir() if path.suffix in TYPES]
        paths = ["/", *(f"/dashboard/{name}" for name in names if name != "index.html")]
        for path in paths:
            answer = await router.client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            again = await router.client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            head = await router.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        for path in (
            "/dashboard/index.html",
            "/dashboard/package.json",
            "/dashboard/../views.py",
            "/dashboard/%2e%2e/views.py",
        ):
            assert (await router.client.get(path, headers=bearer("k-1"))).status_code == 404, path
        assert (await router.client.post("/", headers=bearer("k-1"))).status_code in (404, 405)


FORBIDDEN = ("http:", "https:", "@import", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "<style")
"""Other addresses, and ways in which text becomes more than text."""


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_files_name_no_other_address_and_write_no_markup(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not [word for word in FORBIDDEN if word in text]
    assert path.suffix != ".html" or not re.search(r"\s(style|on\w+)=", text)


async def test_request_is_shown_with_four_phases_and_its_decision() -> None:
    async with a_pair() as router:
        assert (await router.post(STREAM)).status_code == 200
        shown = await now(router)
        (request,) = shown["requests"]
        assert [one["name"] for one in request["phases"]] == ["queue", "prefill", "transfer", "decode"]
        decode, prefill = (worker["name"] for worker in shown["service"]["workers"])
        assert (request["decode"], request["prefill"], request["outcome"]) == (decode, prefill, "whole")
        assert (request["prompt_tokens"], request["cached_tokens"]) == (100, 40)
        assert request["blocks_moved"] == 7  # of 16 tokens each
        assert request["decision"]["predicted_first_token_s"] > 0
        times = [one[side] for one in request["phases"] for side in ("start", "end")]
        assert all(0 <= shown["service"]["now"] - time < 60_000 for time in times)


async def test_service_is_shown_with_workers_queue_and_rates() -> None:
    async with a_pair() as router:
        await router.post(STREAM)
        service = (await now(router))["service"]
        assert [(one["role"], one["state"]) for one in service["workers"]] == [
            ("decode", "ready"),
            ("prefill", "ready"),
        ]
        assert service["workers"][0]["load"]["total_blocks"] == 100
        assert [one["class"] for one in service["waiting"]] == ["critical", "interactive", "default", "batch"]
        assert service["models"] == ["tiny"] and service["refusal"] is None
        pace = service["pace"]
        assert (pace["requests"], pace["prompt_tokens"], pace["cached_tokens"]) == (1, 100, 40)
        assert pace["first_token_s"] >= 0


async def test_open_page_receives_the_progress_of_a_request() -> None:
    async with (
        FakeWorker(gated) as worker,
        running_router([worker], dashboard=True) as router,
        events(router) as stream,
    ):
        kind, service = await anext(stream)
        assert kind == "service" and service["workers"][0]["state"] == "ready"
        asking = asyncio.ensure_future(router.post(anew(STREAM)))
        running = await next_request(stream)
        while running["phases"][-1]["name"] != "decode":
            running = await next_request(stream)
        assert running["outcome"] == "running" and running["phases"][-1]["end"] is None
        worker.release.set()
        ended = await next_request(stream)
        assert (ended["number"], ended["outcome"]) == (running["number"], "whole")
        assert ended["phases"][-1]["end"] is not None
        await asking


async def test_lost_worker_is_shown_beside_the_one_that_answered() -> None:
    async with (
        FakeWorker(die_at_once) as one,
        FakeWorker(reporting) as other,
        running_router([one, other], dashboard=True) as router,
    ):
        while not one.requests:
            await router.post(anew(STREAM))
        outcomes = {request["outcome"] for request in (await now(router))["requests"]}
        assert outcomes == {"lost", "whole"}


async def test_endpoints_without_a_key_reveal_nothing() -> None:
    async with a_pair(api_key="k-1") as router:
        for path in ("/dashboard/state", "/dashboard/events"):
            assert (await router.client.get(path)).status_code == 401
            assert (await router.client.get(path, headers=bearer("wrong"))).status_code == 401
            assert (await router.client.post(path, headers=bearer("k-1"))).status_code == 405
        await now(router, "k-1")


async def test_tenant_sees_its_own_requests_and_no_load(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    tenants = [("red", False), ("blue", False), ("boss", True)]
    entries = [{"name": name, "keys": [_sha256(name)], "admin": admin} for name, admin in tenants]
    file.write_text(json.dumps({"tenants": entries}))
    async with a_pair(tenants_file=str(file), ticket_secret="s" * 32) as router:
        for name in ("red", "blue"):
            answer = await router.client.post(CHAT, json=anew(STREAM), headers=bearer(name))
            assert answer.status_code == 200
        red, blue, boss = [await now(router, name) for name in ("red", "blue", "boss")]
        assert [one["tenant"] for one in red["requests"]] == ["red"]
        assert [one["tenant"] for one in blue["requests"]] == ["blue"]
        assert [one["tenant"] for one in boss["requests"]] == ["red", "blue"]
        assert red["service"]["waiting"] is None and boss["service"]["waiting"] is not None
        assert all(one["load"] is None for one in red["service"]["workers"])
        assert red["service"]["pace"]["requests"] == 1 and boss["service"]["pace"]["requests"] == 2
        assert red["requests"][0]["decision"]["others"] == []
        assert "127.0.0.1" not in json.dumps(red) and "127.0.0.1" in json.dumps(boss)
        named = {one["name"] for one in red["service"]["workers"]}
        mine = {red["requests"][0][role] for role in ("decode", "prefill")} - {None}
        assert len(named) == 2 and mine and mine <= named
        assert boss["requests"][1]["number"] - boss["requests"][0]["number"] < 10
        assert blue["requests"][0]["number"] - red["requests"][0]["number"] > 10, "no count of all requests"
        async with events(router, "red") as stream:
            assert {one["tenant"] for one in [await next_request(stream)]} == {"red"}


async def test_pages_are_limited_and_a_closed_one_frees_its_place() -> None:
    async with a_pair() as router:
        page = router.router.dashboard
        assert page is not None
        readers = [asyncio.ensure_future(_read(router)) for _ in range(WATCHERS_LIMIT)]
        await until(lambda: page.watched == WATCHERS_LIMIT, 60)
        refused = await router.client.get("/dashboard/events")
        assert refused.status_code == 503 and "pages are open" in refused.json()["error"]["message"]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await until(lambda: page.watched == 0, 60)
        async with events(router) as stream:
            assert (await anext(stream))[0] == "service"


@pytest.mark.slow
async def test_frontend_processes_share_one_dashboard() -> None:
    async with FakeWorker(reporting) as worker, running_pool(worker, dashboard=True) as pool:
        assert (await pool.client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        for _ in range(4):  # through any frontend process
            assert (await pool.post(anew(STREAM))).status_code == 200
        numbers: list[int] = []
        while len(numbers) < 4:
            shown = (await pool.client.get("/dashboard/state")).json()
            numbers = [one["number"] for one in shown["requests"] if one["outcome"] == "whole"]
        async with pool.client.stream("GET", "/dashboard/events") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: service"


async def test_open_page_does_not_delay_the_shutdown() -> None:
    async with a_pair(drain_s=60) as router, events(router) as stream:
        await anext(stream)
        router.router.draining = True
        assert [kind async for kind, _ in stream if kind == "requests"] == []


async def _read(router: RunningRouter) -> None:
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("GET", f"{router.url}/dashboard/events") as answer,
    ):
        async for _ in answer.aiter_bytes():
            pass


def _sha256(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
