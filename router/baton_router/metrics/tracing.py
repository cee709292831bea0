"""
Spans of requests for tracing: where the time of one request went, across services.

    route                    the whole request, from its arrival to the last byte
      queue                  waiting, in the router and at the worker that computes the prompt
      prefill, kv_transfer   the prompt's computation, and the move of its blocks
      decode                 token generation
      continuation           generation at another worker, after the first one was lost

The router makes all spans when the client has its whole answer, and writes them once, as the bytes that
`baton_api.otlp` sends (ADR 24). A request that is not recorded has
only the header line for its worker. Names and numbers only, never text.

The lengths of phases are the worker's, by its clock. They are placed between the router's times: the
computation follows the wait, and the transfer ends with the first token.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton_api import otlp, trace_context
from baton_api.otlp import Attributes
from baton_api.reports import PromptReport
from baton_api.spans import Spans, open_spans
from baton_api.trace_context import TraceContext
from baton_http.upstream import Headers
from baton_router.proxy.attempt import Attempt, ProxiedRequest
from baton_router.settings import RouterSettings

SERVICE = "baton-router"
OK = 200
FAILED = 500

_LOW = 2**64 - 1
"""The part of a trace's number that decides whether it is recorded, as in OpenTelemetry's own sampler."""

OUTCOME = "url.path", "http.response.status_code", "baton.resumes"
REQUEST = "baton.tenant", "baton.class"
GRANTED = "baton.worker.decode", "baton.worker.prefill"
PROMPT = "baton.tokens.prompt", "baton.tokens.cached", "baton.worker"
"""Attributes that come together."""

MODEL = "gen_ai.request.model"
MODEL_LIMIT = 256
"""Characters of a model's name in a span."""


def open_tracing(settings: RouterSettings) -> Tracing | None:
    """Create the tracer that the settings configure; None without an endpoint. Raises SetupError."""
    if not settings.tracing_endpoint:
        return None
    return Tracing(open_spans(SERVICE, settings.tracing_endpoint), settings.tracing_ratio)


class Tracing:
    """Makes the spans of one process: of all traces that others began and record, and a share of its own."""

    def __init__(self, spans: Spans, ratio: float) -> None:
        self._spans = spans
        self._bound = round(ratio * 2**64)

    def begin(self, given: Headers, path: str) -> RequestTrace:
        """A request has arrived, with these headers."""
        parent = trace_context.read(given)
        if parent is None:
            trace = random.getrandbits(128) or 1  # a name and no secret: no call of the system
            recorded = trace & _LOW < self._bound
        else:
            trace, recorded = parent.trace, parent.sampled
        here = TraceContext(trace, random.getrandbits(64) or 1, recorded, parent.state if parent else b"")
        return RequestTrace(self._spans.take, here, parent.span if parent else 0, path)

    async def close(self) -> None:
        """Send what was not sent yet."""
        await asyncio.to_thread(self._spans.close)


class RequestTrace:
    """One request's."""

    __slots__ = (
        "_began",
        "_epoch_ns",
        "_events",
        "_here",
        "_parent",
        "_path",
        "_place",
        "_resumed",
        "_take",
        "recorded",
    )

    def __init__(self, take: Callable[[bytes], None], here: TraceContext, parent: int, path: str) -> None:
        self._take = take
        self._here = here
        self._parent = parent
        self.recorded = here.sampled
        """Whether anything of it is kept; its trace is passed on in any case."""
        if self.recorded:
            self._path = path
            self._place = otlp.place(here.trace, here.span)
            self._began = time.perf_counter()
            self._epoch_ns = time.time_ns() - int(self._began * 1e9)
            self._events = b""
            self._resumed: list[tuple[float, Attributes]] = []

    @property
    def lines(self) -> bytes:
        """The headers for the worker, whose parent the router is."""
        return self._here.lines

    def note(self, name: str, **attributes: str | int) -> None:
        """Something that happened on the way."""
        if self.recorded:
            self._events += otlp.event(name, self._ns(time.perf_counter()), attributes)

    def resumed(self, worker: str, tokens: int) -> None:
        """Record that another worker continues the answer after `tokens`."""
        if self.recorded:
            attributes: Attributes = {"baton.worker.decode": worker, "baton.tokens.before": tokens}
            self._resumed.append((time.perf_counter(), attributes))

    def end(self, proxied: ProxiedRequest) -> None:
        """The request has ended, one way or another."""
        if not self.recorded:
            return
        now = time.perf_counter()
        attempt = proxied.attempt
        failed = proxied.status >= FAILED or (attempt is not None and not attempt.ended)
        here = self._here
        above = otlp.place(here.trace, self._parent)
        attributes = b"".join((*_attributes(proxied, self._path), self._events))
        start, end = self._ns(self._began), self._ns(now)
        route = otlp.span(above, here.span, "route", otlp.SERVER, start, end, attributes, failed=failed)
        self._take(b"".join((route, *self._children(proxied, now))))

    def _children(self, proxied: ProxiedRequest, now: float) -> list[bytes]:
        attempt = proxied.attempt
        if not proxied.granted:
            return []
        if attempt is None or attempt.exchange is None:
            return [self._span("queue", self._began, proxied.granted)]
        ends = [at for at, _ in self._resumed] + [now]
        first_byte = proxied.opened or (now if proxied.status == OK else None)
        times = RequestTimes(self._began, proxied.sent, first_byte, ends[0], streams=bool(proxied.opened))
        no_tokens = not proxied.opened and not attempt.tokens  # vectors, or a refusal: no token comes
        phases = request_phases(times, attempt.report)
        spans = [self._phase(one, attempt, now) for one in phases if one.name != "decode" or not no_tokens]
        for (at, attributes), until in zip(self._resumed, ends[1:], strict=True):
            spans.append(self._span("continuation", at, until, otlp.attributes(attributes)))
        return spans

    def _phase(self, one: RequestPhase, attempt: Attempt, now: float) -> bytes:
        name, attributes = one.name, b""
        report = attempt.report
        if name == "prefill" and report is not None:
            worker = attempt.grant.prefill if report.remote else attempt.grant.decode
            attributes = otlp.cached_attributes(PROMPT, report.tokens, report.cached, worker)
            attributes += otlp.attribute("baton.queue_s", report.queue_s)
        elif name == "transfer" and report is not None:
            name, attributes = "kv_transfer", otlp.cached_attributes(("baton.tokens.held",), report.held)
        elif name == "decode":
            attributes = otlp.cached_attributes(("baton.tokens.answer",), attempt.tokens)
        return self._span(name, one.start, now if one.end is None else one.end, attributes)

    def _span(self, name: str, start: float, end: float, attributes: bytes = b"") -> bytes:
        return otlp.span(
            self._place,
            random.getrandbits(64) or 1,
            name,
            otlp.INTERNAL,
            self._ns(start),
            self._ns(end),
            attributes,
        )

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def _attributes(proxied: ProxiedRequest, path: str) -> list[bytes]:
    """Return the attributes of the whole proxied request."""
    attributes = [
        otlp.attribute("baton.request_id", proxied.id.decode()),
        otlp.cached_attributes(OUTCOME, path, proxied.status, proxied.resumes),
    ]
    if proxied.request is not None:
        request = proxied.request
        model = (request.model or "")[:MODEL_LIMIT]
        attributes.append(otlp.attribute(MODEL, model))  # a client's word, which no cache may keep
        attributes.append(otlp.cached_attributes(REQUEST, request.tenant.name, request.urgency[0]))
    if proxied.attempt is not None:
        grant = proxied.attempt.grant
        attributes += [
            otlp.cached_attributes(GRANTED, grant.decode, grant.prefill),
            otlp.attribute("baton.decision", grant.summary.decode()),
            otlp.attribute("baton.costs", grant.costs),
        ]
    return attributes


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When the router saw a request move, by its clock, in seconds; None for what has not been."""

    arrived: float
    decided: float
    first_byte: float | None = None
    ended: float | None = None
    streams: bool = True
    """Whether the first byte is the first token's, and not that of a whole answer."""


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """One part of the way, by the router's clock."""

    name: str
    start: float
    end: float | None
    """None while the phase lasts."""


def request_phases(times: RequestTimes, report: PromptReport | None) -> tuple[RequestPhase, ...]:
    """Return the phases in order; none ends before it starts, and none starts before the request arrived."""
    if times.first_byte is None:
        queue = RequestPhase("queue", times.arrived, times.decided)
        return queue, RequestPhase("prefill", times.decided, times.ended)
    latest = times.first_byte
    start = times.decided if report is None else min(times.decided + report.queue_s, latest)
    computed = latest if report is None else min(start + report.compute_s, latest)
    begins = latest if times.streams else computed
    phases = [RequestPhase("queue", times.arrived, start), RequestPhase("prefill", start, computed)]
    if report is not None and report.remote:
        phases.append(RequestPhase("transfer", max(start, begins - report.transfer_s), begins))
    return *phases, RequestPhase("decode", begins, times.ended)


def request_line(path: str, proxied: ProxiedRequest, now: float) -> str:
    parts = [f"{path} {proxied.status}", f"request={proxied.id.decode()}"]
    request, attempt = proxied.request, proxied.attempt
    if request is not None:
        parts += [
            f"tenant={request.tenant.name}" if request.tenant.name else "",
            f"class={request.urgency[0]}",
        ]
    if attempt is not None:
        grant, report = attempt.grant, attempt.report
        parts += [f"decode={grant.decode}", f"prefill={grant.prefill}" if grant.prefill else ""]
        if report is not None:
            parts += [f"prompt={report.tokens}", f"cached={report.cached}"]
        parts += [f"completion={attempt.tokens}", f"resumes={proxied.resumes}" if proxied.resumes else ""]
    if proxied.granted:
        parts.append(f"queue={proxied.granted - proxied.arrived:.3f}s")
    if proxied.opened:
        parts.append(f"ttft={proxied.opened - proxied.arrived:.3f}s")
    if proxied.arrived:
        parts.append(f"total={now - proxied.arrived:.3f}s")
    return " ".join(filter(None, parts))
