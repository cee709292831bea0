"""The scheduler's fetched prompts, exports and KV events, decided from its state alone."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.hashing import root_hash
from baton_api.sampling import SamplingParams
from baton_api.workers import PEER
from baton_engine.kv.events import Change, KvEvents, Stored
from baton_engine.requests import Fetch
from baton_engine.scheduling.scheduler import YIELDS, Scheduler, StepPlan
from baton_engine.scheduling.sequence import Sequence, Stage
from tests.engine.serving import Recipient, prompt_of
from tests.engine.test_scheduler import SIZE, Books, shape


class RemotePrefillStub:
    """A `RemotePrefill` for a scheduler, which starts and cancels nothing itself."""

    def start(self, fetch: Fetch, unused: object) -> None:
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


def fetching(books: Books, name: str = "remote", length: int = 18, **fields: Any) -> tuple[Sequence, Fetch]:
    """Return a job whose prompt is being fetched."""
    sequence = books.add(name, length, remote=REMOTE, **fields)
    assert books.step().fetches == [sequence]
    assert sequence.fetch is not None
    return sequence, sequence.fetch


def test_fetch_names_the_prompt_and_all_missing_blocks() -> None:
    books = remote_books()
    books.add("cached", 9, max_tokens=1, salt="tenant")
    books.step()
    fields: dict[str, Any] = {"salt": "tenant", "tenant": "a", "trace": "00-trace"}
    sequence = books.add("remote", 18, remote=REMOTE, temperature=0.5, **fields)
    plan = books.step()
    assert (plan.fetches, plan.admitted, shape(plan)) == ([sequence], [], ([], []))
    assert plan.changed
    assert sequence.fetch == Fetch(
        request_id="remote",
        tokens=prompt_of(18),
        start_block=2,
        parent=sequence.hashes[1],
        blocks=tuple(sequence.blocks[2:]),
        sampling=SamplingParams(temperature=0.5, max_tokens=8),
        salt="tenant",
        trace="00-trace",
        tenant="a",
    )
    assert len(sequence.fetch.blocks) == 3
    assert (sequence.stage, books.scheduler.fetching, books.scheduler.running) == (
        Stage.FETCHING,
        {"remote": sequence},
        [],
    )
    assert books.pool.pinned == 3
    assert (sequence.cached_tokens, sequence.local_tokens, sequence.admissions) == (8, 8, 1)


@pytest.mark.parametrize(("length", "fetched"), [(4, False), (5, True)])
def test_fetch_begins_above_the_local_prefill_limit(length: int, fetched: bool) -> None:
    """A prompt with exactly `local_prefill_tokens` missing tokens is computed here."""
    books = remote_books()
    sequence = books.add("remote", length, remote=REMOTE)
    plan = books.step()
    assert (plan.fetches == [sequence]) is fetched
    assert shape(plan) == ([], [] if fetched else [("remote", 4)])


def test_fetch_begins_when_prompts_took_the_whole_pass() -> None:
    """A fetch needs no compute, so a spent budget delays only the prompts that this worker computes."""
    books = remote_books()
    books.add("long", 40, seed=1)
    sequence = books.add("remote", 18, seed=2, remote=REMOTE)
    books.add("local", 4, seed=3)
    plan = books.step()
    assert shape(plan) == ([], [("long", 16)])
    assert plan.fetches == [sequence]
    assert [sequence.request.id for sequence in books.scheduler.waiting] == ["local"]


def test_fetchable_with_cached_prefix_waits_for_the_budget() -> None:
    """With so little missing that it is computed here, it must not join a pass without tokens left."""
    books = remote_books()
    books.add("cached", 16, max_tokens=1)
    books.step()
    books.add("long", 40, seed=1)
    sequence = books.add("remote", 18, remote=REMOTE)
    assert shape(books.step()) == ([], [("long", 16)])
    assert (sequence.stage, sequence.fetch) == (Stage.WAITING, None)
    assert books.pool.match(sequence.hashes) != []


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
    assert [sequence.request.id for sequence in plan.admitted] == ["a"]
    assert [sequence.request.id for sequence in books.scheduler.waiting] == ["b"]


def test_fetch_reserves_one_block_for_its_first_tokens() -> None:
    """The fetched request needs one more block soon; a new prompt must leave it."""
    books = remote_books(blocks=9)  # 8 usable
    sequence, fetch = fetching(books, length=20)  # 5 blocks
    books.add("a", 12, seed=1)  # 3 blocks, and 3 are free
    assert shape(books.step()) == ([], [])
    books.scheduler.waiting.clear()
    books.add("b", 8, seed=1)
    assert shape(books.step()) == ([], [("b", 8)])
    assert books.scheduler.fetched(sequence, len(fetch.blocks), frozenset())


def test_fetched_whole_publishes_and_joins_the_batch() -> None:
    books = remote_books()
    sequence, fetch = fetching(books)
    assert books.scheduler.fetched(sequence, len(fetch.blocks), frozenset())
    assert (sequence.stage, sequence.fetch, books.scheduler.fetching) == (Stage.ENDED, None, {})
    assert (sequence.computed, sequence.published) == (18, 4)
    assert books.pool.pinned == 0
    assert books.pool.match(sequence.hashes) == sequence.blocks[:4]
    sequence.output.append(1)
    books.scheduler.join(sequence)
    assert (sequence.stage, books.scheduler.running) == (Stage.RUNNING, [sequence])
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
    sequence, fetch = fetching(books)
    risky = frozenset(fetch.blocks[index] for index in unsafe)
    assert not books.scheduler.fetched(sequence, arrived, risky), name
    assert books.pool.match(sequence.hashes) == list(fetch.blocks[:good])
    assert books.pool.quarantined == len(unsafe)
    assert books.pool.pinned == 0
    books.scheduler.requeue(sequence)
    assert (sequence.stage, sequence.fetchable, sequence.computed) == (Stage.WAITING, False, 0)
    assert books.pool.owned == 0
    plan = books.step()
    assert plan.fetches == []
    assert shape(plan) == ([], [("remote", min(16, 18 - good * SIZE))])
    assert sequence.cached_tokens == 0, "a readmission changes no usage"
    books.pool.settle(list(risky))
    while books.scheduler.running:
        books.step()
    assert books.pool.available == books.pool.capacity


def test_fetched_after_cached_prefix_counts_from_its_start() -> None:
    books = remote_books()
    books.add("cached", 9, max_tokens=1)
    books.step()
    sequence, _ = fetching(books)
    assert not books.scheduler.fetched(sequence, 1, frozenset())
    assert sequence.computed == 12
    assert books.pool.match(sequence.hashes) == sequence.blocks[:3]


def test_end_while_fetching_keeps_blocks_until_fetched() -> None:
    """The peer may still write the blocks of an aborted request."""
    books = remote_books()
    sequence, fetch = fetching(books)
    books.scheduler.end(sequence)
    assert sequence.cancelled
    assert (sequence.stage, books.scheduler.fetching) == (Stage.FETCHING, {"remote": sequence})
    assert books.pool.pinned == len(fetch.blocks)
    books.scheduler.fetched(sequence, 0, frozenset())
    books.scheduler.end(sequence)
    assert sequence.stage is Stage.ENDED
    assert books.pool.available == books.pool.capacity


def test_lone_request_waits_while_a_fetch_holds_blocks() -> None:
    """The fetch will release its blocks, so the cache is not outgrown yet."""
    books = remote_books(blocks=7)
    lone = books.add("alone", 8, max_tokens=9)
    sequence, fetch = fetching(books, length=12, seed=1)
    for _ in range(12):
        plan = books.step()
        assert (plan.outgrown, plan.starved, plan.retracted) == ([], [], [])
    assert lone.computed == lone.capacity == 12
    books.scheduler.fetched(sequence, len(fetch.blocks), frozenset())
    books.scheduler.end(sequence)
    assert shape(books.step()) == (["alone"], [])


@pytest.mark.parametrize("blocker", ["nothing", "a running request", "a fetch", "held blocks"])
def test_prompt_without_room_starves_only_if_alone(blocker: str) -> None:
    """Held blocks come back; blocks with no holder are lost to this prompt."""
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
    sequence = Books().add("a", 4)
    work: Any = (sequence, 4) if field == "prefills" else sequence
    assert StepPlan(**{field: [work]}).changed


@pytest.mark.parametrize("field", ["admitted", "retracted"])
def test_plan_that_only_moves_jobs_is_unchanged(field: str) -> None:
    """Admissions and retractions show in the passes; the field by itself changes nothing."""
    moved: Any = Books().add("a", 4)
    assert not StepPlan(**{field: [moved]}).changed


def test_exported_blocks_stay_pinned_until_released() -> None:
    books = Books()
    sequence = books.add("export", 10, max_tokens=1, export=Recipient())
    books.step()
    assert (sequence.stage, books.scheduler.held, books.scheduler.running) == (
        Stage.HELD,
        {"export": sequence},
        [],
    )
    assert books.pool.pinned == 3
    books.scheduler.end(sequence)
    assert (sequence.stage, books.scheduler.held, books.pool.pinned) == (Stage.ENDED, {}, 0)
    assert books.pool.available == books.pool.capacity


def test_export_ended_without_hold_is_released_at_once() -> None:
    books = Books()
    sequence = books.add("export", 40, max_tokens=1, export=Recipient())
    books.step()
    books.scheduler.end(sequence, hold=False)
    assert (sequence.stage, books.scheduler.held, books.scheduler.running) == (Stage.ENDED, {}, [])
    assert (books.pool.pinned, books.pool.owned) == (0, 0)


def test_advance_reports_each_new_block_with_its_tokens() -> None:
    """The router's picture of the cache is made of these events: name, parent and tokens must agree."""
    log = ChangeLog()
    events = KvEvents(log)
    books = Books()
    books.scheduler = Scheduler(books.pool, books.scheduler.limits, SIZE, events)
    sequence = books.add("a", 10, max_tokens=4)
    books.add("same prompt", 10, max_tokens=1)
    for _ in range(4):
        books.step()
    events.flush()
    by_hash, parents = books.pool.published()
    assert [parents[by_hash[name]] for name in sequence.hashes] == [root_hash(), *sequence.hashes[:2]]
    prompt = prompt_of(10)
    root, (first, second, third) = root_hash(), sequence.hashes
    assert log.changes == [
        Stored(first, root, prompt[:4]),
        Stored(second, first, prompt[4:8]),
        Stored(third, second, [*prompt[8:], 1, 1]),
    ]


class Prefix:
    """A `CachedPrefix` that has some blocks, and whose reads are sooner or not."""

    name = PEER

    def __init__(self, blocks: int, within_s: float = 5.0) -> None:
        self.blocks = blocks
        self.within_s = within_s
        self.asked: list[tuple[int, float]] = []

    def read_within_s(self, blocks: int, compute_s: float) -> float:
        self.asked.append((blocks, compute_s))
        return self.within_s

    start = cancel = RemotePrefillStub.start


def reading(prefix: Prefix, length: int = 22, **sizes: Any) -> tuple[Books, Sequence, StepPlan]:
    """Return a prompt with 2 blocks in this cache, of which a peer may have more."""
    books = Books(**sizes)
    books.add("cached", 9, max_tokens=1)
    books.step()
    books.scheduler.prompt_speed.add(100, 25.0)
    exported = books.add("read", length, max_tokens=1, cached_prefix=prefix, export=Recipient())
    return books, exported, books.step()


def test_cached_prefix_is_read_from_the_first_missing_block() -> None:
    prefix = Prefix(4)
    books, sequence, plan = reading(prefix)
    assert (plan.fetches, plan.admitted, plan.prefills) == ([sequence], [], [])
    fetch = sequence.fetch
    assert fetch is not None
    assert (fetch.start_block, fetch.blocks) == (2, tuple(sequence.blocks[2:4]))
    assert (fetch.within_s, prefix.asked) == (5.0, [(2, 2.0)]), "8 tokens at 4 tokens a second"
    assert (books.pool.pinned, len(sequence.blocks)) == (2, 6)


def test_cached_prefix_ends_before_the_last_token() -> None:
    """Its logits are needed, so its block is computed, even if a peer has it."""
    _, sequence, _ = reading(Prefix(5), length=20)
    assert sequence.fetch is not None
    assert len(sequence.fetch.blocks) == 2


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("the peer has no more than this worker", Prefix(2)),
        ("the peer has less", Prefix(1)),
        ("computing is sooner", Prefix(4, within_s=0.0)),
    ],
)
def test_cached_prefix_is_not_read(name: str, prefix: Prefix) -> None:
    _, _, plan = reading(prefix)
    assert (plan.fetches, shape(plan)) == ([], ([], [("read", 14)])), name


class EmptyTier:
    """A tier that has nothing."""

    name = "memory"

    def prefix(self, names: Any, start: int) -> None:
        return None


def test_prompt_that_a_tier_may_have_retracts_nothing_before_the_pass_has_room_for_it() -> None:
    """Its place would stay empty while a long prompt takes each pass."""
    books = Books(max_running=2)
    books.scheduler.tiers = [EmptyTier()]
    books.add("patient", 4, patient=True, max_tokens=50)
    books.step()
    books.add("long", 40, seed=1, max_tokens=2)
    books.add("new", 4, seed=2)
    for _ in range(2):
        assert shape(books.step())[1] == [("long", 16)]
        assert books.retracted == []
    assert shape(books.step())[1] == [("long", 8), ("new", 4)]
    assert books.retracted == ["patient"]


def test_cached_prefix_that_was_read_is_computed_from_there() -> None:
    """The prompt keeps its blocks: nothing can evict them between the read and the computation."""
    books, sequence, _ = reading(Prefix(4))
    blocks = list(sequence.blocks)
    assert books.scheduler.fetched(sequence, 2, frozenset())
    books.scheduler.join(sequence)
    assert (sequence.blocks, books.pool.pinned) == (blocks, 6)
    assert shape(books.step()) == ([], [("read", 6)])
    assert sequence.stage is Stage.HELD
    books.scheduler.end(sequence)
    assert (books.pool.pinned, books.pool.owned) == (0, 0)


def test_cached_prefix_after_an_abandoned_read_is_not_read_again() -> None:
    books, sequence, _ = reading(Prefix(4))
    assert sequence.fetch is not None
    unsafe = frozenset(sequence.fetch.blocks)
    assert not books.scheduler.fetched(sequence, 0, unsafe)
    books.scheduler.requeue(sequence)
    plan = books.step()
    assert (plan.fetches, shape(plan)) == ([], ([], [("read", 14)]))
    books.pool.settle(unsafe)
    books.scheduler.end(sequence)
    assert books.pool.available == books.pool.capacity


def test_cached_prefix_of_an_aborted_prompt_is_released_after_the_read() -> None:
    books, sequence, _ = reading(Prefix(4))
    books.scheduler.end(sequence)
    assert (sequence.cancelled, books.pool.pinned) == (True, 2)
    books.scheduler.fetched(sequence, 2, frozenset())
    books.scheduler.end(sequence)
    assert (sequence.stage, books.pool.pinned, books.pool.owned) == (Stage.ENDED, 0, 0)


def test_lent_blocks_are_kept_until_they_are_taken_back() -> None:
    books = Books(blocks=5)  # 4 usable
    sequence = books.add("cached", 13, max_tokens=1)
    books.step()
    first = books.pool.match(sequence.hashes)
    assert books.scheduler.lend("a", [*sequence.hashes[:2], b"unknown", sequence.hashes[2]]) == first[:2]
    assert books.scheduler.lend("b", sequence.hashes[:1]) == first[:1]
    assert (books.pool.pinned, books.pool.owned) == (2, 2)
    waiting = books.add("large", 12, seed=1)
    assert (plan := books.step()).starved == [] and plan.prefills == []
    books.scheduler.take_back("a")
    books.scheduler.take_back("a")
    assert books.pool.owned == 1
    books.scheduler.take_back("b")
    assert shape(books.step()) == ([], [("large", 12)])
    assert waiting.stage is Stage.RUNNING


def test_read_that_finds_nothing_keeps_no_request_waiting() -> None:
    """Nothing comes back at its end that would make room."""
    books = Books(blocks=5)
    books.pool.quarantine(books.pool.allocate(2))
    large = books.add("large", 12)
    assert books.scheduler.lend("a", [b"unknown"]) == []
    assert books.step().starved == [large]


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
    sequence, _ = fetching(books, "back", patient=patient)
    books.add("patient", 4, seed=3, patient=True)
    books.add("a", 4, seed=1)
    books.add("b", 4, seed=2)
    books.scheduler.fetched(sequence, 0, frozenset())
    books.scheduler.requeue(sequence)
    assert [sequence.request.id for sequence in books.scheduler.waiting] == order


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


def test_scheduler_retracts_until_the_rest_can_grow() -> None:
    """Each request has one full block, and none is free: two must go, so that two can grow."""
    books = Books()
    for seed in range(4):
        books.add(f"{seed}", 4, seed=seed, max_tokens=50)
    books.step()
    books.pool.allocate(books.pool.available)
    plan = books.scheduler.plan()
    assert [sequence.request.id for sequence in plan.retracted] == ["0", "1"]
    assert shape(plan)[0] == ["2", "3"]
