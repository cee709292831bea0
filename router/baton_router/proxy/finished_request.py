"""How a request that has ended is reported: in the metrics, in the log, and as spans."""

from __future__ import annotations

import time

from baton_api import otlp
from baton_router.engines.engine_request import FAILED, OK, EngineRequest
from baton_router.metrics.registry import RequestCounters
from baton_router.proxy.request_context import RequestContext
from baton_router.proxy.tracing import RequestPhase, RequestTimes, RequestTrace, request_phases

CLIENT_CLOSED_REQUEST = 499
"""Status of requests whose client disconnected before the response."""

OUTCOME = "url.path", "http.response.status_code", "baton.resumes"
REQUEST = "baton.tenant", "baton.class"
GRANTED = "baton.worker.decode", "baton.worker.prefill"
PROMPT = "baton.tokens.prompt", "baton.tokens.cached", "baton.worker"
"""Attributes that come together."""

MODEL = "gen_ai.request.model"
MODEL_LIMIT = 256
"""Characters of a model's name in a span."""


def count(context: RequestContext, counters: RequestCounters, now: float) -> None:
    """Count the request; `now` is of `time.perf_counter`."""
    request, attempt = context.request, context.attempt
    if request is None:
        counters.refused(context.path, context.status)
        return
    priority_class = request.priority_class
    counters.ended(context.path, request.model, priority_class, context.status, granted=attempt is not None)
    if attempt is None or context.status not in (OK, CLIENT_CLOSED_REQUEST):
        return
    prompt, generated = attempt.charged
    if not prompt and attempt.report is not None:
        prompt = attempt.report.tokens  # of an answer that was resumed
    counters.used(request.tenant.name, prompt, attempt.report, max(generated, attempt.tokens))
    if context.status == OK and attempt.ended:
        counters.served(now - context.arrived, priority_class)
        if context.opened and not context.resumes:
            counters.streamed(attempt.tokens, now - context.opened, priority_class)


def log_line(context: RequestContext, now: float) -> str:
    """The line of `--log-requests`: names and numbers, never text."""
    parts = [f"{context.path} {context.status}", f"request={context.id.decode()}"]
    request, attempt = context.request, context.attempt
    if request is not None:
        parts += [
            f"tenant={request.tenant.name}" if request.tenant.name else "",
            f"class={request.priority_class}",
        ]
    if attempt is not None:
        grant, report = attempt.grant, attempt.report
        parts += [f"decode={grant.decode}", f"prefill={grant.prefill}" if grant.prefill else ""]
        if report is not None:
            parts += [f"prompt={report.tokens}", f"cached={report.cached}"]
        parts += [f"completion={attempt.tokens}", f"resumes={context.resumes}" if context.resumes else ""]
    if context.granted:
        parts.append(f"queue={context.granted - context.arrived:.3f}s")
    if context.opened:
        parts.append(f"ttft={context.opened - context.arrived:.3f}s")
    if context.arrived:
        parts.append(f"total={now - context.arrived:.3f}s")
    return " ".join(filter(None, parts))


def write_spans(context: RequestContext, trace: RequestTrace) -> None:
    """Write the spans of a request that has ended, one way or another."""
    if not trace.recorded:
        return
    now = time.perf_counter()
    attempt = context.attempt
    failed = context.status >= FAILED or (attempt is not None and not attempt.ended)
    here = trace.here
    above = otlp.place(here.trace, trace.parent)
    attributes = b"".join((*_attributes(context), trace.events))
    start, end = trace.ns(trace.began), trace.ns(now)
    route = otlp.span(above, here.span, "route", otlp.SERVER, start, end, attributes, failed=failed)
    trace.write(b"".join((route, *_children(trace, context, now))))


def _children(trace: RequestTrace, context: RequestContext, now: float) -> list[bytes]:
    attempt = context.attempt
    if not context.granted:
        return []
    if attempt is None or attempt.exchange is None:
        return [trace.span("queue", trace.began, context.granted)]
    ends = [at for at, _ in trace.resumptions] + [now]
    first_byte = context.opened or (now if context.status == OK else None)
    times = RequestTimes(trace.began, context.sent, first_byte, ends[0], streams=bool(context.opened))
    no_tokens = not context.opened and not attempt.tokens  # vectors, or a refusal: no token comes
    phases = request_phases(times, attempt.report)
    spans = [
        _phase(trace, phase, attempt, now) for phase in phases if phase.name != "decode" or not no_tokens
    ]
    for (at, attributes), until in zip(trace.resumptions, ends[1:], strict=True):
        spans.append(trace.span("continuation", at, until, otlp.attributes(attributes)))
    return spans


def _phase(trace: RequestTrace, one: RequestPhase, attempt: EngineRequest, now: float) -> bytes:
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
    return trace.span(name, one.start, now if one.end is None else one.end, attributes)


def _attributes(context: RequestContext) -> list[bytes]:
    """Return the attributes of the whole request."""
    attributes = [
        otlp.attribute("baton.request_id", context.id.decode()),
        otlp.cached_attributes(OUTCOME, context.path, context.status, context.resumes),
    ]
    if context.request is not None:
        request = context.request
        model = (request.model or "")[:MODEL_LIMIT]
        attributes.append(otlp.attribute(MODEL, model))  # a client's word, which no cache may keep
        attributes.append(otlp.cached_attributes(REQUEST, request.tenant.name, request.priority_class))
    if context.attempt is not None:
        grant = context.attempt.grant
        attributes += [
            otlp.cached_attributes(GRANTED, grant.decode, grant.prefill),
            otlp.attribute("baton.decision", grant.summary.decode()),
            otlp.attribute("baton.costs", grant.costs),
        ]
    return attributes
