"""What decides the first token reaches the worker that draws it, and nothing of it is lost on the way."""

from __future__ import annotations

import dataclasses

import pytest

from baton_api import messages
from baton_api.messages import Prefill
from baton_engine.requests import Constraint, SamplingParams, Thinking
from baton_engine.transfer.wire import sampling_params, to_wire

EVERYTHING = SamplingParams(
    seed=2**64 - 1,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias=((4, 2.0), (7, -1.5)),
    logprobs=5,
    logprob_ids=(9, 10),
    max_tokens=1,
    drawn=2,
    min_tokens=3,
    stop_ids=frozenset({7, 8}),
    allowed_ids=(1, 2, 3),
    bad_words=((5,), (5, 6)),
    constraint=Constraint("regex", "[0-9]+"),
    thinking=Thinking((20,), (21, 22), 64),
)
"""No field has its default, but for what concerns the prompt alone."""

OF_THE_PROMPT = {"prompt_logprobs"}
"""Such a request is never computed elsewhere."""


def over_the_wire(sampling: SamplingParams) -> SamplingParams:
    ask = Prefill(
        room="r", epoch=1, tokens=[1], start_block=0, parent=b"", sampling=to_wire(sampling)
    )  # fmt: skip
    arrived = messages.decode(messages.encode(ask)[messages.LENGTH_BYTES :])
    assert isinstance(arrived, Prefill)
    return sampling_params(arrived.sampling)


def test_the_example_leaves_no_field_out() -> None:
    usual = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in OF_THE_PROMPT]
    same = [name for name in names if getattr(EVERYTHING, name) == getattr(usual, name)]
    assert same == []


def test_everything_that_decides_the_first_token_comes_over() -> None:
    assert over_the_wire(EVERYTHING) == EVERYTHING


def test_what_is_not_asked_for_does_not_come_into_being() -> None:
    assert over_the_wire(SamplingParams(seed=1)) == SamplingParams(seed=1, max_tokens=1)


@pytest.mark.parametrize(("wanted", "told"), [(0, 0), (1, 1), (3, 3), (500, 3)])
def test_of_a_minimum_only_whether_the_next_token_may_be_the_last_matters(wanted: int, told: int) -> None:
    sampling = dataclasses.replace(EVERYTHING, min_tokens=wanted, max_tokens=1000)
    arrived = over_the_wire(sampling)
    assert (arrived.min_tokens, arrived.max_tokens) == (told, 1)
    assert arrived.stop_ids == sampling.stop_ids


def test_a_thought_without_start_or_budget_stays_one() -> None:
    thinking = Thinking((), (3,))
    assert over_the_wire(SamplingParams(seed=1, thinking=thinking)).thinking == thinking
