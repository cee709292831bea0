"""Collectors of spans, and spans that no collector accepts."""

from __future__ import annotations

import asyncio
import logging

import pytest

from baton_api import otlp
from baton_api.errors import SetupError
from baton_api.otlp import PATH, QUEUE_LIMIT, Collector, Spans, open_spans
from tests.router import collector

COLLECTORS = {
    "an address": ("http://c:4318", {}, Collector("http://c:4318/v1/traces")),
    "with a slash": ("http://c:4318/", {}, Collector("http://c:4318/v1/traces")),
    "with the path": ("http://c/v1/traces", {}, Collector("http://c/v1/traces")),
    "what OpenTelemetry's variables say": (
        "https://c",
        {
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, team = a",
            "OTEL_RESOURCE_ATTRIBUTES": "region=north,nothing",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
        },
        Collector(
            "https://c/v1/traces", {"authorization": "Bearer x", "team": "a"}, {"region": "north"}, "/ca.pem"
        ),
    ),
    "those for traces go first": (
        "http://c",
        {"OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=2"},
        Collector("http://c/v1/traces", {"a": "2"}),
    ),
}


@pytest.mark.parametrize("case", COLLECTORS)
def test_collector_is_read_from_endpoint_and_environment(case: str) -> None:
    endpoint, environment, expected = COLLECTORS[case]
    assert Collector.of(endpoint, environment) == expected


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "collector"])
def test_open_spans_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(SetupError, match="Expected a URL"):
        open_spans("baton-router", endpoint)


def test_missing_certificate_is_refused() -> None:
    with pytest.raises(SetupError, match=r"/nonexistent\.pem"):
        Spans("baton-router", Collector(f"https://127.0.0.1:9{PATH}", certificate="/nonexistent.pem"))


def span(name: str, size: int = 0) -> bytes:
    encoded = otlp.attribute("x", "x" * size)
    return otlp.span(otlp.place(1, 0), 1, name, otlp.INTERNAL, 1, 2, encoded)


async def test_waiting_spans_are_sent_at_the_end_in_order() -> None:
    async with collector.Collector() as taking:
        spans = open_spans("baton-router", taking.url)
        for number in range(2000):
            spans.take(span(f"span-{number}", 1000))
        await asyncio.to_thread(spans.close)
        assert [one.name for one in taking.spans] == [f"span-{number}" for number in range(2000)]


async def test_unreachable_collector_is_logged_once_and_blocks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "baton_api.otlp"):
        spans = open_spans("baton-router", "http://127.0.0.1:9")
        for _ in range(3):
            spans.take(span("lost", QUEUE_LIMIT // 2))
        await asyncio.to_thread(spans.close)
    assert len(caplog.messages) == 1 and "Cannot send spans to http://127.0.0.1:9" in caplog.messages[0]
