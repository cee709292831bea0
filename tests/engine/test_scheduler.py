"""The rows of the next pass, decided from the scheduler's state alone: no thread, no tensor."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from baton_engine.kv.block_pool import BlockPool
from baton_engine.requests import Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import YIELDS, Scheduler, StepPlan, next_piece
from baton_engine.scheduling.sequence import Sequence, Stage
from tests.engine.serving import Recipient, request_of

SIZE = 4


class Books:
    """A scheduler, and a compute step that takes no time: token 1 is drawn always."""

    def __init__(self, blocks: int = 33, **limits: Any) -> None:
        limits = {"max_model_len": 1024, "chunk_tokens": 16, "max_running": 8, **limits}
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, EngineLimits(**limits), SIZE)
        self.retracted: list[str] = []

    def add(self, name: str, length: int, seed: int = 0, **fields: Any) -> Sequence:
        request: Request = request_of(name, length, seed=seed, **fields)
        longest = length + request.sampling.max_tokens
        sequence = Sequence(request, SIZE, min(-(-longest // SIZE), self.pool.capacity))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.retracted += [sequence.request.id for sequence in plan.retracted]
        for sequence in (*plan.outgrown, *plan.starved):
            self.scheduler.end(sequence)
        for sequence, tokens in [*((sequence, 1) for sequence in plan.decodes), *plan.prefills]:
            self.scheduler.advance(sequence, tokens)
            if sequence.pending == 0:
                sequence.output.append(1)
                if len(sequence.output) == sequence.request.sampling.max_tokens:
                    self.scheduler.end(sequence)
        return plan


def shape(plan: StepPlan) -> tuple[list[str], list[tuple[str, int]]]:
    return [sequence.request.id for sequence in plan.decodes], [
        (sequence.request.id, tokens) for sequence, tokens in plan.prefills
    ]


def test_scheduler_prompts_share_a_pass_and_the_last_continues() -> None:
    books = Books()
    books.add("a", 10)
    books.add("b", 10, seed=1)
    assert shape(books.step()) == ([], [("a", 10), ("b", 6)])
    assert shape(books.step()) == (["a"], [("b", 4)])
    assert shape(books.step()) == (["a", "b"], [])


def test_scheduler_generating_rows_come_before_prompts() -> None:
    books = Books()
    books.add("a", 4, max_tokens=50)
    books.step()
    books.add("b", 100, seed=1)
    assert shape(books.step()) == (["a"], [("b", 15)])
    assert shape(books.step()) == (["a"], [("b", 15)])


def test_scheduler_prompt_chunks_are_smaller_while_others_run() -> None:
    books = Books(mixed_chunk_tokens=6)
    books.add("alone", 20, max_tokens=4)
    assert shape(books.step()) == ([], [("alone", 16)])
    assert shape(books.step()) == ([], [("alone", 4)])
    books.add("late", 30, seed=1)
    assert shape(books.step()) == (["alone"], [("late", 6)])
    assert shape(books.step()) == (["alone"], [("late", 6)])
    assert shape(books.step()) == (["alone"], [("late", 6)])
    assert shape(books.step()) == ([], [("late", 12)])


def test_scheduler_full_batch_leaves_a_block_for_prompts() -> None:
    books = Books(chunk_tokens=4)
    for seed in range(4):
        books.add(f"{seed}", 4, seed=seed, max_tokens=50)
        books.step()
    books.add("late", 6, seed=4)
    assert shape(books.step()) == (["0", "1", "2", "3"], [("late", 4)])


def test_scheduler_admits_in_order_even_if_a_later_one_fits() -> None:
    books = Books(blocks=11)
    books.add("a", 16, max_tokens=12)
    books.step()
    books.add("large", 32, seed=1)
    books.add("small", 4, seed=2)
    assert shape(books.step()) == (["a"], [])
    while books.scheduler.running:
        books.step()
    assert shape(books.step()) == ([], [("large", 16)])


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    books = Books(blocks=7)  # 6 to have
    books.add("a", 11, max_tokens=6)
    books.step()
    books.add("b", 12, seed=1)
    assert shape(books.step()) == (["a"], [])  # 3 are free, and 1 may be needed
    books.scheduler.waiting.clear()
    books.add("c", 4, seed=1)
    assert shape(books.step()) == (["a"], [("c", 4)])  # 2 are free: one each


def test_scheduler_rejected_request_goes_once_blocks_return() -> None:
    """Blocks may come back without any other change: when a peer's late reads into them have settled."""
    books = Books(blocks=8)
    books.add("a", 4, max_tokens=50)
    books.step()
    unsafe = books.pool.allocate(3)
    books.pool.quarantine(unsafe)
    books.add("b", 12, seed=1)
    assert shape(books.step()) == (["a"], [])
    assert shape(books.step()) == (["a"], []), "nothing has changed"
    books.pool.settle(unsafe)
    assert shape(books.step()) == (["a"], [("b", 12)])


def test_scheduler_cached_prefix_saves_blocks() -> None:
    books = Books(blocks=8)
    first = books.add("a", 17, max_tokens=40)
    books.step()
    books.step()
    assert first.published == 4
    books.add("b", 17)
    assert shape(books.step()) == (["a"], [("b", 1)])
    assert books.pool.owned == 6


@pytest.mark.parametrize(
    ("name", "rows", "victim"),
    [
        ("least output", [("a", 6, 2), ("b", 8, 0), ("c", 7, 1)], "b"),
        ("then the longest prompt", [("a", 8, 0), ("b", 12, 0), ("c", 4, 0)], "b"),
        ("a prompt under way has no output", [("a", 6, 2), ("b", 7, 1), ("c", 40, 0)], "c"),
    ],
)
def test_scheduler_retracts_the_request_that_loses_least(
    name: str, rows: list[tuple[str, int, int]], victim: str
) -> None:
    """Each has filled its blocks to the last slot (or computes its prompt), and no block is left."""
    books = Books(chunk_tokens=32)
    for index, (row, length, drawn) in enumerate(rows):
        books.add(row, length, seed=index, max_tokens=100).output += [1] * drawn
    books.step()
    books.pool.allocate(books.pool.available)
    plan = books.scheduler.plan()
    assert [sequence.request.id for sequence in plan.retracted] == [victim], name
    assert next(iter(books.scheduler.waiting)).request.id == victim
    assert victim not in shape(plan)[0]


def test_scheduler_retracted_request_resumes_first_with_output() -> None:
    books = Books(blocks=7)
    books.add("a", 8, max_tokens=12)
    books.add("b", 7, seed=1, max_tokens=12)
    books.add("late", 4, seed=2, max_tokens=1)
    while not books.retracted:
        books.step()
    assert books.retracted == ["a"]
    retracted = next(iter(books.scheduler.waiting))
    assert retracted.request.id == "a"
    output = list(retracted.output)
    assert output
    assert retracted.computed == 0
    while retracted.stage is Stage.WAITING:
        books.step()
    assert retracted.output[: len(output)] == output
    while books.scheduler.running or books.scheduler.waiting:
        books.step()
    assert len(retracted.output) == 12
    assert books.pool.available == books.pool.capacity


def test_scheduler_patient_requests_come_last_in_queue_and_pass() -> None:
    books = Books(max_running=3)
    books.add("patient", 40, patient=True, max_tokens=2)
    assert shape(books.step()) == ([], [("patient", 16)])
    books.add("patient too", 8, seed=1, patient=True)
    books.add("a", 10, seed=2, max_tokens=50)
    books.add("b", 10, seed=3, max_tokens=50)
    assert shape(books.step()) == ([], [("a", 10), ("b", 6)])
    assert shape(books.step()) == (["a"], [("b", 4)])
    assert shape(books.step()) == (["a", "b"], [("patient", 14)])
    assert [sequence.request.id for sequence in books.scheduler.waiting] == ["patient too"]


@pytest.mark.parametrize(
    ("name", "sizes"), [("place", {"max_running": 3}), ("block", {"blocks": 11, "max_running": 8})]
)
def test_scheduler_patient_request_gives_way_to_others(name: str, sizes: dict[str, int]) -> None:
    books = Books(chunk_tokens=32, **sizes)
    longest = books.add("longest", 8, patient=True, max_tokens=6)
    longest.output += [1] * 2
    books.add("first", 7, seed=1, max_tokens=4)
    books.add("patient", 8, seed=2, patient=True, max_tokens=6)
    books.step()  # the first one's prompt
    books.step()  # and theirs
    books.add("behind", 8, seed=3, patient=True, max_tokens=1)
    wanted = books.add("wanted", 8, seed=4, max_tokens=4)
    plan = books.step()
    assert books.retracted == ["patient"], name
    assert shape(plan) == (["first"], [("wanted", 8)]), name
    assert [sequence.request.id for sequence in books.scheduler.waiting] == ["patient", "behind"]
    assert wanted.stage is Stage.RUNNING
    while books.scheduler.running or books.scheduler.waiting:
        books.step()
    assert books.pool.available == books.pool.capacity


def test_scheduler_patient_rows_skip_prompt_passes_for_a_while() -> None:
    books = Books(blocks=200, chunk_tokens=16, mixed_chunk_tokens=8)
    books.add("patient", 4, patient=True, max_tokens=50)
    books.step()
    books.add("long", 17 * 16, seed=1, max_tokens=5)
    chunks = [shape(books.step()) for _ in range(2 * (YIELDS + 1))]
    assert all(chunk == ([], [("long", 16)]) for chunk in chunks[:YIELDS]), "as if there were nobody else"
    assert chunks[YIELDS] == (["patient"], [("long", 8)])
    assert chunks[YIELDS + 1 :] == chunks[: YIELDS + 1]
    assert shape(books.step()) == (["patient", "long"], [])


def test_scheduler_request_never_yields_to_a_patient_one() -> None:
    books = Books(max_running=2, chunk_tokens=32)
    books.add("a", 4, max_tokens=50)
    books.add("patient", 4, seed=1, patient=True, max_tokens=50)
    books.step()
    books.add("patient too", 4, seed=2, patient=True)
    books.step()
    assert books.retracted == []
    books.add("b", 4, seed=3, max_tokens=50)
    books.add("c", 4, seed=4, max_tokens=50)
    books.step()
    assert books.retracted == ["patient"]
    assert [sequence.request.id for sequence in books.scheduler.waiting] == ["c", "patient", "patient too"]


def test_scheduler_retracts_patient_requests_first() -> None:
    books = Books(chunk_tokens=32)
    books.add("patient", 6, seed=1, patient=True, max_tokens=100).output += [1] * 2
    books.step()
    books.add("a", 8, max_tokens=100)
    books.step()
    books.pool.allocate(books.pool.available)
    plan = books.scheduler.plan()
    assert [sequence.request.id for sequence in plan.retracted] == ["patient"]


def test_scheduler_request_larger_than_the_cache_is_outgrown() -> None:
    books = Books(blocks=4)
    sequence = books.add("a", 8, max_tokens=100)
    plan = books.step()
    while not plan.outgrown:
        plan = books.step()
    assert plan.outgrown == [sequence]
    assert books.retracted == []
    assert len(sequence.output) == 5  # 12 tokens are cached, and one more was drawn
    assert books.pool.available == 3


def test_scheduler_lone_request_waits_for_exported_blocks() -> None:
    books = Books(blocks=6)
    export = books.add("export", 8, max_tokens=1, export=Recipient())
    books.add("a", 8, seed=1, max_tokens=20)
    plan = books.step()
    assert export.stage is Stage.HELD
    while plan.changed:
        plan = books.step()
    assert (plan.outgrown, books.retracted) == ([], [])
    books.scheduler.end(export, hold=False)
    assert shape(books.step()) == (["a"], [])


@pytest.mark.parametrize(
    ("name", "start", "tokens", "least", "pieces"),
    [
        ("off", 0, 4096, 0, [4096]),
        ("to the least size", 4096, 2048, 256, [1024, 512, 256, 256]),
        ("between blocks", 4096, 904, 256, [448, 456]),
        ("too short for two", 512, 500, 256, [500]),
        ("begins within a block", 100, 100, 32, [44, 56]),
        ("the least size is no whole block", 0, 64, 20, [32, 32]),
        ("a single token", 64, 1, 1, [1]),
        ("less than a block", 64, 15, 1, [15]),
    ],
)
def test_last_chunk_is_halved(name: str, start: int, tokens: int, least: int, pieces: list[int]) -> None:
    assert pieces_of(start, tokens, least, 16) == pieces, name


@pytest.mark.parametrize("seed", range(10))
def test_law_last_chunk_pieces_are_its_blocks(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        size, least = chance.choice([1, 4, 16]), chance.choice([0, 1, 16, 64, 256])
        start, tokens = chance.randrange(100), chance.randrange(1, 3000)
        pieces = pieces_of(start, tokens, least, size)
        assert sum(pieces) == tokens and min(pieces) >= min(least, tokens)
        ends = itertools.accumulate(pieces, initial=start)
        assert all(end % size == 0 for end in list(ends)[1:-1]), "a piece ends with a block"
        assert all(piece <= sum(pieces[number + 1 :]) for number, piece in enumerate(pieces[:-1]))
        if least:
            assert pieces[-1] < 2 * (least + size), "as small as allowed"


def pieces_of(start: int, tokens: int, least: int, block_size: int) -> list[int]:
    pieces: list[int] = []
    while tokens:
        pieces.append(next_piece(start, tokens, least, block_size))
        start, tokens = start + pieces[-1], tokens - pieces[-1]
    return pieces


def chunks_until_idle(books: Books) -> list[list[tuple[str, int]]]:
    chunks = []
    while (plan := books.step()).changed:
        chunks.append(shape(plan)[1])
    return chunks


def test_scheduler_halves_the_last_chunk_for_a_peer_only() -> None:
    books = Books(chunk_tokens=32, last_chunk_tokens=8)
    books.add("export", 60, max_tokens=1, export=Recipient())
    assert chunks_until_idle(books) == [[("export", tokens)] for tokens in (32, 12, 8, 8)]
    books.add("here", 60, seed=1, max_tokens=1)
    assert chunks_until_idle(books) == [[("here", 32)], [("here", 28)]]


def test_scheduler_halves_no_chunk_beside_another_request() -> None:
    """A piece would leave its tokens to the other prompt, and come behind that one's tokens."""
    books = Books(blocks=65, chunk_tokens=32, last_chunk_tokens=8)
    books.add("a", 28, max_tokens=1, export=Recipient())
    books.add("b", 28, seed=1, max_tokens=1, export=Recipient())
    assert shape(books.step())[1] == [("a", 28), ("b", 4)]
    assert shape(books.step())[1] == [("b", 12)], "alone by now"
    books.add("c", 20, seed=2, max_tokens=1, export=Recipient())
    assert shape(books.step())[1] == [("b", 12), ("c", 20)]


def test_scheduler_plan_without_change_is_unchanged() -> None:
    books = Books()
    assert not books.scheduler.plan().changed
    books.add("a", 4, max_tokens=1)
    assert books.step().changed
    assert not books.step().changed


@pytest.mark.parametrize("seed", range(10))
def test_scheduler_random_load_finishes_and_frees_all_blocks(seed: int) -> None:
    chance = random.Random(seed)
    books = Books(
        blocks=chance.randrange(12, 40),
        chunk_tokens=chance.choice([4, 7, 16, 64]),
        max_running=chance.choice([1, 3, 8]),
    )
    sequences: list[Sequence] = []
    held: list[Sequence] = []
    for step in range(4000):
        if len(sequences) < 60 and chance.random() < 0.1:
            length = chance.randrange(1, 30)
            export = Recipient() if chance.random() < 0.2 else None
            wanted = 1 if export else chance.randrange(1, 12)
            sequences.append(
                books.add(
                    f"{step}",
                    length,
                    seed=chance.randrange(3),
                    max_tokens=wanted,
                    export=export,
                    patient=chance.random() < 0.3,
                )
            )
        plan = books.step()
        decodes = [
            sequence
            for sequence in books.scheduler.running
            if sequence.decoding and sequence not in plan.decodes
        ]
        assert all(
            len(sequence.output) == 1 or sequence.computed == sequence.capacity for sequence in decodes
        ) or (plan.prefills)
        assert sum(tokens for _, tokens in plan.prefills) <= max(books.scheduler.limits.chunk_tokens, SIZE)
        assert len(books.scheduler.running) <= books.scheduler.limits.max_running
        users = [block for sequence in sequences for block in sequence.blocks]
        assert books.pool.owned == len(set(users))
        held = list(books.scheduler.held.values())
        if held and chance.random() < 0.3:
            books.scheduler.end(chance.choice(held), hold=False)
        if len(sequences) == 60 and not (books.scheduler.running or books.scheduler.waiting or held):
            break
    for sequence in sequences:
        assert sequence.stage is Stage.ENDED
        assert len(sequence.output) == sequence.request.sampling.max_tokens
    assert books.pool.available == books.pool.capacity


# --- Turns of tenants ---


def running(books: Books) -> list[str]:
    return [sequence.request.id for sequence in books.scheduler.running]


def test_scheduler_tenants_take_turns_in_the_queue() -> None:
    """One that comes late waits for one sequence of the tenant that has many."""
    books = Books(max_running=1, chunk_tokens=32)
    for index in range(4):
        books.add(f"a{index}", 4, seed=index, max_tokens=1, tenant="a")
    books.add("b0", 4, seed=10, max_tokens=1, tenant="b")
    books.add("b1", 4, seed=11, max_tokens=1, tenant="b")
    order = [name for _ in range(6) for name, _ in shape(books.step())[1]]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_scheduler_full_batch_is_shared_with_a_tenant_that_comes_late() -> None:
    """It gets as many places as the other, one after the other, and then nobody is retracted any more."""
    books = Books(blocks=200, max_running=4, chunk_tokens=64)
    for index in range(12):
        books.add(f"a{index}", 4, seed=index, max_tokens=100, tenant="a")
    books.step()
    assert running(books) == ["a0", "a1", "a2", "a3"]
    for index in range(12):
        books.add(f"b{index}", 4, seed=20 + index, max_tokens=100, tenant="b")
    books.step()
    assert sorted(name[0] for name in running(books)) == ["a", "a", "b", "b"]
    for _ in range(20):
        books.step()
    assert len(books.retracted) == 2
    books.add("c", 4, seed=40, max_tokens=2, tenant="c")
    books.step()
    assert "c" in running(books), "of two that have most, one makes way"
    assert len(books.retracted) == 3


def test_scheduler_one_sequence_makes_no_way_for_another() -> None:
    books = Books(blocks=200, max_running=3, chunk_tokens=64)
    for tenant in "abcdef":
        books.add(tenant, 4, seed=ord(tenant), max_tokens=20, tenant=tenant)
    books.step()
    for _ in range(15):
        books.step()
    assert running(books) == ["a", "b", "c"] and not books.retracted


def test_scheduler_tenant_without_blocks_gets_those_of_the_one_with_most() -> None:
    books = Books(blocks=17, chunk_tokens=64)
    for index in range(3):
        books.add(f"a{index}", 12, seed=index, max_tokens=40, tenant="a")
    books.step()
    books.add("b", 12, seed=9, max_tokens=4, tenant="b")
    books.step()
    assert "b" in running(books) and len(books.retracted) == 1


@pytest.mark.parametrize("seed", range(5))
def test_law_scheduler_tenants_starve_nobody(seed: int) -> None:
    """Whatever others queue, a tenant's only sequence begins within two steps."""
    rng = random.Random(seed)
    books = Books(blocks=2000, max_running=8, chunk_tokens=64)
    number = 0
    for step in range(200):
        for _ in range(rng.randrange(4)):
            number += 1
            tenant = rng.choice("abc")
            books.add(f"{number}", rng.randrange(1, 20), seed=number, max_tokens=rng.randrange(1, 60),
                      tenant=tenant)  # fmt: skip
        if step % 20 == 10:
            lone = books.add(f"lone {step}", 4, seed=10_000 + step, max_tokens=3, tenant="lone")
            waited = 0
            while not lone.admissions:
                books.step()
                waited += 1
                assert waited <= 2
        books.step()
    assert books.scheduler.waiting, "there was always too much to do"
    while books.scheduler.running or books.scheduler.waiting:
        books.step()
    assert not len(books.scheduler.waiting)
