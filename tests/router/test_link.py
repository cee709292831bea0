"""A scheduler in another process: grants, local actions of a frontend process, and released state."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton_api.background import BackgroundTasks
from baton_api.errors import ModelNotFound, NotReady, Overloaded, QuotaExceeded
from baton_api.prompt_report import PromptReport
from baton_api.workers import Load, Role
from baton_http.link import RemoteError
from baton_http.upstream import UpstreamLost, UpstreamPool
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.frontends.link import rejection_of
from baton_router.frontends.remote_picker import RemotePicker
from baton_router.frontends.scheduler_service import SchedulerService
from baton_router.metrics.registry import MetricFamily
from baton_router.requests.picker import UNREACHABLE, Grant, PickRequest, RequestEnd, WorkerLoss
from baton_router.scheduling.admission import QueueCapacity
from baton_router.workers.worker import Worker
from tests.router.fake_worker import FakeWorker, hang
from tests.router.running import until

ASK = PickRequest("tiny", PromptChunks((1, 2), (512, 700)))
REPORT = PromptReport(
    tokens=9, cached=3, held=0, queue_s=0.0, compute_s=0.1, transfer_s=0.0, remote=True, tail="ab"
)


class FakePicker:
    """Grants what it is asked for, when it may, and remembers what it still owes."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None
        self.requests: list[PickRequest] = []
        self.granted: dict[int, Grant] = {}
        self.heard: list[tuple[object, ...]] = []
        self.withdrawn = 0
        self._number = 100

    async def pick(self, ask: PickRequest) -> Grant:
        self.requests.append(ask)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        if self.error is not None:
            raise self.error
        self._number += 1
        grant = Grant(
            number=self._number,
            decode="127.0.0.1:1",
            prefill="127.0.0.1:2",
            control="127.0.0.1:3",
            summary=b"why",
        )
        self.granted[grant.number] = grant
        return grant

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        assert self.granted[grant.number] == grant
        self.heard.append(("began", report))

    def failed(self, grant: Grant, loss: WorkerLoss = UNREACHABLE) -> None:
        assert self.granted[grant.number] == grant
        self.heard.append(("failed", loss))

    def full(self, grant: Grant) -> None:
        assert self.granted[grant.number] == grant
        self.heard.append(("full",))

    def release(self, grant: Grant, end: RequestEnd) -> None:
        assert self.granted.pop(grant.number) == grant
        self.heard.append(("let go", end))


class Linked:
    """A scheduler service and the remote picker of a frontend process on one socket."""

    def __init__(self, folder: Path, timeout_s: float, requests: int) -> None:
        self.path = str(folder / "scheduler")
        self.picker = FakePicker()
        self.worker = Worker(UpstreamPool(1.0).get("127.0.0.1:1"), Role.DECODE)
        self.workers: tuple[Worker, ...] = (self.worker,)
        self.unasked: Counter[str] = Counter()
        self.upstreams = UpstreamPool(1.0)
        self.capacity = QueueCapacity(requests, 1024**2)
        self.remote = RemotePicker(self.path, self.upstreams, timeout_s, self.capacity, self._unasked)
        self.serve()
        self.keeping = asyncio.create_task(self.remote.keep())

    def _unasked(self, reason: str) -> None:
        self.unasked[reason] += 1

    def serve(self) -> None:
        self.service = SchedulerService(self.picker, lambda: self.workers, asyncio.get_running_loop().time)
        self.serving = asyncio.create_task(self.service.serve(self.path, BackgroundTasks()))

    def deafen(self) -> None:
        """The scheduler's process is busy with something else: what it is sent stays in the socket."""
        for frontend in self.service._frontends:
            frontend.transport.pause_reading()

    def hear(self) -> None:
        for frontend in self.service._frontends:
            frontend.transport.resume_reading()

    async def stop(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def ready(self) -> None:
        self.worker.answered(Load(role=Role.DECODE, model="tiny", epoch="1", compatibility="c"))


@asynccontextmanager
async def linked(timeout_s: float = 60.0, requests: int = 1000) -> AsyncIterator[Linked]:
    with tempfile.TemporaryDirectory() as folder:
        linked_pair = Linked(Path(folder), timeout_s, requests)
        await until(lambda: linked_pair.remote.connected and linked_pair.service.metrics())
        try:
            yield linked_pair
        finally:
            await linked_pair.stop(linked_pair.keeping)
            await linked_pair.stop(linked_pair.serving)


async def test_grant_arrives_and_its_outcome_returns() -> None:
    async with linked() as both:
        grant = await both.remote.pick(ASK)
        assert both.picker.requests == [ASK]
        assert (grant.decode, grant.prefill, grant.control, grant.summary) == (
            "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", b"why"
        )  # fmt: skip
        both.remote.began(grant, REPORT)
        loss = WorkerLoss(crashed=True, at_prefill=True, prefill_crashed=True)
        end = RequestEnd(complete=True, tokens=7, cached=3, charged=12)
        both.remote.failed(grant, loss)
        both.remote.release(grant, end)
        await until(lambda: not both.picker.granted)
        assert both.picker.heard == [("began", REPORT), ("failed", loss), ("let go", end)]
        assert not both.unasked


async def test_known_error_keeps_its_class() -> None:
    async with linked() as both:
        for error in (ModelNotFound("big", ("tiny",)), NotReady("Not now."), QuotaExceeded("files", 7, 7)):
            both.picker.error = error
            with pytest.raises(type(error)) as caught:
                await both.remote.pick(ASK)
            assert caught.value.body() == error.body()
            assert caught.value.retry_after == error.retry_after


def test_unknown_error_becomes_internal() -> None:
    error = RemoteError("Exception", "secret", {}).error()
    assert (error.status, error.code) == (500, rejection_of(1, error).error.error().code)


async def test_request_waiting_in_the_scheduler_is_not_late() -> None:
    async with linked(timeout_s=2.0) as both:
        both.picker.open.clear()
        waiting = asyncio.create_task(both.remote.pick(ASK))
        await asyncio.sleep(2.2)  # longer than the timeout for a silent scheduler
        assert not waiting.done()
        both.picker.open.set()
        both.remote.release(await waiting, RequestEnd(complete=True))
        await until(lambda: both.picker.heard)
        assert not both.picker.granted and not both.unasked


async def test_disconnected_waiting_request_is_withdrawn() -> None:
    async with linked() as both:
        both.picker.open.clear()
        waiting = asyncio.create_task(both.remote.pick(ASK))
        await until(lambda: both.picker.requests)
        waiting.cancel()
        await until(lambda: both.picker.withdrawn)
        assert waiting.cancelled() and not both.picker.granted


async def test_remote_picker_rejects_unacknowledged_requests() -> None:
    """The picker waits for a silent scheduler, then rejects the request with Retry-After."""
    async with linked(timeout_s=0.05) as both:
        both.ready()
        await until(lambda: any(one.ready for one in both.remote.workers))
        assert both.remote.serving
        both.deafen()
        with pytest.raises(NotReady, match=r"did not answer within 0\.05 s") as rejected:
            await both.remote.pick(ASK)
        assert rejected.value.retry_after
        assert both.unasked == {"late": 1}
        both.hear()
        await both.stop(both.serving)
        await until(lambda: not both.remote.connected)
        with pytest.raises(NotReady):
            await both.remote.pick(ASK)
        assert both.unasked == {"late": 1, "away": 1}
        assert not both.remote.serving
        assert not both.picker.requests and not +both.remote.busy
        assert len(both.capacity) == 0


async def test_remote_picker_waits_for_a_busy_scheduler() -> None:
    """Its word comes late: the request is scheduled, by its queue, as if it had come at once."""
    async with linked() as both:
        both.deafen()
        waiting = asyncio.create_task(both.remote.pick(ASK))
        await until(lambda: both.capacity)
        await asyncio.sleep(0.01)
        assert not both.picker.requests and not waiting.done()
        both.hear()
        both.remote.release(await waiting, RequestEnd(complete=True))
        await until(lambda: both.picker.heard)
        assert both.picker.requests == [ASK] and not both.unasked


async def test_remote_picker_bounds_waiting_requests_by_tenant() -> None:
    """Unacknowledged requests are bounded here, acknowledged ones by the scheduler."""
    async with linked(requests=10) as both:
        both.picker.open.clear()
        held = []
        for _ in range(5):
            held += [asyncio.create_task(both.remote.pick(ASK)) for _ in range(8)]
            await until(partial(_acknowledged, both, len(held)))
        both.deafen()
        tenants = [asyncio.create_task(both.remote.pick(replace(ASK, tenant="a"))) for _ in range(20)]
        await until(lambda: both.unasked["full"])
        late = asyncio.create_task(both.remote.pick(replace(ASK, tenant="b")))
        refused = [one for one in tenants if one.done()]
        assert (len(refused), both.unasked["full"], late.done()) == (12, 12, False)
        assert all(isinstance(one.exception(), Overloaded) for one in refused)
        both.hear()
        both.picker.open.set()
        for one in (*held, late, *(one for one in tenants if one not in refused)):
            both.remote.release(await one, RequestEnd(complete=True))
        assert not both.capacity


async def test_remote_picker_resends_ungranted_requests() -> None:
    """A restarted scheduler gets the open requests with their waiting time."""
    async with linked() as both:
        both.ready()
        await until(lambda: any(one.ready for one in both.remote.workers))
        old = await both.remote.pick(ASK)
        both.picker.open.clear()
        held = asyncio.create_task(both.remote.pick(ASK))
        await until(lambda: len(both.picker.requests) == 2)
        await until(lambda: not both.capacity)
        await both.stop(both.serving)
        await until(lambda: not both.remote.connected)
        new = asyncio.create_task(both.remote.pick(ASK))
        await until(lambda: len(both.capacity) == 2)
        assert both.remote.serving and not both.picker.granted, (
            "what a front was granted ends with its connection"
        )
        both.picker.open.set()
        both.serve()
        grants = await asyncio.gather(held, new)
        assert {grant.control for grant in grants} == {"127.0.0.1:3"}
        again = both.picker.requests[2:]
        assert [replace(ask, waited_s=0.0) for ask in again] == [ASK, ASK]
        assert again[0].waited_s > again[1].waited_s > 0
        both.remote.began(old, REPORT)  # the scheduler that granted it is gone: no report is sent
        both.remote.release(old, RequestEnd(complete=True))
        for grant in grants:
            both.remote.release(grant, RequestEnd(complete=True))
        await until(lambda: not both.picker.granted)
        ends = [RequestEnd(complete=False), RequestEnd(complete=True), RequestEnd(complete=True)]
        assert both.picker.heard == [("let go", end) for end in ends]
        assert not both.unasked


async def test_down_worker_is_down_for_frontends_too() -> None:
    async with linked() as both:
        both.ready()
        await until(lambda: any(one.ready for one in both.remote.workers))
        both.worker.health = both.worker.health.missed(1, "it does not answer")
        await until(lambda: both.remote.workers[0].down_since > 0)
        assert not both.remote.workers[0].ready


async def test_connections_to_removed_workers_close_when_unused() -> None:
    async with linked() as both:
        both.ready()
        await until(lambda: any(one.ready for one in both.remote.workers))
        grant = await both.remote.pick(ASK)
        both.upstreams.get(grant.decode)
        both.workers = ()  # the scheduler may have restarted without workers yet
        await until(lambda: not both.remote.workers)
        assert (len(both.upstreams), both.remote.busy[grant.decode]) == (1, 1)
        both.remote.release(grant, RequestEnd(complete=True))
        assert (len(both.upstreams), grant.decode in both.remote.busy) == (0, False)
        both.workers = (both.worker,)
        await until(lambda: both.remote.workers)
        both.upstreams.get(grant.decode)
        both.workers = ()
        await until(lambda: not len(both.upstreams))


async def test_expired_worker_loses_its_requests_in_frontends_too() -> None:
    async with FakeWorker(hang) as worker, linked() as both:
        both.worker = Worker(both.upstreams.get(worker.name), Role.DECODE)
        both.workers = (both.worker,)
        both.ready()
        await until(lambda: [one.name for one in both.remote.workers if one.ready] == [worker.name])
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        asking = asyncio.create_task(both.upstreams.get(worker.name).request(head))
        await worker.arrived.wait()
        both.worker.expired = True
        with pytest.raises(UpstreamLost) as lost:
            await asking
        assert lost.value.cause == "drained"


async def test_scheduler_receives_the_counters_of_frontends() -> None:
    async with linked() as both:
        family = MetricFamily("requests", "Requests.", "counter", [("requests_total", {"code": "200"}, 3.0)])
        both.remote.send_metrics([family])
        await until(lambda: any(both.service.metrics().values()))
        assert list(both.service.metrics().values()) == [[family]]


@pytest.mark.parametrize("seed", range(5))
async def test_law_no_grant_remains_after_any_events(seed: int) -> None:
    """Clients that leave, answers, losses and schedulers that come and go, in any order."""
    rng = random.Random(seed)

    async def client(both: Linked) -> None:
        grant = await both.remote.pick(ASK)
        try:
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.7:
                both.remote.began(grant, REPORT)
            else:
                both.remote.failed(grant)
            await asyncio.sleep(rng.random() * 0.01)
        finally:
            both.remote.release(grant, RequestEnd(complete=rng.random() < 0.5))

    async with linked() as both:
        both.ready()
        await until(lambda: any(one.ready for one in both.remote.workers))
        for _ in range(6):
            clients = [asyncio.create_task(client(both)) for _ in range(40)]
            both.picker.open.set() if rng.random() < 0.7 else both.picker.open.clear()
            for one in rng.sample(clients, 8):
                await asyncio.sleep(rng.random() * 0.002)
                one.cancel()
            if rng.random() < 0.4:
                await both.stop(both.serving)
                both.serve()
            both.picker.open.set()
            outcomes = await asyncio.gather(*clients, return_exceptions=True)
            assert all(one is None or isinstance(one, asyncio.CancelledError) for one in outcomes)
        await until(lambda: both.remote.connected)
        await until(lambda: not both.picker.granted)
        assert not +both.remote.busy


def _acknowledged(both: Linked, requests: int) -> bool:
    return len(both.picker.requests) == requests and not both.capacity
