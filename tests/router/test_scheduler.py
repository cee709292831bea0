"""The scheduler releases all state of a request, for every end and every behavior of workers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

import pytest

from baton_api.errors import BatonError
from baton_api.prompt_report import PromptReport
from baton_api.request_classes import CLASSES
from baton_api.workers import Load, Role
from baton_http.upstream import UpstreamPool
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.requests.picker import Grant, PickRequest, RequestEnd
from baton_router.scheduling.scheduler import RequestScheduler
from baton_router.settings import RouterSettings
from baton_router.tenants.tenants import TenantLimits
from baton_router.workers.discovery.listed import ListedWorker
from baton_router.workers.worker import Worker

LISTED = [ListedWorker("127.0.0.1", 8100 + number, Role.DECODE) for number in range(3)]
LISTED += [ListedWorker("127.0.0.1", 8200 + number, Role.PREFILL) for number in range(3)]

LIMITS = TenantLimits(requests_per_minute=600, tokens_per_minute=4_000_000, streams=8)


@dataclass
class Cluster:
    """A scheduler, workers that come and go, clients that leave, and a clock that the test moves."""

    rng: random.Random
    ways: tuple[str, ...] = ("whole", "lost", "refused", "left")
    """Ways in which requests end."""
    now: float = 100.0
    epoch: int = 1
    listed: set[ListedWorker] = field(default_factory=lambda: set(LISTED))
    picking: list[asyncio.Task[Grant]] = field(default_factory=list)
    granted: list[tuple[Grant, bool]] = field(default_factory=list)
    """Unreleased grants, and whether they have begun."""
    seen: list[Worker] = field(default_factory=list)
    """All workers that there ever were."""

    def __post_init__(self) -> None:
        settings = RouterSettings.model_validate(
            {"queue_requests": 30, "wait_s": 20.0, "recovery_s": 3.0, "worker_drain_s": 5.0}
        )
        self.scheduler = RequestScheduler(settings, UpstreamPool(1.0), random.Random(1), lambda: self.now)
        self.notify()

    def notify(self) -> None:
        """List these workers; new ones report their load."""
        self.scheduler.registration.on_workers("test", self.listed)
        for worker in self.scheduler.workers.all:
            if worker not in self.seen:
                self.seen.append(worker)
            if worker.health.load is None:
                self.look(worker, "1")

    def look(self, worker: Worker, epoch: str) -> None:
        load = Load(
            role=worker.listed, model="tiny", control="x:1" if worker.listed is Role.PREFILL else "",
            compatibility="c", epoch=epoch, total_blocks=2_000, free_blocks=2_000,
        )  # fmt: skip
        worker.answered(load)

    def request(self) -> None:
        rng = self.rng
        names = [one.name for one in self.listed]
        excluded = tuple(rng.sample(names, rng.randrange(2))) if names else ()
        ask = PickRequest(
            rng.choice(["tiny", "tiny", "tiny", "other", None]),
            chunk_text(b"a" * 700 * rng.randrange(12) + rng.randbytes(rng.randrange(90_000)), 7),
            excluded=excluded,
            tenant=f"t{rng.randrange(3)}",
            priority_class=rng.choice(list(CLASSES)),
            limits=LIMITS if rng.random() < 0.5 else None,
            ttft_slo_s=rng.choice([None, 2.0]),
            streams=rng.random() < 0.7,
            size=5_000,
        )
        self.picking.append(asyncio.create_task(self.scheduler.pick(ask)))

    async def settle(self) -> None:
        """Wait until all possible events have happened."""
        self.scheduler.registration.release_expired()
        self.scheduler.queue.changed()
        for _ in range(6):
            await asyncio.sleep(0)
        done = [task for task in self.picking if task.done()]
        self.picking = [task for task in self.picking if not task.done()]
        for task in done:
            if task.cancelled() or isinstance(task.exception(), BatonError):
                continue
            self.granted.append((task.result(), False))

    def end(self, grant: Grant, begun: bool) -> None:
        """One of the ways in which a request ends."""
        rng, scheduler = self.rng, self.scheduler
        way = rng.choice(self.ways)
        if way == "refused" and not begun:
            scheduler.full(grant)
        if way == "lost":
            scheduler.failed(grant)
        if way == "whole" and not begun:
            self.begin(grant)
        scheduler.release(grant, RequestEnd(complete=way == "whole"))

    def begin(self, grant: Grant) -> None:
        tokens = self.rng.randrange(1, 3_000)
        cached = self.rng.randrange(tokens)
        report = PromptReport(
            tokens=tokens, cached=cached, held=0, queue_s=0.0, compute_s=(tokens - cached) / 500,
            transfer_s=0.001, remote=bool(grant.prefill), tail=f"{self.rng.getrandbits(64):016x}",
        )  # fmt: skip
        self.scheduler.began(grant, self.rng.choice([report, report, None]))

    def left(self) -> dict[str, int]:
        """Return the remaining state of requests by place; all 0 without requests."""
        scheduler = self.scheduler
        states = scheduler.planner.worker_states
        seen = [states.of(worker) for worker in scheduler.workers.all]
        return {
            "computing": sum(one.prefills.waiting for one in seen),
            "seconds": sum(one.prefills.backlog_s(self.now) > 0 for one in seen),
            "streams": sum(one.streams.count + one.streams.tokens for one in seen),
            "in flight": sum(abs(worker.in_flight) for worker in self.seen),
            "waiting": len(scheduler.queue),
            "open": sum(scheduler._quotas.open(f"t{number}") for number in range(3)),
            "reserved": sum(one.reservation is not None for one in scheduler.planner.placements),
            "granted": len(scheduler._granted),
            "probed": sum(bool(worker.health.breaker.probe) for worker in self.seen),
        }


@pytest.mark.parametrize("seed", range(25))
async def test_law_no_state_remains_after_any_end(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng) if seed % 2 else Cluster(rng, ("lost", "lost", "lost", "left"))
    for _ in range(300):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                cluster.request()
            case 4 if cluster.picking:
                if cluster.granted:
                    cluster.end(*cluster.granted.pop())
                for _ in range(rng.randrange(4)):  # until the others are about to go, or gone
                    await asyncio.sleep(0)
                for task in rng.sample(cluster.picking, min(3, len(cluster.picking))):
                    task.cancel()
            case 5 | 6 if cluster.granted and seed % 2:
                number = rng.randrange(len(cluster.granted))
                grant, begun = cluster.granted[number]
                if not begun:
                    cluster.begin(grant)
                    cluster.granted[number] = grant, True
            case 7 | 8 if cluster.granted:
                cluster.end(*cluster.granted.pop(rng.randrange(len(cluster.granted))))
            case 9 if cluster.scheduler.workers.all:
                cluster.epoch += 1
                cluster.look(rng.choice(cluster.scheduler.workers.all), str(cluster.epoch))
            case 10:
                one = rng.choice(LISTED)
                cluster.listed ^= {one}
                cluster.notify()
            case _:
                cluster.now += rng.expovariate(1.5)
        await cluster.settle()

    cluster.listed = set(LISTED)
    cluster.notify()
    for _ in range(400):
        while cluster.granted:
            cluster.end(*cluster.granted.pop())
        cluster.now += 0.5
        await cluster.settle()
        if not cluster.picking and not cluster.granted:
            break
    assert not cluster.picking
    assert cluster.left() == dict.fromkeys(cluster.left(), 0)
    index = cluster.scheduler.planner.worker_states
    for one in LISTED:
        cluster.listed.discard(one)
    cluster.notify()
    cluster.now += 60
    await cluster.settle()
    assert len(index) == 0, "of who has gone nothing is held"


async def test_disconnected_waiting_request_leaves_no_state() -> None:
    cluster = Cluster(random.Random(0))
    for _ in range(20):
        cluster.request()
    await cluster.settle()
    for task in cluster.picking:
        task.cancel()
    for grant, _ in cluster.granted:
        cluster.scheduler.release(grant, RequestEnd(complete=False))
    cluster.granted.clear()
    await cluster.settle()
    assert cluster.left() == dict.fromkeys(cluster.left(), 0)


async def test_first_byte_times_are_counted_for_streams_only() -> None:
    cluster = Cluster(random.Random(0))
    cluster.listed = {replace(LISTED[0], revision="6f1c2ab9")}
    cluster.notify()
    for streams, took in ((True, 0.4), (False, 9.0), (True, 2.4)):
        grant = await cluster.scheduler.pick(
            PickRequest("tiny", chunk_text(b"a question", 7), streams=streams)
        )
        cluster.now += took
        cluster.scheduler.began(grant, None)
        cluster.scheduler.release(grant, RequestEnd(complete=True))
    (family,) = cluster.scheduler.outcomes.revision_first_tokens.collect()
    (total,) = (one.value for one in family.samples if one.name.endswith("_sum"))
    assert total == pytest.approx(2.8)
