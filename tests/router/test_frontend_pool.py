"""The router as several processes on one port, with real processes killed."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from baton_api import headers, metrics
from baton_api.errors import PREVIOUS_RESPONSE_NOT_FOUND, BodyTooLarge
from baton_api.workers import Role
from baton_router.proxy import responses
from tests.ports import steady_port
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, CONNECT_S, QUESTION, STREAM, anew, until
from tests.router.test_responses import respond

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
"""Timeout of all that happens at some time, however busy the machine is."""

PROGRAM = """
import sys
import tempfile
from baton_router.main import run
from baton_router.settings import RouterSettings
settings = RouterSettings.model_validate_json(sys.argv[1])
run(settings, ready=lambda url: print(url, flush=True))
"""


class RunningPool:
    """A router with two frontend processes."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, client: httpx.AsyncClient) -> None:
        self.process = process
        self.url = url
        self.client = client

    @property
    def members(self) -> list[psutil.Process]:
        """The scheduler process, then the frontend processes in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return sorted((one for one in children if one.is_running()), key=lambda one: one.create_time())

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self.members]

    async def post(
        self, body: object = QUESTION, headers: dict[str, str] | None = None, path: str = CHAT
    ) -> httpx.Response:
        """On a connection of its own, so that any front may have it."""
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            return await client.post(self.url + path, json=body, headers=headers)

    async def counted(self, requests: int, name: str = metrics.ROUTER_REQUESTS.name) -> dict[str, float]:
        """Requests by process, once all have reported theirs: each reports once per second."""
        async with asyncio.timeout(TIMEOUT_S):
            while sum((counted := await self.figure(name)).values()) < requests:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert sum(counted.values()) == requests
        return counted

    async def figure(self, name: str) -> dict[str, float]:
        """The samples of one metric, by process, over all other labels."""
        page = (await self.client.get("/metrics")).raise_for_status().text
        sums: dict[str, float] = {}
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE):
            process = re.search(r'process="([^"]*)"', labels)
            assert process is not None, "a sample without its process"
            sums[process[1]] = sums.get(process[1], 0.0) + float(value)
        return sums

    async def know_the_workers(self, workers: int) -> None:
        """Return when both frontend processes know the workers."""
        name = metrics.ROUTER_REGISTERED_WORKERS.name
        async with asyncio.timeout(TIMEOUT_S):
            while [*(await self.figure(name)).values()] != [workers] * 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def ready(self) -> bool:
        try:
            return (await self.client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False  # the frontend process of this connection is gone


@asynccontextmanager
async def running_pool(*workers: FakeWorker, **settings: object) -> AsyncIterator[RunningPool]:
    given = {
        "port": 0,
        "processes": 2,
        "decode": [one.url for one in workers if one.load.role is not Role.PREFILL],
        "prefill": [one.url for one in workers if one.load.role is Role.PREFILL],
        "drain_s": 5,
        "health_interval_s": 0.2,
        # The workers are in this process, which may wait for a processor.
        "health_misses": 100,
        "connect_s": CONNECT_S,
        "first_byte_s": TIMEOUT_S,
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, json.dumps(given), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S) as client:
        pool = RunningPool(process, url, client)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not await pool.ready():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield pool
        finally:
            if process.returncode is None:
                process.terminate()
            assert await process.wait() == 0


async def test_pool_passes_numbers_beyond_its_messages_to_a_worker() -> None:
    """What is wrong with them, a worker says in its own words."""
    async with FakeWorker() as worker, running_pool(worker) as pool:
        body = {**QUESTION, "max_tokens": 10**40}
        assert (await pool.client.post(CHAT, json=body)).status_code == 200
    assert json.loads(worker.requests[0].body) == body


async def test_pool_serves_all_paths_and_counts_by_process() -> None:
    async with FakeWorker() as worker, running_pool(worker) as pool:
        assert len(pool.members) == 3
        for number in range(20):
            answer = await pool.post(STREAM if number % 2 else QUESTION)
            assert answer.status_code == 200
            assert answer.headers[headers.WORKER] == worker.name
        assert [one["id"] for one in (await pool.client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await pool.client.get("/debug/decisions")).json()["data"][0]["decode"] == worker.name
        assert (await pool.client.get("/nothing")).status_code == 404
        await pool.counted(20)
        assert set(await pool.figure(metrics.ROUTER_WORKER_STATE.name)) == {"scheduler"}


async def test_metrics_of_all_processes_are_at_the_metrics_port() -> None:
    port = steady_port()
    async with FakeWorker() as worker, running_pool(worker, metrics_port=port) as pool:
        assert (await pool.client.get("/metrics")).status_code == 404
        pool.client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        await pool.know_the_workers(1)
        assert set(await pool.figure(metrics.ROUTER_WORKER_STATE.name)) == {"scheduler"}


async def test_prompt_follows_its_prefix_through_any_frontend() -> None:
    async with FakeWorker() as one, FakeWorker() as two, running_pool(one, two) as pool:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "The same beginning. " * 200}]}
        answers = [await pool.post(body) for _ in range(12)]
        assert len({answer.headers[headers.WORKER] for answer in answers}) == 1


async def test_keys_are_required_by_every_process() -> None:
    async with FakeWorker() as worker, running_pool(worker, api_key=["secret"]) as pool:
        assert (await pool.post()).status_code == 401
        assert (await pool.client.get("/v1/models")).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert (await pool.client.post(CHAT, json=QUESTION, headers=good)).status_code == 200
        assert (await pool.client.get("/v1/models", headers=good)).status_code == 200


async def test_responses_are_stored_for_all_frontends() -> None:
    async with FakeWorker() as worker, running_pool(worker) as pool:
        missing = await pool.client.get("/v1/responses/resp_1")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_stateless_responses_are_served_by_frontends() -> None:
    """Stored or continued responses pass through the process with the store; others do not."""
    async with FakeWorker(respond) as worker, running_pool(worker) as pool:
        await pool.know_the_workers(1)
        sent = {"model": "tiny", "input": "Hi"}
        for body in ({**sent, "store": False}, {**sent, "store": False, "stream": True}) * 5:
            answer = await pool.post(body, path=responses.PATH)
            assert answer.status_code == 200
        assert {request.header(headers.STATE) for request in worker.requests} == {"0"}
        assert [json.loads(request.body) for request in worker.requests[:1]] == [{**sent, "store": False}]
        counted = await pool.counted(10)
        assert "scheduler" not in +Counter(counted)
        kept = (await pool.post(sent, path=responses.PATH)).json()["id"]
        more = {**sent, "store": False, "previous_response_id": kept}
        assert (await pool.post(more, path=responses.PATH)).status_code == 200
        assert worker.requests[-1].header(headers.STATE) == "2"
        counted = await pool.counted(12)
        assert counted["scheduler"] == 2
        missing = await pool.post({**more, "previous_response_id": "resp_x"}, path=responses.PATH)
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, PREVIOUS_RESPONSE_NOT_FOUND)


async def test_bad_response_body_is_refused_by_a_frontend() -> None:
    async with FakeWorker(respond) as worker, running_pool(worker, max_body=1000) as pool:
        large = await pool.post({"input": "x" * 2000}, path=responses.PATH)
        assert (large.status_code, large.json()["error"]["code"]) == (413, BodyTooLarge.code)
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            assert (await client.post(pool.url + responses.PATH, content=b"{")).status_code == 400
        assert not worker.requests


async def test_killed_frontend_process_loses_only_its_own_clients() -> None:
    async with FakeWorker(fake_worker.gated) as worker, running_pool(worker) as pool:
        async with asyncio.TaskGroup() as group:
            _, *both = pool.members
            streams = []
            for number, stopped in enumerate(both, 1):  # meanwhile the other one gets all connections
                stopped.suspend()
                streams += [group.create_task(_stream(pool)) for _ in range(6)]
                await until(functools.partial(_received, worker, 6 * number))
                stopped.resume()
            victim = both[1].pid
            os.kill(victim, signal.SIGKILL)
            await until(lambda: victim not in pool.pids and len(pool.pids) == 3)
            worker.release.set()
        assert [stream.result() for stream in streams] == [False] * 6 + [True] * 6
        assert (await pool.post(anew(QUESTION))).status_code == 200
        async with asyncio.timeout(TIMEOUT_S):  # until the requests of the dead process are released
            while (await pool.client.get("/workers")).json()["data"][0]["in_flight"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_silent_scheduler_is_awaited_and_not_bypassed() -> None:
    """A tenant gets no more than its quota because the scheduler is silent."""
    tenants = """
tenants:
  - name: small
    keys: ["sha256:%s"]
    streams: 2
  - name: owner
    keys: ["sha256:%s"]
    admin: true
"""
    key = {"authorization": "Bearer secret"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(tenants % tuple(hashlib.sha256(one).hexdigest() for one in (b"secret", b"admin")))
        file.flush()
        async with (
            FakeWorker(fake_worker.gated) as worker,
            running_pool(worker, tenants_file=file.name, scheduler_timeout_s=60) as pool,
        ):
            pool.client.headers["authorization"] = "Bearer admin"
            await pool.know_the_workers(1)
            scheduler = pool.members[0]
            scheduler.suspend()
            asking = [asyncio.create_task(pool.post(anew(STREAM), headers=key)) for _ in range(6)]
            await asyncio.wait(asking, timeout=0.5)
            assert not worker.requests and not any(one.done() for one in asking)
            scheduler.resume()
            await until(lambda: sum(one.done() for one in asking) == 4)
            assert [one.result().status_code for one in asking if one.done()] == [429] * 4
            worker.release.set()
            answers = await asyncio.gather(*asking)
            assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 4


async def test_silent_scheduler_causes_503_after_its_timeout() -> None:
    async with FakeWorker() as worker, running_pool(worker, scheduler_timeout_s=0.2) as pool:
        await pool.know_the_workers(1)
        scheduler = pool.members[0]
        scheduler.suspend()
        try:
            answers = [await pool.post(anew(QUESTION)) for _ in range(4)]
        finally:
            scheduler.resume()
        assert [answer.status_code for answer in answers] == [503] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert not worker.requests
        await pool.counted(4, metrics.ROUTER_SCHEDULER_UNAVAILABLE.name)


async def test_killed_scheduler_delays_requests_without_failures() -> None:
    async with FakeWorker() as worker, running_pool(worker, scheduler_timeout_s=60) as pool:
        await pool.know_the_workers(1)
        killed = pool.members[0]
        killed.kill()
        answers = await asyncio.gather(*(pool.post(anew(STREAM)) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert killed.pid not in pool.pids and len(pool.members) == 3


async def test_invalid_setting_is_reported_before_any_process_starts() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        '{"port": 0, "processes": 2, "decode": ["http://127.0.0.1:1"], "api_key_file": "/nonexistent"}',
        stderr=asyncio.subprocess.PIPE,
    )
    _, output = await process.communicate()
    assert process.returncode != 0
    assert b"/nonexistent" in output


async def test_log_lines_name_their_process() -> None:
    program = f"from baton_api import logs; logs.begin('json', 'router')\n{PROGRAM}"
    given = '{"port": 0, "processes": 2, "decode": ["http://127.0.0.1:1"]}'
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, given, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline(), "it listens"
    process.terminate()
    _, log = await process.communicate()
    output = {line["process"]: line["message"] for line in map(json.loads, log.splitlines())}
    assert output.keys() == {"router", "router-scheduler", "router-front-0", "router-front-1"}


def _received(worker: FakeWorker, requests: int) -> bool:
    return len(worker.requests) == requests


async def _stream(pool: RunningPool) -> bool:
    """Whether a stream came whole."""
    try:
        return (await pool.post(anew(STREAM))).content.endswith(b"data: [DONE]\n\n")
    except httpx.TransportError:
        return False
