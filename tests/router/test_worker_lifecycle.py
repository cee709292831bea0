"""Workers come, drain and go under a running router: no request notices, and nothing of them stays."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from baton_api import metrics
from baton_api.workers import Role
from baton_http.upstream import Upstream
from baton_router.workers.worker import WorkerStatus
from tests.router.fake_kubernetes import SELECTOR, FakeKubernetes, a_slice
from tests.router.fake_worker import FakeWorker, gated, hang
from tests.router.running import CHAT, QUESTION, STREAM, RunningRouter, anew, running_router, until
from tests.router.test_kv_subscriber import telling

CLIENTS = 6


class Cluster:
    """Fake workers that an API server lists, and the router that asks it."""

    def __init__(self, api: FakeKubernetes, router: RunningRouter, stack: AsyncExitStack) -> None:
        self.api = api
        self.running = router
        self.router = router.router
        self._stack = stack
        self._numbers = itertools.count()
        self._most = 0
        """Workers at a time."""
        self.slices: dict[str, str] = {}
        """Name of a worker -> that of its slice."""

    async def start(self, role: Role = Role.DECODE, revision: str = "r1", model: str = "tiny") -> FakeWorker:
        """A new worker, listed; the router has found it ready."""
        worker = FakeWorker(role=role, model=model, control="127.0.0.1:1" if role is Role.PREFILL else "")
        await self._stack.enter_async_context(worker)
        self.slices[worker.name] = f"slice-{next(self._numbers)}"
        self.put(worker, revision)
        await until(lambda: self.state(worker) is WorkerStatus.READY)
        self._most = max(self._most, len(self.router.workers.all))
        return worker

    def put(self, worker: FakeWorker, revision: str = "r1", **conditions: bool) -> None:
        name = self.slices[worker.name]
        one = a_slice(name, "127.0.0.1", role=worker.load.role, revision=revision, **conditions)
        self.api.put({**one, "ports": [{"name": "http", "port": worker.port}]})

    async def end(self, worker: FakeWorker) -> None:
        """As a pod ends: nothing new, then what it has, then it is listed no more, then it is gone."""
        self.put(worker, ready=False, serving=True, terminating=True)
        await until(lambda: self.state(worker) is WorkerStatus.DRAINING)
        self.api.delete(self.slices.pop(worker.name))
        await until(lambda: self.state(worker) is None)
        await worker.die()

    def state(self, worker: FakeWorker) -> WorkerStatus | None:
        loop = asyncio.get_running_loop()
        running = [one for one in self.router.workers.all if one.name == worker.name]
        return running[0].state(loop.time()) if running else None

    def leftovers(self) -> list[str]:
        """Return the remaining state of unlisted workers."""
        listed = set(self.slices)
        tasks = (task.get_name() for task in asyncio.all_tasks())
        watched = {name.rpartition(" ")[2] for name in tasks if name.startswith(("watch ", "KV events of "))}
        lines = self.router.metrics.text().decode().splitlines()
        measured = {line.partition('worker="')[2].partition('"')[0] for line in lines} - {""}
        slots = [self.router.scheduler.planner.worker_states.of(one).slot for one in self.router.workers.all]
        leaks = [f"{name} is looked at" for name in watched - listed]
        leaks += [f"{name} is measured" for name in measured - listed]
        leaks += [f"slot {slot}" for slot in slots if slot >= self._most]
        if len(self.router.upstreams) > len(listed):
            leaks.append(f"{len(self.router.upstreams)} addresses have connections")
        return leaks


@asynccontextmanager
async def cluster(folder: Path, **settings: object) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack, FakeKubernetes(folder) as api:
        request_count = {
            "kubernetes_api": api.url,
            "kubernetes_account": str(api.account),
            "kubernetes_selector": SELECTOR,
            "health_interval_s": 0.2,
        }
        async with running_router(**request_count, **settings) as router:  # type: ignore[arg-type]
            yield Cluster(api, router, stack)


async def ask_until(stop: asyncio.Event, router: RunningRouter, seed: int) -> int:
    """One client that asks again and again; each answer is whole. How often it asked."""
    rng = random.Random(seed)
    for number in itertools.count():
        if stop.is_set():
            return number
        if rng.random() < 0.5:
            reply = await router.post(anew(STREAM))
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n"), reply.text
        else:
            reply = await router.post(anew(QUESTION))
            assert reply.status_code == 200 and "Paris" in reply.text, reply.text
        await asyncio.sleep(0.005)
    raise AssertionError


async def test_law_scaling_under_load_fails_nothing_and_leaks_nothing(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as running:
        decodes = [await running.start() for _ in range(2)]
        prefills = [await running.start(Role.PREFILL)]
        stop = asyncio.Event()
        asking = [asyncio.create_task(ask_until(stop, running.running, seed)) for seed in range(CLIENTS)]
        try:
            for workers, role in ((decodes, Role.DECODE), (prefills, Role.PREFILL), (decodes, Role.DECODE)):
                for _ in range(3):  # up, and the oldest one down
                    workers.append(await running.start(role))
                    await running.end(workers.pop(0))
            newest = await running.start(revision="r2")  # the next revision, and the end of this one
            for worker in decodes:
                await running.end(worker)
            request_count = len(newest.requests)
            await until(lambda: len(newest.requests) > request_count + CLIENTS)
        finally:
            stop.set()
        counts = await asyncio.gather(*asking)
        assert min(counts) > 5
        await running.end(prefills[0])
        await until(lambda: not running.leftovers())
        exposed = running.router.metrics
        assert exposed.registry.get_sample_value(metrics.ROUTER_IN_FLIGHT.name) == 0
        assert not exposed.registry.get_sample_value(metrics.ROUTER_CUT.name)


async def test_leaving_worker_finishes_its_requests(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        leaving = await running.start()
        leaving.behaviour = gated
        async with running.running.client.stream("POST", CHAT, json=STREAM) as stream:
            await leaving.arrived.wait()
            other = await running.start()
            running.api.delete(running.slices.pop(leaving.name))
            await until(lambda: running.router.workers.leaving)
            assert (await running.running.post(anew(QUESTION))).status_code == 200
            assert (len(leaving.requests), len(other.requests)) == (1, 1)
            assert running.state(leaving) is WorkerStatus.DRAINING
            leaving.release.set()
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        await until(lambda: not running.leftovers())


async def test_leaving_worker_resumes_unfinished_requests_elsewhere(tmp_path: Path) -> None:
    async with cluster(tmp_path, worker_drain_s=0.1) as running:
        stuck = await running.start()
        stuck.behaviour = hang
        asking = asyncio.create_task(running.running.post(QUESTION))
        await stuck.arrived.wait()
        await running.start()
        running.put(stuck, ready=False, serving=False, terminating=True)
        assert (await asking).status_code == 200
        await asyncio.wait_for(stuck.left.wait(), 60)


async def test_address_reused_by_another_revision_belongs_to_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        worker = await running.start()
        running.put(worker, "r2")
        await until(lambda: [one.revision for one in running.router.workers.all] == ["r2"])
        await until(lambda: running.state(worker) is WorkerStatus.READY)
        assert (await running.running.post()).status_code == 200
        assert not running.leftovers()


async def test_feed_of_a_leaving_worker_ends(tmp_path: Path) -> None:
    async with FakeWorker() as http, telling(http), cluster(tmp_path) as running:
        running.slices[http.name] = "telling"
        running.put(http)
        followed = running.router.scheduler.kv_subscribers.subscribers
        await until(lambda: followed and next(iter(followed.values())).feed.whole)
        running.api.delete(running.slices.pop(http.name))
        await until(lambda: not followed and not running.leftovers())


async def test_connections_to_removed_workers_are_closed() -> None:
    async with FakeWorker() as worker:
        upstream = Upstream("127.0.0.1", worker.port)
        for connections in (1, 1, 2, 3):  # used again, until it has gone
            if connections == 2:
                upstream.close()
            exchange = await upstream.request(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            while await exchange.read():
                pass
            assert worker.connections == connections


async def test_requests_reach_a_worker_by_any_model_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        tiny = await running.start()
        adapted = await running.start(model="large")
        adapted.load = type(adapted.load)(
            role=Role.DECODE, model="large", names=("large", "l", "large:sql"), epoch="1"
        )
        await until(lambda: "large:sql" in running.router.workers.models())
        listed = (await running.running.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["large", "tiny", "l", "large:sql"]
        for name, worker in (("large:sql", adapted), ("l", adapted), ("tiny", tiny)):
            count = len(worker.requests)
            assert (await running.running.post({**anew(QUESTION), "model": name})).status_code == 200
            assert len(worker.requests) == count + 1
        unknown = await running.running.post({**QUESTION, "model": "huge"})
        assert unknown.status_code == 404 and "large, tiny, l, large:sql" in unknown.text
        await running.end(adapted)
        missed = await running.running.post({**QUESTION, "model": "large"})
        assert missed.status_code == 503 and "the last one that did went" in missed.text
        assert "retry-after" in missed.headers


async def test_router_without_workers_names_the_empty_sources(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:

        async def reason() -> str:
            reply = await running.running.client.get("/ready")
            assert reply.status_code == 503
            message: str = reply.json()["error"]["message"]
            return message

        await until(lambda: running.router.workers.complete())
        assert await reason() == "There is no decode worker: Kubernetes lists none."
        running.api.status = 403
        running.api.break_off()
        await until(lambda: "status 403" in running.router.workers.unlisted())
        assert "the account may not list and watch endpointslices" in await reason()
