"""Restoring or computing: what the router expects of a worker with tiers, and what it learns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client.registry import CollectorRegistry

from baton_api import metrics
from baton_api.kv_events import BlockRemoved, BlockStored
from baton_api.workers import PEER, Load, Role
from baton_router.cache.tiers import MEDIA, Tier
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.placement import Placement, explain
from baton_router.scheduling.restoring import Restored, soonest
from baton_router.workers.costs import (
    RELIABLE_AFTER,
    CostPrior,
    RunningAverage,
    TransferCost,
    WorkerKind,
)
from baton_router.workers.worker_state import ACCURACY_REQUESTS, WorkerState
from tests.router.test_placement_planner import Cluster, talk, text

MEMORY, DISK, SHARED = Tier.MEMORY, Tier.DISK, Tier.SHARED
BLOCKS = list(range(1, 313))
"""Of a prompt of 5,000 tokens."""

COST = WorkerKind(CostPrior(prefill=(0.0, 0.1, 0.0))).new_worker()
"""0.1 ms for each token."""


def costs(**token_s: float) -> dict[str, TransferCost]:
    """Seconds per token of each tier, without a start."""
    return {Tier(name): TransferCost(RunningAverage(each), 0.0) for name, each in token_s.items()}


@pytest.mark.parametrize(
    ("hot", "reach", "token_s", "cached", "restored"),
    [
        pytest.param(0, {}, {}, 0, {}, id="nothing"),
        pytest.param(100, {}, {}, 100, {}, id="hot"),
        pytest.param(100, {MEMORY: 900}, {MEMORY: 1e-5}, 900, {MEMORY: 800}, id="restored"),
        pytest.param(100, {MEMORY: 900}, {MEMORY: 2e-4}, 100, {}, id="slower than computing"),
        pytest.param(
            100,
            {MEMORY: 300, DISK: 900},
            {MEMORY: 1e-5, DISK: 5e-5},
            900,
            {MEMORY: 200, DISK: 600},
            id="both tiers",
        ),
        pytest.param(
            100, {MEMORY: 300, DISK: 900}, {MEMORY: 1e-5, DISK: 2e-4}, 300, {MEMORY: 200}, id="slow disk"
        ),
        pytest.param(
            0,
            {MEMORY: 300, DISK: 900},
            {MEMORY: 2e-4, DISK: 1e-6},
            900,
            {MEMORY: 300, DISK: 600},
            id="end pays",
        ),
        pytest.param(100, {MEMORY: 100, DISK: 100}, {MEMORY: 1e-5, DISK: 1e-5}, 100, {}, id="only hot"),
        pytest.param(0, {MEMORY: 2_000}, {MEMORY: 1e-5}, 999, {MEMORY: 999}, id="one token is computed"),
    ],
)
def test_sooner_of_restoring_and_computing(
    hot: int,
    reach: Mapping[Tier, int],
    token_s: Mapping[Tier, float],
    cached: int,
    restored: Mapping[Tier, int],
) -> None:
    plan = soonest(
        COST, costs(**{str(tier): each for tier, each in token_s.items()}), hot, [*reach.items()], 1_000
    )
    assert (plan.cached, dict(plan.restored)) == (cached, restored)
    spent = sum(token_s[tier] * tokens for tier, tokens in restored.items())
    assert plan.seconds == pytest.approx(spent + 1e-4 * (1_000 - cached), abs=2e-4)


@pytest.mark.parametrize("seed", range(20))
def test_law_no_plan_takes_longer_than_computing(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        hot, ends = rng.randrange(1_000), sorted(rng.randrange(1_500) for _ in Tier)
        restore = costs(**{tier: rng.random() * 3e-4 for tier in Tier})
        plan = soonest(COST, restore, hot, list(zip(Tier, ends, strict=True)), 1_000)
        assert plan.seconds <= COST.seconds(1_000 - hot, 1_000)
        assert plan.cached == hot + sum(tokens for _, tokens in plan.restored) < 1_000
        assert plan.restored == plan.reachable[: len(plan.restored)]


class Tiered(Cluster):
    """Decode workers whose blocks are known by events; the first of them has `text(1)` in a tier."""

    def __init__(self, decodes: int = 2, tier: Tier = MEMORY, hot: int = 0) -> None:
        """`hot`: how many of the prompt's blocks are in the pool, too."""
        super().__init__(decodes=decodes, prefills=0)
        self.prompt = text(1)
        states = self.planner.worker_states
        self.blocks = states.blocks.open(self.state.slot)
        first = self.send(self.prompt, *self.decodes[1:])
        self.planner.began(first, self.report(first, 0, 0.1, tail=f"{BLOCKS[-1]:016x}"), 1.0)
        self.planner.release(first, 1.0, complete=True)
        medium = MEDIA[tier]
        self.blocks.apply(
            [BlockStored(BLOCKS, None, [], 16), BlockStored(BLOCKS, None, [], 16, medium=medium)]
        )
        self.blocks.apply([BlockRemoved(BLOCKS[hot:])])

    @property
    def state(self) -> WorkerState:
        return self.planner.worker_states.of(self.decodes[0])

    def plan(self) -> Placement:
        """Where the prompt would go; it is not sent."""
        placement = self.planner.plan(PickRequest(model="tiny", prompt=self.prompt), self.now)
        assert placement is not None
        return placement

    def answer(self, cached: int, seconds: float) -> Placement:
        """The prompt is computed at the first worker in `seconds`, and evicted from its pool again."""
        placement = self.send(self.prompt, *self.decodes[1:])
        self.now += seconds
        self.planner.began(placement, self.report(placement, cached, seconds), self.now)
        self.planner.release(placement, self.now, complete=True)
        self.blocks.apply([BlockStored(BLOCKS, None, [], 16), BlockRemoved(BLOCKS)])
        return placement

    def calibrate(self) -> None:
        """0.1 ms for each computed token, on all workers."""
        for one in self.decodes:
            cost = self.planner.worker_states.of(one).prefill_cost
            for tokens in range(1_000, 1_000 * (4 * RELIABLE_AFTER), 1_000):
                cost.learn(tokens, tokens, tokens * 1e-4)


def tokens_of(restored: Restored) -> dict[str, int]:
    return {str(tier): tokens for tier, tokens in restored}


def test_prompt_goes_where_it_can_be_restored() -> None:
    for tier in (MEMORY, DISK):
        cluster = Tiered(tier=tier)
        placement = cluster.send(cluster.prompt)
        assert placement.pair.decode is cluster.decodes[0]
        assert placement.option.cached == placement.expected_cached == 4_999
        assert tokens_of(placement.restored) == {tier: 4_999}
        assert placement.compute_s < cluster.state.prefill_cost.seconds(5_000, 5_000)


def test_hot_tokens_are_not_restored() -> None:
    cluster = Tiered(hot=100)
    shown = explain(cluster.send(cluster.prompt))
    assert shown["cached"] == 4_999
    assert shown["restored"] == shown["reachable"] == {"memory": 4_999 - 12 * 512 // 4}


def test_slow_tier_is_priced_as_computing() -> None:
    cluster = Tiered(decodes=1, tier=SHARED)
    cluster.calibrate()
    cluster.state.restore[SHARED] = TransferCost(RunningAverage(1e-3), 0.0)
    placement = cluster.plan()
    assert (placement.option.cached, placement.restored) == (0, ())
    assert tokens_of(placement.reachable) == {"shared": 4_999}
    assert placement.compute_s == cluster.state.prefill_cost.seconds(5_000, 5_000)


@pytest.mark.parametrize(("waiting", "restores"), [(0, True), (40, False)])
def test_busy_worker_with_the_prompt_in_a_tier_loses_to_an_idle_one(waiting: int, restores: bool) -> None:
    cluster = Tiered()
    for seed in range(waiting):
        cluster.send(text(100 + seed), cluster.decodes[1])
    placement = cluster.send(cluster.prompt)
    assert (placement.pair.decode is cluster.decodes[0]) is restores is bool(placement.restored)


@pytest.mark.parametrize(("hot", "waits"), [(len(BLOCKS), False), (0, True)])
def test_restored_tokens_wait_for_blocks_of_the_pool(hot: int, waits: bool) -> None:
    """Hot ones are in the pool already."""
    cluster = Tiered(decodes=1, hot=hot)
    cluster.calibrate()
    idle = cluster.plan().option.first_token_s
    load = Load(role=Role.DECODE, model="tiny", epoch="1", compatibility="c", block_size=16)
    cluster.decodes[0].answered(msgspec.structs.replace(load, total_blocks=320, free_blocks=4))
    other = cluster.send(text(2, 4_000))
    cluster.planner.began(other, None, cluster.now)
    plan = cluster.plan()
    assert bool(plan.restored) is waits
    assert (plan.option.first_token_s > idle + 0.5) is waits


def test_inaccurate_worker_restores_nothing_until_it_recovers() -> None:
    cluster = Tiered(decodes=1)
    cluster.calibrate()
    for _ in range(ACCURACY_REQUESTS):
        cluster.answer(cached=0, seconds=0.5)
    assert cluster.state.accuracy.broken
    placement = cluster.plan()
    assert (placement.option.cached, placement.restored, placement.expected_cached) == (0, (), 4_999)
    assert tokens_of(placement.reachable) == {"memory": 4_999}
    for _ in range(ACCURACY_REQUESTS):
        cluster.answer(cached=4_990, seconds=0.5)
    assert cluster.plan().restored
    assert cluster.state.prefill_cost.seconds(10, 5_000) < 0.05  # restoring did not pass for slow computing


def test_pool_of_an_inaccurate_worker_was_not_restored() -> None:
    cluster = Tiered(decodes=1, hot=200)
    cluster.calibrate()
    for _ in range(ACCURACY_REQUESTS):
        cluster.state.accuracy.learn(5_000, 0)
    before = cluster.state.restore[MEMORY].seconds(1_000, 0.0), cluster.state.prefill_cost.line.measurements
    placement = cluster.answer(cached=24 * 512 // 4, seconds=0.2)
    assert (placement.option.cached, placement.restored) == (0, ()) and placement.reachable
    assert cluster.state.restore[MEMORY].seconds(1_000, 0.0) == before[0]
    assert cluster.state.prefill_cost.line.measurements > before[1]


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("token_s", [2e-6, 4e-5, 9e-4])
def test_time_of_restoring_is_learned_for_each_tier(tier: Tier, token_s: float) -> None:
    """Also when the router expects that computing is sooner, because engines restore what they find."""
    cluster = Tiered(decodes=1, tier=tier)
    cluster.calibrate()
    before = {one: cost.seconds(4_990, 0.0) for one, cost in cluster.state.restore.items()}
    speed = cluster.state.prefill_cost.line.measurements
    for _ in range(100):
        cluster.answer(cached=4_990, seconds=4_990 * token_s + 10 * 1e-4)
    assert cluster.state.prefill_cost.line.measurements == speed
    for one, cost in cluster.state.restore.items():
        expected = 4_990 * token_s if one is tier else before[one]
        assert cost.seconds(4_990, 0.0) == pytest.approx(expected, rel=0.15, abs=0.012)


@pytest.mark.parametrize(
    ("cached", "fields", "restoring", "computing"),
    [
        pytest.param(4_990, {}, True, False, id="restored"),
        pytest.param(0, {}, False, True, id="computed after all"),
        pytest.param(100, {}, False, True, id="hardly restored"),
    ],
)
def test_a_measurement_teaches_one_speed(
    cached: int, fields: dict[str, Any], restoring: bool, computing: bool
) -> None:
    cluster = Tiered(decodes=1)
    cluster.calibrate()
    before = cluster.state.restore[MEMORY].seconds(1_000, 0.0), cluster.state.prefill_cost.line.measurements
    cluster.answer(cached=cached, seconds=2.0)
    assert (cluster.state.restore[MEMORY].seconds(1_000, 0.0) != before[0]) is restoring
    assert (cluster.state.prefill_cost.line.measurements != before[1]) is computing


def test_count_of_cached_tokens_at_the_end_of_the_answer_is_early_enough() -> None:
    """A stream of vLLM begins before it; until then, restoring must not pass for slow computing."""
    cluster = Tiered(decodes=1)
    cluster.calibrate()
    restore, computing = cluster.state.restore[MEMORY], cluster.state.prefill_cost.line
    before = restore.seconds(1_000, 0.0), computing.measurements
    for seconds, cached, taught in ((2.0, None, False), (2.0, 4_990, True)):
        placement = cluster.send(cluster.prompt)
        cluster.now += seconds
        unknown = cluster.report(placement, 0, seconds)
        unknown = msgspec.structs.replace(unknown, cached=None)
        cluster.planner.began(placement, unknown, cluster.now)
        assert (restore.seconds(1_000, 0.0), computing.measurements) == before
        cluster.planner.release(placement, cluster.now, complete=True, cached=cached)
        cluster.blocks.apply([BlockStored(BLOCKS, None, [], 16), BlockRemoved(BLOCKS)])
        assert (restore.seconds(1_000, 0.0) != before[0]) is taught
        assert computing.measurements == before[1]


def test_unknown_speed_of_computing_teaches_nothing_of_restoring() -> None:
    cluster = Tiered(decodes=1)
    before = cluster.state.restore[MEMORY].seconds(1_000, 0.0)
    cluster.answer(cached=4_990, seconds=2.0)
    assert cluster.state.restore[MEMORY].seconds(1_000, 0.0) == before


def test_workers_of_a_kind_share_what_restoring_takes() -> None:
    cluster = Tiered()
    cluster.calibrate()
    for _ in range(50):
        cluster.answer(cached=4_990, seconds=0.4)
    other = cluster.planner.worker_states.of(cluster.decodes[1])
    assert other.restore[MEMORY].seconds(4_990, 0.0) == pytest.approx(0.4, rel=0.1)


def test_restarted_worker_restores_nothing() -> None:
    cluster = Tiered(decodes=1)
    cluster.decodes[0].answered(Load(role=Role.DECODE, model="tiny", epoch="2", total_blocks=100))
    placement = cluster.send(cluster.prompt)
    assert (placement.option.cached, placement.reachable) == (0, ())


def test_removed_worker_leaves_no_tiers() -> None:
    cluster = Tiered(decodes=1)
    states = cluster.planner.worker_states
    assert states.tier_chunks == {MEMORY: len(cluster.prompt.names)} and states.bytes
    states.forget(cluster.decodes[0])
    assert states.tier_chunks == {MEMORY: 0} and states.bytes == 0


def test_expected_tokens_are_counted_by_tier() -> None:
    cluster = Tiered(decodes=1, hot=100)
    cluster.answer(cached=4_990, seconds=0.1)
    registry = CollectorRegistry()
    registry.register(cluster.planner.metrics)
    hot = 12 * 512 // 4
    for name, labels, value in (
        (metrics.ROUTER_PREFIX_TOKENS.name, {"kind": "expected"}, 4_999),
        (metrics.ROUTER_RESTORED_TOKENS.name, {"tier": "memory"}, 4_999 - hot),
    ):
        assert registry.get_sample_value(name, labels) == value


class Peered(Cluster):
    """
    A pair whose decode worker generated an answer, and prefill workers that may read it.

    By default it has 2,000 tokens, and all compute 0.1 ms for each token.
    """

    def __init__(
        self,
        prefills: int = 2,
        peers: bool = True,
        decodes: int = 1,
        answer: int = 2_000,
        token_s: float = 1e-4,
    ) -> None:
        super().__init__(decodes=decodes, prefills=prefills, local_tokens=0)
        load: dict[str, Any] = {"model": "tiny", "epoch": "1", "compatibility": "c", "total_blocks": 10_000}
        for one in (*self.decodes, *self.prefills):
            role, control = (Role.PREFILL, "x:1") if one in self.prefills else (Role.DECODE, "")
            one.answered(Load(role=role, control=control, free_blocks=10_000, peers=peers, **load))
        for one in self.prefills:
            cost = self.planner.worker_states.of(one).prefill_cost
            for tokens in range(1_000, 1_000 * (4 * RELIABLE_AFTER), 1_000):
                cost.learn(tokens, tokens, tokens * token_s)
        self.first = self.serve(talk("q" * 4_000))
        self.turn = talk("q" * 4_000, "a" * 4 * answer, "and then?" * 400)
        """1,000 tokens, the answer, and 900 new ones."""

    def plan(self) -> Placement:
        """Where the next turn would go; it is not sent."""
        placement = self.planner.plan(PickRequest(model="tiny", prompt=self.turn), self.now)
        assert placement is not None
        return placement

    def state(self, placement: Placement) -> WorkerState:
        assert placement.pair.prefill is not None
        return self.planner.worker_states.of(placement.pair.prefill)


def test_prompt_is_priced_with_what_the_prefill_worker_reads_from_the_decode_worker() -> None:
    cluster = Peered()
    placement = cluster.send(cluster.turn)
    assert placement.pair == cluster.first.pair
    assert tokens_of(placement.restored) == {"peer": 2_000}
    assert placement.option.cached == 3_000 and placement.expected_cached == placement.hot == 1_000
    start_s, token_s = 0.02, 5e-5
    assert placement.compute_s == pytest.approx(start_s + 2_000 * token_s + 900 * 1e-4, abs=0.01)
    assert placement.option.first_token_s == pytest.approx(placement.compute_s, abs=0.02)
    assert explain(placement)["restored"] == {"peer": 2_000}


@pytest.mark.parametrize("decodes", [2, 8])
def test_pair_of_the_worker_that_generated_the_answer_is_found_among_many(decodes: int) -> None:
    """It is one of the candidates, although others have fewer streams."""
    cluster = Peered(decodes=decodes)
    cluster.planner.worker_states.of(cluster.first.pair.decode).streams.book(99, 500, 1)
    placement = cluster.send(cluster.turn)
    assert placement.pair.decode is cluster.first.pair.decode
    assert placement.restored


def test_workers_that_read_no_peers_are_priced_as_computing() -> None:
    cluster = Peered(peers=False)
    placement = cluster.send(cluster.turn)
    assert (placement.option.cached, placement.restored, placement.reachable) == (1_000, (), ())
    assert placement.compute_s == pytest.approx(2_900 * 1e-4, abs=0.01)


def test_peer_that_is_slower_than_computing_is_priced_as_computing() -> None:
    cluster = Peered()
    for one in cluster.prefills:
        cluster.planner.worker_states.of(one).restore[PEER] = TransferCost(RunningAverage(1e-3), 0.0)
    placement = cluster.send(cluster.turn)
    assert (placement.option.cached, placement.restored) == (1_000, ())
    assert tokens_of(placement.reachable) == {"peer": 2_000}


@pytest.mark.parametrize("token_s", [2e-6, 2e-5, 9e-5])
def test_time_of_reading_from_a_peer_is_learned(token_s: float) -> None:
    cluster = Peered()
    for _ in range(60):
        placement = cluster.plan()
        took = 0.02 + 2_000 * token_s + cluster.state(placement).prefill_cost.seconds(900, 3_900)
        cluster.planner.began(placement, cluster.report(placement, 3_000, took), cluster.now)
    cost = cluster.state(placement).restore[PEER]
    assert cost.seconds(2_000, 0.0) == pytest.approx(0.02 + 2_000 * token_s, rel=0.2)


def test_short_answer_that_is_read_stays_cheaper_than_computing_it() -> None:
    cluster = Peered(prefills=1, answer=200, token_s=1e-3)
    for _ in range(40):
        placement = cluster.plan()
        assert tokens_of(placement.restored)["peer"] == pytest.approx(200, abs=16)
        took = 0.03 + cluster.state(placement).prefill_cost.seconds(900, 2_100)
        cluster.planner.began(placement, cluster.report(placement, 1_200, took), cluster.now)


def test_peer_that_is_never_read_becomes_as_dear_as_computing_and_no_cache_counts_as_wrong() -> None:
    cluster = Peered()
    for _ in range(ACCURACY_REQUESTS):
        placement = cluster.plan()
        took = cluster.state(placement).prefill_cost.seconds(2_900, 3_900)
        cluster.planner.began(placement, cluster.report(placement, 1_000, took), cluster.now)
    assert not cluster.state(placement).accuracy.broken
    assert placement.restored == ()
    assert placement.compute_s == pytest.approx(2_900 * 1e-4, abs=0.01)
