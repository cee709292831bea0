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
from functools import partial

from baton_api import headers, logs
from baton_api.engines import EngineKind
from baton_api.errors import BatonError, InternalError, NotReady, PoisonRequest
from baton_api.metrics import STALE
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.http_client import UpstreamPool
from baton_http.replies import Receive, Scope, Send, request_id, send_error
from baton_http.upstream import UpstreamLost
from baton_router.engines.contract import CRASH_CAUSES, OVERDUE, PREFILL_CAUSES, Call, ResumeState
from baton_router.engines.registry import all_engines
from baton_router.engines.worker_head import WorkerCredentials, request_head
from baton_router.metrics.registry import RouterMetrics
from baton_router.proxy.attempt import BUSY, Attempt, ProxiedRequest
from baton_router.proxy.finished_request import request_line, write_spans
from baton_router.proxy.forwarding import response_headers
from baton_router.proxy.retries import RetryBudget
from baton_router.proxy.timeouts import FirstByteTimeout, IdleTimeout, first_byte_s
from baton_router.proxy.tracing import Tracing
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import Grant, Picker, PickRequest, WorkerLoss
from baton_router.scheduling.crash_history import LOSSES_LIMIT
from baton_router.settings import RouterSettings
from baton_router.tenants.access import error_for, tenant_of

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status of requests whose client disconnected before the response."""

RESUMES_LIMIT = 3
"""Maximum workers that may resume one response."""

RESUMED_COMMENT = b": resumed\n\n"
"""A comment in the stream: another worker continues from here."""

IDLE_STEPS = 50.0
"""Steps of a worker without a token after which a stream counts as idle."""

OK = 200


class Proxy:
    """Serves the paths of `forwarding.PROXIED_PATHS`."""

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
        self._tracing = tracing
        self._trust = WorkerCredentials.of(settings)
        self._engines = all_engines(random.Random())
        self._budget = RetryBudget(settings.retry_ratio, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        proxied = ProxiedRequest(ClientConnection(scope, receive, send), request_id(scope["headers"]))
        logs.about(request_id=proxied.id.decode())
        if self._tracing is not None:
            proxied.trace = self._tracing.begin(scope["headers"], scope["path"])
        self._metrics.in_flight += 1
        try:
            await self._serve(scope, proxied)
        except ClientDisconnected:
            proxied.status = proxied.status or CLIENT_CLOSED_REQUEST
        except BatonError as error:
            await self._fail(proxied, error, scope, send)
        except asyncio.CancelledError:  # the server has waited for us as long as it will
            await self._fail(proxied, NotReady("The router is stopping."), scope, send)
        except Exception:
            log.exception("Request %s failed inside the router.", proxied.id.decode())
            await self._fail(proxied, InternalError(), scope, send)
        finally:
            if proxied.attempt is not None:
                proxied.attempt.close()
            self._metrics.in_flight -= 1
            self._count(scope["path"], proxied)
            if self._settings.log_requests:
                log.info("%s", request_line(scope["path"], proxied, time.perf_counter()))
            if proxied.trace is not None:
                write_spans(proxied.trace, proxied)

    def _count(self, path: str, proxied: ProxiedRequest) -> None:
        """Count a finished request."""
        request, attempt, accounts = proxied.request, proxied.attempt, self._metrics.counters
        if request is None:
            accounts.refused(path, proxied.status)
            return
        accounts.ended(
            path, request.model, request.priority_class, proxied.status, granted=attempt is not None
        )
        if attempt is None or proxied.status not in (OK, CLIENT_CLOSED_REQUEST):
            return
        prompt, generated = attempt.charged
        if not prompt and attempt.report is not None:
            prompt = attempt.report.tokens  # of an answer that was resumed
        accounts.used(request.tenant.name, prompt, attempt.report, max(generated, attempt.tokens))
        if proxied.status == OK:
            now, priority_class = time.perf_counter(), request.priority_class
            if attempt.ended:
                accounts.served(now - proxied.arrived, priority_class)
                if proxied.opened and not proxied.resumes:
                    accounts.streamed(attempt.tokens, now - proxied.opened, priority_class)

    async def _serve(self, scope: Scope, proxied: ProxiedRequest) -> None:
        settings = self._settings
        client = proxied.client
        body = await client.body(settings.max_body)
        arrived = proxied.arrived = time.perf_counter()
        proxied.request = request = InferenceRequest(scope, body, tenant_of(scope))
        request.explain = proxied.trace is not None and proxied.trace.recorded
        with client:
            opening = await self._open(request, proxied, arrived)
            await self._pass_on(request, proxied, opening, arrived)

    async def _open(self, request: InferenceRequest, proxied: ProxiedRequest, arrived: float) -> bytes:
        """Find a worker that responds and return the first part of its response; sets `proxied.attempt`."""
        self._budget.earn()
        grant = await self._picker.pick(request.pick_request())
        proxied.granted = proxied.sent = time.perf_counter()
        self._metrics.overhead.observe(proxied.granted - arrived)
        until = asyncio.get_running_loop().time() + self._settings.answer_s
        excluded: list[str] = []
        attempts = 0
        while True:
            proxied.attempt = attempt = self._attempt(grant)
            opening = b""
            lost: UpstreamLost | None = None
            slow_s = 0.0 if attempts == self._settings.retries else first_byte_s(grant, request.tokens_ahead)
            try:
                opening = await self._try(
                    self._call(request, proxied, attempt), proxied, attempt, slow_s, until
                )
            except UpstreamLost as error:
                lost = error
            else:
                if attempt.exchange is not None and attempt.exchange.resent:
                    self._metrics.retries.labels(STALE).inc()
                if attempt.taken:
                    return opening
            attempts += 1
            if lost is not None or attempt.status not in BUSY:
                # A full worker is healthy, and may have capacity the next time.
                excluded.append(_failed_worker(grant, lost))
            waited_s = time.perf_counter() - arrived
            next_grant = await self._next_grant(
                request.pick_request(tuple(excluded), waited_s), attempts, attempt, lost
            )
            if next_grant is not None:
                attempt.close()
                grant = next_grant
                proxied.sent = time.perf_counter()
                if proxied.trace is not None:
                    proxied.trace.note("retry", cause=lost.cause if lost else "refused", worker=grant.decode)
                self._metrics.retries.labels(lost.cause if lost else "refused").inc()
            elif lost is not None:
                raise self._final(proxied, lost)
            else:
                return opening

    async def _try(
        self, call: Call, proxied: ProxiedRequest, attempt: Attempt, slow_s: float, until: float
    ) -> bytes:
        """
        Send the request to its workers and wait for the first part of the response.

        The workers have `slow_s` seconds (see `first_byte_s`), and until loop time `until` at most. Raises
        UpstreamLost. The attempt is closed if this fails for any reason.
        """
        timeout = FirstByteTimeout(attempt, slow_s, until, self._budget.spend)
        try:
            return await attempt.open(call)
        except UpstreamLost as lost:
            grant = attempt.grant
            if lost.cause in CRASH_CAUSES and grant.prefill and grant.engine is EngineKind.BATON:
                # Baton's decode worker cannot say any more that it had lost the prefill worker before.
                attempt.prefill_refuses = await self._upstreams.get(grant.prefill).refuses()
            self._lost(proxied, attempt, lost)
            attempt.close()
            raise
        except BaseException:
            attempt.close()
            raise
        finally:
            timeout.close()

    def _attempt(self, grant: Grant) -> Attempt:
        return Attempt(grant, self._picker, self._engines[grant.engine])

    def _call(
        self,
        request: InferenceRequest,
        proxied: ProxiedRequest,
        attempt: Attempt,
        state: ResumeState | None = None,
    ) -> Call:
        head = partial(self._head, request, proxied, attempt.grant)
        return Call(request, attempt.grant, self._upstreams, head, attempt, time.perf_counter, state)

    def _head(
        self, request: InferenceRequest, proxied: ProxiedRequest, grant: Grant, worker: str, length: int
    ) -> bytes:
        own = grant.engine is EngineKind.BATON
        return request_head(
            request.target,
            request.headers,
            length,
            proxied.id,
            worker,
            grant.control if own else "",
            self._trust,
            time.time(),
            follow=own and request.events is not None,
            tenant=request.tenant.turn if own else "",
            salt=request.tenant.salt if own else "",
            patient=own and request.priority_class == headers.BATCH_CLASS,
            trace=b"" if proxied.trace is None else proxied.trace.lines,
        )

    async def _next_grant(
        self, pick_request: PickRequest, attempts: int, attempt: Attempt, lost: UpstreamLost | None
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
            runs_in_batch = pick_request.priority_class == headers.BATCH_CLASS
            failed = _failed_worker(attempt.grant, lost)
            affordable = not runs_in_batch and self._budget.spend_after_crash(failed)
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

    async def _pass_on(
        self, request: InferenceRequest, proxied: ProxiedRequest, opening: bytes, arrived: float
    ) -> None:
        client, attempt = proxied.client, proxied.attempt
        assert attempt is not None
        proxied.status = attempt.status
        queued_s = proxied.granted - arrived
        grant = attempt.grant if request.tenant.admin else None
        response_fields = response_headers(attempt.headers, proxied.id, grant, attempt.report, queued_s)
        await client.start(attempt.status, response_fields)
        if attempt.ended:
            await client.send(opening, more=False)
            return
        proxied.opened = time.perf_counter()
        self._metrics.first_byte.observe(proxied.opened - arrived, request.priority_class)
        if attempt.grant.first_token_s and attempt.events is not None:
            self._metrics.counters.began(attempt.grant.first_token_s, proxied.opened - proxied.sent)
        piece = opening
        while True:
            try:
                await self._copy(client, attempt, piece)
                return
            except UpstreamLost as lost:
                self._lost(proxied, attempt, lost)
                attempt, piece = await self._resume(request, proxied, attempt, lost)

    async def _copy(self, client: ClientConnection, attempt: Attempt, piece: bytes) -> None:
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
        self, request: InferenceRequest, proxied: ProxiedRequest, broken: Attempt, lost: UpstreamLost
    ) -> tuple[Attempt, bytes]:
        """Continue a broken stream at another worker. Raises `lost` if none can."""
        state = broken.resume_state
        if state is None:
            raise lost
        if state.ending:
            broken.end()
            return broken, state.ending
        excluded = proxied.lost
        excluded.append(broken.grant.decode)
        broken.close()
        loop = asyncio.get_running_loop()
        while proxied.resumes < RESUMES_LIMIT and proxied.crashes <= LOSSES_LIMIT:
            proxied.resumes += 1
            try:
                grant = await self._picker.pick(request.pick_request(tuple(excluded), 0.0, resumed=True))
            except BatonError:
                break
            excluded.append(grant.decode)
            attempt = self._attempt(grant)
            if grant.engine is not broken.grant.engine:
                attempt.close()  # it could not read the state
                continue
            slow_s = 0.0 if proxied.resumes == RESUMES_LIMIT else first_byte_s(grant, 1)
            until = loop.time() + self._settings.answer_s
            try:
                call = self._call(request, proxied, attempt, state)
                opening = await self._try(call, proxied, attempt, slow_s, until)
            except UpstreamLost:
                continue
            if attempt.status != OK:
                attempt.close()
                continue
            proxied.attempt = attempt
            if proxied.trace is not None:
                proxied.trace.resumed(grant.decode, state.passed)
            self._metrics.resumes.labels("resumed").inc()
            log.warning(
                "The answer to request %s continues at %s after %d tokens, because %s",
                proxied.id.decode(),
                grant.decode,
                state.passed,
                lost,
            )
            return attempt, RESUMED_COMMENT + opening
        self._metrics.resumes.labels("failed").inc()
        raise self._final(proxied, lost)

    def _lost(self, proxied: ProxiedRequest, attempt: Attempt, lost: UpstreamLost) -> None:
        """Record that a worker was lost while it had the request, and perhaps its prefill worker before."""
        attempt.lost = True
        crashed = lost.cause in CRASH_CAUSES
        proxied.crashes += crashed + attempt.prefill_crashed
        loss = WorkerLoss(
            crashed=crashed,
            at_prefill=lost.cause in PREFILL_CAUSES,
            prefill_crashed=attempt.prefill_crashed,
        )
        self._picker.failed(attempt.grant, loss)

    def _final(self, proxied: ProxiedRequest, lost: UpstreamLost) -> BatonError:
        """The error for the client when no other worker is tried."""
        if proxied.crashes < LOSSES_LIMIT:
            return lost
        poison = PoisonRequest(proxied.crashes)
        poison.__cause__ = lost
        return poison

    async def _fail(self, proxied: ProxiedRequest, error: BatonError, scope: Scope, send: Send) -> None:
        """Report the error to the client, as far as that is still possible."""
        client, tenant = proxied.client, tenant_of(scope)
        if not client.started:
            proxied.status = error.status
            shown, close = error_for(error, tenant), not client.read
            await send_error(send, shown, proxied.id, close=close, path=scope["path"])
            return
        cause = error.cause if isinstance(error, UpstreamLost) else "router"
        self._metrics.cut.labels(cause).inc()
        log.warning("The response to request %s was cut: %s (%s)", proxied.id.decode(), error, cause)
        events = proxied.attempt.events if proxied.attempt else None
        await client.cut(events.error(error_for(error, tenant)) if events else b"")


def _failed_worker(grant: Grant, lost: UpstreamLost | None) -> str:
    """The name of the worker that failed."""
    return grant.prefill if lost is not None and lost.cause in PREFILL_CAUSES else grant.decode
