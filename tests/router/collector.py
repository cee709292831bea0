"""A collector of spans that behaves: it takes them by OTLP over HTTP, and remembers them."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import dataclass
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    trace: str
    span: str
    parent: str
    start_s: float
    end_s: float
    attributes: dict[str, str | int | float | bool]
    events: tuple[str, ...]
    failed: bool

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Collector:
    """`async with Collector() as collector`: it listens at `collector.url` until the end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.heard = b""
        """All that came."""
        self.paths: set[str] = set()

    async def __aenter__(self) -> Collector:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.paths.add(head.split(" ")[1])
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        body = gzip.decompress(body) if "content-encoding: gzip" in head else body
        self.heard += body
        decoded = ExportTraceServiceRequest.FromString(body)
        for resource in decoded.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_span(one) for one in scope.spans]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


def _span(one) -> Span:  # type: ignore[no-untyped-def]
    attributes = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in one.attributes}
    return Span(
        name=one.name,
        trace=one.trace_id.hex(),
        span=one.span_id.hex(),
        parent=one.parent_span_id.hex(),
        start_s=one.start_time_unix_nano / 1e9,
        end_s=one.end_time_unix_nano / 1e9,
        attributes=attributes,
        events=tuple(event.name for event in one.events),
        failed=one.status.code == 2,
    )
