"""
Rollout health: whether requests to a new revision fail or are slow, from the counters of the routers.

The operator reads the counters while two revisions exist and evaluates the last two minutes. A router that
does not answer is left out. A few failures prove nothing, and neither do failures that the old revision has
as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from baton_api import metrics
from baton_operator import answers, names
from baton_operator.kinds.service_policies import Rollout

FAILURES = 5
"""Minimum failed or slow requests on a new revision before their share counts."""

SLOW_PERCENT = 5
"""Percentage of streams that may be slow."""


@dataclass(frozen=True, slots=True)
class RolloutHealth:
    """Outcomes of the recent requests that routers sent to a revision, whichever revision answered in the
    end.
    """

    requests: int = 0
    failed: int = 0
    first_tokens: Mapping[float, int] = field(default_factory=dict)
    """Streams by upper bound of the time to first token in seconds, cumulative; infinity counts all."""

    @property
    def failing(self) -> float:
        """Share of requests that failed, 0 to 1."""
        return self.failed / self.requests if self.requests else 0.0

    @property
    def streams(self) -> int:
        """Streams that sent a first token."""
        return self.first_tokens.get(math.inf, 0)

    def slow(self, limit_s: float) -> int:
        """Return the streams slower than the first bucket at or above the limit."""
        within = min((bound for bound in self.first_tokens if bound >= limit_s), default=math.inf)
        return self.streams - self.first_tokens.get(within, 0)

    def slowing(self, limit_s: float) -> float:
        """Return the share of slow streams, 0 to 1."""
        return self.slow(limit_s) / self.streams if self.streams else 0.0


def health_failure(policy: Rollout, new: RolloutHealth, old: Sequence[RolloutHealth]) -> str:
    """Return why the health of a new revision is too bad; empty if it is not. It has to be worse than every
    old revision.
    """
    least = min((former.failing for former in old), default=0.0)
    if new.failed >= FAILURES and 100 * new.failing > policy.max_failed_percent and new.failing > least:
        return f"{new.failed} of {new.requests} requests failed"
    limit = policy.max_time_to_first_token
    if limit is None:
        return ""
    limit_s = limit.seconds
    slow, share = new.slow(limit_s), new.slowing(limit_s)
    least = min((former.slowing(limit_s) for former in old), default=0.0)
    if slow >= FAILURES and 100 * share > SLOW_PERCENT and share > least:
        within = f"longer than {limit} to their first token"
        return f"{slow} of {new.streams} streams took {within}"
    return ""


log = logging.getLogger(__name__)

WINDOW_S = 120.0
"""Length of the evaluated window in seconds."""

COUNTERS_LIMIT = 512
"""Maximum counters that are kept of one reading of a router."""

CounterKey = tuple[str, str | float]
"""A revision, and either the result of requests (`passed` or `failed`) or a bucket of the time to first
token."""

RouterCounters = Mapping[str, Mapping[CounterKey, float]]
"""Counters of each router by the name of its pod."""


class RouterHealthSource:
    """Computes health from the metrics of routers. `clock` is monotonic."""

    def __init__(self, read_text: Callable[[str], Awaitable[str]], clock: Callable[[], float]) -> None:
        """`read_text`: `answers.pod_metrics`."""
        self._read = read_text
        self._clock = clock
        self._seen: defaultdict[str, deque[tuple[float, RouterCounters]]] = defaultdict(deque)

    async def recent(self, service: str, routers: Mapping[str, str]) -> Mapping[str, RolloutHealth]:
        """Return the health by revision. `service`: its UID; `routers`: hosts by pod name."""
        replies = await asyncio.gather(*map(self._counts, routers.values()))
        counts = {pod: one for pod, one in zip(routers, replies, strict=True) if one is not None}
        now, seen = self._clock(), self._seen[service]
        while seen and now - seen[0][0] > WINDOW_S:
            seen.popleft()
        seen.append((now, counts))
        return _added([one for _, one in seen])

    def forget(self, service: str) -> None:
        """Forget the counters of a service, which has one revision now."""
        self._seen.pop(service, None)

    async def _counts(self, host: str) -> Mapping[CounterKey, float] | None:
        url = f"http://{host}:{names.ROUTER_METRICS_PORT}/metrics"
        try:
            return parse_counters(await self._read(url))
        except (OSError, TimeoutError, ValueError, aiohttp.ClientError) as error:
            log.info("Cannot read rollout health from %s: %s", url, error)
            return None


def parse_counters(text: str) -> Counter[CounterKey]:
    """
    Return the counters of a router, summed over its processes. Raises ValueError.

    >>> name = "baton_router_revision_requests_total"
    >>> parse_counters(f'{name}{{revision="6f1c2ab9",result="failed"}} 3.0\\n')
    Counter({('6f1c2ab9', 'failed'): 3.0})
    """
    requests = metrics.ROUTER_REVISION_REQUESTS.name
    streams = f"{metrics.ROUTER_REVISION_FIRST_TOKEN.name}_bucket"
    counters: Counter[CounterKey] = Counter()
    for sample in answers.samples(text, requests, streams):
        if not math.isfinite(sample.value):
            continue
        revision = sample.labels.get("revision", "")
        if sample.name == requests:
            counters[revision, sample.labels.get("result", "")] += sample.value  # type: ignore[assignment]
        elif sample.name == streams:
            counters[revision, float(sample.labels.get("le", "inf"))] += sample.value  # type: ignore[assignment]
    if len(counters) > COUNTERS_LIMIT:
        raise ValueError(f"the metrics have {len(counters)} counters; the limit is {COUNTERS_LIMIT}")
    return counters


def _added(samples: Sequence[RouterCounters]) -> dict[str, RolloutHealth]:
    """Return the increase of the counters of each router since its first reading in the window."""
    added: Counter[CounterKey] = Counter()
    for pod, latest in samples[-1].items():
        first = next(sample[pod] for sample in samples if pod in sample)
        for which, count in latest.items():
            added[which] += round(max(0.0, count - first.get(which, 0.0)))
    return {revision: _health(revision, added) for revision, _ in added}


def _health(revision: str, added: Counter[CounterKey]) -> RolloutHealth:
    failed = added[revision, "failed"]
    first_tokens = {
        what: added[name, what] for name, what in added if name == revision and isinstance(what, float)
    }
    return RolloutHealth(added[revision, "passed"] + failed, failed, first_tokens)
