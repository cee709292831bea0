"""
Spans of requests for tracing: where the time of one request went, across services.

    route                    the whole request, from its arrival to the last byte
      queue                  waiting, in the router and at the worker that computes the prompt
      prefill, kv_transfer   the prompt's computation, and the move of its blocks
      decode                 token generation
      continuation           generation at another worker, after the first one was lost

The router makes all spans when the client has its whole answer (`finished_request`), and writes them once, as
the bytes that `baton_api.otlp` sends (ADR 24).
A request that is not recorded has only the header line for its worker. Names and numbers only, never text.

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
from baton_api.otlp import Attributes, Spans, open_spans
from baton_api.prompt_report import PromptReport
from baton_api.trace_context import TraceContext
from baton_http.upstream import Headers
from baton_router.settings import RouterSettings

SERVICE = "baton-router"

_LOW = 2**64 - 1
"""The part of a trace's number that decides whether it is recorded, as in OpenTelemetry's own sampler."""


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

    def begin(self, given: Headers) -> RequestTrace:
        """Return the trace of a request that has arrived with these headers."""
        parent = trace_context.read(given)
        if parent is None:
            trace = random.getrandbits(128) or 1  # a name and no secret: no call of the system
            recorded = trace & _LOW < self._bound
        else:
            trace, recorded = parent.trace, parent.sampled
        here = TraceContext(trace, random.getrandbits(64) or 1, recorded, parent.state if parent else b"")
        return RequestTrace(self._spans.take, here, parent.span if parent else 0)

    async def close(self) -> None:
        """Send the remaining spans."""
        await asyncio.to_thread(self._spans.close)


class RequestTrace:
    """The trace of one request: its context for workers, and what its spans will say."""

    __slots__ = (
        "_epoch_ns",
        "began",
        "events",
        "here",
        "parent",
        "place",
        "recorded",
        "resumptions",
        "write",
    )

    def __init__(self, write: Callable[[bytes], None], here: TraceContext, parent: int) -> None:
        self.write = write
        self.here = here
        self.parent = parent
        self.recorded = here.sampled
        """Whether its spans are written. Workers get its context in any case."""
        if self.recorded:
            self.place = otlp.place(here.trace, here.span)
            self.began = time.perf_counter()
            self._epoch_ns = time.time_ns() - int(self.began * 1e9)
            self.events = b""
            self.resumptions: list[tuple[float, Attributes]] = []

    @property
    def lines(self) -> bytes:
        """The header lines for the worker, whose spans are children of the router's."""
        return self.here.lines

    def note(self, name: str, **attributes: str | int) -> None:
        """Add an event to the span of the request."""
        if self.recorded:
            self.events += otlp.event(name, self.ns(time.perf_counter()), attributes)

    def resumed(self, worker: str, tokens: int) -> None:
        """Record that another worker continues the answer after `tokens`."""
        if self.recorded:
            attributes: Attributes = {"baton.worker.decode": worker, "baton.tokens.before": tokens}
            self.resumptions.append((time.perf_counter(), attributes))

    def span(self, name: str, start: float, end: float, attributes: bytes = b"") -> bytes:
        return otlp.span(
            self.place,
            random.getrandbits(64) or 1,
            name,
            otlp.INTERNAL,
            self.ns(start),
            self.ns(end),
            attributes,
        )

    def ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times of a request by the router's clock, in seconds; None for what has not happened."""

    arrived: float
    decided: float
    first_byte: float | None = None
    ended: float | None = None
    streams: bool = True
    """Whether the first byte is the first token's, and not that of a whole answer."""


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A phase of a request, by the router's clock."""

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
