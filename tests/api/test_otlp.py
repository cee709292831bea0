"""Spans as bytes, read back with the classes that OpenTelemetry generates."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from baton_api import otlp
from baton_api.otlp import Value

TRACE, SPAN, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 0xFF00000000000001
HEAD = otlp.heading({"service.name": "baton-router", "region": "north"}, "router", "1.0")


def read(spans: bytes) -> list[Span]:
    decoded = ExportTraceServiceRequest.FromString(otlp.request(HEAD, spans))
    (resource,) = decoded.resource_spans
    (scope,) = resource.scope_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes} == {
        "service.name": "baton-router",
        "region": "north",
    }
    assert (scope.scope.name, scope.scope.version) == ("router", "1.0")
    return list(scope.spans)


def one(decoded: bytes = b"", *, parent: int = PARENT, end_ns: int = 9, failed: bool = False) -> Span:
    place = otlp.place(TRACE, parent)
    (span,) = read(otlp.span(place, SPAN, "route", otlp.SERVER, 7, end_ns, decoded, failed=failed))
    return span


def test_span_has_its_place_and_attributes() -> None:
    span = one()
    assert (span.trace_id.hex(), span.span_id.hex()) == (f"{TRACE:032x}", f"{SPAN:016x}")
    assert span.parent_span_id.hex() == f"{PARENT:016x}"
    assert (span.name, span.kind) == ("route", Span.SPAN_KIND_SERVER)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (7, 9)
    assert span.status.code == Status.STATUS_CODE_UNSET and not span.attributes and not span.events
    assert one(failed=True).status.code == Status.STATUS_CODE_ERROR
    assert one(parent=0).parent_span_id == b"", "it begins its trace"
    assert one(end_ns=3).end_time_unix_nano == 7, "none ends before it starts"


VALUES: dict[str, Value] = {
    "nothing": "",
    "a word": "decode-0",
    "a word of another script": "世界",
    "a long text": "x" * 20_000,
    "zero": 0,
    "a number": 127,
    "a larger one": 128,
    "a large one": 2**62,
    "one below zero": -1,
    "a fraction": 0.002,
    "true": True,
    "false": False,
}


@pytest.mark.parametrize("case", VALUES)
def test_attribute_keeps_its_value_and_type(case: str) -> None:
    value = VALUES[case]
    for decoded in (otlp.attribute("baton.x", value), otlp.cached_attributes(("baton.x",), value)):
        (pair,) = one(decoded).attributes
        value_of = getattr(pair.value, pair.value.WhichOneof("value"))
        assert (pair.key, value_of, type(value_of)) == ("baton.x", value, type(value))


def test_equal_values_of_different_types_stay_distinct() -> None:
    decoded = [otlp.cached_attributes(("baton.x",), value) for value in (1, 1.0, True)]
    assert [one(each).attributes[0].value.WhichOneof("value") for each in decoded] == [
        "int_value",
        "double_value",
        "bool_value",
    ]


def test_undecodable_character_does_not_spoil_the_request() -> None:
    (pair,) = one(otlp.attribute("baton.x", "a\udcff")).attributes
    assert pair.value.string_value == "a?"


def test_event_lies_within_its_span() -> None:
    (event,) = one(otlp.event("retry", 8, {"cause": "lost", "worker": "decode-0"})).events
    assert (event.name, event.time_unix_nano) == ("retry", 8)
    assert {pair.key: pair.value.string_value for pair in event.attributes} == {
        "cause": "lost",
        "worker": "decode-0",
    }


def test_concatenated_spans_are_all_decoded() -> None:
    place = otlp.place(TRACE, 0)
    many = [otlp.span(place, number, f"span {number % 7}", otlp.INTERNAL, 1, 2) for number in range(1, 1000)]
    assert [int(span.span_id.hex(), 16) for span in read(b"".join(many))] == list(range(1, 1000))
