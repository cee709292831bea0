"""One request of a client on its way: who sent it, what became of it, and when."""

from __future__ import annotations

from baton_http.client_connection import ClientConnection
from baton_http.replies import Receive, Scope, Send, request_id
from baton_router.engines.engine_request import EngineRequest
from baton_router.proxy.tracing import RequestTrace
from baton_router.requests.inference_request import InferenceRequest
from baton_router.tenants.access import tenant_of
from baton_router.tenants.tenants import Tenant


class RequestContext:
    """The client, the request, and the current attempt at a worker. Times are of `time.perf_counter`."""

    __slots__ = (
        "_scope",
        "arrived",
        "attempt",
        "client",
        "crashes",
        "granted",
        "id",
        "lost",
        "opened",
        "path",
        "request",
        "resumes",
        "send",
        "sent",
        "status",
        "trace",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self.path: str = scope["path"]
        self.id = request_id(scope["headers"])
        self.client = ClientConnection(scope, receive, send)
        self.send = send
        self.request: InferenceRequest | None = None
        """Set once the body was read."""
        self.attempt: EngineRequest | None = None
        self.lost: list[str] = []
        """Workers whose stream broke off, or did not resume."""
        self.crashes = 0
        """Workers that died or hung while they had the request."""
        self.resumes = 0
        """Attempts to resume the response."""
        self.status = 0
        """Of the response; 0 before it begins."""
        self.arrived = 0.0
        """When the last byte of the request arrived."""
        self.granted = 0.0
        """When workers were granted."""
        self.sent = 0.0
        """When the last attempt was sent."""
        self.opened = 0.0
        """When the first byte of a stream arrived."""
        self.trace: RequestTrace | None = None

    @property
    def tenant(self) -> Tenant:
        return tenant_of(self._scope)

    def inference_request(self, body: bytes) -> InferenceRequest:
        """What the client asks of a model. Raises InvalidRequest, ModelNotFound and Forbidden."""
        self.request = request = InferenceRequest(self._scope, body, self.tenant)
        request.explain = self.trace is not None and self.trace.recorded
        return request
