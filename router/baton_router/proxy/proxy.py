"""
The hot path: an ASGI callable that forwards a request to a worker and the response to the client.

Bodies pass as bytes in both directions; the router reads of a request only what it needs to route it. Until
the first byte of the response has reached the client, a worker that fails or rejects the request is replaced.
After that, the response is whole or visibly broken: an error event in a stream, then a cut connection, never
a clean end. When a client disconnects, the worker's connection is closed too.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from baton_api import logs
from baton_api.errors import BatonError, InternalError, NotReady, PoisonRequest
from baton_api.metrics import ROUTER_CUT, ROUTER_RESUMES, ROUTER_RETRIES, STALE
from baton_api.request_classes import CLASSES
from baton_api.workers import EngineKind
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.replies import Receive, Scope, Send, send_error
from baton_http.upstream import UpstreamLost, UpstreamPool
from baton_router.engines.engine_request import (
    BUSY,
    CRASH_CAUSES,
    OK,
    OVERDUE,
    PREFILL_CAUSES,
    EngineRequest,
    ResumeState,
)
from baton_router.engines.heads import WorkerCredentials, WorkerHead, response_headers
from baton_router.engines.registry import ENGINES
from baton_router.metrics.registry import RouterMetrics
from baton_router.proxy import finished_request
from baton_router.proxy.finished_request import CLIENT_CLOSED_REQUEST
from baton_router.proxy.request_context import RequestContext
from baton_router.proxy.timeouts import FirstByteTimeout, IdleTimeout, RetryBudget, first_byte_s
from baton_router.proxy.tracing import Tracing
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import Grant, Picker, PickRequest
from baton_router.scheduling.outcome_attribution import LOSSES_LIMIT
from baton_router.settings import RouterSettings
from baton_router.tenants.access import error_for

log = logging.getLogger(__name__)

RESUMES_LIMIT = 3
"""Maximum workers that may resume one response."""

RESUMED_COMMENT = b": resumed\n\n"
"""A comment in the stream: another worker continues from here."""

IDLE_STEPS = 50.0
"""Steps of a worker without a token after which a stream counts as idle."""


class Proxy:
    """Serves the paths of `inference_paths.PROXIED_PATHS`."""

    def __init__(
        self,
        settings: RouterSettings,
        picker: Picker,
        upstreams: UpstreamPool,
        metrics: RouterMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._picker = picker
        self._upstreams = upstreams
        self._metrics = metrics
        self._retries = metrics.counter(ROUTER_RETRIES)
        self._resumes = metrics.counter(ROUTER_RESUMES)
        self._cut = metrics.counter(ROUTER_CUT)
        self._tracing = tracing
        self._credentials = WorkerCredentials.of(settings)
        rng = random.Random()
        self._drivers = {kind: engine.driver(rng) for kind, engine in ENGINES.items()}
        self._budget = RetryBudget(settings.retry_ratio, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(scope, receive, send)
        logs.about(request_id=context.id.decode())
        if self._tracing is not None:
            context.trace = self._tracing.begin(scope["headers"])
        self._metrics.in_flight += 1
        try:
            await self._serve(context)
        except ClientDisconnected:
            context.status = context.status or CLIENT_CLOSED_REQUEST
        except BatonError as error:
            await self._fail(context, error)
        except asyncio.CancelledError:  # the server has waited for us as long as it will
            await self._fail(context, NotReady("The router is stopping."))
        except Exception:
            log.exception("Request %s failed inside the router.", context.id.decode())
            await self._fail(context, InternalError())
        finally:
            if context.attempt is not None:
                context.attempt.close()
            self._metrics.in_flight -= 1
            finished_request.count(context, self._metrics.counters, time.perf_counter())
            if self._settings.log_requests:
                log.info("%s", finished_request.log_line(context, time.perf_counter()))
            if context.trace is not None:
                finished_request.write_spans(context, context.trace)

    async def _serve(self, context: RequestContext) -> None:
        client = context.client
        body = await client.body(self._settings.max_body)
        context.arrived = time.perf_counter()
        request = context.inference_request(body)
        with client:
            attempt, opening = await self._open(context, request)
            await self._pass_on(context, attempt, opening)

    async def _open(self, context: RequestContext, request: InferenceRequest) -> tuple[EngineRequest, bytes]:
        """Find a worker that responds; returns the attempt and the first part of the response."""
        self._budget.earn()
        grant = await self._picker.pick(request.pick_request())
        context.granted = context.sent = time.perf_counter()
        self._metrics.overhead.observe(context.granted - context.arrived)
        until = asyncio.get_running_loop().time() + self._settings.answer_s
        excluded: list[str] = []
        attempts = 0
        while True:
            context.attempt = attempt = self._attempt(context, request, grant)
            opening = b""
            lost: UpstreamLost | None = None
            slow_s = 0.0 if attempts == self._settings.retries else first_byte_s(grant, request.tokens_ahead)
            try:
                opening = await self._try(context, attempt, slow_s, until)
            except UpstreamLost as error:
                lost = error
            else:
                if attempt.exchange is not None and attempt.exchange.resent:
                    self._retries.labels(STALE).inc()
                if attempt.accepted:
                    return attempt, opening
            attempts += 1
            if lost is not None or attempt.status not in BUSY:
                # A full worker is healthy, and may have capacity the next time.
                excluded.append(_failed_worker(grant, lost))
            waited_s = time.perf_counter() - context.arrived
            next_grant = await self._next_grant(
                request.pick_request(tuple(excluded), waited_s), attempts, attempt, lost
            )
            if next_grant is not None:
                attempt.close()
                grant = next_grant
                context.sent = time.perf_counter()
                cause = lost.cause if lost else "refused"
                if context.trace is not None:
                    context.trace.note("retry", cause=cause, worker=grant.decode)
                self._retries.labels(cause).inc()
            elif lost is not None:
                raise self._final(context, lost)
            else:
                return attempt, opening

    async def _try(
        self, context: RequestContext, attempt: EngineRequest, slow_s: float, until: float
    ) -> bytes:
        """
        Send the request to its workers and wait for the first part of the response.

        The workers have `slow_s` seconds (see `first_byte_s`), and until loop time `until` at most. Raises
        UpstreamLost. The attempt is closed if this fails for any reason.
        """
        timeout = FirstByteTimeout(attempt, slow_s, until, self._budget.spend)
        try:
            return await attempt.open()
        except UpstreamLost as lost:
            grant = attempt.grant
            if lost.cause in CRASH_CAUSES and grant.prefill and grant.engine is EngineKind.BATON:
                # Baton's decode worker cannot say any more that it had lost the prefill worker before.
                attempt.prefill_refuses = await self._upstreams.get(grant.prefill).refuses()
            self._lost(context, attempt, lost)
            attempt.close()
            raise
        except BaseException:
            attempt.close()
            raise
        finally:
            timeout.close()

    def _attempt(
        self,
        context: RequestContext,
        request: InferenceRequest,
        grant: Grant,
        state: ResumeState | None = None,
    ) -> EngineRequest:
        ours = grant.engine is EngineKind.BATON
        head = WorkerHead(
            request.target,
            request.headers,
            context.id,
            self._credentials,
            time.time(),
            control=grant.control if ours else "",
            resumable=ours and request.events is not None,
            tenant=request.tenant.turn if ours else "",
            salt=request.tenant.salt if ours else "",
            background=ours and CLASSES[request.priority_class].background,
            trace=b"" if context.trace is None else context.trace.lines,
        )
        driver = self._drivers[grant.engine]
        return EngineRequest(
            request, grant, driver, self._picker, self._upstreams, head, time.perf_counter, state
        )

    async def _next_grant(
        self, pick_request: PickRequest, attempts: int, attempt: EngineRequest, lost: UpstreamLost | None
    ) -> Grant | None:
        """
        The next worker to try; None if the last response or loss goes to the client.

        Raises PoisonRequest if the request has lost as many workers as it may.
        """
        if attempts > self._settings.retries or (lost is not None and lost.cause == OVERDUE):
            return None
        if lost is None:
            affordable = attempt.status not in BUSY or self._budget.spend()
        elif lost.cause in CRASH_CAUSES:
            # A batch runner sends its lines again by its own rules, which find what kills workers.
            failed = _failed_worker(attempt.grant, lost)
            affordable = not pick_request.background and self._budget.spend_after_crash(failed)
        else:
            affordable = True
        if not affordable:
            return None
        try:
            return await self._picker.pick(pick_request)
        except PoisonRequest:
            raise
        except BatonError:
            return None

    async def _pass_on(self, context: RequestContext, attempt: EngineRequest, opening: bytes) -> None:
        client, request = context.client, attempt.request
        context.status = status = attempt.status
        queued_s = context.granted - context.arrived
        grant = attempt.grant if request.tenant.admin else None
        response_fields = response_headers(attempt.headers, context.id, grant, attempt.report, queued_s)
        await client.start(status, response_fields)
        if attempt.ended:
            await client.send(opening, more=False)
            return
        context.opened = time.perf_counter()
        self._metrics.first_byte.observe(context.opened - context.arrived, request.priority_class)
        if attempt.grant.first_token_s and attempt.events is not None:
            self._metrics.counters.began(attempt.grant.first_token_s, context.opened - context.sent)
        piece = opening
        while True:
            try:
                await self._copy(client, attempt, piece)
                return
            except UpstreamLost as lost:
                self._lost(context, attempt, lost)
                attempt, piece = await self._resume(context, attempt, lost)

    async def _copy(self, client: ClientConnection, attempt: EngineRequest, piece: bytes) -> None:
        """Forward the response to its end. Raises UpstreamLost."""
        assert attempt.exchange is not None
        settings, grant, events = self._settings, attempt.grant, attempt.events
        silent_s = max(settings.idle_s, IDLE_STEPS * grant.step_s)
        # If no other worker could continue the answer, wait longer for one that reports that it is alive.
        can_resume = grant.has_alternative and attempt.resume_state is not None
        tokens_s = silent_s if can_resume else max(silent_s, settings.answer_s)
        idle_timeout = IdleTimeout(client, attempt.exchange, events, silent_s, tokens_s)
        attempt.forward_to(client)
        try:
            while not attempt.ended:
                if piece:
                    await client.send(piece, more=True)
                piece = await attempt.next()
            await client.send(piece, more=False)
        finally:
            idle_timeout.close()

    async def _resume(
        self, context: RequestContext, broken: EngineRequest, lost: UpstreamLost
    ) -> tuple[EngineRequest, bytes]:
        """Continue a broken stream at another worker. Raises `lost` if none can."""
        state = broken.resume_state
        if state is None:
            raise lost
        if state.ending:
            broken.end()
            return broken, state.ending
        request, excluded = broken.request, context.lost
        excluded.append(broken.grant.decode)
        broken.close()
        loop = asyncio.get_running_loop()
        while context.resumes < RESUMES_LIMIT and context.crashes <= LOSSES_LIMIT:
            context.resumes += 1
            try:
                grant = await self._picker.pick(request.pick_request(tuple(excluded), 0.0, resumed=True))
            except BatonError:
                break
            excluded.append(grant.decode)
            attempt = self._attempt(context, request, grant, state)
            if grant.engine is not broken.grant.engine:
                attempt.close()  # it could not read the state
                continue
            slow_s = 0.0 if context.resumes == RESUMES_LIMIT else first_byte_s(grant, 1)
            until = loop.time() + self._settings.answer_s
            try:
                opening = await self._try(context, attempt, slow_s, until)
            except UpstreamLost:
                continue
            if attempt.status != OK:
                attempt.close()
                continue
            context.attempt = attempt
            if context.trace is not None:
                context.trace.resumed(grant.decode, state.passed)
            self._resumes.labels("resumed").inc()
            log.warning(
                "The answer to request %s continues at %s after %d tokens, because %s",
                context.id.decode(),
                grant.decode,
                state.passed,
                lost,
            )
            return attempt, RESUMED_COMMENT + opening
        self._resumes.labels("failed").inc()
        raise self._final(context, lost)

    def _lost(self, context: RequestContext, attempt: EngineRequest, lost: UpstreamLost) -> None:
        """Record that a worker was lost while it had the request, and perhaps its prefill worker before."""
        context.crashes += (lost.cause in CRASH_CAUSES) + attempt.prefill_crashed
        attempt.report_loss(lost)

    def _final(self, context: RequestContext, lost: UpstreamLost) -> BatonError:
        """The error for the client when no other worker is tried."""
        if context.crashes < LOSSES_LIMIT:
            return lost
        poison = PoisonRequest(context.crashes)
        poison.__cause__ = lost
        return poison

    async def _fail(self, context: RequestContext, error: BatonError) -> None:
        """Report the error to the client, as far as that is still possible."""
        client, tenant = context.client, context.tenant
        if not client.started:
            context.status = error.status
            await send_error(context.send, error_for(error, tenant), context.id, path=context.path)
            return
        cause = error.cause if isinstance(error, UpstreamLost) else "router"
        self._cut.labels(cause).inc()
        log.warning("The response to request %s was cut: %s (%s)", context.id.decode(), error, cause)
        events = context.attempt.events if context.attempt else None
        await client.cut(events.error(error_for(error, tenant)) if events else b"")


def _failed_worker(grant: Grant, lost: UpstreamLost | None) -> str:
    """The name of the worker that failed."""
    return grant.prefill if lost is not None and lost.cause in PREFILL_CAUSES else grant.decode
