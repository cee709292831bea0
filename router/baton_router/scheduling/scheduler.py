"""
The scheduler: the only place that knows the workers and assigns requests to them.

A process with client connections calls it through `picker.Picker` and gets an address. Worker states,
decisions and health are all here, so that decisions for one client count for the next.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from functools import partial

from baton_api import profiles
from baton_api.background import BackgroundTasks
from baton_api.errors import PoisonRequest
from baton_api.metrics import BackgroundTask
from baton_api.prompt_report import Fallback, PromptReport
from baton_http.upstream import UpstreamPool
from baton_router.requests.picker import UNREACHABLE, Grant, PickRequest, RequestEnd, WorkerLoss
from baton_router.scheduling.outcome_attribution import CrashHistory, OutcomeAttribution
from baton_router.scheduling.placement import Placement
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.scheduling.policies import POLICIES
from baton_router.scheduling.queue import Queue
from baton_router.scheduling.quotas import Quotas
from baton_router.scheduling.revision_weights import RevisionWeights
from baton_router.settings import RouterSettings
from baton_router.workers import health_checks
from baton_router.workers.discovery.sources import FLAGS_SOURCE, WorkerSources
from baton_router.workers.kv_subscriber import KvSubscribers
from baton_router.workers.registration import WorkerRegistration
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers

PREDICTION_ERROR = 3.0
"""Factor by which a prediction may be wrong, on top of the predicted time."""

DRAIN_CHECK_S = 0.5
"""Seconds between two checks of draining workers."""


class RequestScheduler:
    """The Picker of its own process. Belongs to one event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        upstreams: UpstreamPool,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.background = BackgroundTasks()
        self.wanted_at = -math.inf
        """Time of the last request that is not of the background."""
        self.workers = workers = Workers()
        weights = RevisionWeights(settings.revision_weight, settings.revision_weights_file)
        measured = [profiles.read(one) for one in settings.profile]
        self.planner = PlacementPlanner(
            workers, rng, settings.local_prefill_max_tokens, weights, measured, POLICIES[settings.policy]()
        )
        self.kv_subscribers = KvSubscribers(
            workers, self.planner.worker_states, settings, clock, self.background
        )
        self.outcomes = OutcomeAttribution(self.planner.worker_states.transfer)
        self.queue = Queue(settings, self.planner, clock)
        self._quotas = Quotas(self.queue.rejects, lambda: self.planner.answer_tokens)
        self._crashes = CrashHistory()
        self._granted: dict[int, Placement] = {}
        self._sources = WorkerSources(settings, rng)
        self.registration = WorkerRegistration(
            workers, self.planner.worker_states, upstreams, settings.worker_drain_s, clock
        )
        self.registration.on_workers(FLAGS_SOURCE, self._sources.flags)
        workers.unlisted = self._sources.why_none
        workers.complete = self._sources.complete
        workers.holding = settings.hold_s > 0
        workers.hold_models = settings.hold_models

    def start(self) -> None:
        """Start health checks, KV events, discovery and draining; `background` runs them."""
        background = self.background
        looking = partial(health_checks.watch, self.workers, self._settings, self._clock, background)
        background.start(BackgroundTask.HEALTH_CHECKS, looking)
        background.start(BackgroundTask.KV_EVENTS, self.kv_subscribers.watch)
        background.start(
            BackgroundTask.DISCOVERY, partial(self._sources.watch, self.registration.on_workers, background)
        )
        background.start(BackgroundTask.DRAINING, self._drain)

    async def _drain(self) -> None:
        while True:
            with self.background.guard(BackgroundTask.DRAINING):
                self.registration.release_expired()
            await asyncio.sleep(DRAIN_CHECK_S)

    async def pick(self, request: PickRequest) -> Grant:
        now = self._clock()
        if not request.background:
            self.wanted_at = now
        self._check_poison(request, now)
        reserved = self._quotas.reserve(request, now) if request.limits is not None else None
        try:
            placement = await self.queue.place(request)
        except BaseException:
            if reserved is not None:
                reserved.cancel(self._clock())
            raise
        placement.arrived, placement.reservation = now - request.waited_s, reserved
        decode, prefill = placement.pair.decode, placement.pair.prefill
        decode.in_flight += 1
        if prefill is not None:
            prefill.in_flight += 1
        self._granted[placement.number] = placement
        self.outcomes.sent(placement.number, placement.pair, placement.decided)
        load = decode.health.load
        return Grant(
            number=placement.number,
            decode=decode.name,
            prefill=prefill.name if prefill else "",
            control=prefill.control if prefill else "",
            summary=placement.summary.encode(),
            first_token_timeout_s=self._first_token_timeout_s(placement),
            step_s=load.step_s if load else 0.0,
            has_alternative=len(placement.candidates.decodes) > 1,
            first_token_s=placement.option.first_token_s,
            costs=placement.costs if request.explain else "",
            engine=decode.engine_kind,
            block_size=placement.prefill_state.named_blocks,
            adapter=request.model or "" if decode.is_adapter(request.model) else "",
            prompt_tokens=placement.tokens + placement.others,
            usual_tokens=self.planner.answer_tokens,
        )

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        placement, now = self._granted[grant.number], self._clock()
        self.outcomes.answered(placement.number, placement.pair, report, now)
        lost_prefill = report is not None and report.fallback == Fallback.LOST
        if lost_prefill and placement.pair.prefill is not None:
            self._crashed(placement, placement.pair.prefill, now)
        if placement.request.streams and placement.first_byte is None:
            self.outcomes.first_byte(placement.pair, now - placement.decided)
        self._computed(placement)
        self.planner.began(placement, report, now)
        self.queue.changed()

    def failed(self, grant: Grant, loss: WorkerLoss = UNREACHABLE) -> None:
        placement, now = self._granted[grant.number], self._clock()
        decode, prefill = placement.pair.decode, placement.pair.prefill
        if prefill is not None and (loss.prefill_crashed or (loss.at_prefill and loss.crashed)):
            self._crashed(placement, prefill, now)
        if prefill is not None and loss.at_prefill:
            self.outcomes.prefill_failed(placement.number, prefill, now)
            return
        self.outcomes.failed(placement.number, placement.pair, now)
        if loss.crashed:
            self._crashed(placement, decode, now)

    def _crashed(self, placement: Placement, worker: Worker, now: float) -> None:
        """Remember that a worker died or stopped while it had the request."""
        epoch = worker.health.load.epoch if worker.health.load else ""
        self._crashes.lost(placement.request.key, worker.name, epoch, now)

    def full(self, grant: Grant) -> None:
        self.outcomes.full(self._granted[grant.number].pair, self._clock())

    def release(self, grant: Grant, end: RequestEnd) -> None:
        placement = self._granted.pop(grant.number)
        self.outcomes.release(placement.number, placement.pair)
        placement.pair.decode.in_flight -= 1
        if self._crashes and end.complete and (placement.report is None or not placement.report.fallback):
            self._crashes.answered(placement.request.key)
        self._computed(placement)
        now = self._clock()
        if placement.first_byte is None:
            self.queue.changed()
        self.planner.release(placement, now, complete=end.complete, tokens=end.tokens, cached=end.cached)
        if placement.reservation is not None:
            placement.reservation.settle(end.charged, now)
            placement.reservation = None

    def _check_poison(self, request: PickRequest, now: float) -> None:
        if request.resumed or not self._crashes:
            return
        try:
            self._crashes.check(request.key, now, background=request.background)
        except PoisonRequest:
            self.queue.rejects["poison"] += 1
            raise

    def _first_token_timeout_s(self, placement: Placement) -> float:
        if len(placement.candidates.decodes) < 2 or not placement.prefill_state.prefill_cost.is_calibrated:
            return 0.0
        return first_token_timeout_s(placement.option.first_token_s, self._settings.first_byte_s)

    def _computed(self, placement: Placement) -> None:
        """Count the request out of its prefill worker, which has computed the prompt or never will."""
        if placement.pair.prefill is not None and placement.first_byte is None and placement.ended is None:
            placement.pair.prefill.in_flight -= 1


def first_token_timeout_s(predicted_s: float, least_s: float) -> float:
    """Seconds for a first token that was predicted to take `predicted_s`."""
    return max(PREDICTION_ERROR * predicted_s, least_s) + predicted_s
