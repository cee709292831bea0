"""
A response that a gateway passes to the client, as the router sees its headers and body.

The router can neither retry nor repair it. It reports to the scheduler when the response begins, and whether
it was complete.
"""

from __future__ import annotations

from baton_api.answer_usage import AnswerUsage
from baton_api.prompt_report import PromptReport
from baton_http.sse import EventStream, is_event_stream, usage_tokens
from baton_http.upstream import Headers
from baton_router.engines.engine_request import BAD, BUSY, FAILED, OK, PROMPT, TAIL_LIMIT
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import Grant, Picker, RequestEnd


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
