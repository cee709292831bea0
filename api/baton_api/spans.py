"""
Where spans go: one OpenTelemetry provider for each process that makes any, and sends them by OTLP over HTTP.

The library is loaded where spans are wanted, and nowhere else. Spans hold names and figures, never text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton_api import __version__
from baton_api.errors import SetupError
from baton_api.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PATH = "/v1/traces"
"""Where collectors take them."""

PATIENCE_S = 2.0
"""For one batch of spans; a collector that is away must not hold up the end of the process."""

Attributes = dict[str, str | int | float | bool]


def open_provider(service: str, endpoint: str, ratio: float = 1.0) -> TracerProvider:
    """
    For spans of `service`: all of traces that somebody else began and records, and of those that begin here
    that share. Raises SetupError if the library is not there.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise SetupError("--tracing-endpoint needs packages more: pip install 'baton[tracing]'.") from error
    endpoint = endpoint.rstrip("/")
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create({"service.name": service, "service.version": __version__}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint if endpoint.endswith(PATH) else endpoint + PATH, timeout=PATIENCE_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def beneath(parent: TraceContext | None) -> Any:
    """The context of a span whose parent is in another process; of one that begins a trace, if None."""
    from opentelemetry import trace
    from opentelemetry.trace import SpanContext, TraceFlags

    if parent is None:
        return trace.set_span_in_context(trace.INVALID_SPAN)
    there = SpanContext(parent.trace, parent.span, True, TraceFlags(int(parent.sampled)))
    return trace.set_span_in_context(trace.NonRecordingSpan(there))
