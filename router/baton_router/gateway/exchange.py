"""
One HTTP request of a gateway: where it goes, with which head and body, and what is seen of its response.

The head waits for the body, because the prompt decides where the request goes. In full duplex mode the router
returns every part of the body, unchanged; in buffered mode Envoy keeps the head and the body until it has the
replies. The grant is released once: at the end of the response, or when the stream ends before it.

The headers for the worker are those that the router itself would send: the prefill worker and its ticket, the
cache salt, the key of the workers. A client's own `x-baton-*` headers are removed, or it could name a prefill
worker of its choice.

The router can neither retry nor repair a response. It reports to the scheduler when the response begins, and
whether it was complete.

Models, health and version are answered by the router itself: a worker knows its own model only.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from baton_api import headers, logs, tickets
from baton_api.capacity import SharedCapacity
from baton_api.errors import (
    BatonError,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    RouteNotFound,
)
from baton_api.inference_paths import PROXIED_PATHS
from baton_api.keys import API_KEY, AUTHORIZATION
from baton_api.prompt_report import PromptReport
from baton_api.request_classes import CLASSES
from baton_api.stream_comments import AnswerUsage
from baton_api.workers import EngineKind
from baton_http.replies import REQUEST_ID, Receive, Scope, Send, request_id
from baton_http.sse import EventStream, is_event_stream, usage_tokens
from baton_http.upstream import Headers
from baton_router.engines.engine_request import BAD, BUSY, FAILED, OK, PROMPT, TAIL_LIMIT
from baton_router.engines.heads import PREFILL, SALT, TENANT, TICKET, WorkerCredentials, response_headers
from baton_router.engines.registry import ENGINES
from baton_router.gateway import messages
from baton_router.gateway.messages import DESTINATION, ProcessingRequest, ProcessingResponse
from baton_router.metrics.registry import RouterMetrics
from baton_router.proxy import responses
from baton_router.requests.inference_request import CLASS, InferenceRequest
from baton_router.requests.picker import DirectRoute, Grant, Picker, RequestEnd
from baton_router.tenants.access import Authenticator, error_for, tenant_of

_OURS = "x-baton-"

_READ_BY_ROUTER = "accept-encoding"
"""Removed, because the router reads the end of a response, which must not be compressed."""


async def destination_of(worker: str) -> str:
    """
    The endpoint of a worker as `IP:PORT`, from its `host:port`. A host name is resolved.

    Raises NotReady if the name has no address.
    """
    host, _, port = worker.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        pass
    else:
        return worker
    try:
        addresses = await get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotReady(
            f"Cannot resolve the worker {worker}: {error.strerror}. A gateway needs its IP address.",
            public="No worker that serves this model is ready.",
        ) from error
    address = str(addresses[0][4][0])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def worker_headers(
    grant: Grant,
    request: InferenceRequest,
    request_id: bytes,
    destination: str,
    credentials: WorkerCredentials,
    now: float,
) -> Headers:
    """The headers to set on the request. `now` is Unix time."""
    fields = [(DESTINATION.encode(), destination.encode()), (REQUEST_ID, request_id), *credentials.headers]
    if grant.engine is not EngineKind.BATON:
        return fields
    if grant.control:
        fields.append((PREFILL, grant.control.encode()))
        if credentials.secret:
            ticket = tickets.issue(credentials.secret, request_id.decode(), grant.control, now)
            fields.append((TICKET, ticket.encode()))
    if request.tenant.turn:
        fields.append((TENANT, request.tenant.turn.encode()))
    if request.tenant.salt:
        fields.append((SALT, request.tenant.salt.encode()))
    if CLASSES[request.priority_class].background:
        fields.append((CLASS, headers.BATCH_CLASS.encode()))
    if request.target.partition(b"?")[0] == responses.PATH.encode():
        fields.append((responses.STATE, b"0"))  # the worker keeps no responses: another one may get the next
    return fields


def removed_headers(given: Headers, set_fields: Headers, credentials: WorkerCredentials) -> list[str]:
    """Names of the client's headers that the worker does not get."""
    kept = {name for name, _ in set_fields}
    names = {name.decode("latin-1") for name, _ in given if name not in kept}
    removed = {name for name in names if name.startswith(_OURS) or name == _READ_BY_ROUTER}
    if not credentials.passes_keys and AUTHORIZATION not in kept:
        removed.add(AUTHORIZATION.decode())
    if not credentials.passes_keys:
        removed.add(API_KEY.decode())
    return sorted(removed)


class ResponseTracker:
    """The response of one grant, which this object releases once."""

    def __init__(self, grant: Grant, picker: Picker, request: InferenceRequest) -> None:
        self.grant = grant
        self._request = request
        self._picker = picker
        self._events: EventStream | None = None
        self._tail = b""
        self._event_count = 0
        self._elsewhere = False
        self._released = False
        self.status = 0
        """Status of the response; 0 before it begins."""
        self.report: PromptReport | None = None
        """The worker's report of the prompt."""
        self.ended = False
        """Whether the last byte has passed."""
        self.charged = AnswerUsage(0, 0)
        """Tokens that count for the tenant, once it is released."""

    def begin(self, status: int, given: Headers, *, elsewhere: bool = False) -> None:
        """
        The response begins. `elsewhere`: an endpoint that was not granted serves it.

        Then nothing is learned about the granted worker.
        """
        self.status, self._elsewhere = status, elsewhere
        if elsewhere:
            return
        if status in BUSY:
            self._picker.full(self.grant)
        elif status >= FAILED:
            self._picker.failed(self.grant)
        else:
            if is_event_stream(given) and self._request.events is not None:
                self._events = self._request.events()
            raw = next((value for name, value in given if name == PROMPT), None)
            self.report = None if raw is None else PromptReport.decode(raw.decode("latin-1"))
            self._picker.began(self.grant, self.report)

    def push(self, piece: bytes) -> None:
        """A part of the body has passed."""
        self._tail = (self._tail + piece[-TAIL_LIMIT:])[-TAIL_LIMIT:]
        if self._events is not None:
            self._event_count += self._events.push(piece).count(b"data: {")

    def end(self) -> None:
        """The last byte has passed."""
        if self.ended or not self.status:
            return
        self.ended = True
        if self._events is not None:
            self._events.finish()
        self.release()

    def release(self) -> None:
        """Release the grant; idempotent."""
        if self._released:
            return
        self._released = True
        tokens = self.tokens or None
        self.charged = self._charge(tokens)
        charged = sum(self.charged)
        end = RequestEnd(complete=self.complete, tokens=tokens, charged=charged)
        self._picker.release(self.grant, end)

    def _charge(self, tokens: int | None) -> AnswerUsage:
        """The tokens to charge: as far as they were counted, and the most that was reserved where not."""
        if self._elsewhere or self.status >= BAD:
            return AnswerUsage(0, 0)
        cost = self._request.cost
        if tokens is None:
            tokens = 0 if self._request.streams else cost.most_answer_tokens(self.grant.usual_tokens)
        prompt = self.report.tokens + cost.others() if self.report else self.grant.prompt_tokens
        return AnswerUsage(prompt, tokens)

    @property
    def complete(self) -> bool:
        """Whether the whole answer has passed."""
        whole = self.ended and self.status == OK and not self._elsewhere
        return whole and (self._events is None or self._events.complete)

    @property
    def tokens(self) -> int:
        """Tokens of the answer: its usage, otherwise the events of a stream; 0 if unknown."""
        return usage_tokens(self._tail) or self._event_count


PATHS = frozenset({"/v1/models", "/health", "/ready", "/ping", "/version", "/openapi.json"})
MODEL = "/v1/models/"


class LocalEndpoints:
    """Passes requests to the router's own application."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    def has(self, method: str, path: str) -> bool:
        """Whether the router answers it."""
        return method == "GET" and (path in PATHS or path.startswith(MODEL))

    async def answer(self, scope: Scope) -> ProcessingResponse:
        """The application's response to a request without a body."""
        status, fields, body = 0, [], bytearray()

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, fields
            if message["type"] == "http.response.start":
                status, fields = message["status"], message["headers"]
            else:
                body.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        given: Headers = [(name, value) for name, value in fields if name != b"content-length"]
        return messages.immediate(status, bytes(body), given)


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
