"""Routing policies, by their choice among real offers, and by name."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.scheduling.policies import POLICIES, LeastRequests, PredictedTime, RoutingPolicy, policy_of
from baton_router.workers.worker import Workers
from tests.router.fake_worker import FakeWorker
from tests.router.running import QUESTION, running_router
from tests.router.test_placement_planner import worker

PROMPT = chunk_text(b"A prompt of some length. " * 400, 7)


@pytest.mark.parametrize(
    ("policy", "chosen"), [(PredictedTime(), "the holder"), (LeastRequests(), "the idle one")]
)
def test_policy_decides_between_a_cached_prefix_and_fewer_requests(
    policy: RoutingPolicy, chosen: str
) -> None:
    names = {"the holder": worker(Role.BOTH, 8100), "the idle one": worker(Role.BOTH, 8101)}
    workers = Workers(tuple(names.values()))
    planner = PlacementPlanner(workers, random.Random(1), 512, policy=policy)
    now = 0.0
    for _ in range(3):  # the holder gets the prompt three times, and generates
        excluded = (names["the idle one"].name,)
        placement = planner.plan("tiny", PROMPT, excluded, now)
        assert placement is not None
        planner.book(placement, now)
        planner.began(placement, None, now + 1)
        now += 2
    placement = planner.plan("tiny", PROMPT, (), now)
    assert placement is not None and placement.pair.decode is names[chosen]


@pytest.mark.parametrize("seed", range(5))
def test_law_least_requests_are_spread_evenly(seed: int) -> None:
    """Whatever the prompts, no worker has two requests more than another one."""
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    workers = Workers(tuple(worker(Role.BOTH, 8100 + number) for number in range(count)))
    planner = PlacementPlanner(workers, rng, 512, policy=LeastRequests())
    placed: Counter[str] = Counter({one.name: 0 for one in workers.decode})
    for number in range(40):
        prompt = chunk_text(rng.randbytes(rng.randint(1, 20_000)), rng.randint(1, 3))
        placement = planner.plan("tiny", prompt, (), float(number))
        assert placement is not None
        planner.book(placement, float(number))
        planner.began(placement, None, number + 0.5)
        placed[placement.pair.decode.name] += 1
        assert max(placed.values()) - min(placed.values()) <= 1


def test_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(SetupError, match=r"'round_robin'.*least-requests, predicted-time"):
        policy_of("round_robin")
    assert {name: type(policy_of(name)) for name in POLICIES} == POLICIES


async def test_router_uses_the_policy_of_its_flag() -> None:
    async with (
        FakeWorker() as one,
        FakeWorker() as two,
        running_router([one, two], policy="least-requests") as router,
    ):
        for _ in range(2):
            assert (await router.post(QUESTION)).status_code == 200
        assert isinstance(router.router.scheduler.planner.policy, LeastRequests)
