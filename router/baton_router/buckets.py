"""
What a tenant may use in a minute, and what is left of it: token buckets, and a count of open requests.

A bucket fills evenly and holds one minute's worth. A request takes what it is expected to use when it is
admitted, of all buckets or of none, and gives back, or still pays, the difference when it ends: so that
many small requests at once cannot use what each of them alone would be allowed. One that needs more than
a bucket holds goes when the bucket is full, and leaves a debt.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_router.tenants import Limits

MINUTE_S = 60.0


class Bucket:
    """So many of something in a minute."""

    __slots__ = ("_filled", "_level", "size")

    def __init__(self, size: float, now: float) -> None:
        self.size = size
        self._level = size
        self._filled = now

    def level(self, now: float) -> float:
        """What can be taken; below 0 for a debt."""
        passed = max(0.0, now - self._filled)
        self._filled = max(self._filled, now)
        self._level = min(self.size, self._level + passed * self.size / MINUTE_S)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much is there, or the bucket is full; 0 if it is now."""
        missing = min(amount, self.size) - self.level(now)
        return max(0.0, missing * MINUTE_S / self.size)

    def take(self, amount: float, now: float) -> None:
        """Whether or not it is there. A negative amount is given back; what does not fit is lost."""
        self._level = min(self.size, self.level(now) - amount)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that a request meets."""

    limit: str
    """`requests`, `tokens` or `streams`."""
    most: int
    wait_s: float
    """Until it would be admitted, if nobody else came; a guess where others have to end first."""


STREAM_WAIT_S = 1.0
"""What is guessed for the end of one of the tenant's own requests."""


class Quota:
    """One tenant's buckets."""

    __slots__ = ("_requests", "_tokens", "limits", "open")

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)
        self.open = 0
        """Requests that were admitted and have not ended."""

    def admit(self, tokens: int, now: float) -> Refusal | None:
        """Take one request of so many tokens, or say what forbids it and take nothing."""
        limits = self.limits
        if limits.streams is not None and self.open >= limits.streams:
            return Refusal("streams", limits.streams, STREAM_WAIT_S)
        if self._requests is not None and (wait := self._requests.wait_s(1, now)):
            return Refusal("requests", int(self._requests.size), wait)
        if self._tokens is not None and (wait := self._tokens.wait_s(tokens, now)):
            return Refusal("tokens", int(self._tokens.size), wait)
        if self._requests is not None:
            self._requests.take(1, now)
        self.reopen(tokens, now)
        return None

    def reopen(self, tokens: int, now: float) -> None:
        """A request that was admitted goes on elsewhere: it uses tokens, and is not asked whether it may."""
        self.open += 1
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def settle(self, reserved: int, used: int, now: float) -> None:
        """A request ends for which `reserved` tokens were taken, and which used so many."""
        self.open -= 1
        if self._tokens is not None:
            self._tokens.take(used - reserved, now)

    def cancel(self, reserved: int, now: float) -> None:
        """A request was admitted here and then refused for another reason: it never was."""
        self.settle(reserved, 0, now)
        if self._requests is not None:
            self._requests.take(-1, now)

    def limited(self, limits: Limits, now: float) -> None:
        """Its limits are others from now on. What was used of a bucket stays used."""
        self._requests = _resized(self._requests, limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)
        self.limits = limits


def _bucket(size: int | None, now: float) -> Bucket | None:
    return None if size is None else Bucket(size, now)


def _resized(before: Bucket | None, size: int | None, now: float) -> Bucket | None:
    after = _bucket(size, now)
    if before is not None and after is not None:
        after.take(before.size - before.level(now), now)
    return after
