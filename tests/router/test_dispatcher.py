"""Where requests go over time: what is learned, what is booked, and that nothing is left behind."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from baton_api.errors import NotReady
from baton_api.kv_events import BlockRemoved, BlockStored
from baton_api.reports import PromptReport
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.cache.prompt_chunks import PromptChunks, PromptMessage, chunk_messages, chunk_text
from baton_router.scheduling.dispatch import Dispatch, explain
from baton_router.scheduling.dispatcher import Dispatcher
from baton_router.workers.worker import Worker, Workers
from baton_router.workers.worker_state import ACCURACY_REQUESTS


def worker(role: Role, port: int, **load: Any) -> Worker:
    made = Worker(Upstream("127.0.0.1", port, 1.0), Role.PREFILL if role is Role.PREFILL else Role.DECODE)
    report = {"model": "tiny", "total_blocks": 10_000, "free_blocks": 10_000, "epoch": "1", **load}
    made.answered(Load(role=role, control="x:1" if role is Role.PREFILL else "", compatibility="c", **report))
    return made


class Cluster:
    """Workers, a dispatcher before them, and a clock that the test moves."""

    def __init__(self, decodes: int = 2, prefills: int = 2, seed: int = 0, alone: int = 512) -> None:
        self.decodes = [worker(Role.DECODE, 8100 + n) for n in range(decodes)]
        self.prefills = [worker(Role.PREFILL, 8200 + n) for n in range(prefills)]
        workers = Workers(tuple(self.decodes), tuple(self.prefills))
        self.dispatcher = Dispatcher(workers, random.Random(seed), alone)
        self.now = 0.0

    def send(self, prompt: PromptChunks, *tried: Worker) -> Dispatch:
        made = self.dispatcher.plan("tiny", prompt, [one.name for one in tried], self.now)
        assert made is not None
        self.dispatcher.book(made, self.now)
        return made

    def serve(self, prompt: PromptChunks, seconds: float = 0.1, cached: int | None = None) -> Dispatch:
        """One request from its decision to its end; with `cached`, there is a report that says so."""
        made = self.send(prompt)
        self.now += seconds
        report = None if cached is None else self.report(made, cached, seconds)
        self.dispatcher.began(made, report, self.now)
        self.dispatcher.release(made, self.now, complete=True)
        return made

    def report(self, made: Dispatch, cached: int, compute_s: float, **fields: Any) -> PromptReport:
        values: dict[str, Any] = {
            "held": 0,
            "queue_s": 0.0,
            "transfer_s": 0.001,
            "remote": made.pair.prefill is not None,
        }
        values |= {"tokens": made.tokens, **fields}
        return PromptReport(cached=cached, compute_s=compute_s, **values)

    @property
    def booked(self) -> int:
        known = [self.dispatcher.worker_states.of(one) for one in (*self.decodes, *self.prefills)]
        return sum(one.prefills.waiting + one.streams.count for one in known)


def text(seed: int, size: int = 20_000) -> PromptChunks:
    return chunk_text(random.Random(seed).randbytes(size), 7)


def talk(*turns: str) -> PromptChunks:
    roles = ("user", "assistant")
    return chunk_messages([PromptMessage(roles[n % 2], turn) for n, turn in enumerate(turns)], None, 7)


def test_the_same_prompt_goes_to_the_same_prefill_worker() -> None:
    cluster = Cluster(prefills=4)
    first = cluster.serve(text(1))
    assert first.pair.prefill is not None and first.option.cached == 0
    for _ in range(5):
        again = cluster.serve(text(1))
        assert again.computing_worker in (first.pair.prefill, first.pair.decode)
        assert again.option.cached == pytest.approx(again.tokens, rel=0.01)


def test_a_burst_of_the_same_beginning_does_not_wait_for_the_first_answer() -> None:
    cluster = Cluster(prefills=4)
    beginning = random.Random(3).randbytes(16_384)
    sent = [cluster.send(chunk_text(beginning + bytes([n]) * 600, 7)) for n in range(3)]
    assert sent[0].option.cached == 0
    assert all(made.option.cached == 4096 for made in sent[1:])


def test_new_prompts_spread_over_idle_workers() -> None:
    cluster = Cluster(prefills=4)
    sent = [cluster.send(text(seed)) for seed in range(4)]
    assert len({made.pair.prefill for made in sent}) == 4


def test_the_next_turn_is_computed_where_the_answer_was_generated() -> None:
    cluster = Cluster(decodes=3, prefills=2)
    first = cluster.serve(talk("q" * 20_000))
    turn = talk("q" * 20_000, "a" * 8_000, "and then?")
    second = cluster.send(turn)
    assert second.pair.prefill is None and second.pair.decode is first.pair.decode
    assert second.option.cached == int((20_000 + 8_000) / 4)


def test_an_answer_that_was_cut_is_not_believed_to_be_held() -> None:
    cluster = Cluster()
    made = cluster.send(talk("q" * 20_000))
    cluster.dispatcher.began(made, None, 1.0)
    cluster.dispatcher.release(made, 2.0, complete=False)
    assert cluster.send(talk("q" * 20_000, "a" * 8_000, "and then?")).option.cached == 5_000


def test_a_worker_that_failed_before_its_first_byte_holds_nothing_of_the_prompt() -> None:
    cluster = Cluster(decodes=2, prefills=0)
    made = cluster.send(text(1))
    cluster.dispatcher.release(made, 1.0, complete=False)
    other = cluster.send(text(1), made.pair.decode)
    assert other.pair.decode is not made.pair.decode
    assert other.option.cached == 0
    cluster.dispatcher.release(other, 2.0, complete=False)
    assert len(cluster.dispatcher.worker_states) == 0


def test_what_a_worker_held_before_outlasts_a_failure() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    made = cluster.send(text(1))
    cluster.dispatcher.release(made, 1.0, complete=False)
    assert cluster.send(text(1)).option.cached > 0


def test_a_worker_that_began_anew_holds_nothing() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    cluster.decodes[0].answered(Load(role=Role.DECODE, model="tiny", epoch="2", total_blocks=100))
    assert cluster.send(text(1)).option.cached == 0


def test_a_worker_that_began_anew_is_not_spoken_for_by_its_past() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    knowledge, one = cluster.dispatcher.worker_states, cluster.decodes[0]
    before = knowledge.blocks.open(knowledge.of(one).slot)
    one.answered(Load(role=Role.DECODE, model="tiny", epoch="2", total_blocks=100))
    knowledge.of(one)
    assert before.closed


def test_a_slow_worker_gets_less() -> None:
    cluster = Cluster(decodes=1, prefills=2, alone=0)
    slow = cluster.prefills[0]
    for seed in range(60):
        made = cluster.send(text(seed))
        speed = 1_000 if made.pair.prefill is slow else 20_000
        cluster.now += 30.0
        report = cluster.report(made, 0, made.tokens / speed)
        cluster.dispatcher.began(made, report, cluster.now)
        cluster.dispatcher.release(made, cluster.now, complete=True)
    last = list(cluster.dispatcher.dispatches)[-20:]
    assert all(made.pair.prefill is not slow for made in last)


def test_tokens_are_estimated_from_what_workers_report() -> None:
    cluster = Cluster()
    for seed in range(80):
        made = cluster.send(text(seed))
        cluster.dispatcher.began(made, cluster.report(made, 0, 0.1, tokens=10_000), cluster.now)
        cluster.dispatcher.release(made, cluster.now, complete=True)
    assert cluster.send(text(99)).tokens == pytest.approx(10_000, rel=0.02)


def test_a_full_decode_worker_is_waited_for_only_if_nobody_has_room() -> None:
    cluster = Cluster(decodes=2, prefills=1, alone=0)
    full = cluster.decodes[0]
    for seed in range(6):
        cluster.send(text(seed))
    full.answered(Load(role=Role.DECODE, model="tiny", epoch="1", total_blocks=500, compatibility="c"))
    sent = [cluster.send(text(100 + seed)) for seed in range(4)]
    assert all(made.pair.decode is not full for made in sent)


def test_none_is_left_when_all_were_tried_and_all_down_is_said() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    assert cluster.dispatcher.plan("tiny", text(1), [one.name for one in cluster.decodes], 0.0) is None
    cluster.decodes[0].health = cluster.decodes[0].health.missed(1, "it is gone")
    with pytest.raises(NotReady):
        cluster.send(text(1))


def test_what_a_worker_holds_counts_half_while_its_events_do_not_come() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    known = cluster.dispatcher.worker_states.of(cluster.decodes[0])
    known.degraded = True
    assert cluster.serve(text(1)).option.cached == 2_500
    known.degraded = False
    assert cluster.serve(text(1)).option.cached == 4_999


def test_a_worker_that_never_holds_what_it_should_is_chosen_by_load_until_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="baton_router.scheduling.dispatcher")
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    for actual, counted in ((0, 4_999), (4_999, 0)):
        for number in range(ACCURACY_REQUESTS):
            made = cluster.serve(text(1), cached=actual)
            assert made.expected_cached == 4_999 and (number or made.option.cached == counted)
        assert cluster.serve(text(1)).option.cached == actual
    (worse, better) = caplog.records
    assert (worse.levelname, better.levelname) == ("WARNING", "INFO")
    assert all(cluster.decodes[0].name in record.getMessage() for record in caplog.records)


def test_a_wrong_guess_of_the_tokens_is_no_wrong_guess_of_the_cache() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    cluster.serve(text(1))
    made = cluster.send(text(1))
    report = cluster.report(made, 2_499, 0.1, tokens=2_500)
    cluster.dispatcher.began(made, report, cluster.now)
    assert cluster.dispatcher.worker_states.of(cluster.decodes[0]).accuracy.ratio == pytest.approx(
        1, abs=0.01
    )


def test_a_prompt_that_another_worker_computed_judges_nobody() -> None:
    cluster = Cluster(decodes=1, prefills=1, alone=0)
    cluster.serve(text(1))
    for _ in range(ACCURACY_REQUESTS):
        made = cluster.send(text(1))
        assert made.pair.prefill is not None and made.expected_cached
        other = cluster.report(made, 0, 0.1, remote=False)
        cluster.dispatcher.began(made, other, cluster.now)
        cluster.dispatcher.release(made, cluster.now, complete=True)
    known = [cluster.dispatcher.worker_states.of(one) for one in (*cluster.decodes, *cluster.prefills)]
    assert not any(one.accuracy.requests for one in known)


def test_what_a_worker_drops_is_not_expected_there() -> None:
    cluster = Cluster(decodes=1, prefills=0)
    held = cluster.dispatcher.worker_states.blocks.open(
        cluster.dispatcher.worker_states.of(cluster.decodes[0]).slot
    )
    blocks = list(range(1, 313))  # 5,000 tokens
    made = cluster.send(text(1))
    cluster.dispatcher.began(made, cluster.report(made, 0, 0.1, tail=f"{blocks[-1]:016x}"), 1.0)
    held.apply([BlockStored(blocks, None, [], 16), BlockRemoved(blocks[100:])])
    assert cluster.send(text(1)).option.cached == 12 * 512 // 4  # 1,600 tokens, but for a part of a chunk


def test_a_decision_is_explained() -> None:
    cluster = Cluster()
    made = cluster.serve(text(1))
    shown = explain(made)
    assert shown["decode"] == made.pair.decode.name
    assert shown["tokens"] == 5_000 and shown["first_byte_s"] == pytest.approx(0.1)
    assert isinstance(shown["others"], list) and shown["others"]


@pytest.mark.parametrize("seed", range(15))
def test_nothing_stays_booked_on_any_way_out(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(decodes=rng.randint(1, 4), prefills=rng.randint(0, 3), seed=seed)
    live: list[Dispatch] = []
    for _ in range(400):
        cluster.now += rng.expovariate(5)
        if live and rng.random() < 0.5:
            made = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.7:
                report = cluster.report(made, rng.randrange(made.tokens), rng.random())
                cluster.dispatcher.began(made, report if rng.random() < 0.8 else None, cluster.now)
            for _ in range(rng.randint(1, 2)):
                cluster.dispatcher.release(made, cluster.now, complete=rng.random() < 0.5)
        elif rng.random() < 0.05:
            one = rng.choice(cluster.decodes)
            one.answered(Load(role=Role.DECODE, model="tiny", epoch=str(rng.random()), compatibility="c"))
        else:
            live.append(cluster.send(text(rng.randrange(30), rng.randrange(1, 30_000))))
        assert all(made.option.first_token_s > 0 for made in live)
    for made in live:
        cluster.dispatcher.release(made, cluster.now, complete=False)
    assert cluster.booked == 0


def test_how_long_answers_are_is_learned_from_those_that_were_counted() -> None:
    cluster = Cluster()
    for seed in range(200):
        made = cluster.send(text(seed))
        cluster.dispatcher.began(made, None, cluster.now)
        cluster.dispatcher.release(made, cluster.now, complete=True, tokens=20 if seed % 2 else None)
    cluster.dispatcher.release(cluster.send(text(500)), cluster.now, complete=False, tokens=100_000)
    assert cluster.dispatcher.answer_tokens == pytest.approx(20, abs=1)


@pytest.mark.parametrize("ending", ["whole", "cut", "lost"])
def test_ended_request_keeps_the_size_of_its_prompt_only(ending: str) -> None:
    """A thousand requests stay for whoever looks; their chunks would be most of the memory."""
    cluster = Cluster()
    prompt = text(1)
    made = cluster.send(prompt)
    assert made.prompt is prompt and made.assumed_chunks
    if ending != "lost":
        cluster.dispatcher.began(made, None, 1.0)
    cluster.dispatcher.release(made, 2.0, complete=ending == "whole")
    assert made in cluster.dispatcher.dispatches
    assert (
        not made.prompt.names and len(made.prompt.sizes) == 1 and not made.assumed_chunks and not made.matched
    )
    assert explain(made)["prompt_bytes"] == prompt.bytes
