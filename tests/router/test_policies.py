"""Routing policies, by their choice among real offers, and by name."""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import pytest
from msgspec.structs import replace

from baton_api.workers import Role
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.placement import explain
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.scheduling.policies import POLICIES, LeastRequests, PredictedTime, RoutingPolicy
from baton_router.settings import RouterSettings
from baton_router.workers.worker_list import Workers
from tests.router.fake_worker import FakeWorker
from tests.router.running import QUESTION, running_router
from tests.router.test_placement_planner import worker

REQUEST = PickRequest(model="tiny", prompt=chunk_text(b"A prompt of some length. " * 400, 7))


def some_workers(decodes: int, prefills: int) -> Workers:
    """Decode and prefill workers of which any two can be a pair; without prefill workers, whole ones."""
    role = Role.DECODE if prefills else Role.BOTH
    return Workers(
        tuple(worker(role, 8100 + number) for number in range(decodes)),
        tuple(worker(Role.PREFILL, 8200 + number) for number in range(prefills)),
    )


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
        placement = planner.plan(replace(REQUEST, excluded=excluded), now)
        assert placement is not None
        planner.book(placement, now)
        planner.began(placement, None, now + 1)
        now += 2
    placement = planner.plan(REQUEST, now)
    assert placement is not None and placement.pair.decode is names[chosen]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_law_least_requests_are_spread_evenly(seed: int, pairs: bool) -> None:
    """Whatever the prompts, no worker has two requests more than another one of its role."""
    rng = random.Random(seed)
    workers = some_workers(rng.randint(2, 8), rng.randint(2, 8) if pairs else 0)
    planner = PlacementPlanner(workers, rng, 0 if pairs else 512, policy=LeastRequests())
    generating: Counter[str] = Counter({one.name: 0 for one in workers.decode})
    computing: Counter[str] = Counter({one.name: 0 for one in workers.prefill})
    for number in range(40):
        prompt = chunk_text(rng.randbytes(rng.randint(1, 20_000)), rng.randint(1, 3))
        placement = planner.plan(PickRequest(model="tiny", prompt=prompt), float(number))
        assert placement is not None
        planner.book(placement, float(number))
        generating[placement.pair.decode.name] += 1
        assert max(generating.values()) - min(generating.values()) <= 1
        if pairs:  # its prompt is not computed before the last request is placed
            assert placement.pair.prefill is not None
            computing[placement.pair.prefill.name] += 1
            assert max(computing.values()) - min(computing.values()) <= 1
        else:
            planner.began(placement, None, number + 0.5)


@pytest.mark.parametrize("policy", [PredictedTime(), LeastRequests()], ids=lambda policy: policy.name)
def test_slow_transfer_matters_to_predictions_and_not_to_counts(policy: RoutingPolicy) -> None:
    """The nearer of two decode workers has a request; the transfer to the idle one takes long."""
    workers = some_workers(2, 1)
    near, far = workers.decode
    planner = PlacementPlanner(workers, random.Random(1), 0, policy=policy)
    first = planner.plan(replace(REQUEST, excluded=(far.name,)), 0.0)
    assert first is not None
    planner.book(first, 0.0)
    candidates = planner.candidates("tiny", 0.0)
    assert candidates is not None
    for _ in range(100):
        candidates.transfers[0][candidates.decodes.index(far)].learn(first.tokens, 60.0)
    second = planner.plan(REQUEST, 0.0)
    assert second is not None
    assert second.pair.decode is (near if isinstance(policy, PredictedTime) else far)


def test_prices_are_shown_in_the_unit_of_their_policy() -> None:
    workers = some_workers(2, 0)
    for policy, unit in ((PredictedTime(), "s"), (LeastRequests(), "requests")):
        placement = PlacementPlanner(workers, random.Random(1), 512, policy=policy).plan(REQUEST, 0)
        assert placement is not None
        assert explain(placement)["price_unit"] == unit
        assert all(shown.endswith(f" {unit}") for shown in placement.costs.split(";"))


def test_settings_list_the_policies() -> None:
    field = RouterSettings.model_fields["policy"]
    assert set(get_args(field.annotation)) == set(POLICIES)
    assert POLICIES[field.default] is PredictedTime


async def test_router_uses_the_policy_of_its_flag() -> None:
    async with (
        FakeWorker() as one,
        FakeWorker() as two,
        running_router([one, two], policy="least-requests") as router,
    ):
        for _ in range(2):
            assert (await router.post(QUESTION)).status_code == 200
        assert isinstance(router.router.scheduler.planner.policy, LeastRequests)
