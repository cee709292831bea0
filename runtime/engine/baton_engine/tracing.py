"""
A worker's own spans, beneath the router's, for whoever turns them on: from the request to its forward passes.

    decode worker, or worker   the whole request, as this worker saw it
      engine.queue             its prompt waits to be computed, here
      engine.prefill           its prompt's passes, here, as one span: how many, and how long the model had it
        engine.first_chunk     the first of them: with its launch the device begins
      engine.decode            one pass for each token, as one span
    prefill worker             beneath that one: a prompt that it asked for, with the same spans of the engine

Spans are made when a request has ended, from what the engine's thread noted, and only of requests that came
with a `traceparent` whose trace is recorded: a worker begins no trace.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from baton_api import __version__
from baton_api.spans import Attributes, beneath, open_provider
from baton_api.trace_context import TraceContext
from baton_engine.pass_notes import Passes, PassNotes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

SERVICE = "baton-worker"


class WorkerTracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider, worker: str) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("baton.worker", __version__)
        self._worker = worker

    def begin(self, name: str, parent: TraceContext | None, began: float) -> WorkerTrace | None:
        """A request came at `began`, by `time.monotonic`; None if its trace is not recorded."""
        if parent is None or not parent.sampled:
            return None
        return WorkerTrace(self._tracer, self._worker, name, parent, began)

    async def close(self) -> None:
        """Send what was not sent yet."""
        await asyncio.to_thread(self._provider.shutdown)


class WorkerTrace:
    """One request's."""

    def __init__(self, tracer: Tracer, worker: str, name: str, parent: TraceContext, began: float) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._kinds = trace.SpanKind
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._span: Any = tracer.start_span(
            name,
            beneath(parent),
            self._kinds.SERVER,
            {"baton.worker": worker},
            start_time=self._ns(began),
        )
        self._context = trace.set_span_in_context(self._span)
        self.notes: list[PassNotes] = []
        made = self._span.get_span_context()
        self.parent = TraceContext(made.trace_id, made.span_id, True).parent.decode()
        """`traceparent` for whom this worker asks."""

    def noted(self) -> PassNotes:
        """For one request to the engine that belongs to this."""
        notes = PassNotes()
        self.notes.append(notes)
        return notes

    def end(self, attributes: Attributes, *, failed: bool = False) -> None:
        """It has ended, now."""
        self._span.set_attributes(attributes)
        if failed:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)
        for notes in self.notes:
            self._of_the_engine(notes)
        self._span.end(self._ns(time.monotonic()))

    def _of_the_engine(self, notes: PassNotes) -> None:
        from opentelemetry import trace

        if notes.prompt.count:
            self._child("engine.queue", notes.arrived, notes.prompt.began, {}, self._context)
            prefill = self._of("engine.prefill", notes.prompt, self._context)
            self._of("engine.first_chunk", notes.first_chunk, trace.set_span_in_context(prefill))
        if notes.decode.count:
            self._of("engine.decode", notes.decode, self._context)

    def _of(self, name: str, passes: Passes, context: Any) -> Any:
        told: Attributes = {
            "baton.passes": passes.count,
            "baton.tokens": passes.tokens,
            "baton.forward_s": passes.forward_s,
        }
        return self._child(name, passes.began, passes.ended, told, context)

    def _child(self, name: str, began: float, ended: float, told: Attributes, context: Any) -> Any:
        span = self._tracer.start_span(name, context, self._kinds.INTERNAL, told, start_time=self._ns(began))
        span.end(self._ns(max(began, ended)))
        return span

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def tracing_of(endpoint: str, worker: str) -> WorkerTracing | None:
    """What makes spans and sends them to `endpoint`; None if it is empty. Raises SetupError."""
    return WorkerTracing(open_provider(SERVICE, endpoint), worker) if endpoint else None
