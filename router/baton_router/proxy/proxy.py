"""
The hot path: one bare ASGI callable that gives a request to a worker and its answer to the client.

Bodies pass as bytes in both directions; of the request only the model's name is read. Until the first
byte of an answer has gone to the client, a worker that fails or refuses is replaced by another. After
it the answer is either whole or visibly broken: an error event where there are events, then a cut
connection, never a clean end. A client that leaves takes its request along: the worker sees its
connection close.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton_api import headers, logs
from baton_api.errors import BatonError, InternalError, NotReady, PoisonRequest
from baton_api.metrics import STALE
from baton_api.resuming import with_resumption
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.http_client import UpstreamPool
from baton_http.replies import Receive, Scope, Send, request_id, send_error
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamLost
from baton_router.metrics.registry import RouterMetrics
from baton_router.metrics.tracing import Tracing, request_line
from baton_router.proxy.attempt import BUSY, Attempt, ProxiedRequest
from baton_router.proxy.forwarding import WorkerCredentials, request_head, response_headers
from baton_router.proxy.resume_state import ResumableStream
from baton_router.proxy.retries import CRASH_CAUSES, LOSSES_LIMIT, RetryBudget
from baton_router.proxy.routed_request import RoutedRequest
from baton_router.proxy.timeouts import OVERDUE, FirstByteTimeout, IdleTimeout, first_byte_s
from baton_router.scheduling.picker import Grant, Picker, PickRequest
from baton_router.settings import RouterSettings
from baton_router.tenants.access import error_for, tenant_of

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status under which a request is counted whose client left before the answer."""

RESUMES_LIMIT = 3
"""Workers that may be asked to go on with one answer."""

RESUMED_COMMENT = b": resumed\n\n"
"""A comment for those who look: from here on another worker speaks."""

IDLE_STEPS = 50.0
"""Of a worker, without a token, after which a stream stands still."""

OK = 200


class Proxy:
    """Serves what `forward.FORWARDED` lists."""

    def __init__(
        self,
        settings: RouterSettings,
        picker: Picker,
        upstreams: UpstreamPool,
        figures: RouterMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._picker = picker
        self._upstreams = upstreams
        self._figures = figures
        self._tracing = tracing
        self._trust = WorkerCredentials.of(settings)
        self._budget = RetryBudget(settings.retry_ratio, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = ProxiedRequest(ClientConnection(scope, receive, send), request_id(scope["headers"]))
        logs.about(request_id=relay.id.decode())
        if self._tracing is not None:
            relay.trace = self._tracing.begin(scope["headers"], scope["path"])
        self._figures.in_flight += 1
        try:
            await self._serve(scope, relay)
        except ClientDisconnected:
            relay.status = relay.status or CLIENT_CLOSED_REQUEST
        except BatonError as error:
            await self._fail(relay, error, scope, send)
        except asyncio.CancelledError:  # the server has waited for us as long as it will
            await self._fail(relay, NotReady("The router is stopping."), scope, send)
        except Exception:
            log.exception("Request %s failed inside the router.", relay.id.decode())
            await self._fail(relay, InternalError(), scope, send)
        finally:
            if relay.attempt is not None:
                relay.attempt.close()
            self._figures.in_flight -= 1
            self._account(scope["path"], relay)
            if self._settings.log_requests:
                log.info("%s", request_line(scope["path"], relay, time.perf_counter()))
            if relay.trace is not None:
                relay.trace.end(relay)

    def _account(self, path: str, relay: ProxiedRequest) -> None:
        """Count a request that has ended."""
        asked, attempt, accounts = relay.asked, relay.attempt, self._figures.accounts
        if asked is None:
            accounts.refused(path, relay.status)
            return
        accounts.ended(path, asked.model, asked.urgency[0], relay.status, granted=attempt is not None)
        if attempt is not None and relay.status == OK:
            accounts.used(asked.tenant.name, attempt.report, attempt.tokens)
            now, urgency = time.perf_counter(), asked.urgency[0]
            if attempt.ended:
                accounts.served(now - relay.arrived, urgency)
                if relay.opened and not relay.resumes:
                    accounts.streamed(attempt.tokens, now - relay.opened, urgency)

    async def _serve(self, scope: Scope, relay: ProxiedRequest) -> None:
        settings = self._settings
        client = relay.client
        body = await client.body(settings.max_body, settings.body_s)
        arrived = relay.arrived = time.perf_counter()
        relay.asked = asked = RoutedRequest(scope, body, tenant_of(scope))
        asked.explain = relay.trace is not None and relay.trace.recorded
        with client:
            opening = await self._open(asked, relay, arrived)
            await self._pass_on(asked, relay, opening, arrived)

    async def _open(self, asked: RoutedRequest, relay: ProxiedRequest, arrived: float) -> bytes:
        """Find a worker that answers: `relay.attempt` is its, and the answer's first part is given."""
        self._budget.earn()
        grant = await self._picker.pick(asked.ask())
        relay.granted = relay.sent = time.perf_counter()
        self._figures.overhead.observe(relay.granted - arrived)
        until = asyncio.get_running_loop().time() + self._settings.answer_s
        tried: list[str] = []
        tries = 0
        while True:
            relay.attempt = attempt = self._attempt(grant)
            opening = b""
            lost: UpstreamLost | None = None
            slow_s = 0.0 if tries == self._settings.retries else first_byte_s(grant, asked.tokens_ahead)
            try:
                opening = await self._try(asked, relay, attempt, asked.body, asked.events, slow_s, until)
            except UpstreamLost as error:
                lost = error
            else:
                if attempt.exchange is not None and attempt.exchange.resent:
                    self._figures.retries.labels(STALE).inc()
                if attempt.taken:
                    return opening
            tries += 1
            if lost is not None or attempt.status not in BUSY:
                tried.append(grant.decode)  # one that is full is well, and may have room the next time
            waited_s = time.perf_counter() - arrived
            another = await self._another(asked.ask(tuple(tried), waited_s), tries, attempt, lost)
            if another is not None:
                attempt.close()
                grant = another
                relay.sent = time.perf_counter()
                if relay.trace is not None:
                    relay.trace.note("retry", cause=lost.cause if lost else "refused", worker=grant.decode)
                self._figures.retries.labels(lost.cause if lost else "refused").inc()
            elif lost is not None:
                raise self._final(relay, lost)
            else:
                return opening

    async def _try(
        self,
        asked: RoutedRequest,
        relay: ProxiedRequest,
        attempt: Attempt,
        body: bytes,
        events: Callable[[], EventStream] | None,
        slow_s: float,
        until: float,
    ) -> bytes:
        """
        Send the request to one worker and wait for the first part of its response.

        The worker has `slow_s` seconds (see `first_byte_s`), and until loop time `until` at most. Raises
        UpstreamLost. The attempt is closed if this fails for any reason.
        """
        timeout = FirstByteTimeout(attempt, slow_s, until, self._budget.spend)
        try:
            return await attempt.open(self._head(asked, relay, attempt.grant, len(body)), body, events)
        except UpstreamLost as lost:
            self._lost(relay, attempt.grant, lost)
            attempt.close()
            raise
        except BaseException:
            attempt.close()
            raise
        finally:
            timeout.close()

    def _attempt(self, grant: Grant) -> Attempt:
        return Attempt(grant, self._picker, self._upstreams.of(grant.decode))

    def _head(self, asked: RoutedRequest, relay: ProxiedRequest, grant: Grant, length: int) -> bytes:
        return request_head(
            asked.target,
            asked.headers,
            length,
            relay.id,
            grant.decode,
            grant.control,
            self._trust,
            time.time(),
            follow=asked.followed,
            salt=asked.tenant.salt,
            patient=asked.urgency[0] == headers.PATIENT_CLASS,
            trace=b"" if relay.trace is None else relay.trace.lines,
        )

    async def _another(
        self, ask: PickRequest, tries: int, attempt: Attempt, lost: UpstreamLost | None
    ) -> Grant | None:
        """
        Who is asked next; None if the last one's answer, or its loss, is the client's.

        Raises PoisonRequest if the request has lost as many workers as it may.
        """
        if tries > self._settings.retries or (lost is not None and lost.cause == OVERDUE):
            return None
        if lost is None:
            affordable = attempt.status not in BUSY or self._budget.spend()
        elif lost.cause in CRASH_CAUSES:
            # A batch runner sends its lines again by its own rules, which find what kills workers.
            runs_in_batch = ask.kind == headers.PATIENT_CLASS
            affordable = not runs_in_batch and self._budget.spend_after_crash(attempt.grant.decode)
        else:
            affordable = True
        if not affordable:
            return None
        try:
            return await self._picker.pick(ask)
        except PoisonRequest:
            raise
        except BatonError:
            return None

    async def _pass_on(
        self, asked: RoutedRequest, relay: ProxiedRequest, opening: bytes, arrived: float
    ) -> None:
        client, attempt = relay.client, relay.attempt
        assert attempt is not None
        relay.status = attempt.status
        queued_s = relay.granted - arrived
        grant = attempt.grant if asked.tenant.admin else None
        told = response_headers(attempt.headers, relay.id, grant, attempt.report, queued_s)
        await client.start(attempt.status, told)
        if attempt.ended:
            await client.send(opening, more=False)
            return
        relay.opened = time.perf_counter()
        self._figures.first_byte.observe(relay.opened - arrived, asked.urgency[0])
        if attempt.grant.first_token_s and attempt.events is not None:
            self._figures.accounts.began(attempt.grant.first_token_s, relay.opened - relay.sent)
        piece = opening
        while True:
            try:
                await self._copy(client, attempt, piece)
                return
            except UpstreamLost as lost:
                self._lost(relay, attempt.grant, lost)
                attempt, piece = await self._resume(asked, relay, attempt, lost)

    async def _copy(self, client: ClientConnection, attempt: Attempt, piece: bytes) -> None:
        """Give the client what comes, to the end. Raises Lost."""
        assert attempt.exchange is not None
        settings, grant, events = self._settings, attempt.grant, attempt.events
        silent_s = max(settings.idle_s, IDLE_STEPS * grant.step_s)
        # Where nobody could go on, a worker that says that it lives is waited for.
        elsewhere = grant.spare and isinstance(events, ResumableStream)
        tokens_s = silent_s if elsewhere else max(silent_s, settings.answer_s)
        stall = IdleTimeout(client, attempt.exchange, events, silent_s, tokens_s)
        try:
            while not attempt.ended:
                if piece:
                    await client.send(piece, more=True)
                piece = await attempt.next()
            await client.send(piece, more=False)
        finally:
            stall.close()

    async def _resume(
        self, asked: RoutedRequest, relay: ProxiedRequest, broken: Attempt, lost: UpstreamLost
    ) -> tuple[Attempt, bytes]:
        """Another worker's attempt that goes on where this one broke off. Raises `lost` if there is none."""
        events = broken.events
        resumption = events.resumption if isinstance(events, ResumableStream) else None
        if resumption is None:
            raise lost
        tried = relay.lost
        tried.append(broken.grant.decode)
        broken.close()
        body = with_resumption(asked.body, resumption)
        loop = asyncio.get_running_loop()
        while relay.resumes < RESUMES_LIMIT and relay.crashes <= LOSSES_LIMIT:
            relay.resumes += 1
            try:
                grant = await self._picker.pick(asked.ask(tuple(tried), 0.0, resumed=True))
            except BatonError:
                break
            tried.append(grant.decode)
            attempt = self._attempt(grant)
            slow_s = 0.0 if relay.resumes == RESUMES_LIMIT else first_byte_s(grant, 1)
            until = loop.time() + self._settings.answer_s
            try:
                opening = await self._try(
                    asked, relay, attempt, body, lambda: ResumableStream(resumption), slow_s, until
                )
            except UpstreamLost:
                continue
            if attempt.status != OK:
                attempt.close()
                continue
            relay.attempt = attempt
            if relay.trace is not None:
                relay.trace.resumed(grant.decode, len(resumption.tokens))
            self._figures.resumes.labels("resumed").inc()
            log.warning(
                "The answer to request %s goes on at %s after %d tokens, because %s",
                relay.id.decode(),
                grant.decode,
                len(resumption.tokens),
                lost,
            )
            return attempt, RESUMED_COMMENT + opening
        self._figures.resumes.labels("failed").inc()
        raise self._final(relay, lost)

    def _lost(self, relay: ProxiedRequest, grant: Grant, lost: UpstreamLost) -> None:
        """A worker was lost while it had the request."""
        crashed = lost.cause in CRASH_CAUSES
        relay.crashes += crashed
        self._picker.failed(grant, crashed=crashed)

    def _final(self, relay: ProxiedRequest, lost: UpstreamLost) -> BatonError:
        """What the client is told of a loss after which no other worker is asked."""
        if relay.crashes < LOSSES_LIMIT:
            return lost
        poison = PoisonRequest(relay.crashes)
        poison.__cause__ = lost
        return poison

    async def _fail(self, relay: ProxiedRequest, error: BatonError, scope: Scope, send: Send) -> None:
        """Tell the client what went wrong, as far as it can still be told."""
        client, tenant = relay.client, tenant_of(scope)
        if not client.started:
            relay.status = error.status
            await send_error(send, error_for(error, tenant), relay.id, close=not client.read)
            return
        cause = error.cause if isinstance(error, UpstreamLost) else "router"
        self._figures.cut.labels(cause).inc()
        log.warning("The answer to request %s was cut: %s (%s)", relay.id.decode(), error, cause)
        events = relay.attempt.events if relay.attempt else None
        await client.cut(events.error(error_for(error, tenant)) if events else b"")
