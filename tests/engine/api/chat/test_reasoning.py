"""Thoughts over HTTP: apart from the answer, streamed before it, counted, and bounded."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton_api.errors import UNSUPPORTED_PARAMETER, SetupError
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, TOKENIZER, USER, Api, events, make_tokenizer, open_api
from tests.engine.api.test_validation import assert_error

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort is defined %}<|user|>{{ reasoning_effort }}{{ thinking }}<|assistant|>{% endif %}"
    "{% endif %}"
)
THOUGHT, ANSWER = "Is it 4? ", "It is 4."
SCRIPT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


def thinking_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    settings = WorkerSettings(reasoning_parser="auto")
    async with open_api(tokenizer=thinking_tokenizer(), settings=settings) as api:
        api.model.script = SCRIPT
        yield api


async def chat(api: Api, **body: Any) -> httpx.Response:
    return await api.chat(max_tokens=200, **body)


def deltas(text: str) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in events(text) if chunk["choices"]]


def joined(all_of_them: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in all_of_them)


async def test_thoughts_stand_beside_the_answer_under_both_names(api: Api) -> None:
    body = (await chat(api)).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == ANSWER
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == THOUGHT.strip()
    thought = len(TOKENIZER.encode(SCRIPT.partition("</think>")[0] + "</think>"))
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    assert body["usage"]["completion_tokens"] == len(SCRIPT) + 1


async def test_reasoning_streams_before_the_answer_without_its_marks(api: Api) -> None:
    whole = (await chat(api)).json()
    options = {"include_usage": True}
    response = await chat(api, stream=True, stream_options=options)
    opening, *rest, end = deltas(response.text)
    assert opening == {"role": "assistant", "content": ""} and end == {}
    kinds = ["reasoning_content" if "reasoning_content" in delta else "content" for delta in rest]
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) == 2
    message = whole["choices"][0]["message"]
    assert joined(rest, "reasoning_content") == joined(rest, "reasoning") == message["reasoning_content"]
    assert joined(rest, "content") == message["content"]
    assert not any(re.search(r"[<>/]", json.dumps(delta)) for delta in rest)
    assert events(response.text)[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": events(response.text)[-1]["usage"]["prompt_tokens_details"]
    }


async def test_thinking_can_be_turned_off(api: Api) -> None:
    api.model.script = f"<think></think>{ANSWER}"
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ):
        body = (await chat(api, **fields)).json()
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == (ANSWER, None)
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_thoughts_may_stay_in_the_text(api: Api) -> None:
    body = (await chat(api, separate_reasoning=False)).json()
    assert body["choices"][0]["message"]["content"] == SCRIPT
    assert body["choices"][0]["message"]["reasoning_content"] is None
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    streamed = deltas((await chat(api, separate_reasoning=False, stream=True)).text)
    assert joined(streamed, "content") == SCRIPT


async def test_thoughts_may_come_at_their_end_or_not_at_all(api: Api) -> None:
    held = deltas((await chat(api, stream_reasoning=False, stream=True)).text)
    assert [delta["reasoning_content"] for delta in held if "reasoning_content" in delta] == [THOUGHT.strip()]
    assert joined(held, "content") == ANSWER
    for delta in deltas((await chat(api, include_reasoning=False, stream=True)).text):
        assert "reasoning_content" not in delta
    body = (await chat(api, include_reasoning=False)).json()
    assert body["choices"][0]["message"]["reasoning_content"] is None
    assert body["choices"][0]["message"]["content"] == ANSWER
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"])
async def test_reasoning_effort_reaches_the_template(api: Api, effort: str) -> None:
    body = (await chat(api, reasoning_effort=effort, return_token_ids=True)).json()
    prompt = TOKENIZER.decode(body["prompt_token_ids"], skip_special_tokens=False)
    passed = "max" if effort == "ultra" else effort
    assert f"<|user|>{passed}{effort != 'none'}<|assistant|>" in prompt
    assert ("<think></think>" in prompt) == (effort == "none")


async def test_reasoning_request_variables_override_effort_and_server() -> None:
    settings = WorkerSettings(
        default_chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low"}
    )
    async with open_api(tokenizer=thinking_tokenizer(), settings=settings) as api:

        async def prompt(**fields: Any) -> str:
            body = {"model": MODEL, "messages": USER} | fields
            tokens = (await api.http.post("/tokenize", json=body)).json()["tokens"]
            return TOKENIZER.decode(tokens, skip_special_tokens=False).partition("<|assistant|>")[2]

        assert await prompt() == "<think></think><|user|>lowFalse<|assistant|>"
        assert await prompt(reasoning_effort="high") == "<|user|>highTrue<|assistant|>"
        assert (
            await prompt(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
            == "<think></think><|user|>highFalse<|assistant|>"
        )


async def test_reasoning_cut_by_max_tokens_stays_reasoning(api: Api) -> None:
    body = (await api.chat(max_tokens=12)).json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "Is i")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    assert body["choices"][0]["finish_reason"] == "length"


async def test_reasoning_stop_string_ends_a_thought(api: Api) -> None:
    body = (await chat(api, stop="4?")).json()
    assert body["choices"][0]["message"]["reasoning_content"] == "Is it"
    assert body["choices"][0]["matched_stop"] == "4?"
    body = (await chat(api, stop=["</think>"])).json()
    assert body["choices"][0]["message"] | {"reasoning": None} == {
        "role": "assistant", "content": "", "refusal": None, "annotations": [],
        "reasoning_content": THOUGHT.strip(), "reasoning": None,
    }  # fmt: skip


async def test_reasoning_constraint_applies_after_the_thought(api: Api) -> None:
    body = (await chat(api, regex="yes|no", temperature=1, seed=3)).json()
    message = body["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert message["reasoning_content"] in (None, THOUGHT.strip())
    settings = WorkerSettings(reasoning_parser="deepseek-r1")
    async with open_api(tokenizer=thinking_tokenizer(), settings=settings) as forced:
        forced.model.script = SCRIPT
        message = (await chat(forced, regex="yes|no")).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"] in ("yes", "no")) == (THOUGHT.strip(), True)


async def test_reasoning_budget_ends_the_thought() -> None:
    settings = WorkerSettings(reasoning_parser="deepseek-r1")
    async with open_api(tokenizer=thinking_tokenizer(), settings=settings) as api:
        api.model.script = "so" * 100
        body = (await api.chat(max_tokens=40, thinking_token_budget=6)).json()
        message = body["choices"][0]["message"]
        assert message["reasoning_content"] == "sososo"
        assert message["content"].startswith("so")
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6 + len("</think>")
        without = (await api.chat(max_tokens=40, thinking_token_budget=-1)).json()
        assert without["choices"][0]["message"]["content"] == ""


async def test_reasoning_logprobs_cover_every_token(api: Api) -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "temperature": 0}
    whole = (await chat(api, **fields)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == f"{SCRIPT}<|end|>"
    chunks = events((await chat(api, **fields, stream=True)).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole


async def test_reasoning_each_choice_has_its_own_thought(api: Api) -> None:
    body = (await chat(api, n=3)).json()
    assert {choice["message"]["reasoning_content"] for choice in body["choices"]} == {THOUGHT.strip()}
    one = (await chat(api)).json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * one


async def test_reasoning_without_parser_is_text_and_rejects_a_budget() -> None:
    async with open_api(tokenizer=thinking_tokenizer()) as api:
        api.model.script = SCRIPT
        body = (await chat(api)).json()
        assert body["choices"][0]["message"]["content"] == SCRIPT
        assert body["choices"][0]["message"]["reasoning_content"] is None
        assert_error(
            await chat(api, thinking_token_budget=3), 400, UNSUPPORTED_PARAMETER, "thinking_token_budget"
        )


def test_stream_keeps_special_token_marks_but_not_the_end() -> None:
    tokens = TOKENIZER.encode("a<|user|>b<|system|>c<|end|>")

    def text(marks: frozenset[str] | None) -> str:
        stream = TOKENIZER.stream(True, marks)
        return "".join(map(stream.push, tokens)) + stream.flush()

    assert text(frozenset()) == "abc"
    assert text(frozenset({"<|user|>"})) == "a<|user|>bc"
    assert text(None) == "a<|user|>b<|system|>c"


async def test_reasoning_unknown_parser_fails_the_start() -> None:
    with pytest.raises(SetupError, match="reasoning-parser"):
        async with open_api(settings=WorkerSettings(reasoning_parser="wisdom")):
            pass
