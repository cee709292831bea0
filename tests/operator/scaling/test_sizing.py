"""One worker by the lines of a profile: what it serves, what binds first, what measurements change."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from baton_api.profiles import Profile
from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import Objectives
from baton_operator.scaling.signals import ServiceMetrics
from baton_operator.scaling.sizing import MOST_FACTOR, LearnedRequests, worker_sizes
from tests.operator.scaling.test_seeds import PROFILE


def objectives(first_token: str, token: str) -> Objectives:
    return Objectives(time_to_first_token=Duration(first_token), inter_token_latency=Duration(token))


WANTED = objectives("5s", "100ms")
NOW = 1000.0
HEARD = {"routers": 1.0, "age": 1.0}


NOTHING = LearnedRequests()


def looked(
    values: Mapping[str, float],
    seen: LearnedRequests = NOTHING,
    now: float = NOW,
    profile: Profile = PROFILE,
) -> LearnedRequests:
    return seen.looked(profile, ServiceMetrics({**HEARD, **values}), now)


def test_sizes_of_the_profiles_own_requests_are_its_capacity() -> None:
    sizes = worker_sizes(PROFILE, LearnedRequests(), WANTED, 240.0, 1)
    assert sizes["prefill"].tokens_per_s == pytest.approx(PROFILE.capacity.prefill_tokens_per_s)
    assert sizes["decode"].tokens_per_s == pytest.approx(PROFILE.capacity.decode_tokens_per_s)


SOON = objectives("1s", "20ms")
LONG_CONTEXT = {"decode_prompt": 20_000.0, "decode_answer": 100.0, "prefill_uncached": 100.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, float], Objectives, int | None, str, str]] = {
    "slots": ({"max_streams": 8}, {}, WANTED, 1, "TimeToFirstToken", "BatchSlots"),
    "KV blocks": ({}, LONG_CONTEXT, WANTED, 1, "Throughput", "KVBlocks"),
    "time per token": ({}, {}, objectives("60s", "20ms"), 1, "Throughput", "InterTokenLatency"),
    "time to first token": ({}, {}, SOON, 1, "TimeToFirstToken", "InterTokenLatency"),
    "one queue before 90": ({}, {}, SOON, 90, "Throughput", "InterTokenLatency"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "values", "wanted", "prefills", "prefill", "decode"), CASES.values(), ids=CASES
)
def test_sizes_name_the_bound_that_binds(
    changed: dict[str, Any],
    values: dict[str, float],
    wanted: Objectives,
    prefills: int | None,
    prefill: str,
    decode: str,
) -> None:
    profile = msgspec.structs.replace(PROFILE, **changed)
    sizes = worker_sizes(profile, looked(values, profile=profile), wanted, 0.0, prefills)
    assert (sizes["prefill"].bound, sizes["decode"].bound) == (prefill, decode)
    assert sizes["prefill"].tokens_per_s > 0 and sizes["decode"].tokens_per_s > 0


def test_sizes_itl_bound_leaves_room_for_chance() -> None:
    """As many streams as the objective allows are too many half of the time."""
    wanted = objectives("5s", "40ms")
    most = (0.04 - PROFILE.step.base_s) / PROFILE.step.stream_s / 0.04
    sizes = worker_sizes(PROFILE, LearnedRequests(), wanted, 0.0, 1)["decode"]
    assert sizes.bound == "InterTokenLatency"
    assert 0.7 * most < sizes.tokens_per_s < 0.95 * most


def test_sizes_objectives_unattainable_are_zero() -> None:
    sizes = worker_sizes(PROFILE, LearnedRequests(), objectives("100ms", "1ms"), 0.0, 1)
    assert {one.tokens_per_s for one in sizes.values()} == {0.0}
    assert (sizes["prefill"].bound, sizes["decode"].bound) == ("TimeToFirstToken", "InterTokenLatency")


def test_sizes_without_prefill_role_spend_time_on_prompts() -> None:
    without_prefill, beside = (
        worker_sizes(PROFILE, LearnedRequests(), WANTED, 0.0, one)["decode"] for one in (None, 0)
    )
    assert without_prefill.tokens_per_s < 0.9 * beside.tokens_per_s


def test_sizes_follow_lengths_at_once_and_ahead() -> None:
    """Prompts grow from one look to the next: both roles are sized for them, after any number of samples."""
    seen = LearnedRequests()
    for tick in range(100):
        seen = looked(
            {"prefill_uncached": 500.0, "decode_prompt": 500.0, "decode_answer": 100.0}, seen, NOW + 15 * tick
        )
    short = worker_sizes(PROFILE, seen, WANTED, 240.0, 1)
    longer = looked(
        {"prefill_uncached": 3000.0, "decode_prompt": 3000.0, "decode_answer": 100.0}, seen, NOW + 1500
    )
    sizes = worker_sizes(PROFILE, longer, WANTED, 0.0, 1)
    assert sizes["prefill"].tokens_per_s < short["prefill"].tokens_per_s
    assert sizes["decode"].tokens_per_s < short["decode"].tokens_per_s
    rising = LearnedRequests()
    for tick in range(20):
        rising = looked(
            {"decode_prompt": 1500.0 + 50.0 * tick, "prefill_uncached": 500.0}, rising, NOW + 15 * tick
        )
    assert rising.requests(PROFILE, 240.0).prompt > rising.requests(PROFILE, 0.0).prompt == 2450.0


def test_sizes_are_corrected_by_measured_speed() -> None:
    """Prompts take twice as long as the profile says, and steps half as long."""
    seen = LearnedRequests()
    at_work = {"decode_mean_running": 20.0, "decode_workers": 2.0, "decode_token_mean": 0.01}
    for tick in range(100):
        speed = 0.5 * 500 / PROFILE.prefill.seconds(500, 500)
        seen = looked({"prefill_uncached": 500.0, "prefill_speed": speed, **at_work}, seen, NOW + 15 * tick)
    assert seen.prefill_speed == pytest.approx(0.5, rel=0.01)
    assert seen.decode_speed == pytest.approx(2.0, rel=0.01)
    corrected, before = (worker_sizes(PROFILE, one, WANTED, 0.0, 1) for one in (seen, LearnedRequests()))
    assert corrected["prefill"].tokens_per_s < 0.6 * before["prefill"].tokens_per_s
    assert corrected["decode"].tokens_per_s > before["decode"].tokens_per_s


def test_sizes_decode_worker_serves_as_its_step_line_says() -> None:
    """Eight streams of 500 tokens of prompt and 50 of the answer so far, whose tokens each step reads."""
    step = msgspec.structs.replace(PROFILE.step, token_s=1e-6)
    profile = msgspec.structs.replace(PROFILE, step=step, max_streams=8)
    worker = worker_sizes(profile, LearnedRequests(), WANTED, 0.0, 1)["decode"]
    assert worker.tokens_per_s == pytest.approx(8 / step.seconds(8, 8 * 550))
    answers = looked({"decode_answer": 300.0}, profile=profile)
    assert answers.requests(profile, 0.0).answer == 300.0
    longer = worker_sizes(profile, answers, WANTED, 0.0, 1)["decode"]
    assert longer.tokens_per_s == pytest.approx(8 / step.seconds(8, 8 * 650))


def test_sizes_prefill_queue_is_counted_without_one_worker() -> None:
    one, two, three = (
        worker_sizes(PROFILE, LearnedRequests(), SOON, 0.0, prefills)["prefill"] for prefills in (1, 2, 3)
    )
    assert one == two
    assert three.tokens_per_s > 1.05 * two.tokens_per_s


def test_seen_without_cached_tokens_takes_the_profiles_share() -> None:
    """A profile made with 100 of 500 tokens uncached has a fifth of other prompts uncached too."""
    measured = msgspec.structs.replace(PROFILE.objectives, cached_share=0.8)
    profile = msgspec.structs.replace(PROFILE, objectives=measured)
    requests = looked({"decode_prompt": 1000.0}, profile=profile).requests(profile, 0.0)
    assert (requests.prompt, requests.uncached, requests.answer) == (1000.0, 200.0, 100.0)


def test_seen_lengths_older_than_five_minutes_are_forgotten() -> None:
    seen = LearnedRequests()
    for time, prompt in ((0, 10_000.0), *((400 + 15 * tick, 12_000.0) for tick in range(12))):
        seen = looked({"decode_prompt": prompt}, seen, time)
    assert seen.requests(PROFILE, 600.0).prompt == 12_000.0
    rising = LearnedRequests()
    for tick in range(12):
        rising = looked({"decode_prompt": 500.0 + tick}, rising, 1000.0 + 15 * tick)
    assert rising.requests(PROFILE, 150.0).prompt == pytest.approx(511.0 + 10.0)


@pytest.mark.parametrize("speed", [0.3, 1.0, 3.0])
def test_seen_speed_of_steps_is_against_the_profile(speed: float) -> None:
    """Ten streams each, of 900 tokens of prompt and 50 of the answer so far."""
    profile = msgspec.structs.replace(PROFILE, step=msgspec.structs.replace(PROFILE.step, token_s=1e-6))
    metrics = {
        "decode_prompt": 900.0,
        "decode_answer": 100.0,
        "decode_mean_running": 20.0,
        "decode_workers": 2.0,
        "decode_token_mean": profile.step.seconds(10, 10 * 950) / speed,
    }
    seen = LearnedRequests()
    for tick in range(100):
        seen = looked(metrics, seen, NOW + 15 * tick, profile)
    assert seen.decode_speed == pytest.approx(speed, rel=1e-3)


def test_seen_without_figures_stays_as_it_was() -> None:
    seen = looked({"prefill_uncached": 500.0, "decode_prompt": 900.0, "decode_answer": 50.0})
    later = seen.looked(PROFILE, ServiceMetrics({}, "Prometheus does not answer"), NOW + 3600)
    assert later == seen


def random_values(rng: random.Random) -> Mapping[str, float]:
    names = ("prefill_uncached", "decode_prompt", "decode_answer", "prefill_speed", "decode_mean_running",
             "decode_workers", "decode_token_mean")  # fmt: skip
    chosen = [name for name in names if rng.random() < 0.8]
    return {name: rng.choice((0.0, rng.random(), rng.uniform(1, 50_000))) for name in chosen}


@pytest.mark.parametrize("seed", range(50))
def test_sizes_any_values_are_finite_and_never_rise_with_length(seed: int) -> None:
    rng = random.Random(seed)
    seen = LearnedRequests()
    for tick in range(30):
        seen = looked(random_values(rng), seen, NOW + 15 * tick)
        assert all(1 / MOST_FACTOR <= one <= MOST_FACTOR for one in (seen.prefill_speed, seen.decode_speed))
        wanted = objectives(f"{rng.uniform(0.1, 9):.3f}s", f"{rng.uniform(5, 200):.0f}ms")
        sizes = worker_sizes(PROFILE, seen, wanted, rng.uniform(0, 600), rng.choice((None, 0, 1, 9)))
        assert all(0 <= one.tokens_per_s < 1e9 for one in sizes.values())
        prompt = rng.uniform(1, 20_000)
        lengths = {"prefill_uncached": 500.0, "decode_answer": 100.0}
        short, long = (
            worker_sizes(PROFILE, looked({"decode_prompt": one, **lengths}), wanted, 0.0, 1)[
                "decode"
            ].tokens_per_s
            for one in (prompt, 2 * prompt)
        )
        assert long <= short
