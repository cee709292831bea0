"""
Quotas of tenants: token buckets and a count of open requests, reserved at admission and settled at the end.

A bucket fills evenly and holds one minute's worth. A request reserves its expected use from all buckets or
from none: the prompt by its bytes, the answer by the usual length or by its own limit if that is less. At
the end the difference is returned or charged, so that many small requests at once cannot exceed the limit
together. A request that needs more than a bucket holds waits until the bucket is full, and leaves a debt.

A request that resumes at another worker was admitted before: it reserves again without a check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton_api.errors import RateLimited
from baton_router.scheduling.picker import PickRequest
from baton_router.tenants.tenants import TenantLimits
from baton_router.workers.worker_state import BYTES_PER_TOKEN


@dataclass(slots=True)
class QuotaReservation:
    """What one request may use. It is cancelled or settled, once."""

    quota: TenantQuota
    prompt: int
    answer: int
    anew: bool
    """Whether it was admitted here, and had not been before."""

    def cancel(self, now: float) -> None:
        """It was refused for another reason."""
        if self.anew:
            self.quota.cancel(self.prompt + self.answer, now)
        else:
            self.quota.settle(self.prompt + self.answer, 0, now)

    def settle(self, prompt: int, answer: int | None, now: float) -> None:
        """It has ended. `answer` is None if nobody has counted its tokens."""
        used = prompt + (self.answer if answer is None else answer)
        self.quota.settle(self.prompt + self.answer, used, now)


class Quotas:
    """Of all tenants that have limits."""

    def __init__(self, rejects: Counter[str], answer_tokens: Callable[[], float]) -> None:
        """Refusals are counted in `rejects`. `answer_tokens` says how many answers usually have."""
        self._rejects = rejects
        self._answer_tokens = answer_tokens
        self._quotas: dict[str, TenantQuota] = {}

    def open(self, tenant: str) -> int:
        """How many requests of a tenant are admitted and have not ended."""
        quota = self._quotas.get(tenant)
        return quota.open if quota else 0

    def reserve(self, request: PickRequest, now: float) -> QuotaReservation:
        """Raises RateLimited."""
        assert request.limits is not None
        quota = self._quotas.get(request.tenant)
        if quota is None:
            quota = self._quotas[request.tenant] = TenantQuota(request.limits, now)
        elif quota.limits != request.limits:
            quota.limited(request.limits, now)
        prompt = math.ceil(request.prompt.bytes / BYTES_PER_TOKEN)
        expected = math.ceil(self._answer_tokens())
        answer = expected if request.answer_tokens is None else min(expected, request.answer_tokens)
        if request.retried:
            quota.reopen(prompt + answer, now)
        elif refusal := quota.admit(prompt + answer, now):
            self._rejects[refusal.limit] += 1
            raise RateLimited(refusal.limit, refusal.most, math.ceil(refusal.wait_s))
        return QuotaReservation(quota, prompt, answer, not request.retried)


MINUTE_S = 60.0


class TokenBucket:
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
class QuotaRejection:
    """The limit that a request meets."""

    limit: str
    """`requests`, `tokens` or `streams`."""
    most: int
    wait_s: float
    """Until it would be admitted, if nobody else came; a guess where others have to end first."""


STREAM_WAIT_S = 1.0
"""What is guessed for the end of one of the tenant's own requests."""


class TenantQuota:
    """One tenant's buckets."""

    __slots__ = ("_requests", "_tokens", "limits", "open")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)
        self.open = 0
        """Requests that were admitted and have not ended."""

    def admit(self, tokens: int, now: float) -> QuotaRejection | None:
        """Take one request of so many tokens, or say what forbids it and take nothing."""
        limits = self.limits
        if limits.streams is not None and self.open >= limits.streams:
            return QuotaRejection("streams", limits.streams, STREAM_WAIT_S)
        if self._requests is not None and (wait := self._requests.wait_s(1, now)):
            return QuotaRejection("requests", int(self._requests.size), wait)
        if self._tokens is not None and (wait := self._tokens.wait_s(tokens, now)):
            return QuotaRejection("tokens", int(self._tokens.size), wait)
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

    def limited(self, limits: TenantLimits, now: float) -> None:
        """Its limits are others from now on. What was used of a bucket stays used."""
        self._requests = _resized(self._requests, limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)
        self.limits = limits


def _bucket(size: int | None, now: float) -> TokenBucket | None:
    return None if size is None else TokenBucket(size, now)


def _resized(before: TokenBucket | None, size: int | None, now: float) -> TokenBucket | None:
    after = _bucket(size, now)
    if before is not None and after is not None:
        after.take(before.size - before.level(now), now)
    return after
