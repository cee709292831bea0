"""What lately became of requests, read off routers that count since they began."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton_operator.rollout import Tried
from baton_operator.tries import WINDOW_S, RouterTries

NAME = "baton_router_generation_requests_total"


class Routers:
    """Routers that count, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: dict[str, dict[tuple[str, str], int]] = {}
        self.tries = RouterTries(self.read, lambda: self.now)

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
        return "\n".join(lines) + "\n"

    async def lately(self, *addresses: str) -> Mapping[str, Tried]:
        return await self.tries.lately("uid", {f"pod-{one}": one for one in addresses})


@pytest.fixture
def routers() -> Routers:
    return Routers()


async def test_what_was_counted_before_the_first_look_says_nothing(routers: Routers) -> None:
    routers.counts["a"] = {("old", "passed"): 900, ("old", "failed"): 100}
    assert await routers.lately("a") == {"old": Tried(0, 0)}
    routers.counts["a"] = {("old", "passed"): 907, ("old", "failed"): 101, ("new", "failed"): 5}
    assert await routers.lately("a") == {"old": Tried(8, 1), "new": Tried(5, 5)}


async def test_all_routers_are_heard_and_one_that_is_silent_is_left_out(routers: Routers) -> None:
    routers.counts = {"a": {("new", "passed"): 0}, "b": {("new", "passed"): 0}}
    await routers.lately("a", "b")
    routers.counts = {"a": {("new", "passed"): 6}, "b": {("new", "failed"): 4}}
    assert await routers.lately("a", "b") == {"new": Tried(10, 4)}
    del routers.counts["b"]
    assert await routers.lately("a", "b") == {"new": Tried(6, 0)}
    routers.counts.clear()
    assert await routers.lately("a", "b") == {}


async def test_what_is_long_ago_is_forgotten(routers: Routers) -> None:
    routers.counts["a"] = {("new", "failed"): 0}
    await routers.lately("a")
    routers.counts["a"] = {("new", "failed"): 9}
    assert await routers.lately("a") == {"new": Tried(9, 9)}
    routers.now += WINDOW_S + 1
    assert await routers.lately("a") == {"new": Tried(0, 0)}


async def test_a_router_that_begins_anew_counts_from_nothing(routers: Routers) -> None:
    routers.counts["a"] = {("new", "passed"): 50}
    await routers.lately("a")
    routers.counts["a"] = {("new", "passed"): 3}
    assert await routers.lately("a") == {"new": Tried(0, 0)}


async def test_a_service_whose_rollout_has_ended_begins_anew(routers: Routers) -> None:
    routers.counts["a"] = {("new", "failed"): 0}
    await routers.lately("a")
    routers.counts["a"] = {("new", "failed"): 9}
    routers.tries.forget("uid")
    assert await routers.lately("a") == {"new": Tried(0, 0)}
