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
from baton_http.upstream import Headers, UpstreamExchange
from baton_router.engines.contract import PROMPT, Call, ResumeState
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
    """Implements `contract.EngineDriver`."""

    kind = EngineKind.BATON

    async def send(self, call: Call) -> UpstreamExchange:
        body = call.request.body
        if isinstance(call.state, BatonState):
            body = with_resumption(body, call.state.resumption)
        worker = call.grant.decode
        return await call.upstreams.get(worker).request(call.head(worker, len(body)), body, call.holder)

    def stream(self, call: Call) -> EventStream | None:
        events = call.request.events
        if events is None:
            return None
        if isinstance(call.state, BatonState) and issubclass(events, ResumableStream):
            return events(call.state.resumption)
        return events()

    def report(
        self, call: Call, given: Headers, events: EventStream | None, opening: bytes
    ) -> PromptReport | None:
        for name, value in given:
            if name == PROMPT:
                return PromptReport.decode(value.decode("latin-1"))
        return None

    def whole(self, call: Call, status: int, body: bytes) -> bytes:
        return body

    def cached_tokens(self, events: EventStream | None) -> int | None:
        return None

    def resume_state(self, call: Call, events: EventStream | None) -> ResumeState | None:
        resumption = events.resumption if isinstance(events, ResumableStream) else None
        return BatonState(resumption) if resumption is not None else None
