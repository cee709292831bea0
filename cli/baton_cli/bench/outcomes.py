"""
Parse the response of a request after the load has ended.

Only complete responses count: a stream without `[DONE]` was cut, whatever its status.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton_cli.bench.connection import Answer, explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a request. The times of a failed request are not valid."""

    due_s: float
    """Scheduled start, from the start of the load."""
    late_s: float
    """Delay of the actual start."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Times between arrivals of text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Kind of the error. Empty after a success."""
    message: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first one; 0 for a single token."""
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def read(answer: Answer, due_s: float, late_s: float) -> Outcome:
    """Parse a response. Token counts come from `usage`, or else from the number of arrivals."""
    error, message = failure(answer)
    if error:
        return Outcome(due_s=due_s, late_s=late_s, error=error, message=message[:300])
    times: list[float] = []
    usage: dict[str, Any] = {}
    done = False
    last = answer.sent
    for moment, data in events(answer):
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            message = str((chunk["error"] or {}).get("message", ""))
            return Outcome(due_s=due_s, late_s=late_s, error="error in the stream", message=message[:300])
        usage = chunk.get("usage") or usage
        if any(map(_has_text, chunk.get("choices") or ())):
            times.append(moment)
            last = moment
    if not done:
        return Outcome(due_s=due_s, late_s=late_s, error="cut", message="The stream ended without [DONE].")
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        due_s=due_s,
        late_s=late_s,
        ttft_s=(times[0] if times else last) - answer.sent,
        total_s=last - answer.sent,
        gaps_s=tuple(later - before for before, later in itertools.pairwise(times)),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or len(times),
    )


def failure(answer: Answer) -> tuple[str, str]:
    """Return kind and message of an error. Empty for a response that can be parsed."""
    if answer.failure.startswith("no connection"):
        return "no connection", answer.failure
    if answer.failure.startswith("no end"):
        return "too slow", answer.failure
    if answer.status and answer.status != 200:
        return f"status {answer.status}", explained(answer)
    if answer.failure:
        return "cut" if answer.arrivals else "connection lost", answer.failure
    return "", ""


def events(answer: Answer) -> Iterator[tuple[float, bytes]]:
    """Yield the `data:` lines of a stream with their arrival times."""
    rest = b""
    for moment, part in answer.arrivals:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()


def _has_text(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has text or tool calls. The first one may contain only the role."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return bool(text or delta.get("tool_calls"))
