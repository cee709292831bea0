"""B: chat, not streamed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from baton_api import limits
from baton_api.errors import (
    ARRAY_ABOVE_MAX_LENGTH,
    CONTEXT_LENGTH_EXCEEDED,
    DECIMAL_ABOVE_MAX_VALUE,
    DECIMAL_BELOW_MIN_VALUE,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
)
from tests.conformance.deployment import QUESTION, Deployment
from tests.conformance.expected import check_error, check_param, exactly, refusal

GREEDY: dict[str, Any] = {"temperature": 0}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_B1_the_tutorials_question_has_every_required_field(served: Deployment) -> None:
    before = time.time()
    completion = served.chat(temperature=0, max_tokens=64)
    assert completion.id.startswith("chatcmpl-")
    assert completion.object == "chat.completion" and completion.model == served.model
    assert before - 2 <= completion.created <= time.time() + 2
    choice = completion.choices[0]
    assert len(completion.choices) == 1 and choice.index == 0
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.role == "assistant" and choice.message.content
    raw = completion.model_dump()["choices"][0]
    assert "refusal" in raw["message"] and raw["message"]["refusal"] is None
    assert "logprobs" in raw and raw["logprobs"] is None
    assert "matched_stop" in raw
    usage = completion.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details and usage.completion_tokens_details
    assert isinstance(usage.prompt_tokens_details.cached_tokens, int)
    assert isinstance(usage.completion_tokens_details.reasoning_tokens, int)


def test_B2_repeated_question_has_the_same_cached_answer(served: Deployment) -> None:
    first, second = (served.chat(**GREEDY, max_tokens=64) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert cached(second) >= cached(first)
    assert cached(second) >= 16


def cached(completion: Any) -> int:
    tokens: int = completion.usage.prompt_tokens_details.cached_tokens
    return tokens


def test_B3_a_seed_fixes_what_is_sampled(served: Deployment) -> None:
    def text(seed: int) -> str | None:
        return served.chat(temperature=1, seed=seed, max_tokens=24).choices[0].message.content

    assert text(42) == text(42)
    assert len({text(seed) for seed in range(4)}) > 1


def test_B4_max_tokens_is_the_length(served: Deployment) -> None:
    completion = served.chat(max_tokens=5, extra_body={"ignore_eos": True})
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage and completion.usage.completion_tokens == 5


def test_B5_max_completion_tokens_wins_over_max_tokens(served: Deployment) -> None:
    completion = served.chat(max_tokens=9, max_completion_tokens=4, extra_body={"ignore_eos": True})
    assert completion.usage and completion.usage.completion_tokens == 4


def test_B6_a_stop_string_ends_the_text_before_itself(served: Deployment) -> None:
    completion = served.chat(stop=" STOP", extra_body=exactly("abc STOP def"), **GREEDY)
    choice = completion.choices[0]
    assert choice.message.content == "abc" and choice.finish_reason == "stop"
    assert choice.model_dump()["matched_stop"] == " STOP"


@pytest.mark.parametrize("field", ["no_stop_trim", "include_stop_str_in_output"])
def test_B7_a_stop_string_can_be_kept(served: Deployment, field: str) -> None:
    fields = {**exactly("abc STOP def"), field: True}
    choice = served.chat(stop=["never", " STOP"], extra_body=fields, **GREEDY).choices[0]
    assert choice.message.content == "abc STOP" and choice.finish_reason == "stop"


def test_B8_stops_are_bounded_and_not_empty(served: Deployment) -> None:
    """OpenAI takes four; editors send more, and vLLM and SGLang take them."""
    many = [str(number) for number in range(limits.STOPS.most + 1)]
    beyond = refusal(lambda: served.chat(stop=many), openai.BadRequestError)
    check_error(beyond, 400, "stop", ARRAY_ABOVE_MAX_LENGTH)
    assert served.chat(stop=[f"@{text}" for text in many[:-1]], max_tokens=1).choices
    check_param(refusal(lambda: served.chat(stop=[""]), openai.BadRequestError), "stop")
    assert served.chat(stop=None, max_tokens=1).choices
    assert served.chat(stop=["w", "x", "y", "z"], max_tokens=1).choices


def test_B9_stop_token_ends_the_text_inside_a_grammar(served: Deployment) -> None:
    (token,) = served.tokenize(" b")
    completion = served.chat(
        logit_bias={str(token): 100},
        extra_body={**exactly("a b c"), "stop_token_ids": [token]},
        **GREEDY,
    )
    choice = completion.choices[0]
    assert choice.message.content == "a" and choice.finish_reason == "stop"
    assert choice.model_dump()["matched_stop"] == token


def test_B10_n_choices_are_counted_together(served: Deployment) -> None:
    fields: dict[str, Any] = {"temperature": 1, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    one, three = served.chat(**fields), served.chat(n=3, **fields)
    assert sorted(choice.index for choice in three.choices) == [0, 1, 2]
    assert three.usage and one.usage
    assert three.usage.completion_tokens == 24
    assert three.usage.prompt_tokens == one.usage.prompt_tokens


def test_B11_n_greedy_choices_are_equal(served: Deployment) -> None:
    first, second = served.chat(n=2, max_tokens=12, **GREEDY).choices
    assert first.message.content == second.message.content


@pytest.mark.parametrize("n, code", [(0, INTEGER_BELOW_MIN_VALUE), (129, INTEGER_ABOVE_MAX_VALUE)])
def test_B12_n_is_from_1_to_128(served: Deployment, n: int, code: str) -> None:
    check_error(served.post_chat(n=n), 400, "n", code)


def test_B12_n_is_a_number(served: Deployment) -> None:
    check_error(served.post_chat(n="2"), 400, "n", INVALID_TYPE)


@pytest.mark.parametrize(
    "field, value, code",
    [
        ("temperature", -0.1, DECIMAL_BELOW_MIN_VALUE),
        ("temperature", 2.1, DECIMAL_ABOVE_MAX_VALUE),
        ("temperature", "hot", INVALID_TYPE),
        ("top_p", -0.1, DECIMAL_BELOW_MIN_VALUE),
        ("top_p", 1.1, DECIMAL_ABOVE_MAX_VALUE),
        ("presence_penalty", 2.1, DECIMAL_ABOVE_MAX_VALUE),
        ("frequency_penalty", -2.1, DECIMAL_BELOW_MIN_VALUE),
        ("min_p", 1.5, DECIMAL_ABOVE_MAX_VALUE),
        ("repetition_penalty", 0, None),
        ("top_k", -2, INTEGER_BELOW_MIN_VALUE),
    ],
)
def test_B13_a_parameter_out_of_range_is_named(
    served: Deployment, field: str, value: Any, code: str | None
) -> None:
    answer = served.post_chat(**{field: value})
    check_error(answer, 400, field)
    if code is not None:
        assert answer.json()["error"]["code"] == code


def test_B14_top_p_of_zero_is_greedy(served: Deployment) -> None:
    greedy = served.chat(max_tokens=12, **GREEDY).choices[0].message.content
    assert served.chat(top_p=0, temperature=1, max_tokens=12).choices[0].message.content == greedy


def test_B15_logit_bias_forces_and_bans(served: Deployment) -> None:
    (token,) = served.tokenize(" b")
    forced = served.chat(
        max_tokens=4,
        logit_bias={str(token): 100},
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **GREEDY,
    )
    assert forced.choices[0].message.content == " b" * 4
    first = served.chat(max_tokens=1, logprobs=True, **GREEDY).choices[0]
    assert first.logprobs and first.logprobs.content
    chosen = first.logprobs.content[0].token
    (banned,) = served.tokenize(chosen)
    other = served.chat(max_tokens=1, logprobs=True, logit_bias={str(banned): -100}, **GREEDY).choices[0]
    assert other.logprobs and other.logprobs.content
    assert other.logprobs.content[0].token != chosen


@pytest.mark.parametrize("bias", [{"x": 1}, {"99999999": 1}, {"5": 101}, {"5": "1"}, [5]])
def test_B15_a_logit_bias_that_cannot_be_is_refused(served: Deployment, bias: Any) -> None:
    check_param(served.post_chat(logit_bias=bias), "logit_bias")


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2}, {"presence_penalty": 2, "frequency_penalty": 1}],
    ids=["frequency", "presence and frequency"],
)
def test_B16_penalties_apply(served: Deployment, penalty: dict[str, float]) -> None:
    """A token with a high bias is the whole text, until its repetition is penalized."""
    (token,) = served.tokenize(" b")

    def repetitions(**more: Any) -> int:
        fields = {"logit_bias": {str(token): 40}, "max_tokens": 64, "ignore_eos": True, **GREEDY, **more}
        answer = served.post_chat(**fields).raise_for_status()
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content.count(" b")

    assert repetitions() == 64
    assert repetitions(**penalty) < 64


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 2}, {"presence_penalty": 2}])
def test_B16_what_was_said_before_counts(served: Deployment, penalty: dict[str, float]) -> None:
    prompt = "one two three one two three one two three one two"
    fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, **GREEDY}
    plain, penalised = (
        served.post_completion(prompt, **fields, **more).raise_for_status().json()["choices"][0]["text"]
        for more in ({}, penalty)
    )
    assert plain.count(" three") >= 3
    assert penalised.count(" three") < plain.count(" three")


def test_B17_min_tokens_holds_the_end_back(served: Deployment) -> None:
    completion = served.chat(user("Say yes."), max_tokens=30, extra_body={"min_tokens": 20}, **GREEDY)
    assert completion.usage and 20 <= completion.usage.completion_tokens <= 30
    answer = served.post_chat(min_tokens=40, max_tokens=30)
    check_error(answer, 400, ("min_tokens", "max_tokens"))


def test_B18_developer_is_rendered_as_system(served: Deployment) -> None:
    def prompt_tokens(role: str) -> int:
        messages = [{"role": role, "content": "Answer in one word."}, *user("Capital of France?")]
        usage = served.chat(messages, max_tokens=1).usage
        assert usage
        return usage.prompt_tokens

    assert prompt_tokens("developer") == prompt_tokens("system")


def test_B19_text_parts_are_the_same_as_a_string(served: Deployment) -> None:
    parts = [{"type": "text", "text": "List 3 countries"}, {"type": "text", "text": " and their capitals."}]
    whole = served.chat(user([{"type": "text", "text": QUESTION[0]["content"]}]), max_tokens=12, **GREEDY)
    plain = served.chat(max_tokens=12, **GREEDY)
    assert whole.choices[0].message.content == plain.choices[0].message.content
    assert whole.usage and plain.usage and whole.usage.prompt_tokens == plain.usage.prompt_tokens
    assert served.chat(user(parts), max_tokens=1).choices


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "a"}],
        user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]),
        [*user("a"), {"role": "tool", "content": "b"}],
        user([]),
        user(5),
        ["a"],
        "a",
        [{"content": "a"}],
        user([{"type": "text"}]),
    ],
    ids=[
        "none",
        "an unknown role",
        "an image for a text model",
        "a tool message without tool_call_id",
        "no parts",
        "content that is a number",
        "a message that is a string",
        "messages that are a string",
        "a message without a role",
        "a text part without text",
    ],
)
def test_B20_messages_that_cannot_be_are_named(served: Deployment, messages: Any) -> None:
    check_param(
        served.post("/v1/chat/completions", {"model": served.model, "messages": messages}), "messages"
    )


def test_B21_messages_are_required(served: Deployment) -> None:
    answer = served.post("/v1/chat/completions", {"model": served.model})
    check_error(answer, 400, "messages", MISSING_REQUIRED_PARAMETER)


def test_B22_tokenize_counts_what_usage_counts(served: Deployment) -> None:
    counted = served.post("/tokenize", {"model": served.model, "messages": QUESTION}).raise_for_status()
    usage = served.chat(max_tokens=1).usage
    assert usage and counted.json()["count"] == usage.prompt_tokens


def test_B23_a_prompt_over_the_context_is_refused_at_once(served: Deployment) -> None:
    answer = served.post_chat(user("capital " * (served.context + 1)))
    check_error(answer, 400, "messages", CONTEXT_LENGTH_EXCEEDED)
    assert served.chat(max_tokens=1).choices


@pytest.mark.parametrize("tokens", [lambda context: context + 1, lambda _: 0, lambda _: -1])
def test_B24_max_tokens_is_from_1_to_the_context(served: Deployment, tokens: Callable[[int], int]) -> None:
    check_error(served.post_chat(max_tokens=tokens(served.context)), 400, "max_tokens")


def test_B24_prompt_and_max_tokens_over_the_context_is_a_400(served: Deployment) -> None:
    check_error(served.post_chat(max_tokens=served.context), 400, code=CONTEXT_LENGTH_EXCEEDED)


def test_B25_a_last_message_of_the_assistant_can_be_continued(served: Deployment) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "1. Spain: Madrid\n2."}]
    fields = {"max_tokens": 12, "continue_final_message": True, "add_generation_prompt": False, **GREEDY}
    continued = served.post_chat(messages, **fields).raise_for_status().json()
    template = served.post("/tokenize", {"model": served.model, "messages": QUESTION}).json()
    more = len(served.tokenize("1. Spain: Madrid\n2."))
    assert continued["usage"]["prompt_tokens"] == template["count"] + more
    check_error(served.post_chat(messages, continue_final_message=True, add_generation_prompt=True), 400)


def test_B26_the_narrowest_sampling_is_greedy(served: Deployment) -> None:
    greedy = served.chat(max_tokens=12, **GREEDY).choices[0].message.content
    for narrow in ({"top_k": 1}, {"min_p": 1.0}):
        completion = served.chat(temperature=1, max_tokens=12, extra_body=narrow)
        assert completion.choices[0].message.content == greedy
    for wide in ({"top_k": -1}, {"top_k": 0}):
        assert served.chat(max_tokens=1, extra_body=wide).choices


@pytest.mark.parametrize("field", ["service_tier", "reasoning_effort", "verbosity"])
def test_B27_an_unknown_word_is_refused(served: Deployment, field: str) -> None:
    check_error(served.post_chat(**{field: "most"}), 400, field, INVALID_VALUE)


def test_B28_metadata_is_bounded(served: Deployment) -> None:
    assert served.chat(max_tokens=1, metadata={"a": "b"}).choices
    assert served.post_chat(max_tokens=1, metadata={"k": 1}).status_code == 200  # agents send numbers
    for wrong in ({str(key): "" for key in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}):
        check_param(served.post_chat(metadata=wrong), "metadata")


def test_B29_a_template_in_a_request_is_refused(served: Deployment) -> None:
    template = "{{ messages }}"
    check_error(served.post_chat(chat_template=template), 400)
    check_param(served.post_chat(chat_template_kwargs={"chat_template": template}), "chat_template_kwargs")


def test_B30_token_ids_come_back_when_asked_for(served: Deployment) -> None:
    answer = served.post_chat(max_tokens=6, ignore_eos=True, return_token_ids=True, **GREEDY).json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert len(choice["token_ids"]) == usage["completion_tokens"] == 6
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    assert len(prompt) == usage["prompt_tokens"]
    text = served.post("/detokenize", {"model": served.model, "tokens": choice["token_ids"]}).json()["text"]
    assert text == choice["message"]["content"]


def test_B31_bad_words_and_allowed_tokens_bound_what_is_said(served: Deployment) -> None:
    allowed = [*served.tokenize("a"), *served.tokenize("b")]
    fields = {"max_tokens": 8, "ignore_eos": True, "allowed_token_ids": allowed, "temperature": 1}
    content = served.post_chat(**fields).raise_for_status().json()["choices"][0]["message"]["content"]
    assert len(content) == 8 and set(content) <= {"a", "b"}
    free = served.chat(max_tokens=24, **GREEDY).choices[0].message.content
    assert free
    word = free.split()[1].strip(":,.")
    bounded = served.chat(max_tokens=24, extra_body={"bad_words": [word]}, **GREEDY)
    assert word not in (bounded.choices[0].message.content or "")
