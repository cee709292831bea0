"""
Choice of draft tokens by their cost: the measured time of forward passes, by their number of tokens.

A pass of few tokens is limited by memory bandwidth, and further tokens are nearly free. A pass of many tokens
is limited by arithmetic, and each further token takes its share. Both are measured during operation, because
they depend on the model, the machine and its other load.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

FALL, RISE = 0.5, 0.1
"""Weights of a measurement below and above the known time. A pass that other processes slow down
therefore changes it little."""

UNKNOWN_SLOPE = 0.25
"""Time per token beyond the largest measured pass, relative to its time per token. It is low, so that larger
passes are tried."""

LIFETIME = 1000
"""Passes after which a time that was not measured again is dropped, because contexts have grown or the
machine's load has changed."""

LOOKAHEAD = 16
"""Number of further tokens that are tried without an improvement. The kernels compute tokens in tiles, so
the next token may cost much and those after it little."""

MARGIN = 0.05
"""Share of the time per token that drafts must save. The estimates err by about as much, and the best of many
estimates is more likely to be too low."""

EXACT = 8
"""Up to this number of tokens each one has its own time."""


class PassTimes:
    """Seconds of forward passes without prompt tokens, by number of tokens."""

    def __init__(self, limit: int = sys.maxsize) -> None:
        """`limit` is the maximum size of a pass."""
        self._limit = limit
        self.delay = 0.0
        """Seconds that a step with drafts takes beside its pass, if other steps overlap with theirs."""
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._measured: dict[int, int] = {}
        self._passes = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Record a pass of `tokens` tokens."""
        size = _rounded(tokens)
        seconds *= size / tokens if size > EXACT else 1.0
        average = self._seconds.get(size)
        if average is None:
            self._sizes.insert(bisect_left(self._sizes, size), size)
            average = seconds
        self._seconds[size] = average + (seconds - average) * (FALL if seconds < average else RISE)
        self._measured[size] = self._passes + 1
        self.age()

    def age(self) -> None:
        """Count a pass, or one instead of which none is measured here: times are dropped by both."""
        self._passes += 1
        self.delay *= 1 - 1 / LIFETIME  # so that drafts are tried again
        if self._passes % LIFETIME == 0:
            self._forget()

    def add_delay(self, seconds: float) -> None:
        """Record the time of a step with drafts beside its pass."""
        self.delay += (seconds - self.delay) * (FALL if seconds < self.delay else RISE)

    def reach(self, tokens: int) -> int:
        """
        Return the maximum size of a pass with drafts, which has `tokens` tokens without them.

        It is at most twice the size of the largest measured pass, because the estimates beyond it are low.
        """
        return min(self._limit, 2 * max(tokens, self._sizes[-1] if self._sizes else 0))

    def of(self, tokens: int) -> float:
        """Return the estimated seconds of a pass of `tokens` tokens; 0 before the first measurement."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 0.0
        above = bisect_right(sizes, tokens)
        if not above:
            return seconds[sizes[0]]
        low = sizes[above - 1]
        if above == len(sizes):
            return seconds[low] * (1 + UNKNOWN_SLOPE * (tokens - low) / low)
        high = sizes[above]
        share = (tokens - low) / (high - low)
        return seconds[low] + share * max(0.0, seconds[high] - seconds[low])

    def _forget(self) -> None:
        stale = [size for size, at in self._measured.items() if at <= self._passes - LIFETIME]
        for size in stale:
            del self._seconds[size], self._measured[size]
        self._sizes = sorted(self._seconds)


def _rounded(tokens: int) -> int:
    """Round down to a multiple of an eighth of the next lower power of two."""
    if tokens <= EXACT:
        return tokens
    step = 1 << (tokens.bit_length() - 4)
    return tokens // step * step


def common_length(
    acceptances: Sequence[float], most: int, tokens: int, times: PassTimes, draft_times: PassTimes
) -> int:
    """
    Return the number of draft tokens of each row of a draft model, so that tokens per second are highest.

    `acceptances` has the probability of each row that a draft token is accepted if those before it are.
    `draft_times` are those of the draft model. `tokens` is the size of the pass without drafts.
    """
    rows = len(acceptances)
    best, gain, least = 0, 0.0, (1 - MARGIN) * times.of(tokens) / tokens
    chances = list(acceptances)
    for count in range(1, most + 1):
        size = tokens + count * rows
        if size > times.reach(tokens):
            break
        gain += sum(chances)
        chances = [chance * rate for chance, rate in zip(chances, acceptances, strict=True)]
        token_s = (times.of(size) + count * draft_times.of(rows)) / (tokens + gain)
        if token_s < least:
            best, least = count, token_s
    return best


def allot(chances: Sequence[Sequence[float]], tokens: int, times: PassTimes) -> list[int]:
    """
    Return the number of draft tokens for each row, so that tokens per second are highest.

    `chances` has the probabilities of acceptance of each row's draft, which do not increase. `tokens` is the
    size of the pass without drafts, one result for each row of it.
    """
    counts = [0] * len(chances)
    heap = [(-row[0], index) for index, row in enumerate(chances) if row]
    heapify(heap)
    best, gain = 0, 0.0
    order: list[int] = []
    least = (1 - MARGIN) * times.of(tokens) / tokens
    most = times.reach(tokens) - tokens
    while heap and len(order) < min(most, best + LOOKAHEAD):
        chance, index = heap[0]
        gain -= chance
        order.append(index)
        counts[index] += 1
        row = chances[index]
        if counts[index] < len(row):
            heapreplace(heap, (-row[counts[index]], index))
        else:
            heappop(heap)
        token_s = (times.of(tokens + len(order)) + times.delay) / (tokens + gain)
        if token_s < least:
            best, least = len(order), token_s
    for index in order[best:]:
        counts[index] -= 1
    return counts
