"""Aggregate outcomes: percentiles, throughput, errors and goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from baton_cli.bench.load import ClientCost, LoadResult, Outcome

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
