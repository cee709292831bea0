"""
A proxied request, and its attempts at workers.

Until a byte is forwarded, another worker may be tried. `open` therefore waits for something to forward: the
first lines of a stream, or the whole body of another response if it is not large.
"""

from __future__ import annotations

from baton_api import headers
from baton_api.answer_usage import AnswerUsage
from baton_api.prompt_report import Fallback, PromptReport
from baton_http.client_connection import ClientConnection
from baton_http.sse import EventStream, is_event_stream, usage_tokens
from baton_http.upstream import Headers, Sink, UpstreamExchange, UpstreamLost
from baton_router.engines.contract import Call, EngineDriver, ResumeState
from baton_router.proxy.forwarding import with_length
from baton_router.proxy.tracing import RequestTrace
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import Grant, Picker, RequestEnd

USAGE = headers.USAGE.encode()

BUFFER_LIMIT = 256 * 1024
"""Bytes of a response that is not a stream that are held back until it is complete."""

TAIL_LIMIT = 4096
"""Bytes at the end of a longer one in which its usage is."""

OK = 200
BUSY = (429, 503)
"""Statuses of a healthy worker without capacity; another worker may answer 200."""

BAD = 400
"""Lowest status of a request that was not served."""

FAILED = 500
"""Lowest status of a worker's own failure."""


class Attempt:
    """One grant and one exchange with its decode worker."""

    def __init__(self, grant: Grant, picker: Picker, engine: EngineDriver) -> None:
        self.grant = grant
        self._picker = picker
        self._engine = engine
        self._call: Call | None = None
        self.exchange: UpstreamExchange | None = None
        self.events: EventStream | None = None
        """The stream, if the response is one whose end can be detected."""
        self.ended = False
        """Whether the last piece returned is the end of the response."""
        self.report: PromptReport | None = None
        """The worker's report of the prompt, once the response has begun."""
        self.prefill_refuses = False
        """Whether the prefill worker was found to be gone after the decode worker was lost."""
        self.lost = False
        """Whether a worker was lost with it."""
        self.charged = AnswerUsage(0, 0)
        """Tokens that count for the tenant, once it is closed."""
        self._began = False
        self._usage: AnswerUsage | None = None
        """Of a whole response, if it says so."""
        self._tail = bytearray()
        """The end of a response that is not a stream, which has its usage."""
        self._closed = False
        self._sink: Sink | None = None

    async def open(self, call: Call) -> bytes:
        """Send the request; returns the first part of the response. Raises UpstreamLost."""
        self._call = call
        exchange = self.exchange = await self._engine.send(call)
        stream = is_event_stream(exchange.headers)
        if stream:
            self.events = self._engine.stream(call)
        opening = b""
        while not self.ended and len(opening) < BUFFER_LIMIT:
            opening += await self.next()
            if opening and stream:
                break
        if not stream:
            self._usage = _usage_of(exchange.headers)
            self._tail[:] = opening
        if not stream and self.ended:
            whole = self._engine.whole(call, exchange.status, opening)
            if whole is not opening:
                exchange.headers = with_length(exchange.headers, len(whole))
                opening = whole
        if self.taken:
            self.report = self._engine.report(call, exchange.headers, self.events, opening)
            self._began = True
            self._picker.began(self.grant, self.report)
        elif exchange.status in BUSY:
            self._picker.full(self.grant)
        else:
            self._picker.failed(self.grant)
        return opening

    def forward_to(self, client: ClientConnection) -> None:
        """While `next` waits, send parts to the client as they arrive; it returns those that must wait."""
        events, tail = self.events, self._tail  # the attempt holds `forward`, which must not hold the attempt

        def forward(piece: bytes) -> bool:
            if not client.ready:
                return False
            if events is not None:
                piece = events.push(piece)
            else:
                _append_tail(tail, piece)
            if piece:
                client.write(piece)
            return True

        self._sink = forward

    async def next(self) -> bytes:
        """The next part; may be empty while a line is incomplete. Raises UpstreamLost."""
        assert self.exchange is not None
        try:
            piece = await self.exchange.read(self._sink)
        except UpstreamLost:
            if self.events is None or not self.events.complete:
                raise
            piece = b""
        if self.events is None:
            _append_tail(self._tail, piece)
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

    def end(self) -> None:
        """The response is complete although the worker was lost: the router writes its end."""
        self.ended = True

    def fail(self, cause: str) -> bool:
        """End the exchange, if any; its reader gets UpstreamLost."""
        return self.exchange is not None and self.exchange.fail(cause)

    @property
    def taken(self) -> bool:
        """Whether the worker handled the request, be it to reject an invalid one."""
        return self.status < FAILED and self.status not in BUSY

    @property
    def prefill_crashed(self) -> bool:
        """Whether the prefill worker died with the request, so that the decode worker computed the prompt."""
        fallback = self._call.fallback if self._call is not None else None
        reported = self.report is not None and self.report.fallback == Fallback.LOST
        return self.prefill_refuses or reported or fallback is Fallback.LOST

    @property
    def tokens(self) -> int:
        """Tokens of the response so far, as the worker reports; 0 if it does not."""
        if self.events is not None:
            return self.events.tokens
        return (self._usage.generated if self._usage is not None else usage_tokens(bytes(self._tail))) or 0

    @property
    def status(self) -> int:
        assert self.exchange is not None
        return self.exchange.status

    @property
    def headers(self) -> Headers:
        assert self.exchange is not None
        return self.exchange.headers

    def close(self) -> None:
        """Release the worker; an unfinished exchange closes its connection."""
        if self._closed:
            return
        self._closed = True
        self.charged = self._charge()
        if self._call is not None:
            self._call.close()
            self._call = None  # the two refer to each other: only the garbage collector would free them
        if self.exchange is not None:
            self.exchange.close()
        whole = self.ended and self.exchange is not None and self.status == OK
        tokens = None if self.events is None else self.events.generated
        charged = sum(self.charged)
        cached = self._engine.cached_tokens(self.events)
        if self.report is not None:
            self.report = self.report.completed(cached)
        end = RequestEnd(complete=whole, tokens=tokens, cached=cached, charged=charged)
        self._picker.release(self.grant, end)

    def _charge(self) -> AnswerUsage:
        """
        The tokens to charge: as the worker counted them, and the most that was reserved where it did not.

        A client that leaves is charged for what its workers did until then, but not for a lost worker.
        """
        call, grant = self._call, self.grant
        if call is None or (self.exchange is not None and self.exchange.status >= BAD):
            return AnswerUsage(0, 0)
        cost = call.request.cost
        counted = self.events.usage if self.events is not None else self._usage
        if self.lost and not self._began:
            return AnswerUsage(0, 0)
        prompt = 0 if call.state is not None else grant.prompt_tokens
        if prompt and counted is not None:
            prompt = counted.prompt
        elif prompt and self.report is not None:
            prompt = self.report.tokens + cost.others()
        if self.events is not None:
            generated = self.events.generated
        elif call.request.streams and not self._began:
            generated = 0  # it was left before its first token
        else:
            generated = self.tokens or None
        if generated is None and (self.lost or not cost.choices):
            generated = 0
        if generated is None:
            steps = (call.clock() - call.started) / grant.step_s if grant.step_s else 0.0
            generated = cost.most_answer_tokens(grant.usual_tokens, steps)
        return AnswerUsage(prompt, generated)

    @property
    def resume_state(self) -> ResumeState | None:
        """The state from which another worker continues the stream; None if none can."""
        return None if self._call is None else self._engine.resume_state(self._call, self.events)


def _usage_of(given: Headers) -> AnswerUsage | None:
    return next((AnswerUsage.decode(value) for name, value in given if name == USAGE), None)


class ProxiedRequest:
    """One request on its way: client, current attempt, and response."""

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
        self.request: InferenceRequest | None = None
        """Set once the body was read."""
        self.attempt: Attempt | None = None
        self.lost: list[str] = []
        """Workers whose stream broke off, or did not resume."""
        self.crashes = 0
        """Workers that died or hung while they had the request."""
        self.resumes = 0
        """Attempts to resume the response."""
        self.status = 0
        self.arrived = 0.0
        """Time of the last byte of the request; all times are of `time.perf_counter`."""
        self.granted = 0.0
        """When workers were granted."""
        self.sent = 0.0
        """When the last attempt was sent."""
        self.opened = 0.0
        """When the first byte of a stream arrived."""
        self.trace: RequestTrace | None = None


def _append_tail(tail: bytearray, piece: bytes) -> None:
    """Keep the last bytes of an answer, which have its counts of tokens."""
    tail += piece[-TAIL_LIMIT:]
    del tail[:-TAIL_LIMIT]
