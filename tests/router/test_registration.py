"""Workers come, drain and go as they are listed, and of who has gone nothing is left."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Load, Role
from baton_http.upstream import UpstreamPool
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.workers.discovery.listed import ListedStatus, ListedWorker
from baton_router.workers.registration import RELEASE_S, WorkerRegistration
from baton_router.workers.worker import Worker, WorkerStatus
from baton_router.workers.worker_list import MODEL_GONE_S, Workers
from baton_router.workers.worker_state import NO_SLOT, WorkerStates

DRAIN_S = 60.0
A, B = ListedWorker("10.0.0.1", 8000, Role.DECODE), ListedWorker("10.0.0.2", 8000, Role.DECODE)
PREFILL = ListedWorker("10.0.0.3", 8000, Role.PREFILL)


def with_status(one: ListedWorker, status: ListedStatus) -> ListedWorker:
    return ListedWorker(one.host, one.port, one.role, one.revision, status)


class Router:
    """A registration with its workers, and a clock that the test advances."""

    def __init__(self, *listed: ListedWorker) -> None:
        self.workers = Workers()
        self.worker_states = WorkerStates()
        self.upstreams = UpstreamPool(1.0)
        self.now = 0.0
        self.registration = WorkerRegistration(
            self.workers, self.worker_states, self.upstreams, DRAIN_S, lambda: self.now
        )
        self.lists(*listed)

    def lists(self, *listed: ListedWorker, source: str = "test") -> None:
        self.registration.on_workers(source, listed)
        for worker in self.workers.listed:
            if worker.health.load is None:
                self.answer(worker)

    def answer(self, worker: Worker, model: str = "tiny") -> None:
        role = Role.PREFILL if worker.listed is Role.PREFILL else Role.DECODE
        load = Load(role=role, model=model, epoch="1", control="x:1", total_blocks=1000, block_size=16)
        worker.answered(load)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.registration.release_expired()

    def worker(self, one: ListedWorker) -> Worker:
        return next(worker for worker in self.workers.all if worker.name == one.name)

    def names(self, workers: Iterable[Worker]) -> list[str]:
        return sorted(worker.name for worker in workers)


def test_listed_worker_is_registered_with_its_role() -> None:
    router = Router(A, PREFILL)
    assert router.names(router.workers.decode) == [A.name]
    assert router.names(router.workers.prefill) == [PREFILL.name]


def test_lists_of_several_sources_are_combined() -> None:
    router = Router(A)
    router.lists(A, B, source="another")
    assert router.names(router.workers.decode) == [A.name, B.name]
    router.lists()
    assert router.names(router.workers.decode) == [A.name, B.name]  # the other one lists it still
    router.lists(source="another")
    assert router.names(router.workers.decode) == []


def test_unlisted_worker_gets_no_requests_and_finishes_its_own() -> None:
    router = Router(A, B)
    leaving = router.worker(A)
    leaving.in_flight = 1
    router.lists(B)
    assert router.names(router.workers.serving("tiny", (), router.now)) == [B.name]
    assert (leaving.state(router.now), router.workers.leaving) == (WorkerStatus.DRAINING, (leaving,))
    router.passes(DRAIN_S / 2)
    assert router.workers.leaving == (leaving,)
    leaving.in_flight = 0
    router.passes(0.5)
    assert leaving.removed and router.workers.all == router.workers.listed == (router.worker(B),)


def test_expired_drain_releases_the_worker_with_its_requests() -> None:
    router = Router(A, B)
    late = router.worker(A)
    late.in_flight = 1
    router.lists(B)
    router.passes(DRAIN_S)
    assert late.expired and not late.removed  # the requests that it has are being failed
    router.passes(RELEASE_S)
    assert late.removed and router.workers.leaving == ()


def test_terminating_worker_gets_no_requests_until_it_recovers() -> None:
    router = Router(A, B)
    for status, state in (
        (ListedStatus.TERMINATING, WorkerStatus.DRAINING),
        (ListedStatus.UNREADY, WorkerStatus.NOT_READY),
    ):
        router.lists(with_status(A, status), B)
        assert router.worker(A).state(0.0) is state
        assert router.worker(A).reason == f"it is listed as {status.name.lower()}"
        assert router.names(router.workers.serving("tiny", (), 0.0)) == [B.name]
    router.lists(A, B)
    assert router.names(router.workers.serving("tiny", (), 0.0)) == [A.name, B.name]
    assert not router.worker(A).reason


def test_worker_listed_again_before_its_end_continues() -> None:
    router = Router(A)
    worker = router.worker(A)
    worker.in_flight = 1
    worker_state = router.worker_states.of(worker)
    router.lists()
    router.lists(A)
    assert router.workers.decode == (worker,) and not router.workers.leaving
    assert worker.ready(router.now) and router.worker_states.of(worker) is worker_state
    router.passes(2 * DRAIN_S)  # its time does not run any more
    assert not worker.removed and not worker.expired


def test_address_with_another_role_is_another_worker() -> None:
    router = Router(A)
    before = router.worker(A)
    before.in_flight = 1
    router.worker_states.of(before)
    router.lists(ListedWorker(A.host, A.port, Role.PREFILL, "next"))
    assert before.removed and not router.workers.leaving and not router.workers.decode
    (after,) = router.workers.prefill
    assert (after.name, after.revision) == (before.name, "next")
    assert after.upstream is not before.upstream


def test_removed_worker_frees_its_slot_and_index_entries() -> None:
    router = Router(A, B)
    gone, stays = router.worker(A), router.worker(B)
    prompt = chunk_text(b"x" * 5_000, 7)
    worker_state, other = router.worker_states.of(gone), router.worker_states.of(stays)
    sent = router.worker_states.sent(prompt, worker_state, 0)
    router.worker_states.answered(prompt, worker_state)
    blocks = router.worker_states.blocks.open(worker_state.slot)
    assert router.worker_states.match(prompt) == {worker_state.slot: len(prompt.names)}
    slot = worker_state.slot
    router.lists(B, PREFILL)
    router.passes(0.5)
    assert (worker_state.slot, blocks.closed, len(router.worker_states)) == (NO_SLOT, True, 0)
    third = router.worker_states.of(router.worker(PREFILL))
    assert (third.slot, other.slot) == (slot, 1 - slot)
    # Later events of the removed worker belong to no worker.
    router.worker_states.lost(sent, worker_state)
    router.worker_states.answered(prompt, worker_state)
    assert router.worker_states.match(prompt) == {}
    assert router.worker_states.of(gone).slot == NO_SLOT


def test_model_without_workers_is_unavailable_and_later_unknown() -> None:
    router = Router(A, B)
    router.answer(router.worker(A), "large")
    assert router.workers.models() == ("large", "tiny")
    router.lists(B)
    router.passes(12.0)
    assert router.workers.models() == ("tiny",)
    with pytest.raises(NotReady, match="the last one that did went 12 s ago"):
        router.workers.serving("large", (), router.now)
    router.passes(MODEL_GONE_S)
    with pytest.raises(ModelNotFound, match="tiny"):
        router.workers.serving("large", (), router.now)


def test_missing_workers_are_explained_by_their_sources() -> None:
    router = Router()
    router.workers.unlisted = lambda: "DNS keeps silent"
    with pytest.raises(NotReady, match="There is no decode worker: DNS keeps silent"):
        router.workers.serving("tiny", (), 0.0)


def test_model_is_not_unknown_before_all_sources_listed() -> None:
    router = Router(A)
    router.workers.complete = lambda: False
    with pytest.raises(NotReady):
        router.workers.serving("large", (), 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_law_slots_are_reused_and_finally_free(seed: int) -> None:
    rng = random.Random(seed)
    router = Router()
    running: list[Worker] = []
    most = 0
    for _ in range(200):
        match rng.randrange(5):
            case 0 | 1:
                roles = (Role.DECODE, Role.PREFILL)
                router.lists(
                    *(
                        ListedWorker(
                            f"10.0.0.{host}",
                            8000,
                            rng.choice(roles),
                            rng.choice("ab"),
                            rng.choice(list(ListedStatus)),
                        )
                        for host in rng.sample(range(8), rng.randrange(6))
                    )
                )
            case 2 if router.workers.listed:
                worker = rng.choice(router.workers.listed)
                worker.in_flight += 1
                running.append(worker)
            case 3 if running:
                running.pop(rng.randrange(len(running))).in_flight -= 1
            case _:
                router.passes(rng.choice((0.5, RELEASE_S, DRAIN_S)))
        status = router.workers.all
        most = max(most, len(status))
        assert len({worker.name for worker in status}) == len(status)
        slots = [router.worker_states.of(worker).slot for worker in status]
        assert len(set(slots)) == len(slots) and all(0 <= slot < most for slot in slots)
        assert all(not worker.removed for worker in status)
    for worker in running:
        worker.in_flight -= 1
    router.lists()
    router.passes(0.5)
    assert router.workers.all == () and len(router.worker_states) == 0
    assert len(router.upstreams) == 0
