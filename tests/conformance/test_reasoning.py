"""E: reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.errors import INVALID_VALUE
from tests.conformance.deployment import QUESTION, Deployment, choices_of, joined
from tests.conformance.expected import check_error, exactly
from tests.conformance.scripted import ANSWER, THOUGHT

FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
MARKS = ("<think>", "</think>")


def message_of(served: Deployment, **more: Any) -> dict[str, Any]:
    answer = served.post_chat(**FIELDS, **more)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def test_E9_a_thought_is_apart_from_the_answer(thinker: Deployment) -> None:
    completion = thinker.chat(**FIELDS, extra_body={**THINKING, "separate_reasoning": True})
    choice = completion.choices[0]
    message = choice.message.model_dump()
    assert message["reasoning_content"] == THOUGHT
    assert message["content"] == ANSWER and not any(mark in message["content"] for mark in MARKS)
    assert message["reasoning"] == message["reasoning_content"]
    assert choice.finish_reason == "stop"
    details = completion.usage and completion.usage.completion_tokens_details
    assert completion.usage and details and details.reasoning_tokens
    assert 0 < details.reasoning_tokens < completion.usage.completion_tokens
    spent = len(thinker.tokenize(THOUGHT))
    assert spent <= details.reasoning_tokens <= spent + 2  # with or without the marks


def test_E10_without_thinking_there_is_no_thought(thinker: Deployment) -> None:
    completion = thinker.chat(**FIELDS, extra_body={**NOT_THINKING, "separate_reasoning": True})
    message = completion.choices[0].message.model_dump()
    assert message.get("reasoning_content") is None
    assert message["content"] == ANSWER
    details = completion.usage and completion.usage.completion_tokens_details
    assert details and details.reasoning_tokens == 0


def test_E11_a_thought_can_be_left_in_the_content(thinker: Deployment) -> None:
    message = message_of(thinker, separate_reasoning=False, **THINKING)
    assert message["content"] == f"<think>{THOUGHT}</think>\n\n{ANSWER}"
    assert message.get("reasoning_content") is None
    events = thinker.stream_chat(separate_reasoning=False, **THINKING, **FIELDS)
    assert joined(events) == message["content"]
    assert not joined(events, key="reasoning_content")


def test_E12_a_streamed_thought_comes_first_and_whole(thinker: Deployment) -> None:
    whole = message_of(thinker, **THINKING)
    events = thinker.stream_chat(**THINKING, **FIELDS)
    assert joined(events, key="reasoning_content") == whole["reasoning_content"] == THOUGHT
    assert joined(events) == whole["content"] == ANSWER
    deltas = [choice["delta"] for choice in choices_of(events)]
    thoughts = [index for index, delta in enumerate(deltas) if delta.get("reasoning_content")]
    words = [index for index, delta in enumerate(deltas) if delta.get("content")]
    assert len(thoughts) > 1 and len(words) > 1
    assert max(thoughts) < min(words)
    texts = [(delta.get("content") or "") + (delta.get("reasoning_content") or "") for delta in deltas]
    assert not any(piece in text for text in texts for piece in ("<", "think", ">"))
    assert sum("role" in delta for delta in deltas) == 1


def test_E17_a_thought_can_be_held_until_its_end(thinker: Deployment) -> None:
    events = thinker.stream_chat(stream_reasoning=False, **THINKING, **FIELDS)
    thoughts = [
        choice["delta"]["reasoning_content"]
        for choice in choices_of(events)
        if choice["delta"].get("reasoning_content")
    ]
    assert thoughts == [THOUGHT]
    assert joined(events) == ANSWER


def test_E18_a_constraint_begins_after_the_thought(thinker: Deployment) -> None:
    message = message_of(thinker, **THINKING, **exactly("42"))
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "42")
    message = message_of(thinker, **NOT_THINKING, **exactly("42"))
    assert (message.get("reasoning_content"), message["content"]) == (None, "42")


def test_E19_a_budget_ends_the_thought(thinker: Deployment) -> None:
    completion = thinker.chat(**FIELDS, extra_body={**THINKING, "thinking_token_budget": 2})
    message = completion.choices[0].message.model_dump()
    assert THOUGHT.startswith(message["reasoning_content"]) and message["reasoning_content"] != THOUGHT
    assert not any(mark in (message["content"] or "") for mark in MARKS)
    free = message_of(thinker, thinking_token_budget=-1, **THINKING)
    assert free["reasoning_content"] == THOUGHT


@pytest.mark.parametrize("effort, thinks", [("none", False), ("low", True), ("high", True)])
def test_E20_effort_switches_thinking(thinker: Deployment, effort: str, thinks: bool) -> None:
    message = message_of(thinker, reasoning_effort=effort)
    assert message.get("reasoning_content") == (THOUGHT if thinks else None)
    assert message["content"] == ANSWER


def test_E21_an_explicit_switch_wins_over_effort(thinker: Deployment) -> None:
    assert message_of(thinker, reasoning_effort="high", **NOT_THINKING).get("reasoning_content") is None


def test_E22_reasoning_can_be_left_out(thinker: Deployment) -> None:
    message = message_of(thinker, include_reasoning=False, **THINKING)
    assert message.get("reasoning_content") is None and message["content"] == ANSWER


def test_E23_a_thought_that_is_cut_is_no_answer(thinker: Deployment) -> None:
    answer = thinker.post_chat(**{**FIELDS, "max_tokens": 3}, **THINKING).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"] and not choice["message"]["content"]
    assert THOUGHT.startswith(choice["message"]["reasoning_content"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 2


def test_E24_arguments_of_templates_are_checked(thinker: Deployment) -> None:
    check_error(thinker.post_chat(chat_template_kwargs="enable_thinking"), 400, "chat_template_kwargs")
    check_error(thinker.post_chat(separate_reasoning="yes"), 400, "separate_reasoning")
    check_error(thinker.post_chat(reasoning_effort="huge"), 400, "reasoning_effort", INVALID_VALUE)


def test_E25_an_earlier_thought_may_come_back_in(thinker: Deployment) -> None:
    first = message_of(thinker, **THINKING)
    messages = [*QUESTION, first, {"role": "user", "content": "Again."}]
    answer = thinker.post_chat(messages, **FIELDS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
