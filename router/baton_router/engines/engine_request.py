"""
One try at the workers of a grant: the request as their engine gets it, and its response as it arrives.

What is the same for every engine is in `EngineRequest`: it opens the response, passes it on, and releases the
grant once with what the response has cost. What differs is an `EngineDriver`: how a pair is driven, what
reports a prompt, and how a stream is followed and resumed. A driver keeps no state; that of one request is in
the `EngineRequest`.

Until a byte has been forwarded, another worker may be tried. `open` therefore waits for something to forward:
the first lines of a stream, or the whole body of another response if it is not large. Requests are aborted
the same way for all engines: the router closes the worker's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton_api import headers
from baton_api.prompt_report import Fallback, PromptReport
from baton_api.stream_comments import AnswerUsage
from baton_http.client_connection import ClientConnection
from baton_http.replies import with_length
from baton_http.sse import EventStream, is_event_stream, usage_tokens
from baton_http.upstream import (
    Headers,
    ReplyTooLarge,
    Sink,
    UpstreamExchange,
    UpstreamLost,
    UpstreamPool,
    read_body,
)
from baton_router.engines.heads import WorkerHead
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import Grant, Picker, RequestEnd, WorkerLoss

PROMPT = headers.PROMPT.encode()
USAGE = headers.USAGE.encode()

OVERDUE = "overdue"
"""Cause of a loss after which no other worker is tried."""

PREFILL_LOST = "prefill"
"""Cause of a loss for which the prefill worker of a pair is to blame."""

PREFILL_CRASHED = "prefill_crashed"
"""Cause of a loss for which a prefill worker is to blame that died or stopped with the request."""

CRASH_CAUSES = frozenset({"reset", "hung", PREFILL_CRASHED})
"""Causes of `UpstreamLost` that the request may be to blame for: its worker died or stopped."""

PREFILL_CAUSES = frozenset({PREFILL_LOST, PREFILL_CRASHED})

BUFFER_LIMIT = 256 * 1024
"""Bytes of a response that is not a stream that are held back until it is complete."""

PREFILL_LIMIT = 16 * 1024**2
"""Maximum bytes of a prefill worker's answer, most of which are the prompt's token ids."""

TAIL_LIMIT = 4096
"""Bytes at the end of a longer one in which its usage is."""

OK = 200
BUSY = (429, 503)
"""Statuses of a healthy worker without capacity; another worker may answer 200."""

BAD = 400
"""Lowest status of a request that was not served."""

FAILED = 500
"""Lowest status of a worker's own failure."""


class ResumeState(Protocol):
    """The state from which another worker of the same engine continues a stream."""

    @property
    def passed(self) -> int:
        """Number of tokens whose text the client has."""
        ...

    @property
    def ending(self) -> bytes:
        """The end of the stream, if only that is missing, and the router can write it."""
        ...


class EngineRequest:
    """One request at the workers of one grant. Close it, whatever happens. Times are of `clock`, in
    seconds.
    """

    # Set by the driver.
    options: object = None
    """The members of the body that the engine reads."""
    decode_sent = 0.0
    prefill_s = 0.0
    """Seconds until the prefill worker's answer; 0 without one."""
    prompt_tokens = 0
    """Tokens of the prompt, as the prefill worker reports; 0 without one."""
    cached: int | None = None
    """Cached tokens of the prompt; None if unknown."""
    tail = ""
    """Name of the prompt's last full block, as in `PromptReport`."""
    fallback: Fallback | None = None
    """Why the decode worker computes the prompt although the grant has a prefill worker."""
    prefill_task: asyncio.Task[None] | None = None
    """The prefill worker's half, where both workers get the request at once."""
    prefill_lost = ""
    """The cause for which that half failed; empty if it did not."""

    exchange: UpstreamExchange | None = None
    """With the worker that has the request now, so that a timeout can end it."""
    events: EventStream | None = None
    """The stream, if the response is one whose end can be detected."""
    ended = False
    """Whether the last piece returned is the end of the response."""
    report: PromptReport | None = None
    """The worker's report of the prompt, once the response has begun."""
    prefill_refuses = False
    """Whether the prefill worker was found to be gone after the decode worker was lost."""
    lost = False
    """Whether a worker was lost with it."""
    tokens = 0
    """Tokens of the response, as the worker reports, once it is closed; 0 if it does not."""
    charged = AnswerUsage(0, 0)
    """Tokens that count for the tenant, once it is closed."""
    _sent = False
    _began = False
    _usage: AnswerUsage | None = None
    """Of a complete response, if it says so."""
    _closed = False
    _sink: Sink | None = None

    def __init__(
        self,
        request: InferenceRequest,
        grant: Grant,
        driver: EngineDriver,
        picker: Picker,
        upstreams: UpstreamPool,
        head: WorkerHead,
        clock: Callable[[], float],
        state: ResumeState | None = None,
    ) -> None:
        """`state` is the state to resume from, for a stream that another worker began."""
        self.request = request
        self.grant = grant
        self.upstreams = upstreams
        self.head = head
        self.clock = clock
        self.state = state
        self.started = clock()
        self._driver = driver
        self._picker = picker
        self._tail = bytearray()
        """The end of a response that is not a stream, which has its usage."""

    async def open(self) -> bytes:
        """Send the request; returns the first part of the response. Raises UpstreamLost."""
        self._sent = True
        exchange = self.exchange = await self._driver.send(self)
        stream = is_event_stream(exchange.headers)
        if stream:
            self.events = self._driver.stream(self)
        opening = b""
        while not self.ended and len(opening) < BUFFER_LIMIT:
            opening += await self.next()
            if opening and stream:
                break
        if not stream:
            self._usage = _usage_of(exchange.headers)
            self._tail[:] = opening
        if not stream and self.ended:
            body = self._driver.client_body(self, opening)
            if body is not opening:
                exchange.headers = with_length(exchange.headers, len(body))
                opening = body
        if self.accepted:
            self.report = self._driver.report(self, opening)
            self._began = True
            self._picker.began(self.grant, self.report)
        elif exchange.status in BUSY:
            self._picker.full(self.grant)
        else:
            self._picker.failed(self.grant)
        return opening

    async def prefill(self, body: bytes) -> bytes:
        """
        Let the prefill worker compute the prompt of `body`, before the decode worker gets the request.

        Returns its answer; empty, with `fallback`, if it has none. Raises UpstreamLost if no time is left.
        """
        worker = self.grant.prefill
        try:
            exchange = await self.upstreams.get(worker).request(
                self.head.for_worker(worker, len(body)), body, self
            )
            reply = await read_body(exchange, PREFILL_LIMIT)
        except UpstreamLost as lost:
            if lost.cause == OVERDUE:
                raise
            self.fallback = Fallback.UNREACHABLE if lost.cause == "connect" else Fallback.LOST
            return b""
        except ReplyTooLarge:
            self.fallback = Fallback.PROTOCOL
            return b""
        finally:
            self.exchange = None
        if exchange.status == OK:
            return reply
        if exchange.status in BUSY:
            self.fallback = Fallback.BUSY
        else:
            self.fallback = Fallback.REJECTED if exchange.status < FAILED else Fallback.FAILED
        return b""

    def forward_to(self, client: ClientConnection) -> None:
        """While `next` waits, send parts to the client as they arrive; it returns those that must wait."""
        events, tail = self.events, self._tail  # this object holds `forward`, which must not hold this object

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

    def report_loss(self, lost: UpstreamLost) -> None:
        """Tell the scheduler that a worker was lost while it had the request."""
        self.lost = True
        loss = WorkerLoss(
            crashed=lost.cause in CRASH_CAUSES,
            at_prefill=lost.cause in PREFILL_CAUSES,
            prefill_crashed=self.prefill_crashed,
        )
        self._picker.failed(self.grant, loss)

    def fail(self, cause: str) -> bool:
        """End the exchange, if any; its reader gets UpstreamLost."""
        return self.exchange is not None and self.exchange.fail(cause)

    @property
    def accepted(self) -> bool:
        """Whether the worker handled the request, be it to reject an invalid one."""
        status = self.status
        return status < FAILED and status not in BUSY

    @property
    def prefill_crashed(self) -> bool:
        """Whether the prefill worker died with the request, so that the decode worker computed the prompt."""
        reported = self.report is not None and self.report.fallback == Fallback.LOST
        return self.prefill_refuses or reported or self.fallback is Fallback.LOST

    @property
    def status(self) -> int:
        assert self.exchange is not None
        return self.exchange.status

    @property
    def headers(self) -> Headers:
        assert self.exchange is not None
        return self.exchange.headers

    @property
    def resume_state(self) -> ResumeState | None:
        """The state from which another worker continues the stream; None if none can."""
        return self._driver.resume_state(self) if self._sent else None

    def close(self) -> None:
        """Release the worker; an unfinished exchange closes its connection."""
        if self._closed:
            return
        self._closed = True
        self.tokens = self._reported_tokens()
        self.charged = self._charge()
        if self.prefill_task is not None:
            self.prefill_task.cancel()
            self.prefill_task = (
                None  # the two refer to each other: only the garbage collector would free them
            )
        if self.exchange is not None:
            self.exchange.close()
        complete = self.ended and self.exchange is not None and self.status == OK
        tokens = None if self.events is None else self.events.generated
        cached = self._driver.cached_tokens(self)
        if self.report is not None:
            self.report = self.report.completed(cached)
        end = RequestEnd(complete=complete, tokens=tokens, cached=cached, charged=sum(self.charged))
        self._picker.release(self.grant, end)

    def _reported_tokens(self) -> int:
        if self.events is not None:
            return self.events.tokens
        return (self._usage.generated if self._usage is not None else usage_tokens(bytes(self._tail))) or 0

    def _charge(self) -> AnswerUsage:
        """
        The tokens to charge: as the worker counted them, and the most that was reserved where it did not.

        A client that leaves is charged for what its workers did until then, but not for a lost worker.
        """
        request, grant = self.request, self.grant
        if not self._sent or (self.exchange is not None and self.exchange.status >= BAD):
            return AnswerUsage(0, 0)
        if self.lost and not self._began:
            return AnswerUsage(0, 0)
        counted = self.events.usage if self.events is not None else self._usage
        prompt = 0 if self.state is not None else grant.prompt_tokens
        if prompt and counted is not None:
            prompt = counted.prompt
        elif prompt and self.report is not None:
            prompt = self.report.tokens + request.cost.others()
        if self.events is not None:
            generated = self.events.generated
        elif request.streams and not self._began:
            generated = 0  # it was left before its first token
        else:
            generated = self.tokens or None
        if generated is None and (self.lost or not request.cost.choices):
            generated = 0
        if generated is None:
            steps = (self.clock() - self.started) / grant.step_s if grant.step_s else 0.0
            generated = request.cost.most_answer_tokens(grant.usual_tokens, steps)
        return AnswerUsage(prompt, generated)


class EngineDriver(Protocol):
    """The protocol of one kind of engine."""

    async def send(self, attempt: EngineRequest) -> UpstreamExchange:
        """
        Send the request to the workers of the grant; returns the exchange with the decode worker.

        A prefill worker that fails sets `attempt.fallback`, and the decode worker computes the prompt. Raises
        UpstreamLost if the decode worker is lost.
        """
        ...

    def stream(self, attempt: EngineRequest) -> EventStream | None:
        """The reader of a streamed response; None where the end of a stream cannot be detected."""
        ...

    def report(self, attempt: EngineRequest, opening: bytes) -> PromptReport | None:
        """
        The report of the prompt, once the response has begun; None if nothing is known.

        `opening` is the first part of the response.
        """
        ...

    def client_body(self, attempt: EngineRequest, body: bytes) -> bytes:
        """
        A complete response as clients of OpenAI's API expect it; errors are translated.

        Raises UpstreamLost if the worker gave the answer up.
        """
        ...

    def cached_tokens(self, attempt: EngineRequest) -> int | None:
        """Cached tokens of the prompt, where only the end of a stream reports them; None if unknown."""
        ...

    def resume_state(self, attempt: EngineRequest) -> ResumeState | None:
        """The state from which another worker continues the stream; None if none can."""
        ...


def _usage_of(given: Headers) -> AnswerUsage | None:
    return next((AnswerUsage.decode(value) for name, value in given if name == USAGE), None)


def _append_tail(tail: bytearray, piece: bytes) -> None:
    """Keep the last bytes of an answer, which have its counts of tokens."""
    tail += piece[-TAIL_LIMIT:]
    del tail[:-TAIL_LIMIT]
