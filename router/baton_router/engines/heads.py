"""
Heads of requests for workers, with the router's credentials, and heads of responses for clients.

A client's own `x-baton-*` headers are dropped, or it could name a prefill worker of its choice. One passes,
`x-baton-state`: where a worker reads it, `baton_router.proxy.responses` has written it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from baton_api import headers, tickets, trace_context
from baton_api.keys import AUTHORIZATION
from baton_api.prompt_report import PromptReport
from baton_http.replies import REQUEST_ID
from baton_http.request_heads import CONNECTION_HEADERS
from baton_http.upstream import Headers
from baton_router.requests.picker import Grant
from baton_router.settings import RouterSettings

PREFILL = headers.PREFILL.encode()
TICKET = headers.TICKET.encode()
SALT = headers.SALT.encode()
TENANT = headers.TENANT.encode()
RESUMABLE_LINE = b"%b: 1\r\n" % headers.RESUMABLE.encode()
BATCH_CLASS_LINE = b"%b: %b\r\n" % (headers.CLASS.encode(), headers.BATCH_CLASS.encode())
STATE = headers.STATE.encode()

_OURS = b"x-baton-"

# The request goes out with a host, length and id of the router's; answers must not be compressed,
# because the router reads the end of a stream.
_REQUEST_ONLY = CONNECTION_HEADERS | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    REQUEST_ID,
}

_REQUEST_ONLY_KEYED = _REQUEST_ONLY | {AUTHORIZATION}
_NOT_FORWARDED = {
    (False, False): _REQUEST_ONLY,
    (True, False): _REQUEST_ONLY_KEYED,
    (False, True): _REQUEST_ONLY | trace_context.HEADERS,
    (True, True): _REQUEST_ONLY_KEYED | trace_context.HEADERS,
}
"""Headers that are not forwarded, by whether the router replaces keys, and writes trace headers."""


@dataclass(frozen=True)
class WorkerCredentials:
    """The credentials that prove to a worker that a request comes from this router."""

    secret: bytes = b""
    """Signs tickets for prefill workers; empty if they require no ticket."""
    key: bytes = b""
    """The workers' API key."""
    passes_keys: bool = True
    """Whether the client's key is forwarded to the worker."""

    @classmethod
    def of(cls, settings: RouterSettings) -> WorkerCredentials:
        key = settings.worker_api_key.get_secret_value()
        return cls(settings.ticket_secret.encode(), key.encode(), not (key or settings.requires_keys))

    @cached_property
    def line(self) -> bytes:
        """The header line with the key; empty without a key."""
        return b"%b: Bearer %b\r\n" % (AUTHORIZATION, self.key) if self.key else b""

    @property
    def headers(self) -> Headers:
        return [(AUTHORIZATION, b"Bearer %b" % self.key)] if self.key else []


class WorkerHead:
    """The head of one request for the workers of one grant; only the address and the length are added."""

    __slots__ = ("_first", "_last", "_passing", "_per_worker")

    def __init__(
        self,
        target: bytes,
        given: Headers,
        request_id: bytes,
        credentials: WorkerCredentials,
        now: float,
        *,
        control: str = "",
        method: bytes = b"POST",
        resumable: bool = False,
        tenant: str = "",
        salt: str = "",
        background: bool = False,
        trace: bytes = b"",
    ) -> None:
        """
        `given` are the client's headers. `control` is the control address of the prefill worker, empty
        without one; `now` is Unix time, for its ticket. `resumable` asks for the resume state. `trace` are
        header lines that replace the client's trace headers.
        """
        kept_back = _NOT_FORWARDED[not credentials.passes_keys, bool(trace)]
        self._first = b"%b %b HTTP/1.1\r\ncontent-length: " % (method, target)
        self._passing = b"\r\n%b: %b\r\n%b%b" % (
            REQUEST_ID,
            request_id,
            b"".join([b"%b: %b\r\n" % header for header in forwarded(given, kept_back)]),
            trace,
        )
        self._per_worker = control, credentials.line, resumable, tenant, salt, background
        self._last = b"\r\n"
        if control and credentials.secret:
            issued = tickets.issue(credentials.secret, request_id.decode(), control, now)
            self._last = b"%b: %b\r\n\r\n" % (TICKET, issued.encode())

    def for_worker(self, worker: str, length: int) -> bytes:
        """The head for `worker`, its `host:port`, with a body of `length` bytes."""
        fixed = _fixed_headers(worker, *self._per_worker)
        return b"%b%d%b%b%b" % (self._first, length, self._passing, fixed, self._last)


@lru_cache(4096)
def _fixed_headers(
    host: str, control: str, key: bytes, resumable: bool, tenant: str, salt: str, background: bool
) -> bytes:
    """The headers that a worker gets with all requests of one kind."""
    lines = [b"host: %b\r\n" % host.encode(), key]
    if resumable:
        lines.append(RESUMABLE_LINE)
    if tenant:
        lines.append(b"%b: %b\r\n" % (TENANT, tenant.encode()))
    if salt:
        lines.append(b"%b: %b\r\n" % (SALT, salt.encode()))
    if background:
        lines.append(BATCH_CLASS_LINE)
    if control:
        lines.append(b"%b: %b\r\n" % (PREFILL, control.encode()))
    return b"".join(lines)


def forwarded(given: Headers, kept_back: frozenset[bytes]) -> Headers:
    """The headers without those of `kept_back`, our own, and those that `Connection` names."""
    passing = []
    for header in given:
        name, value = header
        if name not in kept_back:
            if name[:8] != _OURS or name == STATE:
                passing.append(header)
        elif name == b"connection" and value not in (b"keep-alive", b"close"):
            named = {one.strip().lower() for one in value.split(b",")}
            if named - kept_back:
                return forwarded(given, kept_back | named)
    return passing


WORKER = headers.WORKER.encode()
DECISION = headers.DECISION.encode()
CACHED = headers.CACHED.encode()
TIMING = headers.TIMING.encode()

_RESPONSE_ONLY = CONNECTION_HEADERS | {b"server", b"date", REQUEST_ID}


def response_headers(
    given: Headers,
    request_id: bytes,
    grant: Grant | None,
    report: PromptReport | None = None,
    queued_s: float = 0.0,
) -> Headers:
    """
    The headers of a worker's answer as the client gets them, after a wait of `queued_s` in the router.

    With `grant` they name workers and number the decision: for clients that run the service.
    """
    fields: Headers = []
    if report is not None:
        times = 1000 * (queued_s + report.queue_s), 1000 * report.compute_s
        took = b"queue;dur=%.1f, prefill;dur=%.1f" % times
        if report.transfer_s:
            took += b", transfer;dur=%.2f" % (1000 * report.transfer_s)
        fields = [(TIMING, took)]
        if report.cached is not None:
            fields = [(CACHED, b"%d" % report.cached), *fields]
    if grant is not None:
        fields = [(WORKER, grant.decode.encode()), (DECISION, grant.summary), *fields]
    return [*forwarded(given, _RESPONSE_ONLY), (REQUEST_ID, request_id), *fields]
