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

from baton_api import headers, metrics
from baton_api.errors import PREVIOUS_RESPONSE_NOT_FOUND, BodyTooLarge
from baton_api.workers import Role
from baton_router.proxy import responses
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, STREAM, anew, until
from tests.router.test_responses import respond

PROGRAM = """
import sys
import tempfile
from baton_router.main import run
from baton_router.settings import RouterSettings
settings = RouterSettings.model_validate_json(sys.argv[1])
run(settings, ready=lambda url: print(url, flush=True))
"""


class Fronts:
    """A router with two fronts, and its processes."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, client: httpx.AsyncClient) -> None:
        self.process = process
        self.url = url
        self.client = client

    @property
    def members(self) -> list[psutil.Process]:
        """The scheduler's process, then the fronts', in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return sorted((one for one in children if one.is_running()), key=lambda one: one.create_time())

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self.members]

    async def post(
        self, body: object = QUESTION, headers: dict[str, str] | None = None, path: str = CHAT
    ) -> httpx.Response:
        """On a connection of its own, so that any front may have it."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return await client.post(self.url + path, json=body, headers=headers)

    async def counted(self, requests: int) -> dict[str, float]:
        """Requests by process, once all have counted theirs: each tells what it counted once a second."""
        while sum((counted := await self.figure(metrics.ROUTER_REQUESTS.name)).values()) < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return counted

    async def figure(self, name: str) -> dict[str, float]:
        """The samples of one metric, by process, over all other labels."""
        page = (await self.client.get("/metrics")).text
        sums: dict[str, float] = {}
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE):
            process = re.search(r'process="([^"]*)"', labels)
            assert process is not None, "a sample without its process"
            sums[process[1]] = sums.get(process[1], 0.0) + float(value)
        return sums

    async def know_the_workers(self, workers: int) -> None:
        """Return when both frontend processes know the workers."""
        while [*(await self.figure(metrics.ROUTER_REGISTERED_WORKERS.name)).values()] != [workers] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def ready(self) -> bool:
        try:
            return (await self.client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False  # the front that had this connection is gone


@asynccontextmanager
async def running_fronts(*workers: FakeWorker, **settings: object) -> AsyncIterator[Fronts]:
    given = {
        "port": 0,
        "processes": 2,
        "decode": [one.url for one in workers if one.load.role is not Role.PREFILL],
        "prefill": [one.url for one in workers if one.load.role is Role.PREFILL],
        "drain_s": 5,
        "health_interval_s": 0.2,
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, json.dumps(given), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
        fronts = Fronts(process, url, client)
        try:
            while not await fronts.ready():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            yield fronts
        finally:
            if process.returncode is None:
                process.terminate()
            assert await process.wait() == 0


async def test_all_paths_are_served_and_each_process_tells_what_it_counted() -> None:
    async with FakeWorker() as worker, running_fronts(worker) as fronts:
        assert len(fronts.members) == 3
        for number in range(20):
            answer = await fronts.post(STREAM if number % 2 else QUESTION)
            assert answer.status_code == 200
            assert answer.headers[headers.WORKER] == worker.name
        assert [one["id"] for one in (await fronts.client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await fronts.client.get("/debug/decisions")).json()["data"][0]["decode"] == worker.name
        assert (await fronts.client.get("/nothing")).status_code == 404
        for _ in range(100):
            counted = await fronts.figure(metrics.ROUTER_REQUESTS.name)
            if sum(counted.values()) == 20:
                break
            await asyncio.sleep(0.1)
        assert sum(counted.values()) == 20
        assert set(await fronts.figure(metrics.ROUTER_WORKER_STATE.name)) == {"scheduler"}


async def test_a_prompt_follows_its_prefix_whichever_front_has_it() -> None:
    async with FakeWorker() as one, FakeWorker() as two, running_fronts(one, two) as fronts:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "The same beginning. " * 200}]}
        answers = [await fronts.post(body) for _ in range(12)]
        assert len({answer.headers[headers.WORKER] for answer in answers}) == 1


async def test_keys_are_wanted_by_every_process() -> None:
    async with FakeWorker() as worker, running_fronts(worker, api_key=["secret"]) as fronts:
        assert (await fronts.post()).status_code == 401
        assert (await fronts.client.get("/v1/models")).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert (await fronts.client.post(CHAT, json=QUESTION, headers=good)).status_code == 200
        assert (await fronts.client.get("/v1/models", headers=good)).status_code == 200


async def test_responses_are_kept_for_whichever_front_asks() -> None:
    async with FakeWorker() as worker, running_fronts(worker) as fronts:
        missing = await fronts.client.get("/v1/responses/resp_1")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_stateless_responses_are_served_by_frontends() -> None:
    """What is kept or continued passes through the process that has the store; nothing else does."""
    async with FakeWorker(respond) as worker, running_fronts(worker) as fronts:
        await fronts.know_the_workers(1)
        sent = {"model": "tiny", "input": "Hi"}
        for body in ({**sent, "store": False}, {**sent, "store": False, "stream": True}) * 5:
            answer = await fronts.post(body, path=responses.PATH)
            assert answer.status_code == 200
        assert {asked.header(headers.STATE) for asked in worker.asked} == {"0"}
        assert [json.loads(asked.body) for asked in worker.asked[:1]] == [{**sent, "store": False}]
        counted = await fronts.counted(10)
        assert "scheduler" not in +Counter(counted)
        kept = (await fronts.post(sent, path=responses.PATH)).json()["id"]
        more = {**sent, "store": False, "previous_response_id": kept}
        assert (await fronts.post(more, path=responses.PATH)).status_code == 200
        assert worker.asked[-1].header(headers.STATE) == "2"
        counted = await fronts.counted(12)
        assert counted["scheduler"] == 2
        missing = await fronts.post({**more, "previous_response_id": "resp_x"}, path=responses.PATH)
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, PREVIOUS_RESPONSE_NOT_FOUND)


async def test_a_bad_body_of_a_response_is_refused_by_a_frontend() -> None:
    async with FakeWorker(respond) as worker, running_fronts(worker, max_body=1000) as fronts:
        large = await fronts.post({"input": "x" * 2000}, path=responses.PATH)
        assert (large.status_code, large.json()["error"]["code"]) == (413, BodyTooLarge.code)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.post(fronts.url + responses.PATH, content=b"{")).status_code == 400
        assert not worker.asked


async def test_a_front_that_is_killed_takes_only_its_own_clients_along() -> None:
    async with FakeWorker(fake_worker.gated) as worker, running_fronts(worker) as fronts:
        async with asyncio.TaskGroup() as group:
            _, *both = fronts.members
            streams = []
            for number, stopped in enumerate(both, 1):  # what comes meanwhile is the other one's
                stopped.suspend()
                streams += [group.create_task(_stream(fronts)) for _ in range(6)]
                await until(functools.partial(_asked, worker, 6 * number))
                stopped.resume()
            victim = both[1].pid
            os.kill(victim, signal.SIGKILL)
            await until(lambda: victim not in fronts.pids and len(fronts.pids) == 3)
            worker.release.set()
        assert [stream.result() for stream in streams] == [False] * 6 + [True] * 6
        assert (await fronts.post(anew(QUESTION))).status_code == 200
        load = (await fronts.client.get("/workers")).json()["data"][0]
        assert load["in_flight"] == 0, "what the dead front had was let go"


async def test_a_silent_scheduler_is_waited_for_and_not_passed() -> None:
    """A tenant gets no more than its quota because the scheduler is silent."""
    tenants = """
tenants:
  - name: small
    keys: ["sha256:%s"]
    streams: 2
"""
    key = {"authorization": "Bearer secret"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(tenants % hashlib.sha256(b"secret").hexdigest())
        file.flush()
        async with (
            FakeWorker(fake_worker.gated) as worker,
            running_fronts(worker, tenants_file=file.name, scheduler_patience_s=60) as fronts,
        ):
            await fronts.know_the_workers(1)
            scheduler = fronts.members[0]
            scheduler.suspend()
            asking = [asyncio.create_task(fronts.post(anew(STREAM), headers=key)) for _ in range(6)]
            await asyncio.wait(asking, timeout=0.5)
            assert not worker.asked and not any(one.done() for one in asking)
            scheduler.resume()
            await until(lambda: sum(one.done() for one in asking) == 4)
            assert [one.result().status_code for one in asking if one.done()] == [429] * 4
            worker.release.set()
            answers = await asyncio.gather(*asking)
            assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 4


async def test_a_silent_scheduler_costs_a_503_in_the_end() -> None:
    async with FakeWorker() as worker, running_fronts(worker, scheduler_patience_s=0.2) as fronts:
        await fronts.know_the_workers(1)
        scheduler = fronts.members[0]
        scheduler.suspend()
        try:
            answers = [await fronts.post(anew(QUESTION)) for _ in range(4)]
        finally:
            scheduler.resume()
        assert [answer.status_code for answer in answers] == [503] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert not worker.asked
        for _ in range(100):  # each frontend process tells what it counted once a second
            unasked = await fronts.figure(metrics.ROUTER_UNASKED.name)
            if sum(unasked.values()) == 4:
                break
            await asyncio.sleep(0.1)
        assert sum(unasked.values()) == 4


async def test_a_killed_scheduler_costs_requests_only_time() -> None:
    async with FakeWorker() as worker, running_fronts(worker, scheduler_patience_s=60) as fronts:
        await fronts.know_the_workers(1)
        killed = fronts.members[0]
        killed.kill()
        answers = await asyncio.gather(*(fronts.post(anew(STREAM)) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert killed.pid not in fronts.pids and len(fronts.members) == 3


async def test_a_setting_that_cannot_be_is_said_and_nothing_is_started() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        '{"port": 0, "processes": 2, "decode": ["http://127.0.0.1:1"], "api_key_file": "/nonexistent"}',
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode != 0
    assert b"/nonexistent" in said


async def test_each_process_writes_its_own_name_to_the_log() -> None:
    program = f"from baton_api import logs; logs.begin('json', 'router')\n{PROGRAM}"
    given = '{"port": 0, "processes": 2, "decode": ["http://127.0.0.1:1"]}'
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, given, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline(), "it listens"
    process.terminate()
    _, log = await process.communicate()
    said = {line["process"]: line["message"] for line in map(json.loads, log.splitlines())}
    assert said.keys() == {"router", "router-scheduler", "router-front-0", "router-front-1"}


def _asked(worker: FakeWorker, requests: int) -> bool:
    return len(worker.asked) == requests


async def _stream(fronts: Fronts) -> bool:
    """Whether a stream came whole."""
    try:
        return (await fronts.post(anew(STREAM))).content.endswith(b"data: [DONE]\n\n")
    except httpx.TransportError:
        return False
