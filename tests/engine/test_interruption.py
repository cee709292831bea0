"""A request does not wait for a forward pass of batch lines, and the lines lose nothing by it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal

import pytest
from torch import Tensor

from baton_engine.batch import Batch, PassInterrupted
from baton_engine.forward_pass import ScheduledChunk, schedule
from baton_engine.kv.cache import KVCache
from baton_engine.pass_pipeline import PassInterruption
from baton_engine.scheduling.scheduler import YIELDS
from baton_engine.scheduling.sequence import Sequence
from tests.engine.fake_model import FakeModel
from tests.engine.serving import TIMEOUT_S, Prefiller, Serving, request_of


def chunk(*, patient: bool) -> ScheduledChunk:
    return schedule(sequence(patient=patient), 1)


def sequence(*, patient: bool) -> Sequence:
    return Sequence(request_of("a", patient=patient), 4, 8)


Event = Literal["whole", "interrupted", "mixed"]
WASTED: list[Event] = ["interrupted" for _ in range(YIELDS)]


@pytest.mark.parametrize(
    ("before", "rows", "line_waits", "interrupts"),
    [
        pytest.param([], [True, True], False, 1, id="only lines"),
        pytest.param([], [True, False], False, 0, id="a request is among them"),
        pytest.param([], [True], True, 0, id="another line waits"),
        pytest.param(WASTED[1:], [True], False, 1, id="not yet too often"),
        pytest.param(WASTED, [True], False, 0, id="too often in a row"),
        pytest.param([*WASTED, "whole"], [True], False, 1, id="a whole pass since"),
        pytest.param([*WASTED, "mixed"], [True], False, 1, id="a whole pass with others since"),
    ],
)
def test_interruption_of_passes(
    before: list[Event], rows: list[bool], line_waits: bool, interrupts: int
) -> None:
    model = Counting()
    interruption = PassInterruption(model)
    for event in before:
        try:
            with interruption.during([chunk(patient=True), chunk(patient=event != "mixed")]):
                if event == "interrupted":
                    raise PassInterrupted
        except PassInterrupted:
            pass
    with interruption.during([chunk(patient=patient) for patient in rows]):
        interruption.interrupt_for(sequence(patient=line_waits))
    interruption.interrupt_for(sequence(patient=False))  # no pass is under way
    assert model.interrupts == interrupts


class Counting(FakeModel):
    def __init__(self) -> None:
        super().__init__()
        self.interrupts = 0

    def interrupt(self) -> None:
        self.interrupts += 1


def test_engine_request_ends_a_pass_of_lines() -> None:
    with Serving() as serving:
        line, question = request_of("line", 10, patient=True), request_of("question", 9, seed=1)
        serving.model.go.clear()
        serving.submit(line)
        assert serving.model.inside.wait(TIMEOUT_S)
        serving.submit(question)
        until(lambda: serving.model.sizes == [10, 9])
        serving.model.go.set()
        assert serving.tokens("question") == serving.reference(question)
        assert serving.tokens("line") == serving.reference(line)
        serving.at_rest()
        assert serving.engine.snapshot().totals.steps == serving.model.passes - 1


def test_engine_fetched_prompt_ends_a_pass_of_lines() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        prefiller = Prefiller(serving)
        question = request_of("question", 9, seed=1, remote=prefiller)
        serving.submit(question)
        fetch = prefiller.fetch()
        serving.model.go.clear()
        serving.submit(request_of("line", 10, patient=True))
        assert serving.model.inside.wait(TIMEOUT_S)
        prefiller.succeed(fetch)
        serving.wait(lambda: len(serving.so_far("question")) == 1, "the first token")
        serving.model.go.set()
        assert serving.tokens("question") == serving.reference(question)
        assert serving.model.interruptions == 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Unsteady(FakeModel):
    """Its passes end early at random."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if self._chance.random() < 0.4:
            self.end_early(batch, cache)
        return super().forward(batch, cache)


@pytest.mark.parametrize("seed", range(5))
def test_interrupted_passes_change_no_answer(seed: int) -> None:
    """With drafts, retractions and shared prefixes."""
    chance = random.Random(seed)
    with Serving(
        blocks=chance.choice([17, 65]),
        model=Unsteady(chance),
        chunk_tokens=chance.choice([8, 32]),
        speculation_tokens=chance.choice([0, 4]),
    ) as serving:
        requests = [
            request_of(
                f"{number}",
                chance.randrange(1, 24),
                seed=chance.randrange(3),
                max_tokens=chance.randrange(1, 20),
                patient=chance.random() < 0.5,
                temperature=chance.choice([0.0, 1.0]),
            )
            for number in range(12)
        ]
        for request, tokens in zip(requests, serving.run(*requests), strict=True):
            assert tokens == serving.reference(request)
        serving.at_rest()
        assert serving.model.interruptions
