"""What the scheduler does with fetched prompts, exports and KV events: decided from the books alone."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.hashing import root_hash
from baton_engine.kv.events import Change, KvEvents, Stored
from baton_engine.requests import Fetch, SamplingParams
from baton_engine.scheduling.scheduler import YIELDS, Plan, Scheduler
from baton_engine.scheduling.sequence import Job, Stage
from tests.engine.serving import Recipient, prompt_of
from tests.engine.test_scheduler import SIZE, Books, shape


class RemotePrefillStub:
    """A `RemotePrefill` for a scheduler, which starts and cancels nothing itself."""

    def start(self, fetch: Fetch) -> None:
        raise AssertionError("the scheduler started a fetch")

    def cancel(self, request_id: str) -> None:
        raise AssertionError("the scheduler canceled a fetch")


class ChangeLog:
    """A recipient of KV events that keeps them."""

    last = -1

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def publish(self, changes: Any) -> None:
        self.changes += changes


REMOTE = RemotePrefillStub()


def remote_books(**sizes: Any) -> Books:
    """Books of an engine that fetches each prompt with more than 4 missing tokens."""
    return Books(**{"local_prefill_tokens": 4, **sizes})


def fetching(books: Books, name: str = "remote", length: int = 18, **fields: Any) -> tuple[Job, Fetch]:
    """Return a job whose prompt is being fetched."""
    job = books.add(name, length, remote=REMOTE, **fields)
    assert books.step().fetches == [job]
    assert job.fetch is not None
    return job, job.fetch


def test_fetch_names_the_prompt_and_all_missing_blocks() -> None:
    books = remote_books()
    books.add("cached", 9, max_tokens=1, salt="tenant")
    books.step()
    job = books.add("remote", 18, remote=REMOTE, salt="tenant", temperature=0.5)
    job.request.trace = "00-trace"
    plan = books.step()
    assert (plan.fetches, plan.admitted, shape(plan)) == ([job], [], ([], []))
    assert plan.changed
    assert job.fetch == Fetch(
        request_id="remote",
        tokens=prompt_of(18),
        start_block=2,
        parent=job.hashes[1],
        blocks=tuple(job.request.blocks[2:]),
        sampling=SamplingParams(temperature=0.5, max_tokens=8),
        salt="tenant",
        trace="00-trace",
    )
    assert len(job.fetch.blocks) == 3
    assert (job.stage, books.scheduler.fetching, books.scheduler.running) == (
        Stage.FETCHING,
        {"remote": job},
        [],
    )
    assert books.pool.pinned == 3
    assert (job.request.cached_tokens, job.local_tokens, job.admissions) == (8, 8, 1)


@pytest.mark.parametrize(("length", "fetched"), [(4, False), (5, True)])
def test_fetch_begins_above_the_local_prefill_limit(length: int, fetched: bool) -> None:
    """A prompt with exactly `local_prefill_tokens` missing tokens is computed here."""
    books = remote_books()
    job = books.add("remote", length, remote=REMOTE)
    plan = books.step()
    assert (plan.fetches == [job]) is fetched
    assert shape(plan) == ([], [] if fetched else [("remote", 4)])


def test_fetch_begins_when_prompts_took_the_whole_pass() -> None:
    """A fetch needs no compute, so a spent budget delays only the prompts that this worker computes."""
    books = remote_books()
    books.add("long", 40, seed=1)
    job = books.add("remote", 18, seed=2, remote=REMOTE)
    books.add("local", 4, seed=3)
    plan = books.step()
    assert shape(plan) == ([], [("long", 16)])
    assert plan.fetches == [job]
    assert [job.request.id for job in books.scheduler.waiting] == ["local"]


def test_fetchable_with_cached_prefix_waits_for_the_budget() -> None:
    """With so little missing that it is computed here, it must not join a pass without tokens left."""
    books = remote_books()
    books.add("cached", 16, max_tokens=1)
    books.step()
    books.add("long", 40, seed=1)
    job = books.add("remote", 18, remote=REMOTE)
    assert shape(books.step()) == ([], [("long", 16)])
    assert (job.stage, job.fetch) == (Stage.WAITING, None)
    assert books.pool.match(job.hashes) != []


def test_fetch_leaves_the_budget_to_local_prompts() -> None:
    books = remote_books()
    books.add("remote", 40, remote=REMOTE)
    books.add("local", 20, seed=1)
    assert shape(books.step()) == ([], [("local", 16)])


def test_fetch_counts_against_max_running() -> None:
    books = remote_books(max_running=2)
    fetching(books)
    books.add("a", 4, seed=1)
    books.add("b", 4, seed=2)
    plan = books.step()
    assert [job.request.id for job in plan.admitted] == ["a"]
    assert [job.request.id for job in books.scheduler.waiting] == ["b"]


def test_fetch_reserves_one_block_for_its_first_tokens() -> None:
    """The fetched request needs one more block soon; a new prompt must leave it."""
    books = remote_books(blocks=9)  # 8 usable
    job, fetch = fetching(books, length=20)  # 5 blocks
    books.add("a", 12, seed=1)  # 3 blocks, and 3 are free
    assert shape(books.step()) == ([], [])
    books.scheduler.waiting.clear()
    books.add("b", 8, seed=1)
    assert shape(books.step()) == ([], [("b", 8)])
    assert books.scheduler.fetched(job, len(fetch.blocks), frozenset())


def test_fetched_whole_publishes_and_joins_the_batch() -> None:
    books = remote_books()
    job, fetch = fetching(books)
    assert books.scheduler.fetched(job, len(fetch.blocks), frozenset())
    assert (job.stage, job.fetch, books.scheduler.fetching) == (Stage.ENDED, None, {})
    assert (job.request.computed, job.published) == (18, 4)
    assert books.pool.pinned == 0
    assert books.pool.match(job.hashes) == job.request.blocks[:4]
    job.request.output.append(1)
    books.scheduler.join(job)
    assert (job.stage, books.scheduler.running) == (Stage.RUNNING, [job])
    assert shape(books.step()) == (["remote"], [])


@pytest.mark.parametrize(
    ("name", "arrived", "unsafe", "good"),
    [
        ("none", 0, (), 0),
        ("two", 2, (), 2),
        ("all but one", 4, (), 4),
        ("two, and the third may change", 2, (2,), 2),
        ("all, but the second may change", 5, (1,), 1),
        ("all, but the first may change", 5, (0,), 0),
        ("all, but two may change", 5, (2, 4), 2),
    ],
)
def test_fetched_in_part_keeps_the_good_prefix(
    name: str, arrived: int, unsafe: tuple[int, ...], good: int
) -> None:
    """Blocks count up to the first one that is missing or unsafe; only unsafe ones are quarantined."""
    books = remote_books()
    job, fetch = fetching(books)
    risky = frozenset(fetch.blocks[index] for index in unsafe)
    assert not books.scheduler.fetched(job, arrived, risky), name
    assert books.pool.match(job.hashes) == list(fetch.blocks[:good])
    assert books.pool.quarantined == len(unsafe)
    assert books.pool.pinned == 0
    books.scheduler.requeue(job)
    assert (job.stage, job.fetchable, job.request.computed) == (Stage.WAITING, False, 0)
    assert books.pool.owned == 0
    plan = books.step()
    assert plan.fetches == []
    assert shape(plan) == ([], [("remote", min(16, 18 - good * SIZE))])
    assert job.request.cached_tokens == 0, "a readmission changes no usage"
    books.pool.settle(list(risky))
    while books.scheduler.running:
        books.step()
    assert books.pool.available == books.pool.capacity


def test_fetched_after_cached_prefix_counts_from_its_start() -> None:
    books = remote_books()
    books.add("cached", 9, max_tokens=1)
    books.step()
    job, _ = fetching(books)
    assert not books.scheduler.fetched(job, 1, frozenset())
    assert job.request.computed == 12
    assert books.pool.match(job.hashes) == job.request.blocks[:3]


def test_end_while_fetching_keeps_blocks_until_fetched() -> None:
    """The peer may still write the blocks of an aborted request."""
    books = remote_books()
    job, fetch = fetching(books)
    books.scheduler.end(job)
    assert job.cancelled
    assert (job.stage, books.scheduler.fetching) == (Stage.FETCHING, {"remote": job})
    assert books.pool.pinned == len(fetch.blocks)
    books.scheduler.fetched(job, 0, frozenset())
    books.scheduler.end(job)
    assert job.stage is Stage.ENDED
    assert books.pool.available == books.pool.capacity


def test_lone_request_waits_while_a_fetch_holds_blocks() -> None:
    """The fetch will let go of its blocks, so the cache is not outgrown yet."""
    books = remote_books(blocks=7)
    alone = books.add("alone", 8, max_tokens=9)
    job, fetch = fetching(books, length=12, seed=1)
    for _ in range(12):
        plan = books.step()
        assert (plan.outgrown, plan.starved, plan.retracted) == ([], [], [])
    assert alone.request.computed == alone.room == 12
    books.scheduler.fetched(job, len(fetch.blocks), frozenset())
    books.scheduler.end(job)
    assert shape(books.step()) == (["alone"], [])


@pytest.mark.parametrize("blocker", ["nothing", "a running request", "a fetch", "held blocks"])
def test_prompt_without_room_starves_only_if_alone(blocker: str) -> None:
    """Blocks that someone holds come back; with no holder they are lost to this prompt for good."""
    books = remote_books(blocks=9)
    match blocker:
        case "a running request":
            books.add("running", 4, seed=1, max_tokens=3)
        case "a fetch":
            books.add("fetch", 5, seed=1, remote=REMOTE)
        case "held blocks":
            books.add("held", 4, seed=1, max_tokens=1, export=Recipient())
    books.step()
    books.pool.quarantine(books.pool.allocate(3))
    large = books.add("large", 24, seed=2)
    plan = books.step()
    assert (plan.starved == [large]) is (blocker == "nothing")
    assert plan.prefills == []
    assert plan.changed is (blocker in ("nothing", "a running request"))


def test_patient_prompt_without_room_starves_only_if_alone() -> None:
    books = Books(blocks=5)
    books.pool.quarantine(books.pool.allocate(2))
    patient = books.add("patient", 12, patient=True)
    assert books.step().starved == [patient]


@pytest.mark.parametrize("field", ["decodes", "prefills", "fetches", "outgrown", "starved"])
def test_plan_with_any_work_is_changed(field: str) -> None:
    job = Books().add("a", 4)
    work: Any = (job, 4) if field == "prefills" else job
    assert Plan(**{field: [work]}).changed


@pytest.mark.parametrize("field", ["admitted", "retracted"])
def test_plan_that_only_moves_jobs_is_unchanged(field: str) -> None:
    """What was admitted or retracted shows in the passes; the field alone brings nothing new."""
    moved: Any = Books().add("a", 4)
    assert not Plan(**{field: [moved]}).changed


def test_exported_blocks_stay_pinned_until_released() -> None:
    books = Books()
    job = books.add("export", 10, max_tokens=1, export=Recipient())
    books.step()
    assert (job.stage, books.scheduler.held, books.scheduler.running) == (Stage.HELD, {"export": job}, [])
    assert books.pool.pinned == 3
    books.scheduler.end(job)
    assert (job.stage, books.scheduler.held, books.pool.pinned) == (Stage.ENDED, {}, 0)
    assert books.pool.available == books.pool.capacity


def test_export_ended_without_hold_is_released_at_once() -> None:
    books = Books()
    job = books.add("export", 40, max_tokens=1, export=Recipient())
    books.step()
    books.scheduler.end(job, hold=False)
    assert (job.stage, books.scheduler.held, books.scheduler.running) == (Stage.ENDED, {}, [])
    assert (books.pool.pinned, books.pool.owned) == (0, 0)


def test_advance_reports_each_new_block_with_its_tokens() -> None:
    """The router's picture of the cache is made of these events: name, parent and tokens must agree."""
    log = ChangeLog()
    events = KvEvents(log)
    books = Books()
    books.scheduler = Scheduler(books.pool, books.scheduler.limits, SIZE, events)
    job = books.add("a", 10, max_tokens=4)
    books.add("same prompt", 10, max_tokens=1)
    for _ in range(4):
        books.step()
    events.flush()
    by_hash, parents = books.pool.known()
    assert [parents[by_hash[name]] for name in job.hashes] == [root_hash(), *job.hashes[:2]]
    prompt = prompt_of(10)
    root, (first, second, third) = root_hash(), job.hashes
    assert log.changes == [
        Stored(first, root, prompt[:4]),
        Stored(second, first, prompt[4:8]),
        Stored(third, second, [*prompt[8:], 1, 1]),
    ]


def test_end_while_waiting_leaves_the_queue() -> None:
    books = Books()
    first, second = books.add("a", 4), books.add("b", 4, seed=1)
    books.scheduler.end(first)
    assert first.stage is Stage.ENDED
    assert list(books.scheduler.waiting) == [second]


@pytest.mark.parametrize(
    ("patient", "order"),
    [(False, ["back", "a", "b", "patient"]), (True, ["a", "b", "back", "patient"])],
)
def test_requeue_goes_before_all_of_its_kind(patient: bool, order: list[str]) -> None:
    books = remote_books()
    job, _ = fetching(books, "back", patient=patient)
    books.add("patient", 4, seed=3, patient=True)
    books.add("a", 4, seed=1)
    books.add("b", 4, seed=2)
    books.scheduler.fetched(job, 0, frozenset())
    books.scheduler.requeue(job)
    assert [job.request.id for job in books.scheduler.waiting] == order


def test_shared_pass_leaves_the_rest_to_patient_prompts() -> None:
    """After `YIELDS` passes, patient prompts get what the others leave of one pass, and not more."""
    books = Books(blocks=200)
    books.add("long", YIELDS * 16 + 10, max_tokens=3)
    books.add("patient", 30, seed=1, patient=True)
    for _ in range(YIELDS):
        assert shape(books.step()) == ([], [("long", 16)])
    assert shape(books.step()) == ([], [("long", 10), ("patient", 6)])


def test_patient_prompt_leaves_tokens_to_patient_decodes() -> None:
    books = Books()
    books.add("a", 4, patient=True, max_tokens=9)
    books.step()
    books.add("b", 40, seed=1, patient=True)
    assert shape(books.step()) == (["a"], [("b", 15)])


@pytest.mark.parametrize(("left", "rest"), [(0, []), (1, [("patient", 1)])])
def test_prompt_under_way_uses_even_the_last_token(left: int, rest: list[tuple[str, int]]) -> None:
    """A pass with one token left computes one; a pass with none computes no empty chunk."""
    books = Books(blocks=200)
    books.add("patient", 40, patient=True)
    books.step()
    books.add("long", (YIELDS + 1) * 16 - left, seed=1, max_tokens=3)
    for _ in range(YIELDS):
        assert shape(books.step()) == ([], [("long", 16)])
    assert shape(books.step()) == ([], [("long", 16 - left), *rest])


def test_new_prompt_uses_even_the_last_token() -> None:
    books = Books()
    books.add("a", 15)
    books.add("b", 9, seed=1)
    assert shape(books.step()) == ([], [("a", 15), ("b", 1)])


def test_retraction_goes_on_until_the_rest_can_grow() -> None:
    """Each request has one full block, and none is free: two must go, so that two can grow."""
    books = Books()
    for seed in range(4):
        books.add(f"{seed}", 4, seed=seed, max_tokens=50)
    books.step()
    books.pool.allocate(books.pool.available)
    plan = books.scheduler.plan()
    assert [job.request.id for job in plan.retracted] == ["0", "1"]
    assert shape(plan)[0] == ["2", "3"]
