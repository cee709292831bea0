"""Attribution of failed requests to workers."""

from __future__ import annotations

import random

import pytest

from baton_api.prompt_report import Fallback, PromptReport
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.scheduling.candidates import WorkerPair
from baton_router.scheduling.outcome_attribution import BAD_PAIR_S, OutcomeAttribution
from baton_router.workers.circuit_breaker import FAILURES_IN_A_ROW, PAUSE_S
from baton_router.workers.worker import FULL_S, Worker, WorkerStatus
from baton_router.workers.worker_state import WorkerStates


def worker(role: Role, port: int, revision: str = "") -> Worker:
    created = Worker(Upstream("127.0.0.1", port), role, revision)
    created.answered(Load(role=role, model="tiny", epoch="1", control="x:1" if role is Role.PREFILL else ""))
    return created


def report(fallback: str = "", remote: bool = False) -> PromptReport:
    return PromptReport(
        tokens=100,
        cached=0,
        held=0,
        queue_s=0.0,
        compute_s=0.1,
        transfer_s=0.0,
        remote=remote,
        fallback=fallback,
    )


class Court:
    """A pair whose requests are judged, at a time that the test moves."""

    def __init__(self, revision: str = "") -> None:
        self.pair = WorkerPair(worker(Role.DECODE, 1, revision), worker(Role.PREFILL, 2, revision))
        self.worker_states = WorkerStates()
        self.outcomes = OutcomeAttribution(self.worker_states.transfer)
        self.now = 100.0
        self.number = 0

    @property
    def prefill(self) -> Worker:
        assert self.pair.prefill is not None
        return self.pair.prefill

    @property
    def revision_requests(self) -> dict[tuple[str, str], float]:
        """Requests by generation and result."""
        (family,) = self.outcomes.revision_requests.collect()
        return {(one.labels["revision"], one.labels["result"]): one.value for one in family.samples}

    def request(self, prompt_report: PromptReport | None = None, *, lost: bool = False) -> None:
        self.number += 1
        self.outcomes.sent(self.number, self.pair, self.now)
        if lost:
            self.outcomes.failed(self.number, self.pair, self.now)
        else:
            self.outcomes.answered(self.number, self.pair, prompt_report, self.now)
        self.outcomes.release(self.number, self.pair)

    @property
    def states(self) -> tuple[WorkerStatus, WorkerStatus]:
        return self.pair.decode.health.state(self.now), self.prefill.health.state(self.now)

    @property
    def apart(self) -> bool:
        cost = self.worker_states.transfer(self.prefill.name, self.pair.decode.name)
        return self.now < cost.apart_until


# Reason in a report -> whether it counts against the prefill worker, and against the pair.
BLAME = {
    Fallback.UNREACHABLE: (True, False),
    Fallback.LOST: (True, False),
    Fallback.FAILED: (True, False),
    Fallback.MISMATCH: (True, False),
    Fallback.PROTOCOL: (True, False),
    Fallback.REFUSED: (False, True),
    Fallback.TRANSPORT: (False, True),
    Fallback.CHECKSUM: (False, True),
    Fallback.DEADLINE: (False, True),
    Fallback.BUSY: (False, False),
    Fallback.REJECTED: (False, False),
    Fallback.CANCELLED: (False, False),
    Fallback.MISSING: (False, False),
    Fallback.TRANSFER_FAILED: (False, False),
    "a later worker's word": (False, False),
    "": (False, False),
}


@pytest.mark.parametrize(("fallback", "blame"), BLAME.items(), ids=[str(one) for one in BLAME])
def test_failure_reports_blame_the_worker_or_the_pair(fallback: str, blame: tuple[bool, bool]) -> None:
    court = Court()
    for _ in range(FAILURES_IN_A_ROW):
        court.request(report(fallback))
    prefill = WorkerStatus.EJECTED if blame[0] else WorkerStatus.READY
    assert court.states == (WorkerStatus.READY, prefill)
    assert court.apart == blame[1]


def test_attribution_covers_every_reason() -> None:
    assert set(Fallback) < set(BLAME)


def test_failed_pair_is_separated_for_a_while_only() -> None:
    court = Court()
    court.request(report(Fallback.TRANSPORT))
    court.now += BAD_PAIR_S - 0.1
    assert court.apart
    court.now += 0.1
    assert not court.apart


def test_full_worker_is_skipped_briefly_and_stays_healthy() -> None:
    court = Court()
    court.outcomes.full(court.pair, court.now)
    assert court.states == (WorkerStatus.FULL, WorkerStatus.READY)
    court.now += FULL_S
    assert court.states == (WorkerStatus.READY, WorkerStatus.READY)
    assert not court.pair.decode.health.breaker.recent


def test_lost_decode_worker_blames_no_other_worker() -> None:
    court = Court()
    for _ in range(FAILURES_IN_A_ROW):
        court.request(lost=True)
    assert court.states == (WorkerStatus.EJECTED, WorkerStatus.READY)


def test_good_prompt_clears_a_prefill_worker_on_trial() -> None:
    court = Court()
    for _ in range(FAILURES_IN_A_ROW):
        court.request(report(Fallback.LOST))
    court.now += PAUSE_S
    assert court.states == (WorkerStatus.READY, WorkerStatus.HALF_OPEN)
    court.request(report())
    assert court.states == (WorkerStatus.READY, WorkerStatus.HALF_OPEN), (
        "the decode worker held the prompt: nothing was learned"
    )
    court.request(report(remote=True))
    assert court.states == (WorkerStatus.READY, WorkerStatus.READY)


def test_outcomes_are_counted_by_revision() -> None:
    court = Court("6f1c2ab9")
    for lost in (False, True, False, True, True):
        court.request(report(), lost=lost)
    assert court.revision_requests == {("6f1c2ab9", "passed"): 2, ("6f1c2ab9", "failed"): 3}
    nobodys = Court()
    nobodys.request(report())
    assert not nobodys.revision_requests


def test_first_token_times_are_counted_by_revision() -> None:
    court, nobodys = Court("6f1c2ab9"), Court()
    for seconds in (0.4, 2.0, 2.4):
        court.outcomes.first_byte(court.pair, seconds)
        nobodys.outcomes.first_byte(nobodys.pair, seconds)
    (family,) = court.outcomes.revision_first_tokens.collect()
    within = {one.labels["le"]: one.value for one in family.samples if "le" in one.labels}
    assert [within[bound] for bound in ("0.3", "0.4", "1.5", "2.0", "2.5", "+Inf")] == [0, 1, 1, 2, 3, 3]
    assert {one.labels["revision"] for one in family.samples} == {"6f1c2ab9"}
    (family,) = nobodys.outcomes.revision_first_tokens.collect()
    assert not family.samples


@pytest.mark.parametrize("seed", range(30))
def test_law_no_probe_stays_open_after_any_outcomes(seed: int) -> None:
    rng = random.Random(seed)
    court = Court()
    open_: list[int] = []
    for number in range(1, 400):
        court.now += rng.expovariate(2.0)
        court.outcomes.sent(number, court.pair, court.now)
        open_.append(number)
        while open_ and rng.random() < 0.55:
            ended = open_.pop(rng.randrange(len(open_)))
            match rng.randrange(4):
                case 0:
                    court.outcomes.failed(ended, court.pair, court.now)
                case 1:
                    prompt_report = report(rng.choice(list(Fallback)), remote=rng.random() < 0.5)
                    court.outcomes.answered(ended, court.pair, prompt_report, court.now)
                case 2:  # began, and broke off
                    court.outcomes.answered(ended, court.pair, report(remote=True), court.now)
                    court.outcomes.failed(ended, court.pair, court.now)
                case _:  # the client left, or the worker was full
                    pass
            court.outcomes.release(ended, court.pair)
        for one in (court.pair.decode, court.prefill):
            assert one.health.breaker.probe in (0, *open_)
    for ended in open_:
        court.outcomes.release(ended, court.pair)
    assert not court.pair.decode.health.breaker.probe
    assert not court.prefill.health.breaker.probe
