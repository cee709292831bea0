"""
Baton's own protocol: one request to the decode worker, which drives the prefill worker itself.

Headers name the prefill worker (`x-baton-prefill`) and report the prompt (`x-baton-prompt`); comments between
the events carry the state from which a stream is resumed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec

from baton_api import headers, tickets
from baton_api.prompt_report import PromptReport
from baton_api.stream_comments import Resumption, with_resumption
from baton_api.workers import Load, Role
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamExchange
from baton_router.engines.checks import OK, WorkerApi
from baton_router.engines.engine_request import PROMPT, EngineRequest, ResumeState
from baton_router.engines.spec import EngineSpec
from baton_router.requests.resumable_stream import ResumableStream

log = logging.getLogger(__name__)

_loads = msgspec.json.Decoder(Load)


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


class BatonChecks:
    """Implements `checks.EngineChecks`."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api
        self._warned = False

    async def load(self) -> tuple[Load, str]:
        ticket = tickets.issue(self._api.secret, tickets.CHECK, "", time.time())
        reply = await self._api.get("/load", [(headers.TICKET.encode(), ticket.encode())])
        if reply.status != OK:
            raise msgspec.DecodeError(f"GET /load was answered with {reply.status}")
        load = _loads.decode(reply.body)
        trouble = self._ticket_trouble(load)
        return load, await self._api.ready("/ready") or trouble

    def _ticket_trouble(self, load: Load) -> str:
        """Why this router's tickets allow no pair. A decode worker works without pairs: it is logged once."""
        if not load.ticket_refusal or load.role is Role.BOTH:
            return ""
        trouble = (
            f"it refuses this router's tickets ({load.ticket_refusal}): set BATON_ROUTER_TICKET_SECRET of "
            "the router and BATON_TICKET_SECRET of all workers to the same secret"
        )
        if load.role is Role.PREFILL:
            return trouble
        if not self._warned:
            name = self._api.upstream.name
            log.warning("The decode worker %s computes all prompts itself: %s.", name, trouble)
        self._warned = True
        return ""


SPEC = EngineSpec(
    title="Baton",
    signatures=[("/load", lambda reply: "epoch" in reply)],
    checks=BatonChecks,
    driver=lambda rng: BatonEngine(),
)
