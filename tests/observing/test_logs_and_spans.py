"""What a whole service writes to its logs and sends as spans, and that no prompt is in either."""

from __future__ import annotations

import pytest

from tests.observing.whole_service import ANSWERED, LINE, PARENT, SECRET, STREAMED, TRACE, Told
from tests.router.collector import Span

pytestmark = pytest.mark.processes


def test_every_line_of_a_process_is_an_object_that_says_whose_it_is(told: Told) -> None:
    assert {line["process"] for line in told.lines} >= {"router", "router-scheduler", "prefill-0", "decode-0"}
    for line in told.lines:
        assert line.keys() >= {"time", "level", "process", "logger", "message"}
        assert line["level"] in ("info", "warning"), line


@pytest.mark.parametrize("request_id", [STREAMED, ANSWERED])
def test_a_request_is_found_by_its_id_in_each_process_that_had_it(told: Told, request_id: str) -> None:
    mine = [line for line in told.lines if line.get("request_id") == request_id]
    # Of a router that is several processes it was one front.
    said = {line["process"].partition("-front-")[0]: line["message"] for line in mine}
    assert said.keys() == {"router", "prefill-0", "decode-0"}
    assert "is computed" in said["prefill-0"]
    assert f"request={request_id}" in said["router"] and f"request={request_id}" in said["decode-0"]


def test_what_names_a_request_belongs_to_it(told: Told) -> None:
    for line in told.lines:
        for name in (STREAMED, ANSWERED):
            if name in line["message"]:
                assert line["request_id"] == name


def test_the_secret_of_a_prompt_is_nowhere(told: Told) -> None:
    assert told.log and told.sent
    for where in ("\n".join(told.log), told.sent.decode("latin-1"), *told.pages.values()):
        assert SECRET not in where and "heron" not in where


def test_a_batchs_line_is_found_by_its_id_too(told: Told) -> None:
    serving = ("router", "prefill-0", "decode-0")
    mine = [line for line in told.lines if not line["process"].startswith(serving)]
    assert any("lines are done" in line["message"] for line in mine), "the runner's own"
    assert LINE not in "\n".join(told.log), "what a client calls its lines is the client's"


def test_one_trace_leads_from_the_router_to_the_first_pass_in_the_prefill_worker(told: Told) -> None:
    mine = [span for span in told.spans if span.trace == TRACE]
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


def test_spans_lie_within_those_above_them_and_say_what_they_counted(told: Told) -> None:
    mine = [span for span in told.spans if span.trace == TRACE]
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


def test_a_request_that_brings_no_trace_begins_one_at_the_router(told: Told) -> None:
    roots = [span for span in told.spans if span.name == "route" and span.trace != TRACE]
    (answered,) = (span for span in roots if span.attributes["baton.request_id"] == ANSWERED)
    names = {span.name for span in told.spans if span.trace == answered.trace}
    assert {"worker", "prefill worker", "engine.first_chunk", "engine.decode"} <= names
