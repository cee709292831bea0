"""
What became of one request, read from what arrived when all is over.

An answer counts only if it is whole: a stream that ends without `[DONE]` was cut, whatever its status.
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
    """Times in seconds; those of a request that failed say nothing."""

    due_s: float
    """Since the load began: when it was to be sent."""
    late_s: float
    """How much later it was sent."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """From one arrival of text to the next."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Of what kind; empty if all is well."""
    message: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 if there was one only."""
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def read(answer: Answer, due_s: float, late_s: float) -> Outcome:
    """Tokens are counted by the server's own usage, or by arrivals where it has none."""
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
            said = str((chunk["error"] or {}).get("message", ""))
            return Outcome(due_s=due_s, late_s=late_s, error="error in the stream", message=said[:300])
        usage = chunk.get("usage") or usage
        if any(map(_says, chunk.get("choices") or ())):
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
    """Kind and words; empty for an answer that can be read."""
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
    """What the `data:` lines of a stream say, and when each was there to its end."""
    rest = b""
    for moment, part in answer.arrivals:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()


def _says(choice: dict[str, Any]) -> bool:
    """Whether it brings anything of the answer; its first chunk may just say who speaks."""
    delta = choice.get("delta") or {}
    said = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return bool(said or delta.get("tool_calls"))
