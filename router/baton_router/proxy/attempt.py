"""
One worker's try at a request: counted as its work from the start to `close`, whichever way it ends.

`open` waits until there is something to pass on, because until then another worker may be tried: of a
stream the first lines, of anything else the whole body, if it is not large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton_api.reports import PromptReport
from baton_http.client_connection import ClientConnection
from baton_http.sse import EventStream, usage_tokens
from baton_http.upstream import Headers, Upstream, UpstreamExchange, UpstreamLost
from baton_router.proxy.forwarding import PROMPT, is_event_stream
from baton_router.proxy.resume_state import ResumableStream
from baton_router.proxy.routed_request import RoutedRequest
from baton_router.scheduling.picker import Grant, Picker

if TYPE_CHECKING:
    from baton_router.metrics.tracing import RequestTrace

BUFFER_LIMIT = 256 * 1024
"""Bytes of a body that is not a stream which are kept back until it is whole."""

OK = 200
BUSY = (429, 503)
"""What a worker says that is well but full: it may be another's 200."""

FAILED = 500
"""The least status with which a worker says that it failed itself."""


class Attempt:
    """One grant, one exchange with its decode worker."""

    def __init__(self, grant: Grant, picker: Picker, upstream: Upstream) -> None:
        self.grant = grant
        self._picker = picker
        self._upstream = upstream
        self.exchange: UpstreamExchange | None = None
        self.events: EventStream | None = None
        """What has passed, if the answer is a stream of events whose end can be told."""
        self.ended = False
        """Whether the last piece that was given out is the answer's last."""
        self.report: PromptReport | None = None
        """What the worker says of the prompt, once the answer has begun."""
        self._usage_tokens = 0
        self._closed = False

    async def open(self, head: bytes, body: bytes, events: Callable[[], EventStream] | None) -> bytes:
        """Ask the worker; gives the first part of its answer, which may be `events`. Raises Lost."""
        exchange = await self._upstream.request(head, body, self)
        stream = is_event_stream(exchange.headers)
        if stream and events is not None:
            self.events = events()
        opening = b""
        while not self.ended and len(opening) < BUFFER_LIMIT:
            opening += await self.next()
            if opening and stream:
                break
        if events is not None and not stream and self.ended:
            self._usage_tokens = usage_tokens(opening)
        if self.taken:
            self.report = self._report()
            self._picker.began(self.grant, self.report)
        elif exchange.status in BUSY:
            self._picker.full(self.grant)
        else:
            self._picker.failed(self.grant)
        return opening

    async def next(self) -> bytes:
        """The next part; perhaps nothing, of a line that is not whole. Raises Lost."""
        assert self.exchange is not None
        try:
            piece = await self.exchange.read()
        except UpstreamLost:
            if self.events is None or not self.events.complete:
                raise
            piece = b""
        if self.events is None:
            self.ended = self.exchange.complete
            return piece
        if piece:
            piece = self.events.push(piece)
            self.ended = self.exchange.complete and self.events.complete and not self.events.waiting
            return piece
        piece = self.events.finish()
        if not self.events.complete:
            raise UpstreamLost(self.grant.decode, "incomplete")
        self.ended = True
        return piece

    def fail(self, cause: str) -> bool:
        """End what goes on with the worker, if something does: whoever waits for it gets Lost."""
        return self.exchange is not None and self.exchange.fail(cause)

    @property
    def taken(self) -> bool:
        """Whether the worker does its work, be it to refuse a bad request."""
        return self.status < FAILED and self.status not in BUSY

    @property
    def tokens(self) -> int:
        """Of the answer so far, as far as its worker says."""
        return self._usage_tokens if self.events is None else self.events.tokens

    @property
    def status(self) -> int:
        assert self.exchange is not None
        return self.exchange.status

    @property
    def headers(self) -> Headers:
        assert self.exchange is not None
        return self.exchange.headers

    def close(self) -> None:
        """Let go of the worker; one that is not done with it sees its connection close."""
        if self._closed:
            return
        self._closed = True
        if self.exchange is not None:
            self.exchange.close()
        whole = self.ended and self.exchange is not None and self.status == OK
        tokens = self.events.generated if isinstance(self.events, ResumableStream) else None
        self._picker.release(self.grant, complete=whole, tokens=tokens)

    def _report(self) -> PromptReport | None:
        for name, value in self.headers:
            if name == PROMPT:
                return PromptReport.decode(value.decode("latin-1"))
        return None


class ProxiedRequest:
    """One request's way: who asked, whose try it is now, and what was answered."""

    __slots__ = (
        "arrived",
        "attempt",
        "client",
        "crashes",
        "granted",
        "id",
        "lost",
        "opened",
        "request",
        "resumes",
        "sent",
        "status",
        "trace",
    )

    def __init__(self, client: ClientConnection, identity: bytes) -> None:
        self.client = client
        self.id = identity
        self.request: RoutedRequest | None = None
        """Once its body was read."""
        self.attempt: Attempt | None = None
        self.lost: list[str] = []
        """Workers on which the answer broke off, or did not go on."""
        self.crashes = 0
        """Workers that died or stopped while they had the request."""
        self.resumes = 0
        """Workers that were asked to go on with the answer."""
        self.status = 0
        self.arrived = 0.0
        """When its last byte came; all times are by `time.perf_counter`."""
        self.granted = 0.0
        """When a worker was found."""
        self.sent = 0.0
        """When the last one was found, of those that were tried."""
        self.opened = 0.0
        """When the first of a stream came."""
        self.trace: RequestTrace | None = None
