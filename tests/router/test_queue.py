"""Requests that wait for a free worker: immediate starts, waiting, and rejections with Retry-After."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_api import headers, metrics
from baton_api.errors import BatonError, ModelNotFound, NotInTime, NotReady, Overloaded
from baton_api.prompt_report import PromptReport
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.requests.picker import PickRequest, RequestCost
from baton_router.scheduling.placement import Placement
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.scheduling.priority_queue import LEVELS
from baton_router.scheduling.queue import LEAST_TICK_S, REPLAN_S, TICK_S, Queue
from baton_router.scheduling.wakeup import BATCHED_PROMPTS_S, NEARLY_DONE_S
from baton_router.settings import RouterSettings
from baton_router.workers.costs import WorkerKind
from baton_router.workers.worker import FULL_S, Worker
from baton_router.workers.worker_list import Workers
from benchmarks import virtual_time

LONG, SHORT = 40_000, 400
"""Bytes of prompts."""

SECONDS_PER_BYTE = 1e-4
"""Reported compute times of the workers: a long prompt takes four seconds."""


class Cluster:
    """A queue with workers of known speed, and a clock that the test advances."""

    def __init__(
        self,
        decodes: int = 1,
        prefills: int = 1,
        *,
        clock: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        self._clock, self._now = clock, 100.0
        self.rng = random.Random(1)
        self.decodes = [self.worker(Role.DECODE, 8100 + number) for number in range(decodes)]
        self.prefills = [self.worker(Role.PREFILL, 8200 + number) for number in range(prefills)]
        self.workers = Workers(tuple(self.decodes), tuple(self.prefills))
        config = RouterSettings.model_validate(
            {"prefill_tokens": 100_000, "local_prefill_max_tokens": 0, **settings}
        )
        self.planner = PlacementPlanner(self.workers, random.Random(1), config.local_prefill_max_tokens)
        self.queue = Queue(config, self.planner, lambda: self.now)
        for one in self.workers.all:
            self.teach(one)
        self.placed: list[str] = []
        self.tasks: dict[str, asyncio.Task[Placement]] = {}

    @property
    def now(self) -> float:
        return self._clock() if self._clock else self._now

    @now.setter
    def now(self, value: float) -> None:
        self._now = value

    def teach(self, worker: Worker) -> None:
        cost = self.planner.worker_states.of(worker).prefill_cost
        for size in range(100, 12_000, 100):
            cost.learn(size, size, 4 * size * SECONDS_PER_BYTE)

    @staticmethod
    def worker(role: Role, port: int, **load: Any) -> Worker:
        placement = Worker(
            Upstream("127.0.0.1", port, 1.0), Role.PREFILL if role is Role.PREFILL else Role.DECODE
        )
        report = {"model": "tiny", "total_blocks": 100_000, "free_blocks": 100_000, "epoch": "1", **load}
        control = "x:1" if role is Role.PREFILL else ""
        placement.answered(Load(role=role, control=control, compatibility="c", **report))
        return placement

    def request(self, size: int = SHORT, model: str = "tiny", **fields: Any) -> PickRequest:
        return PickRequest(model, chunk_text(self.rng.randbytes(size), 7), size=size, **fields)

    async def send(self, name: str, size: int = SHORT, **fields: Any) -> asyncio.Task[Placement]:
        """A request, as far as it comes by itself."""

        async def go() -> Placement:
            placement = await self.queue.place(self.request(size, **fields))
            self.placed.append(name)
            return placement

        self.tasks[name] = task = asyncio.create_task(go())
        await self.settle()
        return task

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queue.changed()
        await self.settle()

    async def computed(self, placement: Placement) -> None:
        report = PromptReport(
            tokens=placement.tokens, cached=0, held=0, queue_s=0.0, compute_s=placement.compute_s,
            transfer_s=0.001, remote=placement.pair.prefill is not None,
        )  # fmt: skip
        self.planner.began(placement, report, self.now)
        self.queue.changed()
        await self.settle()

    async def finish(self, task: asyncio.Task[Placement]) -> None:
        placement = task.result()
        await self.computed(placement)
        self.planner.release(placement, self.now, complete=True)
        self.queue.changed()
        await self.settle()

    @property
    def booked(self) -> int:
        states = [self.planner.worker_states.of(one) for one in self.workers.all]
        return sum(one.prefills.waiting + one.streams.count for one in states)


@asynccontextmanager
async def cluster_of(*args: int, **settings: Any) -> AsyncIterator[Cluster]:
    """A cluster whose timers raise nothing and that is empty in the end."""
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    cluster = Cluster(*args, **settings)
    yield cluster
    assert not [context for context in broken if "handle" in context]
    for task in cluster.tasks.values():
        task.cancel()
    await asyncio.gather(*cluster.tasks.values(), return_exceptions=True)
    assert len(cluster.queue) == 0
    assert not any(cluster.queue.count(level) for level in range(4))
    for task in cluster.tasks.values():
        if not task.cancelled() and task.exception() is None:
            cluster.planner.release(task.result(), cluster.now, complete=False)
    assert cluster.booked == 0


async def test_idle_worker_gets_a_request_in_the_same_iteration() -> None:
    async with cluster_of(1, 2) as cluster:
        for _ in range(2):
            waiting = cluster.queue.place(cluster.request(LONG))
            with pytest.raises(StopIteration) as stopped:
                waiting.send(None)
            cluster.planner.release(stopped.value.value, cluster.now, complete=True)


async def test_busy_worker_gets_its_next_prompt_at_the_first_token() -> None:
    async with cluster_of() as cluster:
        first = await cluster.send("first", LONG)
        await cluster.send("second", LONG)
        await cluster.pass_time(1.0)
        assert cluster.placed == ["first"]
        await cluster.computed(first.result())
        assert cluster.placed == ["first", "second"]


async def test_nearly_idle_worker_gets_the_next_prompt() -> None:
    async with cluster_of() as cluster:
        await cluster.send("first", 2000)  # 0.2 s
        await cluster.send("second", LONG)
        await cluster.pass_time(0.2 - NEARLY_DONE_S - 0.02)
        assert cluster.placed == ["first"]
        await cluster.pass_time(0.03)
        assert cluster.placed == ["first", "second"]


async def test_many_short_prompts_are_computed_together() -> None:
    async with cluster_of() as cluster:
        for one in cluster.workers.all:  # an engine that takes the same for any short prompt
            cost = cluster.planner.worker_states.of(one).prefill_cost = WorkerKind().new_worker()
            for size in range(50, 200):
                cost.learn(size, size, 0.025)
        for number in range(40):
            await cluster.send(f"{number}", 400)
        assert len(cluster.placed) == pytest.approx(BATCHED_PROMPTS_S / 0.025, abs=2)


async def test_worker_without_reports_is_limited_by_tokens() -> None:
    async with cluster_of(1, 0, prefill_tokens=1000) as cluster:
        cluster.decodes[0].answered(Load(role=Role.DECODE, model="tiny", epoch="2"))  # as if just started
        for number in range(12):
            await cluster.send(f"{number}", 400)
        assert len(cluster.placed) == 10


async def test_single_prompt_starts_whatever_its_length() -> None:
    async with cluster_of(prefill_tokens=10) as cluster:
        first = await cluster.send("first", LONG)
        await cluster.send("second", LONG)
        assert cluster.placed == ["first"]
        await cluster.finish(first)
        assert cluster.placed == ["first", "second"]


async def test_unstreamed_prompt_counts_as_computed_when_predicted() -> None:
    async with cluster_of() as cluster:
        await cluster.send("whole", LONG, streams=False)  # 4 s
        await cluster.send("next", LONG)
        await cluster.pass_time(3.8)
        assert cluster.placed == ["whole"]
        await cluster.pass_time(0.3)
        assert cluster.placed == ["whole", "next"]


async def test_shortest_goes_first_and_a_higher_class_before() -> None:
    async with cluster_of() as cluster:
        tasks = [await cluster.send("first", LONG)]
        await cluster.send("long", LONG)
        await cluster.send("short", 8000)
        await cluster.send("urgent", LONG, priority_class="critical")
        await cluster.send("batch", SHORT, priority_class="batch")
        for name in ("urgent", "short", "long", "batch"):
            await cluster.finish(tasks[-1])
            tasks.append(cluster.tasks[name])
            assert cluster.placed[-1] == name


async def test_retried_request_goes_first() -> None:
    async with cluster_of(2) as cluster:
        first = await cluster.send("first", LONG)
        await cluster.send("critical", SHORT, priority_class="critical")
        await cluster.send(
            "again", LONG, priority_class="critical", excluded=(cluster.decodes[0].name,), retried=True
        )
        await cluster.finish(first)
        assert cluster.placed == ["first", "again"]
        assert cluster.tasks["again"].result().pair.decode is cluster.decodes[1]


async def test_waiting_at_a_frontend_counts_in_order_and_age() -> None:
    """A request may have waited before the scheduler heard of it."""
    async with cluster_of(wait_s=20.0) as cluster:
        first = await cluster.send("first", LONG)
        assert cluster.queue.oldest(LEVELS["default"]) is None
        await cluster.send("young", LONG)
        await cluster.send("old", LONG, waited_s=15.0)
        assert cluster.queue.oldest(LEVELS["default"]) == cluster.now - 15.0
        expiring = await cluster.send("expiring", LONG, waited_s=19.0)
        await cluster.pass_time(1.1)
        assert isinstance(expiring.exception(), NotInTime)
        await cluster.finish(first)
        assert cluster.placed == ["first", "old"]


async def test_full_worker_is_not_asked_again_at_once() -> None:
    async with cluster_of(1, 0) as cluster:
        worker = cluster.decodes[0]
        worker.health = worker.health.full(cluster.now)
        await cluster.send("again", retried=True)
        await cluster.pass_time(FULL_S - 0.1)
        assert cluster.placed == []
        await cluster.pass_time(0.2)
        assert cluster.placed == ["again"]


async def test_batch_leaves_a_tenth_of_the_blocks_free() -> None:
    async with cluster_of(1, 0) as cluster:
        full = Load(role=Role.DECODE, model="tiny", epoch="1", total_blocks=100, free_blocks=9)
        cluster.decodes[0].answered(full)
        await cluster.send("default", SHORT)
        await cluster.computed(cluster.tasks["default"].result())
        await cluster.send("batch", SHORT, priority_class="batch")
        assert cluster.placed == ["default"]
        cluster.decodes[0].answered(
            Load(role=Role.DECODE, model="tiny", epoch="1", total_blocks=100, free_blocks=10)
        )
        await cluster.pass_time(0.1)
        assert cluster.placed == ["default", "batch"]


async def test_request_beside_a_batch_starts_at_once_planned_once() -> None:
    async with cluster_of(2, 0) as cluster:
        for one in cluster.decodes:
            one.answered(Load(role=Role.DECODE, model="tiny", epoch="1", total_blocks=100, free_blocks=9))
        for name in ("one", "two"):
            await cluster.send(name, SHORT)
            await cluster.computed(cluster.tasks[name].result())
        await cluster.send("batch", SHORT, priority_class="batch")
        assert cluster.placed == ["one", "two"] and len(cluster.queue) == 1
        before = cluster.planner.plan(
            PickRequest(model="tiny", prompt=chunk_text(b"a question", 7)), cluster.now
        )
        sending = cluster.queue.place(cluster.request(SHORT, priority_class="interactive"))
        with pytest.raises(StopIteration) as stopped:
            sending.send(None)
        placement = stopped.value.value
        assert before is not None and placement.number == before.number + 1
        cluster.planner.release(placement, cluster.now, complete=True)


async def test_queue_of_one_model_delays_no_other_model() -> None:
    async with cluster_of(1, 0) as cluster:
        cluster.workers.decode += (cluster.worker(Role.DECODE, 8300, model="other"),)
        for name in ("first", "second"):
            await cluster.send(name, LONG)
        assert cluster.placed == ["first"] and len(cluster.queue) == 1
        sending = cluster.queue.place(cluster.request(LONG, model="other"))
        with pytest.raises(StopIteration) as stopped:
            sending.send(None)
        cluster.planner.release(stopped.value.value, cluster.now, complete=True)


async def test_waiting_request_for_a_shared_worker_is_not_overtaken() -> None:
    """One worker has two models, another one of them. A request waiting for the shared worker goes first."""
    async with cluster_of(1, 0) as cluster:
        shared = cluster.worker(Role.DECODE, 8300, model="both", names=("tiny", "other"))
        cluster.workers.decode += (shared,)
        cluster.teach(shared)
        await cluster.send("shared", LONG // 20, model="other")
        await cluster.send("own", LONG)
        await cluster.send("waiting", LONG, model="other")
        assert cluster.placed == ["shared", "own"]
        cluster.now += 0.2  # the shared worker is done, but not reported yet
        await cluster.send("comer", SHORT)
        assert cluster.placed == ["shared", "own", "waiting"]


async def test_late_interactive_request_is_rejected_with_retry_after() -> None:
    async with cluster_of() as cluster:
        await cluster.send("first", LONG, priority_class="interactive", ttft_slo_s=5.0)
        await cluster.send("in time", LONG // 2, priority_class="interactive", ttft_slo_s=5.0)
        late = await cluster.send("late", LONG, priority_class="interactive", ttft_slo_s=5.0)
        error = late.exception()
        assert isinstance(error, NotInTime)
        assert error.headers[headers.PREDICTED] == "10000"
        assert 5 <= int(error.headers["retry-after"]) <= 9
        patient = await cluster.send("patient", LONG)
        assert not patient.done()
        assert cluster.queue.rejects == {"late": 1}


async def test_request_is_never_late_on_an_idle_cluster() -> None:
    async with cluster_of() as cluster:
        await cluster.send("long", LONG, priority_class="interactive", ttft_slo_s=0.1)
        assert cluster.placed == ["long"]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({}, 20.0), ({"ttft_slo_s": 2.0}, 2.0), ({"priority_class": "interactive", "ttft_slo_s": 20.0}, 30.0)],
)
async def test_expired_wait_is_reported_with_its_error(fields: dict[str, Any], seconds: float) -> None:
    async with cluster_of(wait_s=20.0) as cluster:
        await cluster.send("first", LONG)
        waiting = await cluster.send("waiting", LONG, **fields)
        batch = await cluster.send("batch", LONG, priority_class="batch")
        await cluster.pass_time(seconds - 0.1)
        assert not waiting.done()
        await cluster.pass_time(0.2)
        assert isinstance(waiting.exception(), NotInTime)
        assert str(waiting.exception()) == str(NotInTime(seconds + 0.1, seconds, waited=True))
        assert cluster.queue.rejects == {"waited": 1}
        await cluster.pass_time(1e6)
        assert not batch.done()


async def test_request_waits_for_an_unready_worker_to_recover() -> None:
    async with cluster_of(recovery_s=5.0) as cluster:
        worker = cluster.decodes[0]
        before = worker.health
        worker.health = before.missed(1, "it does not answer")
        recovered = await cluster.send("recovered")
        await cluster.pass_time(4.0)
        assert not recovered.done()
        worker.health = before
        await cluster.pass_time(0.5)
        assert cluster.placed == ["recovered"]
        worker.health = before.missed(1, "it does not answer")
        lost = await cluster.send("lost")
        await cluster.pass_time(5.0)
        assert isinstance(lost.exception(), NotReady) and "within 5.0 s" in str(lost.exception())
        assert cluster.queue.rejects == {"unready": 1}


async def test_request_tried_everywhere_does_not_wait() -> None:
    async with cluster_of() as cluster:
        task = await cluster.send("again", excluded=(cluster.decodes[0].name,))
        assert isinstance(task.exception(), NotReady)
        unknown = await cluster.send("unknown", model="gpt-x")
        assert isinstance(unknown.exception(), ModelNotFound)


async def test_tenant_cannot_fill_the_queue() -> None:
    async with cluster_of(queue_requests=10) as cluster:
        await cluster.send("first", LONG)
        for number in range(10):
            await cluster.send(f"flood {number}", LONG, tenant="flood")
        refused = [one for one in cluster.tasks.values() if one.done() and one.exception()]
        assert len(refused) == 2 and isinstance(refused[0].exception(), Overloaded)
        other = await cluster.send("other", LONG, tenant="other")
        assert not other.done()
        assert cluster.queue.rejects == {"full": 2}


async def test_bodies_cannot_fill_the_memory() -> None:
    async with cluster_of(queue_bytes=100_000) as cluster:
        await cluster.send("first", LONG)
        await cluster.send("waits", LONG)
        task = await cluster.send("too much", LONG)
        assert isinstance(task.exception(), Overloaded) and "bytes" in str(task.exception())


async def test_disconnected_client_leaves_no_state() -> None:
    async with cluster_of() as cluster:
        first = await cluster.send("first", LONG)
        waiting = await cluster.send("waiting", LONG)
        waiting.cancel()
        await cluster.settle()
        assert len(cluster.queue) == 0
        await cluster.finish(first)
        assert cluster.booked == 0


async def test_request_that_leaves_while_granted_is_released() -> None:
    async with cluster_of() as cluster:
        first = await cluster.send("first", LONG)
        waiting = await cluster.send("waiting", LONG)
        cluster.planner.release(first.result(), cluster.now, complete=True)
        cluster.queue.changed()
        loop = asyncio.get_running_loop()
        loop.call_later(0, waiting.cancel)  # behind the look that gives it a worker, before it hears of that
        await cluster.settle()
        assert waiting.cancelled() and cluster.booked == 0


async def test_requests_wait_for_workers_of_their_model_only() -> None:
    async with cluster_of(1, 0) as cluster:
        other = cluster.worker(Role.DECODE, 8300, model="other")
        cluster.workers.decode += (other,)
        await cluster.send("first", LONG)
        for number in range(5):
            await cluster.send(f"{number}", LONG)
        await cluster.send("other", LONG, model="other")
        assert cluster.placed == ["first", "other"]


@pytest.mark.parametrize("seed", range(8))
async def test_law_no_request_is_lost(seed: int) -> None:
    """Every request starts or is rejected, and no booking remains."""
    rng = random.Random(seed)
    async with cluster_of(2, 2, queue_requests=40, wait_s=20.0, recovery_s=3.0) as cluster:
        healths = [(one, one.health) for one in cluster.workers.all]
        running: list[asyncio.Task[Placement]] = []
        for number in range(250):
            action = rng.random()
            if action < 0.5:
                await cluster.send(
                    f"{number}", rng.choice([SHORT, LONG // 8, LONG]), tenant=f"t{rng.randrange(3)}",
                    priority_class=rng.choice(["critical", "interactive", "default", "batch"]),
                    ttft_slo_s=rng.choice([None, 3.0]), streams=rng.random() < 0.7,
                )  # fmt: skip
            elif action < 0.65:
                await cluster.pass_time(rng.expovariate(2))
            elif action < 0.72:
                rng.choice(list(cluster.tasks.values()) or [asyncio.create_task(cluster.settle())]).cancel()
                await cluster.settle()
            elif action < 0.76:
                worker, health = rng.choice(healths)
                worker.health = health if worker.health.down else health.missed(1, "gone")
            else:
                running = [one for one in cluster.tasks.values() if one.done() and not one.cancelled()]
                running = [one for one in running if one.exception() is None and one.result().ended is None]
                if running:
                    await cluster.finish(rng.choice(running))
        for worker, health in healths:
            worker.health = health
        for _ in range(2000):
            running = [
                one
                for one in cluster.tasks.values()
                if one.done() and not one.cancelled() and not one.exception() and one.result().ended is None
            ]
            for one in running:
                await cluster.finish(one)
            await cluster.pass_time(0.5)
            if not len(cluster.queue) and not running:
                break
        for one in cluster.tasks.values():
            assert one.done()
            assert one.cancelled() or one.exception() is None or isinstance(one.exception(), BatonError)
        assert cluster.booked == 0


async def test_held_request_waits_for_the_first_worker_to_start() -> None:
    async with cluster_of(0, 0, hold_s=120.0, recovery_s=5.0) as cluster:
        held = [await cluster.send(kind, SHORT, priority_class=kind) for kind in ("interactive", "default")]
        await cluster.pass_time(100.0)
        assert (cluster.queue.gauges()[metrics.ROUTER_HELD], cluster.placed) == (2, [])
        assert cluster.queue.gauges()[metrics.ROUTER_QUEUED_TOKENS] == 2 * SHORT // 4
        assert cluster.queue.demand["prompt"] == 2 * SHORT // 4
        cluster.workers.add(cluster.worker(Role.DECODE, 8100))
        await cluster.pass_time(0.1)
        assert cluster.placed == ["interactive", "default"]
        assert cluster.queue.gauges()[metrics.ROUTER_HELD] == 0
        assert all(one.done() for one in held)


async def test_held_request_is_rejected_when_its_time_ends() -> None:
    async with cluster_of(0, 0, hold_s=60.0) as cluster:
        waits = await cluster.send("waits")
        hasty = await cluster.send("hasty", ttft_slo_s=2.0)
        await cluster.pass_time(3.0)
        assert isinstance(hasty.exception(), NotReady)
        await cluster.pass_time(58.0)
        assert isinstance(waits.exception(), NotReady)
        assert cluster.queue.rejects["unready"] == 2


async def test_request_for_an_unlisted_model_is_not_held() -> None:
    async with cluster_of(0, 0, hold_s=60.0) as cluster:
        cluster.workers.hold_models = ("tiny",)
        unknown = await cluster.send("unknown", model="other")
        assert isinstance(unknown.exception(), ModelNotFound)
        assert cluster.queue.gauges()[metrics.ROUTER_HELD] == 0
        assert cluster.workers.models() == ("tiny",)


async def test_demand_counts_each_request_once_even_if_rejected() -> None:
    async with cluster_of(queue_requests=1) as cluster:
        await cluster.send("first", LONG, cost=RequestCost(answer_limit=10))
        refused = await cluster.send("refused", LONG, cost=RequestCost(answer_limit=10))
        assert isinstance(refused.exception(), Overloaded)
        assert cluster.queue.demand["answer"] == 20
        before = cluster.queue.demand["prompt"]
        assert before > LONG / 4
        await cluster.send("again", LONG, retried=True)
        assert cluster.queue.demand["prompt"] == before
        assert cluster.queue.demand["local"] == 0


@pytest.mark.parametrize(("prefills", "local"), [(1, True), (0, False)])
async def test_demand_of_a_short_chat_is_local_beside_prefill(prefills: int, local: bool) -> None:
    """Prompts computed by decode workers count as local only beside prefill workers."""
    async with cluster_of(1, prefills, local_prefill_max_tokens=256) as cluster:
        await cluster.send("short", SHORT)
        demand = cluster.queue.demand
        assert demand["prompt"] > 0
        assert demand["local"] == (demand["prompt"] if local else 0)
        await cluster.send("long", LONG)
        assert demand["local"] < demand["prompt"] - LONG / 8


# --- Time passes, and no worker says anything ---


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test on a loop whose time jumps to the next timer."""

    @functools.wraps(test)
    def run() -> None:
        virtual_time.run(test())

    return run


def loop_time() -> float:
    return 100.0 + asyncio.get_running_loop().time()


async def seconds_until(task: asyncio.Task[Placement]) -> float:
    """Of the loop's time, until the request goes or gets its error."""
    before = asyncio.get_running_loop().time()
    await asyncio.wait([task], timeout=60.0)
    assert task.done()
    return asyncio.get_running_loop().time() - before


@in_virtual_time
async def test_queue_worker_nearly_done_gets_the_next_prompt() -> None:
    async with cluster_of(1, 0, clock=loop_time) as cluster:
        await cluster.send("first", 2550)  # 0.255 s
        waiting = await cluster.send("second", LONG)
        assert await seconds_until(waiting) == pytest.approx(0.255 - NEARLY_DONE_S, abs=LEAST_TICK_S)


@in_virtual_time
async def test_queue_waiting_time_ends_without_events() -> None:
    async with cluster_of(1, 0, clock=loop_time, wait_s=0.53) as cluster:
        await cluster.send("first", LONG)
        waiting = await cluster.send("second", LONG)
        assert await seconds_until(waiting) == pytest.approx(0.53, abs=LEAST_TICK_S)
        assert isinstance(waiting.exception(), NotInTime)


@in_virtual_time
async def test_queue_unstreamed_prompt_ends_without_events() -> None:
    """Of a worker that has taught nothing only tokens count, until its prompt should be computed."""
    async with cluster_of(1, 0, clock=loop_time, prefill_tokens=1000) as cluster:
        cluster.decodes[0].answered(Load(role=Role.DECODE, model="tiny", epoch="2"))
        first = await cluster.send("first", LONG, streams=False)
        waiting = await cluster.send("second", LONG)
        expected = first.result().option.first_token_s
        assert expected > LEAST_TICK_S
        assert await seconds_until(waiting) == pytest.approx(expected, abs=LEAST_TICK_S)


@in_virtual_time
async def test_queue_recovered_worker_is_found_within_a_tick() -> None:
    """Another worker is busy for four seconds with an answer that comes whole."""
    async with cluster_of(2, 0, clock=loop_time) as cluster:
        second = cluster.decodes[1]
        healthy, second.health = second.health, second.health.missed(1, "it does not answer")
        await cluster.send("first", LONG, streams=False)
        waiting = await cluster.send("second", LONG)
        await asyncio.sleep(0.53)
        second.health = healthy
        assert await seconds_until(waiting) <= REPLAN_S + 2 * TICK_S
        assert waiting.result().pair.decode is second


# --- Prompts ahead ---

PREFIX = random.Random(5).randbytes(20_000)


@pytest.mark.parametrize("later_s", [0.0, 0.2])
@pytest.mark.parametrize(
    ("ahead", "goes"), [((), False), ((0.9,), False), ((2.3, 2.3), True), ((1.6, 1.6, 1.6), True)]
)
async def test_queue_prompts_ahead_count_as_backlog(
    ahead: tuple[float, ...], goes: bool, later_s: float
) -> None:
    """
    A worker that holds most of a prompt is worth waiting for, unless others that wait for it go before.

    Those of a higher class arrive `later_s` after the one that chooses.
    """
    async with cluster_of(2, 0) as cluster:
        rng = random.Random(7)

        async def send(name: str, held: int, more: int, kind: str = "default") -> asyncio.Task[Placement]:
            prompt = chunk_text(PREFIX[:held] + rng.randbytes(more), 7)
            ask = PickRequest("tiny", prompt, size=held + more, priority_class=kind)
            cluster.tasks[name] = task = asyncio.create_task(cluster.queue.place(ask))
            await cluster.settle()
            return task

        before = await send("before", len(PREFIX), 0)
        holder = before.result().pair.decode
        await cluster.finish(before)
        blocker = await send("blocker", len(PREFIX), 20_000)
        assert blocker.result().pair.decode is holder
        waiting = await send("waiting", 16_000, 8_000)
        await cluster.pass_time(later_s)
        for number, seconds in enumerate(ahead):
            await send(f"ahead {number}", len(PREFIX), int(seconds / SECONDS_PER_BYTE), kind="critical")
        assert not waiting.done()
        await cluster.pass_time(REPLAN_S + 0.01 - later_s)
        assert waiting.done() is goes
        assert not goes or waiting.result().pair.decode is not holder


@pytest.mark.parametrize("cached", [False, True])
async def test_queue_prompt_cached_meanwhile_passes_shorter_ones(cached: bool) -> None:
    """A long prompt behind a shorter one goes first once a worker holds its beginning."""
    async with cluster_of(1, 0) as cluster:
        blocker = await cluster.send("blocker", 8_000)
        long = chunk_text(PREFIX, 7)

        async def ask() -> Placement:
            placement = await cluster.queue.place(PickRequest("tiny", long, size=len(PREFIX)))
            cluster.placed.append("long")
            return placement

        cluster.tasks["long"] = asyncio.create_task(ask())
        await cluster.send("shorter", 6_000)
        if cached:
            state = blocker.result().decode_state
            cluster.planner.worker_states.sent(long, state, 0)
        await cluster.pass_time(REPLAN_S + 0.01)
        await cluster.finish(blocker)
        assert cluster.placed[:2] == ["blocker", "long" if cached else "shorter"]


SHORT_ANSWER = RequestCost(answer_limit=1)

# --- Turns, demand and errors ---


@pytest.mark.parametrize(
    ("dear", "cheap"),
    [
        ({"size": 8000, "cost": SHORT_ANSWER}, {"size": 800, "cost": SHORT_ANSWER}),
        ({"size": 800, "cost": RequestCost(answer_limit=200)}, {"size": 800, "cost": SHORT_ANSWER}),
        ({"size": 800, "cost": RequestCost(1, 0, 200, 1)}, {"size": 800, "cost": SHORT_ANSWER}),
        ({"size": 800, "cost": RequestCost(2, 7200, 2, 1)}, {"size": 800, "cost": SHORT_ANSWER}),
    ],
    ids=["prompts", "answers", "choices", "several prompts"],
)
async def test_queue_tenants_take_turns_by_tokens(dear: dict[str, Any], cheap: dict[str, Any]) -> None:
    """A tenant with longer prompts or answers has fewer requests served, and about as many tokens."""
    async with cluster_of(1, 0) as cluster:
        task = await cluster.send("first", LONG)
        for number in range(60):
            await cluster.send(f"dear {number}", tenant="dear", **dear)
            await cluster.send(f"cheap {number}", tenant="cheap", **cheap)
        for _ in range(40):
            await cluster.finish(task)
            task = cluster.tasks[cluster.placed[-1]]
        dear_count = sum(name.startswith("dear") for name in cluster.placed)
        assert 2 <= dear_count <= 14


async def test_queue_without_worker_or_waiting_time_raises_at_once() -> None:
    async with cluster_of(0, 0, hold_s=0.0, recovery_s=0.0) as cluster:
        task = await cluster.send("first", SHORT, cost=RequestCost(answer_limit=10))
        assert isinstance(task.exception(), NotReady)
        assert cluster.queue.demand == {"prompt": SHORT // 4, "answer": 10}


async def test_queue_held_requests_start_before_a_new_one() -> None:
    """They wait for their model, and delay no other."""
    async with cluster_of(0, 0, hold_s=60.0) as cluster:
        held = await cluster.send("held", LONG)
        cluster.workers.add(cluster.worker(Role.DECODE, 8100))
        cluster.workers.add(cluster.worker(Role.DECODE, 8300, model="other"))
        other = cluster.queue.place(cluster.request(LONG, model="other"))
        with pytest.raises(StopIteration) as stopped:
            other.send(None)
        cluster.planner.release(stopped.value.value, cluster.now, complete=True)
        await cluster.send("late", LONG)
        assert held.done() and cluster.placed == ["held", "late"]


ALL_ATTEMPTED = "Every worker that serves this model was tried for this request."


async def test_queue_all_workers_tried_says_so() -> None:
    async with cluster_of(2, 0) as cluster:
        names = tuple(one.name for one in cluster.decodes)
        assert str((await cluster.send("at once", excluded=names)).exception()) == ALL_ATTEMPTED
        await cluster.send("first", LONG)
        await cluster.send("second", LONG)
        waiting = await cluster.send("waiting", LONG, excluded=names[:1])
        assert not waiting.done()
        cluster.workers.decode = (cluster.decodes[0],)
        await cluster.pass_time(REPLAN_S)
        assert isinstance(waiting.exception(), NotReady) and str(waiting.exception()) == ALL_ATTEMPTED


async def test_queue_model_gone_while_waiting_raises_not_found() -> None:
    async with cluster_of(1, 0) as cluster:
        await cluster.send("first", LONG)
        waiting = await cluster.send("waiting", LONG)
        cluster.workers.decode = (cluster.worker(Role.DECODE, 8300, model="other"),)
        await cluster.pass_time(REPLAN_S)
        assert isinstance(waiting.exception(), ModelNotFound)


async def test_queue_demand_counts_uncached_tokens_of_all() -> None:
    async with cluster_of(1, 1, local_prefill_max_tokens=2000) as cluster:
        prompt = chunk_text(cluster.rng.randbytes(4000), 7)
        for number in range(2):
            cluster.tasks[f"{number}"] = task = asyncio.create_task(
                cluster.queue.place(PickRequest("tiny", prompt, size=4000))
            )
            await cluster.settle()
            await cluster.finish(task)
        assert 1000 < cluster.queue.demand["prompt"] < 1500
        assert cluster.queue.demand["local"] == cluster.queue.demand["prompt"]


async def test_queue_client_leaving_at_its_grant_releases_incomplete() -> None:
    async with cluster_of(1, 0) as cluster:
        first = await cluster.send("first", LONG)
        waiting = await cluster.send("waiting", LONG)
        cluster.planner.release(first.result(), cluster.now, complete=True)
        cluster.queue.changed()
        asyncio.get_running_loop().call_later(0, waiting.cancel)
        await cluster.settle()
        last = cluster.planner.placements[-1]
        assert last is not first.result()
        assert (last.ended, last.complete) == (cluster.now, False)


async def test_queue_client_leaving_at_its_time_limit_is_cancelled() -> None:
    async with cluster_of(1, 0, wait_s=5.0) as cluster:
        await cluster.send("first", LONG)
        await cluster.send("second", LONG)
        waiting = await cluster.send("waiting", LONG)
        cluster.now += 5.1
        cluster.queue.changed()
        asyncio.get_running_loop().call_later(0, waiting.cancel)
        await cluster.settle()
        assert waiting.cancelled()


async def test_queue_rejects_count_each_request() -> None:
    async with cluster_of(1, 0, wait_s=5.0) as cluster:
        await cluster.send("first", LONG)
        for number in range(3):
            await cluster.send(f"late {number}", LONG, priority_class="interactive", ttft_slo_s=2.0)
        for number in range(2):
            await cluster.send(f"patient {number}", LONG)
        await cluster.pass_time(5.1)
        assert cluster.queue.rejects == {"late": 3, "waited": 2}


async def test_queue_waiting_request_is_not_planned_at_each_event() -> None:
    async with cluster_of(1, 0) as cluster:
        await cluster.send("first", LONG)
        for number in range(5):
            await cluster.send(f"{number}", LONG)
        before = cluster.planner.plan(
            PickRequest(model="tiny", prompt=chunk_text(b"a question", 7)), cluster.now
        )
        for _ in range(5):
            await cluster.pass_time(0.01)
        after = cluster.planner.plan(
            PickRequest(model="tiny", prompt=chunk_text(b"a question", 7)), cluster.now
        )
        assert before is not None and after is not None
        assert after.number == before.number + 1


@pytest.mark.parametrize(("kind", "in_vain", "accepted"), [
    ("interactive", True, False), ("interactive", False, True), ("default", True, True),
])  # fmt: skip
async def test_queue_late_requests_make_admission_stricter(kind: str, in_vain: bool, accepted: bool) -> None:
    """Of a class whose clients sit and wait; those that went, and other classes, change nothing."""
    async with cluster_of(1, 0) as cluster:
        for number in range(12):
            first = await cluster.send(f"first {number}", LONG)
            waiting = await cluster.send(f"waiting {number}", LONG, priority_class=kind, ttft_slo_s=20.0)
            if in_vain:
                await cluster.pass_time(31.0)
                assert isinstance(waiting.exception(), NotInTime)
                await cluster.finish(first)
            else:
                await cluster.pass_time(3.9)
                await cluster.finish(first)
                await cluster.finish(waiting)
        await cluster.send("first", 2000)  # 0.2 s
        late = await cluster.send("late", LONG, priority_class="interactive", ttft_slo_s=4.2 / 1.2)
        assert late.done() is not accepted
