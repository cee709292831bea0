"""
Requests wait here, not in the engines, until a worker is free for them.

A worker that has little left to compute is given the next prompt just before it is done; all other prompts
can still be put in another order, go elsewhere, or leave without a trace. While a worker is free and nobody
waits for it who would be asked first, a request passes at once: an idle cluster adds no delay, nor does a
batch that waits. Who goes next is the waiting room's to say,
and where to is the dispatcher's, asked again each time that something has changed; what is here is when to
ask, and what becomes of those who wait in vain.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from typing import cast

from baton_api.errors import BatonError, NotInTime, NotReady, Overloaded
from baton_router.scheduling.admission import QueueCapacity, WaitLimits, too_late, wait_limits
from baton_router.scheduling.dispatcher import Dispatch, Dispatcher
from baton_router.scheduling.picker import PickRequest
from baton_router.scheduling.queued_request import (
    NEARLY_DONE_S,
    QueuedRequest,
    QueueWakeup,
    RequestPool,
    has_capacity,
    has_spare_blocks,
    prompt_tokens,
)
from baton_router.scheduling.tenant_queue import QueueEntry
from baton_router.scheduling.waiting_room import LEVELS
from baton_router.settings import RouterSettings

TICK_S = 0.1
"""The longest time that passes between two looks while somebody waits: workers change without a word."""

LEAST_TICK_S = 0.005

ANSWER_COST = 3.0
"""What a token of an answer costs against one of a prompt, in the tenant's account."""

ENTRY_BYTES = 2048
"""Of memory for a request that waits, beside its body."""

INTERACTIVE = "interactive"
BATCH = "batch"


class Queue:
    """All who wait. Belongs to one event loop."""

    def __init__(self, settings: RouterSettings, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._clock = clock
        self._numbers = itertools.count()
        self._pools: dict[Hashable, RequestPool] = {}
        """By the decode workers that they can go to; by the model for those who can go to none."""
        self._places = QueueCapacity(settings.queue_requests, settings.queue_bytes)
        self._silent: list[tuple[float, int, Dispatch]] = []
        """Requests of whose prompt nobody says when it is computed, by when that should be; a heap."""
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        """When it fires; uvloop's handle of what is due at once does not know."""
        self.rejects: Counter[str] = Counter()
        """Who was not served, by reason."""
        self.demand: Counter[str] = Counter()
        """Tokens that requests asked for when they came, by kind."""

    def __len__(self) -> int:
        return len(self._places)

    def count(self, level: int) -> int:
        """How many of one class wait."""
        return sum(pool.room.count(level) for pool in self._pools.values())

    def oldest(self, level: int) -> float | None:
        """When the one of this class arrived that has waited for longest; None if there is none."""
        oldest = (pool.room.oldest(level) for pool in self._pools.values())
        return min((arrived for arrived in oldest if arrived is not None), default=None)

    @property
    def held(self) -> int:
        """Requests that wait and could go nowhere when that was asked last."""
        return sum(entry.plan is None for entry in self._all())

    @property
    def queued_tokens(self) -> int:
        """Of the prompts that wait, not cached as far as one can tell."""
        return sum(entry.prompt_tokens for entry in self._all())

    def _all(self) -> Iterator[QueuedRequest]:
        for pool in self._pools.values():
            yield from (cast(QueuedRequest, entry) for entry in pool.room)

    async def dispatch(self, ask: PickRequest) -> Dispatch:
        """
        Give the request to a worker, as soon as one is free and nobody goes before it.

        Raises NotInTime or Overloaded if it is better refused, ModelNotFound, and NotReady if nobody is there
        who did not have it yet.
        """
        now = self._clock()
        if self._silent:
            self._presume(now)
        try:
            made = self._dispatcher.plan(ask.model, ask.prompt, ask.tried, now)
        except NotReady:
            if not self._settings.recovery_s and not self._settings.hold_s:
                self._asked_for(ask, None)
                raise
            made = None
            self._asked_for(ask, made)
        else:
            self._asked_for(ask, made)
            if made is None:
                raise NotReady("Every worker that serves this model was tried for this request.")
            if not self._competes(ask, made, now) and self._may_go(ask, made, now):
                self._book(ask, made, now)
                return made
        return await self._wait(ask, made, now)

    def _competes(self, ask: PickRequest, made: Dispatch, now: float) -> bool:
        """Whether somebody waits who is to be asked before a request that comes now."""
        if not self._places:
            return False
        slots = {known.slot for known in made.among.known_decodes}
        level = LEVELS[ask.kind]
        return any(
            pool.room.goes_before(level, now)
            for key, pool in self._pools.items()
            if pool.room and (not slots.isdisjoint(key) if isinstance(key, frozenset) else key == ask.model)
        )

    def _asked_for(self, ask: PickRequest, plan: Dispatch | None) -> None:
        """Count what a request wants when it comes for the first time, whatever becomes of it."""
        if ask.again or ask.tried:
            return
        self.demand["prompt"] += prompt_tokens(ask, plan)
        # Without any prefill worker all prompts are local, and none of them because that is cheaper.
        if plan is not None and plan.pair.prefill is None and plan.among.prefills:
            self.demand["local"] += plan.uncached
        self.demand["answer"] += round(self._answer_tokens(ask))

    def _answer_tokens(self, ask: PickRequest) -> float:
        """That its answer is expected to have."""
        expected = self._dispatcher.answer_tokens
        return expected if ask.answer_tokens is None else min(ask.answer_tokens, expected)

    def changed(self) -> None:
        """A worker may be free now that was not."""
        if self._places:
            self._look_in(0.0)

    async def _wait(self, ask: PickRequest, plan: Dispatch | None, now: float) -> Dispatch:
        among = self._dispatcher.candidates(ask.model, now) if plan else None
        pool = self._pool(frozenset(known.slot for known in among.known_decodes) if among else ask.model)
        entry = self._entry(ask, plan, now)
        if not entry.again:
            self._admit(entry, pool, now)
        pool.room.add(entry)
        entry.wish(pool.wishes)
        self._places.take(entry)
        self._look_in(0.0)
        try:
            return await entry.future
        except asyncio.CancelledError:
            if entry.future.done() and not entry.future.cancelled() and not entry.future.exception():
                # It went in the same moment in which its client left.
                self._dispatcher.let_go(entry.future.result(), self._clock(), complete=False)
                self.changed()
            raise
        finally:
            pool.room.discard(entry)
            self._places.leave(entry)

    def _pool(self, key: Hashable) -> RequestPool:
        pool = self._pools.get(key)
        if pool is None:
            self._pools = {one: pool for one, pool in self._pools.items() if pool.room}
            pool = self._pools[key] = RequestPool()
        return pool

    def _entry(self, ask: PickRequest, plan: Dispatch | None, now: float) -> QueuedRequest:
        settings = self._settings
        on = wait_limits(ask.kind, ask.objective_s, settings.interactive_s, settings.wait_s)
        answer = self._answer_tokens(ask)
        return QueuedRequest(
            number=next(self._numbers),
            tenant=ask.tenant,
            level=LEVELS[ask.kind],
            arrived=now - ask.waited_s,
            best_s=plan.compute_s if plan else 0.0,
            cost=(plan.uncached if plan else 1) + ANSWER_COST * answer,
            size=ask.size + ENTRY_BYTES,
            objective_s=on.objective_s,
            patience_s=on.patience_s if plan else self._patience_s(ask, on),
            again=ask.again,
            ask=ask,
            future=asyncio.get_running_loop().create_future(),
            plan=plan,
            planned=now,
        )

    def _patience_s(self, ask: PickRequest, on: WaitLimits) -> float:
        """For how long a request waits that can go nowhere."""
        settings = self._settings
        if not settings.hold_s:
            return min(on.patience_s, settings.recovery_s)
        # Workers take as long to start for one class as for another; only who says so wants it sooner.
        return settings.hold_s if ask.objective_s is None else min(on.patience_s, settings.hold_s)

    def _admit(self, entry: QueuedRequest, pool: RequestPool, now: float) -> None:
        """Raise what tells the client that to wait is no use."""
        try:
            self._places.refuse(entry)
        except Overloaded:
            self.rejects["full"] += 1
            raise
        if entry.plan is None:
            return
        computers = entry.plan.among.known_prefills or entry.plan.among.known_decodes
        soonest = min(known.computing.backlog_s(now) for known in computers)
        entry.predicted_s = soonest + pool.room.seconds_before(entry) / len(computers)
        room_s = self._dispatcher.room_s(entry.plan)
        predicted = pool.pace.corrected(entry.predicted_s) + room_s + entry.best_s
        on = WaitLimits(entry.objective_s, entry.patience_s)
        if too_late(entry.ask.kind, on, predicted, room_s, pool.tolerance.times):
            self.rejects["late"] += 1
            raise NotInTime(predicted, min(entry.objective_s, entry.patience_s))

    def _look_in(self, seconds: float) -> None:
        """Look who can go, in so many seconds or before."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if self._timer is not None:
            if due >= self._due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock()
        self._presume(now)
        soonest = TICK_S
        for pool in list(self._pools.values()):
            for entry in pool.room.pass_time(now):
                self._give_up(cast(QueuedRequest, entry), pool, now)
            if not pool.room:
                continue
            if pool.wishes.could_go(self._settings.prefill_tokens, now):
                self._offer(pool, now)
            soonest = min(soonest, pool.wishes.free_in(now), pool.room.alarm - now)
        if self._places:
            due = self._silent[0][0] - now if self._silent else TICK_S
            self._look_in(max(LEAST_TICK_S, min(soonest, due)))

    def _offer(self, pool: RequestPool, now: float) -> None:
        """Ask those who wait whether they go, for as long as there is one who could."""
        ahead: dict[int, float] = {}
        wishes, all_asked, most = QueueWakeup(), True, self._settings.prefill_tokens

        def take(entry: QueueEntry) -> bool:
            """Whether it goes; if not, what it is to take is in the way of those behind it."""
            assert isinstance(entry, QueuedRequest)
            plan = entry.plan
            if (
                plan is None
                or now >= entry.replan_at
                or has_capacity(plan.computing, plan.uncached, most, now)
            ):
                if self._take(entry, pool, ahead, now):
                    return True
            else:
                slot = plan.computing.slot
                ahead[slot] = ahead.get(slot, 0.0) + entry.best_s
            entry.wish(wishes)
            return False

        def more() -> bool:
            nonlocal all_asked
            all_asked = pool.wishes.could_go(most, now)
            return all_asked

        pool.room.offer(take, more, now)
        if all_asked:
            pool.wishes = wishes

    def _take(self, entry: QueuedRequest, pool: RequestPool, ahead: dict[int, float], now: float) -> bool:
        if entry.future.done():  # its client has left
            return True
        plan = self._planned(entry, ahead, now)
        if plan is None:
            return entry.future.done()
        if not self._may_go(entry.ask, plan, now):
            slot = plan.computing.slot
            ahead[slot] = ahead.get(slot, 0.0) + plan.compute_s
            return False
        self._learn(pool, entry, now)
        self._book(entry.ask, plan, now)
        entry.future.set_result(plan)
        return True

    def _planned(self, entry: QueuedRequest, ahead: dict[int, float], now: float) -> Dispatch | None:
        """Where it would go now; None if nowhere, and then it may have been told so."""
        ask = entry.ask
        entry.plan, entry.planned = None, now
        try:
            entry.plan = self._dispatcher.plan(ask.model, ask.prompt, ask.tried, now, ahead)
        except NotReady:
            return None
        except BatonError as error:
            entry.future.set_exception(error)
            return None
        if entry.plan is None:
            entry.future.set_exception(
                NotReady("Every worker that serves this model was tried for this request.")
            )
        return entry.plan

    def _learn(self, pool: RequestPool, entry: QueuedRequest, now: float, *, in_vain: bool = False) -> None:
        """It has waited for so long. Those who gave up count too, or all would seem to wait for less."""
        if entry.predicted_s > NEARLY_DONE_S:
            pool.pace.learn(entry.predicted_s, now - entry.arrived)
        if entry.ask.kind == INTERACTIVE:
            pool.tolerance.waited(in_vain=in_vain)

    def _give_up(self, entry: QueuedRequest, pool: RequestPool, now: float) -> None:
        if entry.future.done():
            return
        waited = now - entry.arrived
        if self._planned(entry, {}, now) is None:
            self.rejects["unready"] += 1
            if not entry.future.done():
                entry.future.set_exception(NotReady(f"No worker became ready within {waited:.1f} s."))
        else:
            self.rejects["waited"] += 1
            self._learn(pool, entry, now, in_vain=True)
            entry.future.set_exception(NotInTime(waited, entry.patience_s, waited=True))

    def _book(self, ask: PickRequest, made: Dispatch, now: float) -> None:
        self._dispatcher.book(made, now)
        if not ask.streams:
            heappush(self._silent, (now + made.way.first_token_s, made.number, made))

    def _presume(self, now: float) -> None:
        """Nobody says when the prompt of an answer that comes whole is computed: it is when it should be."""
        while self._silent and self._silent[0][0] <= now:
            self._dispatcher.computed(heappop(self._silent)[2], now)

    def _may_go(self, ask: PickRequest, made: Dispatch, now: float) -> bool:
        if not has_capacity(made.computing, made.uncached, self._settings.prefill_tokens, now):
            return False
        if ask.again and made.pair.decode.health.full_until > now:
            return False  # to ask it again at once would be no use
        return ask.kind != BATCH or has_spare_blocks(made.generating)
