"""
A gateway as the endpoint picker sees one: a gRPC client that sends Envoy's messages in Envoy's order.

It can send the request to the chosen endpoint with the headers that Envoy would, and report the response.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from tests.router.running import CHAT

DESTINATION = "x-gateway-destination-endpoint"
MODES = processing_mode_pb2.ProcessingMode
SUBSET_SPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"


@dataclass
class RoutedHead:
    """A request after the endpoint picker's replies."""

    destination: str
    metadata: str
    """The destination in the dynamic metadata."""
    headers: dict[str, str]
    body: bytes = b""
    clears_route: bool = False
    removed: list[str] = field(default_factory=list)


@dataclass
class Rejected:
    """An immediate response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class EnvoyStream:
    """One HTTP request of the gateway."""

    def __init__(self, call: Any, mode: int) -> None:
        self._call = call
        self._mode = mode
        self._headers: dict[str, str] = {}

    async def request(
        self,
        body: object,
        path: str = CHAT,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        pieces: int = 3,
        subset: object = None,
        trailers: bool = False,
    ) -> RoutedHead | Rejected:
        """Send the head and the body in `pieces`, as the mode demands, and read the replies. 0: no body."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.begin(path, method=method, headers=headers, end=not raw, subset=subset)
        if not raw or not pieces:
            return await self._routed(b"")
        if self._mode == MODES.BUFFERED:
            reply = await self.read()
            if reply.HasField("immediate_response"):
                return _rejected(reply)
            assert not reply.request_headers.response.header_mutation.set_headers
            await self.body(raw, end=True)
            return await self._routed(raw)
        size = -(-len(raw) // pieces)
        parts = [raw[at : at + size] for at in range(0, len(raw), size)]
        for number, part in enumerate(parts, 1):
            await self.body(part, end=number == len(parts) and not trailers)
        if trailers:
            await self._call.write(ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers()))
        routed = await self._routed(b"")
        if isinstance(routed, RoutedHead):
            ended = False
            while not ended:
                reply = await self.read()
                streamed = reply.request_body.response.body_mutation.streamed_response
                routed.body += streamed.body
                ended = streamed.end_of_stream or reply.HasField("request_trailers")
            assert reply.HasField("request_trailers") == trailers
        return routed

    async def begin(
        self,
        path: str = CHAT,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        end: bool = False,
        subset: object = None,
    ) -> None:
        """Send the head of a request."""
        self._headers = {":method": method, ":path": path, ":authority": "gateway", **(headers or {})}
        await self.head(end=end, subset=subset)

    async def head(self, *, end: bool = False, subset: object = None) -> None:
        message = ext_proc.ProcessingRequest(request_headers=_http_headers(self._headers, end=end))
        message.protocol_config.request_body_mode = self._mode
        message.protocol_config.response_body_mode = self._mode
        if subset is not None:
            message.metadata_context.filter_metadata[SUBSET_SPACE].update({SUBSET: subset})
        await self._call.write(message)

    async def body(self, part: bytes, *, end: bool) -> None:
        body = ext_proc.HttpBody(body=part, end_of_stream=end)
        await self._call.write(ext_proc.ProcessingRequest(request_body=body))

    async def response_headers(
        self, status: int, headers: Mapping[str, str] | None = None, *, served: str = "", end: bool = False
    ) -> dict[str, str]:
        """Report the head of the response; returns the headers that are set."""
        given = {":status": str(status), **(headers or {})}
        message = ext_proc.ProcessingRequest(response_headers=_http_headers(given, end=end))
        if served:
            message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": served})
        await self._call.write(message)
        reply = await self.read()
        assert reply.HasField("response_headers")
        return _set(reply.response_headers.response.header_mutation)

    async def response_body(self, part: bytes, *, end: bool = False) -> bytes:
        """Report a part of the response; returns what goes to the client."""
        body = ext_proc.HttpBody(body=part, end_of_stream=end)
        await self._call.write(ext_proc.ProcessingRequest(response_body=body))
        reply = await self.read()
        assert reply.HasField("response_body")
        if self._mode == MODES.BUFFERED:
            return part
        streamed = reply.response_body.response.body_mutation.streamed_response
        assert streamed.end_of_stream == end
        return bytes(streamed.body)

    async def response_trailers(self) -> None:
        await self._call.write(ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers()))
        assert (await self.read()).HasField("response_trailers")

    async def forward(self, routed: RoutedHead, client: httpx.AsyncClient) -> bytes:
        """Send the request to its destination, and its response to the client; returns the body."""
        headers = {name: value for name, value in self._headers.items() if not name.startswith(":")}
        headers = {name: value for name, value in headers.items() if name not in routed.removed}
        url = f"http://{routed.destination}{self._headers[':path']}"
        answer = b""
        async with client.stream(
            "POST", url, content=routed.body, headers={**headers, **routed.headers}
        ) as response:
            await self.response_headers(response.status_code, response.headers, served=routed.destination)
            async for part in response.aiter_raw():
                answer += await self.response_body(part)
        await self.response_body(b"", end=True)
        return answer

    async def done(self) -> None:
        """Half-close the stream, as Envoy does at the end."""
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    def cut(self) -> None:
        """Reset the stream, as Envoy does when a client disconnects."""
        self._call.cancel()

    async def read(self) -> Any:
        reply = await self._call.read()
        assert reply is not grpc.aio.EOF
        return reply

    async def _routed(self, body: bytes) -> RoutedHead | Rejected:
        reply = await self.read()
        if reply.HasField("immediate_response"):
            return _rejected(reply)
        buffered = self._mode == MODES.BUFFERED and bool(body)
        common = (reply.request_body if buffered else reply.request_headers).response
        fields = _set(common.header_mutation)
        body = common.body_mutation.body or body
        removed = list(common.header_mutation.remove_headers)
        metadata = reply.dynamic_metadata["envoy.lb"][DESTINATION]
        return RoutedHead(fields[DESTINATION], metadata, fields, body, common.clear_route_cache, removed)


class FakeEnvoy:
    def __init__(self, channel: Any) -> None:
        self._process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )

    def stream(self, mode: int = MODES.FULL_DUPLEX_STREAMED) -> EnvoyStream:
        return EnvoyStream(self._process(), mode)


@asynccontextmanager
async def envoy(port: int, credentials: Any = None, options: Sequence[Any] = ()) -> AsyncIterator[FakeEnvoy]:
    """A gateway of the endpoint picker on this port; plaintext without credentials."""
    address = f"127.0.0.1:{port}"
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options)
    async with channel:
        yield FakeEnvoy(channel)


def _http_headers(given: Mapping[str, str], *, end: bool) -> Any:
    message = ext_proc.HttpHeaders(end_of_stream=end)
    for name, value in given.items():
        message.headers.headers.add(key=name, raw_value=value.encode())
    return message


def _set(mutation: Any) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


def _rejected(reply: Any) -> Rejected:
    immediate = reply.immediate_response
    return Rejected(immediate.status.code, _set(immediate.headers), immediate.body)
