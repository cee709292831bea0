"""How a request that has ended is reported: its spans, and its line in the log."""

from __future__ import annotations

import time

from baton_api import otlp
from baton_router.proxy.attempt import Attempt, ProxiedRequest
from baton_router.proxy.tracing import RequestPhase, RequestTimes, RequestTrace, request_phases

OK = 200
FAILED = 500

OUTCOME = "url.path", "http.response.status_code", "baton.resumes"
REQUEST = "baton.tenant", "baton.class"
GRANTED = "baton.worker.decode", "baton.worker.prefill"
PROMPT = "baton.tokens.prompt", "baton.tokens.cached", "baton.worker"
"""Attributes that come together."""

MODEL = "gen_ai.request.model"
MODEL_LIMIT = 256
"""Characters of a model's name in a span."""


def write_spans(trace: RequestTrace, proxied: ProxiedRequest) -> None:
    """Write the spans of a request that has ended, one way or another."""
    if not trace.recorded:
        return
    now = time.perf_counter()
    attempt = proxied.attempt
    failed = proxied.status >= FAILED or (attempt is not None and not attempt.ended)
    here = trace.here
    above = otlp.place(here.trace, trace.parent)
    attributes = b"".join((*_attributes(proxied, trace.path), trace.events))
    start, end = trace.ns(trace.began), trace.ns(now)
    route = otlp.span(above, here.span, "route", otlp.SERVER, start, end, attributes, failed=failed)
    trace.write(b"".join((route, *_children(trace, proxied, now))))


def _children(trace: RequestTrace, proxied: ProxiedRequest, now: float) -> list[bytes]:
    attempt = proxied.attempt
    if not proxied.granted:
        return []
    if attempt is None or attempt.exchange is None:
        return [trace.span("queue", trace.began, proxied.granted)]
    ends = [at for at, _ in trace.resumptions] + [now]
    first_byte = proxied.opened or (now if proxied.status == OK else None)
    times = RequestTimes(trace.began, proxied.sent, first_byte, ends[0], streams=bool(proxied.opened))
    no_tokens = not proxied.opened and not attempt.tokens  # vectors, or a refusal: no token comes
    phases = request_phases(times, attempt.report)
    spans = [_phase(trace, one, attempt, now) for one in phases if one.name != "decode" or not no_tokens]
    for (at, attributes), until in zip(trace.resumptions, ends[1:], strict=True):
        spans.append(trace.span("continuation", at, until, otlp.attributes(attributes)))
    return spans


def _phase(trace: RequestTrace, one: RequestPhase, attempt: Attempt, now: float) -> bytes:
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
        attributes.append(otlp.cached_attributes(REQUEST, request.tenant.name, request.priority_class))
    if proxied.attempt is not None:
        grant = proxied.attempt.grant
        attributes += [
            otlp.cached_attributes(GRANTED, grant.decode, grant.prefill),
            otlp.attribute("baton.decision", grant.summary.decode()),
            otlp.attribute("baton.costs", grant.costs),
        ]
    return attributes


def request_line(path: str, proxied: ProxiedRequest, now: float) -> str:
    parts = [f"{path} {proxied.status}", f"request={proxied.id.decode()}"]
    request, attempt = proxied.request, proxied.attempt
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
        parts += [f"completion={attempt.tokens}", f"resumes={proxied.resumes}" if proxied.resumes else ""]
    if proxied.granted:
        parts.append(f"queue={proxied.granted - proxied.arrived:.3f}s")
    if proxied.opened:
        parts.append(f"ttft={proxied.opened - proxied.arrived:.3f}s")
    if proxied.arrived:
        parts.append(f"total={now - proxied.arrived:.3f}s")
    return " ".join(filter(None, parts))
