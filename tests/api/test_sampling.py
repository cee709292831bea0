"""Sampling parameters between workers, and their check on arrival."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton_api import limits, messages
from baton_api.messages import Prefill
from baton_api.sampling import Constraint, SamplingParams, Thinking

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
    prompt_logprobs=1,
    max_tokens=1,
    drawn=2,
    min_tokens=3,
    stop_ids=frozenset({7, 8}),
    allowed_ids=(1, 2, 3),
    bad_words=((5,), (5, 6)),
    constraint=Constraint("regex", "[0-9]+"),
    thinking=Thinking((20,), (21, 22), 64),
)
"""No field has its default."""


def transferred(sampling: SamplingParams) -> SamplingParams:
    prefill = Prefill(
        session="r", epoch=1, tokens=[1], start_block=0, parent=b"", sampling=sampling.first_token()
    )  # fmt: skip
    received = messages.decode(messages.encode(prefill)[messages.LENGTH_BYTES :])
    assert isinstance(received, Prefill)
    return received.sampling


def test_example_sets_every_field() -> None:
    defaults = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert [name for name in names if getattr(EVERYTHING, name) == getattr(defaults, name)] == []


def test_sampling_fields_are_all_transferred() -> None:
    assert transferred(EVERYTHING) == EVERYTHING


def test_defaults_are_transferred_as_defaults() -> None:
    assert transferred(SamplingParams(seed=1)) == SamplingParams(seed=1, max_tokens=1)


@pytest.mark.parametrize(("minimum", "transferred_minimum"), [(0, 0), (1, 1), (3, 3), (500, 3)])
def test_first_token_needs_no_more_than_its_own_minimum(minimum: int, transferred_minimum: int) -> None:
    sampling = dataclasses.replace(EVERYTHING, min_tokens=minimum, max_tokens=1000)
    received = transferred(sampling)
    assert (received.min_tokens, received.max_tokens) == (transferred_minimum, 1)
    assert received.stop_ids == sampling.stop_ids


def test_reasoning_without_start_or_budget_is_transferred() -> None:
    thinking = Thinking((), (3,))
    assert transferred(SamplingParams(seed=1, thinking=thinking)).thinking == thinking


def test_valid_parameters_have_no_problem() -> None:
    assert EVERYTHING.problem(vocabulary=23) is None
    assert SamplingParams().problem(vocabulary=1) is None


@pytest.mark.parametrize("limit", limits.SAMPLING_NUMBERS, ids=lambda limit: limit.field)
def test_sampling_numbers_are_checked_at_both_bounds(limit: limits.Limit) -> None:
    lowest = limit.least + (1e-6 if limit.open_below else 0)
    inside, outside = (lowest, limit.most), (limit.least - 0.1, limit.most + 0.1)
    for value in (*inside, *outside):
        number: dict[str, Any] = {limit.field: value}
        problem = dataclasses.replace(SamplingParams(), **number).problem(vocabulary=1)
        assert (problem is None) is (value in inside)
        assert value in inside or limit.field in str(problem)
