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
import random
import time

from baton_api import otlp
from baton_api.otlp import Attributes
from baton_api.spans import Spans, open_spans
from baton_api.trace_context import TraceContext
from baton_engine.metrics.pass_summary import Passes, PassNotes

SERVICE = "baton-worker"


class WorkerTracing:
    """Makes the spans of one process."""

    def __init__(self, spans: Spans, worker: str) -> None:
        self._spans = spans
        self._worker = worker

    def begin(self, name: str, parent: TraceContext | None, began: float) -> WorkerTrace | None:
        """A request came at `began`, by `time.monotonic`; None if its trace is not recorded."""
        if parent is None or not parent.sampled:
            return None
        return WorkerTrace(self._spans, self._worker, name, parent, began)

    async def close(self) -> None:
        """Send what was not sent yet."""
        await asyncio.to_thread(self._spans.close)


class WorkerTrace:
    """One request's."""

    def __init__(self, spans: Spans, worker: str, name: str, parent: TraceContext, began: float) -> None:
        self._spans = spans
        self._worker = worker
        self._name = name
        self._above = parent
        self._began = began
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._here = TraceContext(parent.trace, _identity(), True)
        self.notes: list[PassNotes] = []
        self.parent = self._here.parent.decode()
        """`traceparent` for whom this worker asks."""

    def noted(self) -> PassNotes:
        """For one request to the engine that belongs to this."""
        notes = PassNotes()
        self.notes.append(notes)
        return notes

    def end(self, attributes: Attributes, *, failed: bool = False) -> None:
        """It has ended, now."""
        start, end = self._ns(self._began), self._ns(time.monotonic())
        told = otlp.attributes({"baton.worker": self._worker, **attributes})
        above = otlp.place(self._above.trace, self._above.span)
        made = [otlp.span(above, self._here.span, self._name, otlp.SERVER, start, end, told, failed=failed)]
        for notes in self.notes:
            made += self._of_the_engine(notes)
        self._spans.take(b"".join(made))

    def _of_the_engine(self, notes: PassNotes) -> list[bytes]:
        above, made = self._here.span, []
        if notes.prompt.count:
            prefill = _identity()
            made = [
                self._child("engine.queue", notes.arrived, notes.prompt.began, b"", above, _identity()),
                self._passes("engine.prefill", notes.prompt, above, prefill),
                self._passes("engine.first_chunk", notes.first_chunk, prefill, _identity()),
            ]
        if notes.decode.count:
            made.append(self._passes("engine.decode", notes.decode, above, _identity()))
        return made

    def _passes(self, name: str, passes: Passes, above: int, own: int) -> bytes:
        told = otlp.attributes(
            {
                "baton.passes": passes.count,
                "baton.tokens": passes.tokens,
                "baton.forward_s": passes.forward_s,
            }
        )
        return self._child(name, passes.began, passes.ended, told, above, own)

    def _child(self, name: str, began: float, ended: float, told: bytes, above: int, own: int) -> bytes:
        start, end = self._ns(began), self._ns(ended)
        return otlp.span(otlp.place(self._here.trace, above), own, name, otlp.INTERNAL, start, end, told)

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def _identity() -> int:
    """Of one span; never 0, which is none."""
    return random.getrandbits(64) or 1


def tracing_of(endpoint: str, worker: str) -> WorkerTracing | None:
    """What makes spans and sends them to `endpoint`; None if it is empty. Raises SetupError."""
    return WorkerTracing(open_spans(SERVICE, endpoint), worker) if endpoint else None
