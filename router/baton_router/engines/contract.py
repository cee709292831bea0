"""
The contract between the router and the engine of a worker.

An engine says how a worker's health and load are read and how a pair is driven. It also says what reports a
prompt, and how a stream is followed and resumed. An engine keeps no state of its own: the state of one
request is its `Call`, and the state of one worker is its `EngineChecks`.

Requests are aborted the same way for all: the router closes the worker's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton_api import headers
from baton_api.engines import EngineKind
from baton_api.prompt_report import Fallback, PromptReport
from baton_api.workers import Load
from baton_http.http_client import UpstreamPool
from baton_http.sse import EventStream
from baton_http.upstream import ExchangeHolder, Headers, UpstreamExchange
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import Grant

PROMPT = headers.PROMPT.encode()

OVERDUE = "overdue"
"""Cause of a loss after which no other worker is tried."""

PREFILL_LOST = "prefill"
"""Cause of a loss for which the prefill worker of a pair is to blame."""

PREFILL_CRASHED = "prefill_crashed"
"""Cause of a loss for which a prefill worker is to blame that died or stopped with the request."""

CRASH_CAUSES = frozenset({"reset", "hung", PREFILL_CRASHED})
"""Causes of `UpstreamLost` of which the request itself may be the reason: its worker died or stopped."""

PREFILL_CAUSES = frozenset({PREFILL_LOST, PREFILL_CRASHED})

HeadOf = Callable[[str, int], bytes]
"""Worker's name and length of the body -> head of the request."""


class ResumeState(Protocol):
    """The state from which another worker of the same engine continues a stream."""

    @property
    def passed(self) -> int:
        """Tokens whose text the client has."""
        ...

    @property
    def ending(self) -> bytes:
        """The end of the stream, if only that is missing, and the router can write it."""
        ...


@dataclass(slots=True)
class Call:
    """One request at the workers of one grant. Times are of `clock`, in seconds."""

    request: InferenceRequest
    grant: Grant
    upstreams: UpstreamPool
    head: HeadOf
    holder: ExchangeHolder
    """Gets each exchange as it begins, so that a timeout can end it."""
    clock: Callable[[], float]
    state: ResumeState | None = None
    """The state to resume from, for a stream that another worker began."""
    options: object = None
    """The members of the body that the engine reads."""
    started: float = 0.0
    decode_sent: float = 0.0
    prefill_s: float = 0.0
    """Seconds until the prefill worker's answer; 0 without one."""
    prompt_tokens: int = 0
    """Tokens of the prompt, as the prefill worker reports; 0 without one."""
    cached: int | None = None
    """Cached ones of them; None if unknown."""
    tail: str = ""
    """Name of the prompt's last full block, as in `PromptReport`."""
    fallback: Fallback | None = None
    """Why the decode worker computes the prompt although the grant has a prefill worker."""

    beside: asyncio.Task[None] | None = None
    """The prefill worker's half, where both workers get the request at once."""
    prefill_lost: str = ""
    """The cause for which that half failed; empty if it did not."""

    def close(self) -> None:
        """End what still runs beside the answer."""
        if self.beside is not None:
            self.beside.cancel()

    def __post_init__(self) -> None:
        self.started = self.clock()


class EngineDriver(Protocol):
    """The protocol of one kind of engine."""

    kind: EngineKind

    async def send(self, call: Call) -> UpstreamExchange:
        """
        Send the request to the workers of the grant; returns the exchange with the decode worker.

        A prefill worker that fails sets `call.fallback`, and the decode worker computes the prompt. Raises
        UpstreamLost if the decode worker is lost.
        """
        ...

    def stream(self, call: Call) -> EventStream | None:
        """The reader of a streamed response; None where the end of a stream cannot be detected."""
        ...

    def report(
        self, call: Call, given: Headers, events: EventStream | None, opening: bytes
    ) -> PromptReport | None:
        """
        The report of the prompt, once the response has begun; None if nothing is known.

        `given` are the headers, `opening` is the first part of the response.
        """
        ...

    def whole(self, call: Call, status: int, body: bytes) -> bytes:
        """
        A whole response as clients of OpenAI's API expect it; errors are translated.

        Raises UpstreamLost if the worker gave the answer up.
        """
        ...

    def cached_tokens(self, events: EventStream | None) -> int | None:
        """Cached tokens of the prompt, where only the end of a stream reports them; None if unknown."""
        ...

    def resume_state(self, call: Call, events: EventStream | None) -> ResumeState | None:
        """The state from which another worker continues the stream; None if none can."""
        ...


class EngineChecks(Protocol):
    """The health checks of one worker, by one engine. Keeps what was learned from one to the next."""

    async def load(self) -> tuple[Load, str]:
        """
        The worker's load, and why it takes no requests, as a clause (empty if it does).

        Raises UpstreamLost, and `INVALID_REPLY_ERRORS` for an invalid reply.
        """
        ...
