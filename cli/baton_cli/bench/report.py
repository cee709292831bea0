"""
Read responses after the load has ended, and aggregate them: percentiles, throughput, errors and goodput.

Only complete responses count: a stream without `[DONE]` was cut, whatever its status.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from baton_cli.bench.connection import Answer, explained
from baton_cli.bench.load import ClientCost, LoadResult


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


SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Objective:
    """Maximum times of a good response in seconds. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        if outcome.error:
            return False
        pairs = (
            (outcome.ttft_s, self.ttft_s),
            (outcome.tpot_s, self.tpot_s),
            (outcome.total_s, self.total_s),
        )
        return all(limit is None or measured <= limit for measured, limit in pairs)


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a duration, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Aggregate values. Returns None without values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, share) for share in SHARES)
        return cls(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The results of one load level."""

    load: str
    """Such as `8 clients` or `2 requests/s`."""
    value: float
    """Clients, requests per second, or speed relative to the trace."""
    seconds: float
    requests: int
    failed: int
    errors: Mapping[str, int]
    """Number of errors by kind."""
    example: str
    """The message of the first error."""
    requests_per_s: float
    """Complete responses only."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    prompt_tokens: float
    """Mean per request."""
    output_tokens: float
    cached_share: float
    """Ratio of prompt tokens from a prefix cache."""
    ttft: Spread | None
    tpot: Spread | None
    """Mean time per token after the first one, per request."""
    gap: Spread | None
    """Time between arrivals of text."""
    total: Spread | None
    good_share: float
    """Ratio of requests that met the objectives."""
    goodput_per_s: float
    """Requests per second that met the objectives."""
    client: ClientCost
    client_is_bottleneck: bool


def level(load: str, value: float, played: LoadResult, objective: Objective) -> Level:
    """Aggregate the outcomes of one load level."""
    outcomes, seconds = played.outcomes, played.seconds
    succeeded = [outcome for outcome in outcomes if not outcome.error]
    failed = [outcome for outcome in outcomes if outcome.error]
    good = sum(map(objective.kept, outcomes))
    prompt = sum(outcome.prompt_tokens for outcome in succeeded)
    output = sum(outcome.output_tokens for outcome in succeeded)
    return Level(
        load=load,
        value=value,
        seconds=seconds,
        requests=len(outcomes),
        failed=len(failed),
        errors=dict(Counter(outcome.error for outcome in failed).most_common()),
        example=failed[0].message if failed else "",
        requests_per_s=len(succeeded) / seconds,
        output_tokens_per_s=output / seconds,
        prompt_tokens_per_s=prompt / seconds,
        prompt_tokens=prompt / len(succeeded) if succeeded else 0.0,
        output_tokens=output / len(succeeded) if succeeded else 0.0,
        cached_share=sum(outcome.cached_tokens for outcome in succeeded) / prompt if prompt else 0.0,
        ttft=Spread.of(outcome.ttft_s for outcome in succeeded),
        tpot=Spread.of(outcome.tpot_s for outcome in succeeded if outcome.output_tokens > 1),
        gap=Spread.of(gap for outcome in succeeded for gap in outcome.gaps_s),
        total=Spread.of(outcome.total_s for outcome in succeeded),
        good_share=good / len(outcomes) if outcomes else 0.0,
        goodput_per_s=good / seconds,
        client=played.client,
        client_is_bottleneck=played.client.is_bottleneck,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """
    Interpolate linearly between the nearest values. `ordered` is not empty.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def significant(value: float, digits: int = 4) -> str:
    """
    Return a number with this many digits that mean something, and never an exponent.

    >>> significant(1.23456), significant(14_106.3), significant(0.0000123456), significant(120, 2)
    ('1.235', '14,110', '0.00001235', '120')
    """
    return f"{Decimal(f'{value:.{digits}g}'):,f}"
