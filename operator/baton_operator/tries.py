"""
What lately became of requests at each generation, as the service's routers count it.

It is asked while two generations are there, and counts what was added in the last two minutes: what a router
has seen before says nothing of now. A router that does not answer is left out; if none does, all is well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton_api import metrics
from baton_operator import names
from baton_operator.trial import Tried

log = logging.getLogger(__name__)

WINDOW_S = 120.0
"""Seconds that are looked back."""

ANSWER_S = 3.0
"""Seconds for a router to say what it counts."""

Read = Callable[[str], Awaitable[str]]
"""Gives what is at a URL. Raises OSError, TimeoutError or aiohttp.ClientError."""

Counted = tuple[str, str | float]
"""A revision, and what is counted of it: requests by their result, `passed` or `failed`, and streams by the
seconds within which their first token came."""

Counts = Mapping[str, Mapping[Counted, float]]
"""Of each router, by its pod's name."""


class Tries(Protocol):
    """Knows what becomes of requests."""

    async def lately(self, service: str, routers: Mapping[str, str]) -> Mapping[str, Tried]:
        """By revision, of a service by its UID; `routers` are their addresses by their pods' names."""

    def forget(self, service: str) -> None:
        """There is one generation: what was counted is of no use any more."""


class NoTries:
    """Knows nothing."""

    async def lately(self, service: str, routers: Mapping[str, str]) -> Mapping[str, Tried]:
        return {}

    def forget(self, service: str) -> None: ...


class RouterTries:
    """Reads it off the routers' metrics. `clock` is monotonic."""

    def __init__(self, read: Read, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._seen: defaultdict[str, deque[tuple[float, Counts]]] = defaultdict(deque)

    async def lately(self, service: str, routers: Mapping[str, str]) -> Mapping[str, Tried]:
        said = await asyncio.gather(*map(self._counts, routers.values()))
        counts = {pod: one for pod, one in zip(routers, said, strict=True) if one is not None}
        now, seen = self._clock(), self._seen[service]
        while seen and now - seen[0][0] > WINDOW_S:
            seen.popleft()
        seen.append((now, counts))
        return _added([one for _, one in seen])

    def forget(self, service: str) -> None:
        self._seen.pop(service, None)

    async def _counts(self, address: str) -> Mapping[Counted, float] | None:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{names.ROUTER_PORT}/metrics"
        try:
            return counted(await self._read(url))
        except (OSError, TimeoutError, ValueError, aiohttp.ClientError) as error:
            log.info("%s does not say what becomes of requests: %s", url, error)
            return None


async def read(url: str) -> str:
    """What is there. Raises as `Read` has it."""
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
    async with (
        aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session,
        session.get(url) as answer,
    ):
        text: str = await answer.text()
        return text


def counted(text: str) -> Counter[Counted]:
    """
    What a router counts, all of its processes together. Raises ValueError.

    >>> name = "baton_router_generation_requests_total"
    >>> counted(f'{name}{{revision="6f1c2ab9",result="failed"}} 3.0\\n')
    Counter({('6f1c2ab9', 'failed'): 3.0})
    """
    requests = metrics.ROUTER_GENERATION_REQUESTS.name
    streams = f"{metrics.ROUTER_GENERATION_FIRST_TOKEN.name}_bucket"
    found: Counter[Counted] = Counter()
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name == requests:
                found[one.labels["revision"], one.labels["result"]] += one.value  # type: ignore[assignment]
            elif one.name == streams:
                found[one.labels["revision"], float(one.labels["le"])] += one.value  # type: ignore[assignment]
    return found


def _added(readings: Sequence[Counts]) -> dict[str, Tried]:
    """What each router has counted since it was first read."""
    added: Counter[Counted] = Counter()
    for pod, latest in readings[-1].items():
        first = next(one[pod] for one in readings if pod in one)
        for which, count in latest.items():
            added[which] += round(max(0.0, count - first.get(which, 0.0)))
    return {revision: _tried(revision, added) for revision, _ in added}


def _tried(revision: str, added: Counter[Counted]) -> Tried:
    failed = added[revision, "failed"]
    begun = {what: added[one, what] for one, what in added if one == revision and isinstance(what, float)}
    return Tried(added[revision, "passed"] + failed, failed, begun)
