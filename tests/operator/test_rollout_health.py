"""Recent request outcomes, read from routers that count since their start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton_api import metrics
from baton_api.metrics.counters import LabeledHistogram
from baton_operator.cluster.rollout_health import WINDOW_S, RolloutHealth, RouterHealthSource

NAME = metrics.ROUTER_REVISION_REQUESTS.name
FIRST_TOKENS = metrics.ROUTER_REVISION_FIRST_TOKEN.name


class Routers:
    """Routers that count, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: dict[str, dict[tuple[str, str], int]] = {}
        self.first_tokens: dict[str, LabeledHistogram] = defaultdict(
            lambda: LabeledHistogram(metrics.ROUTER_REVISION_FIRST_TOKEN)
        )
        self.source = RouterHealthSource(self.read, lambda: self.now)

    async def read(self, url: str) -> str:
        address = url.removeprefix("http://").partition(":")[0]
        if address not in self.counts:
            raise ConnectionRefusedError(address)
        lines = [f"# TYPE {NAME} counter"]
        for (revision, result), count in self.counts[address].items():
            for process, part in (("0", count // 2), ("1", count - count // 2)):
                lines.append(
                    f'{NAME}{{revision="{revision}",result="{result}",process="{process}"}} {part}.0'
                )
        registry = CollectorRegistry()
        registry.register(self.first_tokens[address])
        return "\n".join(lines) + "\n" + generate_latest(registry).decode()

    async def recent(self, *addresses: str) -> Mapping[str, RolloutHealth]:
        return await self.source.recent("uid", {f"pod-{one}": one for one in addresses})


@pytest.fixture
def routers() -> Routers:
    return Routers()


async def test_rollout_health_counts_before_the_first_read_are_ignored(routers: Routers) -> None:
    routers.counts["a"] = {("old", "passed"): 900, ("old", "failed"): 100}
    assert await routers.recent("a") == {"old": RolloutHealth(0, 0)}
    routers.counts["a"] = {("old", "passed"): 907, ("old", "failed"): 101, ("new", "failed"): 5}
    assert await routers.recent("a") == {"old": RolloutHealth(8, 1), "new": RolloutHealth(5, 5)}


async def test_rollout_health_sums_routers_and_skips_silent_ones(routers: Routers) -> None:
    routers.counts = {"a": {("new", "passed"): 0}, "b": {("new", "passed"): 0}}
    await routers.recent("a", "b")
    routers.counts = {"a": {("new", "passed"): 6}, "b": {("new", "failed"): 4}}
    assert await routers.recent("a", "b") == {"new": RolloutHealth(10, 4)}
    del routers.counts["b"]
    assert await routers.recent("a", "b") == {"new": RolloutHealth(6, 0)}
    routers.counts.clear()
    assert await routers.recent("a", "b") == {}


async def test_streams_are_known_by_how_long_their_first_token_took(routers: Routers) -> None:
    routers.counts = {"a": {}, "b": {}}
    routers.first_tokens["a"].observe(9.0, "new")
    await routers.recent("a", "b")
    for address, seconds in (("a", 0.5), ("a", 2.0), ("a", 2.1), ("b", 7.0), ("b", 1000.0)):
        routers.first_tokens[address].observe(seconds, "new")
    health = (await routers.recent("a", "b"))["new"]
    assert health.streams == 5
    assert [health.slow(limit) for limit in (0.4, 0.5, 1.9, 2.0, 6.5, 300.0, 301.0)] == [5, 4, 3, 3, 1, 1, 0]


async def test_rollout_health_outcomes_outside_the_window_are_dropped(routers: Routers) -> None:
    routers.counts["a"] = {("new", "failed"): 0}
    await routers.recent("a")
    routers.counts["a"] = {("new", "failed"): 9}
    assert await routers.recent("a") == {"new": RolloutHealth(9, 9)}
    routers.now += WINDOW_S + 1
    assert await routers.recent("a") == {"new": RolloutHealth(0, 0)}


async def test_rollout_health_restarted_router_counts_from_zero(routers: Routers) -> None:
    routers.counts["a"] = {("new", "passed"): 50}
    await routers.recent("a")
    routers.counts["a"] = {("new", "passed"): 3}
    assert await routers.recent("a") == {"new": RolloutHealth(0, 0)}


async def test_rollout_health_forgotten_service_starts_from_zero(routers: Routers) -> None:
    routers.counts["a"] = {("new", "failed"): 0}
    await routers.recent("a")
    routers.counts["a"] = {("new", "failed"): 9}
    routers.source.forget("uid")
    assert await routers.recent("a") == {"new": RolloutHealth(0, 0)}
