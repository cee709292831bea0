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
from baton_api.reports import Fallback, PromptReport
from baton_http.http_client import UpstreamPool
from baton_router.requests.picker import UNREACHABLE, Grant, PickRequest, RequestEnd, WorkerLoss
from baton_router.scheduling.crash_history import CrashHistory
from baton_router.scheduling.dispatch import Dispatch
from baton_router.scheduling.dispatcher import Dispatcher
from baton_router.scheduling.outcome_attribution import OutcomeAttribution
from baton_router.scheduling.queue import BATCH, Queue
from baton_router.scheduling.quotas import QuotaReservation, Quotas
from baton_router.scheduling.revision_weights import RevisionWeights
from baton_router.settings import RouterSettings
from baton_router.workers import health_checks
from baton_router.workers.discovery.sources import FLAGS_SOURCE, WorkerSources
from baton_router.workers.kv_subscriber import KvSubscribers
from baton_router.workers.registration import WorkerRegistration
from baton_router.workers.worker import Worker, Workers

PREDICTION_ERROR = 3.0
"""Factor by which a prediction may be wrong, on top of the predicted time."""

DRAIN_CHECK_S = 0.5
"""Seconds from one look at the workers that leave to the next."""


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
        """Time of the last request of a class other than batch."""
        self.workers = workers = Workers()
        weights = RevisionWeights(settings.revision_weight, settings.revision_weights_file)
        measured = [profiles.read(one) for one in settings.profile]
        self.dispatcher = Dispatcher(workers, rng, settings.local_prefill_max_tokens, weights, measured)
        self.kv_subscribers = KvSubscribers(
            workers, self.dispatcher.worker_states, settings, clock, self.background
        )
        self.outcomes = OutcomeAttribution(self.dispatcher.worker_states.transfer)
        self.queue = Queue(settings, self.dispatcher, clock)
        self._quotas = Quotas(self.queue.rejects, lambda: self.dispatcher.answer_tokens)
        self._crashes = CrashHistory()
        self._reserved: dict[int, QuotaReservation] = {}
        self._granted: dict[int, Dispatch] = {}
        self._sources = WorkerSources(settings, rng)
        self.registration = WorkerRegistration(
            workers, self.dispatcher.worker_states, upstreams, settings.worker_drain_s, clock
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
        if request.kind != BATCH:
            self.wanted_at = now
        self._check_poison(request, now)
        reserved = self._quotas.reserve(request, now) if request.limits is not None else None
        try:
            dispatch = await self.queue.dispatch(request)
        except BaseException:
            if reserved is not None:
                reserved.cancel(self._clock())
            raise
        if reserved is not None:
            self._reserved[dispatch.number] = reserved
        dispatch.arrived, dispatch.tenant, dispatch.digest = (
            now - request.waited_s,
            request.tenant,
            request.digest,
        )
        dispatch.kind, dispatch.streams = request.kind, request.streams
        decode, prefill = dispatch.pair.decode, dispatch.pair.prefill
        decode.in_flight += 1
        if prefill is not None:
            prefill.in_flight += 1
        self._granted[dispatch.number] = dispatch
        self.outcomes.sent(dispatch.number, dispatch.pair, dispatch.decided)
        return Grant(
            dispatch.number,
            decode.name,
            prefill.name if prefill else "",
            prefill.control if prefill else "",
            dispatch.summary.encode(),
            self._first_token_timeout_s(dispatch),
            decode.health.load.step_s if decode.health.load else 0.0,
            len(dispatch.candidates.decodes) > 1,
            dispatch.option.first_token_s,
            dispatch.costs if request.explain else "",
            decode.engine_kind,
            dispatch.prefill_state.named_blocks,
            request.model or "" if decode.is_adapter(request.model) else "",
            dispatch.tokens + dispatch.others,
            self.dispatcher.answer_tokens,
        )

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        dispatch, now = self._granted[grant.number], self._clock()
        self.outcomes.answered(dispatch.number, dispatch.pair, report, now)
        lost_prefill = report is not None and report.fallback == Fallback.LOST
        if lost_prefill and dispatch.pair.prefill is not None:
            self._crashed(dispatch, dispatch.pair.prefill, now)
        if dispatch.streams and dispatch.first_byte is None:
            self.outcomes.first_byte(dispatch.pair, now - dispatch.decided)
        self._computed(dispatch)
        self.dispatcher.began(dispatch, report, now)
        self.queue.changed()

    def failed(self, grant: Grant, loss: WorkerLoss = UNREACHABLE) -> None:
        dispatch, now = self._granted[grant.number], self._clock()
        decode, prefill = dispatch.pair.decode, dispatch.pair.prefill
        if prefill is not None and (loss.prefill_crashed or (loss.at_prefill and loss.crashed)):
            self._crashed(dispatch, prefill, now)
        if prefill is not None and loss.at_prefill:
            self.outcomes.prefill_failed(dispatch.number, prefill, now)
            return
        self.outcomes.failed(dispatch.number, dispatch.pair, now)
        if loss.crashed:
            self._crashed(dispatch, decode, now)

    def _crashed(self, dispatch: Dispatch, worker: Worker, now: float) -> None:
        """A worker died or stopped while it had the request."""
        epoch = worker.health.load.epoch if worker.health.load else ""
        self._crashes.lost((dispatch.tenant, dispatch.digest), worker.name, epoch, now)

    def full(self, grant: Grant) -> None:
        self.outcomes.full(self._granted[grant.number].pair, self._clock())

    def release(self, grant: Grant, end: RequestEnd) -> None:
        dispatch = self._granted.pop(grant.number)
        self.outcomes.release(dispatch.number, dispatch.pair)
        dispatch.pair.decode.in_flight -= 1
        if end.complete and (dispatch.report is None or not dispatch.report.fallback):
            self._crashes.answered((dispatch.tenant, dispatch.digest))
        self._computed(dispatch)
        now = self._clock()
        if dispatch.first_byte is None:
            self.queue.changed()
        self.dispatcher.release(dispatch, now, complete=end.complete, tokens=end.tokens, cached=end.cached)
        if self._reserved and (reserved := self._reserved.pop(dispatch.number, None)) is not None:
            reserved.settle(end.charged, now)

    def _check_poison(self, request: PickRequest, now: float) -> None:
        if request.resumed:
            return
        try:
            self._crashes.check((request.tenant, request.digest), request.kind, now)
        except PoisonRequest:
            self.queue.rejects["poison"] += 1
            raise

    def _first_token_timeout_s(self, dispatch: Dispatch) -> float:
        if len(dispatch.candidates.decodes) < 2 or not dispatch.prefill_state.prefill_cost.taught:
            return 0.0
        return first_token_timeout_s(dispatch.option.first_token_s, self._settings.first_byte_s)

    def _computed(self, dispatch: Dispatch) -> None:
        """The prefill worker has finished its part, or will not."""
        if dispatch.pair.prefill is not None and dispatch.first_byte is None and dispatch.ended is None:
            dispatch.pair.prefill.in_flight -= 1


def first_token_timeout_s(predicted_s: float, least_s: float) -> float:
    """Seconds for a first token that was predicted to take `predicted_s`."""
    return max(PREDICTION_ERROR * predicted_s, least_s) + predicted_s
