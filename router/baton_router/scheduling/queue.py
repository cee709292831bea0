"""
The queue: requests wait here, not in the engines, until a worker has capacity.

A worker gets the next prompt shortly before it would be idle. All other prompts can still be reordered, go to
another worker, or leave without a trace. A request passes at once if a worker is free and no queued request
goes before it: an idle cluster adds no delay, nor does a waiting batch. The priority queue decides the order,
and the planner the pair of workers. This module decides when to check, and what happens to requests that time
out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import cast

from baton_api import metrics
from baton_api.errors import BatonError, NotInTime, NotReady, Overloaded
from baton_api.metrics import Metric
from baton_api.request_classes import CLASSES
from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.admission import (
    DeadlineFactor,
    QueueCapacity,
    WaitBias,
    WaitLimits,
    too_late,
    wait_limits,
)
from baton_router.scheduling.placement import Placement
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.scheduling.priority_queue import LEVELS, PriorityQueue
from baton_router.scheduling.tenant_queue import QueueEntry
from baton_router.scheduling.wakeup import NEARLY_DONE_S, QueueWakeup, has_capacity, has_spare_blocks
from baton_router.settings import RouterSettings

TICK_S = 0.1
"""Maximum seconds between two checks while a request waits: workers change without notice."""

LEAST_TICK_S = 0.005

ENTRY_BYTES = 2048
"""Memory of a queued request besides its body."""

REPLAN_S = 0.25
"""Seconds for which a request keeps its planned worker."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(QueueEntry):
    """A queued request and the future that its client awaits."""

    request: PickRequest
    future: asyncio.Future[Placement]
    plan: Placement | None
    """The last plan; None if no worker could serve it."""
    planned: float
    predicted_s: float = 0.0
    """Predicted wait, before the correction by `WaitBias`."""

    @property
    def replan_at(self) -> float:
        """Time from which to plan again."""
        return self.planned + REPLAN_S

    @property
    def prompt_tokens(self) -> int:
        return prompt_tokens(self.request, self.plan)

    def register_wakeup(self, wakeup: QueueWakeup) -> None:
        """Register the planned worker with the wake-up."""
        if self.plan is None:
            wakeup.add_unplanned()
        else:
            wakeup.add(self.plan.prefill_state, self.plan.uncached, self.replan_at)


def prompt_tokens(request: PickRequest, plan: Placement | None) -> int:
    """Tokens of all prompts to compute, estimated."""
    if plan is not None:
        return plan.uncached + plan.others
    return max(1, round(request.prompt.bytes / BYTES_PER_TOKEN)) + request.cost.others()


class RequestPool:
    """Requests that wait for the same workers."""

    __slots__ = ("deadline_factor", "entries", "wait_bias", "wakeup")

    def __init__(self) -> None:
        self.entries = PriorityQueue()
        self.wakeup = QueueWakeup()
        self.wait_bias = WaitBias()
        self.deadline_factor = DeadlineFactor()


class Queue:
    """All queued requests. Belongs to one event loop."""

    def __init__(
        self, settings: RouterSettings, planner: PlacementPlanner, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._clock = clock
        self._numbers = itertools.count()
        self._pools: dict[Hashable, RequestPool] = {}
        """By the decode workers that can serve them; by model while none can."""
        self._capacity = QueueCapacity(settings.queue_requests, settings.queue_bytes)
        self._unreported: list[tuple[float, int, Placement]] = []
        """Requests whose prompt's end is not reported, by its predicted time; a heap."""
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        """When the timer fires; uvloop's handle of a due call does not know it."""
        self.rejects: Counter[str] = Counter()
        """Rejected requests, by reason."""
        self.demand: Counter[str] = Counter()
        """Tokens that arriving requests need, by kind."""

    def __len__(self) -> int:
        return len(self._capacity)

    def count(self, level: int) -> int:
        """Queued requests of one class."""
        return sum(pool.entries.count(level) for pool in self._pools.values())

    def oldest(self, level: int) -> float | None:
        """Arrival of the oldest request of this class, or None."""
        oldest = (pool.entries.oldest(level) for pool in self._pools.values())
        return min((arrived for arrived in oldest if arrived is not None), default=None)

    def gauges(self) -> dict[Metric, float]:
        """What is measured of the queue at a scrape, besides its classes."""
        entries = list(self._entries())
        return {
            metrics.ROUTER_HELD: sum(entry.plan is None for entry in entries),
            metrics.ROUTER_QUEUED_TOKENS: sum(entry.prompt_tokens for entry in entries),
        }

    def _entries(self) -> Iterator[QueuedRequest]:
        for pool in self._pools.values():
            yield from (cast("QueuedRequest", entry) for entry in pool.entries)

    async def place(self, request: PickRequest) -> Placement:
        """
        Assign the request to workers as soon as they have capacity and no other request goes first.

        Raises NotInTime or Overloaded if the request is rejected, ModelNotFound, and NotReady if every worker
        was tried.
        """
        now = self._clock()
        if self._unreported:
            self._assume_computed(now)
        try:
            placement = self._planner.plan(request, now)
        except NotReady:
            if not self._settings.recovery_s and not self._settings.hold_s:
                self._count_demand(request, None)
                raise
            placement = None
            self._count_demand(request, placement)
        else:
            self._count_demand(request, placement)
            if placement is None:
                raise NotReady(request.none_left)
            if not self._must_wait(request, placement, now) and self._can_go(request, placement, now):
                self._book(request, placement, now)
                return placement
        return await self._wait(request, placement, now)

    def _must_wait(self, request: PickRequest, placement: Placement, now: float) -> bool:
        """Whether a queued request goes before a request that arrives now."""
        if not self._capacity:
            return False
        slots = {state.slot for state in placement.candidates.decode_states}
        level = LEVELS[request.priority_class]
        return any(
            pool.entries.precedes(level, now)
            for key, pool in self._pools.items()
            if pool.entries
            and (not slots.isdisjoint(key) if isinstance(key, frozenset) else key == request.model)
        )

    def _count_demand(self, request: PickRequest, plan: Placement | None) -> None:
        """Count the tokens of a request when it arrives for the first time."""
        if request.retried or request.excluded:
            return
        self.demand["prompt"] += prompt_tokens(request, plan)
        # Without any prefill worker all prompts are local, and none of them because that is cheaper.
        if plan is not None and plan.pair.prefill is None and plan.candidates.prefills:
            self.demand["local"] += plan.uncached + plan.others
        self.demand["answer"] += round(request.cost.answer_tokens(self._planner.answer_tokens))

    def changed(self) -> None:
        """Check the queue soon: a worker may have become free."""
        if self._capacity:
            self._check_in(0.0)

    async def _wait(self, request: PickRequest, plan: Placement | None, now: float) -> Placement:
        among = self._planner.candidates(request.model, now, request.direct) if plan else None
        pool = self._pool(frozenset(state.slot for state in among.decode_states) if among else request.model)
        entry = self._entry(request, plan, now)
        if not entry.retried:
            self._admit(entry, pool, now)
        pool.entries.add(entry)
        entry.register_wakeup(pool.wakeup)
        self._capacity.take(entry)
        self._check_in(0.0)
        try:
            return await entry.future
        except asyncio.CancelledError:
            if entry.future.done() and not entry.future.cancelled() and not entry.future.exception():
                # It was placed at the moment at which its client disconnected.
                self._planner.release(entry.future.result(), self._clock(), complete=False)
                self.changed()
            raise
        finally:
            pool.entries.discard(entry)
            self._capacity.leave(entry)

    def _pool(self, key: Hashable) -> RequestPool:
        pool = self._pools.get(key)
        if pool is None:
            self._pools = {one: pool for one, pool in self._pools.items() if pool.entries}
            pool = self._pools[key] = RequestPool()
        return pool

    def _entry(self, request: PickRequest, plan: Placement | None, now: float) -> QueuedRequest:
        settings = self._settings
        limits = wait_limits(
            request.priority_class, request.ttft_slo_s, settings.interactive_s, settings.wait_s
        )
        prompt = plan.uncached + plan.others if plan else 1 + request.cost.others()
        return QueuedRequest(
            number=next(self._numbers),
            tenant=request.tenant,
            level=LEVELS[request.priority_class],
            arrived=now - request.waited_s,
            best_s=plan.compute_s if plan else 0.0,
            cost=request.cost.fair_share(prompt, self._planner.answer_tokens),
            size=request.size + ENTRY_BYTES,
            ttft_slo_s=limits.ttft_slo_s,
            max_wait_s=limits.max_wait_s if plan else self._max_wait_s(request, limits),
            retried=request.retried,
            request=request,
            future=asyncio.get_running_loop().create_future(),
            plan=plan,
            planned=now,
        )

    def _max_wait_s(self, request: PickRequest, limits: WaitLimits) -> float:
        """Maximum wait of a request that no worker can serve."""
        settings = self._settings
        if not settings.hold_s:
            return min(limits.max_wait_s, settings.recovery_s)
        # A worker starts no faster for an urgent class: only an explicit target shortens the wait.
        return settings.hold_s if request.ttft_slo_s is None else min(limits.max_wait_s, settings.hold_s)

    def _admit(self, entry: QueuedRequest, pool: RequestPool, now: float) -> None:
        """Raise the reason if waiting is useless."""
        try:
            self._capacity.refuse(entry)
        except Overloaded:
            self.rejects["full"] += 1
            raise
        if entry.plan is None:
            return
        states = entry.plan.candidates.prefill_states or entry.plan.candidates.decode_states
        soonest = min(state.prefills.backlog_s(now) for state in states)
        entry.predicted_s = soonest + pool.entries.seconds_before(entry) / len(states)
        blocks_free_s = self._planner.blocks_free_s(entry.plan)
        predicted = pool.wait_bias.corrected(entry.predicted_s) + blocks_free_s + entry.best_s
        limits = WaitLimits(entry.ttft_slo_s, entry.max_wait_s)
        if too_late(
            entry.request.priority_class, limits, predicted, blocks_free_s, pool.deadline_factor.value
        ):
            self.rejects["late"] += 1
            raise NotInTime(predicted, min(entry.ttft_slo_s, entry.max_wait_s))

    def _check_in(self, seconds: float) -> None:
        """Check the queue in `seconds` or earlier."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if self._timer is not None:
            if due >= self._due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_at(due, self._check)

    def _check(self) -> None:
        self._timer = None
        now = self._clock()
        self._assume_computed(now)
        soonest = TICK_S
        for pool in list(self._pools.values()):
            for entry in pool.entries.expire(now):
                self._give_up(cast("QueuedRequest", entry), pool, now)
            if not pool.entries:
                continue
            if pool.wakeup.may_go(self._settings.prefill_tokens, now):
                self._offer_to_waiting(pool, now)
            soonest = min(soonest, pool.wakeup.seconds_until_free(now), pool.entries.alarm - now)
        if self._capacity:
            due = self._unreported[0][0] - now if self._unreported else TICK_S
            self._check_in(max(LEAST_TICK_S, min(soonest, due)))

    def _offer_to_waiting(self, pool: RequestPool, now: float) -> None:
        """Offer the workers to queued requests while one of them could go."""
        ahead: dict[int, float] = {}
        wakeup, all_checked, most = QueueWakeup(), True, self._settings.prefill_tokens
        repriced: list[QueuedRequest] = []
        queued_s = pool.entries.seconds

        def take(entry: QueueEntry) -> bool:
            """Place the request if its workers have capacity; otherwise its work is ahead of those behind
            it.
            """
            assert isinstance(entry, QueuedRequest)
            plan = entry.plan
            if (
                plan is None
                or now >= entry.replan_at
                or has_capacity(plan.prefill_state, plan.uncached, most, now)
            ):
                if self._take(entry, pool, ahead, queued_s, now):
                    return True
            else:
                slot = plan.prefill_state.slot
                ahead[slot] = ahead.get(slot, 0.0) + plan.compute_s
            if entry.plan is not None and entry.plan.compute_s != entry.best_s:
                repriced.append(entry)
            entry.register_wakeup(wakeup)
            return False

        def more() -> bool:
            nonlocal all_checked
            all_checked = pool.wakeup.may_go(most, now)
            return all_checked

        pool.entries.offer(take, more, now)
        for entry in repriced:
            if entry in pool.entries and entry.plan is not None:
                pool.entries.reprice(entry, entry.plan.compute_s)
        if all_checked:
            pool.wakeup = wakeup

    def _take(
        self, entry: QueuedRequest, pool: RequestPool, ahead: dict[int, float], queued_s: float, now: float
    ) -> bool:
        if entry.future.done():  # its client has left
            return True
        plan = self._replan(entry, ahead, now, queued_s)
        if plan is None:
            return entry.future.done()
        if not self._can_go(entry.request, plan, now):
            slot = plan.prefill_state.slot
            ahead[slot] = ahead.get(slot, 0.0) + plan.compute_s
            return False
        self._learn(pool, entry, now)
        self._book(entry.request, plan, now)
        entry.future.set_result(plan)
        return True

    def _replan(
        self, entry: QueuedRequest, ahead: dict[int, float], now: float, queued_s: float = 0.0
    ) -> Placement | None:
        """Plan again; None if no worker can serve it, in which case its future may hold the error."""
        request = entry.request
        entry.plan, entry.planned = None, now
        try:
            entry.plan = self._planner.plan(request, now, ahead, queued_s)
        except NotReady:
            return None
        except BatonError as error:
            entry.future.set_exception(error)
            return None
        if entry.plan is None:
            entry.future.set_exception(NotReady(request.none_left))
        return entry.plan

    def _learn(self, pool: RequestPool, entry: QueuedRequest, now: float, *, in_vain: bool = False) -> None:
        """Record a wait. Timeouts count too; without them, waits would look shorter."""
        if entry.predicted_s > NEARLY_DONE_S:
            pool.wait_bias.learn(entry.predicted_s, now - entry.arrived)
        if CLASSES[entry.request.priority_class].rejects_late:
            pool.deadline_factor.waited(in_vain=in_vain)

    def _give_up(self, entry: QueuedRequest, pool: RequestPool, now: float) -> None:
        if entry.future.done():
            return
        waited = now - entry.arrived
        if self._replan(entry, {}, now) is None:
            self.rejects["unready"] += 1
            if not entry.future.done():
                entry.future.set_exception(NotReady(f"No worker became ready within {waited:.1f} s."))
        else:
            self.rejects["waited"] += 1
            self._learn(pool, entry, now, in_vain=True)
            entry.future.set_exception(NotInTime(waited, entry.max_wait_s, waited=True))

    def _book(self, request: PickRequest, placement: Placement, now: float) -> None:
        self._planner.book(placement, now)
        if not request.streams:
            heappush(self._unreported, (now + placement.option.first_token_s, placement.number, placement))

    def _assume_computed(self, now: float) -> None:
        """Treat prompts of unstreamed answers as computed at the predicted time; no worker reports it."""
        while self._unreported and self._unreported[0][0] <= now:
            self._planner.computed(heappop(self._unreported)[2], now)

    def _can_go(self, request: PickRequest, placement: Placement, now: float) -> bool:
        if not has_capacity(placement.prefill_state, placement.uncached, self._settings.prefill_tokens, now):
            return False
        if request.retried and placement.pair.decode.health.full_until > now:
            return False  # it rejected the request a moment ago
        return not request.background or has_spare_blocks(placement.decode_state)
