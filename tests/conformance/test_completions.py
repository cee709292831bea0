"""G: completions."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.errors import CONTEXT_LENGTH_EXCEEDED, INTEGER_ABOVE_MAX_VALUE, INTEGER_BELOW_MIN_VALUE
from tests.conformance.deployment import Deployment, choices_of
from tests.conformance.expected import check_error, check_param, exactly

PROMPT = "List 3 countries and their capitals."
SEED_CALL: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "n": 1, "stop": None}


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices_of(events, index))


def test_G1_the_tutorials_completion(served: Deployment) -> None:
    completion = served.complete(PROMPT, **SEED_CALL)
    assert completion.object == "text_completion" and completion.id.startswith("cmpl-")
    assert completion.model == served.model
    choice = completion.choices[0]
    assert choice.index == 0 and choice.text
    assert "logprobs" in choice.model_fields_set and choice.logprobs is None
    assert completion.usage
    assert completion.usage.completion_tokens == 64 or choice.finish_reason == "stop"
    assert completion.usage.total_tokens == (
        completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


def test_G2_sixteen_tokens_where_nothing_is_said(served: Deployment) -> None:
    completion = served.complete(PROMPT, extra_body={"ignore_eos": True})
    assert completion.usage and completion.usage.completion_tokens == 16
    assert completion.choices[0].finish_reason == "length"


def test_G3_choices_of_several_prompts_are_in_order(served: Deployment) -> None:
    prompts = ["One", "Two words", "Three words here"]
    single = [served.complete(prompt, max_tokens=6, temperature=0) for prompt in prompts]
    completion = served.complete(prompts, n=2, max_tokens=6, temperature=0)
    assert [choice.index for choice in completion.choices] == list(range(6))
    for index, choice in enumerate(completion.choices):
        assert choice.text == single[index // 2].choices[0].text
    assert completion.usage
    assert completion.usage.prompt_tokens == sum(
        answer.usage.prompt_tokens for answer in single if answer.usage
    )
    assert completion.usage.completion_tokens == 2 * sum(
        answer.usage.completion_tokens for answer in single if answer.usage
    )


def test_G4_token_ids_are_as_good_as_text(served: Deployment) -> None:
    tokens = served.post("/tokenize", {"model": served.model, "prompt": PROMPT}).json()["tokens"]
    text = served.complete(PROMPT, **SEED_CALL).choices[0].text
    assert served.complete(tokens, **SEED_CALL).choices[0].text == text
    both = served.complete([tokens, tokens], **SEED_CALL).choices
    assert [choice.text for choice in both] == [text, text]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [""],
        [[]],
        [-1],
        [10**9],
        [1.5],
        {"text": "a"},
        5,
        [True],
        [[1], [-1]],
        [[[1]]],
    ],
    ids=str,
)
def test_G5_prompts_that_cannot_be_are_named(served: Deployment, prompt: Any) -> None:
    check_param(served.post_completion(prompt, max_tokens=1), "prompt")


def test_G5_the_prompt_is_within_the_context(served: Deployment) -> None:
    answer = served.post_completion([5] * (served.context + 1), max_tokens=1)
    check_error(answer, 400, "prompt", CONTEXT_LENGTH_EXCEEDED)
    check_error(
        served.post_completion([5] * (served.context - 2), max_tokens=16), 400, code=CONTEXT_LENGTH_EXCEEDED
    )


@pytest.mark.parametrize("n", [1, 2])
def test_G6_an_echo_begins_with_the_prompt(served: Deployment, n: int) -> None:
    fields: dict[str, Any] = {"echo": True, "max_tokens": 8, "temperature": 0, "n": n}
    plain = served.complete(PROMPT, max_tokens=8, temperature=0).choices[0].text
    completion = served.complete(PROMPT, **fields)
    assert [choice.text for choice in completion.choices] == [PROMPT + plain] * n
    events = served.stream_completion(PROMPT, **fields)
    for index in range(n):
        first = next(iter(choices_of(events, index)))
        assert first["text"].startswith(PROMPT)
        assert text_of(events, index) == PROMPT + plain


def test_G6_an_echo_of_token_ids_is_their_text(served: Deployment) -> None:
    completion = served.complete(served.tokenize(PROMPT), echo=True, max_tokens=1, temperature=0)
    assert completion.choices[0].text.startswith(PROMPT)


def test_G7_no_tokens_may_be_asked_for(served: Deployment) -> None:
    echoed = served.complete(PROMPT, echo=True, max_tokens=0)
    assert echoed.choices[0].text == PROMPT and echoed.choices[0].finish_reason == "length"
    assert echoed.usage and echoed.usage.completion_tokens == 0
    assert served.complete(PROMPT, max_tokens=0).choices[0].text == ""
    check_error(served.post_completion(PROMPT, max_tokens=-1), 400, "max_tokens", INTEGER_BELOW_MIN_VALUE)


def test_G8_a_suffix_is_refused(served: Deployment) -> None:
    check_error(served.post_completion(PROMPT, suffix="the end"), 400, "suffix")


def test_G9_best_of_gives_the_most_likely_first(served: Deployment) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 8, "logprobs": 0}
    every = served.complete(PROMPT, n=4, **fields)
    best = served.complete(PROMPT, n=2, best_of=4, **fields)

    def mean(choice: Any) -> float:
        logprobs: list[float] = choice.logprobs.token_logprobs
        return sum(logprobs) / len(logprobs)

    expected = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage and every.usage
    assert best.usage.completion_tokens == every.usage.completion_tokens
    check_error(served.post_completion(PROMPT, n=3, best_of=2), 400, "best_of")
    check_error(served.post_completion(PROMPT, best_of=2, stream=True), 400, "best_of")
    check_error(served.post_completion(PROMPT, best_of=21), 400, "best_of", INTEGER_ABOVE_MAX_VALUE)


def test_G10_a_stream_adds_up_to_the_whole_text(served: Deployment) -> None:
    whole = served.complete(PROMPT, **SEED_CALL)
    events = served.stream_completion(PROMPT, stream_options={"include_usage": True}, **SEED_CALL)
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1 and events[0]["id"].startswith("cmpl-")
    assert text_of(events) == whole.choices[0].text
    ends = [choice["finish_reason"] for choice in choices_of(events) if choice["finish_reason"]]
    assert ends == [whole.choices[0].finish_reason]
    assert events[-1]["choices"] == []
    assert whole.usage and events[-1]["usage"]["total_tokens"] == whole.usage.total_tokens
    assert all(event["usage"] is None for event in events[:-1])


def test_G11_the_sampled_call_of_the_tutorials(served: Deployment) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.7,
        "max_tokens": 150,
        "top_p": 0.9,
        "stop": ["\n\n", "THE END"],
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "n": 1,
        "seed": 123,
    }
    first, second = (
        served.complete("Write a short story about a space explorer.", **fields) for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert "\n\n" not in first.choices[0].text


def test_G12_a_stop_string_is_named_and_left_out(served: Deployment) -> None:
    answer = served.post_completion(PROMPT, stop=["\n\n", " STOP"], temperature=0, **exactly("abc STOP def"))
    choice = answer.raise_for_status().json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("abc", "stop", " STOP")


def test_G13_no_template_is_applied(served: Deployment) -> None:
    completion = served.complete(PROMPT, max_tokens=1)
    assert completion.usage and completion.usage.prompt_tokens <= len(served.tokenize(PROMPT)) + 1


def test_G14_many_prompts_stream_side_by_side(served: Deployment) -> None:
    prompts = ["alpha", "beta", "gamma"]
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = served.post_completion(prompts, **fields).raise_for_status().json()
    events = served.stream_completion(prompts, stream_options={"include_usage": True}, **fields)
    assert [text_of(events, index) for index in range(3)] == [choice["text"] for choice in whole["choices"]]
    assert events[-1]["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize(
    "field, value",
    [("logprobs", -1), ("logprobs", True), ("echo", "yes"), ("n", 0), ("best_of", -1), ("stop", 5)],
)
def test_G15_a_parameter_that_cannot_be_is_named(served: Deployment, field: str, value: Any) -> None:
    check_error(served.post_completion(PROMPT, **{field: value}), 400, field)
