"""Where requests go over time: what is learned, what is booked, and that nothing is left behind."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from baton_api.errors import NotReady
from baton_api.kv_events import BlockRemoved, BlockStored
from baton_api.prompt_report import PromptReport
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.cache.prompt_chunks import PromptChunks, PromptMessage, chunk_messages, chunk_text
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.placement import Placement, explain
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers
from baton_router.workers.worker_state import ACCURACY_REQUESTS


def worker(role: Role, port: int, **load: Any) -> Worker:
    created = Worker(Upstream("127.0.0.1", port, 1.0), Role.PREFILL if role is Role.PREFILL else Role.DECODE)
    report = {"model": "tiny", "total_blocks": 10_000, "free_blocks": 10_000, "epoch": "1", **load}
    created.answered(
        Load(role=role, control="x:1" if role is Role.PREFILL else "", compatibility="c", **report)
    )
    return created


class Cluster:
    """Workers, a planner before them, and a clock that the test moves."""

    def __init__(self, decodes: int = 2, prefills: int = 2, seed: int = 0, local_tokens: int = 512) -> None:
        self.decodes = [worker(Role.DECODE, 8100 + n) for n in range(decodes)]
        self.prefills = [worker(Role.PREFILL, 8200 + n) for n in range(prefills)]
        workers = Workers(tuple(self.decodes), tuple(self.prefills))
        self.planner = PlacementPlanner(workers, random.Random(seed), local_tokens)
        self.now = 0.0

    def send(self, prompt: PromptChunks, *excluded: Worker) -> Placement:
        placement = self.planner.plan(
            PickRequest(model="tiny", prompt=prompt, excluded=tuple(one.name for one in excluded)), self.now
        )
        assert placement is not None
        self.planner.book(placement, self.now)
        return placement

    def serve(self, prompt: PromptChunks, seconds: float = 0.1, cached: int | None = None) -> Placement:
        """One request from its decision to its end; with `cached`, there is a report that says so."""
        placement = self.send(prompt)
        self.now += seconds
        report = None if cached is None else self.report(placement, cached, seconds)
        self.planner.began(placement, report, self.now)
        self.planner.release(placement, self.now, complete=True)
        return placement

    def report(self, placement: Placement, cached: int, compute_s: float, **fields: Any) -> PromptReport:
        values: dict[str, Any] = {
            "held": 0,
            "queue_s": 0.0,
            "transfer_s": 0.001,
            "remote": placement.pair.prefill is not None,
        }
        values |= {"tokens": placement.tokens, **fields}
        return PromptReport(cached=cached, compute_s=compute_s, **values)

    @property
    def booked(self) -> int:
        states = [self.planner.worker_states.of(one) for one in (*self.decodes, *self.prefills)]
        return sum(one.prefills.waiting + one.streams.count for one in states)


def text(seed: int, size: int = 20_000) -> PromptChunks:
    return chunk_text(random.Random(seed).randbytes(size), 7)


def talk(*messages: str) -> PromptChunks:
    roles = ("user", "assistant")
    return chunk_messages([PromptMessage(roles[n % 2], turn) for n, turn in enumerate(messages)], None, 7)


def test_same_prompt_goes_to_the_same_prefill_worker() -> None:
    cluster = Cluster(prefills=4)
    first = cluster.serve(text(1))
    assert first.pair.prefill is not None and first.option.cached == 0
    for _ in range(5):
        again = cluster.serve(text(1))
        assert again.computing_worker in (first.pair.prefill, first.pair.decode)
        assert again.option.cached == pytest.approx(again.tokens, rel=0.01)


def test_burst_uses_its_common_prefix_before_the_first_answer() -> None:
    cluster = Cluster(prefills=4)
    beginning = random.Random(3).randbytes(16_384)
    sent = [cluster.send(chunk_text(beginning + bytes([n]) * 600, 7)) for n in range(3)]
    assert sent[0].option.cached == 0
    assert all(placement.option.cached == 4096 for placement in sent[1:])


def test_new_prompts_spread_over_idle_workers() -> None:
    cluster = Cluster(prefills=4)
    sent = [cluster.send(text(seed)) for seed in range(4)]
    assert len({placement.pair.prefill for placement in sent}) == 4


def test_next_turn_is_computed_where_the_answer_was_generated() -> None:
    cluster = Cluster(decodes=3, prefills=2)
    first = cluster.serve(talk("q" * 20_000))
    turn = talk("q" * 20_000, "a" * 8_000, "and then?")
    second = cluster.send(turn)
    assert second.pair.prefill is None and second.pair.decode is first.pair.decode
    assert second.option.cached == int((20_000 + 8_000) / 4)


def test_cut_answer_is_not_expected_in_the_cache() -> None:
    cluster = Cluster()
    placement = cluster.send(talk("q" * 20_000))
    cluster.planner.began(placement, None, 1.0)
    cluster.planner.release(placement, 2.0, complete=False)
    assert cluster.send(talk("q" * 20_000, "a" * 8_000, "and then?")).option.cached == 5_000


def test_worker_failed_before_the_first_byte_holds_no_prompt() -> None:
    cluster = Cluster(decodes=2, prefills=0)
    placement = cluster.send(text(1))
    cluster.planner.release(placement, 1.0, complete=False)
    other = cluster.send(text(1), placement.pair.decode)
    assert other.pair.decode is not placement.pair.decode
    assert other.option.cached == 0
    cluster.planner.release(other, 2.0, complete=False)
    assert len(cluster.planner.worker_states) == 0


def test_blocks_held_before_survive_a_failure() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    placement = cluster.send(text(1))
    cluster.planner.release(placement, 1.0, complete=False)
    assert cluster.send(text(1)).option.cached > 0


def test_restarted_worker_holds_no_blocks() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    cluster.decodes[0].answered(Load(role=Role.DECODE, model="tiny", epoch="2", total_blocks=100))
    assert cluster.send(text(1)).option.cached == 0


def test_restarted_worker_is_not_affected_by_earlier_reports() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    states, one = cluster.planner.worker_states, cluster.decodes[0]
    before = states.blocks.open(states.of(one).slot)
    one.answered(Load(role=Role.DECODE, model="tiny", epoch="2", total_blocks=100))
    states.of(one)
    assert before.closed


def test_slow_worker_gets_fewer_requests() -> None:
    cluster = Cluster(decodes=1, prefills=2, local_tokens=0)
    slow = cluster.prefills[0]
    for seed in range(60):
        placement = cluster.send(text(seed))
        speed = 1_000 if placement.pair.prefill is slow else 20_000
        cluster.now += 30.0
        report = cluster.report(placement, 0, placement.tokens / speed)
        cluster.planner.began(placement, report, cluster.now)
        cluster.planner.release(placement, cluster.now, complete=True)
    last = list(cluster.planner.placements)[-20:]
    assert all(placement.pair.prefill is not slow for placement in last)


def test_tokens_are_estimated_from_what_workers_report() -> None:
    cluster = Cluster()
    for seed in range(80):
        placement = cluster.send(text(seed))
        cluster.planner.began(placement, cluster.report(placement, 0, 0.1, tokens=10_000), cluster.now)
        cluster.planner.release(placement, cluster.now, complete=True)
    assert cluster.send(text(99)).tokens == pytest.approx(10_000, rel=0.02)


def test_full_decode_worker_is_skipped_while_another_has_room() -> None:
    cluster = Cluster(decodes=2, prefills=1, local_tokens=0)
    full = cluster.decodes[0]
    for seed in range(6):
        cluster.send(text(seed))
    full.answered(Load(role=Role.DECODE, model="tiny", epoch="1", total_blocks=500, compatibility="c"))
    sent = [cluster.send(text(100 + seed)) for seed in range(4)]
    assert all(placement.pair.decode is not full for placement in sent)


def test_plan_without_untried_workers_is_none_and_down_raises() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    excluded = tuple(one.name for one in cluster.decodes)
    assert cluster.planner.plan(PickRequest(model="tiny", prompt=text(1), excluded=excluded), 0.0) is None
    cluster.decodes[0].health = cluster.decodes[0].health.missed(1, "it is gone")
    with pytest.raises(NotReady):
        cluster.send(text(1))


def test_cached_blocks_count_half_while_events_are_missing() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    states = cluster.planner.worker_states.of(cluster.decodes[0])
    states.degraded = True
    assert cluster.serve(text(1)).option.cached == 2_500
    states.degraded = False
    assert cluster.serve(text(1)).option.cached == 4_999


def test_inaccurate_worker_is_chosen_by_load_until_it_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="baton_router.scheduling.placement_planner")
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    for actual, counted in ((0, 4_999), (4_999, 0)):
        for number in range(ACCURACY_REQUESTS):
            placement = cluster.serve(text(1), cached=actual)
            assert placement.expected_cached == 4_999 and (number or placement.option.cached == counted)
        assert cluster.serve(text(1)).option.cached == actual
    (worse, better) = caplog.records
    assert (worse.levelname, better.levelname) == ("WARNING", "INFO")
    assert all(cluster.decodes[0].name in record.getMessage() for record in caplog.records)


def test_wrong_token_estimate_does_not_affect_cache_accuracy() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    placement = cluster.send(text(1))
    report = cluster.report(placement, 2_499, 0.1, tokens=2_500)
    cluster.planner.began(placement, report, cluster.now)
    assert cluster.planner.worker_states.of(cluster.decodes[0]).accuracy.ratio == pytest.approx(1, abs=0.01)


def test_prompt_computed_by_another_worker_affects_no_accuracy() -> None:
    cluster = Cluster(decodes=1, prefills=1, local_tokens=0)
    cluster.serve(text(1))
    for _ in range(ACCURACY_REQUESTS):
        placement = cluster.send(text(1))
        assert placement.pair.prefill is not None and placement.expected_cached
        other = cluster.report(placement, 0, 0.1, remote=False)
        cluster.planner.began(placement, other, cluster.now)
        cluster.planner.release(placement, cluster.now, complete=True)
    states = [cluster.planner.worker_states.of(one) for one in (*cluster.decodes, *cluster.prefills)]
    assert not any(one.accuracy.requests for one in states)


def test_evicted_blocks_are_not_expected() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    held = cluster.planner.worker_states.blocks.open(
        cluster.planner.worker_states.of(cluster.decodes[0]).slot
    )
    blocks = list(range(1, 313))  # 5,000 tokens
    placement = cluster.send(text(1))
    cluster.planner.began(placement, cluster.report(placement, 0, 0.1, tail=f"{blocks[-1]:016x}"), 1.0)
    held.apply([BlockStored(blocks, None, [], 16), BlockRemoved(blocks[100:])])
    assert cluster.send(text(1)).option.cached == 12 * 512 // 4  # 1,600 tokens, but for a part of a chunk


def test_decision_is_explained() -> None:
    cluster = Cluster()
    placement = cluster.serve(text(1))
    shown = explain(placement)
    assert shown["decode"] == placement.pair.decode.name
    assert shown["tokens"] == 5_000 and shown["first_byte_s"] == pytest.approx(0.1)
    assert isinstance(shown["others"], list) and shown["others"]


@pytest.mark.parametrize("seed", range(15))
def test_law_no_booking_remains_after_any_outcome(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(decodes=rng.randint(1, 4), prefills=rng.randint(0, 3), seed=seed)
    live: list[Placement] = []
    for _ in range(400):
        cluster.now += rng.expovariate(5)
        if live and rng.random() < 0.5:
            placement = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.7:
                report = cluster.report(placement, rng.randrange(placement.tokens), rng.random())
                cluster.planner.began(placement, report if rng.random() < 0.8 else None, cluster.now)
            for _ in range(rng.randint(1, 2)):
                cluster.planner.release(placement, cluster.now, complete=rng.random() < 0.5)
        elif rng.random() < 0.05:
            one = rng.choice(cluster.decodes)
            one.answered(Load(role=Role.DECODE, model="tiny", epoch=str(rng.random()), compatibility="c"))
        else:
            live.append(cluster.send(text(rng.randrange(30), rng.randrange(1, 30_000))))
        assert all(placement.option.first_token_s > 0 for placement in live)
    for placement in live:
        cluster.planner.release(placement, cluster.now, complete=False)
    assert cluster.booked == 0


def test_answer_length_is_learned_from_counted_answers() -> None:
    cluster = Cluster()
    for seed in range(200):
        placement = cluster.send(text(seed))
        cluster.planner.began(placement, None, cluster.now)
        cluster.planner.release(placement, cluster.now, complete=True, tokens=20 if seed % 2 else None)
    cluster.planner.release(cluster.send(text(500)), cluster.now, complete=False, tokens=100_000)
    assert cluster.planner.answer_tokens == pytest.approx(20, abs=1)


@pytest.mark.parametrize("ending", ["whole", "cut", "lost"])
def test_ended_request_keeps_the_size_of_its_prompt_only(ending: str) -> None:
    """A thousand requests are kept for inspection. Their chunks would be most of the memory."""
    cluster = Cluster()
    prompt = text(1)
    placement = cluster.send(prompt)
    assert placement.request.prompt is prompt and placement.assumed_chunks
    if ending != "lost":
        cluster.planner.began(placement, None, 1.0)
    cluster.planner.release(placement, 2.0, complete=ending == "whole")
    assert placement in cluster.planner.placements
    assert (
        not placement.request.prompt.names
        and len(placement.request.prompt.sizes) == 1
        and not placement.assumed_chunks
        and not placement.matched
    )
    assert explain(placement)["prompt_bytes"] == prompt.bytes


def test_long_prompt_after_many_greetings_is_not_taken_for_longer() -> None:
    """Templates add tokens to each prompt, which are most of a short one's."""
    cluster = Cluster()
    for _ in range(120):
        placement = cluster.send(text(0, 2))
        report = cluster.report(placement, 0, 0.01, tokens=31)
        cluster.planner.began(placement, report, cluster.now)
        cluster.planner.release(placement, cluster.now, complete=True)
    assert cluster.send(text(0, 8440)).tokens == pytest.approx(2110, rel=0.15)
