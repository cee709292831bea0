"""
Spans of one worker's requests, as children of the router's spans, if tracing is on.

    decode worker, or worker   the whole request
      engine.queue             the prompt waits until this worker computes it
      engine.prefill           the prompt's forward passes, as one span: their number and seconds
        engine.first_chunk     the first of them
      engine.decode            one forward pass for each token, as one span
    prefill worker             child of a decode worker's span, with the same engine spans

Spans are created when a request has ended, from the `StepSummary` that the engine's thread filled. Only
requests with a `traceparent` whose trace is recorded get spans: a worker begins no trace.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from baton_api import otlp
from baton_api.otlp import Attributes, Spans, open_spans
from baton_api.trace_context import TraceContext

SERVICE = "baton-worker"


@dataclass(slots=True)
class StepSpan:
    """Consecutive forward passes of one request. Times are by the engine's clock."""

    count: int = 0
    began: float = 0.0
    ended: float = 0.0
    forward_s: float = 0.0
    """Seconds of forward passes, shared with other requests."""
    tokens: int = 0
    """Tokens of this request that were computed."""

    def add(self, began: float, forward_s: float, tokens: int) -> None:
        self.began = self.began or began
        self.ended = began + forward_s
        self.forward_s += forward_s
        self.count += 1
        self.tokens += tokens


@dataclass(slots=True)
class StepSummary:
    """The forward passes of one request: written by the engine's thread, read once the request has ended."""

    arrived: float = 0.0
    first_chunk: StepSpan = field(default_factory=StepSpan)
    prompt: StepSpan = field(default_factory=StepSpan)
    """All chunks of the prompt, the first one included."""
    decode: StepSpan = field(default_factory=StepSpan)
    """One token each."""

    def add(self, ended: float, forward_s: float, tokens: int, *, is_decode: bool) -> None:
        """Add a forward pass that computed `tokens` of the request."""
        began = ended - forward_s
        if is_decode:
            self.decode.add(began, forward_s, tokens)
            return
        if not self.prompt.count:
            self.first_chunk.add(began, forward_s, tokens)
        self.prompt.add(began, forward_s, tokens)


class WorkerTracing:
    """Creates the spans of one process."""

    def __init__(self, spans: Spans, worker: str) -> None:
        self._spans = spans
        self._worker = worker

    def begin(self, name: str, parent: TraceContext | None, began: float) -> WorkerTrace | None:
        """Begin the span of a request that arrived at `began` (`time.monotonic`); None if not recorded."""
        if parent is None or not parent.sampled:
            return None
        return WorkerTrace(self._spans, self._worker, name, parent, began)

    async def close(self) -> None:
        """Send the spans that are left."""
        await asyncio.to_thread(self._spans.close)


class WorkerTrace:
    """The spans of one request."""

    def __init__(self, spans: Spans, worker: str, name: str, parent: TraceContext, began: float) -> None:
        self._spans = spans
        self._worker = worker
        self._name = name
        self._above = parent
        self._began = began
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._here = TraceContext(parent.trace, _span_id(), True)
        self._summaries: list[StepSummary] = []
        self.parent = self._here.parent.decode()
        """`traceparent` for requests to other workers."""

    def step_summary(self) -> StepSummary:
        """A new summary, for one engine request of this trace."""
        summary = StepSummary()
        self._summaries.append(summary)
        return summary

    def end(self, attributes: Attributes, *, failed: bool = False) -> None:
        """End the request's span now, and send all its spans."""
        start, end = self._ns(self._began), self._ns(time.monotonic())
        span_attributes = otlp.attributes({"baton.worker": self._worker, **attributes})
        above = otlp.place(self._above.trace, self._above.span)
        spans = [
            otlp.span(
                above, self._here.span, self._name, otlp.SERVER, start, end, span_attributes, failed=failed
            )
        ]
        for summary in self._summaries:
            spans += self._engine_spans(summary)
        self._spans.take(b"".join(spans))

    def _engine_spans(self, summary: StepSummary) -> list[bytes]:
        above = self._here.span
        spans: list[bytes] = []
        if summary.prompt.count:
            prefill = _span_id()
            spans = [
                self._child("engine.queue", summary.arrived, summary.prompt.began, b"", above, _span_id()),
                self._steps("engine.prefill", summary.prompt, above, prefill),
                self._steps("engine.first_chunk", summary.first_chunk, prefill, _span_id()),
            ]
        if summary.decode.count:
            spans.append(self._steps("engine.decode", summary.decode, above, _span_id()))
        return spans

    def _steps(self, name: str, steps: StepSpan, above: int, span: int) -> bytes:
        attributes = otlp.attributes(
            {
                "baton.passes": steps.count,
                "baton.tokens": steps.tokens,
                "baton.forward_s": steps.forward_s,
            }
        )
        return self._child(name, steps.began, steps.ended, attributes, above, span)

    def _child(
        self, name: str, began: float, ended: float, attributes: bytes, above: int, span: int
    ) -> bytes:
        start, end = self._ns(began), self._ns(ended)
        return otlp.span(
            otlp.place(self._here.trace, above), span, name, otlp.INTERNAL, start, end, attributes
        )

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def _span_id() -> int:
    """A random id; never 0, which stands for no span."""
    return random.getrandbits(64) or 1


def tracing_of(endpoint: str, worker: str) -> WorkerTracing | None:
    """Tracing to `endpoint`; None if it is empty. Raises SetupError."""
    return WorkerTracing(open_spans(SERVICE, endpoint), worker) if endpoint else None
