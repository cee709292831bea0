"""The figures of one engine: counted on its thread, read from any."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

RATE_WINDOW_S = 10.0
"""Over about how long rates are averaged."""


class Rate:
    """Events per second, averaged with a weight that falls off exponentially."""

    __slots__ = ("_updated", "_value")

    def __init__(self, now: float) -> None:
        self._value = 0.0
        self._updated = now

    def add(self, count: int, now: float) -> None:
        self._value = self.at(now) + count / RATE_WINDOW_S
        self._updated = now

    def at(self, now: float) -> float:
        return self._value * math.exp(-max(0.0, now - self._updated) / RATE_WINDOW_S)


@dataclass(frozen=True, slots=True)
class Times:
    """A histogram in Prometheus' form."""

    buckets: tuple[tuple[float, int], ...]
    """(upper bound in seconds, how many took no longer), the last bound infinite."""
    total_s: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1]


class Histogram:
    """Counts of durations by bucket."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: upper ones, in seconds, without the infinite one."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def times(self) -> Times:
        bounds = (*self._bounds, math.inf)
        return Times(tuple(zip(bounds, accumulate(self._counts), strict=True)), self._total)


@dataclass(slots=True)
class Totals:
    """Sums since the start. The engine's thread adds; a snapshot copies."""

    prompt_tokens_computed: int = 0
    """Here, by forward passes, what a retraction made necessary again included."""
    prompt_tokens_cached: int = 0
    """Found in the prefix cache at admission."""
    prompt_tokens_looked_for: int = 0
    """There."""
    prompt_tokens_remote: int = 0
    """Brought from a prefill worker."""
    generated_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by `FinishReason`."""
    local_prefills: Counter[str] = field(default_factory=Counter)
    """
    Prompts computed here, by reason: `no_prefill_worker` (none was named),
    `reads_prompt` (more is asked of the prompt than its KV), `short`, `cached` (short but
    for what the prefix cache had), or what a failed fetch gave as its reason, `transfer_failed` at least.
    """

    transfer_failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Fetches that failed, by transport (`none` before the first read) and reason."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """Blocks that were put into quarantine, by transport."""

    def copy(self) -> Totals:
        return Totals(
            prompt_tokens_computed=self.prompt_tokens_computed,
            prompt_tokens_cached=self.prompt_tokens_cached,
            prompt_tokens_looked_for=self.prompt_tokens_looked_for,
            prompt_tokens_remote=self.prompt_tokens_remote,
            generated_tokens=self.generated_tokens,
            retractions=self.retractions,
            steps=self.steps,
            finished=self.finished.copy(),
            local_prefills=self.local_prefills.copy(),
            transfer_failures=self.transfer_failures.copy(),
            quarantined=self.quarantined.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """One moment of one engine: enough for `/load`, `/metrics` and a test's last look."""

    running: int
    """Requests in the batch."""
    queued: int
    """Requests that wait to be admitted."""
    fetching: int
    """Requests whose prompt is being brought from elsewhere, aborted ones that still pin blocks included."""
    held: int
    """Ended requests whose exported blocks have not been released."""
    queued_tokens: int
    """Prompt tokens that have still to be computed here."""
    block_size: int
    total_blocks: int
    """Blocks that requests can have: block 0 is not counted."""
    free_blocks: int
    """Of unknown content."""
    cached_blocks: int
    """Not in use, content known; they count as available."""
    owned_blocks: int
    """In use, the pinned ones included."""
    pinned_blocks: int
    quarantined_blocks: int
    generated_per_s: float
    computed_per_s: float
    """Prompt tokens."""
    totals: Totals
    step_times: Times
    """Whole steps, the forward pass included."""
    forward_times: Times
    """The forward passes alone: the difference of the two is what the engine adds."""
    queue_times: Times
    """Of prompts that are computed here, until their first pass."""
    prefill_times: Times
    """Of the same, from there to their first token."""
    evictions: int = 0
    """Known blocks that were dropped to make room."""
    max_running: int = 0
    """Most requests in the batch."""
    decode_step_s: float = 0.0
    """Of a step that generated tokens and nothing else, averaged over the last ones; 0 before the first."""

    @property
    def available_blocks(self) -> int:
        """Blocks that a new request could have."""
        return self.free_blocks + self.cached_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that is not available."""
        return 1 - self.available_blocks / self.total_blocks
