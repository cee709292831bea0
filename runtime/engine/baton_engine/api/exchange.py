"""
Record of one API request from arrival to end, for the access log and `/debug/requests`.

It contains numbers and names, never text of prompts or answers.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from baton_api.prompt_report import PromptReport
from baton_api.trace_context import TraceContext
from baton_engine.requests import RelayRecord
from baton_engine.tracing import WorkerTrace

HISTORY_LIMIT = 100
_KEY = "baton.exchange"

History = MutableSequence["Exchange"]
"""The latest exchanges of generation and embedding requests, oldest first."""


def new_history() -> History:
    return deque(maxlen=HISTORY_LIMIT)


@dataclass(slots=True)
class Exchange:
    """Filled in while the request is processed. Times are of the monotonic clock unless stated otherwise."""

    request_id: str
    method: str
    path: str
    received: float = field(default_factory=time.time)
    """Seconds since 1970."""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    """Status of the response; 499 if the client disconnected before it."""
    client: str = ""
    """Name of the API key, if it has a name."""
    tenant: str = ""
    """Of the router, or the request's id: whose sequences take turns with those of others."""
    answer_id: str = ""
    stream: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    relays: list[RelayRecord] = field(default_factory=list)
    report: PromptReport | None = None
    """Report of the first prompt. Set with its first token."""
    trace: TraceContext | None = None
    """Trace context of the request, if it has one."""
    spans: WorkerTrace | None = None
    """Spans that this worker creates."""

    @property
    def onward(self) -> str:
        """`traceparent` of requests to prefill workers; empty without a trace."""
        if self.spans is not None:
            return self.spans.parent
        return "" if self.trace is None else self.trace.parent.decode()

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started

    @property
    def total_s(self) -> float | None:
        return None if self.ended is None else self.ended - self.started

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token, over all choices."""
        if self.first_token is None or self.last_token is None or self.last_token <= self.first_token:
            return None
        return (self.completion_tokens - 1) / (self.last_token - self.first_token)

    def body(self) -> dict[str, Any]:
        """Return the entry of `/debug/requests`."""
        return {
            "request_id": self.request_id,
            "client": self.client,
            "id": self.answer_id,
            "path": self.path,
            "status": self.status,
            "stream": self.stream,
            "received": self.received,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self.finish_reasons,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "relays": [dataclasses.asdict(relay) for relay in self.relays],
        }

    def line(self) -> str:
        """Return the line of the access log."""
        parts = [f"{self.method} {self.path} {self.status}", f"request={self.request_id}"]
        if self.client:
            parts.append(f"client={self.client}")
        if self.prompt_tokens is not None:
            parts += [
                f"prompt={self.prompt_tokens}",
                f"cached={self.cached_tokens}",
                f"completion={self.completion_tokens}",
            ]
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.3f}s")
        if self.total_s is not None:
            parts.append(f"total={self.total_s:.3f}s")
        return " ".join(parts)


def open_exchange(scope: Scope, request_id: str) -> Exchange:
    exchange = scope[_KEY] = Exchange(request_id, scope["method"], scope["path"])
    return exchange


def exchange_of(scope: Scope) -> Exchange:
    exchange = scope[_KEY]
    assert isinstance(exchange, Exchange)
    return exchange
