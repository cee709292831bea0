"""
One HTTP request of a gateway: its messages come in order, and each gets its replies.

The head waits for the body, because the prompt decides where the request goes. In full duplex mode the router
returns every part of the body, unchanged; in buffered mode Envoy keeps the head and the body until it has the
replies. The grant is released once: at the end of the response, or when the stream ends before it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from baton_api import logs
from baton_api.capacity import SharedCapacity
from baton_api.errors import (
    BatonError,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    Overloaded,
    RouteNotFound,
)
from baton_api.inference_paths import PROXIED_PATHS
from baton_http.replies import Scope, request_id
from baton_router.engines.engine_request import PROMPT
from baton_router.engines.heads import WorkerCredentials, response_headers
from baton_router.engines.registry import ENGINES
from baton_router.gateway import messages
from baton_router.gateway.destination import destination_of, removed_headers, worker_headers
from baton_router.gateway.local_endpoints import LocalEndpoints
from baton_router.gateway.messages import ProcessingRequest, ProcessingResponse
from baton_router.gateway.response_tracker import ResponseTracker
from baton_router.metrics.registry import RouterMetrics
from baton_router.proxy import responses
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import DirectRoute, Picker
from baton_router.tenants.access import Authenticator, error_for, tenant_of

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status of requests that ended before their response."""


class UnsupportedMode(Exception):
    """The gateway is configured to send bodies in a way that the endpoint picker cannot use."""

    def __init__(self, mode: int) -> None:
        super().__init__(
            f"Unsupported request_body_mode of the gateway's ext_proc filter: {messages.mode_name(mode)}. "
            "The prompt decides where a request goes. Set FULL_DUPLEX_STREAMED (or BUFFERED)."
        )


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """Shared by the exchanges of one endpoint picker."""

    picker: Picker
    access: Authenticator
    metrics: RouterMetrics
    credentials: WorkerCredentials
    own: LocalEndpoints
    max_body: int
    memory: SharedCapacity
    """Of request bodies."""


class GatewayExchange:
    """One stream of `Process`. Call `close` at its end, whatever happens."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._scope: Scope = {}
        self._id = b""
        self._subset: tuple[str, ...] | None = None
        self._mode = messages.FULL_DUPLEX
        self._response_mode = messages.FULL_DUPLEX
        self._chunks: list[bytes] = []
        self._size = self._held = 0
        self._request: InferenceRequest | None = None
        self._arrived = self._granted = self._opened = 0.0
        self._rejected = 0
        self._closed = False
        self.response: ResponseTracker | None = None
        """Set once workers are granted."""
        self._finished = False
        """Whether the gateway has an immediate response."""

    async def replies(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """
        The replies to the next message; may be empty.

        After an immediate response further messages are ignored: the gateway sent them before it arrived.
        Raises UnsupportedMode.
        """
        if self._finished:
            return []
        try:
            return await self._handle(message)
        except BatonError as error:
            return [self._reject(error)]
        except UnsupportedMode:
            raise
        except Exception:
            log.exception("Request %s failed inside the endpoint picker.", self._id.decode())
            return [self._reject(InternalError())]

    async def _handle(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        match message.WhichOneof("request"):
            case "request_headers":
                return await self._on_request_headers(message)
            case "request_body":
                return await self._on_request_body(message.request_body)
            case "request_trailers":
                # Trailers end a body whose parts did not say so.
                chosen = [] if self.response is not None else await self._choose()
                return [*chosen, messages.request_trailers()]
            case "response_headers":
                return [self._on_response_headers(message)]
            case "response_body":
                return [self._on_response_body(message.response_body)]
            case "response_trailers":
                self._end()
                return [messages.response_trailers()]
        return []

    async def _on_request_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._scope = scope = messages.scope_of(message.request_headers)
        self._id = request_id(scope["headers"])
        self._subset = messages.subset_of(message)
        logs.about(request_id=self._id.decode())
        path, method = scope["path"], scope["method"]
        if self._services.own.has(method, path):
            self._finished = True
            return [await self._services.own.answer(scope)]
        await self._services.access.enter(scope)
        if path not in PROXIED_PATHS:
            raise RouteNotFound(method, path)
        if method != "POST":
            raise MethodNotAllowed(method, path, "POST")
        if message.request_headers.end_of_stream:
            self._mode = messages.FULL_DUPLEX
            return await self._choose()
        if self._mode == messages.FULL_DUPLEX:
            return []
        if self._mode == messages.BUFFERED:
            return [messages.request_headers()]
        raise UnsupportedMode(self._mode)

    async def _on_request_body(self, body: messages.HttpBody) -> list[ProcessingResponse]:
        if self.response is not None:
            return [messages.request_chunk(body.body, last=body.end_of_stream)]
        self._size += len(body.body)
        if self._size > self._services.max_body:
            raise BodyTooLarge(self._services.max_body)
        self._hold(len(body.body))
        self._chunks.append(body.body)
        if not body.end_of_stream:
            return []
        return await self._choose(last=True)

    async def _choose(self, *, last: bool = False) -> list[ProcessingResponse]:
        """Choose workers and let the request go. `last`: the last part of the body ends the request."""
        body = b"".join(self._chunks)
        scope, services = self._scope, self._services
        tenant = tenant_of(scope)
        self._arrived = time.perf_counter()
        if scope["path"] == responses.PATH and responses.needs_store(body, keeps=False):
            raise InvalidRequest(
                "Unsupported parameter: 'previous_response_id'. Through this gateway requests go straight to "
                "workers, which store no responses. Send the whole conversation as input.",
                param="previous_response_id",
            )
        self._request = request = InferenceRequest(scope, body, tenant)
        grant = await services.picker.pick(request.pick_request(direct=DirectRoute(self._subset)))
        self.response = ResponseTracker(grant, services.picker, request)
        self._granted = time.perf_counter()
        services.metrics.overhead.observe(self._granted - self._arrived)
        destination = await destination_of(grant.decode)
        set_fields = worker_headers(grant, request, self._id, destination, services.credentials, time.time())
        removed = removed_headers(request.headers, set_fields, services.credentials)
        mutation = messages.header_mutation(set_fields, removed)
        changed = ENGINES[grant.engine].single_body(request.path, request.body, request.tenant.salt)
        chunks, self._chunks = self._chunks, []
        if self._mode == messages.BUFFERED:
            reply = messages.request_body(mutation, None if changed is body else changed)
            return [messages.destined(reply, destination)]
        return [
            messages.destined(messages.request_headers(mutation), destination),
            *messages.request_chunks(chunks if changed is body else messages.split(changed), last=last),
        ]

    def _on_response_headers(self, message: ProcessingRequest) -> ProcessingResponse:
        response, request = self.response, self._request
        if response is None or request is None:
            return messages.response_headers()
        given = messages.fields(message.response_headers)
        served = messages.served_by(message)
        elsewhere = bool(served) and served != response.grant.decode
        response.begin(messages.status_of(message.response_headers), given, elsewhere=elsewhere)
        self._opened = time.perf_counter()
        self._services.metrics.first_byte.observe(self._opened - self._arrived, request.priority_class)
        if message.response_headers.end_of_stream or self._response_mode == messages.NO_BODY:
            self._end()
        grant = response.grant if request.tenant.admin else None
        queued_s = self._granted - self._arrived
        set_fields = response_headers([], self._id, grant, response.report, queued_s)
        return messages.response_headers(messages.header_mutation(set_fields, [PROMPT.decode()]))

    def _on_response_body(self, body: messages.HttpBody) -> ProcessingResponse:
        if self.response is not None:
            self.response.push(body.body)
        if body.end_of_stream:
            self._end()
        if self._response_mode == messages.FULL_DUPLEX:
            return messages.response_chunk(body.body, last=body.end_of_stream)
        return messages.response_body()

    def _reject(self, error: BatonError) -> ProcessingResponse:
        self._finished = True
        self._rejected = error.status
        if self.response is not None:
            self.response.release()
        return messages.rejection(
            error_for(error, tenant_of(self._scope)), self._id, self._scope.get("path", "")
        )

    def _end(self) -> None:
        if self.response is not None:
            self.response.end()

    def close(self) -> None:
        """The stream has ended, whether or not the response has: release the grant and count the request."""
        if self._closed:
            return
        self._closed = True
        self._services.memory.add(tenant_of(self._scope).id, -self._held)
        if self.response is not None:
            self.response.release()
        if self._scope.get("path") in PROXIED_PATHS:
            self._count(self._scope["path"])

    def _hold(self, size: int) -> None:
        """Count `size` more bytes of the body until the stream ends. Raises Overloaded."""
        memory, tenant = self._services.memory, tenant_of(self._scope).id
        if not memory.fits(tenant, size):
            raise Overloaded(memory.used_by(tenant), memory.allowed(tenant), what="bytes")
        memory.add(tenant, size)
        self._held += size

    def _count(self, path: str) -> None:
        counters, request, response = self._services.metrics.counters, self._request, self.response
        status = self._rejected or (response.status if response else 0) or CLIENT_CLOSED_REQUEST
        if request is None:
            counters.refused(path, status)
            return
        priority_class = request.priority_class
        counters.ended(path, request.model, priority_class, status, granted=response is not None)
        if response is None:
            return
        counters.used(
            request.tenant.name, response.charged.prompt, response.report, response.charged.generated
        )
        if response.complete:
            now = time.perf_counter()
            counters.served(now - self._arrived, priority_class)
            if request.streams:
                counters.streamed(response.tokens, now - self._opened, priority_class)
