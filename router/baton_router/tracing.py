"""
Spans of requests, for whoever turns them on: where the time of one request went, across services.

    route                    the whole request, from its arrival to the last byte
      queue                  it waits in the router
      prefill, kv_transfer   its prompt is computed, and moved
      decode                 tokens come
      continuation           tokens come from another worker, since that one was lost

All are made here, when the request has ended: workers say with each answer how long its prompt waited, was
computed and was moved (`baton_api.reports`). Those lengths are measured where it happened, by one clock
each; where they lie between the router's own times is reckoned: the computation follows the wait, and the
transfer, which goes on beside it, ends with the first token: `docs/adr/0024-the-router-makes-the-spans.md`.

Names and figures only, never text. The library is loaded where spans are wanted, and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from baton_api import __version__, trace_context
from baton_api.spans import Attributes, beneath, open_provider
from baton_api.trace_context import TraceContext
from baton_router.asked import Asked
from baton_router.attempt import Attempt
from baton_router.settings import RouterSettings
from baton_router.upstream import Headers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

SERVICE = "baton-router"
FAILED = 500


class Traced(Protocol):
    """What is known of a request that has ended; times are of `time.perf_counter`, 0 if there was none."""

    id: bytes
    asked: Asked | None
    attempt: Attempt | None
    status: int
    resumes: int
    granted: float
    sent: float
    opened: float


def tracing_of(settings: RouterSettings) -> Tracing | None:
    """What makes spans, as the settings want; None if they want none. Raises SetupError."""
    if not settings.tracing_endpoint:
        return None
    provider = open_provider(SERVICE, settings.tracing_endpoint, settings.tracing_ratio)
    return Tracing(provider)


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("baton.router", __version__)

    def begin(self, given: Headers, path: str) -> RequestTrace:
        """A request has arrived, with these headers."""
        return RequestTrace(self._tracer, trace_context.read(given), path)

    async def close(self) -> None:
        """Send what was not sent yet."""
        await asyncio.to_thread(self._provider.shutdown)


class RequestTrace:
    """One request's."""

    def __init__(self, tracer: Tracer, parent: TraceContext | None, path: str) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._began = time.perf_counter()
        self._epoch_ns = time.time_ns() - int(self._began * 1e9)
        self._kinds = trace.SpanKind
        self._resumed: list[tuple[float, Attributes]] = []
        context = beneath(parent)
        self._route: Any = tracer.start_span(
            "route", context, trace.SpanKind.SERVER, {"url.path": path}, start_time=self._ns(self._began)
        )
        self.recorded: bool = self._route.is_recording()
        """Whether anything of it is kept; its trace is passed on in any case."""
        made = self._route.get_span_context()
        self._context = trace.set_span_in_context(self._route)
        state = parent.state if parent else b""
        self.lines = TraceContext(made.trace_id, made.span_id, made.trace_flags.sampled, state).lines
        """The headers for the worker, whose parent the router is."""

    def note(self, name: str, **attributes: str | int) -> None:
        """Something that happened on the way."""
        self._route.add_event(name, attributes, self._ns(time.perf_counter()))

    def resumed(self, worker: str, tokens: int) -> None:
        """Another worker goes on after so many tokens."""
        about: Attributes = {"baton.worker.decode": worker, "baton.tokens.before": tokens}
        self._resumed.append((time.perf_counter(), about))

    def end(self, request: Traced) -> None:
        """The request has ended, one way or another."""
        now = time.perf_counter()
        if self.recorded:
            self._route.set_attributes(_about(request))
            if request.status >= FAILED or (request.attempt is not None and not request.attempt.ended):
                from opentelemetry.trace import StatusCode

                self._route.set_status(StatusCode.ERROR)
            self._children(request, now)
        self._route.end(self._ns(now))

    def _children(self, request: Traced, now: float) -> None:
        if not request.granted:
            return
        self._span("queue", self._began, request.granted, {})
        attempt = request.attempt
        if attempt is None or attempt.exchange is None:
            return
        report = attempt.report
        begins = request.opened or request.sent
        if report is not None:
            told: Attributes = {"baton.tokens.prompt": report.tokens, "baton.tokens.cached": report.cached}
            latest = request.opened or now
            start = min(request.sent + report.queue_s, latest)
            computed = min(start + report.compute_s, latest)
            who = attempt.grant.prefill if report.remote else attempt.grant.decode
            self._span(
                "prefill", start, computed, {**told, "baton.worker": who, "baton.queue_s": report.queue_s}
            )
            begins = request.opened or computed
            if report.remote:
                moved: Attributes = {"baton.tokens.held": report.held}
                self._span("kv_transfer", max(request.sent, begins - report.transfer_s), begins, moved)
        ends = [at for at, _ in self._resumed] + [now]
        self._span("decode", min(begins, ends[0]), ends[0], {"baton.tokens.answer": attempt.tokens})
        for (at, about), until in zip(self._resumed, ends[1:], strict=True):
            self._span("continuation", at, until, about)

    def _span(self, name: str, start: float, end: float, attributes: Attributes) -> None:
        span = self._tracer.start_span(
            name, self._context, self._kinds.INTERNAL, attributes, start_time=self._ns(start)
        )
        span.end(self._ns(max(start, end)))

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def _about(request: Traced) -> Attributes:
    """What is said of the whole request."""
    about: Attributes = {
        "baton.request_id": request.id.decode(),
        "http.response.status_code": request.status,
        "baton.resumes": request.resumes,
    }
    if request.asked is not None:
        about["gen_ai.request.model"] = request.asked.model or ""
        about["baton.tenant"] = request.asked.tenant.name
        about["baton.class"] = request.asked.urgency[0]
    if request.attempt is not None:
        grant = request.attempt.grant
        about["baton.worker.decode"] = grant.decode
        about["baton.worker.prefill"] = grant.prefill
        about["baton.decision"] = grant.summary.decode()
        about["baton.costs"] = grant.costs
    return about
