"""
Quotas of tenants: token buckets and a count of open requests, reserved at admission and settled at the end.

A bucket fills evenly and holds one minute's worth. A request reserves its expected use from all buckets or
from none. Prompts count by their bytes, each choice by the usual length, or by its own limit if that is less
(`RequestCost`). At the end the difference is returned or charged, so that many small requests at once cannot
exceed the limit together. A request that needs more than a bucket holds waits until the bucket is full, and
leaves a debt; one with more choices than may be open waits until none is.

A request that resumes at another worker was admitted before: it reserves again without a check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton_api.errors import RateLimited
from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN
from baton_router.requests.picker import PickRequest
from baton_router.tenants.tenants import TenantLimits


@dataclass(slots=True)
class QuotaReservation:
    """Expected use of one request. It is cancelled or settled, once."""

    quota: TenantQuota
    tokens: int
    choices: int
    anew: bool
    """Whether it was admitted here, and not resumed."""

    def cancel(self, now: float) -> None:
        """Undo the reservation: the request was rejected for another reason."""
        if self.anew:
            self.quota.cancel(self.tokens, self.choices, now)
        else:
            self.quota.settle(self.tokens, 0, self.choices, now)

    def settle(self, used: int, now: float) -> None:
        """Settle at the end, when `used` tokens are charged."""
        self.quota.settle(self.tokens, used, self.choices, now)


class Quotas:
    """The quotas of all tenants with limits."""

    def __init__(self, rejects: Counter[str], answer_tokens: Callable[[], float]) -> None:
        """Rejections are counted in `rejects`. `answer_tokens` gives the usual length of an answer."""
        self._rejects = rejects
        self._answer_tokens = answer_tokens
        self._quotas: dict[str, TenantQuota] = {}

    def open(self, tenant: str) -> int:
        """Choices of a tenant's admitted requests that have not ended."""
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
        cost = request.cost
        prompt = math.ceil(request.prompt.bytes / BYTES_PER_TOKEN) + cost.others()
        tokens = prompt + math.ceil(cost.answer_tokens(self._answer_tokens()))
        choices = max(1, cost.choices)
        if request.retried:
            quota.reopen(tokens, choices, now)
        elif refusal := quota.admit(tokens, choices, now):
            self._rejects[refusal.limit] += 1
            raise RateLimited(refusal.most, refusal.unit, math.ceil(refusal.wait_s))
        return QuotaReservation(quota, tokens, choices, not request.retried)


MINUTE_S = 60.0


class TokenBucket:
    """A rate limit per minute."""

    __slots__ = ("_filled", "_level", "size")

    def __init__(self, size: float, now: float) -> None:
        self.size = size
        self._level = size
        self._filled = now

    def level(self, now: float) -> float:
        """Available amount; below 0 for a debt."""
        passed = max(0.0, now - self._filled)
        self._filled = max(self._filled, now)
        self._level = min(self.size, self._level + passed * self.size / MINUTE_S)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available or the bucket is full; 0 if now."""
        missing = min(amount, self.size) - self.level(now)
        return max(0.0, missing * MINUTE_S / self.size)

    def take(self, amount: float, now: float) -> None:
        """Take without a check. A negative amount is returned; the surplus is lost."""
        self._level = min(self.size, self.level(now) - amount)


@dataclass(frozen=True, slots=True)
class QuotaRejection:
    """The limit that a request exceeds."""

    limit: str
    """The reason in `metrics.ROUTER_REJECTS`."""
    most: int
    unit: str
    """Of `most`."""
    wait_s: float
    """Seconds until it would be admitted without competition; a guess for streams."""


STREAM_WAIT_S = 1.0
"""Guessed seconds until one of the tenant's own requests ends."""


class TenantQuota:
    """One tenant's buckets."""

    __slots__ = ("_requests", "_tokens", "limits", "open")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)
        self.open = 0
        """Choices of admitted requests that have not ended."""

    def admit(self, tokens: int, choices: int, now: float) -> QuotaRejection | None:
        """Take one request, or return the exceeded limit and take nothing."""
        limits = self.limits
        if limits.streams is not None and self.open and self.open + choices > limits.streams:
            return QuotaRejection("streams", limits.streams, "requests at once", STREAM_WAIT_S)
        if self._requests is not None and (wait := self._requests.wait_s(1, now)):
            return QuotaRejection("requests", int(self._requests.size), "requests per minute", wait)
        if self._tokens is not None and (wait := self._tokens.wait_s(tokens, now)):
            return QuotaRejection("tokens", int(self._tokens.size), "tokens per minute", wait)
        if self._requests is not None:
            self._requests.take(1, now)
        self.reopen(tokens, choices, now)
        return None

    def reopen(self, tokens: int, choices: int, now: float) -> None:
        """Charge a resumed request, without a check."""
        self.open += choices
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def settle(self, reserved: int, used: int, choices: int, now: float) -> None:
        """End a request that reserved `reserved` tokens and used `used`."""
        self.open -= choices
        if self._tokens is not None:
            self._tokens.take(used - reserved, now)

    def cancel(self, reserved: int, choices: int, now: float) -> None:
        """Undo the admission of a request that was rejected for another reason."""
        self.settle(reserved, 0, choices, now)
        if self._requests is not None:
            self._requests.take(-1, now)

    def limited(self, limits: TenantLimits, now: float) -> None:
        """Apply new limits; past use still counts."""
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
