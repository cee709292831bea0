"""
Baton's own protocol: one request to the decode worker, which drives the prefill worker itself.

Headers name the prefill worker (`x-baton-prefill`) and report the prompt (`x-baton-prompt`); comments between
the events carry the state from which a stream is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_api.engines import EngineKind
from baton_api.prompt_report import PromptReport
from baton_api.resuming import Resumption, with_resumption
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamExchange
from baton_router.engines.engine_request import PROMPT, EngineRequest, ResumeState
from baton_router.requests.resumable_stream import ResumableStream


@dataclass(frozen=True, slots=True)
class BatonState:
    """A `ResumeState`."""

    resumption: Resumption
    ending: bytes = b""

    @property
    def passed(self) -> int:
        return len(self.resumption.tokens)


class BatonEngine:
    """Implements `engine_request.EngineDriver`."""

    kind = EngineKind.BATON

    async def send(self, attempt: EngineRequest) -> UpstreamExchange:
        body = attempt.request.body
        if isinstance(attempt.state, BatonState):
            body = with_resumption(body, attempt.state.resumption)
        worker = attempt.grant.decode
        return await attempt.upstreams.get(worker).request(
            attempt.head.for_worker(worker, len(body)), body, attempt
        )

    def stream(self, attempt: EngineRequest) -> EventStream | None:
        events = attempt.request.events
        if events is None:
            return None
        if isinstance(attempt.state, BatonState) and issubclass(events, ResumableStream):
            return events(attempt.state.resumption)
        return events()

    def report(self, attempt: EngineRequest, opening: bytes) -> PromptReport | None:
        for name, value in attempt.headers:
            if name == PROMPT:
                return PromptReport.decode(value.decode("latin-1"))
        return None

    def client_body(self, attempt: EngineRequest, body: bytes) -> bytes:
        return body

    def cached_tokens(self, attempt: EngineRequest) -> int | None:
        return None

    def resume_state(self, attempt: EngineRequest) -> ResumeState | None:
        events = attempt.events
        resumption = events.resumption if isinstance(events, ResumableStream) else None
        return BatonState(resumption) if resumption is not None else None
