"""The power-of-two-choices policy."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.scheduling.fallback_policy import choose_pair, choose_worker
from baton_router.workers.worker import Worker, Workers


def worker(port: int, listed: Role = Role.DECODE, **load: object) -> Worker:
    created = Worker(Upstream("127.0.0.1", port), listed)
    created.answered(Load(role=listed, model="tiny", control="127.0.0.1:7", **load))  # type: ignore[arg-type]
    return created


def busy(*running: int) -> list[Worker]:
    return [worker(port, running=count) for port, count in enumerate(running)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("running", "chosen"), [((4,), 0), ((1, 2), 0), ((2, 1), 1), ((9, 0), 1)])
def test_less_busy_of_two_workers_is_chosen(running: tuple[int, ...], chosen: int, seed: int) -> None:
    candidates = busy(*running)
    assert choose_worker(candidates, random.Random(seed)) is candidates[chosen]


def test_equal_requests_are_decided_by_waiting_tokens() -> None:
    one, two = worker(1, running=2, queued_tokens=500), worker(2, running=2, queued_tokens=20)
    assert {choose_worker([one, two], random.Random(seed)) for seed in range(20)} == {two}


def test_equally_busy_workers_are_chosen_equally_often() -> None:
    candidates, rng = busy(1, 1, 1, 1), random.Random(1)
    counts = Counter(choose_worker(candidates, rng).name for _ in range(4000))
    assert all(900 < count < 1100 for count in counts.values()), counts


@pytest.mark.parametrize("seed", range(10))
def test_busiest_worker_is_never_chosen_and_load_stays_even(seed: int) -> None:
    rng = random.Random(seed)
    candidates = busy(*[0] * rng.randint(2, 12))
    for _ in range(2000):
        chosen = choose_worker(candidates, rng)
        least, most = (f(one.in_flight for one in candidates) for f in (min, max))
        assert (
            chosen.in_flight < most or least == most or sum(one.in_flight == most for one in candidates) > 1
        )
        chosen.in_flight += 1
        if rng.random() < 0.5:
            rng.choice([one for one in candidates if one.in_flight]).in_flight -= 1
    counts = [one.in_flight for one in candidates]
    assert max(counts) - min(counts) <= 0.2 * max(counts) + 8


def test_pair_needs_equal_digests_else_decode_computes_locally() -> None:
    one, two = worker(1, compatibility="a"), worker(2, compatibility="b")
    prefill = worker(3, Role.PREFILL, compatibility="a")
    workers, rng = Workers((one, two), (prefill,)), random.Random(0)
    for _ in range(20):
        pair = choose_pair(choose_worker, workers, "tiny", [], 0.0, rng)
        assert pair is not None
        assert (pair.decode, pair.prefill) in [(one, prefill), (two, None)]


def test_tried_worker_is_not_tried_again() -> None:
    one, two = workers = tuple(busy(0, 9))
    rng = random.Random(0)
    pair = choose_pair(choose_worker, Workers(workers, ()), "tiny", [one.name], 0.0, rng)
    assert pair is not None and pair.decode is two
    assert choose_pair(choose_worker, Workers(workers, ()), "tiny", [one.name, two.name], 0.0, rng) is None
