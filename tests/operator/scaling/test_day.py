"""
A day of steps, sines and nothing, in virtual time: both roles, whole requests, and others to compare with.

`python -m benchmarks.scaling` measures the same with real processes.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks import virtual_time
from benchmarks.scaling.__main__ import imagined
from benchmarks.scaling.policies import POLICIES
from benchmarks.scaling.score import Count, Score

pytestmark = pytest.mark.slow

Scores = Mapping[str, Score]


@pytest.fixture(scope="module")
def scores() -> Scores:
    return {kind: virtual_time.run(imagined(kind, seed=1)) for kind in POLICIES}


def test_day_all_policies_lose_no_request_nor_shrink_blind(scores: Scores) -> None:
    for kind, score in scores.items():
        assert all(one.ok for one in score.answers), kind
        assert score.ends.badly == 0, kind
        assert score.fell_in_the_dark == 0, kind
    assert scores["baton"].ends.well > 10


def test_day_static_peak_workers_attain_objectives(scores: Scores) -> None:
    assert scores["static"].attained > 0.99


def test_day_baton_two_thirds_of_workers_attains_nearly_as_much(scores: Scores) -> None:
    baton, static = scores["baton"], scores["static"]
    assert baton.attained > static.attained - 0.06
    assert baton.replica_hours < 0.67 * static.replica_hours


def test_more_is_attained_than_by_an_hpa_for_fewer_workers(scores: Scores) -> None:
    baton, hpa = scores["baton"], scores["hpa"]
    assert baton.attained > hpa.attained
    assert baton.replica_hours < 0.75 * hpa.replica_hours


def test_day_role_grows_only_in_its_own_step(scores: Scores) -> None:
    prompts, answers = (_during(scores["baton"], *minutes) for minutes in ((15, 30), (65, 80)))
    assert min(one.prefill for one in prompts) >= 4 > max(one.decode for one in prompts)
    assert min(one.decode for one in answers) >= 4 > max(one.prefill for one in answers)


def test_day_idle_service_scales_to_zero_and_wakes_on_request(scores: Scores) -> None:
    asleep = _during(scores["baton"], 150, 160)
    assert {(one.prefill, one.decode) for one in asleep} == {(0, 0)}
    woken = [one for one in _during(scores["baton"], 160, 180) if one.prefill]
    first = min(one.minute for one in woken)
    assert first < 162 and all(one.prefill for one in _during(scores["baton"], first, 180))


def test_slots_bind_first_decode_grows_with_its_queue() -> None:
    """KV blocks and times per token say that decode is half empty: only its slots are taken."""
    score = virtual_time.run(imagined("baton", seed=1, name="slots"))
    assert score.attained > 0.95
    assert max(one.prefill for one in score.counts) == 1


def test_slow_starts_demand_unknown_no_overshoot() -> None:
    """A start takes ten minutes, eight of them until there is a node. No router reports its demand."""
    score = virtual_time.run(imagined("baton", seed=1, name="slow-starts"))
    burst = [one for one in score.counts if one.minute < 10]
    assert max(one.prefill for one in burst) <= 2 and max(one.decode for one in burst) <= 2
    step = [one for one in score.counts if 100 <= one.minute < 110]
    assert max(one.prefill for one in step) >= 6, "while others wait for a node"


def test_short_chats_prefill_stays_small() -> None:
    """Decode workers compute short prompts by themselves."""
    score = virtual_time.run(imagined("baton", seed=1, name="short-chats"))
    assert max(one.prefill for one in score.counts) == 1
    assert score.attained > 0.9


def _during(score: Score, start: float, end: float) -> list[Count]:
    return [one for one in score.counts if start <= one.minute < end]
