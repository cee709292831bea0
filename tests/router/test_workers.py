"""When a worker is one to choose, from what was seen of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.workers.circuit_breaker import FAILURES_IN_A_ROW, PAUSE_LIMIT_S, PAUSE_S
from baton_router.workers.discovery.listed import ListedStatus
from baton_router.workers.worker import Worker, WorkerHealth, WorkerStatus
from baton_router.workers.worker_list import Workers, preferred, usable

LOAD = Load(role=Role.DECODE, model="tiny", epoch="1")
RESTARTED = Load(role=Role.DECODE, model="tiny", epoch="2")
DRAINING = Load(role=Role.DECODE, model="tiny", epoch="1", draining=True)

Seen = Callable[[WorkerHealth], WorkerHealth]


def ok(health: WorkerHealth) -> WorkerHealth:
    return health.answered(LOAD)


def not_ready(health: WorkerHealth) -> WorkerHealth:
    return health.answered(LOAD, "GET /ready was answered with 503")


def draining(health: WorkerHealth) -> WorkerHealth:
    return health.answered(DRAINING)


def restarted(health: WorkerHealth) -> WorkerHealth:
    return health.answered(RESTARTED)


def miss(health: WorkerHealth) -> WorkerHealth:
    return health.missed(3, "no answer")


def strike(health: WorkerHealth) -> WorkerHealth:
    return health.judged(health.breaker.failed(1, 100.0))


def served(health: WorkerHealth) -> WorkerHealth:
    return health.judged(health.breaker.served(1, 100.0))


def ejected(health: WorkerHealth) -> WorkerHealth:
    for _ in range(FAILURES_IN_A_ROW):
        health = strike(health)
    return health


STORIES: dict[str, tuple[list[Seen], WorkerStatus]] = {
    "not seen yet": ([], WorkerStatus.STARTING),
    "missed while it starts": ([miss, miss], WorkerStatus.STARTING),
    "never came": ([miss, miss, miss], WorkerStatus.DOWN),
    "answers and is ready": ([ok], WorkerStatus.READY),
    "answers and is not ready": ([not_ready], WorkerStatus.NOT_READY),
    "became ready": ([not_ready, ok], WorkerStatus.READY),
    "is draining": ([ok, draining], WorkerStatus.DRAINING),
    "missed twice": ([ok, miss, miss], WorkerStatus.READY),
    "missed three times": ([ok, miss, miss, miss], WorkerStatus.DOWN),
    "missed twice, answered, missed twice": ([ok, miss, miss, ok, miss, miss], WorkerStatus.READY),
    "came back": ([ok, miss, miss, miss, ok], WorkerStatus.READY),
    "failed twice": ([ok, strike, strike], WorkerStatus.READY),
    "failed five times": ([ok, ejected], WorkerStatus.EJECTED),
    "failed, served, failed": ([ok, strike, strike, served, strike, strike, strike], WorkerStatus.READY),
    "a look does not pardon failures": ([ok, ejected, ok], WorkerStatus.EJECTED),
    "a restart does": ([ok, ejected, restarted], WorkerStatus.READY),
    "put aside, then silent": ([ok, ejected, miss, miss, miss], WorkerStatus.DOWN),
    "put aside, silent, back": ([ok, ejected, miss, miss, miss, ok], WorkerStatus.READY),
    "put aside, and one of before was served": ([ok, ejected, served], WorkerStatus.EJECTED),
}


@pytest.mark.parametrize(("seen", "state"), STORIES.values(), ids=STORIES.keys())
def test_worker_state_follows_its_health(seen: list[Seen], state: WorkerStatus) -> None:
    health = WorkerHealth()
    for see in seen:
        health = see(health)
    assert health.state(now=100.0) is state


def test_ejected_worker_gets_one_request_after_its_pause() -> None:
    health = ejected(ok(WorkerHealth()))
    later = 100.0 + PAUSE_S
    assert health.state(later) is WorkerStatus.HALF_OPEN
    health = health.judged(health.breaker.sent(7, later))
    assert health.state(later) is WorkerStatus.EJECTED
    assert health.judged(health.breaker.served(7, later)).state(later) is WorkerStatus.READY
    assert health.judged(health.breaker.failed(7, later)).state(later + PAUSE_S) is WorkerStatus.EJECTED


@pytest.mark.parametrize("seed", range(50))
def test_law_ready_worker_answered_last_and_success_ends_down(seed: int) -> None:
    rng = random.Random(seed)
    health, now, misses = WorkerHealth(), 0.0, 0
    for _ in range(200):
        now += rng.expovariate(1.0)
        see = rng.choice([ok, not_ready, draining, restarted, miss, served, strike])
        health = health.judged(health.breaker.failed(1, now)) if see is strike else see(health)
        misses = misses + 1 if see is miss else 0 if see in (ok, not_ready, draining, restarted) else misses
        state = health.state(now)
        assert (state is WorkerStatus.DOWN) == (misses >= 3)
        assert not health.breaker.opened or health.breaker.until <= now + PAUSE_LIMIT_S
        if state is WorkerStatus.READY:
            assert health.load is not None and not health.unavailable_reason
        if see is restarted:
            assert state in (WorkerStatus.READY, WorkerStatus.EJECTED, WorkerStatus.HALF_OPEN)


def worker(listed: Role = Role.DECODE, port: int = 1, **load: object) -> Worker:
    created = Worker(Upstream("127.0.0.1", port), listed)
    role = Role.PREFILL if listed == Role.PREFILL else Role.DECODE
    fields = {"role": role, "model": "tiny", "epoch": "1", "control": "127.0.0.1:7", **load}
    created.answered(Load(**fields))  # type: ignore[arg-type]
    return created


def ports(workers: Sequence[Worker]) -> list[int]:
    return [one.upstream.port for one in workers]


def test_usable_falls_back_to_health_without_listed_workers() -> None:
    lost, ending, unwell, well = (worker(port=number) for number in (1, 2, 3, 4))
    lost.discovery_status, ending.discovery_status = ListedStatus.UNREADY, ListedStatus.TERMINATING
    unwell.health = not_ready(unwell.health)
    assert ports(usable([lost, ending, unwell], 100.0)) == [1, 2]
    assert ports(usable([lost, ending, unwell, well], 100.0)) == [4]


# R: ready; E: ejected; T: half open; F: full; D: down. Then workers for new requests, and for failed ones.
ROLES = {
    "all are well": ("RRR", [0, 1, 2], [0, 1, 2]),
    "one of three is put aside": ("RER", [0, 2], [0, 2]),
    "half of them are": ("REER", [0, 3], [0, 3]),
    "more than half are": ("EER", [0, 1, 2], [2]),
    "all are": ("EE", [0, 1], [0, 1]),
    "one is on trial": ("RT", [0, 1], [0]),
    "nobody else is there": ("ED", [0], [0]),
    "those who are down do not count": ("REDD", [0], [0]),
    "one is full": ("RF", [0], [0]),
    "all but one are full": ("RFF", [0], [0]),
    "all are full": ("FF", [0, 1], [0, 1]),
    "the full ones count among the well": ("FER", [2], [2]),
    "nobody is there": ("D", [], []),
}


@pytest.mark.parametrize(("states", "first", "again"), ROLES.values(), ids=ROLES.keys())
def test_at_most_half_of_a_role_is_ejected(states: str, first: list[int], again: list[int]) -> None:
    workers = [worker(port=port) for port in range(len(states))]
    now = 100.0 + PAUSE_S / 2
    for one, state in zip(workers, states, strict=True):
        if state in "ET":
            one.health = ejected(one.health)
        if state == "T":
            breaker = one.health.breaker
            one.health = one.health.judged(dataclasses.replace(breaker, since=now - PAUSE_S))
        if state == "F":
            one.health = one.health.full(now)
        if state == "D":
            one.health = miss(miss(miss(one.health)))
    assert ports(usable(workers, now)) == first
    assert ports(preferred(workers, now)) == again


WRONG = {
    "a prefill worker under --decode": (Role.DECODE, {"role": Role.PREFILL}),
    "a decode worker under --prefill": (Role.PREFILL, {"role": Role.DECODE}),
    "a prefill worker without a control server": (Role.PREFILL, {"control": ""}),
}


@pytest.mark.parametrize(("listed", "load"), WRONG.values(), ids=WRONG.keys())
def test_misplaced_worker_is_not_ready_with_the_reason(listed: Role, load: dict[str, object]) -> None:
    created = worker(listed, 1, **load)
    assert created.health.state(0.0) is WorkerStatus.NOT_READY
    assert created.health.unavailable_reason


def test_worker_of_role_both_is_a_decode_worker() -> None:
    assert worker(role=Role.BOTH).health.state(0.0) is WorkerStatus.READY


def test_prefill_workers_fit_only_by_equal_digest() -> None:
    decode = worker(compatibility="a")
    same, other, aside = (
        worker(Role.PREFILL, port, compatibility=digest) for port, digest in enumerate("aba")
    )
    aside.health = not_ready(aside.health)
    assert Workers((decode,), (same, other, aside)).prefills(decode, 0.0) == [same]


def test_unknown_model_is_an_error_after_all_workers_reported() -> None:
    with_model, unseen = worker(model="tiny"), Worker(Upstream("127.0.0.1", 2), Role.DECODE)
    with pytest.raises(ModelNotFound, match="tiny"):
        Workers((with_model,), ()).serving("other", [], 0.0)
    with pytest.raises(NotReady, match="other"):
        Workers((with_model, unseen), ()).serving("other", [], 0.0)
    assert Workers((with_model, unseen), ()).serving("tiny", [], 0.0) == [with_model]
    assert Workers((with_model,), ()).serving(None, [with_model.name], 0.0) == []


def test_worker_serves_its_model_under_all_names() -> None:
    one, other = worker(names=("tiny", "small", "org/tiny")), worker(port=2)
    workers = Workers((one, other), ())
    assert workers.models() == ("tiny", "org/tiny", "small")
    assert list(workers.serving("small", (), now=0)) == [one]
    assert list(workers.serving("tiny", (), now=0)) == [one, other]
    with pytest.raises(ModelNotFound):
        workers.serving("large", (), now=0)
