"""
The one place that knows the workers and gives requests to them.

A process that holds clients' connections asks it through `picker.Picker` and is told an address. What the
workers hold, do and cost (`knowledge`), what was decided (`dispatcher`), how they are (`workers`): it is
all here, so that decisions made for one client count for the next.
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
from baton_api.reports import PromptReport
from baton_http.http_client import UpstreamPool
from baton_router.proxy.retries import CrashHistory
from baton_router.proxy.timeouts import first_token_timeout_s
from baton_router.scheduling.dispatcher import Dispatch, Dispatcher
from baton_router.scheduling.outcome_attribution import OutcomeAttribution
from baton_router.scheduling.picker import Grant, PickRequest
from baton_router.scheduling.queue import BATCH, Queue
from baton_router.scheduling.quotas import QuotaReservation, Quotas
from baton_router.scheduling.revision_weights import RevisionWeights
from baton_router.settings import RouterSettings
from baton_router.workers import health_checks
from baton_router.workers.discovery.sources import FLAGS_SOURCE, WorkerSources
from baton_router.workers.kv_subscriber import KvSubscribers
from baton_router.workers.registration import WorkerRegistration
from baton_router.workers.worker import Workers

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
        """When a request last came that somebody waits for: one of any class but batch."""
        self.workers = workers = Workers()
        weights = RevisionWeights(settings.revision_weight, settings.revision_weights_file)
        measured = [profiles.read(one) for one in settings.profile]
        self.dispatcher = Dispatcher(workers, rng, settings.local_prefill_max_tokens, weights, measured)
        self.feeds = KvSubscribers(workers, self.dispatcher.knowledge, settings, clock, self.background)
        self.verdicts = OutcomeAttribution(self.dispatcher.knowledge.transfer)
        self.queue = Queue(settings, self.dispatcher, clock)
        self._quotas = Quotas(self.queue.rejects, lambda: self.dispatcher.answer_tokens)
        self._crashes = CrashHistory()
        self._reserved: dict[int, QuotaReservation] = {}
        self._granted: dict[int, Dispatch] = {}
        self._sources = WorkerSources(settings, rng)
        self.enrolment = WorkerRegistration(
            workers, self.dispatcher.knowledge, upstreams, settings.worker_drain_s, clock
        )
        self.enrolment.told(FLAGS_SOURCE, self._sources.flags)
        workers.unlisted = self._sources.why_none
        workers.complete = self._sources.complete
        workers.holding = settings.hold_s > 0
        workers.hold_models = settings.hold_models

    def start(self) -> None:
        """Begin to look at the workers and to hear their events. `background` runs it until it is stopped."""
        background = self.background
        looking = partial(health_checks.watch, self.workers, self._settings, self._clock, background)
        background.start(BackgroundTask.HEALTH_CHECKS, looking)
        background.start(BackgroundTask.KV_EVENTS, self.feeds.watch)
        background.start(
            BackgroundTask.DISCOVERY, partial(self._sources.follow, self.enrolment.told, background)
        )
        background.start(BackgroundTask.DRAINING, self._drain)

    async def _drain(self) -> None:
        while True:
            with self.background.guard(BackgroundTask.DRAINING):
                self.enrolment.tend()
            await asyncio.sleep(DRAIN_CHECK_S)

    async def pick(self, ask: PickRequest) -> Grant:
        now = self._clock()
        if ask.kind != BATCH:
            self.wanted_at = now
        self._check_poison(ask, now)
        reserved = self._quotas.reserve(ask, now) if ask.limits is not None else None
        try:
            made = await self.queue.dispatch(ask)
        except BaseException:
            if reserved is not None:
                reserved.cancel(self._clock())
            raise
        if reserved is not None:
            self._reserved[made.number] = reserved
        made.arrived, made.tenant, made.digest = now - ask.waited_s, ask.tenant, ask.digest
        made.kind, made.streams = ask.kind, ask.streams
        decode, prefill = made.pair.decode, made.pair.prefill
        decode.in_flight += 1
        if prefill is not None:
            prefill.in_flight += 1
        self._granted[made.number] = made
        self.verdicts.sent(made.number, made.pair, made.decided)
        return Grant(
            made.number,
            decode.name,
            prefill.name if prefill else "",
            prefill.control if prefill else "",
            made.summary.encode(),
            self._patience_s(made),
            decode.health.load.step_s if decode.health.load else 0.0,
            len(made.among.decodes) > 1,
            made.way.first_token_s,
            made.costs if ask.explain else "",
        )

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        made, now = self._granted[grant.number], self._clock()
        self.verdicts.answered(made.number, made.pair, report, now)
        if made.streams and made.first_byte is None:
            self.verdicts.waited(made.pair, now - made.decided)
        self._computed(made)
        self.dispatcher.began(made, report, now)
        self.queue.changed()

    def failed(self, grant: Grant, *, crashed: bool = False) -> None:
        made, now = self._granted[grant.number], self._clock()
        self.verdicts.failed(made.number, made.pair, now)
        if crashed:
            decode = made.pair.decode
            epoch = decode.health.load.epoch if decode.health.load else ""
            self._crashes.lost((made.tenant, made.digest), decode.name, epoch, now)

    def full(self, grant: Grant) -> None:
        self.verdicts.full(self._granted[grant.number].pair, self._clock())

    def let_go(self, grant: Grant, *, complete: bool, tokens: int | None = None) -> None:
        made = self._granted.pop(grant.number)
        self.verdicts.let_go(made.number, made.pair)
        made.pair.decode.in_flight -= 1
        if complete:
            self._crashes.answered((made.tenant, made.digest))
        self._computed(made)
        now = self._clock()
        if made.first_byte is None:
            self.queue.changed()
        self.dispatcher.let_go(made, now, complete=complete, tokens=tokens)
        if self._reserved and (reserved := self._reserved.pop(made.number, None)) is not None:
            prompt = made.report.tokens if made.report else made.tokens
            if tokens is None and not complete:
                tokens = 0  # as far as anybody knows
            reserved.settle(0 if made.first_byte is None else prompt, tokens, now)

    def _check_poison(self, ask: PickRequest, now: float) -> None:
        if ask.resumed:
            return
        try:
            self._crashes.check((ask.tenant, ask.digest), ask.kind, now)
        except PoisonRequest:
            self.queue.rejects["poison"] += 1
            raise

    def _patience_s(self, made: Dispatch) -> float:
        if len(made.among.decodes) < 2 or not made.computing.prefill_cost.taught:
            return 0.0
        return first_token_timeout_s(made.way.first_token_s, self._settings.first_byte_s)

    def _computed(self, made: Dispatch) -> None:
        """The prefill worker has done its part, or will not."""
        if made.pair.prefill is not None and made.first_byte is None and made.ended is None:
            made.pair.prefill.in_flight -= 1
