"""Logs and spans of a service; neither contains a prompt."""

from __future__ import annotations

import pytest

from tests.observing.telemetry import ANSWERED, LINE, PARENT, SECRET, STREAMED, TRACE, Telemetry
from tests.router.collector import Span

pytestmark = pytest.mark.slow


def test_log_line_is_json_with_process(telemetry: Telemetry) -> None:
    assert {line["process"] for line in telemetry.lines} >= {
        "router",
        "router-scheduler",
        "prefill-0",
        "decode-0",
    }
    for line in telemetry.lines:
        assert line.keys() >= {"time", "level", "process", "logger", "message"}
        assert line["level"] in ("info", "warning"), line


@pytest.mark.parametrize("request_id", [STREAMED, ANSWERED])
def test_request_id_is_logged_by_every_process(telemetry: Telemetry, request_id: str) -> None:
    mine = [line for line in telemetry.lines if line.get("request_id") == request_id]
    # One frontend process of the router handled the request.
    messages = {line["process"].partition("-front-")[0]: line["message"] for line in mine}
    assert messages.keys() == {"router", "prefill-0", "decode-0"}
    assert "is computed" in messages["prefill-0"]
    assert f"request={request_id}" in messages["router"] and f"request={request_id}" in messages["decode-0"]


def test_line_with_request_id_in_text_has_field(telemetry: Telemetry) -> None:
    for line in telemetry.lines:
        for name in (STREAMED, ANSWERED):
            if name in line["message"]:
                assert line["request_id"] == name


def test_prompt_is_in_no_log_span_or_metric(telemetry: Telemetry) -> None:
    assert telemetry.log and telemetry.sent
    for where in ("\n".join(telemetry.log), telemetry.sent.decode("latin-1"), *telemetry.pages.values()):
        assert SECRET not in where and "heron" not in where


def test_batch_line_logs_no_custom_id(telemetry: Telemetry) -> None:
    serving = ("router", "prefill-0", "decode-0")
    mine = [line for line in telemetry.lines if not line["process"].startswith(serving)]
    assert any("lines are done" in line["message"] for line in mine), "the runner's own"
    assert LINE not in "\n".join(telemetry.log), "what a client calls its lines is the client's"


def test_trace_spans_router_and_both_workers(
    telemetry: Telemetry,
) -> None:
    mine = [span for span in telemetry.spans if span.trace == TRACE]
    by_id = {span.span: span for span in mine}

    def path(span: Span) -> list[str]:
        above = by_id.get(span.parent)
        return [span.name] if above is None else [*path(above), span.name]

    paths = {"/".join(path(span)) for span in mine}
    assert paths == {
        "route",
        *(f"route/{name}" for name in ("queue", "prefill", "kv_transfer", "decode")),
        "route/worker",
        "route/worker/engine.decode",
        "route/worker/prefill worker",
        "route/worker/prefill worker/engine.queue",
        "route/worker/prefill worker/engine.prefill",
        "route/worker/prefill worker/engine.prefill/engine.first_chunk",
    }
    (root,) = (span for span in mine if span.name == "route")
    assert root.parent == PARENT
    assert {
        span.attributes["baton.request_id"] for span in mine if "baton.request_id" in span.attributes
    } == {STREAMED}
    workers = {span.attributes["baton.worker"] for span in mine if span.name.endswith("worker")}
    assert workers == {"prefill-0", "decode-0"}


def test_spans_nest_in_time_and_count_tokens(telemetry: Telemetry) -> None:
    mine = [span for span in telemetry.spans if span.trace == TRACE]
    by_id = {span.span: span for span in mine}
    for span in mine:
        assert span.end_s >= span.start_s
        above = by_id.get(span.parent)
        if above is not None and span.name.startswith("engine."):  # others are by another process's clock
            assert above.start_s - 0.001 <= span.start_s <= span.end_s <= above.end_s + 0.001, span.name
    (decode,) = (span for span in mine if span.name == "engine.decode")
    assert decode.attributes["baton.passes"] == decode.attributes["baton.tokens"] == 5
    (prefill,) = (span for span in mine if span.name == "engine.prefill")
    (first,) = (span for span in mine if span.name == "engine.first_chunk")
    assert prefill.attributes["baton.tokens"] >= first.attributes["baton.tokens"] > 0  # type: ignore[operator]
    assert first.attributes["baton.passes"] == 1


def test_request_without_traceparent_starts_trace(telemetry: Telemetry) -> None:
    roots = [span for span in telemetry.spans if span.name == "route" and span.trace != TRACE]
    (answered,) = (span for span in roots if span.attributes["baton.request_id"] == ANSWERED)
    names = {span.name for span in telemetry.spans if span.trace == answered.trace}
    assert {"worker", "prefill worker", "engine.first_chunk", "engine.decode"} <= names
