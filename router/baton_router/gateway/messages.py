"""
Messages of Envoy's external processing (`envoy.service.ext_proc.v3`), as endpoint pickers use them.

Plain functions between messages and values. The protocol is docs/proposals/004-endpoint-picker-protocol of
https://github.com/kubernetes-sigs/gateway-api-inference-extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from baton_api import anthropic
from baton_api.errors import BatonError, NotInTime, Overloaded
from baton_http.replies import Scope
from baton_http.upstream import Headers

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata: the chosen endpoint."""

DESTINATION_SPACE = "envoy.lb"
"""Metadata namespace of the chosen endpoint and of the one that served."""

SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_SPACE = "envoy.lb.subset_hint"

BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
NO_BODY = processing_mode_pb2.ProcessingMode.NONE

CHUNK_LIMIT = 62_000
"""Bytes of one part of a body: gateways may reject more than 64 KiB."""

DROPPED = 429
"""Status for requests that the router drops under load, as the protocol demands."""

_encoder = msgspec.json.Encoder()

ProcessingRequest = Any
ProcessingResponse = Any
HttpBody = Any
"""The stubs have no types."""


def mode_name(mode: int) -> str:
    """The name of a body mode in the configuration of Envoy."""
    return str(processing_mode_pb2.ProcessingMode.BodySendMode.Name(mode))


def fields(http_headers: Any) -> list[tuple[bytes, bytes]]:
    """Names in lower case and values of an `HttpHeaders` message, with pseudo headers."""
    return [
        (header.key.lower().encode("latin-1"), header.raw_value or header.value.encode())
        for header in http_headers.headers.headers
    ]


def scope_of(http_headers: Any) -> Scope:
    """The head of a request as an ASGI scope."""
    given = fields(http_headers)
    pseudo = {name: value for name, value in given if name.startswith(b":")}
    target = pseudo.get(b":path", b"/")
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": pseudo.get(b":method", b"GET").decode("latin-1"),
        "scheme": "http",
        "path": path.decode("latin-1"),
        "raw_path": path,
        "root_path": "",
        "query_string": query,
        "headers": [(name, value) for name, value in given if not name.startswith(b":")],
        "client": None,
        "server": None,
    }


def status_of(http_headers: Any) -> int:
    """The status of a response; 0 if it is invalid."""
    text = next((value for name, value in fields(http_headers) if name == b":status"), b"")
    return int(text) if text.isdigit() else 0


def subset_of(message: ProcessingRequest) -> tuple[str, ...] | None:
    """
    The endpoints that the gateway allows; None if it allows all.

    The value is a list, or a string with commas, because gateways fill the metadata in different ways.
    """
    space = message.metadata_context.filter_metadata.get(SUBSET_SPACE)
    if space is None or SUBSET not in space:
        return None
    value = space[SUBSET]
    texts = [value] if isinstance(value, str) else [one for one in value or () if isinstance(one, str)]
    return tuple(endpoint for text in texts for one in text.split(",") if (endpoint := one.strip()))


def served_by(message: ProcessingRequest) -> str:
    """The endpoint that served the request; empty if the gateway does not say."""
    space = message.metadata_context.filter_metadata.get(DESTINATION_SPACE)
    value = space[SERVED] if space is not None and SERVED in space else ""
    return value if isinstance(value, str) else ""


def header_mutation(set_fields: Headers, removed: Iterable[str] = ()) -> Any:
    """Replace headers, and remove others."""
    return ext_proc.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=name.decode("latin-1"), raw_value=value),
                append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in set_fields
        ],
        remove_headers=list(removed),
    )


def destined(response: ProcessingResponse, destination: str) -> ProcessingResponse:
    """Add the dynamic metadata that names the chosen endpoint."""
    response.dynamic_metadata.update({DESTINATION_SPACE: {DESTINATION: destination}})
    return response


def request_headers(mutation: Any = None) -> ProcessingResponse:
    """The reply to request headers; with a mutation Envoy chooses the route again."""
    return ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=_common(mutation)))


def request_body(mutation: Any, body: bytes | None = None) -> ProcessingResponse:
    """The reply to a buffered request body; `body` replaces it."""
    response = _common(mutation)
    if body is not None:
        response.body_mutation.body = body
    return ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=response))


def request_chunks(chunks: Sequence[bytes], *, last: bool) -> list[ProcessingResponse]:
    """The parts of the request body in full duplex mode. `last`: the last part ends the request."""
    return [
        request_chunk(chunk, last=last and number == len(chunks)) for number, chunk in enumerate(chunks, 1)
    ]


def split(body: bytes) -> list[bytes]:
    """The body in parts that Envoy accepts."""
    return [body[at : at + CHUNK_LIMIT] for at in range(0, len(body), CHUNK_LIMIT)]


def request_chunk(chunk: bytes, *, last: bool) -> ProcessingResponse:
    """A part of the request body in full duplex mode, which Envoy sends on."""
    return ext_proc.ProcessingResponse(request_body=_streamed(chunk, last=last))


def request_trailers() -> ProcessingResponse:
    return ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


def response_headers(mutation: Any = None) -> ProcessingResponse:
    response = ext_proc.CommonResponse(header_mutation=mutation)
    return ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse(response=response))


def response_body() -> ProcessingResponse:
    """The reply to a part of the response body that passes unchanged."""
    return ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse())


def response_chunk(chunk: bytes, *, last: bool) -> ProcessingResponse:
    """A part of the response body in full duplex mode, which Envoy sends on."""
    return ext_proc.ProcessingResponse(response_body=_streamed(chunk, last=last))


def response_trailers() -> ProcessingResponse:
    return ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())


def immediate(status: int, body: bytes, set_fields: Headers) -> ProcessingResponse:
    """A response that Envoy sends to the client itself."""
    response = ext_proc.ImmediateResponse(body=body, headers=header_mutation(set_fields))
    response.status.code = status
    return ext_proc.ProcessingResponse(immediate_response=response)


def rejection(error: BatonError, request_id: bytes, path: str) -> ProcessingResponse:
    """An error for the client of `path`; 429 for requests that are dropped under load."""
    status = DROPPED if isinstance(error, Overloaded | NotInTime) else error.status
    set_fields = [(b"content-type", b"application/json")]
    set_fields += [(name, request_id) for name in anthropic.id_headers(path)]
    set_fields += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    body = anthropic.error_body(error, path, request_id.decode())
    return immediate(status, _encoder.encode(body), set_fields)


def _common(mutation: Any) -> Any:
    return ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=mutation is not None)


def _streamed(chunk: bytes, *, last: bool) -> Any:
    streamed = ext_proc.StreamedBodyResponse(body=chunk, end_of_stream=last)
    return ext_proc.BodyResponse(
        response=ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=streamed))
    )
